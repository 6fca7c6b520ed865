"""The forms of the KV cache, one module each; `base.KvStore` is what they share.

`opening` chooses one. Knows no tokens and no scores: what is copied or bound are positions of slots.
"""

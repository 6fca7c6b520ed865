"""The engine: tokens in, log-probabilities and tokens out, on one opened model.

`opening.open_engine` makes an `Engine`; `requests` and `step` are what everybody reads first. Other floors import from
`requests`, `engine`, `opening` and `reference`. Knows no text, no tokenizer and no evaluation framework.
"""

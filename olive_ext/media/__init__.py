"""Pictures, from what a user gives to what an encoder takes; the doors to PIL and to transformers' processors.

Knows no prompt, no tokenizer and no session.
"""

from olive_ext.media.processor import MediaProcessor

__all__ = ["MediaProcessor"]

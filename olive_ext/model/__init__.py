"""What is on disk and on this machine, as one `ResolvedModel`. Knows no engine and no tokenizer's class."""

from olive_ext.model.resolve import ResolvedModel, resolve

__all__ = ["ResolvedModel", "resolve"]

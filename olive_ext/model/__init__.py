"""What is on disk and on this machine: a model's files, providers and interface, and every decision that opening it
takes.

`resolve` gives all of it as one `ResolvedModel`. Knows no engine, no tokenizer's class and no Olive beyond the
model_config.json that it leaves in a folder.
"""

from olive_ext.model.resolve import ResolvedModel, resolve

__all__ = ["ResolvedModel", "resolve"]

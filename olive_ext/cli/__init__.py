"""The command `olive-ext`."""

from olive_ext.cli.main import main

__all__ = ["main"]

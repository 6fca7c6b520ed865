"""The command `olive-ext`: options, parser, commands, exit status. `main` is the only name to import from here.

Knows configurations and where each command's work is done; knows no model and no framework.
"""

from olive_ext.cli.main import main

__all__ = ["main"]

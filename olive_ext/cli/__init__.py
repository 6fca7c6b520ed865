"""The command `olive-ext`: options, parser, commands, exit status. `main` is the only name to import from here.

Knows configurations and where each command's work is done; knows no model and no framework.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from olive_ext.cli.commands import Function

__all__ = ["main"]


def main(argv: Sequence[str] | None = None, commands: Mapping[str, Function] | None = None) -> int:
    """Runs `olive-ext` and returns its exit status: 0; 1 for a loss, a bound that is not kept, requests without an
    answer and any other failure; 2 for a user's error; 3 for a comparison that decides nothing; 130 after Ctrl-C; 143
    after SIGTERM.

    With OLIVE_EXT_DEBUG=1 a traceback precedes the error's line. `commands` replace the functions of commands.
    """
    try:
        from olive_ext.cli.exit_status import run
    except KeyboardInterrupt:  # all that takes longer to import is imported after `run`
        import sys

        sys.stderr.write("olive-ext: interrupted\n")
        return 130
    return run(argv, commands)

"""A process that has imported what runs of it would import for seconds, and forks for each of them.

`python -m tests.export_maker MODULE ...` imports the modules that are installed, reads a line of JSON for each run
({"arguments": ["-m", MODULE, ...], "log": FILE}, with a file for "errors" alone, a "folder" and an "environment" where
these are not its own) and answers with a line that is its exit status. Arguments begin with -m MODULE, -c TEXT or FILE.
It ends with its input.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import subprocess
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any


def forked(given: dict[str, Any]) -> int:
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for stream, name in ((1, given["log"]), (2, given.get("errors"))):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) if name else 1, stream)
    os.environ.update(given.get("environment", {}))
    os.chdir(given.get("folder", "."))
    status = _run(*given["arguments"])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _run(first: str, *rest: str) -> int:
    """As `python FIRST REST` would."""
    sys.argv = [first, *rest] if first not in ("-m", "-c") else [first, *rest[1:]]
    try:
        if first == "-m":
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif first == "-c":
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.path[0] = str(Path(first).parent)
            runpy.run_path(first, run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as a program of its own would end
        sys.stdout.flush()  # the error's line is the last one
        traceback.print_exc()
        return 1
    return 0


def started(given: dict[str, Any]) -> int:
    """Where a process cannot be forked."""
    environment = {**os.environ, **given.get("environment", {})}
    with Path(given["log"]).open("wb") as log:
        command = [sys.executable, *given["arguments"]]
        place = given.get("folder")
        return subprocess.run(command, stdout=log, stderr=log, env=environment, cwd=place, check=False).returncode


if __name__ == "__main__":
    for name in sys.argv[1:]:
        with suppress(Exception):  # not installed on this path, or not for its release of transformers
            importlib.import_module(name)
    for line in sys.stdin:
        sys.stdout.write(f"{(forked if hasattr(os, 'fork') else started)(json.loads(line))}\n")
        sys.stdout.flush()

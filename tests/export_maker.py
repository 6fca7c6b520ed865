"""A process that has imported what runs of it would import for seconds, and forks for each of them.

`python -m tests.export_maker MODULE ...` imports the modules that are installed, reads a line of JSON for each run
({"arguments": ["-m", MODULE, ...], "log": FILE}, with a file for "errors" alone, a "folder" and an "environment" where
these are not its own) and answers with a line that is its exit status. Arguments begin with -m MODULE, -c TEXT or FILE.
Runs with a "path", folders before what is installed, and "imported" modules are forks of a fork that has imported these
from there. It ends with its input.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO


@functools.cache
def branch(path: tuple[str, ...], imported: tuple[str, ...]) -> tuple[TextIO, TextIO]:
    """Requests to a fork of this process with these folders on its path and these modules imported, and its answers."""
    (read_requests, write_requests), (read_answers, write_answers) = os.pipe(), os.pipe()
    if not os.fork():
        os.close(write_requests)  # else it would wait for its own requests
        sys.path[:0] = path
        os.environ["PYTHONPATH"] = os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")])
        import_installed(imported)
        serve(os.fdopen(read_requests), os.fdopen(write_answers, "w"))
        os._exit(0)
    os.close(read_requests)
    os.close(write_answers)
    return os.fdopen(write_requests, "w"), os.fdopen(read_answers)


def serve(requests: TextIO, answers: TextIO) -> None:
    """Runs what each line asks for."""
    run = forked if hasattr(os, "fork") else started
    for line in requests:
        given = json.loads(line)
        if "imported" in given and run is forked:
            to_branch, from_branch = branch(tuple(given.pop("path")), tuple(given.pop("imported")))
            print(json.dumps(given), file=to_branch, flush=True)
            status = int(from_branch.readline())
        else:
            status = run(given)
        print(status, file=answers, flush=True)


def import_installed(names: Iterable[str]) -> None:
    for name in names:
        with suppress(Exception):  # not installed on this path, or not for its release of transformers
            importlib.import_module(name)


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
    environment["PYTHONPATH"] = os.pathsep.join([*given.get("path", ()), environment.get("PYTHONPATH", "")])
    with Path(given["log"]).open("wb") as log:
        command = [sys.executable, *given["arguments"]]
        place = given.get("folder")
        return subprocess.run(command, stdout=log, stderr=log, env=environment, cwd=place, check=False).returncode


if __name__ == "__main__":
    import_installed(sys.argv[1:])
    serve(sys.stdin, sys.stdout)

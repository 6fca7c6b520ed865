"""A process that runs modules, each in a fork of one that has imported what exporters import, for seconds.

`python -m tests.export_maker` reads a line of JSON for each run ({"path": [FOLDER, ...], "arguments": ["-m", MODULE,
...], "log": FILE}, with a file for "errors" alone, a "folder" and an "environment" where these are not its own) and
answers with a line that is its exit status. It ends with its input. The folders of a path come before what is
installed: for each path there is a fork in which that has been imported, which runs fork off again.
`python -m tests.export_maker MODULE ...` imports these instead; arguments may then begin with -c TEXT or FILE, too.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, ClassVar

OF_ALL = ("torch", "onnxruntime")
"""No path has other releases of these."""
INSTALLED = ("transformers.models.llama.modeling_llama",)  # and with it what every model of transformers imports
OF_PATH = ("tests.exports", *INSTALLED, "onnxruntime_genai.models.builders", "mobius")

Answer = Callable[[dict[str, Any]], int]
"""The exit status of a run that is asked for."""


class Branch:
    """A fork of this process that answers with `answer`, once it has begun with `begin`."""

    open: ClassVar[list[IO[str]]] = []
    """This process's ends of all branches: one that kept another's would keep it from its end."""

    def __init__(self, begin: Callable[[], Answer]) -> None:
        theirs, self._requests = _pipe()
        self._statuses, statuses = _pipe()
        if os.fork():
            theirs.close()
            statuses.close()
            Branch.open += [self._requests, self._statuses]
            return
        for end in (*Branch.open, self._requests, self._statuses):
            end.close()
        Branch.open = []
        try:
            serve(begin(), theirs, statuses)
        except BaseException:  # noqa: BLE001 - what is below the fork is the other process's
            traceback.print_exc()
        os._exit(0)

    def run(self, given: dict[str, Any]) -> int:
        self._requests.write(f"{json.dumps(given)}\n")
        self._requests.flush()
        return int(self._statuses.readline())


def _pipe() -> tuple[IO[str], IO[str]]:
    read, write = os.pipe()
    return os.fdopen(read), os.fdopen(write, "w")


def serve(answer: Answer, requests: Iterable[str], statuses: IO[str]) -> None:
    for line in requests:
        statuses.write(f"{answer(json.loads(line))}\n")
        statuses.flush()


def _import(names: Iterable[str]) -> None:
    for name in names:
        with suppress(Exception):  # not installed on this path, or not for this release of transformers
            importlib.import_module(name)


def root() -> Answer:
    """Has what all paths share; paths with a transformers of their own branch off here."""
    _import(OF_ALL)
    branches: dict[tuple[str, ...], Branch] = {}
    installed = Branch(trunk)

    def answer(given: dict[str, Any]) -> int:
        if not _has_transformers(given["path"]):
            return installed.run(given)
        return _of_path(branches, given)

    return answer


def trunk() -> Answer:
    """Has the installed transformers, too."""
    _import(INSTALLED)
    branches: dict[tuple[str, ...], Branch] = {}
    return lambda given: _of_path(branches, given)


def _has_transformers(path: list[str]) -> bool:
    return any((Path(folder) / "transformers").is_dir() for folder in path)


def _of_path(branches: dict[tuple[str, ...], Branch], given: dict[str, Any]) -> int:
    path = tuple(given["path"])
    if path not in branches:
        branches[path] = Branch(lambda: _with_path(path))
    return branches[path].run(given)


def _with_path(path: tuple[str, ...]) -> Answer:
    own = {entry.name.partition(".")[0] for folder in path for entry in Path(folder).iterdir()}
    assert not own & sys.modules.keys(), "imported already, as installed"
    sys.path[:0] = path
    os.environ["PYTHONPATH"] = os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")])
    _import(OF_PATH)
    return forked


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
    path = os.pathsep.join([*given["path"], os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, *given["arguments"]]
    environment = {**os.environ, **given.get("environment", {}), "PYTHONPATH": path}
    with Path(given["log"]).open("wb") as log:
        place = given.get("folder")
        return subprocess.run(command, stdout=log, stderr=log, env=environment, cwd=place, check=False).returncode


def imported(names: list[str]) -> Answer:
    """Has these, each of which is installed."""
    for name in names:
        importlib.import_module(name)
    return forked


if __name__ == "__main__" and sys.argv[1:]:
    serve(imported(sys.argv[1:]), sys.stdin, sys.stdout)
elif __name__ == "__main__":
    serve(root() if hasattr(os, "fork") else started, sys.stdin, sys.stdout)

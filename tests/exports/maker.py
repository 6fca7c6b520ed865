"""A process that runs modules, each in a fork of itself, so that what exporters import, for seconds, is imported once.

`python -m tests.exports.maker` reads a line of JSON for each run ({"arguments": ["-m", MODULE, ...], "log": FILE}) and
answers with a line that is its exit status. It ends with its input.
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
from typing import IO

IMPORTED = (
    "onnxruntime",
    "transformers.models.llama.modeling_llama",  # and with it what every model of transformers imports
    "onnxruntime_genai.models.builders",
    "mobius",
)


def _run(module: str, arguments: list[str]) -> int:
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as a program of its own would end
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    for name in IMPORTED:
        with suppress(Exception):  # not installed on this path, or not for this release of transformers
            importlib.import_module(name)
    for line in sys.stdin:
        given = json.loads(line)
        with open(given["log"], "wb") as log:  # noqa: PTH123 - a descriptor for the fork
            status = _forked(given["arguments"], log.fileno()) if hasattr(os, "fork") else _started(given, log)
        sys.stdout.write(f"{status}\n")
        sys.stdout.flush()


def _forked(arguments: list[str], log: int) -> int:
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.dup2(log, 1)
    os.dup2(log, 2)
    _, module, *rest = arguments
    status = _run(module, rest)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _started(given: dict[str, list[str]], log: IO[bytes]) -> int:
    """Where a process cannot be forked."""
    return subprocess.run([sys.executable, *given["arguments"]], stdout=log, stderr=log, check=False).returncode


if __name__ == "__main__":
    main()

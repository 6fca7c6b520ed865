"""Our types in the processes of a PythonEnvironment system, which know Olive's own passes and nothing of the workflow.

In the workflow's process, hooks pass on what is known of the run, and make this file run in place of Olive's script for
passes: it registers our types and then runs that script. The environment needs this package, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from olive_ext.errors import RunError
from olive_ext.report import from_json

VARIABLE = "OLIVE_EXT_RUN"
"""Names the variable that holds the run in progress, as JSON: input model, `_KNOWN`, and the file of the report."""

_KNOWN = ("answers", "current", "is_search", "made_by", "model_id", "types")


def evaluate_in_environment(system: Any, arguments: dict[str, Any], original: Callable[..., Any]) -> Any:
    """The hook of `PythonEnvironmentSystem.evaluate_model`: the process's report becomes one of the run."""
    from olive_ext.workflow.current_run import running

    run, environ = running.get(), system.environ
    if run is None:
        return original()
    with tempfile.TemporaryDirectory(prefix="olive-ext-") as folder:
        file = Path(folder, "report.json")
        known = {"input_model": run.input_model.to_json(), "report_file": str(file)}
        system.environ = {**environ, VARIABLE: json.dumps(known | {name: getattr(run, name) for name in _KNOWN})}
        try:
            return original()
        finally:
            system.environ = environ
            if file.is_file():
                run.reports.append(from_json(file.read_text(encoding="utf-8")))


def run_in_environment(system: Any, arguments: dict[str, Any], original: Callable[..., Any]) -> Any:
    """The hook of `PythonEnvironmentSystem.run_pass`. Raises `RunError` with the last line that the process wrote."""
    from olive_ext.workflow.preflight import is_our_pass

    name = type(arguments["the_pass"]).__name__
    if not is_our_pass(name):
        return original()
    own, system.pass_runner_path = system.pass_runner_path, Path(__file__)
    try:
        return evaluate_in_environment(system, arguments, original)
    except subprocess.CalledProcessError as error:
        reason = bytes(error.stderr or b"").decode(errors="replace").strip().splitlines()[-1:]
        raise RunError(f"{name} failed in the environment's process: {''.join(reason) or error}") from error
    finally:
        system.pass_runner_path = own


def restore_run() -> None:
    """Makes the workflow's run the one in progress, if this is a process of its PythonEnvironment system."""
    from olive.model import ModelConfig

    from olive_ext.workflow.current_run import Run, running

    if written := os.environ.get(VARIABLE):
        known = json.loads(written)
        running.set(Run(ModelConfig.model_validate(known.pop("input_model")), **known))


def main() -> None:
    """Olive's script for passes, with ours registered."""
    from olive.systems.python_environment import pass_runner

    import olive_ext.workflow

    olive_ext.workflow.register()
    pass_runner.main()


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose modules are part of a package
    main()

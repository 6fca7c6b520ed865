"""Runs a job of Azure ML on this machine, as Azure ML would.

Its very command line in an empty folder with the job's code, with Azure ML's environment variables, inputs that cannot
be written and paths of outputs. Builds no environment: the programs are those on PATH.

python recipes/azureml/run_local.py JOB_FOLDER --output DIR [--set NAME=VALUE ...]

`--output` holds the outputs; a second run with the same one goes on, as a job does whose output has a fixed URI.
`--set` gives a value of a sweep's search space, or an input. A sweep runs its trial once, a pipeline each step in turn.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml


def run(folder: Path, job: Mapping[str, Any], output: Path, given: Mapping[str, str]) -> int:
    """The exit status of the job, or the first of a pipeline's steps that is not 0."""
    if job["type"] == "pipeline":
        return _pipeline(folder, job, output, given)
    trial = job.get("trial", job)
    names = {f"search_space.{name}": str(value) for name, value in given.items()}
    outputs = {name: output / name for name in job.get("outputs") or {}}
    with tempfile.TemporaryDirectory(prefix="azureml-") as scratch:
        for name, value in (job.get("inputs") or {}).items():
            names[f"inputs.{name}"] = given.get(name) or _mounted(folder, name, value, Path(scratch))
        for name, path in outputs.items():
            path.mkdir(parents=True, exist_ok=True)
            names[f"outputs.{name}"] = str(path.resolve())
        code = Path(scratch, "wd")
        shutil.copytree(folder / trial["code"], code) if "code" in trial else code.mkdir()
        azure = {
            "AZUREML_RUN_ID": f"local-{Path(scratch).name}",
            "AZUREML_EXPERIMENT_NAME": str(job.get("experiment_name", "local")),
        }
        environment = {**os.environ, **azure, **(trial.get("environment_variables") or {})}
        return subprocess.run(["bash", "-c", _bound(trial["command"], names)], cwd=code, env=environment).returncode


def _pipeline(folder: Path, job: Mapping[str, Any], output: Path, given: Mapping[str, str]) -> int:
    known = {f"parent.inputs.{name}": str(folder / value["path"]) for name, value in (job.get("inputs") or {}).items()}
    for step, keys in job["jobs"].items():
        inputs = {
            name: _bound(value["path"] if isinstance(value, Mapping) else str(value), known)
            for name, value in (keys.get("inputs") or {}).items()
        }
        if status := run(folder, {"type": "command", **keys}, output / step, {**given, **inputs}):
            print(f"the step '{step}' ended with {status}", file=sys.stderr)
            return status
        known |= {f"parent.jobs.{step}.outputs.{name}": str(output / step / name) for name in keys.get("outputs") or {}}
    return 0


def _mounted(folder: Path, name: str, value: Any, scratch: Path) -> str:
    """A copy that cannot be written, as a mount."""
    if not isinstance(value, Mapping) or "path" not in value:
        return str(value["default"] if isinstance(value, Mapping) else value)
    source, target = folder / value["path"], scratch / "mounts" / name / Path(value["path"]).name
    target.parent.mkdir(parents=True)
    shutil.copytree(source, target) if source.is_dir() else shutil.copyfile(source, target)
    for path in [target, *target.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    return str(target)


def _bound(text: str, names: Mapping[str, str]) -> str:
    return re.sub(r"\$\{\{\s*([\w.-]+)\s*\}\}", lambda found: names[found[1]], text)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--file", default="job.yml")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    arguments = parser.parse_args(argv)
    job = yaml.safe_load((arguments.folder / arguments.file).read_text(encoding="utf-8"))
    given = dict(item.split("=", 1) for item in arguments.set)
    return run(arguments.folder, job, arguments.output, given)


if __name__ == "__main__":
    sys.exit(main())

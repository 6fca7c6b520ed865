"""Runs a job of Azure ML on this machine, as Azure ML would.

Its very command line in an empty folder with the job's code, with Azure ML's environment variables, inputs that cannot
be written and paths of outputs. Builds no environment: the programs are those on PATH.

python recipes/azureml/run_local.py JOB_FOLDER --output DIR [--set NAME=VALUE ...]

`--output` holds the outputs; a second run with the same one goes on, as a job does whose output has a fixed URI.
The nodes of a job on several are processes side by side, each with its own mounts and its own copy of the code.
They have a token of their own in common, as is given when such a job is submitted.
`--set` gives a value of a sweep's search space, or an input. A sweep runs its trial once, a pipeline each step in turn.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import yaml


def run(folder: Path, job: Mapping[str, Any], output: Path, given: Mapping[str, str]) -> int:
    """The first exit status that is not 0, of the job's nodes or of a pipeline's steps. Where one node fails the others
    are ended, as Azure ML does."""
    if job["type"] == "pipeline":
        return _pipeline(folder, job, output, given)
    count, port = int((job.get("resources") or {}).get("instance_count", 1)), _free_port()
    with tempfile.TemporaryDirectory(prefix="azureml-") as scratch:
        nodes, token = [], {"RAY_AUTH_TOKEN": secrets.token_hex(32)} if count > 1 else {}
        for rank in range(count):
            place = Path(scratch, str(rank))
            place.mkdir()
            azure = {**_azure(job, Path(scratch).name, rank, count, port), **token}
            nodes.append(_node(folder, job, output, given, place, azure))
        try:
            return _first_failure(nodes)
        finally:
            for node in nodes:
                _kill(node)


def _first_failure(nodes: Sequence[subprocess.Popen[bytes]]) -> int:
    while True:
        statuses = [node.poll() for node in nodes]
        failed = [status for status in statuses if status]
        if failed or None not in statuses:
            return failed[0] if failed else 0
        time.sleep(0.2)


def _kill(node: subprocess.Popen[bytes]) -> None:
    """With all that it has started, as a node's container does."""
    with suppress(psutil.NoSuchProcess):
        for process in [*psutil.Process(node.pid).children(recursive=True), psutil.Process(node.pid)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
    node.wait()


def _node(
    folder: Path,
    job: Mapping[str, Any],
    output: Path,
    given: Mapping[str, str],
    scratch: Path,
    azure: Mapping[str, str],
) -> subprocess.Popen[bytes]:
    """The job's command on one node, with its own mounts and its own copy of the code."""
    trial = job.get("trial", job)
    names = {f"search_space.{name}": str(value) for name, value in given.items()}
    outputs = {name: output / name for name in job.get("outputs") or {}}
    for name, value in (job.get("inputs") or {}).items():
        names[f"inputs.{name}"] = given.get(name) or _mounted(folder, name, value, scratch)
    for name, path in outputs.items():
        path.mkdir(parents=True, exist_ok=True)
        names[f"outputs.{name}"] = str(path.resolve())
    code = scratch / "wd"
    shutil.copytree(folder / trial["code"], code) if "code" in trial else code.mkdir()
    environment = {**os.environ, **azure, **(trial.get("environment_variables") or {})}
    return subprocess.Popen(["bash", "-c", _bound(trial["command"], names)], cwd=code, env=environment)


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


def _azure(job: Mapping[str, Any], name: str, rank: int, count: int, port: int) -> dict[str, str]:
    """What Azure ML sets for a node of a job; to a "pytorch" distribution of one process a node these ranks belong."""
    return {
        "AZUREML_RUN_ID": f"local-{name}",
        "AZUREML_EXPERIMENT_NAME": str(job.get("experiment_name", "local")),
        "AZ_BATCH_NODE_LIST": ";".join(["127.0.0.1"] * count),
        "AZUREML_NODE_COUNT": str(count),
        "NODE_RANK": str(rank),
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


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

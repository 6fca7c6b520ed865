"""What is wrong with the folder of an Azure ML job, beyond what Azure's own validation finds.

Names in `${{...}}` that are bound to nothing, files that are not there, keys of an environment that mean nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from olive_ext.config.yaml_files import yaml_bytes

_NAME = re.compile(r"\$\{\{\s*([\w.-]+)\s*\}\}")
_REMOTE = ("azureml:", "http:", "https:", "wasbs:", "abfss:", "adl:", "runs:")
_ENVIRONMENT = {"$schema", "name", "version", "image", "conda_file", "build", "description", "tags", "os_type", "path"}
_BUILD = {"path", "dockerfile_path"}
_CONDA = {"name", "channels", "dependencies", "variables", "prefix"}


def faults(folder: str | Path, file: str = "job.yml") -> Iterator[str]:
    """A sentence for each fault of the job that `file` in `folder` describes: a command, a sweep or a pipeline."""
    import yaml

    folder = Path(folder)
    try:
        job = yaml.safe_load(yaml_bytes(folder / file))
    except (OSError, ValueError, yaml.YAMLError) as error:
        yield f"{file}: {' '.join(str(error).split())}"
        return
    yield from _faults(folder, file, job, {})


def _faults(folder: Path, where: str, job: Mapping[str, Any], parents: Mapping[str, Any]) -> Iterator[str]:
    bound = {f"{kind}.{name}" for kind in ("inputs", "outputs", "search_space") for name in job.get(kind) or {}}
    steps = job.get("jobs") or {}
    above = {f"parent.{name}" for name in bound} | {
        f"parent.jobs.{step}.outputs.{name}" for step, keys in steps.items() for name in keys.get("outputs") or {}
    }
    own = {key: value for key, value in job.items() if key != "jobs"}
    for name in sorted(set(_NAME.findall(str(own))) - bound - set(parents)):
        yield f"{where}: '${{{{{name}}}}}' is bound to nothing"
    yield from _files(folder, where, job)
    trial = job.get("trial")
    if isinstance(trial, Mapping):
        yield from _files(folder, f"{where}, trial", trial)
    for step, keys in steps.items():
        yield from _faults(folder, f"{where}, {step}", keys, dict.fromkeys(above))


def _files(folder: Path, where: str, job: Mapping[str, Any]) -> Iterator[str]:
    """Of the inputs, the code and the environment of one command."""
    for name, value in (job.get("inputs") or {}).items():
        path = value.get("path") if isinstance(value, Mapping) else None
        if (
            isinstance(path, str)
            and "${{" not in path
            and not path.startswith(_REMOTE)
            and not (folder / path).exists()
        ):
            yield f"{where}: the input '{name}' is not there: {path}"
    code = job.get("code")
    if isinstance(code, str) and not code.startswith(_REMOTE) and not (folder / code).is_dir():
        yield f"{where}: the code is not there: {code}"
    environment = job.get("environment")
    if isinstance(environment, Mapping):
        yield from _environment(folder, f"{where}, environment", environment)


def _environment(folder: Path, where: str, environment: Mapping[str, Any]) -> Iterator[str]:
    import yaml

    build = environment.get("build") or {}
    for keys, known in ((environment, _ENVIRONMENT), (build, _BUILD)):
        yield from (f"{where}: unknown key '{key}'" for key in sorted(set(keys) - known))
    if "image" not in environment and not build:
        yield f"{where}: neither an image nor a build"
    conda = environment.get("conda_file")
    if build.get("path"):
        context = folder / str(build["path"])
        if not (context / str(build.get("dockerfile_path", "Dockerfile"))).is_file():
            yield f"{where}: no Dockerfile in {build['path']}"
        conda = f"{build['path']}/conda.yml" if (context / "conda.yml").is_file() else conda
    if isinstance(conda, str):
        path = folder / conda
        if not path.is_file():
            yield f"{where}: the conda file is not there: {conda}"
            return
        try:
            conda = yaml.safe_load(yaml_bytes(path))
        except (OSError, ValueError, yaml.YAMLError) as error:
            yield f"{path.name}: {' '.join(str(error).split())}"
            return
    if isinstance(conda, Mapping):
        yield from (f"{where}: unknown key '{key}' of conda" for key in sorted(set(conda) - _CONDA))

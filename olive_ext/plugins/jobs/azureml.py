"""Writes the folder of an Azure ML job for a recipe: job.yml, code, environment, README. The recipe's paths are no
longer on this machine: what it reads becomes inputs, and what it writes goes below `out`. Azure's SDK decides whether a
job is valid, when it is submitted. Knows no Olive."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from olive_ext import __version__
from olive_ext.check import blocks, mistakes, read_recipe, refuse
from olive_ext.report.report_files import refuse_filled, whole_folder

PACKAGE = Path(__file__).resolve().parents[2]
BASE_IMAGE = "mcr.microsoft.com/azureml/openmpi4.1.0-ubuntu22.04:latest"
"""torch's and ONNX Runtime's wheels bring CUDA along: the driver is the node's."""

OUT = "out"
_WRITTEN = {"output_dir": OUT, "cache_dir": f"{OUT}/cache"}
_OURS = {"output_dir": "reports", "sample_log_dir": "samples", "records_dir": "records", "use_cache": "answers"}
"""Folders of our evaluators and passes, below `out`."""

_SCRIPTS = ("user_script", "model_script")
_PATHS = ("model_path", "include_path", "reference", "path", "tokenizer", "data_files", "script_dir")
"""Keys whose value may be a path without a slash; any other such word is left alone."""

_WITH_NEIGHBOURS = (".onnx", ".yaml", ".yml")
"""Files that name others in their folder: external data, a task's documents. Their folder is the input."""

_DOCKERFILE = f"""FROM {BASE_IMAGE}
COPY . /setup
RUN conda env create --prefix /opt/olive_ext --file /setup/conda.yml && conda clean --all --yes
ENV PATH=/opt/olive_ext/bin:$PATH
"""

_CONDA = """name: olive_ext
channels:
- conda-forge
dependencies:
- python=3.11
- pip
- pip:
  - --find-links /setup
  - --constraint /setup/constraints.txt
  - olive-ext[{runtime},azureml]=={version}
"""

_README = """# {name} on Azure ML

```sh
{submit}
```

from this folder submits it. Before that:

- **Inputs** in job.yml are paths of this machine, uploaded with the job. Name a datastore in their place
  (`azureml://datastores/NAME/paths/...`) for what is large or already there.
- **The output** goes to the workspace's default store. Give `outputs.{out}.path` a fixed URI, and a job that is
  submitted again after it was killed goes on from there: Olive's cache and the journal of answers are below it.
- **The environment** is built from `environment/` by the workspace. Where no package index has olive-ext {version},
  put its wheel there: `pip install build && python -m build --wheel --outdir environment CLONE`.

The job ends with a failure where the workflow does, and logs to the workspace's MLflow.
"""

_SUBMIT = "az ml job create --file job.yml --workspace-name WORKSPACE --resource-group GROUP"


def job_command(arguments: Namespace) -> int:
    """Writes a job's folder and says how to submit it."""
    make_azureml_job(arguments.recipe, arguments.compute, arguments.output)
    sys.stdout.write(f"cd {shlex.quote(arguments.output)} && {_SUBMIT}\n")
    wheel = f"python -m build --wheel --outdir {shlex.quote(f'{arguments.output}/environment')} ."
    sys.stdout.write(f"first, unless a package index has olive-ext {__version__}, in its clone: {wheel}\n")
    return 0


def make_azureml_job(recipe: str | Path, compute: str, output: str | Path) -> None:
    """Writes the folder `output`, all of it or nothing. Submits nothing.

    Raises `ConfigError` for what is wrong with the recipe, and where `output` is there and not an empty folder.
    """
    output, written = Path(output), read_recipe(recipe)
    refuse(mistakes(written))
    refuse_filled(output, "--output")
    moved = portable(written)
    name = Path(recipe).resolve().stem
    name = Path(recipe).resolve().parent.name if name == "recipe" else name  # "recipe" says nothing, its folder does
    recipe_text = json.dumps(moved.recipe, indent=4) + "\n"
    runtime = "gpu" if "CUDAExecutionProvider" in recipe_text else "cpu"
    texts = {
        "job.yml": _job(name, moved, compute, output.absolute()),
        "README.md": _README.format(name=name, out=OUT, version=__version__, submit=_SUBMIT),
        "code/recipe.json": recipe_text,
        "environment/conda.yml": _CONDA.format(runtime=runtime, version=__version__),
        "environment/Dockerfile": _DOCKERFILE,
    }
    with whole_folder(output) as folder:
        for path, text in texts.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
        for script, source in moved.scripts.items():
            shutil.copyfile(source, folder / "code" / script)
        constraints = next(path for path in (PACKAGE, PACKAGE.parent) if (path / "constraints.txt").is_file())
        shutil.copyfile(constraints / "constraints.txt", folder / "environment" / "constraints.txt")


def _job(name: str, moved: PortableRecipe, compute: str, output: Path) -> str:
    links = [f'ln -s "${{{{inputs.{key}}}}}" inputs/{key}' for key in moved.inputs]
    run = "olive-ext run --config recipe.json"
    job = {
        "$schema": "https://azuremlschemas.azureedge.net/latest/commandJob.schema.json",
        "type": "command",
        "display_name": name,
        "experiment_name": "olive_ext",
        "code": "code",
        "command": " && ".join(["mkdir inputs", *links, f'ln -s "${{{{outputs.{OUT}}}}}" {OUT}', run]),
        "environment": {"build": {"path": "environment"}},
        "environment_variables": {"OLIVE_DISABLE_TELEMETRY": "1"},
        "inputs": {
            key: {"type": "uri_folder" if path.is_dir() else "uri_file", "path": _relative(path, output)}
            for key, path in moved.inputs.items()
        },
        "outputs": {OUT: {"type": "uri_folder", "mode": "rw_mount"}},
        "compute": compute if compute.startswith("azureml:") else f"azureml:{compute}",
        "resources": {"instance_count": 1},
    }
    return str(yaml.safe_dump(job, sort_keys=False, allow_unicode=True, width=1 << 16))


def _relative(path: Path, folder: Path) -> str:
    """`path` as seen from the job's folder; as it is where that is on another drive."""
    try:
        return Path(os.path.relpath(path, folder)).as_posix()
    except ValueError:
        return path.as_posix()


@dataclass
class PortableRecipe:
    """The recipe as it is run in a job's working directory, with the files that have to be there."""

    recipe: dict[str, Any]
    inputs: dict[str, Path] = field(default_factory=dict)
    """Name to file or folder on this machine; in the job it is `inputs/<name>`."""

    scripts: dict[str, Path] = field(default_factory=dict)
    """Name in the job's working directory to the script on this machine."""

    def input_path(self, path: Path) -> str:
        """The path at which the job finds `path`, which becomes an input, or lies in one."""
        whole = path.parent if path.suffix.lower() in _WITH_NEIGHBOURS else path
        name = _named(self.inputs, whole, re.sub(r"\W+", "_", whole.stem).strip("_").lower() or "input")
        return f"inputs/{name}" if whole == path else f"inputs/{name}/{path.name}"


def _named(known: dict[str, Path], path: Path, stem: str, suffix: str = "") -> str:
    """The name of `path` among those that are `known`, or a new one, which nothing else there has."""
    name = next((name for name, other in known.items() if other == path), None)
    if name is None:
        names = (f"{stem}{more}{suffix}" for more in ("", *(f"_{number}" for number in range(2, len(known) + 2))))
        name = next(name for name in names if name not in known)
        known[name] = path
    return name


def portable(recipe: Mapping[str, Any]) -> PortableRecipe:
    """The recipe with paths of inputs and outputs."""
    moved = PortableRecipe({})
    moved.recipe.update(_moved(moved, "", dict(recipe)))
    engine = moved.recipe.get("engine", {})
    (engine if "output_dir" in engine else moved.recipe).update(_WRITTEN)
    for block in blocks(moved.recipe):
        if block.is_ours:
            keys: Any = block.keys.get("config" if block.is_pass else "type_args") or block.keys
            keys.update({name: f"{OUT}/{folder}" for name, folder in _OURS.items() if name in keys})
            keys.setdefault("output_dir", f"{OUT}/reports")  # the journal lies there, from which a killed job resumes
    return moved


def _moved(moved: PortableRecipe, key: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _moved(moved, str(name), item) for name, item in value.items()}
    if isinstance(value, list):
        return [_moved(moved, key, item) for item in value]
    if not isinstance(value, str) or key in _WRITTEN or not (key in (*_PATHS, *_SCRIPTS) or re.search(r"[/\\]", value)):
        return value
    path = Path(value).expanduser()
    if not value or not path.exists():
        return value
    path = path.resolve()
    return _named(moved.scripts, path, path.stem, path.suffix) if key in _SCRIPTS else moved.input_path(path)

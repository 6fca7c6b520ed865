"""Writes the folder of an Azure ML job for a recipe: job.yml, code, environment, README. Knows no Olive."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from olive_ext import __version__
from olive_ext.check import mistakes, read_recipe
from olive_ext.errors import ConfigError, OliveExtError
from olive_ext.jobs.azureml_check import faults
from olive_ext.jobs.azureml_node import TOKEN
from olive_ext.jobs.portable_recipe import OUT, PortableRecipe, portable

PACKAGE = Path(__file__).resolve().parents[1]
BASE_IMAGE = "mcr.microsoft.com/azureml/openmpi4.1.0-ubuntu22.04:latest"
"""torch's and ONNX Runtime's wheels bring CUDA along: the driver is the node's."""

_DOCKERFILE = f"""FROM {BASE_IMAGE}
COPY . /setup
RUN conda env create --prefix /opt/olive_ext --file /setup/conda.yml && conda clean --all --yes
ENV PATH=/opt/olive_ext/bin:$PATH
"""

_README = """# {name} on Azure ML

```sh
{submit} --workspace-name WORKSPACE --resource-group GROUP
```

from this folder submits it. Before that:

- **Inputs** in job.yml are paths of this machine, uploaded with the job. Name a datastore in their place
  (`azureml://datastores/NAME/paths/...`) for what is large or already there.
- **The output** goes to the workspace's default store. Give `outputs.{out}.path` a fixed URI, and a job that is
  submitted again after it was killed goes on from there: Olive's cache and the journal of answers are below it.
- **The environment** is built from `environment/` by the workspace. Where no package index has olive-ext {version},
  put its wheel there.

The job ends with a failure where the workflow does, and logs to the workspace's MLflow.
"""

_NODES = """
The first node starts a Ray cluster and runs the workflow, the others join it and leave with it. Azure's names for
the nodes are those of its "pytorch" distribution; nothing of PyTorch's is used.

- **The token** keeps all others out of the cluster, in which whoever joins can run code. It is made as the job is
  submitted and is in no file; without one the nodes refuse to start. Whoever may read the job in the workspace can read
  it there. Ray does not encrypt what nodes say to each other.
- **A node that dies** ends the job on Azure ML. Submit it again: it goes on from the output.
"""


def submit_command(num_nodes: int) -> str:
    """The command line that submits a job from its folder, with the token that its nodes have in common."""
    token = f" --set environment_variables.{TOKEN}=$(openssl rand -hex 32)"
    return f"az ml job create --file job.yml{token if num_nodes > 1 else ''}"


def make_azureml_job(recipe: str | Path, compute: str, output: str | Path, num_nodes: int = 1) -> None:
    """Writes the folder `output`, all of it or nothing. Submits nothing.

    Raises `ConfigError` for what is wrong with the recipe, and where `output` is there and not an empty folder.
    """
    output, written = Path(output), read_recipe(recipe)
    if found := list(mistakes(written)):
        raise ConfigError("; ".join(found))
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"'--output' = '{output}': is there already; give a folder that is new or empty")
    made = portable(written, num_nodes)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as scratch:
        folder = Path(scratch, output.name)
        job = _job(_name(recipe), made, compute, num_nodes, output.absolute())
        _write(folder, made, job, _extras(written, num_nodes))
        if output.is_dir():
            output.rmdir()
        folder.replace(output)
    if wrong := list(faults(output)):
        raise OliveExtError(f"'{output}' has faults: {'; '.join(wrong)}")


def _job(name: str, made: PortableRecipe, compute: str, num_nodes: int, folder: Path) -> dict[str, Any]:
    """job.yml of Azure ML's command job."""
    links = [f'ln -s "${{{{inputs.{name}}}}}" inputs/{name}' for name in made.inputs]
    run = "olive-ext run --config recipe.json"
    if num_nodes > 1:
        run = f"python -m olive_ext.jobs.azureml_node {run}"
    steps = ["mkdir inputs", *links, f'ln -s "${{{{outputs.{OUT}}}}}" {OUT}', run]
    job: dict[str, Any] = {
        "$schema": "https://azuremlschemas.azureedge.net/latest/commandJob.schema.json",
        "type": "command",
        "display_name": name,
        "experiment_name": "olive_ext",
        "code": "code",
        "command": " && ".join(steps),
        "environment": {"build": {"path": "environment"}},
        "environment_variables": {"OLIVE_DISABLE_TELEMETRY": "1"},
        "inputs": {
            name: {"type": "uri_folder" if path.is_dir() else "uri_file", "path": _relative(path, folder)}
            for name, path in made.inputs.items()
        },
        "outputs": {OUT: {"type": "uri_folder", "mode": "rw_mount"}},
        "compute": compute if compute.startswith("azureml:") else f"azureml:{compute}",
        "resources": {"instance_count": num_nodes},
    }
    if num_nodes > 1:
        job["environment_variables"]["RAY_AUTH_MODE"] = "token"
        job["distribution"] = {"type": "pytorch", "process_count_per_instance": 1}
    return job


def _relative(path: Path, folder: Path) -> str:
    """`path` as seen from the job's folder; as it is where that is on another drive."""
    try:
        return Path(os.path.relpath(path, folder)).as_posix()
    except ValueError:
        return path.as_posix()


def _write(folder: Path, made: PortableRecipe, job: Mapping[str, Any], extras: str) -> None:
    import yaml

    code, environment = folder / "code", folder / "environment"
    for place in (code, environment):
        place.mkdir(parents=True)
    (code / "recipe.json").write_text(json.dumps(made.recipe, indent=4) + "\n", encoding="utf-8")
    for name, script in made.scripts.items():
        shutil.copyfile(script, code / name)
    constraints = next(path for path in (PACKAGE, PACKAGE.parent) if (path / "constraints.txt").is_file())
    shutil.copyfile(constraints / "constraints.txt", environment / "constraints.txt")
    package = f"olive-ext[{extras}]=={__version__}"
    pip = ["--find-links /setup", "--constraint /setup/constraints.txt", package]
    conda = {"name": "olive_ext", "channels": ["conda-forge"], "dependencies": ["python=3.11", "pip", {"pip": pip}]}
    for path, value in ((folder / "job.yml", job), (environment / "conda.yml", conda)):
        path.write_text(yaml.safe_dump(dict(value), sort_keys=False, width=1000), encoding="utf-8")
    (environment / "Dockerfile").write_text(_DOCKERFILE, encoding="utf-8")
    submit = submit_command(job["resources"]["instance_count"])
    text = _README.format(name=job["display_name"], out=OUT, version=__version__, submit=submit)
    if "distribution" in job:
        text += _NODES
    (folder / "README.md").write_text(text, encoding="utf-8")


def _name(recipe: str | Path) -> str:
    """What the job is called: the recipe's file, or where that says nothing its folder."""
    path = Path(recipe).resolve()
    return path.parent.name if path.stem == "recipe" else path.stem


def _extras(recipe: Mapping[str, Any], num_nodes: int) -> str:
    """The extras of this package that the recipe needs, by its systems' providers, and the nodes."""
    runtime = "gpu" if "CUDAExecutionProvider" in json.dumps(recipe) else "cpu"
    return ",".join([runtime, "azureml", *(["ray"] if num_nodes > 1 else [])])

"""Writes the folder of an Azure ML job for a recipe, from templates: job.yml, code, environment, README. Whether a job
is valid is for Azure's SDK to say, as it is submitted. Knows no Olive."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

from olive_ext import __version__
from olive_ext.check import mistakes, read_recipe
from olive_ext.errors import ConfigError
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

_CONDA = """name: olive_ext
channels:
- conda-forge
dependencies:
- python=3.11
- pip
- pip:
  - --find-links /setup
  - --constraint /setup/constraints.txt
  - olive-ext[{extras}]=={version}
"""

_JOB = """$schema: https://azuremlschemas.azureedge.net/latest/commandJob.schema.json
type: command
display_name: {name}
experiment_name: olive_ext
code: code
command: {command}
environment:
  build:
    path: environment
environment_variables:
  OLIVE_DISABLE_TELEMETRY: "1"
{variables}inputs:{inputs}
outputs:
  {out}:
    type: uri_folder
    mode: rw_mount
compute: {compute}
resources:
  instance_count: {num_nodes}
"""

_DISTRIBUTION = """distribution:
  type: pytorch
  process_count_per_instance: 1
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
    if wrong := list(mistakes(written)):
        raise ConfigError("; ".join(wrong))
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"'--output' = '{output}': is there already; give a folder that is new or empty")
    moved = portable(written, num_nodes)
    name = Path(recipe).resolve().stem
    name = Path(recipe).resolve().parent.name if name == "recipe" else name  # "recipe" says nothing, its folder does
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as scratch:
        folder = Path(scratch, output.name)
        for path, text in _texts(name, moved, compute, num_nodes, output.absolute()).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
        for script, source in moved.scripts.items():
            shutil.copyfile(source, folder / "code" / script)
        constraints = next(path for path in (PACKAGE, PACKAGE.parent) if (path / "constraints.txt").is_file())
        shutil.copyfile(constraints / "constraints.txt", folder / "environment" / "constraints.txt")
        if output.is_dir():
            output.rmdir()
        folder.replace(output)


def _texts(name: str, moved: PortableRecipe, compute: str, num_nodes: int, output: Path) -> dict[str, str]:
    """The texts of the folder's files, by their paths."""
    recipe = json.dumps(moved.recipe, indent=4) + "\n"
    runtime = "gpu" if "CUDAExecutionProvider" in recipe else "cpu"
    extras = ",".join([runtime, "azureml", *(["ray"] if num_nodes > 1 else [])])
    readme = _README.format(name=name, out=OUT, version=__version__, submit=submit_command(num_nodes))
    return {
        "job.yml": _job(name, moved, compute, num_nodes, output),
        "README.md": readme + (_NODES if num_nodes > 1 else ""),
        "code/recipe.json": recipe,
        "environment/conda.yml": _CONDA.format(extras=extras, version=__version__),
        "environment/Dockerfile": _DOCKERFILE,
    }


def _job(name: str, moved: PortableRecipe, compute: str, num_nodes: int, output: Path) -> str:
    """job.yml. Scalars of the user's are written as JSON, which YAML reads."""
    links = [f'ln -s "${{{{inputs.{key}}}}}" inputs/{key}' for key in moved.inputs]
    run = "olive-ext run --config recipe.json"
    if num_nodes > 1:
        run = f"python -m olive_ext.jobs.azureml_node {run}"
    inputs = "".join(
        f"\n  {key}:\n    type: {'uri_folder' if path.is_dir() else 'uri_file'}"
        f"\n    path: {json.dumps(_relative(path, output))}"
        for key, path in moved.inputs.items()
    )
    job = _JOB.format(
        name=json.dumps(name),
        command=json.dumps(" && ".join(["mkdir inputs", *links, f'ln -s "${{{{outputs.{OUT}}}}}" {OUT}', run])),
        variables="  RAY_AUTH_MODE: token\n" if num_nodes > 1 else "",
        inputs=inputs or " {}",
        out=OUT,
        compute=json.dumps(compute if compute.startswith("azureml:") else f"azureml:{compute}"),
        num_nodes=num_nodes,
    )
    return job + (_DISTRIBUTION if num_nodes > 1 else "")


def _relative(path: Path, folder: Path) -> str:
    """`path` as seen from the job's folder; as it is where that is on another drive."""
    try:
        return Path(os.path.relpath(path, folder)).as_posix()
    except ValueError:
        return path.as_posix()

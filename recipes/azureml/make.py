"""Writes four jobs of Azure ML below a folder: on a CPU, on a GPU, a pipeline and a sweep.

python recipes/azureml/make.py OUT [--compute NAME] [--gpu-compute NAME]

Run it from the repository's root. The first two are what `olive-ext job azureml` makes; pipeline.yml and sweep.yml
beside this script get the code and the environment of such a job.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path

from olive_ext.check import read_recipe
from olive_ext.plugins.jobs.azureml import make_azureml_job, portable

HERE = Path(__file__).resolve().parent
QUICKSTART = HERE.parent / "quickstart"
CHAINS = ("kquant_int4_b32", "kquant_int8_b128", "block_rtn_int4_b32", "block_rtn_int8_b32")


def make(out: Path, compute: str, gpu_compute: str) -> None:
    """Writes the folders below `out`, which are new or empty."""
    recipe = QUICKSTART / "recipe.json"
    make_azureml_job(recipe, compute, out / "command")
    with tempfile.TemporaryDirectory() as scratch:
        on_gpu = Path(scratch, "quickstart_gpu.json")
        text = recipe.read_text(encoding="utf-8")
        text = text.replace('"device": "cpu"', '"device": "gpu"').replace(
            "CPUExecutionProvider", "CUDAExecutionProvider"
        )
        on_gpu.write_text(text, encoding="utf-8")
        make_azureml_job(on_gpu, gpu_compute, out / "gpu")
    for name in ("pipeline", "sweep"):
        folder = out / name
        shutil.copytree(out / "command" / "environment", folder / "environment")
        paths = {key: Path(os.path.relpath(QUICKSTART / key.lower(), folder)).as_posix() for key in ("MODEL", "TASKS")}
        job = (HERE / f"{name}.yml").read_text(encoding="utf-8")
        for key, value in {**paths, "COMPUTE": compute}.items():
            job = job.replace(key, value)
        (folder / "job.yml").write_text(job, encoding="utf-8")
        (folder / "code").mkdir()
    _pipeline_code(out / "pipeline" / "code")
    for chain in CHAINS:
        moved = portable(read_recipe(HERE.parent / "chains" / f"{chain}.json"))
        _write(out / "sweep" / "code" / f"{chain}.json", moved.recipe)
    shutil.copyfile(QUICKSTART / "olive_ext_plugin.py", out / "sweep" / "code" / "olive_ext_plugin.py")


def _pipeline_code(code: Path) -> None:
    """The quickstart's recipe without its evaluation, and the gate."""
    recipe = portable(read_recipe(QUICKSTART / "recipe.json")).recipe
    for key in ("evaluators", "evaluator", "evaluate_input_model"):
        recipe.pop(key, None)
    recipe["cache_dir"] = "cache"  # the output is what is registered
    _write(code / "quantize.json", recipe)
    shutil.copyfile(HERE / "gate.py", code / "gate.py")


def _write(path: Path, recipe: object) -> None:
    path.write_text(json.dumps(recipe, indent=4) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--compute", default="cpu-cluster")
    parser.add_argument("--gpu-compute", default="gpu-cluster")
    given = parser.parse_args()
    make(given.out, given.compute, given.gpu_compute)

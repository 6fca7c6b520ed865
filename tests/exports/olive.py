"""Graphs as Olive's passes leave them.

Run as `python -m tests.exports.olive SOURCE FOLDER SURGEON` it applies one of Olive's graph surgeries to a package.
"""

from __future__ import annotations

import shutil
import sys
from importlib.metadata import version
from pathlib import Path

from tests.exports.cache import once, run_python, source_of
from tests.exports.genai import genai_export


def surgery_export(family: str, surgeon: str) -> Path:
    """`genai_export(family)` after an Olive surgery that needs no parameters, the package's other files copied."""
    source = genai_export(family)
    recipe = [source.name, surgeon, version("olive-ai"), source_of("olive.py")]
    return once(
        f"olive-{family}-{surgeon}", recipe, lambda folder: run_python(["-m", __name__, source, folder, surgeon])
    )


def _make(source: Path, folder: Path, surgeon: str) -> None:
    import onnx
    from olive.passes.onnx.graph_surgeries import Surgeon

    for file in source.iterdir():
        if file.is_file() and file.name != "model.onnx":
            shutil.copy(file, folder)
    model = Surgeon.registry[surgeon.lower()]()(onnx.load(source / "model.onnx", load_external_data=False))
    onnx.save(model, folder / "model.onnx")


if __name__ == "__main__":
    _make(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])

"""Copies of packages with a changed graph."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper


def edited(source: Path, folder: Path, edit: Callable[[onnx.ModelProto], Any]) -> Path:
    """A copy of the package in `source`, its graph changed, with the weights inside of it."""
    (path,) = source.glob("*.onnx")
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.onnx*", "cache"))
    model = onnx.load(path)
    edit(model)
    onnx.save(model, folder / path.name)
    return folder


def weight(model: onnx.ModelProto, *parts: str) -> onnx.TensorProto:
    """The first initializer whose name has all of these parts."""
    return next(tensor for tensor in model.graph.initializer if all(part in tensor.name for part in parts))


def change(tensor: onnx.TensorProto, function: Callable[[np.ndarray], np.ndarray]) -> None:
    """Replaces an initializer's numbers, in its type."""
    values = numpy_helper.to_array(tensor)
    tensor.CopyFrom(numpy_helper.from_array(function(values.copy()).astype(values.dtype), tensor.name))


def changed(source: Path, folder: Path, name: str, function: Callable[[np.ndarray], np.ndarray]) -> Path:
    """A copy of the package with the numbers of one initializer changed."""
    return edited(source, folder, lambda model: change(weight(model, name), function))

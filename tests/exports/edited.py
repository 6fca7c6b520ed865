"""Copies of packages with a changed graph."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper


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


def continue_wrongly(model: onnx.ModelProto, how: str = "") -> None:
    """The graph of a model whose whole texts are right, and what follows them is not: `how` "in the cache alone" it is
    the cache that is wrong, else the logits of steps of one token."""
    nodes, make = model.graph.node, helper.make_node
    if how == "in the cache alone":
        made = {name: node for node in nodes for name in node.output if name.startswith("present.")}
        for name, node in made.items():
            node.output[[*node.output].index(name)] = f"{name}/right"
            nodes.extend([make("Add", [f"{name}/right"] * 2, [name])])
        return
    node = next(node for node in nodes if node.output[0] == "logits")
    node.output[0] = "right"
    one = numpy_helper.from_array(np.array([1]), "one")
    nodes.extend([
        make("Constant", [], ["one"], value=one),
        make("Shape", ["input_ids"], ["length"], start=1, end=2),
        make("Equal", ["length", "one"], ["is_one"]),
        make("Neg", ["right"], ["wrong"]),
        make("Where", ["is_one", "wrong", "right"], ["logits"]),
    ])  # fmt: skip

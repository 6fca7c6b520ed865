"""A composite model as one folder, and the composite model in a copy of that folder.

Knows Olive's handlers and files, not what is done with them.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from olive.model import CompositeModelHandler, ONNXModelHandler

from olive_ext.config.model import ModelConfig
from olive_ext.graph.onnx_file import external_locations
from olive_ext.model.files.content import load_graph, weight_files
from olive_ext.model.files.folders import GENAI_CONFIG
from olive_ext.workflow.handlers import additional_files


def in_one_folder(model: Any, values: Mapping[str, Any], gathered: Path) -> tuple[dict[str, Any], Path]:
    """The configuration `values` of a composite model with the model in one folder, and the folder that the components'
    places are relative to. Where none has all of them their files are copied into `gathered`, which is new: a link that
    leads out of a package is refused."""
    graphs = {Path(part.model_path).resolve() for _, part in model.get_model_components()}
    given: ModelConfig = values["model"]
    own = model.get_resource("model_path")
    for root in (Path(given.path).resolve(), *([Path(own).resolve()] if own else [])):
        if root.is_dir() and all(graph.is_relative_to(root) for graph in graphs):
            return {**values, "model": _placed(given, root, root)}, root
    root = Path(os.path.commonpath([graph.parent for graph in graphs]))
    for graph in graphs:
        _copy(graph, gathered / graph.relative_to(root))
        for location, file in weight_files(graph, external_locations(load_graph(graph))).items():
            _copy(file, gathered / graph.parent.relative_to(root) / location)
    for file in additional_files(model.model_attributes):
        if file.is_file():
            _copy(file, gathered / file.name)
    return {**values, "model": _placed(given, root, gathered)}, root


def _placed(given: ModelConfig, root: Path, folder: Path) -> ModelConfig:
    """The model in `folder`, with the places that it has in `root`."""
    path = Path(given.path).resolve()
    decoder = path / given.onnx_file_name if given.onnx_file_name else path
    components = {part: Path(file).resolve().relative_to(root).as_posix() for part, file in given.components.items()}
    name = decoder.relative_to(root).as_posix()
    return ModelConfig.parse({"path": str(folder), "kind": "onnx", "onnx_file_name": name, "components": components})


def composite_in(folder: Path, model: Any, root: Path) -> CompositeModelHandler:
    """The composite model whose components have the places in `folder` that those of `model` have in `root`."""
    parts = [_component_in(folder, part, root) for _, part in model.get_model_components()]
    attributes = copy.deepcopy(model.model_attributes or {})
    attributes["additional_files"] = _beside(folder)
    if (folder / GENAI_CONFIG).is_file():
        attributes["no_flatten"] = True  # or Olive saves the components under other names than those in it
    return CompositeModelHandler(
        parts, list(model.model_component_names), model_path=str(folder), model_attributes=attributes
    )


def _component_in(folder: Path, part: Any, root: Path) -> ONNXModelHandler:
    graph = folder / Path(part.model_path).resolve().relative_to(root)
    attributes = copy.deepcopy(part.model_attributes or {})
    attributes["additional_files"] = _beside(graph.parent) if graph.parent != folder else []
    return ONNXModelHandler(
        model_path=str(graph.parent),
        onnx_file_name=graph.name,
        inference_settings=copy.deepcopy(part.inference_settings),
        model_attributes=attributes,
    )


def _beside(folder: Path) -> list[str]:
    """The files of a folder that are no graph's."""
    return sorted(str(file) for file in folder.iterdir() if file.is_file() and ".onnx" not in file.name)


def _copy(source: Path, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    if not place.exists():
        shutil.copyfile(source, place)

"""The pass types `OrtLossMap`, which finds the weights that a quantized model's loss comes from, and `OrtMending`,
which makes the model with the weights that lose most in a finer precision. A composite model is handled as one folder,
and becomes a composite model in a copy of that."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from olive.model import CompositeModelHandler, ONNXModelHandler

from olive_ext.config import EvaluationSettings
from olive_ext.config.model import ModelConfig
from olive_ext.config.work import NEEDS_ONNX
from olive_ext.errors import UnsupportedError
from olive_ext.graph.nodes import external_locations
from olive_ext.model.files.content import load_graph, weight_files
from olive_ext.model.files.package_config import GENAI_CONFIG
from olive_ext.plugins.diagnose.remedy.locate import locate
from olive_ext.plugins.diagnose.remedy.mend import mend
from olive_ext.plugins.diagnose.remedy.pages import refuse_broken, show_bill, write_loss_map
from olive_ext.plugins.diagnose.settings import LocationConfig, LocationSettings, MendingConfig, MendingSettings
from olive_ext.workflow.current_run import settled
from olive_ext.workflow.evaluator import surfaced
from olive_ext.workflow.handlers import additional_files, handler_of, label, onnx_config
from olive_ext.workflow.passes import ConfiguredPass, ReadOnlyPass, folder_of


class OrtLossMap(ReadOnlyPass):
    """Locates a model's loss. loss_map.json, loss_map.md and loss_map.html travel with the model."""

    settings_type = LocationSettings

    def write_findings(self, model: Any, settings: LocationSettings, folder: Path) -> Sequence[Path]:
        """Raises `OliveExtError` for every failure."""
        with surfaced("the loss cannot be located"):
            values = opening_values(model, settings, self.accelerator_spec.execution_provider)
            if settings.output_dir is not None:
                path = str(model.get_resource("model_path") or values["model"].path)
                values["output_dir"] = str(Path(settings.output_dir, label(path)))
            return write_loss_map(locate(LocationConfig(**values), progress=True), folder)


def opening_values(model: Any, settings: LocationSettings, execution_providers: Any) -> dict[str, Any]:
    """The written settings, with the model of a handler, and how it and its reference are opened. Raises `ConfigError`
    where it is no ONNX model."""
    kind, handler = handler_of(model)
    if kind != "onnx":
        raise UnsupportedError(NEEDS_ONNX)
    settings = settings.model_copy(update={"reference": settled(settings.reference)})
    opened = onnx_config(handler, EvaluationSettings(**settings.shared(EvaluationSettings)), execution_providers)
    return {**settings.own(), **opened.written()}


class OrtMending(ConfiguredPass):
    """Mends a quantized ONNX model against the float one: the package with its bill."""

    settings_type = MendingSettings
    makes_model = True
    _accepts_composite_model = True

    def _run_for_config(self, model: Any, config: Any, output_model_path: str) -> Any:
        """The mended package in `output_model_path`. Raises `OliveExtError` for every failure: `RequirementError` where
        no model keeps the bound, within the size, or documents that chose nothing say that it is broken."""
        settings: MendingSettings = self.settings(config)
        folder = folder_of(output_model_path)
        gathered, root = folder.with_name(f".{folder.name}.components"), folder
        with surfaced("the model cannot be mended"):
            values = opening_values(model, settings, self.accelerator_spec.execution_provider)
            try:
                if isinstance(model, CompositeModelHandler):
                    values, root = in_one_folder(model, values, gathered)
                bill = mend(MendingConfig(**values, output_dir=str(folder)), progress=True)
            finally:
                shutil.rmtree(gathered, ignore_errors=True)
            show_bill(bill)
            refuse_broken(bill)
        if isinstance(model, CompositeModelHandler):
            return composite_in(folder, model, root)
        graph, resource = Path(model.model_path), Path(model.get_resource("model_path"))
        name = graph.relative_to(resource) if resource.is_dir() else Path(graph.name)
        return _in(folder, name, model, sorted(str(file) for file in folder.iterdir() if ".onnx" not in file.name))


def _in(folder: Path, name: Path, model: Any, beside: list[str]) -> ONNXModelHandler:
    """The model of one graph in another folder, with the files that travel with it."""
    return ONNXModelHandler(
        model_path=str(folder),
        onnx_file_name=name.as_posix(),
        inference_settings=copy.deepcopy(model.inference_settings),
        model_attributes={**copy.deepcopy(model.model_attributes or {}), "additional_files": beside},
    )


def in_one_folder(model: Any, values: Mapping[str, Any], gathered: Path) -> tuple[dict[str, Any], Path]:
    """The configuration `values` of a composite model with the model in one folder, and the folder that the components'
    places are relative to. Where none has all of them their files are copied into `gathered`, which is new: a link that
    leads out of a package is refused."""
    graphs = {Path(part.model_path).resolve() for _, part in model.get_model_components()}
    own: ModelConfig = values["model"]
    resource = model.get_resource("model_path")
    roots = (Path(place).resolve() for place in (own.path, resource) if place)
    root = next((one for one in roots if one.is_dir() and all(graph.is_relative_to(one) for graph in graphs)), None)
    folder = root or gathered
    if root is None:
        root = Path(os.path.commonpath([graph.parent for graph in graphs]))
        for graph in graphs:
            _copy(graph, gathered / graph.relative_to(root))
            for location, file in weight_files(graph, external_locations(load_graph(graph))).items():
                _copy(file, gathered / graph.parent.relative_to(root) / location)
        for file in additional_files(model.model_attributes):
            if file.is_file():
                _copy(file, gathered / file.name)
    name = (Path(own.path).resolve() / (own.onnx_file_name or "")).relative_to(root).as_posix()
    components = {part: Path(file).resolve().relative_to(root).as_posix() for part, file in own.components.items()}
    placed = {"path": str(folder), "kind": "onnx", "onnx_file_name": name, "components": components}
    return {**values, "model": ModelConfig.parse(placed)}, root


def composite_in(folder: Path, model: Any, root: Path) -> CompositeModelHandler:
    """The composite model whose components have the places in `folder` that those of `model` have in `root`."""
    parts = []
    for _, part in model.get_model_components():
        graph = folder / Path(part.model_path).resolve().relative_to(root)
        beside = _beside(graph.parent) if graph.parent != folder else []
        parts.append(_in(graph.parent, Path(graph.name), part, beside))
    attributes = copy.deepcopy(model.model_attributes or {})
    attributes["additional_files"] = _beside(folder)
    if (folder / GENAI_CONFIG).is_file():
        attributes["no_flatten"] = True  # or Olive saves the components under other names than those in it
    return CompositeModelHandler(
        parts, list(model.model_component_names), model_path=str(folder), model_attributes=attributes
    )


def _beside(folder: Path) -> list[str]:
    """The files of a folder that are no graph's."""
    return sorted(str(file) for file in folder.iterdir() if file.is_file() and ".onnx" not in file.name)


def _copy(source: Path, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    if not place.exists():
        shutil.copyfile(source, place)

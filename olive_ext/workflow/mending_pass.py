"""The pass type `OrtMending`: the quantized model, of one graph or several, with the weights that lose most in a finer
precision."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

from olive.model import CompositeModelHandler, ONNXModelHandler

from olive_ext.config import MendingConfig, MendingSettings
from olive_ext.remedy.bill import refuse_broken, show
from olive_ext.remedy.mend import mend
from olive_ext.workflow.composite_models import composite_in, in_one_folder
from olive_ext.workflow.evaluator import surfaced
from olive_ext.workflow.looking_pass import OwnPass, folder_of
from olive_ext.workflow.loss_map_pass import opening_values


class OrtMending(OwnPass):
    """Mends a quantized ONNX model against the float one: the package with its bill."""

    settings_type = MendingSettings
    bounds_decide = True
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
            show(bill)
            refuse_broken(bill)
        return composite_in(folder, model, root) if isinstance(model, CompositeModelHandler) else _in(folder, model)


def _in(folder: Path, model: Any) -> ONNXModelHandler:
    """The model of one graph in another folder."""
    graph, resource = Path(model.model_path), Path(model.get_resource("model_path"))
    name = graph.relative_to(resource) if resource.is_dir() else Path(graph.name)
    attributes = copy.deepcopy(model.model_attributes or {})
    attributes["additional_files"] = sorted(str(file) for file in folder.iterdir() if ".onnx" not in file.name)
    return ONNXModelHandler(
        model_path=str(folder),
        onnx_file_name=name.as_posix(),
        inference_settings=copy.deepcopy(model.inference_settings),
        model_attributes=attributes,
    )

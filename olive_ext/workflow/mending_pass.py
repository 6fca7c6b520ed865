"""The pass type `OrtMending`: the quantized model with the weights that lose most in a finer precision."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from olive.model import CompositeModelHandler, ONNXModelHandler

from olive_ext.config import MendingConfig, MendingSettings
from olive_ext.errors import ConfigError
from olive_ext.remedy.bill import refuse_broken, show
from olive_ext.remedy.mend import mend
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
        if isinstance(model, CompositeModelHandler):
            raise ConfigError(
                "OrtMending gives one ONNX model, and this one has several: mend its folder with `olive-ext mend`"
            )
        folder = folder_of(output_model_path)
        with surfaced("the model cannot be mended"):
            values = opening_values(model, settings, self.accelerator_spec.execution_provider)
            bill = mend(MendingConfig(**values, output_dir=str(folder)), progress=True)
            show(bill)
            refuse_broken(bill)
            graph, resource = Path(model.model_path), Path(model.get_resource("model_path"))
            name = graph.relative_to(resource) if resource.is_dir() else Path(graph.name)
            attributes = copy.deepcopy(model.model_attributes or {})
            beside = (file for file in folder.iterdir() if ".onnx" not in file.name)
            attributes["additional_files"] = sorted(map(str, beside))
            return ONNXModelHandler(
                model_path=str(folder),
                onnx_file_name=name.as_posix(),
                inference_settings=copy.deepcopy(model.inference_settings),
                model_attributes=attributes,
            )

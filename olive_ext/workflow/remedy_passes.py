"""The pass type `OrtLossMap`: which weights of a quantized model its loss comes from, between passes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from olive_ext.config import EvaluationSettings, LocationConfig, LocationSettings
from olive_ext.config.location import NEEDS_ONNX
from olive_ext.errors import ConfigError
from olive_ext.remedy.locate import locate
from olive_ext.remedy.page import write_loss_map
from olive_ext.workflow.current_run import settled
from olive_ext.workflow.evaluator import surfaced
from olive_ext.workflow.handlers import handler_of, label, onnx_config
from olive_ext.workflow.looking_pass import LookingPass


class OrtLossMap(LookingPass):
    """Locates a model's loss. loss_map.json, loss_map.md and loss_map.html travel with the model."""

    settings_type = LocationSettings

    def look(self, model: Any, settings: LocationSettings, folder: Path) -> Sequence[Path]:
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
        raise ConfigError(NEEDS_ONNX)
    settings = settings.model_copy(update={"reference": settled(settings.reference)})
    opened = onnx_config(handler, EvaluationSettings(**settings.shared(EvaluationSettings)), execution_providers)
    return {**settings.own(), **{name: getattr(opened, name) for name in opened.model_fields_set}}

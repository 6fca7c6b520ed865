"""`"reference": "input_model"`: from Olive's configuration of the model that a recipe starts from to a reference that
can be opened. Opens nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from olive_ext.config import INPUT_MODEL, EvaluationSettings, ReferenceConfig
from olive_ext.errors import ConfigError
from olive_ext.workflow.running import running

_KINDS = {"hfmodel": "hf", "onnxmodel": "onnx"}
_CHANGES = {
    "adapter_path": "has an adapter",
    "load_kwargs": "is loaded with its own arguments",
    "external_initializers_file_name": "has external initializers",
    "constant_inputs_file_name": "has constant inputs",
}
"""Keys of an input model that make it another model than the one at its path."""


def settled(reference: ReferenceConfig) -> ReferenceConfig:
    """The reference with "input_model" replaced by that model's path; others as they are.

    Raises `ConfigError` where the model is not known, or is not what its path alone says.
    """
    if not reference.is_input_model:
        return reference
    run = running.get()
    if run is None:
        raise ConfigError(
            f"'reference' = '{INPUT_MODEL}' means the model that a workflow started from, and no workflow is running: "
            "give the model's path"
        )
    return of_input_model(reference, run.input_model)


def of_input_model(reference: ReferenceConfig, input_model: Any) -> ReferenceConfig:
    """As `settled`, for Olive's configuration of the input model."""
    kind, path = _KINDS.get(input_model.type.lower()), input_model.config.get("model_path")
    if kind is None:
        raise _refused(f"is of type {input_model.type}: a reference is an HfModel or an ONNXModel")
    if not isinstance(path, str) or path.startswith("azureml:"):
        raise _refused("has no 'model_path' on this machine")
    for key, problem in _CHANGES.items():
        if input_model.config.get(key):
            raise _refused(f"{problem} ('input_model.{key}'), which a reference has not")
    place = str(Path(path).resolve()) if Path(path).exists() else path
    name = input_model.config.get("onnx_file_name") if kind == "onnx" else None
    return reference.model_copy(update={"path": place, "kind": kind, "onnx_file_name": name})


def _refused(problem: str) -> ConfigError:
    return ConfigError(f"'reference' = '{INPUT_MODEL}': the input model {problem}; give another model's path")


def with_reference(settings: EvaluationSettings) -> EvaluationSettings:
    """The settings with a reference that can be opened; the same object where there is nothing to do."""
    if settings.reference is None or not settings.reference.is_input_model:
        return settings
    return settings.model_copy(update={"reference": settled(settings.reference)})

"""Opens the two models of an evaluation with a reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

from olive_ext.config import EvaluationConfig, ModelConfig
from olive_ext.run.listening import Listener
from olive_ext.run.opening import open_model

if TYPE_CHECKING:
    from olive_ext.backends.harness import LM


def reference_config(config: EvaluationConfig) -> EvaluationConfig:
    """The evaluation of the reference: the same tasks and settings on the other model."""
    reference = config.reference
    assert reference is not None
    other = reference.execution_provider
    options = config.provider_options if other is None else None
    model = ModelConfig(path=reference.path, kind=reference.kind, onnx_file_name=reference.onnx_file_name)
    return config.model_copy(
        update={
            "model": model,
            "reference": None,
            "model_class": None,
            "execution_provider": config.execution_provider if other is None else other,
            "provider_options": options if reference.provider_options is None else reference.provider_options,
        }
    )


class Models:
    """Both models of `config`. Every model that is given is the caller's to close, but for `beside`."""

    def __init__(self, config: EvaluationConfig, progress: bool = False) -> None:
        self._config = config
        self._progress = progress

    def reference(self, listener: Listener | None) -> LM:
        """The reference alone. With a listener what it says is recorded, and its generations are told."""
        return open_model(reference_config(self._config), self._progress)

    def candidate(self, listener: Listener | None) -> LM:
        """The evaluated model. With a listener its targets are compared with the reference, and told."""
        return open_model(self._config, self._progress)

    def beside(self, candidate: LM, listener: Listener) -> LM:
        """The reference that is resident beside `candidate`, for generations, which are told; closed with it."""
        raise NotImplementedError

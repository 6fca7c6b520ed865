"""`OrtEngine`: how Evalution opens a model of ours. Knows nothing of requests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalution.config import Model
from evalution.engines import base

from olive_ext.backends.evalution.inference_session import OrtInferenceSession
from olive_ext.errors import ConfigError
from olive_ext.session import open as open_session


@dataclass(slots=True)  # as its base: without slots a field of that one has no default
class OrtEngine(base.BaseEngineDeviceConfig, base.SharedEngineConfig):  # type: ignore[misc] # Evalution has no types
    """Runs ONNX models on ONNX Runtime (and Hugging Face models on transformers, as `olive_ext.open` does).

    Of the fields that all of Evalution's engines have, `dtype` is for Hugging Face models (a graph has its own) and
    `padding_side` has no meaning: nothing is padded. `device` ("cpu", "cuda:1") stands for a provider of that name.
    """

    execution_provider: str | list[str] | None = None
    """As in a recipe: a name, or a list in order of preference."""

    provider_options: dict[str, Any] | list[dict[str, Any]] | None = None
    """Options of the first provider, or a list with one entry for each."""

    engine: dict[str, Any] | None = None
    """Settings of the decoder runner, as the block `engine` of a recipe."""

    def build(self, model: Model) -> OrtInferenceSession:
        """A session on `model.path`. `model.model_kwargs` are further arguments of `olive_ext.open`.

        Raises `ConfigError`, a ValueError, for what cannot be followed: a revision, code from the model's repository,
        arguments of the tokenizer, and a tokenizer that is an object.
        """
        _refuse(model, trusts_code=bool(self.trust_remote_code or model.trust_remote_code))
        arguments = {
            "batch_size": self.batch_size,
            "dtype": self.dtype or "auto",
            "engine": self.engine,
            "tokenizer": model.tokenizer_path or model.tokenizer,
            **self._placement(),
            **model.model_kwargs,
        }
        session = open_session(model.path, **arguments)
        self.resolved_engine = type(self).__name__
        return OrtInferenceSession(
            session,
            max_new_tokens=self.max_new_tokens,
            seed=self.seed or 0,
            fallback="cpu" if arguments.get("allow_cpu_fallback") else "none",
        )

    def _placement(self) -> dict[str, Any]:
        """Arguments of `open` that say where the model runs."""
        provider = {"execution_provider": self.execution_provider, "provider_options": self.provider_options}
        if self.device is None:
            return provider
        if any(provider.values()):
            raise ConfigError("'device' and 'execution_provider' both say where the model runs: give one of them")
        name, _, index = self.device.partition(":")
        options = {"device_id": index} if index else None
        return {"device": self.device, "execution_provider": name, "provider_options": options}


def _refuse(model: Model, *, trusts_code: bool) -> None:
    if model.revision is not None:
        raise ConfigError(f"'revision' = '{model.revision}': download that revision, and give its folder as 'path'")
    if trusts_code:
        raise ConfigError("'trust_remote_code' = true: code from a model's repository is never run")
    if model.tokenizer_kwargs:
        raise ConfigError(f"'tokenizer_kwargs' = {model.tokenizer_kwargs}: not supported; save the tokenizer with them")
    if not isinstance(model.tokenizer, str | Path | None):
        raise ConfigError("'tokenizer' is an object: save it, and give its folder as 'tokenizer_path'")

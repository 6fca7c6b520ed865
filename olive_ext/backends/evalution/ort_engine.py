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

    `dtype` is for Hugging Face models (a graph has its own), `padding_side` has no meaning (nothing is padded), and
    `device` ("cpu", "cuda:1") stands for a provider of that name. The other fields are as in a recipe.
    """

    execution_provider: str | list[str] | None = None
    provider_options: dict[str, Any] | list[dict[str, Any]] | None = None
    engine: dict[str, Any] | None = None

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
        self.resolved_engine = type(self).__name__  # type: ignore[misc] # a slot of the base, which has no types
        return OrtInferenceSession(
            session,
            max_new_tokens=self.max_new_tokens,
            seed=self.seed or 0,
            fallback="cpu" if arguments.get("allow_cpu_fallback") else "none",
        )

    def _placement(self) -> dict[str, Any]:
        """Arguments of `open` that determine where the model runs."""
        provider = {"execution_provider": self.execution_provider, "provider_options": self.provider_options}
        if self.device is None:
            return provider
        if any(provider.values()):
            raise ConfigError("'device' and 'execution_provider' both say where the model runs: give one of them")
        name, _, index = self.device.partition(":")
        options = {"device_id": index} if index else None
        return {"device": self.device, "execution_provider": name, "provider_options": options}


def _refuse(model: Model, *, trusts_code: bool) -> None:
    """Raises for what `olive_ext.open` has no argument for."""
    refused = {
        "'revision': download it, and give its folder as 'path'": model.revision is not None,
        "'trust_remote_code': code from a model's repository is never run": trusts_code,
        "'tokenizer_kwargs': save the tokenizer with them": bool(model.tokenizer_kwargs),
        "'tokenizer' is an object: save it, and give its folder as 'tokenizer_path'": not isinstance(
            model.tokenizer, str | Path | None
        ),
    }
    if found := [text for text, is_given in refused.items() if is_given]:
        raise ConfigError("; ".join(found))

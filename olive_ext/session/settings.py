"""What `open` takes, validated."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from olive_ext.config import EngineConfig, Strict
from olive_ext.config.base import PositiveInt, word
from olive_ext.config.evaluation import BatchSize, ProviderOptions, ProviderRequest
from olive_ext.errors import ConfigError

_INHERITED = ("execution_provider", "provider_libraries", "allow_cpu_fallback", "batch_size", "max_length")
_INHERITED_OF_ENGINE = ("num_threads", "chunk_size")


class Settings(Strict):
    """The keys of `open`; those of recipes are described in `EvaluationSettings` and `ModelConfig`."""

    model: str
    kind: Annotated[Literal["auto", "onnx", "hf"], BeforeValidator(word)] = "onnx"
    """"hf" runs a Hugging Face model on transformers; "auto" tells by the files."""

    dtype: Annotated[Literal["auto", "float32", "float16", "bfloat16"], BeforeValidator(word)] = "float32"
    """Of a Hugging Face model's numbers; "auto" takes the type that it is stored in."""

    device: str | None = None
    """torch's device for a Hugging Face model. None takes "cuda" where there is one, else "cpu"."""

    execution_provider: ProviderRequest | None = None
    provider_options: ProviderOptions | list[ProviderOptions] | None = None
    provider_libraries: dict[str, str] = Field(default_factory=dict)
    allow_cpu_fallback: bool = False
    max_length: PositiveInt | None = None
    batch_size: BatchSize = "auto"
    tokenizer: str | None = None
    onnx_file_name: str | None = None
    add_bos_token: bool | None = None
    prefix_token_id: int | None = Field(default=None, ge=0)
    engine: EngineConfig = Field(default_factory=EngineConfig)

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str = "") -> Settings:
        """From arguments, of which None is as good as not given and paths are texts."""
        given = {name: value for name, value in values.items() if value is not None}
        for name in {"model", "tokenizer"} & given.keys():
            given[name] = str(given[name])
        return cls.parse(given, where)

    def of_reference(self, asked: str | Path | Mapping[str, Any]) -> Settings:
        """Those of a reference: a path, or keys of `open`. What is not given is taken from here where it says how a
        model is run, and not which one; the kind is then told by the files."""
        given = dict(asked) if isinstance(asked, Mapping) else {"model": str(asked)}
        if "model" not in given:
            raise ConfigError("'reference' names no 'model': give its path, or a mapping with the key 'model'")
        taken = {name: getattr(self, name) for name in _INHERITED}
        if given.get("execution_provider") is None:
            taken["provider_options"] = self.provider_options
        given = {name: value for name, value in given.items() if value is not None}
        engine = {name: getattr(self.engine, name) for name in _INHERITED_OF_ENGINE}
        return Settings.of({"kind": "auto", **taken, "engine": engine, **given}, where="reference")


class RecordSettings(Strict):
    """Where and how a session's distributions are recorded, for candidates to be compared with them."""

    folder: str
    """Root of the records; each reference has a folder of its own in it."""

    top: int | None = None
    """Most probable tokens of a position that are kept. None takes 64, fewer of small vocabularies."""

    drawn: int | None = None
    """Tokens drawn from the rest. None takes 32, fewer of small vocabularies."""

    seed: int = Field(default=0, ge=0)

    @classmethod
    def of(cls, asked: str | Path | Mapping[str, Any]) -> RecordSettings:
        """From a folder, or the keys."""
        given = dict(asked) if isinstance(asked, Mapping) else {"folder": str(asked)}
        return cls.parse({**given, "folder": str(given.get("folder"))}, where="record_to")

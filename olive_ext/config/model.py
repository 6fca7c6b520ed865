"""Which model is opened, and how: the only declaration of these settings, which every entry inherits. Reads no file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from typing_extensions import Self

from olive_ext.config.base import NonNegativeInt, PathText, PositiveInt, StrictModel, Word, word
from olive_ext.config.execution import ExecutionSettings
from olive_ext.errors import MissingError

Kind = Annotated[Literal["auto", "onnx", "hf"], BeforeValidator(word)]
Components = dict[Literal["decoder", "embedding", "vision", "audio", "encoder", "first_step"], str]
"""Graphs of a model by what they do."""

_LIKE_THE_CANDIDATE = (
    *("device", "execution_provider", "provider_libraries", "allow_cpu_fallback", "batch_size", "max_length"),
    *("non_finite", "deterministic", "isolation", "step_timeout", "workers", "language", "speech_task"),
    "trust_remote_code",
)
"""Settings that a reference takes from the evaluated model: how a model is run, not which model it is."""


class ModelPath(StrictModel):
    """Where a model is."""

    other_words: ClassVar[Mapping[str, str]] = {"model": "path", "model_path": "path"}

    path: PathText
    """An .onnx file, a folder with one, a folder with genai_config.json, a model package of ONNX Runtime, Olive's
    output folder, or a Hugging Face model (folder or hub name)."""


class ModelChoice(StrictModel):
    """Which model is meant, where a path has several."""

    kind: Kind = "auto"
    """"hf" is a Hugging Face model, "onnx" a graph or a package of graphs; "auto" decides by the files."""

    onnx_file_name: str | None = None
    """Which .onnx file in the folder, relative to it, where there are several."""

    variant: Word | None = None
    """Which variant of an ONNX Runtime model package. None takes the one for the execution provider that is asked for,
    else the only one, else the one for the CPU."""

    components: Components = Field(default_factory=dict)
    """Which graph does what, where a model is several and neither their interfaces nor genai_config.json show it:
    "decoder", "embedding" (token ids to what the decoder takes), "vision" and "audio" (encoders of pictures and sound),
    or "encoder" and "first_step" of an encoder-decoder, each an .onnx file relative to the path. One that contradicts
    the graphs is refused."""


class ModelConfig(ModelChoice, ModelPath):
    """A model as recipes name it."""


class OpenSettings(ModelChoice, ExecutionSettings):
    """All settings of opening a model, whichever it is; `OrtLM`'s arguments inherit them."""

    max_batch_size: PositiveInt | None = None
    """The most sequences that a `batch_size` of "auto" may decode together, where memory allows more."""

    dtype: Annotated[Literal["auto", "float32", "float16", "bfloat16"], BeforeValidator(word)] = "float32"
    """Data type of a Hugging Face model's numbers; "auto" takes config.json's, else the type that it is stored in."""

    add_bos_token: bool | None = None
    """Whether texts are encoded with a BOS token in front. None leaves it to the tokenizer, as HFLM does."""

    prefix_token_id: NonNegativeInt | None = None
    """Token that stands for an empty context. None takes BOS, else EOS."""

    language: str | None = None
    """Language of what a model of speech hears, as its generation_config.json names it ("en"): the decoder begins with
    its token, with the task's, and without timestamps. None leaves that to `forced_decoder_ids` and the prompt."""

    speech_task: Annotated[Literal["transcribe", "translate"] | None, BeforeValidator(word)] = None
    """What a model of speech does with a `language`: write it down (None, too) or translate it."""


class ModelSettings(OpenSettings):
    """A model and how it is opened: what `olive_ext.open` takes, and what `model.resolve` resolves."""

    model: str
    """As `ModelConfig.path`."""

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str = "") -> Self:
        """From arguments: None counts as not given, paths become texts. Raises `ConfigError`."""
        named = {name: value for name, value in values.items() if value is not None}
        for name in {"model", "tokenizer"} & named.keys():
            named[name] = str(named[name])
        return cls.parse(named, where)

    @property
    def location(self) -> tuple[object, ...]:
        """The settings that determine a model's files, and whether these are trusted."""
        which = self.model, self.kind, self.onnx_file_name, self.variant, self.components
        return *which, self.execution_provider, self.tokenizer, self.trust_remote_code

    def of_reference(self, patch: str | Path | Mapping[str, Any]) -> Self:
        """The settings of a reference for this model: a path, or a mapping of settings.

        For settings that `patch` does not name, the reference takes this model's value if the setting is about how a
        model is run, and the default if it is about which model is run. Provider options are taken only together with
        the provider that they are for. Raises `ConfigError`.
        """
        named = dict(patch) if isinstance(patch, Mapping) else {"model": str(patch)}
        if "model" not in named:
            raise MissingError("give the model's path, or a mapping with the key 'model'", "reference")
        taken = {name: getattr(self, name) for name in _LIKE_THE_CANDIDATE}
        if named.get("execution_provider") is None:
            taken["provider_options"] = self.provider_options
        engine = {"num_threads": self.engine.num_threads, "chunk_size": self.engine.chunk_size}
        return self._with({**taken, "engine": engine}, named)

    def in_other_place(self, named: Mapping[str, Any]) -> Self:
        """The settings of this model in another place: these, with those that are `named` in their stead. Provider
        options go with their provider, and both with another variant. Raises `ConfigError`."""
        settings = self.model_dump(exclude_unset=True)
        if named.get("execution_provider") is not None or named.get("variant") is not None:
            settings.pop("provider_options", None)
        if named.get("variant") is not None:  # which is for a provider of its own
            settings.pop("execution_provider", None)
        return self._with(settings, {**named, "model": None, "kind": None, "components": None})

    def _with(self, settings: Mapping[str, Any], named: Mapping[str, Any]) -> Self:
        given = {name: value for name, value in named.items() if value is not None}
        if "engine" in given:
            engine = given["engine"]
            engine = engine if isinstance(engine, Mapping) else engine.model_dump(exclude_unset=True)
            given["engine"] = {**settings.get("engine", {}), **engine}
        return type(self).of({**settings, **given}, where="reference")

"""How a model is opened, and a reference to it: the only declaration of these settings, which every entry inherits.

Knows what a user may write, and no files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from typing_extensions import Self

from olive_ext.config.base import NonNegativeInt, PositiveInt, Strict, Word, not_bool, word
from olive_ext.config.engine import EngineConfig
from olive_ext.errors import ConfigError

ProviderOptions = Annotated[dict[str, str | int | float | bool], Field(description="a mapping of options")]
ProviderRequest = Word | list[Word | tuple[Word, ProviderOptions]]
BatchSize = PositiveInt | Annotated[str, Field(pattern=r"^auto(:\d+)?$", description='"auto"'), BeforeValidator(word)]
Kind = Annotated[Literal["auto", "onnx", "hf"], BeforeValidator(word)]

_LIKE_THE_CANDIDATE = (
    "device",
    "execution_provider",
    "provider_libraries",
    "allow_cpu_fallback",
    "batch_size",
    "max_length",
)
"""What a reference takes from the evaluated model: how a model is run, not which one."""

INPUT_MODEL = "input_model"
"""Stands for the model that an Olive workflow started from."""


def _input_model(value: Any) -> Any:
    """Gives back the word where Olive made an absolute path of it: see `base.word`."""
    is_word = isinstance(value, str) and Path(value) == Path.cwd() / INPUT_MODEL
    return INPUT_MODEL if is_word else value


class ModelConfig(Strict):
    """Where the model is."""

    path: str
    """An .onnx file, a folder with one, a folder with genai_config.json, Olive's output folder, or a Hugging Face
    model (folder or hub name)."""

    kind: Kind = "auto"
    """"hf" is a Hugging Face model; the evaluated one runs through lm-eval's Hugging Face backend, as the baseline.
    "auto" decides by the files."""

    onnx_file_name: str | None = None
    """Which .onnx file in the folder, relative to it, where there are several."""


class ExecutionSettings(Strict):
    """How a model is run: the settings that recipes, `OrtLM` and `olive_ext.open` share."""

    batch_size: BatchSize = "auto"
    """Sequences decoded together. "auto" (also "auto:N") lets the engine choose from the free memory."""

    max_length: PositiveInt | None = None
    """Longest context in tokens. None takes the model's own."""

    tokenizer: str | None = None
    """Folder or hub name of the tokenizer; by default the one found beside the model."""

    execution_provider: ProviderRequest | None = None
    """Execution provider: a short or full name, or a list of names or (name, options) pairs in order of preference.
    None takes what Olive hands over, then genai_config.json's, then the CPU."""

    provider_options: ProviderOptions | list[ProviderOptions] | None = None
    """Options of the first provider, or a list with one entry for each provider."""

    provider_libraries: dict[str, str] = Field(default_factory=dict)
    """Plugin provider libraries to register first: a name of your choice, and the library's path or the Python
    package that ships it (for instance "onnxruntime_ep_webgpu")."""

    allow_cpu_fallback: bool = False
    """With true a provider that is missing or was dropped by ONNX Runtime is a warning, and the CPU runs the model."""

    device: Word | None = None
    """Torch device of a Hugging Face model ("cpu", "cuda:0"). None takes what Olive hands over, else "cuda" where there
    is one, else "cpu". Where an ONNX model runs is `execution_provider`'s to say."""

    engine: EngineConfig = Field(default_factory=EngineConfig)
    """Settings of the decoder runner."""


class OpenSettings(ExecutionSettings):
    """All settings of opening a model, whichever it is; `OrtLM`'s arguments inherit them."""

    kind: Kind = "auto"
    """"hf" runs a Hugging Face model on transformers, "onnx" a graph; "auto" decides by the files."""

    onnx_file_name: str | None = None
    """Which .onnx file in the folder, relative to it, where there are several."""

    max_batch_size: PositiveInt | None = None
    """The most sequences that a `batch_size` of "auto" may decode together, where memory allows more."""

    dtype: Annotated[Literal["auto", "float32", "float16", "bfloat16"], BeforeValidator(word)] = "float32"
    """Data type of a Hugging Face model's numbers; "auto" takes the type that it is stored in."""

    add_bos_token: bool | None = None
    """Whether texts are encoded with a BOS token in front. None leaves it to the tokenizer, as HFLM does."""

    prefix_token_id: NonNegativeInt | None = None
    """Token that stands for an empty context. None takes BOS, else EOS."""


class ModelSettings(OpenSettings):
    """A model and how it is opened: what `olive_ext.open` takes, and what `model.resolve` resolves."""

    model: str
    """As `ModelConfig.path`."""

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str = "") -> Self:
        """From arguments: None counts as not given, paths become texts. Raises `ConfigError`."""
        given = {name: value for name, value in values.items() if value is not None}
        for name in {"model", "tokenizer"} & given.keys():
            given[name] = str(given[name])
        return cls.parse(given, where)

    @property
    def place(self) -> tuple[str, Kind, str | None, str | None]:
        """The settings that say which files a model has: path, kind, ONNX file, tokenizer."""
        return self.model, self.kind, self.onnx_file_name, self.tokenizer

    def patched(self, changes: Mapping[str, Any]) -> Self:
        """These settings with `changes`, which are validated already."""
        return self.model_copy(update=dict(changes))

    def of_reference(self, patch: str | Path | Mapping[str, Any]) -> Self:
        """The settings of a reference for this model: a path, or a mapping of settings.

        What `patch` does not name is this model's where it says how a model is run, and the default where it says which
        model; provider options only go with the provider that they are for. Raises `ConfigError`.
        """
        named = dict(patch) if isinstance(patch, Mapping) else {"model": str(patch)}
        if "model" not in named:
            raise ConfigError("'reference' names no 'model': give its path, or a mapping with the key 'model'")
        taken = {name: getattr(self, name) for name in _LIKE_THE_CANDIDATE}
        if named.get("execution_provider") is None:
            taken["provider_options"] = self.provider_options
        engine = {"num_threads": self.engine.num_threads, "chunk_size": self.engine.chunk_size}
        given = {name: value for name, value in named.items() if value is not None}
        return type(self).of({**taken, "engine": engine, **given}, where="reference")


class ReferenceConfig(ModelConfig):
    """The reference model and how it is run. A text alone is its `path`."""

    path: Annotated[str, BeforeValidator(_input_model)]
    """As `model.path`: an ONNX model, a package, a Hugging Face model; or "input_model" in an Olive recipe: the model
    the workflow started from."""

    execution_provider: ProviderRequest | None = None
    """Execution provider of the reference. None takes that of the evaluated model."""

    provider_options: ProviderOptions | list[ProviderOptions] | None = None
    """Options of the reference's providers. None takes those of the evaluated model where `execution_provider` is its
    too."""

    mode: Annotated[Literal["auto", "resident", "recorded"], BeforeValidator(word)] = "auto"
    """"resident" keeps both models open and compares whole distributions. "recorded" runs the reference alone first and
    keeps a compact form of its distributions on disk, for this and later runs. "auto" is "resident" where both models
    fit in the free memory and neither speed nor memory is asked for."""

    records_dir: str | None = None
    """Folder of the records. None takes `olive_ext/records` in the user's cache folder ($XDG_CACHE_HOME, ~/.cache)."""

    top: PositiveInt | None = None
    """Recorded: the most likely tokens of a position that are kept with their log-probabilities. None takes a number
    by the vocabulary: all of at most 2048 tokens, else 16 to 64, so that records take 2 % of the logits."""

    drawn: Annotated[int, Field(ge=2), BeforeValidator(not_bool)] | None = None
    """Recorded: tokens drawn from the rest of a position's distribution, from which the rest of the divergence is
    estimated. None takes as many as `top`."""

    @property
    def is_input_model(self) -> bool:
        """Whether the workflow has yet to say which model this is."""
        return self.path == INPUT_MODEL


def _from_text(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


Reference = Annotated[
    ReferenceConfig,
    BeforeValidator(_from_text, json_schema_input_type=str | ReferenceConfig),
    Field(description="a path or a mapping"),
]
"""What a recipe may say: a path, or the mapping."""

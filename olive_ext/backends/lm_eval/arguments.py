"""What `OrtLM`'s constructor accepts. Knows neither lm-eval nor a session."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from olive_ext.config import EngineConfig, Strict
from olive_ext.config.base import Int, PositiveInt, word
from olive_ext.config.evaluation import BatchSize, ProviderOptions, ProviderRequest
from olive_ext.errors import ConfigError


def _number(value: Any) -> Any:
    """lm-eval hands numbers over as they stand on its command line: "8"."""
    return int(value) if isinstance(value, str) and value.isdigit() else value


_AUTO_BATCH_SIZE = 8
_OPENING = (
    "execution_provider",
    "provider_options",
    "provider_libraries",
    "allow_cpu_fallback",
    "max_length",
    "tokenizer",
    "onnx_file_name",
    "engine",
    "kind",
    "reference",
    "record_to",
)
_DECIDING = {"max_gen_toks", "add_bos_token", "prefix_token_id", "hflm_rolling_bos", "think_end_token", "seed"}


class OrtLMArguments(Strict):
    """Keyword arguments of `OrtLM`."""

    pretrained: str | None = None
    """The model: an .onnx file, or a folder with one or with genai_config.json. Left out where a session is given."""

    execution_provider: ProviderRequest | None = None
    """Execution provider, or a list in order of preference. None takes genai_config.json's, then the CPU."""

    provider_options: ProviderOptions | list[ProviderOptions] | None = None
    """Options of the first provider, or a list with one entry for each provider."""

    provider_libraries: dict[str, str] = Field(default_factory=dict)
    """Plugin provider libraries to register first, name to path or Python package."""

    allow_cpu_fallback: bool = False
    """With true a provider that is missing or was dropped is a warning, and the CPU runs the model."""

    batch_size: Annotated[BatchSize, BeforeValidator(_number)] = "auto"
    """Sequences decoded together."""

    max_batch_size: PositiveInt | None = None
    """The most that "auto" may choose; it never chooses more than 8."""

    max_length: PositiveInt | None = None
    """Longest context in tokens. None takes the model's own."""

    max_gen_toks: PositiveInt = 256
    """Tokens generated at most, where a task names no number."""

    device: str | None = None
    """torch's device for a Hugging Face model; elsewhere taken because lm-eval hands it over: where an ONNX model runs
    is said by `execution_provider`."""

    kind: Annotated[Literal["auto", "onnx", "hf"], BeforeValidator(word)] = "onnx"
    """"hf" runs a Hugging Face model on transformers, "auto" tells by the files."""

    reference: Any = None
    """A model to compare with, as `olive_ext.open` takes it: a path, a mapping, or the records of one."""

    record_to: Any = None
    """Where this model's distributions are recorded, as `olive_ext.open` takes it."""

    tokenizer: str | None = None
    """Folder or hub name of the tokenizer; by default the one found beside the model."""

    onnx_file_name: str | None = None
    """Which .onnx file in the folder, relative to it, where there are several."""

    add_bos_token: bool | None = None
    """Whether texts are encoded with a BOS token in front. None leaves it to the tokenizer, as HFLM does."""

    prefix_token_id: Int | None = None
    """Token that stands for an empty context. None takes BOS, else EOS."""

    hflm_rolling_bos: bool = False
    """With true rolling log-likelihoods repeat HFLM's: where the tokenizer adds BOS itself, the prefix token precedes
    it and BOS is scored as if it were text."""

    think_end_token: Annotated[str | Int | None, BeforeValidator(_number)] = None
    """End of a model's reasoning, as text or token id. The answer is what follows its last occurrence, and a task's
    stop strings count only there."""

    enable_thinking: bool | None = None
    """Handed to the chat template. With true `think_end_token` is needed."""

    chat_template_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the chat template."""

    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of sampled generation. Every repeat of a request draws from its own stream."""

    engine: EngineConfig = Field(default_factory=EngineConfig)
    """Settings of the decoder runner."""

    def check(self, *, has_session: bool) -> None:
        """Raises `ConfigError` for arguments that contradict each other."""
        if has_session == (self.pretrained is not None):
            raise ConfigError("OrtLM takes either 'pretrained', the path of a model, or an open 'session'")
        idle = sorted(self.model_fields_set.intersection(_OPENING)) if has_session else []
        if idle:
            raise ConfigError(f"OrtLM: {', '.join(idle)} cannot be changed on a session that is open")
        if self.enable_thinking and self.think_end_token is None:
            raise ConfigError("OrtLM: 'enable_thinking' needs 'think_end_token', to tell answer from reasoning")

    def opening(self) -> dict[str, Any]:
        """Keyword arguments of `olive_ext.session.open`."""
        batch_size = self.batch_size
        if isinstance(batch_size, str) and self.max_batch_size is not None:
            batch_size = min(self.max_batch_size, _AUTO_BATCH_SIZE)
        device = None if self.kind == "onnx" else self.device
        return {"batch_size": batch_size, "device": device, **{name: getattr(self, name) for name in _OPENING}}

    def asking(self) -> dict[str, Any]:
        """The arguments that were given and do not open a model."""
        opening = {*_OPENING, "pretrained", "batch_size", "max_batch_size", "device"}
        return {name: getattr(self, name) for name in sorted(self.model_fields_set - opening)}

    def deciding(self) -> dict[str, Any]:
        """The arguments that decide what a request's answer is, JSON-ready."""
        return self.model_dump(mode="json", include=_DECIDING)

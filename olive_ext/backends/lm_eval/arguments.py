"""What `OrtLM`'s constructor accepts. Knows neither lm-eval nor a session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator, model_validator
from typing_extensions import Self

from olive_ext.config import ModelSettings, OpenSettings
from olive_ext.config.base import Int, NonNegativeInt, PositiveInt
from olive_ext.errors import ContradictionError, MissingError, warn_ignored
from olive_ext.model import ResolvedModel, resolve
from olive_ext.session.opening import resolved_reference

_TEXT = {"add_bos_token", "prefix_token_id"}
"""Settings that only affect how `OrtLM` encodes texts: opening a model does not need them."""

_OPENING = frozenset(OpenSettings.model_fields) - _TEXT
_HANDED_OVER = {"batch_size", "max_batch_size", "device"}
"""Settings that lm-eval passes with any model: they have no effect on an open session."""


_OF_OLIVE = {"ep": "execution_provider", "ep_options": "provider_options"}
"""Arguments of Olive's own backends, as recipes have them, and what replaces them here."""

_IGNORED = {"past_present_share_buffer": "the graph says whether the KV cache is updated in place"}
"""Arguments of Olive's own backends that have no effect here, and why."""


def _number(value: Any) -> Any:
    """Turns numbers that lm-eval passes as text on its command line ("8") into numbers."""
    return int(value) if isinstance(value, str) and value.isdigit() else value


class OrtLMArguments(OpenSettings):
    """Keyword arguments of `OrtLM`: the settings of opening a model, and how lm-eval's requests are answered."""

    pretrained: str | None = None
    """The model: an .onnx file, or a folder with one or with genai_config.json. Left out where a session is given."""

    max_gen_toks: PositiveInt = 256
    """Tokens generated at most, where a task names no number."""

    reference: Any = None
    """A model to compare with, as `olive_ext.open` takes it: a path, a mapping, or the records of one."""

    record_to: Any = None
    """Where this model's distributions are recorded, as `olive_ext.open` takes it."""

    hflm_rolling_bos: bool = False
    """Makes rolling log-likelihoods repeat HFLM's: where the tokenizer adds BOS itself, the prefix token precedes
    it and BOS is scored as if it were text."""

    think_end_token: Annotated[str | Int | None, BeforeValidator(_number)] = None
    """End of a model's reasoning, as text or token id. The answer is what follows its last occurrence, and a task's
    stop strings count only there."""

    thinking_budget: NonNegativeInt | None = None
    """Most tokens of the reasoning. After that many without an end, `think_end_token` is inserted, and the model goes
    on to its answer. Needs `think_end_token`, and must be below `max_gen_toks`."""

    enable_thinking: bool | None = None
    """Handed to the chat template. With true `think_end_token` is needed."""

    chat_template_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the chat template."""

    max_images: PositiveInt = 999
    """Pictures of a request that the model is given at most; those after them are left out."""

    image_width: PositiveInt | None = None
    """Width in pixels that pictures are resized to, in proportion; with `image_height` they fit into both."""

    image_height: PositiveInt | None = None
    """Height in pixels that pictures are resized to, in proportion."""

    image_max_side: PositiveInt | None = None
    """Pixels that the longer side of pictures is resized to."""

    image_string: str | None = None
    """What stands for a picture in prompts without a chat template. None takes the model's own marker."""

    interleave: bool = True
    """Whether the parts of a chat message stand where the task's text has "<image>", or all in front of it."""

    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of sampled generation. Every repeat of a request draws from its own stream."""

    _read_number = field_validator("batch_size", mode="before")(_number)

    @model_validator(mode="before")
    @classmethod
    def _name_olives(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        for name in _OF_OLIVE.keys() & values.keys():
            raise ContradictionError(f"'{name}' is an argument of Olive's backend: write '{_OF_OLIVE[name]}'")
        return {name: value for name, value in values.items() if name not in _IGNORED}

    @model_validator(mode="after")
    def _check_thinking(self) -> Self:
        if self.enable_thinking and self.think_end_token is None:
            raise MissingError("needs 'think_end_token', to separate answer and reasoning", "enable_thinking")
        if self.thinking_budget is not None and self.think_end_token is None:
            raise MissingError("'thinking_budget' needs 'think_end_token', which is put at its end", "thinking_budget")
        return self

    @classmethod
    def of(cls, pretrained: str | ResolvedModel | None, arguments: Mapping[str, Any], *, has_session: bool) -> Self:
        """The arguments from a call of `OrtLM`. Raises `ConfigError`, also for arguments that contradict each other."""
        for name in _IGNORED.keys() & arguments.keys():
            warn_ignored(f"the argument '{name}' of Olive's backend: {_IGNORED[name]}")
        path = pretrained.settings.model if isinstance(pretrained, ResolvedModel) else pretrained
        parsed = cls.parse({"pretrained": path, **arguments}, where="OrtLM")
        if has_session == (parsed.pretrained is not None):
            raise ContradictionError("give either the path of a model or an open 'session'", "OrtLM.pretrained")
        opening = (_OPENING | {"reference", "record_to"}) - _HANDED_OVER
        if has_session and (idle := sorted(parsed.model_fields_set & opening)):
            raise ContradictionError("it cannot be changed on a session that is open", f"OrtLM.{idle[0]}")
        return parsed

    def to_open(self, pretrained: str | ResolvedModel | None) -> tuple[ResolvedModel, Any, Any]:
        """What `session.opening.open_model` takes. A model of which only the path is known is located first."""
        if isinstance(pretrained, ResolvedModel):
            model = pretrained.patched(self.opening())
        else:
            model = resolve(ModelSettings(model=str(pretrained), **self.opening()))
        return model, resolved_reference(model, self.reference), self.record_to

    def opening(self) -> dict[str, Any]:
        """The settings of opening the model that were given."""
        return self.written(_OPENING)

    def template_variables(self) -> dict[str, Any]:
        """The variables of the chat template that were given."""
        thinking = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        return {**self.chat_template_args, **thinking}

    def thinking(self) -> dict[str, Any]:
        """The fields of a `GenerationRequest` that are about reasoning."""
        return {"think_end_token": self.think_end_token, "thinking_budget": self.thinking_budget}

    def asking(self) -> dict[str, Any]:
        """The arguments that were given and do not open a model."""
        return self.written(self.model_fields_set - _OPENING - {"pretrained", "reference", "record_to"})

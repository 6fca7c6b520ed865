"""What `OrtLM`'s constructor accepts; and lm-eval's generation settings, converted to a `GenerationRequest`.

Reads `gen_kwargs` with lm-eval's own helpers, so that aliases and defaults are lm-eval's. Knows no session.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from pydantic import BeforeValidator, Field, field_validator, model_validator
from typing_extensions import Self

from olive_ext.config import ModelSettings, OpenSettings
from olive_ext.config.base import Int, NonNegativeInt, PositiveInt
from olive_ext.errors import ContradictionError, MissingError, TaskError, UnfitTaskError, warn_ignored
from olive_ext.model import ResolvedModel, resolve
from olive_ext.session.generation_bounds import too_long
from olive_ext.session.opening import resolved_reference
from olive_ext.session.requests import GenerationOutput, GenerationRequest

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

    def asking(self) -> dict[str, Any]:
        """The arguments that were given and do not open a model."""
        return self.written(self.model_fields_set - _OPENING - {"pretrained", "reference", "record_to"})


_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "num_return_sequences": (1,),
    "repetition_penalty": (1, 1.0),
    "no_repeat_ngram_size": (0,),
    "min_p": (None, 0, 0.0),
    "typical_p": (None, 1, 1.0),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "use_cache": (True,),
}
"""Settings of other backends that this one lacks, with the values that have no effect."""

_BEAMS: Mapping[str, Any] = {"num_beams": 1, "length_penalty": 1.0, "early_stopping": False}
"""The settings of a beam search, with transformers' defaults. Those after the first count with several beams only."""

_KNOWN = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k", "seed", "max_length", *_BEAMS}

_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""lm-eval's names of the most tokens to be generated."""

_GREEDY: Mapping[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
"""The settings of sampling, with the values that a greedy generation has."""


_NUMBERS: Mapping[str, tuple[type[int | float], float, float, str]] = {
    "temperature": (float, 0, math.inf, "a number of at least 0 (0 is greedy)"),
    "top_p": (float, math.ulp(0.0), 1, "a number above 0 and at most 1 (1 turns it off)"),
    "top_k": (int, 0, math.inf, "a whole number of at least 0 (0 turns it off)"),
    "seed": (int, 0, math.inf, "a whole number of at least 0"),
    "max_length": (int, 1, math.inf, "a positive integer"),
    "num_beams": (int, 1, 2**16, "an integer from 1 to 65536 (1 is no beam search)"),
    "length_penalty": (float, -sys.float_info.max, sys.float_info.max, "a number (1 divides by the length)"),
    **dict.fromkeys(_LENGTHS, (int, 1, math.inf, "a positive integer")),
}
"""The type, the least and the largest value of settings that are numbers, and a description of these."""


def check_numbers(gen_kwargs: Mapping[str, Any]) -> None:
    """Raises `TaskError` for a number that no generation can have, whether the generation is sampled or not."""
    for name, (kind, least, most, words) in _NUMBERS.items():
        value = gen_kwargs.get(name)
        try:
            number = None if value is None or isinstance(value, bool) else kind(value)
            is_right = value is None or (number is not None and least <= number <= most and number == float(value))
        except (ValueError, TypeError, OverflowError):
            is_right = False
        if not is_right:
            raise TaskError(f"give {words}", name, value, code="wrong_value")


@dataclass(frozen=True)
class GenerationSettings:
    """The settings of one `gen_kwargs`. `until` holds the EOS text as well."""

    max_gen_toks: int
    until: tuple[str, ...]
    sampling: Mapping[str, Any]
    """`temperature`, `top_p`, `top_k` and `seed`."""

    max_length: int | None
    beams: Mapping[str, Any]
    """The beam settings of a `GenerationRequest`; empty without a beam search."""

    @classmethod
    def read(cls, gen_kwargs: Mapping[str, Any], default_max_gen_toks: int, eos: str | None, seed: int) -> Self:
        """Reads `gen_kwargs` without changing it. Raises `TaskError` for a setting that is not supported."""
        check_numbers(gen_kwargs)
        kwargs = dict(normalize_gen_kwargs(dict(gen_kwargs), default_max_gen_toks))
        for name, value in kwargs.items():
            if name not in _KNOWN and value not in _NEUTRAL.get(name, ()):
                raise UnfitTaskError(f"this generation setting is unsupported; known: {sorted(_KNOWN)}", name, value)
        until = handle_stop_sequences(list(kwargs["until"]), eos=eos)
        if not all(isinstance(stop, str) for stop in until):
            raise TaskError("give a text or a list of texts", "until", gen_kwargs["until"], code="wrong_value")
        unread = () if kwargs["do_sample"] else _GREEDY
        written = {name: value for name, value in kwargs.items() if value is not None and name not in unread}
        sampling = {**_GREEDY, "seed": seed, **written}
        return cls(
            max_gen_toks=kwargs["max_gen_toks"],
            until=tuple(stop for stop in until if stop),
            sampling={name: _NUMBERS[name][0](sampling[name]) for name in (*_GREEDY, "seed")},
            max_length=kwargs.get("max_length"),
            beams=_beams(kwargs),
        )

    @property
    def is_sampled(self) -> bool:
        """Whether tokens are drawn; a temperature of 0 is greedy."""
        return bool(self.sampling["temperature"] > 0)

    def answer(self, output: GenerationOutput, decode: Callable[[Sequence[int]], str]) -> str:
        """lm-eval's answer: it looks for stops in the text without special tokens."""
        if output.reasoning is not None:
            return output.text
        return str(postprocess_generated_text(decode(output.tokens), list(self.until), None))

    def refuse_long(self, task: str, context_length: int | None) -> None:
        """Raises `TaskError` for a `max_gen_toks` of `task` that leaves no room for a prompt in a context of that
        length; None stands for any context."""
        if context_length is None or self.max_length is not None:
            return
        if problem := too_long("max_gen_toks", self.max_gen_toks, context_length):
            raise TaskError(f"task '{task}': {problem}", "max_gen_toks", self.max_gen_toks)

    def request(
        self, prompt: Sequence[int], max_length: int, repeat: int, fields: Mapping[str, Any], task: str
    ) -> GenerationRequest:
        """The request for token ids `prompt`, of a model with a context of `max_length` tokens. `repeat` counts earlier
        requests with the same arguments; `fields` are fields of the request from elsewhere. Raises `TaskError` where
        nothing can be generated."""
        self.refuse_long(task, max_length)
        budget = self.max_gen_toks if self.max_length is None else self.max_length - len(prompt)
        if budget < 1:
            longest = f"'max_length' = {self.max_length}"
            raise TaskError(f"task '{task}': {longest}, and the prompt has {len(prompt)} tokens", code="contradiction")
        if problem := too_long("max_length", budget, max_length):
            raise TaskError(f"task '{task}': {problem}", "max_gen_toks", self.max_gen_toks)
        seed = _stream(self.sampling["seed"], prompt, repeat) if self.is_sampled else 0
        own = {"prompt": list(prompt), "max_new_tokens": budget, "stop": self.until, **self.sampling, "seed": seed}
        return GenerationRequest(**{**own, **self.beams, **fields})


def refuse_generations(
    tasks: Mapping[str, Mapping[str, Any]],
    gen_kwargs: Mapping[str, Any],
    length: int | None = None,
    model_args: Mapping[str, Any] | None = None,
) -> None:
    """Raises `TaskError` where one of `tasks`, by name with its configuration, generates and its settings, together
    with the user's, cannot be followed by a model of the context `length`; None stands for any. `model_args` are an
    `OrtLM`'s, as given: its reasoning must leave room for an answer."""
    check_numbers(gen_kwargs)
    usual = OrtLMArguments.model_fields["max_gen_toks"].default
    default = 1 if model_args is None else model_args.get("max_gen_toks", usual)
    generating = {name: config for name, config in tasks.items() if config.get("output_type") == "generate_until"}
    if tasks and not generating:
        GenerationSettings.read(gen_kwargs, 1, eos=None, seed=0)  # no answer would show a misspelt name
    for name, config in generating.items():
        written = config.get("generation_kwargs") or {}
        if not isinstance(written, Mapping):
            raise TaskError(f"task '{name}': give a mapping", "generation_kwargs", written, code="wrong_value")
        try:
            settings = GenerationSettings.read({**written, **gen_kwargs}, default, eos=None, seed=0)
        except TaskError as error:
            raise error.inside(f"task '{name}'") from error
        settings.refuse_long(name, length)
        for key, neutral in _GREEDY.items() if not settings.is_sampled and "do_sample" not in gen_kwargs else ():
            if float(gen_kwargs.get(key) or neutral) != neutral:
                greedy = f"answers of '{name}' are greedy without do_sample=true"
                warn_ignored(f"'gen_kwargs' has {key} = {gen_kwargs[key]}, and {greedy}")
        if (config.get("repeats") or 1) > 1 and not settings.is_sampled:
            why = f"task '{name}': a greedy generation is one answer: give 'gen_kwargs' do_sample and temperature"
            raise TaskError(why, "repeats", config["repeats"])
        budget = None if settings.max_length is not None else (model_args or {}).get("thinking_budget")
        if isinstance(budget, int) and budget >= settings.max_gen_toks:
            why = f"task '{name}': no room for an answer: give less than 'max_gen_toks', {settings.max_gen_toks}"
            raise TaskError(why, "thinking_budget", budget)


def _beams(kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of a beam search. Raises `TaskError` where it would be sampled, or ends by no known rule."""
    beams = {name: default if kwargs.get(name) is None else kwargs[name] for name, default in _BEAMS.items()}
    beams["num_beams"] = int(beams["num_beams"])
    if beams["num_beams"] == 1:
        return {}
    if kwargs["do_sample"] and kwargs.get("temperature") != 0:
        raise TaskError("'do_sample' draws no beams", "num_beams", beams["num_beams"], code="contradiction")
    if (end := beams["early_stopping"]) not in (True, False, "never"):
        raise TaskError('give true, false or "never"', "early_stopping", end, code="wrong_value")
    return {**beams, "early_stopping": end or False, "length_penalty": float(beams["length_penalty"])}


def _stream(seed: int, prompt: Sequence[int], repeat: int) -> int:
    """A seed of its own for every prompt and repeat, whatever the order of the requests; 32 bits."""
    text = f"{seed}/{repeat}/{','.join(map(str, prompt))}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")

"""Requests to a session and its outputs: text or token ids in, texts and log-probabilities out.

Requests are checked on construction: a wrong value is a `ConfigError` that names the field. Token ids are never
tokenised again. Knows no tokenizer.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from typing_extensions import TypeIs

from olive_ext.engine.requests import Beams, FinishReason, Ids, Sampling
from olive_ext.errors import ConfigError, ContradictionError, MissingError, shown, suggest
from olive_ext.stats.compared_fields import Compared

_Value = TypeVar("_Value")
Text: TypeAlias = str | Sequence[int]
Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, Any]]
SourceInput: TypeAlias = str | Sequence[int] | npt.NDArray[Any]
"""A text or token ids for an encoder of text; an array of features without a batch axis for one of sound."""


def is_chat(prompt: Prompt) -> TypeIs[Sequence[Mapping[str, Any]]]:
    """Whether the prompt of a request is chat messages: its first item decides, because requests are checked."""
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def checked_ids(name: str, values: Iterable[Any]) -> Ids:
    """Token ids; those that were checked before are not read again."""
    if isinstance(values, Ids):
        return values
    try:
        read = (*map(operator.index, [values] if isinstance(values, bytes) else values),)
        ids = Ids(read)
        is_wrong = ids.array.min(initial=0) < 0
    except TypeError:
        raise ConfigError(f"'{name}': text or a list of token ids, not {shown(values)}", name) from None
    except struct.error:
        is_wrong = True
    if is_wrong:
        one = next(one for one in (min(read), max(read)) if not 0 <= one < 2**31)
        raise ConfigError(f"'{name}' holds {one}: token ids are from 0 to 2147483647", name)
    return ids


def checked_text(name: str, value: Any) -> Text:
    """A text, or token ids."""
    return whole_text(name, value) if isinstance(value, str) else checked_ids(name, value)


def whole_text(name: str, value: _Value) -> _Value:
    """`value`, a text or what may hold texts. Raises `ConfigError` for half of a surrogate pair, which has no bytes."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"'{name}' has half of a surrogate pair at character {error.start}", name) from error
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in inner:
        whole_text(f"{name}[{key}]", item)
    return value


def checked_source(value: Any) -> SourceInput | None:
    """What an encoder takes, where a request has that."""
    if value is None or (isinstance(value, np.ndarray) and value.dtype.kind == "f"):
        return value
    return checked_text("source", value)


def checked_items(name: str, value: Any) -> tuple[Any, ...]:
    """Pictures or sounds."""
    if not isinstance(value, (list, tuple)):
        raise ConfigError("a list is expected", name, value)
    return tuple(value)


def checked_prompt(name: str, value: Any, *, may_be_empty: bool = False) -> Prompt:
    """A text, token ids, or chat messages, each of which has a role and a content."""
    if isinstance(value, str):
        return whole_text(name, value)
    if isinstance(value, Ids) and len(value.array):
        return value
    if value is None or not hasattr(value, "__len__") or isinstance(value, Mapping):
        raise ConfigError("text, a list of chat messages, or a list of token ids", name, value)
    if len(value) == 0 and may_be_empty:
        return ""
    if len(value) == 0:
        raise ConfigError(f"'{name}' is an empty list: give text, chat messages, or token ids", name)
    if not isinstance(value[0], Mapping):
        return checked_ids(name, value)
    for index, message in enumerate(value):
        whole_text(f"{name}[{index}]", message)
        if not isinstance(message, Mapping) or "role" not in message:
            raise ConfigError(f"'{name}' holds {shown(message)}: a chat message has a 'role' and a 'content'", name)
        if not isinstance(content := message.get("content"), (str, list, tuple, NoneType)):
            raise ConfigError("a message's 'content' is text or a list of parts", name, content)
    return tuple(value)


def checked_stops(value: Any) -> tuple[str, ...]:
    """Stop strings; one alone may be given as a text."""
    if not isinstance(value, (str, list, tuple)):
        raise ConfigError("a text or a list of texts", "stop", value)
    stops = (value,) if isinstance(value, str) else tuple(value)
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            raise ConfigError(f"'stop' holds {stop!r}: texts of at least one character", "stop")
        whole_text("stop", stop)
    return stops


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt and how to continue it. The defaults are greedy."""

    prompt: Prompt = ""
    """Text, chat messages ({"role": ..., "content": ...}), or token ids. "" starts from the prefix token.

    For an encoder-decoder it is the beginning of the decoder's answer: text after the first tokens, or all as ids.
    """

    max_new_tokens: int = 256
    stop: str | Sequence[str] = ()
    """Texts before which the answer is cut; they may begin or end inside tokens."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    num_beams: int = 1
    """Sequences that a beam search follows, as in transformers; 1 is greedy, or drawn with a `temperature`."""

    length_penalty: float = 1.0
    """With beams: a sequence's sum of log-probabilities is divided by its length to this power."""

    early_stopping: bool | Literal["never"] = False
    """With beams: True ends the search with `num_beams` finished sequences, False when no other is likely to be better,
    "never" when none can be."""

    num_return_sequences: int = 1
    """With beams: how many of the finished sequences come back, at most `num_beams`."""

    add_generation_prompt: bool = True
    """For chat messages: open an assistant turn. False continues the last message instead."""

    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """For chat messages: variables of the template, e.g. {"enable_thinking": False}."""

    source: SourceInput | None = None
    """For the encoder of an encoder-decoder: text, token ids, or an array of features (Whisper: [80, 3000])."""

    images: Sequence[Any] = ()
    """Pictures (PIL, path or the bytes of a file) for the prompt's markers, or for the parts {"type": "image"} of its
    messages that hold none, in order."""

    audio: Sequence[Any] = ()
    """One sound for the encoder of a model of speech: a WAV file's path or bytes, (samples, rate), or
    {"array": samples, "sampling_rate": rate}. `source` takes its features instead. A sound that is longer than
    the encoder takes is answered in windows."""

    think_end_token: str | int | None = None
    """End of a model's reasoning, as text or token id: the answer is what follows its last occurrence, and `stop`
    counts there alone."""

    thinking_budget: int | None = None
    """Most tokens of the reasoning. After that many without an end, `think_end_token` is inserted, and the model goes
    on to its answer."""

    max_length: int | None = None
    """Most tokens of prompt and answer together, where that leaves less than `max_new_tokens`; at least one is new."""

    def __post_init__(self) -> None:
        _set(self, "source", checked_source(self.source))
        _set(self, "images", checked_items("images", self.images))
        _set(self, "audio", checked_items("audio", self.audio))
        _set(self, "prompt", checked_prompt("prompt", self.prompt))
        _set(self, "stop", checked_stops(self.stop))
        whole_text("chat_template_kwargs", self.chat_template_kwargs)
        _at_least("max_new_tokens", self.max_new_tokens, 1)
        _at_least("max_length", 1 if self.max_length is None else self.max_length, 1)
        _at_least("top_k", self.top_k, 0, " (0 turns it off)")
        _at_least("seed", self.seed, 0)
        if not (_is_number(self.temperature) and 0 <= self.temperature < math.inf):
            raise ConfigError("a number of at least 0 (0 is greedy)", "temperature", self.temperature)
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ConfigError("a number above 0 and at most 1 (1 turns it off)", "top_p", self.top_p)
        self._check_thinking()
        self._check_beams()

    @property
    def sampling(self) -> Sampling:
        """How the next token is drawn."""
        return Sampling(self.temperature, self.top_p, self.top_k, self.seed)

    @property
    def beams(self) -> Beams | None:
        """The beam search; None for one beam."""
        wanted = self.length_penalty, self.early_stopping, self.num_return_sequences
        return None if self.num_beams == 1 else Beams(self.num_beams, *wanted)

    def _check_thinking(self) -> None:
        end, budget = whole_text("think_end_token", self.think_end_token), self.thinking_budget
        is_id = isinstance(end, int) and not isinstance(end, bool) and end >= 0
        if end is not None and not is_id and not (isinstance(end, str) and end):
            raise ConfigError("a text of at least one character, or a token id from 0 on", "think_end_token", end)
        if budget is None:
            return
        _at_least("thinking_budget", budget, 0)
        if end is None:
            raise MissingError(f"'thinking_budget' = {budget} needs 'think_end_token', which is put at its end")
        if self.num_beams > 1:
            raise ContradictionError(f"'thinking_budget' = {budget} with 'num_beams' = {self.num_beams}: give 1 beam")

    def _check_beams(self) -> None:
        _at_least("num_beams", self.num_beams, 1, " (1 is no beam search)")
        _at_least("num_return_sequences", self.num_return_sequences, 1)
        if self.num_return_sequences > self.num_beams:
            raise ConfigError(
                f"at most 'num_beams', which is {self.num_beams}", "num_return_sequences", self.num_return_sequences
            )
        if not (_is_number(self.length_penalty) and math.isfinite(self.length_penalty)):
            raise ConfigError("a number (1 divides by the length)", "length_penalty", self.length_penalty)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ConfigError('true, false or "never"', "early_stopping", self.early_stopping)
        if self.num_beams > 1 and self.temperature:
            raise ContradictionError(
                f"beams are not drawn: their 'temperature' is 0, not {self.temperature}", "num_beams", self.num_beams
            )


@dataclass(frozen=True)
class ScoringRequest:
    """Scores `target` after `context`. An empty context stands for the prefix token (BOS, else EOS), and with an
    encoder-decoder for the decoder's first tokens."""

    context: Prompt
    """Text, token ids, or chat messages, after which an assistant turn is opened and the target encoded alone."""

    target: Text
    source: SourceInput | None = None
    """As in `GenerationRequest`."""

    images: Sequence[Any] = ()
    """As in `GenerationRequest`."""

    audio: Sequence[Any] = ()
    """As in `GenerationRequest`, but no longer than one window."""

    def __post_init__(self) -> None:
        _set(self, "context", checked_prompt("context", self.context, may_be_empty=True))
        _set(self, "images", checked_items("images", self.images))
        _set(self, "audio", checked_items("audio", self.audio))
        _set(self, "target", checked_text("target", self.target))
        _set(self, "source", checked_source(self.source))
        if not self.target:
            raise ConfigError("'target' is empty: there is nothing to score", "target")


@dataclass(frozen=True)
class RollingRequest:
    """Scores a whole text. `prefix` is the token in front of it, which is not scored.

    None takes the tokenizer's prefix token. Token ids are scored exactly as given.
    """

    text: Text
    prefix: int | None = None

    def __post_init__(self) -> None:
        _set(self, "text", checked_text("text", self.text))
        if self.prefix is not None:
            _at_least("prefix", self.prefix, 0)


@dataclass(frozen=True)
class GeneratedSequence:
    """One of the sequences of a beam search, with the fields of a `GenerationOutput`. `score`: the sum of its
    log-probabilities in nats, over its length to the power `length_penalty`."""

    text: str
    tokens: tuple[int, ...]
    score: float
    finish_reason: FinishReason
    stop_id: int | None = None


@dataclass(frozen=True)
class Reasoning:
    """What a model wrote before its answer."""

    text: str
    """The text before the end; empty without one."""

    num_tokens: int
    """Up to the end, that included; all that were generated where there is none, and 0 after a prompt in which the
    reasoning has ended."""

    has_ended: bool
    is_forced: bool
    """Whether the budget ended it."""


@dataclass(frozen=True)
class GenerationOutput:
    """`text` without special tokens, cut before the first stop; `tokens` as generated, those of the stop included."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    stop_id: int | None = None
    """The token that ended the text, where the model wrote one of its stop ids; it is not among `tokens`."""

    sequences: tuple[GeneratedSequence, ...] = ()
    """With beams the best `num_return_sequences`, best first: the first one is also this output's own."""

    reasoning: Reasoning | None = None
    """What stands before `text`, where the request has a `think_end_token`."""


@dataclass(frozen=True)
class ScoringOutput:
    """`logprob` in nats, the sum of `token_logprobs`; `is_greedy`: every target token was the most likely one."""

    logprob: float
    is_greedy: bool
    token_count: int
    token_logprobs: tuple[float, ...]
    compared: Compared | None = field(default=None, compare=False)
    """Comparison with the session's reference at each of the target's tokens; None without a reference."""


@dataclass(frozen=True)
class RollingOutput:
    """`logprob` in nats of all `token_count` tokens, the sum of `token_logprobs`; 0 and 0 for an empty text."""

    logprob: float
    token_count: int
    token_logprobs: tuple[float, ...] = ()
    compared: Compared | None = field(default=None, compare=False)
    """Comparison with the session's reference at each token, all windows together; None without a reference."""


def _set(request: object, name: str, value: object) -> None:
    object.__setattr__(request, name, value)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _at_least(name: str, value: object, least: int, note: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"a whole number of at least {least}{note}", name, value)


_SETTINGS = tuple(field.name for field in fields(GenerationRequest) if field.name != "prompt")
ToGenerate: TypeAlias = GenerationRequest | Prompt
ToScore: TypeAlias = ScoringRequest | tuple[Prompt, Text]
ToRoll: TypeAlias = RollingRequest | Text


def is_one(requests: object) -> TypeIs[ToGenerate]:
    """Whether it is one request, not a list of them: a text, messages, token ids, or a `GenerationRequest`."""
    is_listed = isinstance(requests, list | tuple | Ids) and bool(requests) and isinstance(requests[0], Mapping | int)
    return is_listed or isinstance(requests, str | GenerationRequest)


def refuse_unknown_settings(settings: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for a setting that is no field of a `GenerationRequest`."""
    if unknown := [name for name in settings if name not in _SETTINGS]:
        hint = suggest(unknown[0], _SETTINGS) or f"known: {', '.join(_SETTINGS)}"
        raise ConfigError(f"generate: unknown setting '{unknown[0]}': {hint}", unknown[0], code="unknown_key")


def to_generation(item: ToGenerate, settings: Mapping[str, Any] | None = None) -> GenerationRequest:
    """A prompt alone is continued with `settings`, fields of a `GenerationRequest`, and the defaults of the others.
    Raises `ConfigError` for settings beside a whole request."""
    if not isinstance(item, GenerationRequest):
        return GenerationRequest(item, **(settings or {}))
    if settings:
        raise ContradictionError("give it in the GenerationRequest", next(iter(settings)))
    return item


def to_scoring(item: ToScore) -> ScoringRequest:
    """Raises `ConfigError` for what is neither a pair nor a request."""
    if isinstance(item, ScoringRequest):
        return item
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise ConfigError(f"{type(item).__name__}: a (context, target) pair or a ScoringRequest is expected")
    return ScoringRequest(*item)


def to_rolling(item: ToRoll) -> RollingRequest:
    """A text is scored after the prefix token."""
    return item if isinstance(item, RollingRequest) else RollingRequest(item)

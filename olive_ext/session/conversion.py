"""Conversion of a session's requests to the engine's, and of the engine's results to the session's outputs.

A request that must be scored in several windows becomes several engine requests, whose results are joined again. A
window's last token is never fed, so a window may hold `max_length` + 1 tokens. Where the reasoning of a model ends is
read here, too. Knows no engine run, and no audio: features are made by whoever has the sound.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Container, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from olive_ext.engine.requests import Generation, Ids, KeyedResult, Lost, Request, Result, ThinkingBudget, join_compared
from olive_ext.errors import (
    ConfigError,
    ContradictionError,
    LostRequestsError,
    MediaError,
    OliveExtError,
    TaskError,
    UnfitTaskError,
    counted,
)
from olive_ext.media.items import Media, Source
from olive_ext.model import ResolvedModel
from olive_ext.model.files.package_config import Suppressed
from olive_ext.session.generation_bounds import StopChecker, too_long
from olive_ext.session.placeholders import (
    NO_SOUND,
    Encoding,
    MediaText,
    RequestT,
    cut_media,
    decoder_tokens,
    make_sources,
    speech_request,
    with_media,
)
from olive_ext.session.requests import (
    GeneratedSequence,
    GenerationOutput,
    GenerationRequest,
    Prompt,
    Reasoning,
    RollingOutput,
    RollingRequest,
    ScoringOutput,
    ScoringRequest,
    is_chat,
)
from olive_ext.session.tokenizer import Tokenizer
from olive_ext.session.tokenizer_fit import refuse_unknown

logger = logging.getLogger(__name__)

SessionRequest: TypeAlias = GenerationRequest | ScoringRequest | RollingRequest
SessionOutput: TypeAlias = GenerationOutput | ScoringOutput | RollingOutput


class OpenModel(Protocol):
    """What conversions and the journal of answers read of a session."""

    tokenizer: Tokenizer
    stop_ids: frozenset[int]
    encoding: Encoding | None
    media: MediaText | None
    model: ResolvedModel | None
    """The opened model, where it was resolved."""

    @property
    def max_length(self) -> int:
        """Tokens that the model sees at once at most."""

    @property
    def reference(self) -> OpenModel | None:
        """The resident reference."""

    def describe_execution(self) -> dict[str, Any]:
        """Facts of the execution."""


def convert(model: OpenModel, request: SessionRequest) -> tuple[tuple[Request, ...], bool]:
    """The engine's requests for one of the session, none for an empty text, and whether the text was cut on the left to
    fit. Raises `ConfigError`, `TaskError` and `MediaError` for what the model cannot take."""
    if isinstance(request, GenerationRequest):
        requests, is_truncated = _convert_generation(model, request)
    elif isinstance(request, ScoringRequest):
        requests, is_truncated = _convert_scoring(model, request)
    else:
        requests, is_truncated = _convert_rolling(model, request), False
    for one in requests if model.model is not None else ():  # else it is not known which tokens the model has
        refuse_unknown(one, model.tokenizer, () if model.media is None else model.media.placeholders)
    return requests, is_truncated


def output_of(
    model: OpenModel, request: SessionRequest, requests: Sequence[Request], results: Sequence[Result]
) -> SessionOutput:
    """The session's output for `request` from the `results` of the engine's `requests` for it, in their order."""
    if isinstance(request, GenerationRequest):
        return _generation_output(model.tokenizer, request, requests[0], results)
    logprobs = tuple(logprob for result in results for logprob in result.logprobs)
    total, compared = math.fsum(logprobs), join_compared(requests, results)
    if isinstance(request, RollingRequest):
        return RollingOutput(total, len(logprobs), logprobs, compared)
    is_greedy = all(greedy for result in results for greedy in result.is_greedy)
    return ScoringOutput(total, is_greedy, len(logprobs), logprobs, compared)


def _prompt_tokens(
    tokenizer: Tokenizer,
    prompt: Prompt,
    request: RequestT,
    is_open: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> tuple[Sequence[int], RequestT]:
    """Ids as they are, a text's with the tokenizer's special tokens, messages' by the chat template, which writes its
    own special tokens; and the request with the pictures and sounds that its messages hold in `images` and `audio`."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt), request
    if not is_chat(prompt):
        return prompt, request
    messages, images, audio = with_media(prompt, request)
    text = tokenizer.render_chat(messages, is_open, **(variables or {}))
    return tokenizer.encode(text, add_special_tokens=False), replace(request, images=images, audio=audio)


def _convert_generation(model: OpenModel, request: GenerationRequest) -> tuple[tuple[Request, ...], bool]:
    """Raises `ConfigError` where `max_new_tokens` leaves no room for a prompt, or a source is missing or not taken."""
    tokenizer, encoding, media, max_length = model.tokenizer, model.encoding, model.media, model.max_length
    request = request if encoding is None else speech_request(request, encoding)
    sources = make_sources(tokenizer, request, encoding, max_length)
    items: Media = ()
    if encoding is None:
        is_open, variables = request.add_generation_prompt, request.chat_template_kwargs
        tokens, request = _prompt_tokens(tokenizer, request.prompt, request, is_open, variables)
        tokens, items = with_placeholders(media, tokens or [tokenizer.prefix_token_id], request)
    else:
        tokens = decoder_tokens(tokenizer, request.prompt, encoding)
    if request.max_length is not None:
        room = max(1, min(request.max_length, max_length) - len(tokens))
        request = replace(request, max_new_tokens=min(request.max_new_tokens, room))
    if problem := too_long("max_new_tokens", request.max_new_tokens, max_length):
        raise ConfigError(problem, "max_new_tokens", request.max_new_tokens)
    kept = Ids(tokens[request.max_new_tokens - max_length :])
    items = cut_media(items, len(tokens) - len(kept), len(tokens))
    stop_ids = model.stop_ids.union(() if media is None else media.placeholders)  # after one nothing can be computed
    think = None if (end := request.think_end_token) is None else ThinkingEnd.of(end, tokenizer, stop_ids)
    checker = StopChecker(tokenizer, request.stop if think is None else think.stops(request.stop))
    generation = Generation(
        max_new_tokens=request.max_new_tokens,
        stop_ids=stop_ids,
        sampling=request.sampling,
        is_finished=checker if checker.stops else None,
        stops=checker.stops,
        suppressed=Suppressed() if encoding is None else encoding.suppressed,
        beams=request.beams,
        thinking=None if think is None or think.has_ended(kept) else think.budget(request),
    )
    if len(sources) > 1 and request.num_return_sequences > 1:
        raise MediaError(f"{_windows(len(sources), encoding)}: 'num_return_sequences' must be 1")
    requests = tuple(Request(kept, generation=generation, source=source, media=items) for source in sources)
    return requests, len(kept) < len(tokens)


def _generation_output(
    tokenizer: Tokenizer, request: GenerationRequest, converted: Request, results: Sequence[Result]
) -> GenerationOutput:
    """`converted`: the engine's request for the first window of a sound, as for all others."""
    assert converted.generation is not None
    checker, last = StopChecker(tokenizer, converted.generation.stops), results[-1]
    tokens = tuple(token for result in results for token in result.tokens)
    texts = [checker.text(result.tokens) for result in results]
    text = texts[0] if len(texts) == 1 else " ".join(filter(None, map(str.strip, texts)))
    best = last.hypotheses if len(results) == 1 else ()
    sequences = tuple(GeneratedSequence(checker.text(one.tokens), **vars(one)) for one in best)
    reasoning = None
    if request.think_end_token is not None:
        think = ThinkingEnd.of(request.think_end_token, tokenizer, converted.generation.stop_ids)
        has_ended, budget = think.has_ended(converted.tokens), converted.generation.thinking
        text, reasoning = think.read(tokens, request.stop, budget, has_ended=has_ended)
    return GenerationOutput(text, tokens, last.finish_reason, last.stop_id, sequences, reasoning)


def _windows(count: int, encoding: Encoding | None) -> str:
    assert encoding is not None
    assert encoding.sound is not None
    return f"the sound is longer than the {encoding.sound.seconds:g} s that the encoder takes, and has {count} windows"


def scoring_tokens(
    tokenizer: Tokenizer, request: ScoringRequest, media: MediaText | None
) -> tuple[Sequence[int], Sequence[int], Media]:
    """(context, target, where the context's pictures and sounds are), no tokens empty. Two texts are encoded jointly;
    where one is given as ids or messages, the other alone."""
    context, target = request.context, request.target
    context_ids: Sequence[int]
    target_ids: Sequence[int]
    if isinstance(context, str) and isinstance(target, str):
        context_ids, target_ids = tokenizer.encode_pair(context, target)
    else:
        context_ids, request = _prompt_tokens(tokenizer, context, request) if context else ([], request)
        target_ids = tokenizer.encode(target, add_special_tokens=False) if isinstance(target, str) else target
        if not context_ids or not target_ids:
            context_ids, target_ids = tokenizer.after_prefix(target_ids)
    tokens, items = with_placeholders(media, context_ids, request)
    if media is not None:
        media.refuse_placeholders(target_ids)
    return tokens, target_ids, items


def with_placeholders(media: MediaText | None, tokens: Sequence[int], request: RequestT) -> tuple[Sequence[int], Media]:
    """The tokens with placeholders, and where these are. Raises `TaskError` for pictures and sounds where a model takes
    none."""
    if media is not None:
        return media.insert_items(tokens, request.images, request.audio)
    if request.images:
        raise UnfitTaskError(f"the request has {counted(len(request.images), 'picture')}; this model takes text only")
    if request.audio:
        raise TaskError(NO_SOUND)
    return tokens, ()


def _convert_scoring(model: OpenModel, request: ScoringRequest) -> tuple[tuple[Request, ...], bool]:
    """Raises `ConfigError` where a source is missing or not taken."""
    tokenizer, encoding, max_length = model.tokenizer, model.encoding, model.max_length
    request = request if encoding is None else speech_request(request, encoding)
    source, *others = make_sources(tokenizer, request, encoding, max_length)
    if others:
        raise MediaError(f"{_windows(len(others) + 1, encoding)}: a target is scored after one window only")
    items: Media = ()
    if encoding is None:
        context, target, items = scoring_tokens(tokenizer, request, model.media)
    else:
        context, text = decoder_tokens(tokenizer, request.context, encoding), request.target
        target = tokenizer.encode_target(text) if isinstance(text, str) else text
        if not target:
            raise TaskError("the target has no tokens: there is nothing to score")
    is_truncated = len(context) + len(target) > max_length + 1
    return target_windows(context, target, max_length, source, items), is_truncated


def _convert_rolling(model: OpenModel, request: RollingRequest) -> tuple[Request, ...]:
    """No text is cut: it has as many windows as it needs. Raises `TaskError` for an encoder-decoder."""
    if model.encoding is not None:
        raise UnfitTaskError("an encoder-decoder has no likelihood of a text alone: score a target after a source")
    prefix = model.tokenizer.prefix_token_id if request.prefix is None else request.prefix
    text = request.text
    target = model.tokenizer.encode_rolling(text, prefix) if isinstance(text, str) else text
    if model.media is not None:
        model.media.refuse_placeholders(target)
    return target_windows([prefix], target, model.max_length)


def target_windows(
    context: Sequence[int], target: Sequence[int], max_length: int, source: Source | None = None, media: Media = ()
) -> tuple[Request, ...]:
    """Requests that score every token of `target` once, each with as much left context as `max_length` leaves.

    A target of at most `max_length` tokens takes one window, `(context + target)[-(max_length + 1):]`, as in HFLM. A
    longer one (HFLM stops with an assertion) is cut into disjoint windows. With the prefix token as context this is
    lm-eval's `make_disjoint_window(get_rolling_token_windows(..., context_len=1))`. `context` holds a token or more.

        max_length 3    context p    target a b c d e f g h
        windows         p[a b c]     c[d e f]     e f[g h]     (scored in brackets; fed: all but the last)
    """
    whole = np.concatenate([Ids(context).array, Ids(target).array])
    requests = []
    for begin in range(0, len(target), max_length):
        num_targets = min(max_length, len(target) - begin)
        end = len(context) + begin + num_targets
        start = max(0, end - max_length - 1)
        items = cut_media(media, start, len(whole))
        requests.append(Request(Ids(whole[start:end]), num_targets, source=source, media=items))
    return tuple(requests)


_AFTER_END = 8
"""Tokens of white space, at most, that a template puts after the end of reasoning that it writes itself."""


@dataclass(frozen=True)
class ThinkingEnd:
    """The end of reasoning, as lm-eval's `think_end_token`: a text or a token id."""

    end: str | int
    tokenizer: Tokenizer

    @classmethod
    def of(cls, end: str | int, tokenizer: Tokenizer, stop_ids: Container[int] = ()) -> ThinkingEnd:
        """A text that is one special token becomes its id, because decoding leaves special tokens out. Raises
        `ConfigError` where it has a token that ends the generation, as those of `stop_ids` do, or that the model has no
        row for.
        """
        special = None if isinstance(end, int) else cls(end, tokenizer)._special_id(end)
        marker = end if special is None else special
        if any(token in stop_ids for token in cls(marker, tokenizer)._marker):
            raise ConfigError("this model's answers end with it: give what ends its reasoning", "think_end_token", end)
        size = tokenizer.rows.embedding
        if isinstance(marker, int) and size is not None and marker >= size:
            raise ConfigError(f"the model's vocabulary has {size} tokens", "think_end_token", end)
        return cls(marker, tokenizer)

    def stops(self, stops: Sequence[str]) -> tuple[str, ...]:
        """The texts that may end the generation. Plain text may occur in the reasoning, so that the answer is only cut
        there afterwards."""
        return tuple(stop for stop in stops if self._special_id(stop) is not None)

    def has_ended(self, prompt: Sequence[int]) -> bool:
        """Whether the reasoning has ended in the prompt, as templates write it for answers without any."""
        tail = self.tokenizer.decode(prompt[-len(self._marker) - _AFTER_END :], skip_special_tokens=False)
        text = self._written if isinstance(self.end, int) else self.end.strip()
        return bool(text) and tail.rstrip().endswith(text)

    def budget(self, request: GenerationRequest) -> ThinkingBudget | None:
        """The request's budget. Raises `ConfigError` where it leaves no room for an answer, or the tokenizer has no
        tokens for the end."""
        number, end, marker = request.thinking_budget, self.end, self._marker
        if number is None:
            return None
        if isinstance(end, str) and not (marker and end.strip() in self._written):
            raise ConfigError(
                f"the tokenizer writes it as {self._written!r}: give a token's id", "think_end_token", end
            )
        if number + len(marker) >= request.max_new_tokens:
            raise ContradictionError(
                f"its end takes {len(marker)} of {request.max_new_tokens} new tokens: none is left",
                "thinking_budget",
                number,
            )
        if isinstance(end, int):
            return ThinkingBudget(number, marker)
        return ThinkingBudget(number, marker, end, StopChecker(self.tokenizer, (end,)))

    def read(
        self,
        tokens: Sequence[int],
        stops: Sequence[str],
        budget: ThinkingBudget | None = None,
        *,
        has_ended: bool = False,
    ) -> tuple[str, Reasoning]:
        """The text after the last end of reasoning, without white space in front and cut before the first of `stops`,
        and what stands before it. Without an end all is the answer; it is known whether the prompt `has_ended` it."""
        number, thoughts, answer = self._split(tokens)
        most = len(tokens) if budget is None else budget.num_tokens
        is_forced = len(tokens) > most and self._split(tokens[:most])[0] is None
        if number is None and is_forced and budget is not None:  # its bytes are none beside those of a cut character
            number = min(most + len(budget.marker), len(tokens))
            thoughts, answer = map(self.tokenizer.decode, (tokens[:most], tokens[number:]))
        answer = answer.lstrip()
        cut = min((at for at in map(answer.find, stops) if at >= 0), default=len(answer))
        known = number if number is not None else 0 if has_ended else len(tokens)
        return answer[:cut], Reasoning(thoughts, known, has_ended or number is not None, is_forced)

    @property
    def _marker(self) -> tuple[int, ...]:
        end = self.end
        return (end,) if isinstance(end, int) else tuple(self.tokenizer.encode(end, add_special_tokens=False))

    @property
    def _written(self) -> str:
        return self.tokenizer.decode(self._marker, skip_special_tokens=False).strip()

    def _split(self, tokens: Sequence[int]) -> tuple[int | None, str, str]:
        """The number of tokens up to the last end, the texts before it and after it; None without an end."""
        if isinstance(self.end, int):
            if self.end not in tokens:
                return None, "", self.tokenizer.decode(tokens)
            number = len(tokens) - list(reversed(tokens)).index(self.end)
            return number, self.tokenizer.decode(tokens[: number - 1]), self.tokenizer.decode(tokens[number:])
        for skips in (True, False):  # an end may hold special tokens beside others
            decode = partial(self.tokenizer.decode, skip_special_tokens=skips)
            text = decode(tokens)
            if (at := text.rfind(self.end)) >= 0:
                ends = at + len(self.end)
                number = bisect_left(range(len(tokens)), ends, key=lambda count: len(decode(tokens[:count])))
                return number, text[:at], text[ends:] if skips else self.tokenizer.decode(tokens[number:])
        return None, "", self.tokenizer.decode(tokens)

    def _special_id(self, text: str) -> int | None:
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        is_special = len(ids) == 1 and ids[0] in self.tokenizer.special_ids
        is_unknown = is_special and self.tokenizer.decode(ids, skip_special_tokens=False).strip() != text.strip()
        return ids[0] if is_special and not is_unknown else None


class Window(NamedTuple):
    """The key of a request of the engine: part `part` of the call's request `key`."""

    key: Any
    part: int

    def __repr__(self) -> str:
        return repr(self.key)  # as errors of the engine name it


PART = 8
"""Requests that are converted at a time, while a device may wait for Python's lock: 0.2 ms."""


class Call:
    """The requests of one call that have no output yet: what each is for the engine, and its results so far."""

    def __init__(self, model: OpenModel, to_request: Callable[[Any], SessionRequest]) -> None:
        """`to_request` converts one argument of a session's method to a request."""
        self._model, self._to_request = model, to_request
        self._waiting: dict[Any, tuple[SessionRequest, tuple[Request, ...], dict[int, Result]]] = {}
        self._lost: dict[Any, str] = {}

    def put(self, key: Hashable, item: Any) -> tuple[list[tuple[Window, Request]], bool]:
        """The engine's requests for one of the call, and whether its text was cut to fit."""
        request = self._to_request(item)
        requests, is_cut = convert(self._model, request)
        self._waiting[key] = request, requests, {}
        return [(Window(key, part), one) for part, one in enumerate(requests)], is_cut

    def put_all(
        self, slices: Iterable[Sequence[tuple[Hashable, Any]]], whose: Callable[[Any], str] | None
    ) -> Iterator[list[tuple[Window, Request]]]:
        """The engine's requests of each slice, after empty slices: one for each `PART` of the work. A request whose
        picture or sound cannot be read is lost, and costs no other its answer. Warns of those that lost their
        beginning; `whose` names the task of a request by its key."""
        for items in slices:
            cut: list[Any] = []
            windows: list[tuple[Window, Request]] = []
            for place, (key, item) in enumerate(items):
                try:
                    with naming(key):
                        more, is_cut = self.put(key, item)
                except MediaError as error:
                    self._lost[key] = str(error.__cause__)
                    continue
                windows += more
                cut += [key] if is_cut else []
                if place % PART == 0:
                    yield []
            if cut:
                tasks = Counter(map(whose, cut)) if whose is not None else {}
                listed = f": {', '.join(f'{number} of {name}' for name, number in tasks.items())}" if tasks else ""
                text = "%d of %d requests were cut on the left to fit into %d tokens%s"
                logger.warning(text, len(cut), len(items), self._model.max_length, listed)
            if windows:
                yield windows

    def outputs(self, results: Iterable[KeyedResult]) -> Generator[tuple[Any, SessionOutput], None, None]:
        """Key and output of each request whose last result is among `results`, then of those that took no request of
        the engine: of empty texts. Raises `LostRequestsError` at the end where requests have none."""
        for (key, part), result in results:
            if isinstance(result, Lost):
                self._lost[key] = result.reason
                continue
            request, requests, results_so_far = self._waiting[key]
            results_so_far[part] = result
            if len(results_so_far) == len(requests):
                del self._waiting[key]
                in_order = [results_so_far[at] for at in range(len(requests))]
                yield key, output_of(self._model, request, requests, in_order)
        for key, (request, requests, _) in self._waiting.items():
            if not requests:
                yield key, output_of(self._model, request, (), ())
        if self._lost:
            raise LostRequestsError(self._lost)


@contextmanager
def naming(key: Hashable) -> Iterator[None]:
    """Says which request of a call a user's error is about."""
    try:
        yield
    except OliveExtError as error:
        named = error.inside(f"request {key!r}")
        named.request = key
        raise named from error

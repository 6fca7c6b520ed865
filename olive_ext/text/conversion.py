"""Conversion of a session's requests to the engine's, and of the engine's results back: above strings, below tokens.

A request that must be scored in several windows becomes several engine requests, whose results are joined again. A
window's last token is never fed, so a window may hold `max_length` + 1 tokens. Knows no engine run, and no audio:
features are made by whoever has the sound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np

from olive_ext.engine.media import Media
from olive_ext.engine.requests import Generation, Request, Result, Sampling, Source, join_compared
from olive_ext.errors import ConfigError, TaskError
from olive_ext.media.sound import SoundProcessor
from olive_ext.text.generation_bounds import StopChecker
from olive_ext.text.placeholders import MediaText, cut_media, with_images
from olive_ext.text.requests import (
    GeneratedSequence,
    GenerationOutput,
    GenerationRequest,
    Prompt,
    RollingOutput,
    RollingRequest,
    ScoringOutput,
    ScoringRequest,
    SourceInput,
)
from olive_ext.text.tokenizer import Tokenizer

Output = TypeVar("Output")


@dataclass(frozen=True)
class Encoding:
    """What decides how requests for an encoder-decoder are converted; a session of a decoder has none."""

    takes_features: bool
    start: tuple[int, ...]
    """Tokens with which the decoder begins; empty where no configuration names them."""

    sound: SoundProcessor | None = None
    """Makes features of sound; None where the encoder takes none."""

    def begin(self) -> list[int]:
        """`start`; `ConfigError` where it is not known."""
        if not self.start:
            raise ConfigError(
                "no configuration of this model names 'decoder_start_token_id': give the decoder's first tokens as ids"
            )
        return list(self.start)


@dataclass(frozen=True)
class Converted(Generic[Output]):
    """One request of the session as requests of the engine, and the function from their results, in that order, to the
    session's output."""

    requests: tuple[Request, ...]
    output: Callable[[Sequence[Result]], Output]
    is_truncated: bool = False
    """Whether the text was cut on the left to fit."""


def prompt_tokens(tokenizer: Tokenizer, request: GenerationRequest, media: MediaText | None) -> tuple[list[int], Media]:
    """A decoder's prompt, and where its pictures are: ids as they are, text with the tokenizer's special tokens,
    messages by the chat template, which writes its own special tokens."""
    prompt = request.prompt
    if isinstance(prompt, str):
        tokens, images = tokenizer.encode(prompt), request.images
    elif messages := [item for item in prompt if not isinstance(item, int)]:
        messages, images = with_images(messages, request.images)
        text = tokenizer.render_chat(messages, request.add_generation_prompt, **request.chat_template_kwargs)
        tokens = tokenizer.encode(text, add_special_tokens=False)
    else:
        tokens, images = [item for item in prompt if isinstance(item, int)], request.images
    return placed(media, tokens or [tokenizer.prefix_token_id], images)


def decoder_tokens(tokenizer: Tokenizer, prompt: Prompt, encoding: Encoding) -> list[int]:
    """The prompt of an encoder-decoder's decoder: ids as they are, text behind the decoder's first tokens."""
    if isinstance(prompt, str):
        return encoding.begin() + (tokenizer.encode_answer(prompt) if prompt else [])
    if not all(isinstance(item, int) for item in prompt):
        raise ConfigError("an encoder-decoder takes no chat messages: give a 'source', and a text or ids as 'prompt'")
    return [item for item in prompt if isinstance(item, int)] or encoding.begin()


def make_source(
    tokenizer: Tokenizer, given: SourceInput | None, encoding: Encoding | None, max_length: int
) -> Source | None:
    """The engine's source. Text gets the special tokens of the encoder's tokenizer; a text or ids longer than
    `max_length` lose their beginning, as in HFLM. Raises `ConfigError` where a source is missing or of the wrong kind.
    """
    if encoding is None:
        if given is not None:
            raise ConfigError("'source' is for encoder-decoders; this model has no encoder: give it as the prompt")
        return None
    if given is None:
        wanted = "features" if encoding.takes_features else "a text or token ids"
        raise ConfigError(f"this model is an encoder-decoder: 'source' must be {wanted}")
    if isinstance(given, np.ndarray) and given.dtype.kind == "f":
        if not encoding.takes_features:
            raise ConfigError("'source' is an array of features; the encoder of this model takes a text or token ids")
        return Source(given.astype(np.float32, copy=False))
    if encoding.takes_features:
        kind = type(given).__name__
        raise ConfigError(f"'source' is a {kind}; the encoder of this model takes features: give an array of floats")
    ids = tokenizer.encode(given) if isinstance(given, str) else list(given)
    return Source(np.array((ids or [tokenizer.prefix_token_id])[-max_length:], np.int64))


def make_sources(
    tokenizer: Tokenizer, request: GenerationRequest | ScoringRequest, encoding: Encoding | None, max_length: int
) -> tuple[Source | None, ...]:
    """The engine's source, or one for each window of a sound. Raises `ConfigError` as `make_source` does, and
    `TaskError` for a sound that cannot be read or is not taken."""
    if not request.audio:
        return (make_source(tokenizer, request.source, encoding, max_length),)
    if encoding is None or encoding.sound is None:
        raise TaskError("the request gives sound; this model takes none")
    if len(request.audio) > 1 or request.source is not None:
        given = "a 'source' beside 'audio'" if request.source is not None else f"{len(request.audio)} sounds"
        raise TaskError(f"the request gives {given}; this model takes one sound")
    return tuple(map(Source, encoding.sound.windows(request.audio[0])))


def convert_generation(
    tokenizer: Tokenizer,
    request: GenerationRequest,
    stop_ids: frozenset[int],
    max_length: int,
    encoding: Encoding | None = None,
    media: MediaText | None = None,
) -> Converted[GenerationOutput]:
    """Raises `ConfigError` where `max_new_tokens` leaves no room for a prompt, or a source is missing or not taken."""
    sources = make_sources(tokenizer, request, encoding, max_length)
    found: Media = ()
    if encoding is None:
        tokens, found = prompt_tokens(tokenizer, request, media)
    else:
        tokens = decoder_tokens(tokenizer, request.prompt, encoding)
    kept = fit_prompt(tokens, request.max_new_tokens, max_length)
    found = cut_media(found, len(tokens) - len(kept), len(tokens))
    checker = StopChecker(tokenizer, request.stop)
    generation = Generation(
        max_new_tokens=request.max_new_tokens,
        stop_ids=stop_ids,
        sampling=Sampling(request.temperature, request.top_p, request.top_k, request.seed),
        is_finished=checker if request.stop else None,
        stops=tuple(request.stop),
        beams=request.beams,
    )
    if len(sources) > 1 and request.num_return_sequences > 1:
        raise TaskError(f"the sound has {len(sources)} windows: 'num_return_sequences' must be 1")

    def output(results: Sequence[Result]) -> GenerationOutput:
        text = " ".join(text for result in results if (text := checker.text(result.tokens).strip()))
        text = checker.text(results[0].tokens) if len(results) == 1 else text
        tokens = tuple(token for result in results for token in result.tokens)
        best = results[0].hypotheses if len(results) == 1 else ()
        sequences = tuple(GeneratedSequence(checker.text(one.tokens), **vars(one)) for one in best)
        return GenerationOutput(text, tokens, results[-1].finish_reason, results[-1].stop_id, sequences)

    requests = tuple(Request(kept, generation=generation, source=source, media=found) for source in sources)
    return Converted(requests, output, len(kept) < len(tokens))


def scoring_tokens(
    tokenizer: Tokenizer, request: ScoringRequest, media: MediaText | None
) -> tuple[list[int], list[int], Media]:
    """(context, target, where the context's pictures are), no tokens empty. Two texts are encoded jointly; where one is
    given as ids or messages, the other alone."""
    context, target, images = request.context, request.target, request.images
    if isinstance(context, str) and isinstance(target, str):
        context_ids, target_ids = tokenizer.encode_pair(context, target)
    else:
        if messages := [item for item in context if isinstance(item, Mapping)]:
            messages, images = with_images(messages, images)
            context_ids = tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False)
        elif isinstance(context, str):
            context_ids = tokenizer.encode(context) if context else []
        else:
            context_ids = [item for item in context if isinstance(item, int)]
        target_ids = tokenizer.encode(target, add_special_tokens=False) if isinstance(target, str) else list(target)
        if not context_ids or not target_ids:
            context_ids, target_ids = tokenizer.behind_prefix(target_ids)
    tokens, found = placed(media, context_ids, images)
    return tokens, target_ids, found


def placed(media: MediaText | None, tokens: list[int], images: Sequence[Any]) -> tuple[list[int], Media]:
    """The tokens with placeholders, and where these are. Raises `TaskError` for pictures where a model takes none."""
    if media is not None:
        return media.place(tokens, images)
    if images:
        raise TaskError(f"the request gives {len(images)} pictures, but this model takes text only")
    return tokens, ()


def answer_tokens(tokenizer: Tokenizer, request: ScoringRequest, encoding: Encoding) -> tuple[list[int], list[int]]:
    """(context, target) for an encoder-decoder's decoder, each encoded alone."""
    target = request.target
    target_ids = tokenizer.encode_answer(target) if isinstance(target, str) else list(target)
    if not target_ids:
        raise TaskError("the target has no tokens: there is nothing to score")
    return decoder_tokens(tokenizer, request.context, encoding), target_ids


def convert_scoring(
    tokenizer: Tokenizer,
    request: ScoringRequest,
    max_length: int,
    encoding: Encoding | None = None,
    media: MediaText | None = None,
) -> Converted[ScoringOutput]:
    """Raises `ConfigError` where a source is missing or not taken."""
    source, *others = make_sources(tokenizer, request, encoding, max_length)
    if others:
        raise TaskError(f"the sound has {len(others) + 1} windows: a target can be scored behind one only")
    found: Media = ()
    if encoding is None:
        context, target, found = scoring_tokens(tokenizer, request, media)
    else:
        context, target = answer_tokens(tokenizer, request, encoding)
    is_truncated = len(context) + len(target) > max_length + 1
    requests = target_windows(context, target, max_length, source, found)
    return Converted(requests, partial(_scoring_output, requests), is_truncated)


def convert_rolling(tokenizer: Tokenizer, request: RollingRequest, max_length: int) -> Converted[RollingOutput]:
    """An empty text becomes no request of the engine at all."""
    prefix = tokenizer.prefix_token_id if request.prefix is None else request.prefix
    text = request.text
    target = tokenizer.encode_rolling(text, prefix) if isinstance(text, str) else text
    requests = target_windows([prefix], target, max_length)
    return Converted(requests, partial(_rolling_output, requests))


def target_windows(
    context: Sequence[int],
    target: Sequence[int],
    max_length: int,
    source: Source | None = None,
    media: Media = (),
) -> tuple[Request, ...]:
    """Requests that score every token of `target` once, each with as much left context as `max_length` leaves.

    A target of at most `max_length` tokens takes one window, `(context + target)[-(max_length + 1):]`, as in HFLM. A
    longer one (HFLM stops with an assertion) is cut into disjoint windows. With the prefix token as context this is
    lm-eval's `make_disjoint_window(get_rolling_token_windows(..., context_len=1))`. `context` holds a token or more.

        max_length 3    context p    target a b c d e f g h
        windows         p[a b c]     c[d e f]     e f[g h]     (scored in brackets; fed: all but the last)
    """
    whole = (*context, *target)
    requests = []
    for begin in range(0, len(target), max_length):
        num_targets = min(max_length, len(target) - begin)
        end = len(context) + begin + num_targets
        start = max(0, end - max_length - 1)
        found = cut_media(media, start, len(whole))
        requests.append(Request(whole[start:end], num_targets, source=source, media=found))
    return tuple(requests)


def fit_prompt(tokens: Sequence[int], max_new_tokens: int, max_length: int) -> tuple[int, ...]:
    """The end of the prompt that leaves room for `max_new_tokens`, as HFLM cuts it.

    Raises `ConfigError` where no room is left for a prompt at all.
    """
    room = max_length - max_new_tokens
    if room < 1:
        raise ConfigError(
            f"'max_new_tokens' = {max_new_tokens} leaves no room for a prompt: it must be below the model's context "
            f"(max_length) of {max_length} tokens"
        )
    return tuple(tokens[-room:])


def _scoring_output(requests: Sequence[Request], results: Sequence[Result]) -> ScoringOutput:
    logprobs = tuple(logprob for result in results for logprob in result.logprobs)
    is_greedy = all(greedy for result in results for greedy in result.is_greedy)
    compared = join_compared(requests, results)
    return ScoringOutput(math.fsum(logprobs), is_greedy, len(logprobs), logprobs, compared)


def _rolling_output(requests: Sequence[Request], results: Sequence[Result]) -> RollingOutput:
    scored = _scoring_output(requests, results)
    return RollingOutput(scored.logprob, scored.token_count, scored.token_logprobs, scored.compared)

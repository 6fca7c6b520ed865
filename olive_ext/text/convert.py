"""The session's requests to the engine's, and the engine's results back: strings end here, tokens begin.

A request that must be scored in several windows becomes several engine requests; its output joins them again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from olive_ext.engine.requests import Generation, Request, Result, Sampling, Source, join_compared
from olive_ext.errors import ConfigError, TaskError
from olive_ext.text.requests import (
    GenerationOutput,
    GenerationRequest,
    Prompt,
    RollingOutput,
    RollingRequest,
    ScoringOutput,
    ScoringRequest,
)
from olive_ext.text.source import Encoding, make_source
from olive_ext.text.stopping import StopChecker
from olive_ext.text.tokenizer import Tokenizer
from olive_ext.text.windows import fit_prompt, target_windows

Output = TypeVar("Output")


@dataclass(frozen=True)
class Converted(Generic[Output]):
    """One request of the session: what it asks of the engine, and how the results, in that order, make its output."""

    requests: tuple[Request, ...]
    output: Callable[[Sequence[Result]], Output]
    is_truncated: bool = False
    """Its text was cut on the left to fit."""


def prompt_tokens(tokenizer: Tokenizer, request: GenerationRequest) -> list[int]:
    """Ids are taken as they are; text gets the tokenizer's special tokens; a chat template writes its own."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return tokenizer.encode(prompt) or [tokenizer.prefix_token_id]
    messages = [item for item in prompt if not isinstance(item, int)]
    if messages:
        text = tokenizer.render_chat(messages, request.add_generation_prompt, **request.chat_template_kwargs)
        return tokenizer.encode(text, add_special_tokens=False) or [tokenizer.prefix_token_id]
    return [item for item in prompt if isinstance(item, int)]


def decoder_tokens(tokenizer: Tokenizer, said: Prompt, encoding: Encoding) -> list[int]:
    """What an encoder-decoder's decoder begins with: ids as they are, a text behind the decoder's first tokens."""
    if isinstance(said, str):
        return encoding.begin() + (tokenizer.encode_answer(said) if said else [])
    if not all(isinstance(item, int) for item in said):
        raise ConfigError("an encoder-decoder takes no chat messages: give a 'source', and a text or ids as 'prompt'")
    return [item for item in said if isinstance(item, int)] or encoding.begin()


def convert_generation(
    tokenizer: Tokenizer,
    request: GenerationRequest,
    stop_ids: frozenset[int],
    max_length: int,
    encoding: Encoding | None = None,
) -> Converted[GenerationOutput]:
    """Raises `ConfigError` where `max_new_tokens` leaves no room for a prompt, or a source is missing or too much."""
    source = make_source(tokenizer, request.source, encoding, max_length)
    tokens = (
        decoder_tokens(tokenizer, request.prompt, encoding)
        if encoding is not None
        else prompt_tokens(tokenizer, request)
    )
    kept = fit_prompt(tokens, request.max_new_tokens, max_length)
    checker = StopChecker(tokenizer, request.stop)
    generation = Generation(
        max_new_tokens=request.max_new_tokens,
        stop_ids=stop_ids,
        sampling=Sampling(request.temperature, request.top_p, request.top_k, request.seed),
        is_finished=checker if request.stop else None,
    )

    def output(results: Sequence[Result]) -> GenerationOutput:
        (result,) = results
        return GenerationOutput(checker.text(result.tokens), result.tokens, result.finish_reason, result.stop_id)

    return Converted((Request(kept, generation=generation, source=source),), output, len(kept) < len(tokens))


def scoring_tokens(tokenizer: Tokenizer, request: ScoringRequest) -> tuple[list[int], list[int]]:
    """(context, target), neither empty. Two texts are encoded jointly; beside ids each text is encoded alone."""
    context, target = request.context, request.target
    if isinstance(context, str) and isinstance(target, str):
        return tokenizer.encode_pair(context, target)
    context_ids = (tokenizer.encode(context) if context else []) if isinstance(context, str) else list(context)
    target_ids = tokenizer.encode(target, add_special_tokens=False) if isinstance(target, str) else list(target)
    if not target_ids:
        raise TaskError("the target has no tokens: there is nothing to score")
    return (context_ids, target_ids) if context_ids else tokenizer.behind_prefix(target_ids)


def answer_tokens(tokenizer: Tokenizer, request: ScoringRequest, encoding: Encoding) -> tuple[list[int], list[int]]:
    """(context, target) of an encoder-decoder's decoder, each encoded alone."""
    target = request.target
    target_ids = tokenizer.encode_answer(target) if isinstance(target, str) else list(target)
    if not target_ids:
        raise TaskError("the target has no tokens: there is nothing to score")
    return decoder_tokens(tokenizer, request.context, encoding), target_ids


def convert_scoring(
    tokenizer: Tokenizer, request: ScoringRequest, max_length: int, encoding: Encoding | None = None
) -> Converted[ScoringOutput]:
    """Raises `ConfigError` where a source is missing or too much."""
    source = make_source(tokenizer, request.source, encoding, max_length)
    context, target = (
        answer_tokens(tokenizer, request, encoding) if encoding is not None else scoring_tokens(tokenizer, request)
    )
    is_truncated = len(context) + len(target) > max_length + 1
    requests = _window_requests(context, target, max_length, source)
    return Converted(requests, partial(_scoring_output, requests), is_truncated)


def convert_rolling(tokenizer: Tokenizer, request: RollingRequest, max_length: int) -> Converted[RollingOutput]:
    """Asks nothing of the engine for an empty text."""
    prefix = tokenizer.prefix_token_id if request.prefix is None else request.prefix
    text = request.text
    target = tokenizer.encode_rolling(text, prefix) if isinstance(text, str) else text
    requests = _window_requests([prefix], target, max_length)
    return Converted(requests, partial(_rolling_output, requests))


def _window_requests(
    context: Sequence[int], target: Sequence[int], max_length: int, source: Source | None = None
) -> tuple[Request, ...]:
    windows = target_windows(context, target, max_length)
    return tuple(Request(window.tokens, window.num_targets, source=source) for window in windows)


def _scoring_output(requests: Sequence[Request], results: Sequence[Result]) -> ScoringOutput:
    logprobs = tuple(logprob for result in results for logprob in result.logprobs)
    is_greedy = all(greedy for result in results for greedy in result.is_greedy)
    compared = join_compared(requests, results)
    return ScoringOutput(math.fsum(logprobs), is_greedy, len(logprobs), logprobs, compared)


def _rolling_output(requests: Sequence[Request], results: Sequence[Result]) -> RollingOutput:
    scored = _scoring_output(requests, results)
    return RollingOutput(scored.logprob, scored.token_count, scored.token_logprobs, scored.compared)

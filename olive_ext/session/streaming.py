"""An answer piece by piece, while the engine makes it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

from olive_ext.errors import ConfigError
from olive_ext.session.executor import OpenModel
from olive_ext.text.conversion import Converted
from olive_ext.text.requests import GenerationOutput
from olive_ext.text.text_stream import TextStream
from olive_ext.text.tokenizer import Tokenizer


class _LeftError(Exception):
    """Nobody reads on."""


def streamable(
    request: object, converted: Converted[GenerationOutput], settings: Mapping[str, Any]
) -> Converted[GenerationOutput]:
    """`converted`, from `request` and `settings`. Raises `ConfigError` where its answer is not known before the last
    token."""
    end = getattr(request, "think_end_token", settings.get("think_end_token"))
    if end is not None:
        text = "the answer is what follows the last end of the reasoning: `generate` tells them apart"
        raise ConfigError(f"stream: 'think_end_token' = {end!r}: {text}")
    if len(converted.requests) > 1:
        raise ConfigError(f"stream: the sound has {len(converted.requests)} windows: use `generate`")
    if converted.requests[0].generation is not None and converted.requests[0].generation.beams is not None:
        raise ConfigError("stream: a beam search has no answer before its end: give 1 beam, or use `generate`")
    return converted


def streamed(
    tokenizer: Tokenizer,
    converted: Converted[GenerationOutput],
    run: Callable[[Callable[[OpenModel, Any], Converted[GenerationOutput]], None], Sequence[GenerationOutput]],
    begin: Callable[[], None],
) -> Iterator[str]:
    """The pieces of the answer to `converted`, which `run` has the engine make in a thread, ahead of the reader. Where
    reading ends before, the engine stops at the next token, and the answer is kept nowhere. `begin` is called first.

    On workers, and where the answer is known, the tokens are not seen: the whole text is one piece.
    """
    begin()
    (request,) = converted.requests
    assert request.generation is not None
    generation = request.generation
    found: SimpleQueue[int | BaseException | GenerationOutput] = SimpleQueue()
    is_left = threading.Event()

    def watch(tokens: Sequence[int]) -> bool:
        _check(is_left)
        found.put(tokens[-1])
        return generation.is_finished is not None and generation.is_finished(tokens)

    def watched(session: OpenModel, item: object) -> Converted[GenerationOutput]:
        _check(is_left)
        return replace(converted, requests=(replace(request, generation=replace(generation, is_finished=watch)),))

    def work() -> None:
        try:
            found.put(run(watched, None)[0])
        except BaseException as error:  # noqa: BLE001 - raised where the pieces are read
            found.put(error)

    thread = threading.Thread(target=work, name="olive_ext-stream", daemon=True)
    thread.start()
    stream, tokens, length = TextStream(tokenizer, generation.stops), list[int](), 0
    try:
        while isinstance(item := found.get(), int):
            tokens.append(item)
            if piece := stream.piece(tokens):
                length += len(piece)
                yield piece
        if isinstance(item, BaseException):
            raise item
        if rest := item.text[length:]:
            yield rest
    finally:
        is_left.set()
        thread.join()


def _check(is_left: threading.Event) -> None:
    if is_left.is_set():
        raise _LeftError

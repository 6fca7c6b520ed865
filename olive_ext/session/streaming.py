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
from olive_ext.text.generation_bounds import TextStream
from olive_ext.text.requests import GenerationOutput
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


Run = Callable[[Callable[[OpenModel, Any], Converted[GenerationOutput]], None], Sequence[GenerationOutput]]
"""A session's run of one request, which is converted as the first argument says."""


def streamed(
    tokenizer: Tokenizer, converted: Converted[GenerationOutput], run: Run, begin: Callable[[], None]
) -> Iterator[str]:
    """The pieces of the answer to `converted`, which `run` has the engine make in a thread, ahead of the reader. Where
    reading ends before, the engine stops at the next token, and the answer is kept nowhere. `begin` is called first.

    On workers, and where the answer is known, the tokens are not seen: the whole text is one piece.
    """
    begin()
    made = _Made(converted)
    thread = threading.Thread(target=made.work, args=(run,), name="olive_ext-stream", daemon=True)
    thread.start()
    stream, tokens, length = TextStream(tokenizer, made.generation.stops), list[int](), 0
    try:
        while isinstance(item := made.found.get(), int):
            tokens.append(item)
            if piece := stream.piece(tokens):
                length += len(piece)
                yield piece
        if isinstance(item, BaseException):
            raise item
        if rest := item.text[length:]:
            yield rest
    finally:
        made.is_left.set()
        thread.join()


class _Made:
    """An answer while it is made: in `found` are its tokens, then all of it, or the error that there was instead."""

    def __init__(self, converted: Converted[GenerationOutput]) -> None:
        (self._request,) = converted.requests
        assert self._request.generation is not None
        self.generation = self._request.generation
        self._converted = converted
        self.found: SimpleQueue[int | BaseException | GenerationOutput] = SimpleQueue()
        self.is_left = threading.Event()

    def work(self, run: Run) -> None:
        try:
            self.found.put(run(self._convert, None)[0])
        except BaseException as error:  # noqa: BLE001 - raised where the pieces are read
            self.found.put(error)

    def _convert(self, session: OpenModel, item: object) -> Converted[GenerationOutput]:
        self._check()
        generation = replace(self.generation, is_finished=self._watch)
        return replace(self._converted, requests=(replace(self._request, generation=generation),))

    def _watch(self, tokens: Sequence[int]) -> bool:
        self._check()
        self.found.put(tokens[-1])
        is_finished = self.generation.is_finished
        return is_finished is not None and is_finished(tokens)

    def _check(self) -> None:
        if self.is_left.is_set():
            raise _LeftError

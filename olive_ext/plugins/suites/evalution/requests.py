"""Evalution's requests: to token ids, by the rules of its own transformers engine; and those that arrive while others
run, on Evalution's two queues and two threads. Knows no model and no session.

The rules are not lm-eval's: a continuation is encoded apart from its context, a prompt to generate from gets no special
tokens, and a rolling text is scored with the BOS that its tokenizer adds.

The caller's iterable is read in one thread, the model works in another, and results go to the caller's thread. So the
model never waits for the caller between two results, and no lock of the session is held while the caller has one.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Sized
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from evalution.engines import base
from evalution.engines.continuous import RequestQueue, stream_request_results

from olive_ext.errors import MissingError, TaskError
from olive_ext.session.requests import RollingRequest, ScoringRequest
from olive_ext.session.tokenizer import Tokenizer


class RequestEncoder:
    """Encodes with a copy of `tokenizer`, one thread at a time: what suites do to that copy (padding, truncation) never
    reaches the tokenizer that a running generation looks for stops with."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = copy.deepcopy(tokenizer)
        self._lock = threading.Lock()
        self._template_defaults = _template_defaults(Path(tokenizer.where))
        self._prefix_id = _prefix_id(tokenizer)
        self._prefix_text = tokenizer.decode([self._prefix_id], skip_special_tokens=False)

    def prepare(self, requests: Sequence[base.GenerationRequest]) -> list[base.GenerationRequest]:
        """The requests with `rendered_prompt` and `input_ids`; those that have both come back as they are.

        Raises `ConfigError`, a ValueError, for a request with neither a prompt nor messages nor ids.
        """
        with self._lock:
            texts = [self._render(request) for request in requests]
            missing = [index for index, request in enumerate(requests) if request.input_ids is None]
            encoded = self._encode([texts[index] for index in missing])
        ids = dict(zip(missing, encoded, strict=True))
        return [
            replace(request, rendered_prompt=text, input_ids=ids.get(index, request.input_ids) or [self._prefix_id])
            for index, (request, text) in enumerate(zip(requests, texts, strict=True))
        ]

    def scoring(self, requests: Sequence[base.LoglikelihoodRequest]) -> list[ScoringRequest]:
        """Context and continuation as ids; an empty context becomes the prefix token (BOS, else EOS, else PAD)."""
        with self._lock:
            contexts = self._contexts({r.context for r in requests if r.context and r.context_input_ids is None})
            texts = list(dict.fromkeys(r.continuation for r in requests if r.continuation_input_ids is None))
            continuations = dict(zip(texts, self._encode(texts), strict=True))
        return [
            ScoringRequest(
                _given(request.context_input_ids, {"": [], **contexts}, request.context) or [self._prefix_id],
                _given(request.continuation_input_ids, continuations, request.continuation),
            )
            for request in requests
        ]

    def rolling(self, requests: Sequence[base.RollingLoglikelihoodRequest]) -> list[RollingRequest]:
        """Every token is scored, behind the prefix token: a BOS that the tokenizer adds is one of them."""
        with self._lock:
            texts = self._contexts({request.text for request in requests if request.input_ids is None})
        return [RollingRequest(_given(r.input_ids, texts, r.text), self._prefix_id) for r in requests]

    def _render(self, request: base.GenerationRequest) -> str:
        if request.rendered_prompt is not None:
            return str(request.rendered_prompt)
        if request.messages is not None:
            # Older releases have neither tools nor chat_template_kwargs.
            own = {"tokenize": False, "add_generation_prompt": request.add_generation_prompt}
            tools = {"tools": functions} if (functions := getattr(request, "tools", None)) else {}
            asked = getattr(request, "chat_template_kwargs", None) or {}
            options = {**self._template_defaults, **own, **asked, **tools}
            return str(self.tokenizer.hf.apply_chat_template(request.messages, **options))
        if request.prompt is not None:
            return str(request.prompt)
        if request.input_ids:
            return self.tokenizer.decode(request.input_ids, skip_special_tokens=False)
        raise MissingError("a generation request needs a 'prompt', 'messages' or 'input_ids'")

    def _contexts(self, texts: Collection[str]) -> dict[str, list[int]]:
        """Ids by text, with the tokenizer's special tokens where the text does not begin with the prefix token."""
        begun = {text for text in texts if self._prefix_text and text.startswith(self._prefix_text)}
        ids = {text: self.tokenizer.encode(text, add_special_tokens=False) for text in begun}
        return {**ids, **self.tokenizer.encode_many({*texts} - begun)}

    def _encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text without special tokens."""
        return list(self.tokenizer.hf(texts, add_special_tokens=False, verbose=False)["input_ids"]) if texts else []


def _given(ids: Sequence[int] | None, encoded: dict[str, list[int]], text: str) -> list[int]:
    return encoded[text] if ids is None else list(ids)


def _prefix_id(tokenizer: Tokenizer) -> int:
    try:
        return tokenizer.prefix_token_id
    except TaskError:
        if tokenizer.pad_token_id is None:
            raise
        return tokenizer.pad_token_id


def _template_defaults(folder: Path) -> dict[str, Any]:
    """Variables of the chat template that the model's generation_config.json gives ("default_chat_template_kwargs")."""
    file = folder / "generation_config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return dict(config.get("default_chat_template_kwargs") or {})


Item = tuple[Any, Any]
"""The caller's key, and a request of Evalution."""

Put = Callable[[Any, Any], None]

LINGER_S = 0.05
"""How long an idle model waits for one more request: neighbours in one batch share prefixes."""

BATCH = 2048
"""Requests that are scored together at most, and that are read ahead of the model."""


class Arrivals:
    """The requests of one stream, as they come in. Methods raise `_Closed` once the caller has closed the stream."""

    def __init__(self, queue: RequestQueue, stop: threading.Event) -> None:
        self._queue = queue
        self._stop = stop

    def check(self) -> None:
        """Raises where nobody waits for results any more."""
        if self._stop.is_set():
            raise _Closed

    def batches(self) -> Iterator[list[Item]]:
        """Up to `BATCH` requests each; fewer where no other came for `LINGER_S`."""
        batch: list[Item] = []
        while batch or not self._queue.closed:
            self.check()
            item = self._queue.get(timeout_s=LINGER_S) if not self._queue.closed else None
            if item is not None:
                batch.append(item)
            if batch and (item is None or len(batch) == BATCH):
                yield batch
                batch = []

    def one_by_one(self, running: Sized) -> Iterator[Item | None]:
        """Every request as soon as it is there, and None where there is none while others are `running`; ends when all
        have been answered. An idle model waits for those that come within `LINGER_S` of each other."""
        gathers = True
        while running or not self._queue.closed:
            self.check()
            gathers = (gathers or not running) and not self._queue.closed
            item = self._queue.get(timeout_s=LINGER_S) if gathers else self._queue.get_nowait()
            if item is not None:
                yield item
            elif running:
                gathers = False
                yield None


def stream(name: str, requests: Iterable[Item], process: Callable[[Arrivals, Put], None]) -> Iterator[Item]:
    """`(key, output)` in the order in which `process` puts them. Nothing runs before the caller takes the first; what
    the iterable or `process` raises is raised to the caller. Closing the iterator waits for the model's next result."""

    def consume(stop: threading.Event, queue: RequestQueue, put: Put) -> None:
        with suppress(_Closed):
            process(Arrivals(queue, stop), put)

    results: Iterator[Item] = stream_request_results(
        requests,
        producer_name=f"olive_ext {name} requests",
        consumer_name=f"olive_ext {name}",
        process_requests=consume,
        request_queue_max_size=BATCH,
    )
    return results


class _Closed(Exception):
    """The caller has closed the stream."""

"""Answers to lm-eval's requests that need no forward pass: sources for `OrtLM.known_answers`.

Knows no session, and no file but its own.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from olive_ext.engine.requests import FinishReason
from olive_ext.errors import RunError
from olive_ext.media.pictures import media_digest
from olive_ext.stats.compared_fields import Compared
from olive_ext.text.requests import GenerationOutput, GenerationRequest

Ask: TypeAlias = Callable[[list[Any]], list[Any]]

_GENERATION = "generate_until"
_CHUNK = 512
"""Requests after which new generations are written."""


class ReferenceScores:
    """Scores of a reference that was resident under a candidate, by lm-eval's arguments of each request.

    As `OrtLM.known_answers` it answers lm-eval's second run of the same tasks without the reference's forward passes.
    """

    def __init__(self) -> None:
        self._scores: dict[tuple[str, ...], tuple[float, bool]] = {}

    def note(self, args: Sequence[Any], compared: Compared) -> None:
        """Keeps the reference's log-probability in nats of all targets of a request, and whether all are greedy."""
        logprobs = np.asarray(compared.reference_logprobs).tolist()
        self._scores[_texts(args)] = math.fsum(logprobs), bool(np.all(compared.reference_is_greedy))

    def __call__(self, requests: list[Any], ask: Ask) -> list[Any]:
        """The reference's scores; generations come from the model itself.

        Raises `RunError` for a request that was not scored in the first run.
        """
        if requests and requests[0].request_type == _GENERATION:
            return ask(requests)
        return [self._find(request) for request in requests]

    def _find(self, request: Any) -> Any:
        texts = _texts(request.args)
        is_rolling = request.request_type == "loglikelihood_rolling"
        if not is_rolling and not texts[1]:
            return 0.0, True  # an empty continuation is certain, so no model has scored it
        if texts not in self._scores:
            raise RunError("lm-eval asks something else the second time: a task's prompts change from run to run")
        return self._scores[texts][0] if is_rolling else self._scores[texts]


class KeptGenerations:
    """Greedy generations of one model in `file`, a JSON line for each; as `OrtLM.known_answers` it repeats them.

    `facts` decide a generation besides its request. `observe` is the model's observer; it passes everything on to
    `observer`, which is called for a repeated generation as for a new one.
    """

    def __init__(self, file: Path, facts: Mapping[str, Any], observer: Callable[[Any, Any, Any], None]) -> None:
        self._file = file
        self._facts = json.dumps(facts, sort_keys=True, default=str)
        self._observer = observer
        self._latest: dict[Hashable, tuple[GenerationRequest, GenerationOutput]] = {}
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        self._rows = {row["key"]: row for row in map(_read, lines) if row is not None}

    def observe(self, instance: Any, request: Any, output: Any) -> None:
        """Holds the last generation of each request of lm-eval until it is written."""
        self._observer(instance, request, output)
        if isinstance(output, GenerationOutput):
            self._latest[_arguments(instance)] = request, output

    def __call__(self, requests: list[Any], ask: Ask) -> list[Any]:
        """Kept and new generations, new ones written after every few hundred requests; scores come from the model."""
        if requests and requests[0].request_type != _GENERATION:
            return ask(requests)
        texts: dict[int, str] = {}
        missing: dict[Hashable, list[int]] = {}
        for place, instance in enumerate(requests):
            row = self._rows.get(self._key(instance.args))
            if row is None:
                missing.setdefault(_arguments(instance), []).append(place)
            else:
                texts[place] = self._repeat(instance, row)
        for places in _chunks(missing.values()):
            chunk = [requests[place] for place in places]
            found = ask(chunk)
            self._write(chunk, found)
            texts.update(zip(places, found, strict=True))
        return [texts[place] for place in range(len(requests))]

    def _repeat(self, instance: Any, row: Mapping[str, Any]) -> str:
        request = GenerationRequest(row["prompt"], source=row["source"])
        self._observer(instance, request, GenerationOutput(row["text"], tuple(row["tokens"]), FinishReason.STOPPED))
        return str(row["text"])

    def _write(self, chunk: Sequence[Any], texts: Sequence[str]) -> None:
        """Appends the greedy ones among new generations, but those behind pictures, which are not written to a file; a
        sampled one is drawn anew in every run."""
        fresh = {}
        for instance, text in zip(chunk, texts, strict=True):
            request, output = self._latest.pop(_arguments(instance), (None, None))
            if request is not None and output is not None and request.temperature == 0 and not request.images:
                key = self._key(instance.args)
                row = {"key": key, "text": text, "prompt": request.prompt, "source": request.source}
                fresh[key] = {**row, "tokens": output.tokens}
        self._rows |= fresh
        if fresh:
            with self._file.open("a", encoding="utf-8") as file:
                file.write("".join(f"\n{json.dumps(row)}" for row in fresh.values()))

    def _key(self, args: Sequence[Any]) -> str:
        content = json.dumps([self._facts, *args], sort_keys=True, default=str)
        return hashlib.sha256(content.encode()).hexdigest()[:32]


def _texts(args: Sequence[Any]) -> tuple[str, ...]:
    return (*map(str, args[:2]), media_digest(args[2:]))


def _read(line: str) -> dict[str, Any] | None:
    """One generation; None for a line that an interruption cut short."""
    try:
        row: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError:
        return None
    return row


def _arguments(instance: Any) -> Hashable:
    return instance.args[0], media_digest(instance.args[1:])


def _chunks(groups: Iterable[Sequence[int]]) -> Iterator[list[int]]:
    """Groups, which stay whole, put together to some hundreds: repeats of a sampled request are numbered."""
    chunk: list[int] = []
    for group in groups:
        chunk += group
        if len(chunk) >= _CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk

"""What a session drives (`engine.Engine` runs requests in this process, workers do elsewhere), and its answers in a
journal: a request's digest, a result as JSON and back, and a run in chunks, each of which is journaled when it is
complete. Knows no text."""

from __future__ import annotations

import base64
import hashlib
import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
from pydantic import Field

from olive_ext.config.base import StrictModel
from olive_ext.engine.requests import (
    NUMBERS,
    FinishReason,
    Hypothesis,
    KeyedRequest,
    KeyedResult,
    Lost,
    Request,
    Result,
    source_key,
)
from olive_ext.engine.scheduling.prefix_tree import cut
from olive_ext.errors import RecordsError, one_line
from olive_ext.media.items import media_key
from olive_ext.package_versions import runtimes
from olive_ext.records.journal import Journal, facts_key
from olive_ext.session.conversion import OpenModel
from olive_ext.session.tokenizer_fit import tokenizer_traits
from olive_ext.stats.compared_fields import COMPARED

ChunkResults = tuple[int, Sequence[Result | Lost]]
"""The number of a chunk, and its results in the order of its requests."""


class Executor(Protocol):
    """One open model, wherever it is. Not thread-safe: one call at a time. By what is inherited all runs in chunks, and
    nothing stays in memory."""

    @property
    def context_length(self) -> int:
        """Positions that a sequence may occupy at most."""

    @property
    def num_slots(self) -> int:
        """Sequences that are decoded together at most."""

    @property
    def counters(self) -> Any:
        """`engine.requests.Counters` since opening."""

    @property
    def at_work(self) -> str:
        """How many workers are open and were lost, for whoever waits; empty where there is nothing to say."""
        return ""

    def run_slices(self, slices: Iterable[Sequence[KeyedRequest]]) -> Iterator[KeyedResult]:
        """The result of every request as it is complete, in any order. `slices` is read as there is room; what a slice
        holds is planned together."""
        return in_chunks(self, slices)

    def run_chunks(self, chunks: Iterable[Sequence[KeyedRequest]]) -> Iterator[ChunkResults]:
        """Runs each chunk by itself, in any order. `chunks` is read as there is room; an empty one is complete at
        once."""

    def run_continuous(self, items: Iterable[KeyedRequest | None]) -> Iterator[KeyedResult]:
        """Runs what `items` yields while it does; None among them: nothing more is there for now."""
        return self.run_slices([item] for item in items if item is not None)

    def reset(self) -> None:
        """Forgets what is resident."""
        return

    def release_memory(self) -> None:
        """Frees what has grown with use."""
        return

    def describe(self) -> dict[str, Any]:
        """Facts of the execution."""

    def close(self) -> None:
        """Releases the model."""
        return


@dataclass(frozen=True)
class RecordsElsewhere:
    """The records that a worker writes."""

    folder: Path

    def close(self) -> None:
        """The worker closes them."""


_DECIDING = (
    "revision",
    "runtime",
    "runtime_version",
    "dtype",
    "providers",
    "max_length",
    "num_slots",
    "slot_positions",
    "chunk_size",
    "batching",
    "row_group",
    "deterministic",
    "scoring_head",
    "kv_cache",
    "lengths",
)
"""Facts of an execution that decide the bits of its numbers."""


def in_chunks(
    executor: Executor, slices: Iterable[Sequence[KeyedRequest]], journal: Journal | None = None
) -> Iterator[KeyedResult]:
    """The result of every request as its chunk becomes complete. Each slice is cut into chunks by itself, and read when
    the executor asks for more.

    What the journal knows is left out of its chunk. Equal requests of a slice are computed once, with a journal those
    of all slices. What is computed in which chunk follows from slices and journal, not from progress."""
    numbers, under_way = itertools.count(), dict[int, tuple[list[KeyedResult], dict[bytes, list[Hashable]]]]()
    """For each chunk the results that the journal has, and by a request's digest the keys that its result answers."""

    in_flight: dict[bytes, list[Hashable]] = {}  # of all slices, where there is a journal

    def read() -> Iterator[list[KeyedRequest]]:
        for items in slices:
            if not items:
                under_way[next(numbers)] = [], {}
                yield []
            keys: dict[bytes, list[Hashable]] = {}
            distinct: dict[bytes, Request] = {}
            for key, request in items:
                digest = request_digest(request)
                keys.setdefault(digest, []).append(key)
                distinct.setdefault(digest, request)
            digests = list(distinct)
            for places in cut(list(distinct.values()), executor.num_slots):
                known: list[KeyedResult] = []
                missing: dict[bytes, list[Hashable]] = {}
                for digest in (digests[at] for at in places):
                    if digest in in_flight:  # on its way for an earlier slice, which answers these keys then
                        in_flight[digest] += keys[digest]
                    elif journal is not None and digest in journal:
                        result = _journaled(journal, digest, distinct[digest])
                        known += [(key, result) for key in keys[digest]]
                    else:
                        missing[digest] = keys[digest]
                        in_flight.update({} if journal is None else {digest: keys[digest]})
                if missing or known:
                    under_way[next(numbers)] = known, missing
                    yield [(of_it[0], distinct[digest]) for digest, of_it in missing.items()]

    for number, results in executor.run_chunks(read()):
        known, missing = under_way.pop(number)
        computed = dict(zip(missing, results, strict=True))
        if journal is not None:  # what is not finite is computed, and counted, again
            sound = {at: one for at, one in computed.items() if isinstance(one, Result) and one.is_finite}
            journal.add({digest: result_to_json(result) for digest, result in sound.items()})
        yield from known
        for digest, result in computed.items():
            in_flight.pop(digest, None)
            yield from ((key, result) for key in missing[digest])


def _journaled(journal: Journal, digest: bytes, request: Request) -> Result:
    """The journal's result of the request. Raises `RecordsError` where what it holds is none."""
    try:
        return result_from_json(journal[digest], request)
    except RecordsError:
        raise
    except (ValueError, TypeError) as error:
        raise journal.foreign(f"the answer {digest.hex()}", one_line(error)) from error


def journal_of(session: OpenModel, stem: str | Path, facts: Mapping[str, Any], *, resume: bool) -> Journal:
    """The journal of a session's answers, which `facts` decide, too: `<stem>_<digest of these>.jsonl`."""
    deciding = {**deciding_facts(session), "versions": runtimes(), **facts}
    return Journal(Path(f"{stem}_{facts_key(deciding)}.jsonl"), deciding, resume=resume)


def deciding_facts(session: OpenModel) -> dict[str, Any]:
    """All that decides a session's answers besides their requests, JSON-ready."""
    execution = session.describe_execution()
    facts = {name: execution[name] for name in _DECIDING if name in execution}
    if not execution.get("deterministic"):
        facts.pop("slot_positions", None)  # those of the memory that is free now: nothing would ever be resumed
    if "adapters" in execution:
        facts["adapters"] = sorted(execution["adapters"].values())
    digest = session.model.digest if session.model is not None else None
    if session.model is not None:
        facts["scoring"] = session.model.settings.engine.scoring  # the form itself follows from it and the requests
    facts |= {"model": digest or execution.get("model"), "tokenizer": tokenizer_traits(session.tokenizer)}
    facts |= {"numbers": NUMBERS}
    if session.reference is not None:
        facts["reference"] = deciding_facts(session.reference)
    elif "reference" in execution:
        facts["reference"] = {name: execution["reference"].get(name) for name in ("facts", "top", "drawn")}
    return facts


def request_digest(request: Request) -> bytes:
    """Digest (16 bytes) of all of a request that decides its result."""
    inputs_key = source_key(request.source) + media_key(request.media)
    decided: list[object] = []
    if (generation := request.generation) is not None:
        sampling, stops = generation.sampling, generation.stops
        decided = [f"{generation.max_new_tokens} {sorted(generation.stop_ids)} {sampling} {stops!r}"]
        decided += filter(None, (generation.suppressed, generation.beams, generation.thinking))
    head = f"{request.num_targets} {inputs_key} {' '.join(map(str, decided))}\n".encode()
    return hashlib.blake2b(head + request.tokens.array.astype("<i8").tobytes(), digest_size=16).digest()


def result_to_json(result: Result) -> dict[str, Any]:
    """The result as JSON. Numbers are written so that they are read back bit by bit."""
    made: dict[str, Any] = {}
    if result.finish_reason is not FinishReason.SCORED:
        made = {"tokens": result.tokens, "finish_reason": result.finish_reason.value, "stop_id": result.stop_id}
    if result.logprobs:
        made |= {"logprobs": result.logprobs, "is_greedy": [int(value) for value in result.is_greedy]}
    if result.hypotheses:
        made["hypotheses"] = [{**asdict(one), "finish_reason": one.finish_reason.value} for one in result.hypotheses]
    if result.notes is not None:
        made["compared"] = base64.b64encode(result.notes.tobytes()).decode()
    return made


_Id = Annotated[int, Field(ge=0, lt=2**31)]


class _EndFields(StrictModel):
    tokens: tuple[_Id, ...] = ()
    finish_reason: FinishReason = FinishReason.SCORED
    stop_id: _Id | None = None


class _HypothesisFields(_EndFields):
    score: float


class _ResultFields(_EndFields):
    logprobs: tuple[float, ...] = ()
    is_greedy: tuple[bool, ...] = ()
    hypotheses: tuple[_HypothesisFields, ...] = ()
    compared: str | None = None


def result_from_json(content: Mapping[str, Any], request: Request) -> Result:
    """The result of `request` that `content` was made from. Raises `ValueError` where it was made from none."""
    parsed = _ResultFields.parse(content)
    notes = None if parsed.compared is None else np.frombuffer(base64.b64decode(parsed.compared), COMPARED).copy()
    endings = [parsed, *parsed.hypotheses]
    most = request.generation.max_new_tokens if request.generation is not None else 0
    lengths = {len(parsed.logprobs), len(parsed.is_greedy), len(parsed.logprobs if notes is None else notes)}
    if lengths != {request.num_targets} or any(len(one.tokens) > most for one in endings):
        raise ValueError(
            f"scores of {max(lengths)} targets; the request has {request.num_targets}, and {most} new tokens"
        )
    if not all(-math.inf < value <= 1 for value in (*parsed.logprobs, *(one.score for one in parsed.hypotheses))):
        raise ValueError("no log-probabilities: NaN, infinite or above 0")  # but for rounding
    sequences = (Hypothesis(one.tokens, one.score, one.finish_reason, one.stop_id) for one in parsed.hypotheses)
    ending = parsed.tokens, parsed.finish_reason, parsed.stop_id
    return Result(parsed.logprobs, parsed.is_greedy, *ending, notes, hypotheses=tuple(sequences))

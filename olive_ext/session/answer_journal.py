"""A session's answers in a journal: a request's key, a result as JSON and back, and a run in chunks, each of which is
journaled when it is complete. Knows no text."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from olive_ext.engine.media import media_key
from olive_ext.engine.requests import FinishReason, Generation, Hypothesis, Request, Result, integers, source_key
from olive_ext.engine.scheduling.chunks import cut
from olive_ext.errors import LostRequestsError
from olive_ext.records.journal import Journal
from olive_ext.session.executor import Executor, Lost
from olive_ext.stats.compared_fields import COMPARED
from olive_ext.text.tokenizer import tokenizer_traits

if TYPE_CHECKING:
    from olive_ext.session.session import Session

_DECIDING = (
    "revision",
    "runtime",
    "runtime_version",
    "dtype",
    "providers",
    "max_length",
    "num_slots",
    "chunk_size",
    "deterministic",
    "scoring_head",
    "kv_cache",
)
"""Facts of an execution that decide the bits of its numbers."""


def run_in_chunks(
    executor: Executor, requests: Sequence[Request], take: Callable[[int, Result], None], journal: Journal | None
) -> None:
    """Calls `take(index, result)` for each of `requests`: what the journal knows first, then chunk by chunk as these
    become complete. Equal requests are computed once, and a request that is in the journal is left out of its chunk.
    Raises `LostRequestsError` behind all others where some have no result."""
    owners: dict[bytes, list[int]] = {}
    for place, request in enumerate(requests):
        owners.setdefault(answer_key(request), []).append(place)
    keys = list(owners)
    known: Journal | dict[bytes, Any] = journal if journal is not None else {}

    def put(key: bytes, result: Result) -> None:
        for place in owners[key]:
            take(place, result)

    chunks: list[list[bytes]] = []
    for chunk in cut([requests[places[0]] for places in owners.values()], executor.num_slots):
        missing = [keys[place] for place in chunk if keys[place] not in known]
        for key in (keys[place] for place in chunk if keys[place] in known):
            put(key, read_result(known[key]))
        if missing:
            chunks.append(missing)

    lost: dict[int, str] = {}

    def done(number: int, results: Sequence[Result | Lost]) -> None:
        found = dict(zip(chunks[number], results, strict=True))
        if journal is not None:
            journal.add({key: written(result) for key, result in found.items() if _is_kept(result)})
        for key, result in found.items():
            if isinstance(result, Lost):
                lost.update(dict.fromkeys(owners[key], result.reason))
            else:
                put(key, result)

    executor.run_chunks([[requests[owners[key][0]] for key in chunk] for chunk in chunks], done)
    if lost:
        raise LostRequestsError(lost)


def _is_kept(result: Result | Lost) -> TypeGuard[Result]:
    """What a broken model said is asked again, and counted again."""
    return isinstance(result, Result) and result.is_finite


def deciding_facts(session: Session) -> dict[str, Any]:
    """All that decides a session's answers besides their requests, JSON-ready."""
    execution = session.describe_execution()
    facts = {name: execution[name] for name in _DECIDING if name in execution}
    if "adapters" in execution:
        facts["adapters"] = sorted(execution["adapters"].values())
    digest = session.model.digest if session.model is not None else None
    if session.model is not None:
        facts["scoring"] = session.model.settings.engine.scoring  # the form itself follows from it and the requests
    facts |= {"model": digest or execution.get("model"), "tokenizer": tokenizer_traits(session.tokenizer)}
    if session.reference is not None:
        facts["reference"] = deciding_facts(session.reference)
    elif "reference" in execution:
        facts["reference"] = {name: execution["reference"].get(name) for name in ("facts", "top", "drawn")}
    return facts


def answer_key(request: Request) -> bytes:
    """Digest (16 bytes) of all of a request that decides its result."""
    given = source_key(request.source) + media_key(request.media)
    head = f"{request.num_targets} {given} {_decided(request.generation)}\n".encode()
    return hashlib.blake2b(head + integers(request.tokens).astype("<i8", copy=False).tobytes(), digest_size=16).digest()


def _decided(generation: Generation | None) -> str:
    if generation is None:
        return ""
    more = [generation.suppressed or "", generation.beams or ""]
    sampling, stops = generation.sampling, generation.stops
    decided = f"{generation.max_new_tokens} {sorted(generation.stop_ids)} {sampling} {stops!r}"
    return " ".join([decided, *filter(None, map(str, more))])


def written(result: Result) -> dict[str, Any]:
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


def read_result(written: dict[str, Any]) -> Result:
    """The result that `written` was made from."""
    notes = written.get("compared")
    return Result(
        tuple(written.get("logprobs", ())),
        tuple(map(bool, written.get("is_greedy", ()))),
        tuple(written.get("tokens", ())),
        FinishReason(written.get("finish_reason", FinishReason.SCORED.value)),
        written.get("stop_id"),
        None if notes is None else np.frombuffer(base64.b64decode(notes), COMPARED).copy(),
        hypotheses=tuple(
            Hypothesis(tuple(one["tokens"]), one["score"], FinishReason(one["finish_reason"]), one["stop_id"])
            for one in written.get("hypotheses", ())
        ),
    )

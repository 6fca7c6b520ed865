"""Requests -> sequences: every distinct prefix is computed once.

The inputs are sorted by their tokens; those behind different sources of an encoder share nothing, nor do those on
different sides of a length behind which the model computes texts otherwise. A score inside the prefix shared with
earlier inputs is read where that prefix is first computed. What is left, `distinct` tokens, is the number of nodes of
the prefix tree.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from olive_ext.engine.media.items import border
from olive_ext.engine.requests import Request, TokenArray, common_prefix, source_key
from olive_ext.engine.scheduling.sequences import PendingAnswer, Read, Sequence
from olive_ext.engine.step import ONE_SIDE, Side
from olive_ext.errors import RunError

_ITEM = 4
"""Bytes of a token in an input's key."""


FIRST_ID = 1 << 30
"""Larger than any token id."""

_LAST_ID = (1 << 31) - 1
"""The largest number that the slots' int32 holds."""


class MediaIds:
    """The numbers of each item's tokens, given when it is first met. A runner puts the placeholders back."""

    def __init__(self) -> None:
        self._first: dict[str, int] = {}
        self._next = FIRST_ID

    def put(self, request: Request) -> Request:
        """The request with its items' numbers in place of the placeholders."""
        if not request.media:
            return request
        tokens = list(request.tokens)
        for run in request.media:
            first = self._first.get(run.item.key)
            if first is None:
                first = self._first[run.item.key] = self._next
                self._next += run.item.num_tokens
                if self._next > _LAST_ID:
                    raise RunError("too many different pictures and sounds in one session: open the model again")
            tokens[run.start : run.stop] = range(first, first + run.item.num_tokens)
        return replace(request, tokens=tuple(tokens))


def one_side(_: int) -> Side:
    """Of a model that computes texts of all lengths alike."""
    return ONE_SIDE


@dataclass(frozen=True)
class Plan:
    """Sequences in the order in which they should be admitted, and the tokens they stand for."""

    sequences: tuple[Sequence, ...]
    tokens_naive: int
    """Tokens if every request were fed alone."""

    tokens_distinct: int
    """Nodes of the prefix tree: the least that exact prefix sharing has to feed (generated tokens not counted)."""


def make_plan(
    requests: Iterable[tuple[Hashable, Request]], can_share: bool = True, side_of: Callable[[int], Side] = one_side
) -> Plan:
    """Plans `(key, request)` pairs. Every request has an input token to read from, and its targets lie behind it.

    Without `can_share` only equal inputs are computed once. `side_of` says which side an input of so many tokens
    belongs to; what is fed is its whole length, so that a scored text's last target does not count.
    """
    found = [(request, input_key(request), key) for key, request in requests]
    items = sorted(
        [
            (side_of(len(inputs) // _ITEM), source_key(request.source), inputs, order, key, request)
            for order, (request, inputs, key) in enumerate(found)
        ]
    )
    sequences: list[Sequence] = []
    owners: list[tuple[int, Sequence]] = []  # (end of the prefix it computes, owner), ends increasing
    tokens: TokenArray = np.empty(0, np.int32)
    length = naive = distinct = 0
    previous: tuple[Side, str, bytes] | None = None
    for side, source, inputs, _, key, request in items:
        shared = length  # one that equals the one before is compared as bytes, and not read
        if previous != (side, source, inputs):
            before, tokens = tokens, np.frombuffer(inputs, ">i4").astype(np.int32)
            is_alike = can_share and previous is not None and (side, source) == previous[:2]
            shared = common_prefix(before, tokens) if is_alike else 0
            length, previous = len(tokens), (side, source, inputs)
        naive += length
        distinct += length - shared
        while owners and owners[-1][0] > shared:
            _, owner = owners.pop()
            if (owners[-1][0] if owners else 0) < shared:
                owners.append((shared, owner))
        answer = PendingAnswer(key, request.num_targets, request.generation)
        if length > shared or request.generation is not None:
            sequence = _sequence(tokens, request, answer, side)
            sequence.num_shared = border(request.media, min(shared, length - 1))
            sequences.append(sequence)
            sequence.parent = _parent(sequence.num_shared, owners)
            if length > shared:
                owners.append((length, sequence))
        if request.num_targets:
            _place_reads(request, answer, owners)
    return Plan(tuple(sequences), naive, distinct)


def input_key(request: Request) -> bytes:
    """The tokens to be fed, in a form that sorts by token and shorter first (big-endian, compared as memory)."""
    tokens = request.tokens if request.generation is not None else request.tokens[:-1]
    return struct.pack(f">{len(tokens)}i", *tokens)


def _sequence(tokens: TokenArray, request: Request, answer: PendingAnswer, side: Side) -> Sequence:
    generation, source, media = request.generation, request.source, request.media
    if generation is None:
        return Sequence(tokens, len(tokens), source=source, media=media, side=side)
    room = np.zeros(len(tokens) + generation.max_new_tokens - 1, np.int32)
    room[: len(tokens)] = tokens
    sequence = Sequence(room, len(tokens), generation=generation, answer=answer, source=source, media=media, side=side)
    if not generation.sampling.is_greedy:
        sequence.rng = np.random.default_rng(generation.sampling.seed)
    return sequence


def _parent(length: int, owners: list[tuple[int, Sequence]]) -> Sequence | None:
    """The sequence that computes the last of the first `length` tokens, which the next shares; marked there."""
    if not length:
        return None
    parent = next(owner for end, owner in owners if end >= length)
    parent.checkpoints.add(length)
    parent.num_children += 1
    return parent


def _place_reads(request: Request, answer: PendingAnswer, owners: list[tuple[int, Sequence]]) -> None:
    first = len(request.tokens) - request.num_targets
    place = 0
    for target in range(request.num_targets):
        position = first + target - 1
        while owners[place][0] <= position:
            place += 1
        record = request.records[target] if request.records else -1
        read = Read(request.tokens[first + target], answer, target, record)
        reads = owners[place][1].reads
        if position in reads:
            reads[position].append(read)
        else:
            reads[position] = [read]

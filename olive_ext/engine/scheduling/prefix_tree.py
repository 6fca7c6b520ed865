"""Turns requests into sequences, so that each distinct prefix is computed once. Cuts requests into chunks, each of
which runs by itself, from an empty cache, on any worker. Knows no runner and no step.

The inputs are sorted by their tokens; those with different sources of an encoder share nothing, nor do those on
different sides of a length beyond which the model computes texts otherwise. A score inside the prefix shared with
earlier inputs is read where that prefix is first computed. The remaining tokens (`distinct`) are computed; each is one
node of the prefix tree.

Products of matrices round by the rows that they hold, so that a request's numbers depend (by some 1e-6) on those that
share its steps. The cut follows from the requests alone, never from how many workers there are or what is known
already: the same requests give the same chunks, and a chunk the same numbers.

Last the plan of scored texts that have no slots: which rows the next tree batch holds, and in which cells they lie. The
shared-prefix cache is one path of tokens, each in a cell.

path     A B C D      after a step with the rows "A B x y" and "A B C D"
cells    1 2 5 6      (x and y lie in 3 and 4)
settled  1 2 3 4      where the next sequence shares all four
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from olive_ext.engine.requests import Counters, Ids, Request, TokenArray, common_prefix, source_key
from olive_ext.engine.scheduling.sequences import ChosenRow, PendingResult, Sequence, Targets
from olive_ext.engine.step import FIRST_CELL, ONE_SIDE, SHARED_PREFIX, CellArray, Move, Row, Side
from olive_ext.errors import RunError
from olive_ext.media.items import border, chunk_end

_ITEM = 4
"""Bytes of a token in an input's key."""


FIRST_ID = 1 << 30
"""A number that is larger than any token id."""

_LAST_ID = (1 << 31) - 1
"""The largest number that the slots' int32 can hold."""


class MediaIds:
    """Gives each picture or sound numbers in place of its placeholders, which a runner puts back."""

    def __init__(self) -> None:
        self._first: dict[str, int] = {}
        self._next = FIRST_ID

    def put(self, request: Request) -> Request:
        """The request, whose placeholders are replaced by the numbers of its items."""
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
        return replace(request, tokens=Ids(tokens))


@dataclass(frozen=True)
class Plan:
    """Sequences in the order of admission, and how many tokens they stand for."""

    sequences: tuple[Sequence, ...]
    tokens_naive: int
    """Tokens if every request were fed alone."""

    tokens_distinct: int
    """Nodes of the prefix tree: the fewest tokens that exact prefix sharing can feed, without generated tokens."""


def make_plan(requests: Iterable[tuple[Hashable, Request]], *how: Any) -> Plan:
    """The plan that `plan_in_parts` makes, in one go."""
    *_, plan = plan_in_parts(requests, *how)
    assert plan is not None
    return plan


PART = 64
"""Requests that are planned at a time, in 0.2 ms: meanwhile the device's thread may wait for Python's lock."""


def plan_in_parts(
    requests: Iterable[tuple[Hashable, Request]],
    can_share: bool = True,
    side_of: Callable[[int], Side] = lambda _: ONE_SIDE,
) -> Iterator[Plan | None]:
    """Plans `(key, request)` pairs: yields None after each part of the work, then the plan. Every request has an input
    token to read from, and its targets lie after it. Without `can_share`, only equal inputs are computed once.

    `side_of` gives the side of an input of so many tokens; the number is the whole length that is fed.
    """
    items = list(requests)
    inputs: list[bytes] = []
    for begin in range(0, len(items), PART):
        inputs += [input_key(request) for _, request in items[begin : begin + PART]]
        yield None
    sizes = [len(fed) for fed in inputs]
    sides = {size: side_of(size // _ITEM) for size in set(sizes)}
    heads = [(sides[size], source_key(request.source)) for size, (_, request) in zip(sizes, items, strict=True)]
    order = sorted(range(len(items)), key=inputs.__getitem__)
    order.sort(key=heads.__getitem__)
    sequences: list[Sequence] = []
    owners: list[tuple[int, Sequence]] = []  # (end of the prefix it computes, owner), ends increasing
    tokens: TokenArray = np.empty(0, np.int32)
    length = naive = distinct = 0
    before = -1
    for number, place in enumerate(order):
        if number % PART == 0:
            yield None
        (key, request), side = items[place], heads[place][0]
        shared = length  # one that equals the one before is compared as bytes, and not read
        is_alike = before >= 0 and heads[place] == heads[before]
        if not is_alike or inputs[place] != inputs[before]:
            previous, tokens = tokens, request.fed
            shared = common_prefix(previous, tokens) if can_share and is_alike else 0
            length = len(tokens)
        before = place
        naive += length
        distinct += length - shared
        while owners and owners[-1][0] > shared:
            _, owner = owners.pop()
            if (owners[-1][0] if owners else 0) < shared:
                owners.append((shared, owner))
        result = PendingResult(key, request)
        if length > shared or request.generation is not None:
            sequence = _sequence(tokens, result, side)
            sequence.num_shared = border(request.media, min(shared, length - 1))
            sequences.append(sequence)
            if sequence.num_shared:  # the parent computes the last of these tokens, and is marked there
                parent = next(owner for end, owner in owners if end >= sequence.num_shared)
                parent.checkpoints.add(sequence.num_shared)
                parent.num_children += 1
                sequence.parent = parent
            if length > shared:
                owners.append((length, sequence))
        first = 0
        for end, owner in owners if request.num_targets else ():  # read where the token before a target is computed
            stop = min(end - result.before, request.num_targets)
            if first < stop:
                owner.targets.append(Targets(result, first, stop))
                first = stop
    yield Plan(tuple(sequences), naive, distinct)


def input_key(request: Request) -> bytes:
    """The tokens to feed, as bytes that sort by token, shorter inputs first (big-endian, compared as memory)."""
    return request.fed.astype(">i4").tobytes()


def _sequence(tokens: TokenArray, result: PendingResult, side: Side) -> Sequence:
    generation = result.request.generation
    if generation is None:
        return Sequence(tokens, len(tokens), result, side)
    room = np.zeros(len(tokens) + generation.max_new_tokens - 1, np.int32)
    room[: len(tokens)] = tokens
    sequence = Sequence(room, len(tokens), result, side)
    if not generation.sampling.is_greedy:
        sequence.rng = np.random.default_rng(generation.sampling.seed)
    return sequence


MOST_TOKENS, LEAST_TOKENS = 16384, 4096
"""About the tokens that a chunk of scored texts feeds. It bounds what a crash costs, and is large enough that a last
step which is not full does not matter."""

USUAL_CHUNKS = 32
"""A call is cut into so many chunks, where that keeps them within the bounds."""

STEM_SHARE = 0.05
"""The part of a chunk's tokens that a prefix may have which the next chunk must compute again. To keep to it, chunks
grow beyond `MOST_TOKENS`, up to four times as much."""

GENERATIONS_PER_SLOT = 8
"""Generations of a chunk for each slot: while the last of them end, slots are idle."""


def cut(requests: Items[Request], num_slots: int) -> list[list[int]]:
    """The chunks, as indices into `requests`, in the order of the prefix tree.

    A chunk ends where two neighbours share least, between half and the whole of its size.
    """
    ids = MediaIds()
    requests = [ids.put(request) for request in requests]
    keys = [(source_key(request.source), input_key(request)) for request in requests]
    order = sorted(range(len(requests)), key=keys.__getitem__)
    shared = _shared_prefixes([requests[place] for place in order])
    fresh = [len(requests[place].fed) - shared[at] for at, place in enumerate(order)]
    is_scored = [requests[place].generation is None for place in order]
    total = sum(tokens for tokens, scored in zip(fresh, is_scored, strict=True) if scored)
    size = min(MOST_TOKENS, max(LEAST_TOKENS, total // USUAL_CHUNKS))
    per_generation = size / (GENERATIONS_PER_SLOT * num_slots)
    work = [tokens if scored else per_generation for tokens, scored in zip(fresh, is_scored, strict=True)]
    dues = [min(tokens / STEM_SHARE, 4 * MOST_TOKENS) if is_scored[at] else 0 for at, tokens in enumerate(shared)]
    bounds = _bounds(work, dues, size)
    return [order[begin:end] for begin, end in pairwise(bounds)]


def predicted_tokens(requests: Items[Request]) -> int:
    """The work of a request, by which chunks are made equal."""
    shared = _shared_prefixes(requests)
    fed = sum(len(request.fed) - common for request, common in zip(requests, shared, strict=True))
    return fed + sum(request.generation.max_new_tokens for request in requests if request.generation)


def _bounds(work: Items[float], dues: Items[float], size: float) -> list[int]:
    """Where chunks begin, and the end. `dues`: the least work before a request at which a chunk may begin with it."""
    bounds, done, best = [0], 0.0, -1
    for at, part in enumerate(work):
        if done > size / 2 and done >= dues[at] and (best < 0 or dues[at] <= dues[best]):
            best = at
        if best > 0 and done + part > size:
            bounds.append(best)
            done, best = sum(work[best:at]), -1
        done += part
    return [*bounds, len(work)] if work else []


def _shared_prefixes(requests: Items[Request]) -> list[int]:
    """The number of tokens that each of the sorted requests shares with the one before it."""
    pairs = pairwise((source_key(request.source), request.fed) for request in requests)
    shared = (common_prefix(left, right) if one == other else 0 for (one, left), (other, right) in pairs)
    return [0, *shared] if requests else []


class TreeBatches:
    """Waiting sequences in sorted order, the first of which may be computed in part, and the path of the shared-prefix
    cache: the tokens of the sequence that was fed last, each in a cell."""

    def __init__(self, capacity: int, num_tokens: int) -> None:
        """`capacity`: cells of the shared-prefix cache. `num_tokens`: the most tokens of a step."""
        self._num_tokens = num_tokens
        self.waiting: deque[Sequence] = deque()
        """The sequences that are not computed to their end, in sorted order."""

        self._tokens_P = np.zeros(capacity, np.int32)
        self._cells_P: CellArray = np.zeros(capacity, np.int32)
        self._length = 0

    def plan(self, limit: int, counters: Counters) -> tuple[list[ChosenRow], tuple[Move, ...], int]:
        """The rows of the next step, the moves before them, and the cell of their first token. The rows have up to
        `limit` tokens together: fewer where no more wait or an item would be cut, more where the first row begins with
        a larger item. The last row may end before its sequence does, which then waits as the first."""
        moves = self._settle(_to_join(self.waiting[0]))
        first_cell = top = FIRST_CELL + self._length
        room = min(limit, self._num_tokens, len(self._cells_P) - top)
        rows: list[ChosenRow] = []
        while room > 0 and self.waiting:
            sequence = self.waiting[0]
            shared = self._join(_to_join(sequence))
            if not sequence.computed:
                counters.prefix_hits += shared > 0
                counters.tokens_reused += shared
            sequence.computed = shared
            stop = min(sequence.end, shared + room)
            if sequence.media and stop < sequence.end:
                stop = chunk_end(sequence.media, shared, stop)
            if rows and stop - shared > room:
                break
            tokens, cells_P = sequence.tokens[shared:stop], self._cells_P[:shared].copy()
            row = Row(SHARED_PREFIX, shared, (*tokens.tolist(),), media=sequence.media, cells_P=cells_P)
            rows.append((sequence, row))
            self._tokens_P[shared:stop] = tokens
            self._cells_P[shared:stop] = np.arange(top, top + len(tokens))
            self._length, top, room = stop, top + len(tokens), room - len(tokens)
            if stop < sequence.end:
                break
            self.waiting.popleft()
        counters.moves += len(moves)
        return rows, moves, first_cell

    def _settle(self, tokens: TokenArray) -> tuple[Move, ...]:
        """Drops from the path all but what `tokens` shares with it, and moves that to the first cells."""
        length = self._join(tokens)
        settled = np.arange(FIRST_CELL, FIRST_CELL + length, dtype=np.int32)
        stays = common_prefix(self._cells_P[:length], settled)
        moves = (Move(self._cells_P[stays:length].copy(), FIRST_CELL + stays),) if stays < length else ()
        self._cells_P[:length] = settled
        return moves

    def _join(self, tokens: TokenArray) -> int:
        """Cuts the path back to what it shares with `tokens`; returns the number of shared tokens."""
        self._length = common_prefix(self._tokens_P[: self._length], tokens)
        return self._length


def _to_join(sequence: Sequence) -> TokenArray:
    """Tokens that are not fed where they are resident: those already computed, or those before the first score."""
    return sequence.tokens[: sequence.computed or border(sequence.media, sequence.first_read())]

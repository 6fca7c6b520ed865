"""Cuts requests into chunks, each of which is run by itself, from an empty cache, wherever there is room for it.

Products of matrices round by the rows that they hold, so that a request's numbers depend (by some 1e-6) on those that
share its steps. The cut follows from the requests alone, never from how many workers there are or what is known
already: the same requests give the same chunks, and a chunk the same numbers. Knows no runner and no step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from olive_ext.engine.requests import Request, TokenArray, common_prefix, integers, source_key
from olive_ext.engine.scheduling.prefix_tree import MediaIds, input_key

MOST_TOKENS, LEAST_TOKENS = 16384, 4096
"""Tokens that a chunk of scored texts feeds, about: what a crash costs, and what makes up for a last step that is not
full."""

USUAL_CHUNKS = 32
"""Into so many chunks a call is cut where that keeps within the bounds."""

STEM_SHARE = 0.05
"""Part of a chunk's tokens that a prefix may have which the next chunk must compute again. Chunks grow beyond
`MOST_TOKENS` for it, up to four times as much."""

GENERATIONS_PER_SLOT = 8
"""Generations of a chunk, for each slot: while the last of them end, slots are empty."""


def cut(requests: Sequence[Request], num_slots: int) -> list[list[int]]:
    """The chunks, as indices into `requests`, in the order of the prefix tree.

    A chunk ends where its neighbour shares least with it, between half and the whole of its size.
    """
    ids = MediaIds()
    requests = [ids.put(request) for request in requests]
    order = sorted(range(len(requests)), key=lambda place: _sort_key(requests[place]))
    shared = _shared_prefixes([requests[place] for place in order])
    fresh = [_num_fed(requests[place]) - shared[at] for at, place in enumerate(order)]
    is_scored = [requests[place].generation is None for place in order]
    total = sum(tokens for tokens, scored in zip(fresh, is_scored, strict=True) if scored)
    size = min(MOST_TOKENS, max(LEAST_TOKENS, total // USUAL_CHUNKS))
    one = size / (GENERATIONS_PER_SLOT * num_slots)
    work = [tokens if scored else one for tokens, scored in zip(fresh, is_scored, strict=True)]
    dues = [min(tokens / STEM_SHARE, 4 * MOST_TOKENS) if is_scored[at] else 0 for at, tokens in enumerate(shared)]
    bounds = _bounds(work, dues, size)
    return [order[begin:end] for begin, end in pairwise(bounds)]


def predicted_tokens(requests: Sequence[Request]) -> int:
    """Most tokens that a chunk computes: what makes one chunk larger than another."""
    shared = _shared_prefixes(requests)
    fed = sum(_num_fed(request) - common for request, common in zip(requests, shared, strict=True))
    return fed + sum(request.generation.max_new_tokens for request in requests if request.generation)


def _bounds(work: Sequence[float], dues: Sequence[float], size: float) -> list[int]:
    """Where chunks begin, and the end. `dues`: the least work before a request for a chunk to begin with it."""
    bounds, done, best = [0], 0.0, -1
    for at, part in enumerate(work):
        if done > size / 2 and done >= dues[at] and (best < 0 or dues[at] <= dues[best]):
            best = at
        if best > 0 and done + part > size:
            bounds.append(best)
            done, best = sum(work[best:at]), -1
        done += part
    return [*bounds, len(work)] if work else []


def _shared_prefixes(requests: Sequence[Request]) -> list[int]:
    """Tokens that each of the sorted requests shares with the one before it."""
    found = []
    previous: TokenArray = np.empty(0, np.int32)
    source = ""
    for request in requests:
        tokens, own = integers(request.tokens[: _num_fed(request)]).astype(np.int32), source_key(request.source)
        found.append(common_prefix(previous, tokens) if own == source else 0)
        previous, source = tokens, own
    return found


def _num_fed(request: Request) -> int:
    return len(request.tokens) - (request.generation is None)


def _sort_key(request: Request) -> tuple[str, bytes]:
    return source_key(request.source), input_key(request)

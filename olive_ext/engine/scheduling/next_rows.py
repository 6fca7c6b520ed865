"""Which of the running sequences have rows in the next step, and how many tokens of each. Pure functions of the
runner's traits."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from olive_ext.engine.media import chunk_end, runs_within
from olive_ext.engine.runners.runner import Traits
from olive_ext.engine.scheduling.sequences import Sequence
from olive_ext.engine.step import Batching, Row

IDLE_TOKEN = 0
"""Is fed where a step needs a token whose outputs nobody reads."""


def next_rows(
    ready: list[Sequence], traits: Traits, capacity: int, most_tokens: int, limit: int
) -> list[tuple[Sequence, Row]]:
    """The rows of the next step: those that decode and inputs where it is packed; the most that are alike; or one input
    alone, or those that decode. Inputs have up to `most_tokens` together, and a step up to `limit` rows; slots have
    `capacity` positions."""
    if traits.batching is Batching.ALIKE:
        rows = {sequence.slot: _row(sequence, traits, capacity, most_tokens) for sequence in ready}
        chosen = _alike([(sequence, len(rows[sequence.slot].tokens)) for sequence in ready], traits)
        return [(sequence, rows[sequence.slot]) for sequence in chosen[:limit]]
    inputs = [sequence for sequence in ready if _has_many(sequence, traits) and not sequence.is_answer]
    if inputs and traits.batching is not Batching.PACKED:
        return [(inputs[0], _row(inputs[0], traits, capacity, most_tokens))]
    short = [sequence for sequence in ready if sequence.is_answer or not _has_many(sequence, traits)]
    decoding = together(short, traits, limit)
    packed = [(sequence, _row(sequence, traits, capacity, 1)) for sequence in decoding]
    room = most_tokens - len(packed)
    for sequence in inputs:
        if room <= 0 and packed:
            break
        row = _row(sequence, traits, capacity, max(1, room))
        if sequence.media and len(row.tokens) > room:  # it begins with an item, which is not cut
            if len(packed) == len(decoding):
                return [(sequence, row)]
            continue
        packed.append((sequence, row))
        room -= len(row.tokens)
    return packed


def _has_many(sequence: Sequence, traits: Traits) -> bool:
    """Whether its next row may have several tokens: the last one of a text that is scored is filled up to a group."""
    return sequence.pending > 1 or (sequence.generation is None and traits.row_group > 1)


def together(decoding: list[Sequence], traits: Traits, limit: int) -> list[Sequence]:
    """The sequences of which one step computes one token each."""
    if traits.batching is Batching.ALIKE and decoding:
        decoding = _alike([(sequence, 1) for sequence in decoding], traits)
    return decoding[: 1 if traits.batching is Batching.SINGLE else limit]


def _alike(ready: Iterable[tuple[Sequence, int]], traits: Traits) -> list[Sequence]:
    """The most of these sequences, of which so many tokens are next, whose rows may share a step. Inputs come first, of
    these the ones that run alone, so that what follows their pictures or sounds can be fed together."""
    alone: list[Sequence] = []
    groups: dict[Hashable, list[Sequence]] = {}
    for sequence, num_tokens in ready:
        group = traits.row_mix.group(sequence.computed, num_tokens, sequence.source)
        stop = sequence.computed + num_tokens
        if group is None or (num_tokens > 1 and runs_within(sequence.media, sequence.computed, stop)):
            alone.append(sequence)
        else:
            groups.setdefault(group, []).append(sequence)
    if alone:
        return alone[:1]
    inputs = [group for group in groups.values() if any(sequence.pending > 1 for sequence in group)]
    return max(inputs or groups.values(), key=len)


def _row(sequence: Sequence, traits: Traits, capacity: int, most: int) -> Row:
    """The sequence's next tokens, up to `most` of them where it may be split; all of an item of more that they begin
    with."""
    start, stop = sequence.computed, sequence.end
    if traits.chunked_prefill:
        stop = min(stop, start + most)
        if sequence.media and stop < sequence.end:
            stop = chunk_end(sequence.media, start, stop, traits.row_group)
    if not traits.can_rewind:
        stop = min((length for length in sequence.checkpoints if start < length < stop), default=stop)
    is_checkpoint = not traits.can_rewind and stop in sequence.checkpoints
    tokens = tuple(sequence.tokens[start:stop].tolist())
    if sequence.generation is None and stop == sequence.end:
        tokens += _rest_of_group(start, stop, traits.row_group, capacity)
    return Row(sequence.slot, start, tokens, is_checkpoint, sequence.source, sequence.media)


def _rest_of_group(start: int, stop: int, group: int, capacity: int) -> tuple[int, ...]:
    """Tokens behind a text that is scored, which make its last group of rows a whole one; none where the slot has no
    room for them."""
    missing = (start - stop) % group
    return (IDLE_TOKEN,) * missing if stop + missing <= capacity else ()

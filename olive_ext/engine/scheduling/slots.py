"""The rows of the KV cache as the scheduler sees them: which tokens each holds, and who has taken it.

slot 0   7 3 9 4 1 .  busy      take(7 3 9 8):  slot 2 is free and shares 2 tokens, slot 0 is busy and shares 3
slot 1   5 5 . . . .  free      -> slot 2 is taken, 3 tokens are copied into it from slot 0, then 8 is fed
slot 2   7 3 2 . . .  free
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from collections.abc import Sequence as Items

import numpy as np

from olive_ext.engine.requests import TokenArray, common_prefix, integers, source_key
from olive_ext.engine.runners.runner import Traits
from olive_ext.engine.scheduling.blocks import BlockTables
from olive_ext.engine.scheduling.sequences import Sequence
from olive_ext.engine.step import Capacity, Columns, Copy, IntArray, Row
from olive_ext.media.items import Media, border


class Slots:
    """The tokens that are resident in each slot. A released slot keeps its tokens until it is taken again."""

    def __init__(self, traits: Traits, capacity: Capacity, answer_tokens: int = 0) -> None:
        """With short answers (`answer_tokens`), the first sequence does not overwrite what waiting sequences share."""
        form, num_slots = traits.form, capacity.num_slots
        self.num_slots, self.capacity = num_slots, capacity.positions
        self.min_copy = form.min_copy(answer_tokens)
        self._can_rewind = traits.can_rewind
        self._has_blocks = form.has_blocks
        self._keeps_wanted = answer_tokens > 0
        self._row_group = traits.row_group
        self._checkpoints: list[list[int]] = [[] for _ in range(num_slots)]
        self._tokens_SP = np.zeros((num_slots, capacity.positions), np.int32)
        self._sources = [""] * num_slots
        self._has_sources = False
        self._lengths_S = np.zeros(num_slots, np.int64)
        self._busy: set[int] = set()
        self.free = dict.fromkeys(range(num_slots))
        """The free slots, the least recently used first."""

        self.copies: list[Copy] = []
        """The copies to make before the next step's rows, in order."""

        self._tables: BlockTables | None = None
        number, size = capacity.blocks
        if number and number < num_slots * -(-capacity.positions // size):
            self._tables = BlockTables(num_slots, capacity.positions, size, number)
            self.copies += [Copy(slot, slot, 0) for slot in range(num_slots)]  # runners may hold what was there before

    @property
    def is_idle(self) -> bool:
        """Whether all slots are free."""
        return not self._busy

    def idle_position(self, slot: int) -> int:
        """The position where an idle row writes: after the resident tokens, or the last one of a full slot."""
        return min(int(self._lengths_S[slot]), self.capacity - 1)

    def take(self, sequence: Sequence, limit: int, wanted: Container[int], likely: int = 0) -> bool:
        """Gives the sequence the free slot that shares most of its first `limit` tokens; of several, the least recently
        used. Where another slot shares more, the prefix is copied from that slot, which is returned. Slots of blocks
        share the blocks of any slot, so there the least recently used slot is always taken.

        Slots in `wanted` come last. A sequence with another encoder source shares nothing, and pictures and sounds are
        shared whole or not at all. The search begins with the slot `likely`.
        """
        tokens, source, media = sequence.tokens, source_key(sequence.source), sequence.media
        slot = oldest = self._oldest(wanted)
        if self._has_blocks and self._can_rewind:
            giver, longest = self._giver(tokens[:limit], source, likely)
            equal = {slot: self._num_equal(tokens[:limit], slot, longest - self.min_copy + 1), giver: longest}
        else:
            wanted_P = tokens[:limit]
            differs_SP = np.empty((self.num_slots, len(wanted_P) + 1), np.bool_)
            differs_SP[:, -1] = True  # ends what is equal
            np.not_equal(self._tokens_SP[:, : len(wanted_P)], wanted_P, out=differs_SP[:, :-1])
            equal = dict(enumerate(np.minimum(differs_SP.argmax(1), self._lengths_S).tolist()))
        shared = self._reusable(equal, source, media)
        if not self._has_blocks:
            kept = wanted if self._keeps_wanted else ()
            slot = min(self.free, key=lambda free: (free in kept, -shared[free]))
        givers = shared if self._has_blocks or self._keeps_wanted else self._busy
        giver = max(givers, key=shared.__getitem__, default=slot)
        copy = None
        if shared[giver] >= shared[slot] + self.min_copy:
            slot = oldest
            copy = self._copied(Copy(giver, slot, shared[giver]))
            if giver in self.free:
                del self.free[giver]
                self.free[giver] = None
        length = shared[giver] if copy else shared[slot]
        checkpoints = self._checkpoints[slot]
        self._checkpoints[slot] = [length] if copy else [kept for kept in checkpoints if kept <= length]
        self._tokens_SP[slot, :length] = tokens[:length]
        self._lengths_S[slot] = length
        self._sources[slot] = source
        self._seize(slot)
        sequence.slot, sequence.computed = slot, length
        return copy is not None

    def take_empty(self, wanted: Container[int] = frozenset()) -> int:
        """Takes the least recently used free slot, without sharing its content; the `wanted` ones come last."""
        slot = self._oldest(wanted)
        self._drop(slot)
        self._seize(slot)
        return slot

    def move(self, source: int, target: int) -> None:
        """Moves all that is resident in `source` to the free slot `target`; then `source` is free."""
        self._seize(target)
        self.fork(source, target)
        self.release(source)

    def fork(self, source: int, target: int) -> None:
        """Copies all that is resident in `source` to `target`."""
        length = int(self._lengths_S[source])
        tokens, held = self._tokens_SP[source, :length], self._tokens_SP[target, : self._lengths_S[target]]
        num_equal = common_prefix(tokens, held) if self._sources[source] == self._sources[target] else 0
        self._tokens_SP[target, :length] = tokens
        self._lengths_S[target], self._checkpoints[target] = length, [length]
        self._sources[target] = self._sources[source]
        self._copied(Copy(source, target, length, num_equal))

    def blocks_due(self, sequence: Sequence) -> int:
        """The number of blocks that the sequence will take: for its tokens and one block more, without those that it
        shares with its parent. Beams reserve as many as they may ever need, because no beam can be preempted."""
        if (tables := self._tables) is None:
            return 0
        most, parent = len(sequence.tokens), sequence.parent
        if sequence.num_slots > 1:
            return tables.covering(most) * (1 if sequence.slot >= 0 else sequence.num_slots)
        stop = sequence.end if sequence.generation is None else min(most, sequence.end + tables.block_size)
        if sequence.slot >= 0:
            return tables.missing(sequence.slot, sequence.computed, stop - sequence.computed)
        is_resident = parent is not None and parent.slot >= 0
        return tables.covering(stop) - is_resident * (sequence.num_shared // tables.block_size)

    def make_room(self, rows: Items[Row], wanted: Container[int]) -> bool:
        """Gives the rows blocks for their tokens. False where there are too few even after emptying free slots, the
        `wanted` ones last."""
        if (tables := self._tables) is None:
            return True
        due = tables.without_room(Columns.of(rows))
        if not self.reclaim(lambda: sum([tables.missing(*row) for row in due]), wanted, spares=False):
            return False
        for row in due:
            tables.make_room(*row)
        return True

    def reclaim(self, missing: Callable[[], int], wanted: Container[int], *, spares: bool) -> bool:
        """Whether the `missing` blocks are free, or become free by emptying free slots: the least recently used first,
        the `wanted` ones last or, if it `spares` them, never."""
        tables = self._tables
        while tables is not None and missing() > tables.num_free:
            holding = [slot for slot in self.free if tables.table(slot)]
            slot = min(holding, key=lambda slot: slot in wanted, default=None)
            if slot is None or (spares and slot in wanted):
                return False
            self._drop(slot)
        return True

    def _drop(self, slot: int) -> None:
        self._lengths_S[slot], self._checkpoints[slot] = 0, []
        if self._tables is not None:
            self._copied(Copy(slot, slot, 0))

    def _copied(self, copy: Copy) -> Copy:
        self.copies.append(copy)
        if self._tables is not None:
            self._tables.fork(copy)
        return copy

    def extend(self, rows: Columns, tokens_N: IntArray, places: Items[int], checkpoints: Iterable[int]) -> None:
        """Adds the tokens of the rows at `places` to their slots. What slots in `checkpoints` hold then is kept."""
        places_F = integers(places)
        slots_F, lengths_F, starts_F = rows.slots_B[places_F], rows.lengths_B[places_F], rows.starts_B[places_F]
        resident_F = self._lengths_S[slots_F]
        is_one_F = lengths_F == 1
        cells_F = slots_F * self.capacity + resident_F  # by one index: by two numpy lets go of Python's lock
        self._tokens_SP.reshape(-1)[cells_F[is_one_F]] = tokens_N[starts_F[is_one_F]]
        longer = (column[~is_one_F].tolist() for column in (slots_F, resident_F, starts_F, lengths_F))
        for slot, resident, start, length in zip(*longer, strict=True):
            self._tokens_SP[slot, resident : resident + length] = tokens_N[start : start + length]
        self._lengths_S[slots_F] = resident_F + lengths_F
        for slot in checkpoints:
            self._checkpoints[slot].append(int(self._lengths_S[slot]))

    def release(self, slot: int) -> None:
        """Frees the slot. In a slot that can be rewound, one position stays unused, where an idle row may write."""
        self._busy.remove(slot)
        self.free[slot] = None
        if self._can_rewind:
            self._lengths_S[slot] = min(self._lengths_S[slot], self.capacity - 1)

    def _oldest(self, wanted: Container[int]) -> int:
        return next((slot for slot in self.free if slot not in wanted), next(iter(self.free)))

    def _seize(self, slot: int) -> None:
        del self.free[slot]
        self._busy.add(slot)

    def _giver(self, tokens: TokenArray, source: str, likely: int) -> tuple[int, int]:
        """The slot that shares most of `tokens`, and how many tokens it shares, where every slot can be cut back
        anywhere: `likely`, or the first that shares more. Only slots that hold the token after the longest match so far
        are compared as a whole."""
        lengths_S = self._lengths_S
        self._has_sources |= source != ""
        if self._has_sources:
            lengths_S = np.where(np.array([held == source for held in self._sources]), lengths_S, 0)
        giver, longest = likely, min(self._num_equal(tokens, likely), int(lengths_S[likely]))
        while longest < len(tokens):
            may = np.flatnonzero((lengths_S > longest) & (self._tokens_SP[:, longest] == tokens[longest]))
            shared = ((slot, self._num_equal(tokens, slot)) for slot in may.tolist())
            better = next(((slot, length) for slot, length in shared if length > longest), None)
            if better is None:
                break
            giver, longest = better
        return giver, longest

    def _num_equal(self, tokens: TokenArray, slot: int, least: int = 0) -> int:
        """How many of `tokens` the slot holds; 0 where the last of the `least` tokens to count differs."""
        if least > 0 and self._tokens_SP[slot, least - 1] != tokens[least - 1]:
            return 0
        return common_prefix(tokens, self._tokens_SP[slot, : self._lengths_S[slot]])

    def _reusable(self, equal: Mapping[int, int], source: str, media: Media) -> dict[int, int]:
        """How many of the tokens that slots share need not be fed again."""
        kept = {slot: length - length % self._row_group for slot, length in equal.items()}
        if media:
            kept = {slot: border(media, length, self._row_group) for slot, length in kept.items()}
        if not self._can_rewind:
            kept = {slot: self._kept(slot, length) for slot, length in kept.items()}
        return {slot: length if self._sources[slot] == source else 0 for slot, length in kept.items()}

    def _kept(self, slot: int, length: int) -> int:
        """The position within its first `length` tokens to which a slot that keeps only checkpoints can be cut back."""
        if length == self._lengths_S[slot]:
            return length
        return max((kept for kept in self._checkpoints[slot] if kept <= length), default=0)

"""Caches that the graph returns anew (concatenated KV, states): a step may have any slots whose rows are alike. Nothing
is copied while the rows stay the same. First the planner's form, then the trials, then the cache.

How far rows must be alike is tried at opening. The graph does not show what it does with several rows: it may make its
mask for one row, or take positions from the past's shape.

Present outputs stay on the device and are the next step's past as they are, while the rows stay the same. When the rows
change, rows of several batches are put together, and shorter rows are padded. Tensors are never overwritten, so the
slots that continue from a checkpoint share them. A state cannot be cut: what was resident at a checkpoint is kept, and
a slot can only go back to checkpoints. Axes: S tokens of a text, T targets.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as Items
from contextlib import suppress
from dataclasses import astuple, dataclass, field, replace
from itertools import groupby
from typing import ClassVar

import numpy as np
import onnxruntime as ort
from typing_extensions import override

from olive_ext.engine.forms.kv_store import KvPlace, KvStore, OpenedDecoder
from olive_ext.engine.forms.rows import RowsOnGraph
from olive_ext.engine.runners.runner import ONE_ROW, PartsDifferError, ReadySequences, Runner, StepForm
from olive_ext.engine.runners.trials import TARGETS, disagreement, draw, targets_of
from olive_ext.engine.scheduling.sequences import ChosenRow, Sequence
from olive_ext.engine.step import UNLIMITED, Copy, FloatArray, LogitsRow, Row, Step
from olive_ext.errors import ModelError, RunError
from olive_ext.graph.standalone_graphs import RowTensor
from olive_ext.media.items import Source, runs_within
from olive_ext.model import ResolvedModel
from olive_ext.model.providers.bindings import StackedPart, Stacker, Values, zeros
from olive_ext.model.types import SourceKind


@dataclass(frozen=True)
class AlikeRows(StepForm):
    """Rows of a step have equally many tokens. Those of one token after equally many positions may always share it."""

    name: ClassVar[str] = "alike"
    has_blocks: ClassVar[bool] = True

    mixes_pasts: bool = False
    """Whether rows of one token may have pasts of different lengths; otherwise equal ones."""

    prompts: bool = False
    """Whether rows may have several tokens, without a past."""

    continued: bool = False
    """Whether rows may have several tokens, after equally many positions."""

    sources: bool = True
    """Whether the sources of rows may have different shapes."""

    def group(self, past: int, num_tokens: int, source: Source | None) -> Hashable | None:
        """The key that rows of one step must have in common; None for a row that runs alone."""
        shape = None if self.sources or source is None else source.array.shape
        if num_tokens == 1:
            return (1, None if self.mixes_pasts else past, shape)
        return (num_tokens, past, shape) if (self.continued if past else self.prompts) else None

    @override
    def next_rows(self, ready: ReadySequences) -> list[ChosenRow]:
        rows = {sequence.slot: ready.row(sequence, ready.most_tokens) for sequence in ready.sequences}
        chosen = self._alike([(sequence, len(rows[sequence.slot].tokens)) for sequence in ready.sequences])
        most = max(1, ready.limit // len(rows[chosen[0].slot].tokens))
        return [(sequence, rows[sequence.slot]) for sequence in chosen[:most]]

    def _alike(self, ready: Iterable[tuple[Sequence, int]]) -> list[Sequence]:
        """The largest group of these sequences whose next rows, of so many tokens, may share a step. Inputs come first,
        and first of these the ones that run alone, so that what follows their items can be fed together."""
        alone: list[Sequence] = []
        groups: dict[Hashable, list[Sequence]] = {}
        for sequence, num_tokens in ready:
            group = self.group(sequence.computed, num_tokens, sequence.source)
            stop = sequence.computed + num_tokens
            if group is None or (num_tokens > 1 and runs_within(sequence.media, sequence.computed, stop)):
                alone.append(sequence)
            else:
                groups.setdefault(group, []).append(sequence)
        if alone:
            return alone[:1]
        inputs = [group for group in groups.values() if any(one.end - one.computed > 1 for one in group)]
        return max(inputs or groups.values(), key=len)

    @override
    def room(self, most_tokens: int, pending: int) -> tuple[int, int]:
        return UNLIMITED, UNLIMITED

    @override
    def min_copy(self, answer_tokens: int) -> int:
        return 1

    @override
    def most_step_tokens(self, chunk_size: int, num_slots: int) -> int:
        return chunk_size * num_slots

    @override
    def runs(self, other: StepForm) -> bool:
        return isinstance(other, AlikeRows)

    @override
    def with_other(self, other: StepForm, counts: Items[int]) -> StepForm:
        """Rows as alike as both forms demand. Forms of other caches allow only rows of one token after equal pasts."""
        if not isinstance(other, AlikeRows):
            return AlikeRows(sources=self.sources)
        pairs = zip(astuple(self), astuple(other), strict=True)
        return AlikeRows(*(mine and its for mine, its in pairs))


TEXT_TOKENS = 5
PROMPT = 3
"""The tokens of the two texts, and of the part that is fed first."""


def fitting_chunk_size(chunk_size: int, runner: Runner, notes: list[str]) -> int:
    """`chunk_size`, or 1 and a note where the graph fails on several tokens after resident positions.

    onnxruntime-genai's exports with MultiHeadAttention make their mask for a whole prompt or for one token only, and
    Mamba graphs that declare any number of tokens run with one. Raises `ModelError` where it cannot run a token.
    """
    runner.reserve(3)
    try:
        runner.run(Step((Row(0, 0, (0,)),)))
    except RunError as error:
        raise ModelError(f"the model cannot run one token: {error}") from error
    if chunk_size == 1:
        return 1
    try:
        runner.run(Step((Row(0, 1, (0, 0)),)))
    except RunError as error:
        notes.append(f"steps are cut to 1 token, which is slow, because the graph takes no more after a past: {error}")
        return 1
    return chunk_size


def find_row_mix(runner: Runner, vocab_size: int, chunk_size: int, pad: Callable[[bool], None]) -> AlikeRows | None:
    """How far rows of one step must be alike; None where together they give other numbers than alone. Shorter rows are
    padded at the end or, after `pad(True)`, in front, which stays set."""
    trial = _RowsTrial(runner, vocab_size, chunk_size, (None, None))
    together, apart = ((PROMPT, PROMPT), (PROMPT, PROMPT - 1))
    mix = AlikeRows(prompts=not trial.problem((0, 0), PROMPT))
    if not trial.problem(apart, 1, 1):  # as GroupQueryAttention does, which refuses `continued`
        return replace(mix, mixes_pasts=True)
    pad(True)
    mix = replace(mix, mixes_pasts=not trial.problem(apart, 1, 1))
    if not mix.mixes_pasts:
        pad(False)
        if trial.problem(together, 1, 1):
            return None
    return replace(mix, continued=not trial.problem(together, TEXT_TOKENS - PROMPT))


def try_sources(runner: Runner, num_ids: int, *, are_padded: bool) -> None:
    """Sets the `failure` of an encoder-decoder's encoder. Raises `PartsDifferError` where two sources in a step change
    each other's texts. Nothing is tried of a model that fails on random tokens alone. `are_padded`: whether the sources
    of a step may have different lengths."""
    problem, encoder = None, runner.encoder
    lengths = TEXT_TOKENS, 2 * TEXT_TOKENS if are_padded else TEXT_TOKENS
    sources = [Source(np.array(ids)) for ids in map(draw(num_ids), lengths)]
    with suppress(RunError):
        trial = _RowsTrial(runner, num_ids, TEXT_TOKENS, sources)
        problem = trial.problem((0, 0), PROMPT, 1)
        if encoder.takes_padding:
            encoder.encode_padded(sources[0])
            encoder.failure = trial.problem((0,), TEXT_TOKENS, what="texts with padded sources") or ""
    encoder.restart()
    if problem is not None:
        raise PartsDifferError(problem)


class _RowsTrial:
    """Two texts in two slots, and the log-probabilities of `TARGETS` after each of their tokens when fed alone."""

    def __init__(self, runner: Runner, vocab_size: int, chunk_size: int, sources: Items[Source | None]) -> None:
        """`sources`: the two texts', of an encoder-decoder."""
        self._runner = runner
        self._texts = [*map(draw(vocab_size), (TEXT_TOKENS, TEXT_TOKENS))]
        self._chunk_size = chunk_size
        self._sources = sources
        runner.reserve(TEXT_TOKENS)
        self._expected = [self._alone(slot, text) for slot, text in enumerate(self._texts)]

    def problem(self, pasts: Items[int], *steps: int, what: str = "texts beside others") -> str | None:
        """Why steps of so many tokens of the texts, after pasts that were fed alone, do not find what is found alone;
        None where they do. `what` names such texts."""
        if max(steps) > self._chunk_size:
            return f"a step has at most {self._chunk_size} tokens"
        try:
            for slot, past in enumerate(pasts):
                if past:
                    self._alone(slot, self._texts[slot][:past])
            wanted, seen = [], []
            for num_tokens in steps:
                found_RT = self._together(pasts, num_tokens)
                pasts = [past + num_tokens for past in pasts]
                wanted += [self._expected[slot][past - 1] for slot, past in enumerate(pasts)]
                seen += [*found_RT]
        except RunError as error:
            return f"{what} fail: {error}"
        spread = [expected_ST.ravel() for expected_ST in self._expected]
        both = [*spread, np.concatenate(wanted)], [*spread, np.concatenate(seen)]
        return disagreement(what, *both, spread[1])

    def _alone(self, slot: int, tokens: Items[int]) -> FloatArray:
        """[S, T]."""
        logprobs = []
        for start in range(0, len(tokens), self._chunk_size):
            row = self._row(slot, start, tokens[start : start + self._chunk_size])
            logprobs.append(self._run((row,), [LogitsRow(0, offset) for offset in range(len(row.tokens))]))
        return np.concatenate(logprobs)

    def _together(self, pasts: Items[int], num_tokens: int) -> FloatArray:
        """[R, T], after the last token of each row."""
        rows = tuple(self._row(slot, past, self._texts[slot][past:][:num_tokens]) for slot, past in enumerate(pasts))
        return self._run(rows, [LogitsRow(slot, num_tokens - 1) for slot in range(len(rows))])

    def _row(self, slot: int, past: int, tokens: Items[int]) -> Row:
        return Row(slot, past, tuple(tokens), source=self._sources[slot])

    def _run(self, rows: tuple[Row, ...], logits_rows: Items[LogitsRow]) -> FloatArray:
        """[R, T]."""
        output = self._runner.run(Step(rows, tuple(logits_rows), targets_of(len(logits_rows))))
        return output.target_logprobs.reshape(len(logits_rows), len(TARGETS))


class ReturnedOnGraph(RowsOnGraph):
    """Steps of rows that are alike; an answer is a row as any other."""

    @classmethod
    @override
    def against(cls, model: ResolvedModel) -> str | None:
        return "" if model.spec.is_kv_in_place else None

    @override
    def allocate(self, place: KvPlace) -> KvStore:
        self._store = ReturnedKv(place)
        return self._store

    @override
    def trial(self, decoder: OpenedDecoder) -> None:
        """Finds how many tokens a step may have, and which rows. Those of an encoder-decoder share a step after equally
        many positions, and masks hide a source's padding: of sources of tokens that is tried, and sounds take long.
        Raises `PartsDifferError`."""
        spec, runner, size = decoder.spec, decoder.runner, decoder.chunk_size
        if not spec.cross:
            size = decoder.chunk_size = fitting_chunk_size(size, runner, decoder.notes)
        if spec.alone or runner.capacity.num_slots == 1:
            return
        mix: AlikeRows | None = AlikeRows(prompts=True, continued=True, sources=bool(spec.cross.masks))
        if not spec.cross:
            mix = find_row_mix(runner, spec.vocab_size, size, self._store.pad_in_front)
        elif runner.encoder.kind is SourceKind.TOKENS:
            try_sources(runner, spec.num_ids, are_padded=bool(spec.cross.masks))
        if mix is not None:
            runner.traits = replace(runner.traits, form=mix)

    @override
    def finish(self, decoder: OpenedDecoder) -> None:
        """Leaves the runner as it is."""


@dataclass(frozen=True, eq=False)
class _ReturnedBatch:
    values: Values
    num_rows: int
    width: int


@dataclass(frozen=True)
class BatchRow:
    """A row of a batch, of which `length` positions count."""

    batch: _ReturnedBatch
    row: int
    length: int


@dataclass
class _Slot:
    """Where a slot's content is, and what was resident at its checkpoints."""

    place: BatchRow
    checkpoints: dict[int, BatchRow] = field(default_factory=dict)


class ReturnedKv(KvStore):
    """Rows of batches on the device, one for each slot."""

    form = ONE_ROW
    """Used until trials have found which rows may share a step."""

    is_in_place = False
    kv_binding = "present outputs stay on the device and become the next past"

    def __init__(self, place: KvPlace) -> None:
        super().__init__(place)
        self._nothing = BatchRow(self._empty(1), 0, 0)
        self._blank = self._empty(1, 1)
        self.close()
        tensors = [RowTensor(cache.elem_type, cache.row_shape) for cache in self._spec.caches]
        self._stacker = Stacker(place.open_graph, place.device, tensors)

    def pad_in_front(self, is_in_front: bool) -> None:
        """Sets where shorter rows are padded; what is resident is lost."""
        self.pads_in_front = is_in_front
        self.close()

    @override
    def reserve(self, positions: int) -> None:
        self.capacity = self.capacity._replace(positions=positions)
        self.close()

    @override
    def copy(self, copies: Items[Copy]) -> None:
        for copy in copies:
            place = self._place_at(copy.source, copy.length)
            self._slots[copy.target] = _Slot(place, {copy.length: place})

    @override
    def bind(self, rows: Items[Row]) -> ort.IOBinding:
        places = [self._place_at(row.slot, row.past) for row in rows]
        batch = self._together(places)
        left, busy = {id(place.batch) for place in places if place.batch is not batch}, {row.slot for row in rows}
        for number, slot in enumerate(self._slots):  # else all rows of these batches would stay in memory
            if number not in busy and id(slot.place.batch) in left and slot.place.length:
                slot.place = self._alone(slot.place, slot.place.length)
        for number, row in enumerate(rows):
            checkpoints = self._slots[row.slot].checkpoints
            kept = {length: place for length, place in checkpoints.items() if length <= row.past}
            self._slots[row.slot] = _Slot(BatchRow(batch, number, row.past), kept)
        binding = self._session.io_binding()
        for tensor, value in zip(self._spec.caches, batch.values, strict=True):
            binding.bind_ortvalue_input(tensor.past, value)
            binding.bind_output(tensor.present, self._device.kind, self._device.index)
        return binding

    @override
    def collect(self, rows: Items[Row], presents: Items[ort.OrtValue]) -> None:
        batch = _ReturnedBatch(tuple(presents), len(rows), max(row.past + len(row.tokens) for row in rows))
        for number, row in enumerate(rows):
            slot = self._slots[row.slot]
            slot.place = BatchRow(batch, number, row.past + len(row.tokens))
            if row.is_checkpoint:
                slot.checkpoints[slot.place.length] = self._alone(slot.place, slot.place.length)

    @override
    def close(self) -> None:
        self._slots = [_Slot(self._nothing) for _ in range(self.capacity.num_slots)]

    def _empty(self, num_rows: int, width: int = 0) -> _ReturnedBatch:
        values = (zeros(cache.shape(num_rows, width), cache.elem_type) for cache in self._spec.caches)
        return _ReturnedBatch(tuple(values), num_rows, width)

    def _place_at(self, number: int, length: int) -> BatchRow:
        slot = self._slots[number]
        if length == slot.place.length:
            return slot.place
        if length == 0:
            return self._nothing
        if length in slot.checkpoints:
            return slot.checkpoints[length]
        assert not self._spec.states, "a state cannot be cut"
        return self._alone(slot.place, length)

    def _alone(self, place: BatchRow, length: int) -> BatchRow:
        if place.batch.num_rows == 1 and place.length == place.batch.width == length:
            return place
        values = self._stacker.stack([self._part([place], length, length)])
        return BatchRow(_ReturnedBatch(values, 1, length), 0, length)

    def _together(self, places: Items[BatchRow]) -> _ReturnedBatch:
        """A batch of these rows, in this order; the longest row fills the width."""
        batch, width = places[0].batch, max(place.length for place in places)
        is_whole = [place.row for place in places if place.batch is batch] == list(range(batch.num_rows))
        if is_whole and len(places) == batch.num_rows and batch.width == width:
            return batch
        if width == 0:
            return self._empty(len(places))
        runs = [list(run) for _, run in groupby(places, key=lambda place: id(place.batch))]
        return _ReturnedBatch(self._stacker.stack([self._part(run, width) for run in runs]), len(places), width)

    def _part(self, run: Items[BatchRow], width: int, cut: int | None = None) -> StackedPart:
        """Rows of one batch: the first `cut` positions of the longest of them, or all, padded to `width`. Masks and
        lengths hide the padding."""
        batch, longest = run[0].batch, max(place.length for place in run)
        if longest == 0:  # nothing of its own to be filled up with
            return StackedPart(self._blank.values, [0] * len(run), [0] * width)
        begin = batch.width - longest if self.pads_in_front else 0
        inside = range(begin, begin + (longest if cut is None else cut))
        filling = [begin] * (width - len(inside))
        positions = (*filling, *inside) if self.pads_in_front else (*inside, *filling)
        rows = [place.row for place in run]
        is_whole = rows == list(range(batch.num_rows)) and list(positions) == list(range(batch.width))
        return StackedPart(batch.values, rows, positions, is_whole)

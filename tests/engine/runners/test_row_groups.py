"""Where a text may be cut is found by what kernels do with the rows of a step, whatever they do."""

from __future__ import annotations

import numpy as np
import pytest

from olive_ext.engine.runners.runner import Capacity, Runner, Traits
from olive_ext.engine.runners.trials import group_rows
from olive_ext.engine.step import Step, StepOutput
from olive_ext.errors import RunError
from olive_ext.media.items import Source
from olive_ext.model.providers.devices import Device
from olive_ext.model.types import DecoderSpec, SourceKind, StateTensor, TensorSpec
from tests.engine.fake_runner import ALIKE, SINGLE

FLOAT, V = 1, 11
CPU = Device("cpu")


class Kernels(Runner):
    """Takes `tile` rows of a step at a time and the rest otherwise: in the last bit of what is kept of a token, which
    all that follows reads. The head's own last bit follows from the number of rows that are read."""

    host_bytes = 0
    capacity = Capacity(1)

    def __init__(self, tile: int, context_length: int = 512, *, encoder: TensorSpec | None = None) -> None:
        kind = SourceKind.FEATURES if encoder is not None else None
        super().__init__(Traits(context_length, ALIKE, source=encoder, source_kind=kind))
        self._tile, self._kept = tile, np.zeros(context_length, np.int64)
        self.positions = 0
        self.sources: set[Source | None] = set()

    def reserve(self, positions: int, cells: int = 0) -> None:
        self.positions = positions

    def run(self, step: Step) -> StepOutput:
        (row,) = step.rows
        assert row.past + len(row.tokens) <= self.positions
        self.sources.add(row.source)
        values = 2 * np.array(row.tokens)
        values[len(values) - len(values) % self._tile :] += 1
        self._kept[row.past : row.past + len(values)] = values
        scales = np.arange(1, V + 1) * (1 + 1e-6 * len(step.logits_rows))
        sums = np.cumsum(self._kept * np.arange(1, len(self._kept) + 1))
        sums_R = sums[[row.past + place.offset for place in step.logits_rows]]
        return StepOutput(np.zeros(0, np.float32), np.zeros(0, np.int64), np.outer(sums_R, scales))

    def release_memory(self) -> None:
        raise AssertionError

    def describe(self) -> dict[str, object]:
        raise AssertionError

    def close(self) -> None:
        raise AssertionError


class Broken(Kernels):
    def run(self, step: Step) -> StepOutput:
        raise RunError("planted")


def spec(*, has_states: bool = False, rounds_rows: bool = True) -> DecoderSpec:
    states = (StateTensor("sum", "new_sum", FLOAT, (2,)),) if has_states else ()
    return DecoderSpec(
        (), (), TensorSpec("logits", FLOAT, ("B", "S", V)), V, 512, False, states, rounds_rows=rounds_rows
    )


@pytest.mark.parametrize(("tile", "group"), [(1, 2), (2, 2), (4, 4), (8, 8), (16, 16)])
def test_group_is_what_the_kernels_take_at_a_time(tile: int, group: int) -> None:
    runner, notes = Kernels(tile), []
    group_rows(runner, spec(), CPU, 256, notes)
    assert runner.traits == Traits(512, ALIKE, row_group=group)
    assert notes == []


@pytest.mark.parametrize("runner", [Kernels(3), Kernels(64), Kernels(8, context_length=15), Broken(1)])
def test_texts_are_fed_whole_where_no_group_is_found(runner: Kernels) -> None:
    notes: list[str] = []
    group_rows(runner, spec(), CPU, 256, notes)
    assert runner.traits == Traits(runner.traits.context_length, SINGLE, chunked_prefill=False)
    assert len(notes) == 1
    assert "whole and alone" in notes[0]


def test_short_context_is_cut_as_well() -> None:
    runner = Kernels(2, context_length=12)
    group_rows(runner, spec(), CPU, 256, [])
    assert runner.traits.row_group == 2


def test_decoder_behind_an_encoder_is_tried_with_a_source_of_its_shape() -> None:
    runner = Kernels(4, encoder=TensorSpec("features", FLOAT, ("B", 80, "T")))
    group_rows(runner, spec(), CPU, 256, [])
    (source,) = runner.sources
    assert runner.traits.row_group == 4
    assert source is not None
    assert source.array.dtype == np.float32
    assert source.array.shape[0] == 80


def test_states_are_not_fed_in_groups_and_a_note_says_so() -> None:
    runner, notes = Broken(2), []
    group_rows(runner, spec(has_states=True), CPU, 256, notes)
    assert runner.traits == Traits(512, ALIKE)
    assert len(notes) == 1
    assert "states" in notes[0]


def test_nothing_is_tried_where_no_rounding_shows_or_every_step_has_one_token() -> None:
    for rounds, device, chunk_size in [(False, CPU, 256), (True, Device("cuda"), 256), (True, CPU, 1)]:
        runner, notes = Broken(2), []
        group_rows(runner, spec(rounds_rows=rounds), device, chunk_size, notes)
        assert runner.traits == Traits(512, ALIKE)
        assert notes == []

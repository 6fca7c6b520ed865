"""Texts in parts, behind others and beside others are tried against texts alone, on runners that leak in one way.

Where a text may be cut is found by what kernels do with the rows of a step, whatever they do.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from olive_ext.engine.forms.returned import AlikeRows
from olive_ext.engine.runners import trials
from olive_ext.engine.runners.runner import StepForm, Traits
from olive_ext.engine.runners.trials import (
    LEAST,
    LENGTH,
    affordable,
    check_steps,
    group_rows,
)
from olive_ext.engine.step import Row, Step, StepOutput
from olive_ext.errors import RunError
from olive_ext.media.items import Source
from olive_ext.model.providers.devices import Device
from olive_ext.model.types import DecoderSpec, SourceKind, StateTensor, TensorSpec
from tests.engine.fake_runner import ALIKE, FORMS, RANGE, SINGLE, VOCAB, FakeRunner

LEAK = 1 << 20


class Leaky(FakeRunner):
    """What it stores of a token depends on the step, too, in the way that is named."""

    way = ""
    most = 0

    def _execute(self, step: Step) -> StepOutput:
        return super()._execute(replace(step, rows=tuple(self._leaked(step, row) for row in step.rows)))

    def _leaked(self, step: Step, row: Row) -> Row:
        leaks = {
            "": False,
            "by parts": len(row.tokens) < LENGTH // 2,
            "by a token alone": len(row.tokens) == 1,
            "by the longest row": max(one.past + len(one.tokens) for one in step.rows) > self.most,
            "by rows": len(step.rows) > 1,
            "in the third row": row in step.rows[2:],
            "from nine rows on": len(step.rows) > 8,
            "in the last of 16 rows": row in step.rows[15:],
            "by the past": row.past > self.most,
            "by copies": bool(step.copies),
            "alone at first": len(row.tokens) == 1 and 0 < row.past < self.most,
            "alone later": len(row.tokens) == 1 and row.past > self.most,
            "whole and short": not row.past and self.most / 2 < len(row.tokens) < self.most,
        }
        return row._replace(tokens=tuple(token + LEAK * leaks[self.way] for token in row.tokens))


def _check(
    way: str, batching: StepForm = RANGE, most: int = 0, numbers: bool = True, slots: int = 3, **more: Any
) -> str | None:
    runner = Leaky(slots, batching, **more)
    runner.way, runner.most = way, most
    return check_steps(runner, VOCAB, 512, (most,) if numbers else (), 300)


@pytest.mark.parametrize("batching", FORMS)
@pytest.mark.parametrize("can_rewind", [True, False])
def test_texts_of_their_own_pass(batching: StepForm, can_rewind: bool) -> None:
    assert _check("", batching, can_rewind=can_rewind, row_mix=AlikeRows(mixes_pasts=True)) is None


@pytest.mark.parametrize(
    ("way", "most", "what"),
    [
        ("by parts", 0, "texts fed in parts, up to token 1, score"),
        ("by a token alone", 0, "texts fed in parts, up to token 1, score"),
        ("by rows", 0, "texts beside others score"),
        ("in the third row", 0, "texts beside others score"),
        ("by copies", 0, "texts after a copy of another's beginning score"),
        *(
            (way, most, "texts fed in parts, up to token")
            for way in ("by the longest row", "by the past")
            for most in (20, 60, 150)
        ),
    ],
)
def test_a_leak_is_reported_with_the_way_that_shows_it(way: str, most: int, what: str) -> None:
    """Texts pass the numbers that the graph compares with."""
    assert what in (_check(way, most=most) or "")


@pytest.mark.parametrize("way", ["from nine rows on", "in the last of 16 rows"])
def test_a_leak_that_many_rows_alone_show_is_reported(way: str) -> None:
    """Choices and whole texts never have so many rows in a step, and a batch of answers has."""
    assert "texts beside others score" in (_check(way, slots=16) or "")
    assert _check(way, slots=8) is None


def test_a_number_that_costs_too_much_to_pass_is_left_to_verification() -> None:
    runner = Leaky(3, RANGE)
    runner.way, runner.most = "by the longest row", LENGTH + 20
    assert check_steps(runner, VOCAB, 512, (runner.most,), LENGTH) is None


@pytest.mark.parametrize("is_step_scaled", [False, True])
def test_of_steps_with_one_scale_single_tokens_are_tried_alone(
    is_step_scaled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole beginnings are rounded otherwise: by 4.4 of 13 nats in a model that ONNX Runtime quantized to uint8."""
    tried: list[str] = []
    monkeypatch.setattr(trials, "disagreement", lambda what, *_: tried.append(what))
    runner = Leaky(3, SINGLE, chunked_prefill=False)
    check_steps(runner, VOCAB, 512, (), 300, is_step_scaled=is_step_scaled)
    assert any("whole" in what for what in tried) != is_step_scaled
    assert "token 33 of a text, fed alone," in tried


def test_the_work_follows_from_the_weights() -> None:
    assert affordable(540 * 10**6) == 92
    assert affordable(16 * 10**9) == affordable(None) == LEAST
    assert affordable(10**6) == 50_000


FLOAT, V = 1, 11
CPU = Device("cpu")


class Kernels(FakeRunner):
    """Takes `tile` rows of a step at a time and the rest otherwise: in the last bit of what is kept of a token, which
    all that follows reads. The head's own last bit follows from the number of rows that are read."""

    def __init__(self, tile: int, context_length: int = 512, *, encoder: TensorSpec | None = None) -> None:
        super().__init__(1, ALIKE, context_length)
        if encoder is not None:
            self.encoder = SimpleNamespace(kind=SourceKind.FEATURES, source=encoder)
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


class Broken(Kernels):
    def run(self, step: Step) -> StepOutput:
        raise RunError("planted")


def spec(*, has_states: bool = False, rounds_rows: bool = True) -> DecoderSpec:
    states = (StateTensor("sum", "new_sum", FLOAT, (2,)),) if has_states else ()
    return DecoderSpec(
        (), (), TensorSpec("logits", FLOAT, ("B", "S", V)), V, 512, False, states, rounds_rows=rounds_rows
    )


@pytest.mark.parametrize("runner", [Kernels(3), Kernels(64), Kernels(8, context_length=15), Broken(1)])
def test_texts_are_fed_whole_where_no_group_is_found(runner: Kernels) -> None:
    notes: list[str] = []
    group_rows(runner, spec(), CPU, 256, notes)
    assert runner.traits == Traits(runner.traits.context_length, SINGLE, chunked_prefill=False)
    assert len(notes) == 1
    assert "whole and alone" in notes[0]


def test_decoder_behind_an_encoder_is_tried_with_a_source_of_its_shape() -> None:
    runner = Kernels(4, encoder=TensorSpec("features", FLOAT, ("B", 80, "T")))
    group_rows(runner, spec(), CPU, 256, [])
    (source,) = runner.sources
    assert runner.traits.row_group == 4
    assert source is not None
    assert (source.array.dtype, source.array.shape[0]) == (np.float32, 80)


@pytest.mark.parametrize(
    ("how", "device", "chunk_size", "num_notes"),
    [
        ({"rounds_rows": False}, CPU, 256, 0),
        ({}, Device("cuda"), 256, 0),
        ({}, CPU, 1, 0),
        ({"has_states": True}, CPU, 256, 1),
    ],
    ids=["no rounding shows", "a device", "steps of one token", "states"],
)
def test_nothing_is_tried_where_no_group_can_help(
    how: dict[str, bool], device: Device, chunk_size: int, num_notes: int
) -> None:
    runner, notes = Broken(2), list[str]()
    group_rows(runner, spec(**how), device, chunk_size, notes)
    assert runner.traits == Traits(512, ALIKE)
    assert ["states" in note for note in notes] == [True] * num_notes

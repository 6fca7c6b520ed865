"""Texts in parts, behind others and beside others are tried against texts alone, on runners that leak in one way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from olive_ext.engine.forms.base import StepForm
from olive_ext.engine.forms.returned import AlikeRows
from olive_ext.engine.runners.runner import Traits
from olive_ext.engine.runners.trials import LENGTH, SHORT, affordable, check_steps
from olive_ext.engine.step import Row, Step, StepOutput
from olive_ext.model.types import SourceKind
from tests.engine.fake_runner import FORMS, RANGE, SINGLE, VOCAB, FakeRunner

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
            "by the longest row": max(one.past + len(one.tokens) for one in step.rows) > self.most,
            "by rows": len(step.rows) > 1,
            "by the past": row.past > self.most,
            "by copies": bool(step.copies),
        }
        return row._replace(tokens=tuple(token + LEAK * leaks[self.way] for token in row.tokens))


def _check(way: str, batching: StepForm = RANGE, most: int = 0, **more: Any) -> str | None:
    runner = Leaky(3, batching, **more)
    runner.way, runner.most = way, most
    return check_steps(runner, VOCAB, 512, (most,), 300)


@pytest.mark.parametrize("batching", FORMS)
@pytest.mark.parametrize("can_rewind", [True, False])
def test_texts_of_their_own_pass(batching: StepForm, can_rewind: bool) -> None:
    assert _check("", batching, can_rewind=can_rewind, row_mix=AlikeRows(mixes_pasts=True)) is None


@pytest.mark.parametrize(
    ("way", "what"),
    [
        ("by parts", "texts fed in parts"),
        ("by rows", "texts beside another"),
        ("by copies", "texts behind a copy of another's beginning"),
    ],
)
def test_a_leak_is_told_with_the_way_that_shows_it(way: str, what: str) -> None:
    assert f"{what} score" in (_check(way) or "")


@pytest.mark.parametrize("most", [20, 60, 150])
def test_texts_pass_the_numbers_that_the_graph_compares_with(most: int) -> None:
    assert "texts fed in parts score" in (_check("by the longest row", most=most) or "")
    assert "texts fed in parts score" in (_check("by the past", most=most) or "")
    runner = Leaky(3, RANGE)
    runner.way, runner.most = "by the longest row", LENGTH + 20
    assert (
        check_steps(runner, VOCAB, 512, (runner.most,), LENGTH) is None
    )  # it may cost no more: verification is for it


def test_nothing_is_tried_where_a_text_is_fed_whole_anyway_or_a_step_takes_less() -> None:
    assert _check("by parts", SINGLE, chunked_prefill=False) is None
    runner = Leaky(3, RANGE)
    runner.way = "by parts"
    assert check_steps(runner, VOCAB, 2 * SHORT, (), 200) is None
    runner.traits = replace(Traits(512), source_kind=SourceKind.TOKENS)
    assert check_steps(runner, VOCAB, 512, (), 200) is None
    assert not runner.steps


def test_the_work_follows_from_the_weights() -> None:
    assert affordable(540 * 10**6) == 92
    assert affordable(16 * 10**9) == affordable(None) == LENGTH
    assert affordable(10**6) == 50_000

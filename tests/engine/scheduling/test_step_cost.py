"""What steps cost follows what the engine does with a plan's parts."""

from __future__ import annotations

import pytest

from olive_ext.engine.forms.tree import SHAPES, StepCost, choose_size, measure_trees
from olive_ext.engine.step import Step, StepOutput
from tests.engine.fake_runner import RANGE, FakeRunner

COST = StepCost(fixed=0.02, per_token=0.001, per_pair=5e-7)


def test_a_long_text_alone_pays_for_its_own_past_only() -> None:
    steps = [(256, 256), (256, 512), (100, 612)]
    assert COST.of_rows([(612, 0)], 256) == pytest.approx(sum(COST.of(*step) for step in steps))
    assert COST.of_rows([(612, 50)], 256) == pytest.approx(sum(COST.of(size, cells + 50) for size, cells in steps))


def test_a_long_text_in_tree_batches_costs_what_it_costs_alone_in_steps_of_that_size() -> None:
    assert COST.of_tree_batches([(2048, 0)], 256) == pytest.approx(COST.of_rows([(2048, 0)], 256))


def test_short_texts_share_the_fixed_cost_of_a_step_and_long_ones_run_alone() -> None:
    assert choose_size(COST, [(10, 100)] * 400, 256)[0] in (128, 256, 512)
    assert choose_size(COST, [(2047, 0)] * 20, 256)[0] == 0


class _Clocked(FakeRunner):
    """Steps take what `COST` says, on a clock of its own."""

    now = 0.0

    def run(self, step: Step) -> StepOutput:
        tokens = sum(len(row.tokens) for row in step.rows)
        assert step.first_cell is not None
        assert step.first_cell + tokens <= self.capacity.cells
        self.now += COST.of(tokens, step.first_cell + tokens)
        return StepOutput(*[None] * 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("context", [400, 4096])
def test_measuring_finds_the_costs_whatever_the_context(context: int) -> None:
    runner = _Clocked(1, RANGE, context, has_tree_batches=True)
    found = measure_trees(runner, context, lambda: runner.now)
    assert (found.fixed, found.per_token, found.per_pair) == pytest.approx((0.02, 0.001, 5e-7), rel=1e-3)
    assert runner.capacity.cells == 1 + min(context, SHAPES[-1][1])

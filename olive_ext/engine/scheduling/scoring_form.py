"""How scored sequences share steps: as branches of how many tokens, or one by one. Chosen by what was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from olive_ext.config import EngineConfig
from olive_ext.engine.scheduling.prefix_tree import Plan
from olive_ext.engine.scheduling.step_cost import MIN_CONTEXT, MIN_TOKENS, Choice, StepCost, choose, measure
from olive_ext.engine.step import Runner
from olive_ext.model.decisions import DEFAULT_CHUNK

DEFAULT_SIZE = 256
"""Tokens of a step of branches until there has been enough work to measure."""


def pinned_size(config: EngineConfig, chunk_size: int) -> int | None:
    """Tokens of a step of branches where the user has said so; None leaves them to the measurement."""
    return chunk_size if config.scoring == "branches" or config.chunk_size != "auto" else None


class ScoringSteps:
    """The present choice; `size` is 0 where sequences are scored one by one.

    `pinned` is what the user has asked for: a size, or 0; None leaves it to the measurement.
    """

    def __init__(
        self,
        runner: Runner,
        pinned: int | None = None,
        reason: str = "engine.scoring",
        measured: Callable[[Runner], StepCost] = measure,
    ) -> None:
        self._runner = runner
        self._is_pinned = pinned is not None or not runner.has_tree_batches
        self._measure = measured
        self._cost: StepCost | None = None
        size = (DEFAULT_SIZE if pinned is None else pinned) if runner.has_tree_batches else 0
        self._choice = Choice(size, reason if self._is_pinned else "not measured yet: too little work so far")

    @property
    def size(self) -> int:
        return self._choice.size

    def choose(self, plan: Plan) -> bool:
        """Takes the cheapest form for `plan`, where that is open. The first time that a plan is large enough steps are
        timed, and the answer is True: what was resident in the trunk is gone."""
        scored = [sequence for sequence in plan.sequences if sequence.generation is None]
        parts = [(sequence.end - sequence.num_shared, sequence.num_shared) for sequence in scored]
        if self._is_pinned or not parts:
            return False
        is_worth_it = sum(tokens for tokens, _ in parts) >= MIN_TOKENS
        is_timed = self._cost is None and is_worth_it and self._runner.context_length >= MIN_CONTEXT
        if is_timed:
            self._cost = self._measure(self._runner)
        if self._cost is not None:
            self._choice = choose(self._cost, parts, DEFAULT_CHUNK)
        return is_timed

    def describe(self) -> Mapping[str, Any]:
        """The form, the reason, and what was measured (seconds)."""
        form: Literal["branches", "rows"] = "branches" if self.size else "rows"
        facts: dict[str, Any] = {"scoring": form, "scoring_step": self.size, "scoring_reason": self._choice.reason}
        if self._cost is not None:
            facts["step_cost"] = {
                "fixed_s": self._cost.fixed,
                "per_token_s": self._cost.per_token,
                "per_pair_s": self._cost.per_pair,
            }
        return facts

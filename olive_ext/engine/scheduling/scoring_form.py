"""How scored sequences share steps: in tree batches of how many tokens, or one by one. Knows no graph and no device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from olive_ext.config import EngineConfig
from olive_ext.engine.runners.base import Traits
from olive_ext.engine.scheduling.prefix_tree import Plan
from olive_ext.engine.scheduling.step_cost import MIN_CONTEXT, MIN_TOKENS, Choice, StepCost, Target, choose, measure
from olive_ext.model.decisions import DEFAULT_CHUNK

DEFAULT_SIZE = 256
"""Tokens of a tree batch until there has been enough work to measure."""


@dataclass(frozen=True)
class ScoringForm:
    """What decides the form: the chunk size, or a measurement."""

    is_measured: bool = False
    reason: str = "engine.chunk_size"

    @classmethod
    def of(cls, config: EngineConfig) -> ScoringForm:
        """Measured where the settings leave both the form and the chunk size open."""
        return cls(config.scoring != "branches" and config.chunk_size == "auto", "engine.scoring")


class ScoringSteps:
    """The present choice; `size` is 0 where sequences are scored one by one."""

    def __init__(
        self,
        chunk_size: int,
        form: ScoringForm,
        traits: Traits,
        measure_cost: Callable[[Target], StepCost] = measure,
    ) -> None:
        self._is_pinned = not (form.is_measured and traits.tree_batches)
        self._measure = measure_cost
        self._cost: StepCost | None = None
        size = (DEFAULT_SIZE if form.is_measured else chunk_size) if traits.tree_batches else 0
        self._choice = Choice(size, form.reason if self._is_pinned else "not measured yet: too little work so far")

    @property
    def size(self) -> int:
        return self._choice.size

    def choose(self, plan: Plan, target: Target) -> bool:
        """Takes the cheapest form for `plan`, where the form is open. The first time that a plan is large enough, steps
        of `target` are timed; True then, because that has overwritten the shared-prefix cache."""
        scored = [sequence for sequence in plan.sequences if sequence.generation is None]
        parts = [(sequence.end - sequence.num_shared, sequence.num_shared) for sequence in scored]
        if self._is_pinned or not parts:
            return False
        is_worth_it = sum(tokens for tokens, _ in parts) >= MIN_TOKENS
        is_timed = self._cost is None and is_worth_it and target.traits.context_length >= MIN_CONTEXT
        if is_timed:
            self._cost = self._measure(target)
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

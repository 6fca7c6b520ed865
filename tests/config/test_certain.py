"""What may be asked to be certain, and what a claim means."""

from __future__ import annotations

from typing import Any

import pytest

from olive_ext.config import ClaimConfig, EvaluationConfig, EvaluationSettings


def config(**values: Any) -> EvaluationConfig:
    given = {"model": {"path": "m"}, "tasks": ["a"], "reference": "r", "documents": "enough"}
    return EvaluationConfig.parse({**given, **values})


@pytest.mark.parametrize(
    ("given", "side", "bound", "distance"),
    [
        ({"within": 0.01}, "above", -0.01, 0.01),
        ({"above": -0.02}, "above", -0.02, 0.02),
        ({"below": -0.05}, "below", -0.05, 0.05),
        ({"metric": "kl_mean", "within": 0.1}, "below", 0.1, 0.1),
        ({"metric": "kl_mean", "above": 0.2}, "above", 0.2, 0.2),
        ({"metric": "top1_agreement", "within": 0.05}, "above", 0.95, 0.05),
        ({"metric": "top1_agreement", "above": 0.9}, "above", 0.9, 0.1),
    ],
)
def test_claim_has_a_side_and_a_distance(given: dict[str, Any], side: str, bound: float, distance: float) -> None:
    claim = ClaimConfig.parse(given)
    assert claim.side == side
    assert (claim.bound, claim.distance) == pytest.approx((bound, distance))


def settings(*bounds: Any, **values: Any) -> EvaluationSettings:
    given = {"tasks": ["a"], "reference": "r", "documents": "enough", "require": list(bounds)}
    return EvaluationSettings.parse({**given, **values}, "evaluators.mine")


def test_claim_is_taken_from_the_bound_that_it_decides() -> None:
    size = {"metric": "size_on_disk", "max": 1e9}
    assert settings(size, {"metric": "kl_mean", "max": 0.05}).claim == ClaimConfig(metric="kl_mean", below=0.05)
    assert settings({"metric": "accuracy_difference", "min": -0.02, "task": "all"}).claim == ClaimConfig(above=-0.02)
    assert settings(size).claim == ClaimConfig(within=0.01)
    assert settings(size, matters=2.5).claim == ClaimConfig(within=0.025)
    given = settings({"metric": "kl_mean", "max": 0.05}, certain={"within": 0.03})
    assert given.claim == ClaimConfig(within=0.03)

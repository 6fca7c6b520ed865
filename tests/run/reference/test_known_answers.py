"""Scores that are known are not computed again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from olive_ext.errors import RunError
from olive_ext.run.reference.observer import ReferenceScores
from tests.backends.reference import instances

GREEDY = {"until": ["\n"], "max_gen_toks": 5}


def scores(*args: str) -> ReferenceScores:
    known = ReferenceScores()
    compared: Any = SimpleNamespace(reference_logprobs=[-0.5, -0.25], reference_is_greedy=[True, True])
    known.note(args, compared)
    return known


def test_scores_of_the_reference_answer_the_second_run() -> None:
    ask = lambda requests: pytest.fail("the model was asked")  # noqa: E731
    assert scores("the cat", " sat")(instances("loglikelihood", [("the cat", " sat")]), ask) == [(-0.75, True)]
    assert scores("the cat sat")(instances("loglikelihood_rolling", [("the cat sat",)]), ask) == [-0.75]
    assert scores("a", "b")(instances("loglikelihood", [("the cat", "")]), ask) == [(0.0, True)]


def test_generations_are_the_models_own_in_the_second_run() -> None:
    requests = instances("generate_until", [("the cat", GREEDY)])
    assert scores("a", "b")(requests, lambda passed: [len(passed)]) == [1]


def test_prompts_that_change_from_run_to_run_are_refused() -> None:
    with pytest.raises(RunError, match="lm-eval asks something else the second time"):
        scores("the cat", " sat")(instances("loglikelihood", [("the dog", " sat")]), list)

"""Scores that are known are not computed again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from olive_ext.errors import RunError
from olive_ext.run.reference.observer import ReferenceScores
from tests.backends.reference import instances
from tests.refusals import refused

GREEDY = {"until": ["\n"], "max_gen_toks": 5}


@pytest.mark.parametrize(
    ("known", "kind", "asked", "answer"),
    [
        (("the cat", " sat"), "loglikelihood", ("the cat", " sat"), (-0.75, True)),
        (("the cat sat",), "loglikelihood_rolling", ("the cat sat",), -0.75),
        (("a", "b"), "loglikelihood", ("the cat", ""), (0.0, True)),
        (("a",), "loglikelihood_rolling", ("",), 0.0),  # an empty page
        (("a", "b"), "generate_until", ("the cat", GREEDY), "asked 1"),  # the model's own in the second run
        (("the cat", " sat"), "loglikelihood", ("the dog", " sat"), None),  # prompts change from run to run
    ],
)
def test_scores_of_the_reference_answer_the_second_run(
    known: tuple[str, ...], kind: str, asked: tuple[Any, ...], answer: Any
) -> None:
    scores = ReferenceScores()
    compared: Any = SimpleNamespace(reference_logprobs=[-0.5, -0.25], reference_is_greedy=[True, True])
    scores.note(known, compared)
    requests = instances(kind, [asked])
    if answer is None:
        with refused(RunError, "failed"):
            scores(requests, list)
    else:
        assert scores(requests, lambda passed: [f"asked {len(passed)}"]) == [answer]

from __future__ import annotations

import pytest

from docs.benchmarks.speed.summary import agreement as compare

GROUPS = [("task", 0), ("task", 0), ("task", 1), ("task", 1)]
SCORES = [[-1.0, True], [-2.0, False], [-3.0, False], [-2.5, False]]


def scores(*values: float) -> dict[str, list[list[object]]]:
    return {"loglikelihood": [[value, False] for value in values]}


def test_equal_answers_do_not_differ() -> None:
    found = compare(GROUPS, {"loglikelihood": SCORES}, {"loglikelihood": SCORES})
    assert found == {
        "max_difference": 0.0,
        "mean_difference": 0.0,
        "greedy": [4, 4],
        "choices": [2, 2],
        "differs": False,
    }


def test_rounding_does_not_differ_and_a_wrong_score_does() -> None:
    reference = scores(-1.0, -2.0, -3.0, -2.5)
    near = compare(GROUPS, scores(-1.001, -2.0, -3.0, -2.5), reference)
    assert (near["differs"], near["max_difference"]) == (False, pytest.approx(0.001))
    assert compare(GROUPS, scores(-1.5, -2.0, -3.0, -2.5), reference)["differs"]


def test_another_choice_differs_however_small_the_difference() -> None:
    found = compare(GROUPS, scores(-1.0, -2.0, -2.499, -2.5), scores(-1.0, -2.0, -2.501, -2.5))
    assert found["choices"] == [1, 2]
    assert found["differs"]


def test_long_texts_may_differ_by_a_part_of_their_likelihood() -> None:
    rolling = {"loglikelihood_rolling": [-40000.0]}
    assert not compare([], {"loglikelihood_rolling": [-40001.0]}, rolling)["differs"]
    assert compare([], {"loglikelihood_rolling": [-40010.0]}, rolling)["differs"]


def test_texts_are_counted() -> None:
    found = compare([], {"generate_until": ["a", "b"]}, {"generate_until": ["a", "c"]})
    assert found == {"texts": [1, 2], "differs": True}


def test_lone_requests_have_no_choice() -> None:
    assert "choices" not in compare([("lambada", 0), ("lambada", 1)], scores(-1.0, -2.0), scores(-1.0, -2.0))

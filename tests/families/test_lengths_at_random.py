"""Texts around every length that decides in a graph have the numbers of a plain pass over each alone."""

from __future__ import annotations

import pytest

from tests.exports.step_wide import ALIKE
from tests.families.lengths_at_random import LONGROPE, STEP_WIDE, problems

IN_DEFAULT_RUN = ("phi3_longrope-mobius", "phi3_longrope-genai-0.14", "largest_position-mobius", "dynamic-genai")
NEVER_REFUSED = (*LONGROPE, *(f"{form}-mobius" for form in ALIKE))


CASES = [
    *(pytest.param(name, seed, marks=pytest.mark.slow) for name in IN_DEFAULT_RUN for seed in range(2)),
    *(
        pytest.param(name, seed, marks=pytest.mark.exporters)
        for name in (*LONGROPE, *STEP_WIDE)
        for seed in range(2, 12)
    ),
]


@pytest.mark.parametrize(("name", "seed"), CASES)
def test_answers_are_those_of_plain_passes(name: str, seed: int) -> None:
    settings, found = problems(name, seed)
    assert not found, f"seed {seed}: {settings}"
    assert "refused" not in settings or name not in NEVER_REFUSED, settings["refused"]

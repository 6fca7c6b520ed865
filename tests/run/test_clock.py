"""Every second of an evaluation belongs to one phase, or to the rest."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from olive_ext.run.machine import Clock


def inner(clock: Clock) -> None:
    """A phase inside of another is not counted twice."""
    with clock.phase("reference"), clock.phase("load"):
        pass


def failing(clock: Clock) -> None:
    """A phase that fails is counted and ended."""
    with suppress(ValueError), clock.phase("candidate"):
        raise ValueError
    with clock.phase("statistics"):
        pass


def moved(clock: Clock) -> None:
    """What was measured inside of a phase moves."""
    with clock.phase("candidate"):
        pass
    clock.move(2.0, "candidate", "reference")


@pytest.mark.parametrize(
    ("run", "times", "expected"),
    [
        (inner, (0, 1, 3, 7, 8, 10), {"": 10.0, "_load": 4.0, "_reference": 3.0}),
        (failing, (0, 1, 3, 3, 4, 5), {"": 5.0, "_candidate": 2.0, "_statistics": 1.0}),
        (moved, (0, 0, 5, 5), {"": 5.0, "_candidate": 3.0, "_reference": 2.0}),
    ],
)
def test_seconds_by_phase(run: Callable[[Clock], Any], times: tuple[float, ...], expected: dict[str, float]) -> None:
    clock = Clock(map(float, times).__next__)
    run(clock)
    assert clock.seconds() == {f"seconds{name}": value for name, value in expected.items()}


def test_long_phase_without_a_word_is_told_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with clock.reporting(True, every=0.05), clock.phase("export"):
        time.sleep(0.4)
    lines = capsys.readouterr().err.splitlines()
    assert 2 <= len(lines) <= 8
    assert lines[0].startswith("olive-ext: exporting ")
    with clock.reporting(False, every=0.05):
        time.sleep(0.2)
    assert capsys.readouterr().err == ""

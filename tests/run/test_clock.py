"""Every second of an evaluation belongs to one phase, or to the rest."""

from __future__ import annotations

import time

import pytest

from olive_ext.run.models import Clock


def test_inner_phase_is_not_counted_twice() -> None:
    times = iter([0.0, 1.0, 3.0, 7.0, 8.0, 10.0])
    clock = Clock(lambda: next(times))
    with clock.phase("reference"), clock.phase("load"):
        pass
    assert clock.seconds() == {"seconds": 10.0, "seconds_load": 4.0, "seconds_reference": 3.0}


def test_phase_that_fails_is_counted_and_ended() -> None:
    times = iter([0.0, 1.0, 3.0, 3.0, 4.0, 5.0])
    clock = Clock(lambda: next(times))
    try:
        with clock.phase("candidate"):
            raise ValueError
    except ValueError:
        with clock.phase("statistics"):
            pass
    assert clock.seconds() == {"seconds": 5.0, "seconds_candidate": 2.0, "seconds_statistics": 1.0}


def test_what_was_measured_inside_a_phase_moves() -> None:
    times = iter([0.0, 0.0, 5.0, 5.0])
    clock = Clock(lambda: next(times))
    with clock.phase("candidate"):
        pass
    clock.move(2.0, "candidate", "reference")
    assert clock.seconds() == {"seconds": 5.0, "seconds_candidate": 3.0, "seconds_reference": 2.0}


def test_long_phase_without_a_word_is_told_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with clock.reporting(True, every=0.05), clock.phase("export"):
        time.sleep(0.4)
    lines = capsys.readouterr().err.splitlines()
    assert 2 <= len(lines) <= 8
    assert lines[0].startswith("olive-ext: exporting the float model, ")
    with clock.reporting(False, every=0.05):
        time.sleep(0.2)
    assert capsys.readouterr().err == ""

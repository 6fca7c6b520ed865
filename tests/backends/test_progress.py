"""Progress where stderr is no terminal: a line a minute, and nothing unless it is asked for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from olive_ext.backends.progress import progress_bar, shown


@pytest.fixture(params=[True, False, None])
def is_shown(request: pytest.FixtureRequest) -> Iterator[bool | None]:
    token = shown.set(request.param)
    yield request.param
    shown.reset(token)


def test_line_a_minute_says_what_is_left(is_shown: bool | None, capsys: pytest.CaptureFixture[str]) -> None:
    seconds = iter(range(0, 10_000, 20))
    with progress_bar("Scoring", 10, lambda: 600, False, now=lambda: float(next(seconds))) as advance:
        for _ in range(8):
            advance(1)
    lines = capsys.readouterr().err.splitlines()
    expected = [
        "olive-ext: Scoring: 3 of 10 requests, 0 tokens/s, 02:20 left",
        "olive-ext: Scoring: 6 of 10 requests, 0 tokens/s, 01:20 left",
    ]
    assert lines == (expected if is_shown else [])


def test_model_that_is_told_to_be_quiet_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    token = shown.set(True)
    seconds = iter(range(0, 10_000, 100))
    with progress_bar("Scoring", 2, lambda: 0, True, now=lambda: float(next(seconds))) as advance:
        advance(1)
    shown.reset(token)
    assert capsys.readouterr().err == ""

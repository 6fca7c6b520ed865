"""Progress where stderr is no terminal: a line a minute, and nothing unless it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
        "olive-ext: Scoring: 2 of 10 requests, 0 tokens/s, 02:40 left",
        "olive-ext: Scoring: 5 of 10 requests, 0 tokens/s, 01:40 left",
        "olive-ext: Scoring: 8 of 10 requests, 0 tokens/s, 00:40 left",
    ]
    assert lines == (expected if is_shown else [])


# Tokens fed at each answer's end, and the answers' tokens; 10 prompts of 30 tokens. One token takes 1 s.
@pytest.mark.parametrize(
    ("fed", "answered", "left"),
    [
        ([30, 60], [0, 0], "04:00"),  # 8 prompts of 10 are left
        ([60, 300], [30, 30], "05:00"),  # 2 of 10 answered by 60 tokens each: 300 of 600 are left, begun ones known
        ([300, 570], [30, 30], "00:30"),  # all are nearly done
        ([0, 30], [0, 0], "04:00"),  # the first was in the journal
    ],
)
def test_time_left_is_that_of_the_tokens_left(
    fed: list[int], answered: list[int], left: str, capsys: pytest.CaptureFixture[str]
) -> None:
    token, known = shown.set(True), [0]
    how: dict[str, Any] = {"expected": 300, "about": "3 of it", "now": lambda: float(known[0])}
    with progress_bar("Generating", 10, lambda: known[0], False, **how) as advance:
        for number, length in zip(fed, answered, strict=True):
            known[0] = number
            advance(1, 30, length)
    shown.reset(token)
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "olive-ext: Generating: 3 of it"
    assert f"{left} left" in lines[-1]


def test_model_that_is_told_to_be_quiet_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    token = shown.set(True)
    seconds = iter(range(0, 10_000, 100))
    with progress_bar("Scoring", 2, lambda: 0, True, now=lambda: float(next(seconds))) as advance:
        advance(1)
    shown.reset(token)
    assert capsys.readouterr().err == ""

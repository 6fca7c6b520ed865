"""Closed loops on a clock that only steps move, so that every latency is known beforehand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from docs.benchmarks.speed.latency import Timeline, closed_loop, describe
from docs.benchmarks.speed.tables import latency_table
from olive_ext.engine.engine import Engine
from olive_ext.engine.requests import Generation, Request, Result
from olive_ext.engine.step import Step, StepOutput
from tests.engine.fake_runner import PACKED, FakeRunner


class TimedRunner(FakeRunner):
    """Each step takes a second."""

    now = 0.0
    most_rows = 0

    def run(self, step: Step) -> StepOutput:
        self.now += 1.0
        self.most_rows = max(self.most_rows, len(step.rows))
        return super().run(step)


def timelines(in_flight: int, *lengths: int) -> tuple[list[Timeline], TimedRunner]:
    """Of prompts of two tokens, and answers of these lengths, on a runner with four slots."""
    runner = TimedRunner(4, PACKED)
    requests = [Request((7, 8 + number), 0, Generation(length)) for number, length in enumerate(lengths)]
    return closed_loop(Engine(runner, 64).run_continuous, requests, in_flight, lambda: runner.now), runner


def test_one_request_at_a_time_begins_when_the_last_has_ended() -> None:
    lines, runner = timelines(1, 3, 2)
    assert [(line.begin, line.tokens) for line in lines] == [(0.0, [1.0, 2.0, 3.0]), (3.0, [4.0, 5.0])]
    assert runner.most_rows == 1


def test_a_request_takes_the_place_of_one_that_ended_while_others_run() -> None:
    lines, runner = timelines(2, 4, 1, 2)
    assert [(line.begin, line.tokens) for line in lines] == [
        (0.0, [1.0, 2.0, 3.0, 4.0]),
        (0.0, [1.0]),
        (1.0, [2.0, 3.0]),
    ]
    assert runner.most_rows == 2


def test_a_request_may_still_end_itself() -> None:
    runner = TimedRunner(1, PACKED)
    stops = Generation(9, is_finished=lambda tokens: len(tokens) == 2)
    lines = closed_loop(Engine(runner, 64).run_continuous, [Request((7,), 0, stops)], 1, lambda: runner.now)
    assert [len(line.tokens) for line in lines] == [2]


def test_latencies_are_those_of_the_timelines() -> None:
    found = describe([Timeline(0.0, [1.0, 1.5, 3.0]), Timeline(1.0, [1.25]), Timeline(2.0, [4.0, 5.0])])
    assert found["requests_per_second"] == pytest.approx(3 / 5)
    assert found["tokens_per_second"] == pytest.approx(6 / 5)
    assert found["first_token_mean_ms"] == pytest.approx(1000 * (1 + 0.25 + 2) / 3)
    assert found["first_token_median_ms"] == pytest.approx(1000)
    assert found["output_token_mean_ms"] == pytest.approx(1000)
    assert found["inter_token_median_ms"] == pytest.approx(1000)
    assert found["inter_token_p99_ms"] == pytest.approx(1490)


def test_an_engine_without_answers_has_no_latencies() -> None:
    def ends_at_once(items: Iterable[tuple[object, Request] | None]) -> Iterator[tuple[object, Result]]:
        for item in items:
            assert item is not None
            yield item[0], Result()

    lines = closed_loop(ends_at_once, [Request((7,), 0, Generation(4))], 1, lambda: 0.0)
    (line,) = latency_table([{"in_flight": 1, "is_warm": 1, **describe(lines)}]).rows
    assert line == ("1", "warmed", "nan", "nan", *["nan / nan / nan"] * 3)

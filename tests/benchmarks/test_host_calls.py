"""What a step costs the host, as the calls that Python makes: a count, which no other work on the machine disturbs."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from olive_ext.config import EngineConfig, ModelSettings
from olive_ext.engine.engine import Engine, open_engine
from olive_ext.engine.requests import Generation, Request
from olive_ext.model import resolve
from tests.exports import genai_export

ROWS = 16


def drawn(draw: random.Random, count: int) -> tuple[int, ...]:
    """Token ids that a vocabulary of 1,000 has."""
    return tuple(draw.randrange(4, 1000) for _ in range(count))


def prompts() -> list[Request]:
    """Prompts of the same length, whose answers end together."""
    draw = random.Random(1)
    return [Request(drawn(draw, 20), 0, Generation(64)) for _ in range(ROWS)]


def texts() -> list[Request]:
    """Four answers of one token each behind a question of its own, all behind one prefix."""
    draw = random.Random(2)
    prefix = drawn(draw, 200)
    questions = [(*prefix, *drawn(draw, 60)) for _ in range(120)]
    return [Request((*question, 5 + number), 1) for question in questions for number in range(4)]


def count_calls(run: Callable[[], object]) -> int:
    """Calls that Python makes in all threads, those of built-in functions too."""
    calls = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    threading.setprofile_all_threads(count) if sys.version_info >= (3, 12) else threading.setprofile(count)
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return calls


def calls_a_step(engine: Engine, requests: list[Request]) -> float:
    """Of the second run of the requests, in which nothing is made that is kept."""
    for _ in range(2):
        engine.reset()
        for loop in engine._loops:
            loop.thread.close()  # so that the next thread begins under the profiler
        steps = engine.counters.steps
        calls = count_calls(lambda: engine.run(requests))
    return calls / (engine.counters.steps - steps)


@pytest.mark.parametrize(
    ("make", "settings", "most"),
    [(prompts, {}, 1000), (texts, {}, 1000), (texts, {"scoring": "rows"}, 600)],
    ids=["decoding", "tree batches", "rows"],
)
def test_a_step_costs_the_host_few_calls(
    make: Callable[[], list[Request]], settings: dict[str, Any], most: int
) -> None:
    config = EngineConfig(num_slots=ROWS, num_threads=1, **settings)
    how: dict[str, Any] = {"execution_provider": "cpu", "max_length": 1024, "deterministic": True, "engine": config}
    engine = open_engine(resolve(ModelSettings(model=str(genai_export("llama")), **how)))
    calls = calls_a_step(engine, make())
    engine.close()
    assert engine.counters.steps > 10
    assert 100 < calls < most

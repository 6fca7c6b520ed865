"""Captured steps over a paged cache as far as they show without a GPU: what a replay launches and what crosses."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

import olive_ext
from olive_ext.config import ModelSettings
from olive_ext.engine.engine import Engine
from olive_ext.engine.forms import agreement
from olive_ext.engine.forms.packed import graph
from olive_ext.engine.forms.packed.capture import PLAIN_RUNS
from olive_ext.engine.opening import open_engine, open_runner
from olive_ext.engine.requests import Generation, Request
from olive_ext.engine.runners.runner import Runner
from olive_ext.engine.step import LogitsRow, Row, Step
from olive_ext.errors import ConfigError
from olive_ext.model import resolve
from tests.cuda_stub.counts import counts
from tests.cuda_stub.test_cuda import MODELS
from tests.exports import VOCAB, export

pytestmark = [pytest.mark.cuda_stub, pytest.mark.slow]

NAME = "llama-genai-0.18-fp16-cuda"
UNHEARD = agreement.disagreement
"""As it is where this module is imported: before its verdict is left unheard."""


def _settings(name: str = NAME, **engine: Any) -> ModelSettings:
    given = {"num_slots": 5, "graph_capture": "auto", **engine}
    return ModelSettings(model=str(export(name).path), execution_provider="cuda", engine=given)


def _decode(runner: Runner, rows: int, past: int, read: int | None = None) -> None:
    reads = tuple(LogitsRow(row, 0) for row in range(rows if read is None else read))
    assert len(runner.run(Step(tuple(Row(row, past, (7 + past,)) for row in range(rows)), reads)).greedy_ids) == len(
        reads
    )


@pytest.mark.parametrize("name", [name for name in MODELS if "kvfp8" not in name])
def test_replay_is_one_launch_and_sends_three_inputs(name: str) -> None:
    """Tokens, positions (where the graph takes them) and lengths go in, one array of greedy tokens comes out."""
    runner, _ = open_runner(resolve(_settings(name)))
    runner.reserve(64)
    runner.run(Step(tuple(Row(row, 0, (4, 5, 6)) for row in range(5))))
    before = runner.describe()["steps_replayed"]
    for past in range(3, 4 + PLAIN_RUNS):
        _decode(runner, 5, past)
    counts()
    _decode(runner, 5, 4 + PLAIN_RUNS)
    found, facts = counts(), runner.describe()
    runner.close()
    assert facts["steps_replayed"] - before == 2
    assert found.wrong_copies == 0
    assert found.launches == 1
    assert found.copies_to_device <= 3
    assert found.bytes_to_device <= 8 * (8 + 8 + 4)
    assert (found.copies_to_host, found.bytes_to_host) == (1, 8 * 8)  # of the bucket's eight rows


def test_steps_that_read_less_or_feed_more_run_plainly() -> None:
    """A prompt's step, and one without anything to read, are what they were."""
    runner, _ = open_runner(resolve(_settings()))
    runner.reserve(64)
    before = runner.describe()["steps_replayed"]
    for past in range(0, 12, 2):
        runner.run(Step((Row(0, past, (4, 5)),)))
    assert runner.describe()["steps_replayed"] == before
    for past in range(12, 14 + PLAIN_RUNS):
        _decode(runner, 1, past, read=0)
    assert runner.describe()["steps_replayed"] == before + 2
    runner.close()


def _run(engine: Engine, longest: int) -> None:
    rng = random.Random(longest)
    texts = [tuple(rng.randrange(4, VOCAB) for _ in range(rng.randint(longest // 2, longest))) for _ in range(12)]
    engine.run([Request(text, 0, Generation(rng.randint(3, 30))) for text in texts])


def test_longer_requests_capture_anew() -> None:
    """Slots move where requests grow: steps that were captured for the old ones are forgotten."""
    engine = open_engine(resolve(_settings(num_slots=8)))
    replayed = [engine.describe()["steps_replayed"]]
    for longest in (20, 300, 40):
        _run(engine, longest)
        replayed.append(engine.describe()["steps_replayed"])
    engine.release_memory()
    assert engine.describe()["steps_captured"] == 0
    _run(engine, 20)
    replayed.append(engine.describe()["steps_replayed"])
    engine.close()
    assert all(more - less > 5 for less, more in pairwise(replayed)), replayed


def test_trial_refuses_kernels_that_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that are equal in all steps prove no replay: "auto" says so and runs plainly, true is an error."""
    monkeypatch.setattr(graph, "check_packed_steps", lambda *_: None)
    monkeypatch.setattr(agreement, "disagreement", UNHEARD)
    with olive_ext.open(export(NAME).path, execution_provider="cuda", engine={"graph_capture": "auto"}) as session:
        facts = session.describe_execution()
    assert facts["batching"] == "packed"
    assert "steps_captured" not in facts
    assert any("steps are not captured: replays" in note for note in facts["notes"]), facts["notes"]
    with pytest.raises(
        ConfigError, match=r"'engine\.graph_capture' = true: replays of a captured step cannot be tried"
    ):
        olive_ext.open(export(NAME).path, execution_provider="cuda", engine={"graph_capture": True})

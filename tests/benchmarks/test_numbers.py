"""The numbers of docs/benchmarks: what counts as another answer, what a row says, tokens, work and latencies; that
peers are asked the same tokens and take turns, and that a process that dies is a line."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from docs.benchmarks.speed.job import BenchJob, BenchRun, Launcher, Schedule
from docs.benchmarks.speed.latency import Timeline, describe
from docs.benchmarks.speed.summary import agreement
from docs.benchmarks.speed.work import count_tokens

GROUPS = [("task", 0), ("task", 0), ("task", 1), ("task", 1)]


def scores(*values: float) -> dict[str, list[Any]]:
    return {"loglikelihood": [[value, False] for value in values]}


LONG, REFERENCE = {"loglikelihood_rolling": [-40000.0]}, scores(-1.0, -2.0, -3.0, -2.5)


@pytest.mark.parametrize(
    ("groups", "found", "reference", "expected"),
    [
        (GROUPS, REFERENCE, REFERENCE, {"max_difference": 0.0, "greedy": [4, 4], "choices": [2, 2], "differs": False}),
        (GROUPS, scores(-1.001, -2.0, -3.0, -2.5), REFERENCE, {"max_difference": 0.001, "differs": False}),
        (GROUPS, scores(-1.5, -2.0, -3.0, -2.5), REFERENCE, {"differs": True}),
        # another choice, however small the difference
        (GROUPS, scores(-1.0, -2.0, -2.499, -2.5), scores(-1, -2, -2.501, -2.5), {"choices": [1, 2], "differs": True}),
        # long texts may differ by a part of their likelihood
        ([], {"loglikelihood_rolling": [-40001.0]}, LONG, {"differs": False}),
        ([], {"loglikelihood_rolling": [-40010.0]}, LONG, {"differs": True}),
        ([], {"generate_until": ["a", "b"]}, {"generate_until": ["a", "c"]}, {"texts": [1, 2], "differs": True}),
        # requests of one choice
        ([("lambada", 0), ("lambada", 1)], scores(-1.0, -2.0), scores(-1.0, -2.0), {"choices": None}),
    ],
)
def test_answers_that_differ(groups: Any, found: Any, reference: Any, expected: dict[str, Any]) -> None:
    compared = agreement(groups, found, reference)
    assert {key: compared.get(key) for key in expected} == {
        key: pytest.approx(value) if isinstance(value, float) else value for key, value in expected.items()
    }


BACKENDS = ("olive-ext", "hf", "onnxruntime")


def run(backend: str, size: int | None, number: int, seconds: float, **fields: Any) -> BenchRun:
    memory = {"before": 1e8, "weights": 1e8, "open": 3e8, "warm": 3e8, "peak": 5e8}
    given = {"seconds": {"loglikelihood": seconds}, "memory": memory, "seconds_total": seconds + 3, **fields}
    return BenchRun(backend, size, number, **given)


def test_latencies_are_those_of_the_timelines() -> None:
    found = describe([Timeline(0.0, [1.0, 1.5, 3.0]), Timeline(1.0, [1.25]), Timeline(2.0, [4.0, 5.0])])
    assert {name: found[name] for name in ("requests_per_second", "tokens_per_second")} == pytest.approx(
        {"requests_per_second": 3 / 5, "tokens_per_second": 6 / 5}
    )
    assert found["first_token_mean_ms"] == pytest.approx(1000 * (1 + 0.25 + 2) / 3)
    names = ("first_token_median_ms", "output_token_mean_ms", "inter_token_median_ms", "inter_token_p99_ms")
    assert [found[name] for name in names] == pytest.approx([1000, 1000, 1000, 1490])


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=6)
INPUTS = st.lists(TOKENS.flatmap(lambda tokens: st.tuples(st.just(tokens), st.integers(1, len(tokens)))), max_size=12)


@given(INPUTS, st.randoms())
def test_counts_are_those_of_the_prefix_tree_in_any_order(
    inputs: list[tuple[list[int], int]], rng: random.Random
) -> None:
    nodes = {tuple(tokens[: end + 1]) for tokens, _ in inputs for end in range(len(tokens))}
    read = {tuple(tokens[: end + 1]) for tokens, number in inputs for end in range(len(tokens) - number, len(tokens))}
    rng.shuffle(inputs)
    assert count_tokens(inputs) == {
        "naive": sum(len(tokens) for tokens, _ in inputs),
        "distinct": len(nodes),
        "attended": sum(len(node) for node in nodes),
        "rows": len(read),
    }


class Peer:
    """Encodes without BOS, as lm-eval's ONNX backends do, and tells what it would feed."""

    def tok_encode(self, string: str, add_special_tokens: bool | None = None) -> list[int]:
        raise AssertionError("a peer that is given our tokens encodes nothing itself")

    def loglikelihood(self, texts: list[str]) -> list[list[int]]:
        return [self.tok_encode(text) for text in texts]

    loglikelihood_rolling = loglikelihood


def test_process_that_dies_or_takes_too_long_is_a_line(tmp_path: Path) -> None:
    job = BenchJob("answer", "hf", opening={"batch_size": 4, "num_threads": 2})
    said = [
        Launcher(tmp_path, seconds, script)(job).error
        for seconds, script in ((None, "import os; os.kill(os.getpid(), 9)"), (1.0, "import time; time.sleep(60)"))
    ]
    assert said == ["ended by SIGKILL, as the system does where memory is short", "stopped after 1 s"]


SECONDS = {("hf", 1): 5.0, ("hf", 4): 2.0, ("hf", 8): 3.0}


def measured(backend: str, size: int | None, number: int) -> BenchRun:
    return BenchRun(backend, size, number, seconds={"loglikelihood": SECONDS.get((backend, size or 0), 1.0)})


@pytest.mark.parametrize(
    ("schedule", "failing", "order"),
    [
        (  # later rounds take the fastest batch size
            Schedule(BACKENDS, (1, 4, 8), 2),
            (),
            "olive-ext 0, hf/1 0, hf/4 0, hf/8 0, onnxruntime 0, olive-ext 1, hf/4 1, onnxruntime 1",
        ),
        (Schedule(BACKENDS, (1, 4), 1, probes=True), (), "hf/1 -1, hf/4 -1, olive-ext 0, hf/4 0, onnxruntime 0"),
        (  # what failed is not asked again, and the others go on
            Schedule(BACKENDS, (1, 4), 2, probes=True),
            ("hf",),
            "hf/1 -1, hf/4 -1, olive-ext 0, onnxruntime 0, olive-ext 1, onnxruntime 1",
        ),
        (
            Schedule(BACKENDS, (4,), 3),
            ("onnxruntime", ("hf", 1)),
            "olive-ext 0, hf/4 0, onnxruntime 0, olive-ext 1, hf/4 1, olive-ext 2",
        ),
        (
            Schedule(BACKENDS, (1,), 3, once=["onnxruntime"]),
            (),
            "olive-ext 0, hf/1 0, onnxruntime 0, olive-ext 1, hf/1 1, olive-ext 2, hf/1 2",
        ),
    ],
)
def test_backends_take_turns(schedule: Schedule, failing: tuple[Any, ...], order: str) -> None:
    def launch(backend: str, size: int | None, number: int) -> BenchRun:
        fails = backend in failing or (backend, number) in failing
        return BenchRun(backend, size, number, error="no") if fails else measured(backend, size, number)

    runs = [(run.backend, f"/{run.batch_size}" if run.batch_size else "", run.round) for run in schedule.run(launch)]
    assert ", ".join(f"{name}{size} {number}" for name, size, number in runs) == order

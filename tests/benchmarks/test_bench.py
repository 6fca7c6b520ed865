"""`bench` with measurements that are made up, and once for real on a tiny model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from docs.benchmarks.speed import bench
from docs.benchmarks.speed.config import BenchConfig
from docs.benchmarks.speed.job import BenchJob, BenchRun
from docs.benchmarks.speed.latency import Timeline, describe
from olive_ext.errors import ConfigError, TaskError
from tests.backends.local_tasks import write_tasks
from tests.exports import genai_export, hf_model
from tests.refusals import refused

MEMORY = {"before": 0.0, "weights": 1.0, "open": 1.0, "peak": 2.0}


class Fake:
    """Answers as processes would: one answer for all, and a second a run; the second run of `hf` is interrupted."""

    def __init__(self, interrupts: bool = False) -> None:
        self.jobs: list[BenchJob] = []
        self.interrupts = interrupts

    def __call__(self, job: BenchJob, number: int) -> BenchRun:
        self.jobs.append(job)
        if job.task == "ceiling":
            return BenchRun("", flops_per_second=1e9)
        if job.task == "latencies":
            found = describe([Timeline(0.0, [1.0, 1.5])])
            return BenchRun(
                job.backend, series=[{"in_flight": job.in_flight, "is_warm": warm, **found} for warm in (0, 1)]
            )
        if self.interrupts and job.backend == "hf":
            raise KeyboardInterrupt
        asked = json.loads(Path(job.requests).read_text())
        values = {"loglikelihood": [-1.0, False], "generate_until": "a"}
        kinds = sorted({one["kind"] for one in asked})
        answers = {kind: [values.get(kind, -1.0) for one in asked if one["kind"] == kind] for kind in kinds}
        Path(job.answers).write_text(json.dumps(answers))
        tokens = {"naive": 9, "distinct": 4, "attended": 9, "rows": 1}
        counters = {"tokens_fed": 4.0 * len(asked)}
        run = BenchRun(
            job.backend, job.opening["batch_size"], number, seconds={"all": 1.0}, memory=MEMORY, tokens=tokens
        )
        return replace(run, counters=counters)


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    return {
        "model": str(genai_export("llama")),
        "hf": str(hf_model("llama")),
        "tasks": ["tiny_choice", "tiny_generate"],
        "include_path": str(write_tasks(tmp_path / "tasks")),
        "limit": 2,
        "peers": ["hf", "onnxruntime-genai"],
        "batch_sizes": [2],
        "rounds": 2,
        "output_dir": str(tmp_path / "out"),
    }


def found(config: dict[str, Any]) -> dict[str, Any]:
    return json.loads((Path(config["output_dir"]) / "bench.json").read_text())


@pytest.mark.slow
def test_every_backend_gets_the_same_requests_by_turns(config: dict[str, Any]) -> None:
    fake, lines = Fake(), []
    summary = bench(BenchConfig.parse(config), fake, lines.append)
    answered = [job for job in fake.jobs if job.task == "answer"]
    assert [job.backend for job in answered] == ["olive-ext", "hf", "onnxruntime-genai"] * 2
    assert len({job.requests for job in answered}) == 1
    asked = json.loads(Path(answered[0].requests).read_text())
    assert [one["kind"] for one in asked] == ["loglikelihood"] * 6 + ["generate_until"] * 2
    assert summary.num_requests == 8
    assert summary.reference == "onnxruntime-genai"
    assert all(row.agreement["differs"] is False for row in summary.rows)
    assert lines[0] == "round 1, olive-ext: 1.0 s"
    assert [run["backend"] for run in found(config)["runs"]] == [job.backend for job in answered]
    assert "olive-ext" in (Path(config["output_dir"]) / "bench.md").read_text()


@pytest.mark.slow
def test_probe_answers_part_of_the_documents_and_does_not_count(config: dict[str, Any]) -> None:
    fake = Fake()
    summary = bench(
        BenchConfig.parse({**config, "rounds": 1, "probe": 1, "batch_sizes": [1, 2], "tasks": ["tiny_choice"]}), fake
    )
    probe, _, *others = [job for job in fake.jobs if job.task == "answer"]
    assert probe.backend == "hf"
    assert [len(json.loads(Path(job.requests).read_text())) for job in (probe, *others)] == [3, 6, 6, 6]
    assert [row.rounds for row in summary.rows] == [1, 1, 1]
    assert [run["round"] for run in found(config)["runs"]] == [-1, -1, 0, 0, 0]


@pytest.mark.slow
def test_latencies_are_ours_alone_in_as_many_slots_as_requests_in_flight(config: dict[str, Any]) -> None:
    fake = Fake()
    summary = bench(BenchConfig.parse({**config, "rounds": 1, "peers": [], "in_flight": [1, 3]}), fake)
    jobs = [job for job in fake.jobs if job.task == "latencies"]
    assert [(job.backend, job.opening["engine"]["num_slots"]) for job in jobs] == [("olive-ext", 1), ("olive-ext", 3)]
    assert [(one["in_flight"], one["is_warm"]) for one in summary.latencies] == [(1, 0), (1, 1), (3, 0), (3, 1)]
    page = (Path(config["output_dir"]) / "bench.md").read_text()
    assert "| 3 | warmed | 0.67 | 1 | 1000.0 / 1000.0 / 1000.0 | 500.0 / 500.0 / 500.0 |" in page


def test_latencies_of_tasks_that_generate_nothing_are_refused(config: dict[str, Any]) -> None:
    fake = Fake()
    with refused(ConfigError, "wrong_value", holds=("in_flight", "4")):
        bench(BenchConfig.parse({**config, "tasks": ["tiny_choice"], "in_flight": [4]}), fake)
    assert fake.jobs == []


@pytest.mark.slow
def test_interruption_leaves_what_was_measured(config: dict[str, Any]) -> None:
    with pytest.raises(KeyboardInterrupt):
        bench(BenchConfig.parse(config), Fake(interrupts=True))
    assert [run["backend"] for run in found(config)["runs"]] == ["olive-ext"]


def test_unknown_task_is_named_before_anything_runs(config: dict[str, Any]) -> None:
    fake = Fake()
    with refused(TaskError, "unknown_name", "tasks", ["tiny_chois"]):
        bench(BenchConfig.parse({**config, "tasks": ["tiny_chois"]}), fake)
    assert fake.jobs == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hf": None}, {"code": "contradiction", "holds": "hf"}),
        ({"peers": ["vllm"]}, {"code": "wrong_value", "field": "peers", "value": ["vllm"]}),
        ({"batch_sizes": []}, {"code": "wrong_value", "field": "batch_sizes", "value": []}),
    ],
)
def test_contradictions_are_refused(config: dict[str, Any], change: dict[str, Any], message: dict[str, Any]) -> None:
    with refused(ConfigError, **message):
        BenchConfig.parse({**config, **change})


def test_hf_is_a_peer_where_its_folder_is_given(config: dict[str, Any]) -> None:
    others = ("onnxruntime", "onnxruntime-genai", "olive-ort", "olive-ortgenai")
    chosen = {key: value for key, value in config.items() if key != "peers"}
    assert BenchConfig.parse(chosen).chosen_peers == ("hf", *others)
    assert BenchConfig.parse({**chosen, "hf": None}).chosen_peers == others


@pytest.mark.long
def test_real_processes_agree_and_a_peer_without_generation_says_so(config: dict[str, Any]) -> None:
    """Without BOS: lm-eval's ONNX backends put none in front."""
    asked = {"peers": ["hf", "onnxruntime", "onnxruntime-genai"], "rounds": 1, "num_threads": 1, "add_bos_token": False}
    summary = bench(BenchConfig.parse({**config, **asked}))
    ours, hf, plain, genai = summary.rows
    assert [row.error for row in (ours, hf, genai)] == [None] * 3
    assert plain.error is not None
    assert plain.error.startswith("NotImplementedError")
    assert summary.reference == "onnxruntime-genai"
    for row in (ours, hf):
        assert row.agreement["max_difference"] < 1e-3
        assert row.agreement["choices"] == [2, 2]
        assert row.agreement["texts"] == [2, 2]
        assert row.memory_peak > row.memory_above >= 0
    assert summary.fed_over_distinct is not None
    assert summary.fed_over_distinct < 1.2
    assert summary.utilisation

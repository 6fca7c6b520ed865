"""`bench` with measurements that are made up, and once for real on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from docs.benchmarks.speed import bench
from docs.benchmarks.speed.config import BenchConfig
from docs.benchmarks.speed.job import BenchJob, BenchRun
from docs.benchmarks.speed.latency import Timeline, describe
from tests.backends.local_tasks import write_tasks
from tests.exports import genai_export, hf_model

MEMORY = {"before": 0.0, "weights": 1.0, "open": 1.0, "peak": 2.0}


class Fake:
    """Answers as processes would: one answer for all, and a second a run."""

    def __init__(self) -> None:
        self.jobs: list[BenchJob] = []

    def __call__(self, job: BenchJob, number: int) -> BenchRun:
        self.jobs.append(job)
        if job.task == "ceiling":
            return BenchRun("", flops_per_second=1e9)
        if job.task == "latencies":
            found = describe([Timeline(0.0, [1.0, 1.5])])
            return BenchRun(
                job.backend, series=[{"in_flight": job.in_flight, "is_warm": warm, **found} for warm in (0, 1)]
            )
        asked = json.loads(Path(job.requests).read_text())
        values = {"loglikelihood": [-1.0, False], "generate_until": "a"}
        kinds = sorted({one["kind"] for one in asked})
        answers = {kind: [values.get(kind, -1.0) for one in asked if one["kind"] == kind] for kind in kinds}
        Path(job.answers).write_text(json.dumps(answers))
        tokens = {"naive": 9, "distinct": 4, "attended": 9, "rows": 1}
        facts: dict[str, Any] = {"memory": MEMORY, "tokens": tokens, "counters": {"tokens_fed": 4.0 * len(asked)}}
        return BenchRun(job.backend, job.opening["batch_size"], number, seconds={"all": 1.0}, **facts)


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


def test_latencies_are_ours_alone_in_as_many_slots_as_requests_in_flight(config: dict[str, Any]) -> None:
    fake = Fake()
    summary = bench(BenchConfig.parse({**config, "rounds": 1, "peers": [], "in_flight": [1, 3]}), fake)
    jobs = [job for job in fake.jobs if job.task == "latencies"]
    assert [(job.backend, job.opening["engine"]["num_slots"]) for job in jobs] == [("olive-ext", 1), ("olive-ext", 3)]
    assert [(one["in_flight"], one["is_warm"]) for one in summary.latencies] == [(1, 0), (1, 1), (3, 0), (3, 1)]
    page = (Path(config["output_dir"]) / "bench.md").read_text()
    assert "| 3 | warmed | 0.67 | 1 | 1000.0 / 1000.0 / 1000.0 | 500.0 / 500.0 / 500.0 |" in page


@pytest.mark.long
def test_real_processes_agree_and_a_peer_without_generation_says_so(config: dict[str, Any]) -> None:
    """Without BOS: lm-eval's ONNX backends put none in front."""
    asked = {"peers": ["hf", "onnxruntime", "onnxruntime-genai"], "rounds": 1, "num_threads": 1, "add_bos_token": False}
    asked |= {"tasks": [*config["tasks"], "tiny_rolling"], "in_flight": [2]}
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
    assert [(one["in_flight"], one["is_warm"]) for one in summary.latencies] == [(2, 0), (2, 1)]
    for one in summary.latencies:
        assert 0 < one["inter_token_median_ms"] <= one["inter_token_p99_ms"]
        assert one["first_token_mean_ms"] > 0

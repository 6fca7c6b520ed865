"""The scripts of docs/benchmarks: their options are the command's, and the GPU's runs on a CPU."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.exports import genai_export
from tests.exports.quickstart import TASKS, exported, quantized

SCRIPTS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"


@pytest.fixture
def run_script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import run

    return run


def given(**values: Any) -> argparse.Namespace:
    defaults = {"models": Path("models"), "documents": None, "rounds": 2, "probe": 4, "prefix": "offline_"}
    return argparse.Namespace(**{**defaults, "include_path": "tasks", "num_threads": None, **values})


@pytest.mark.long
def test_gpu_benchmark_runs_on_a_cpu(tmp_path: Path) -> None:
    sizes = "--precisions fp32 --questions 4 --checked 2 --rounds 1 --batch-sizes 4 --whole 6 --generations 4"
    sizes += " --new-tokens 8 --many 4 --long 2 --long-tokens 40"
    command = [sys.executable, str(SCRIPTS / "gpu_table.py"), str(tmp_path), "--device", "cpu", "--shapes", "tiny"]
    command += sizes.split()
    root = str(SCRIPTS.parents[1])
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "tiny-fp32" / "bench.json").read_text())
    ours, hf = found["summary"]["rows"]
    assert found["finished"]
    assert (ours["error"], hf["error"]) == (None, None)
    assert found["summary"]["num_requests"] == 40
    assert ours["agreement"]["choices"] == [4, 4]
    checked = json.loads((tmp_path / "tiny-fp32-answers" / "bench.json").read_text())["summary"]
    assert checked["reference"] == "onnxruntime"
    assert checked["rows"][0]["agreement"]["choices"] == [2, 2]
    for name, number, tokens in (
        ("greedy-64", 4, 900 + 150 + 7),
        ("greedy-256", 4, 900 + 150 + 7),
        ("long", 2, 150 + 39),
    ):
        alone = json.loads((tmp_path / f"tiny-fp32-{name}" / "bench.json").read_text())["summary"]
        assert (len(alone["rows"]), alone["rows"][0]["error"], alone["num_requests"]) == (1, None, number)
        assert alone["tokens_naive"] == pytest.approx(number * tokens, rel=0.1)
    five = json.loads((tmp_path / "tiny-fp32-5-tokens" / "bench.json").read_text())["summary"]
    assert five["rows"][0]["agreement"]["choices"] == [4, 4]
    assert five["tokens_distinct"] > found["summary"]["tokens_distinct"] + 4 * 10 * 3
    greedy = json.loads((tmp_path / "tiny-fp32-greedy" / "bench.json").read_text())["summary"]
    assert [row["backend"] for row in greedy["rows"]] == ["olive-ext", "hf", "onnxruntime-genai"]
    assert greedy["rows"][0]["agreement"]["texts"] == [4, 4]
    whole = json.loads((tmp_path / "tiny-fp32-whole" / "bench.json").read_text())["summary"]
    assert (whole["num_requests"], [row["backend"] for row in whole["rows"]]) == (60, ["olive-ext"])
    tokens = found["summary"]["tokens_distinct"]
    assert 700 + 4 * 150 <= tokens <= 1.1 * (700 + 4 * 160)
    copies = json.loads((tmp_path / "tiny-fp32" / "host_device_copies.json").read_text())
    assert copies["problems"] == []
    (profile,) = copies["profiles"].values()
    assert [step["rows_tokens"] for step in profile["generation"]][-1] == [2, 1]
    assert all("GroupQueryAttention" in step["seconds_by_operator"] for step in profile["scoring"])
    assert "| tiny-fp32 | hf (batch 4) |" in (tmp_path / "table.md").read_text()


@pytest.mark.long
def test_first_minutes_on_a_gpu_are_tried_on_a_cpu(tmp_path: Path) -> None:
    """A part with numbers, one on a package whose weights are made there, one without a package."""
    sys.path.insert(0, str(SCRIPTS))
    import hollow

    hollow.hollow(genai_export("llama", None), tmp_path / "models" / "llama-3.2-1b" / "fp16")
    command = [sys.executable, str(SCRIPTS / "gpu.py"), str(tmp_path), "--models", str(tmp_path / "models")]
    command += ["--device", "cpu", "--parts", "3-new-lengths,8-int4,9-decode", "--patience", "9"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    names = ("3-new-lengths", "8-int4", "9-decode")
    lengths, int4, decoded = (json.loads((tmp_path / f"{name}.json").read_text()) for name in names)
    for found in (lengths, lengths["encoder"]):
        assert [row["tokens"] for row in found["rows"]] == [131, 137, 139, 149, 151, 157, 163, 167]
    assert [decoded[f"fp16 {form}"]["2"]["equal_answers"] for form in ("auto", "rows")] == [2, 2]
    assert decoded["int4 rows"] == "no package llama-3.2-1b/int4"
    assert int4["not run"] == "no package llama-3.2-1b/int4"


@pytest.mark.long
def test_cost_of_a_comparison_is_measured_part_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import comparison_cost as script

    for name, package in (("fp32", exported()), ("int4", quantized(4, 32))):
        (tmp_path / name).symlink_to(package)
    documents = script.paragraphs("quickstart_perplexity", str(TASKS), 4)
    assert len(documents) == 6
    assert all(len(text.split()) >= 30 for text in documents)
    (tmp_path / "documents.json").write_text(json.dumps(documents))
    names = [*script.PARTS, *script.PARTS, *script.SMALL]
    parts: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for name in names:
        parts[name].append(script.measure(name, tmp_path, tmp_path, 1))
    summary = script.summarise(parts)
    for recording in parts["recording"]:
        assert recording["tokens"] == parts["candidate"][0]["tokens"] < recording["records"]  # with the warm-up's
    assert parts["recorded/4"][0]["documents"] == 1
    assert summary["kl_mean"]["recorded"] == pytest.approx(summary["kl_mean"]["resident"], rel=1e-3)
    assert summary["kl_mean"]["resident"] > 1e-4
    assert summary["kl_sampling_error"] == 0  # so small a vocabulary is kept whole
    first, second = (
        (parts["recording"][number]["seconds"] + parts["recorded"][number]["seconds"])
        / (parts["reference"][number]["seconds"] + parts["candidate"][number]["seconds"])
        for number in range(2)
    )
    assert summary["over_both_alone"]["recorded_seconds"] == pytest.approx((first + second) / 2)
    assert "| resident/4 | 1 |" in script.table(parts, summary)


def test_every_script_is_listed_and_run_by_its_name() -> None:
    command = [sys.executable, "-m", "docs.benchmarks"]
    listed = subprocess.run(command, cwd=SCRIPTS.parents[1], capture_output=True, text=True, check=True).stdout
    readme = (SCRIPTS / "README.md").read_text(encoding="utf-8")
    names = [line.split()[0] for line in listed.splitlines()]
    assert {"run", "make_models", "two_checkouts"} <= set(names)
    assert [name for name in names if f"`{name}`" not in readme] == []
    helped = subprocess.run([*command, "run", "--help"], cwd=SCRIPTS.parents[1], capture_output=True, text=True)
    assert "--probe" in helped.stdout, helped.stderr

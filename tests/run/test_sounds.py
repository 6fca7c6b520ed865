"""An evaluation with sounds: an export compared with its checkpoint, bounds, resuming, sounds of several windows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from olive_ext.config import Bound, EvaluationConfig
from olive_ext.errors import IncompleteError
from olive_ext.report.report import Report
from olive_ext.run import evaluate
from olive_ext.run.bounds import broken_bounds
from olive_ext.run.evaluation import check_complete
from tests.exports import hf_model
from tests.exports.genai import whisper_export
from tests.exports.media import SOUND_FAMILIES, media_export
from tests.refusals import refused

RATE = 16000
CHOICES = "output_type: multiple_choice\ndoc_to_choice: [' stone', ' blue cat']\ndoc_to_target: answer\n"
ANSWER = "output_type: generate_until\ndoc_to_target: low\ngeneration_kwargs: {until: ['.'], max_gen_toks: 6}\n"
FORMS = {"heard_choice": (CHOICES, "acc"), "heard_answer": (ANSWER, "exact_match")}

pytestmark = pytest.mark.slow


def _models(family: str) -> tuple[Path, Path]:
    """An export in fp32 and its checkpoint."""
    return (whisper_export(), hf_model(family)) if family == "whisper" else media_export(family)


def _write_tasks(folder: Path, family: str, seconds: list[float]) -> Path:
    """The same sounds, chosen about and answered."""
    rng = np.random.default_rng(0)
    sounds = [rng.normal(scale=0.1, size=int(RATE * length)).round(4).tolist() for length in seconds]
    lines = [json.dumps({"samples": samples, "answer": number % 2}) for number, samples in enumerate(sounds)]
    folder.mkdir()
    (folder / "data.jsonl").write_text("\n".join(lines), encoding="utf-8")
    given = f"def sounds(doc):\n    return [{{'array': doc['samples'], 'sampling_rate': {RATE}}}]\n"
    (folder / "given.py").write_text(given, encoding="utf-8")
    text = "Ann hears <audio> and" if family in SOUND_FAMILIES else ""
    for name, (form, metric) in FORMS.items():
        task = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/data.jsonl}}}}\n"
        task += f"test_split: test\ndoc_to_text: '{text}'\ndoc_to_audio: !function given.sounds\n{form}"
        (folder / f"{name}.yaml").write_text(f"{task}metric_list: [{{metric: {metric}}}]\n", encoding="utf-8")
    return folder


def _evaluate(package: Path, folder: Path, **values: Any) -> Report:
    given = {"tasks": list(FORMS), "include_path": str(folder), "bootstrap_iters": 0, "model": {"path": str(package)}}
    return evaluate(EvaluationConfig.parse({**given, **values}))


def _kl(report: Report) -> dict[str, float]:
    return {one.task: one.value for one in report.metrics if one.metric == "kl_mean"}


FAMILIES = [
    "whisper",
    pytest.param("qwen3_asr", marks=pytest.mark.long),
    pytest.param("gemma4_any", marks=pytest.mark.exporters),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_export_is_compared_with_its_checkpoint_resident_and_recorded(family: str, tmp_path: Path) -> None:
    package, checkpoint = _models(family)
    tasks = _write_tasks(tmp_path / "tasks", family, [1, 2.5, 4])
    for mode in ("resident", "recorded"):
        against = {"path": str(checkpoint), "mode": mode, "records_dir": str(tmp_path / "records")}
        report = _evaluate(package, tasks, reference=against)
        found = _kl(report)
        assert found.keys() == {*FORMS, "all"}
        assert all(0 <= kl < 1e-6 for kl in found.values())
        assert broken_bounds([Bound(metric="kl_mean", max=1e-5)], report.metrics) == []
        assert len(broken_bounds([Bound(metric="kl_mean", max=1e-12)], report.metrics)) == 1
        assert report.comparison is not None
        assert report.comparison.flips == ()
        assert report.comparison.reference["export"].startswith("runs on transformers, not exported")


@pytest.mark.parametrize("mode", ["resident", "recorded"])
def test_checkpoint_is_evaluated_against_an_export(mode: str, tmp_path: Path) -> None:
    package, checkpoint = _models("whisper")
    tasks = _write_tasks(tmp_path / "tasks", "whisper", [1, 2])
    against = {"path": str(package), "mode": mode, "records_dir": str(tmp_path / "records")}
    assert max(_kl(_evaluate(checkpoint, tasks, reference=against)).values()) < 1e-6


def test_second_run_takes_every_answer_from_the_journal_and_encodes_nothing(tmp_path: Path) -> None:
    package, _ = _models("whisper")
    tasks = _write_tasks(tmp_path / "tasks", "whisper", [1, 2])
    reports = []
    for _ in range(2):
        _evaluate(package, tasks, output_dir=str(tmp_path / "out"))
        reports.append(json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8")))
    assert [report["results"]["config"]["execution"]["encoder_runs"] for report in reports] == [2, 0]
    metrics = [[(one["task"], one["metric"], one["value"]) for one in report["metrics"]] for report in reports]
    assert metrics[0] == metrics[1]


# Gemma 4's features of so loud a sound are finite.
@pytest.mark.parametrize("family", [pytest.param("whisper", marks=pytest.mark.long), "qwen3_asr"])
def test_unreadable_sounds_cost_their_documents_alone(family: str, tmp_path: Path) -> None:
    """Lists and arrays, of which one is out of any range: the others have the numbers that they have without it."""
    package, checkpoint = _models(family)
    tasks = _write_tasks(tmp_path / "tasks", family, [1, 2.5, 2, 4])
    whole = _evaluate(package, tasks, sample_log_num=9, output_dir=str(tmp_path / "whole"))
    given = tasks / "given.py"
    loud = "1e37 if doc['samples'] == first else 1"
    given.write_text(
        f"import json, numpy as np\nfrom pathlib import Path\n"
        f"first = json.loads(Path({str(tasks / 'data.jsonl')!r}).read_text().splitlines()[1])['samples']\n"
        f"def sounds(doc):\n"
        f"    return [{{'array': np.array(doc['samples'], np.float32) * ({loud}), 'sampling_rate': {RATE}}}]\n",
        encoding="utf-8",
    )
    against = {"path": str(checkpoint), "records_dir": str(tmp_path / "records")}
    for more in ({}, {"reference": against}):
        report = _evaluate(package, tasks, sample_log_num=9, output_dir=str(tmp_path / f"bad{len(more)}"), **more)
        assert {item["doc_id"] for item in report.missing} == {1}
        assert all("features of NaN or infinity" in item["reason"] for item in report.missing)
        expected = {key: value for key, value in _answers(tmp_path / "whole").items() if key[1] != 1}
        found = {key: value for key, value in _answers(tmp_path / f"bad{len(more)}").items() if key[1] != 1}
        assert found.keys() == expected.keys()
        for key, values in expected.items():
            assert found[key] == pytest.approx(values, abs=1e-4)
    assert whole.missing == ()


def _answers(folder: Path) -> dict[tuple[str, int], Any]:
    """Log-probabilities of choices, by task and document."""
    lines = [json.loads(line) for file in folder.rglob("samples_heard_choice*") for line in file.open()]
    return {("heard_choice", line["doc_id"]): [float(item[0][0]) for item in line["resps"]] for line in lines}


def test_answer_to_a_sound_of_several_windows_is_not_compared_and_named(tmp_path: Path) -> None:
    """Alone the model answers it; beside a reference its document is missing, with the reason."""
    package, checkpoint = _models("whisper")
    tasks = _write_tasks(tmp_path / "tasks", "whisper", [1, 31, 2])
    wanted = {"tasks": ["heard_answer"]}
    assert not _evaluate(package, tasks, **wanted).missing
    against = {"path": str(checkpoint), "records_dir": str(tmp_path / "records")}
    report = _evaluate(package, tasks, **wanted, reference=against)
    (missing,) = report.missing
    assert missing["doc_id"] == 1
    windows = "longer than the 30 s that the encoder takes, and has 2 windows: a target is scored after one window only"
    assert windows in missing["reason"]
    assert _kl(report)["heard_answer"] < 1e-6
    with refused(IncompleteError, "incomplete", holds=("heard_answer", "1", "30")):
        check_complete(report, "stop")

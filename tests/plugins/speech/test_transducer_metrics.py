"""The public recipe's section of Nemotron's streaming transducer, on a tiny package of its form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from olive.evaluator.olive_evaluator import OnnxEvaluator
from olive.model import ONNXModelHandler

from olive_ext.check import check_recipe
from olive_ext.errors import ModelError
from olive_ext.plugins.speech.settings import METRICS_TYPE
from olive_ext.plugins.speech.transducer_files import transducer_in
from olive_ext.run.task_fit import TaskInputs
from olive_ext.workflow import cli_run
from tests.plugins.speech.test_metrics_evaluator import declared, measured, olives, tones, wav
from tests.plugins.speech.transducers import transducer_export
from tests.refusals import refused
from tests.workflow.recipes import recipe, saved

LENGTHS = (20000, 8960, 33000)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return transducer_export(tmp_path_factory.mktemp("package"), batched=False)


@pytest.fixture
def sounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[tuple[np.ndarray, str]]]:
    """A parquet file of sounds with texts, and the same in memory."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    made = [np.random.default_rng(number).normal(scale=0.1, size=size) for number, size in enumerate(LENGTHS)]
    whole = [(np.array(one * 32767).astype("<i2") / 2**15).astype(np.float32) for one in made]
    texts = ["r r r m m", "m m f f", "h h m m"]
    files = [{"bytes": wav(list(one)), "path": f"{number}.wav"} for number, one in enumerate(made)]
    table = datasets.Dataset.from_dict({"audio": files, "text": texts})
    table.cast_column("audio", datasets.Audio(decode=False)).to_parquet(tmp_path / "sounds.parquet")
    return tmp_path / "sounds.parquet", list(zip(whole, texts, strict=True))


def test_word_errors_are_those_of_olives_streaming_evaluator(package: Path, sounds: Any) -> None:
    """Olive's own code feeds onnxruntime-genai the same sounds: the same word error rate, of transcripts that are not
    empty; latency of the first sound beside it."""
    file, rows = sounds
    model = ONNXModelHandler(str(package), onnx_file_name="decoder.onnx")
    metric, time = (
        declared("speech", "accuracy", ["wer", "rtfx"], tones(file)),
        declared("t", "latency", ["avg"], tones(file)),
    )
    time["sub_types"][0]["metric_config"] = {"warmup_num": 0, "repeat_test_num": 1, "sleep_num": 0}
    found = measured(model, metric, time)
    output, targets = OnnxEvaluator()._inference_text_genai_streaming(
        model, olives(metric), [(samples_N[None], [text]) for samples_N, text in rows]
    )
    theirs = OnnxEvaluator.compute_accuracy(olives(metric), output, targets)
    assert all(text.strip() for text in output.preds)
    assert found["speech-wer"] == theirs["wer"].value
    assert found["speech-rtfx"] > 0
    assert found["t-first_token_ms"] > 0
    assert found["t-avg"] > 0


@pytest.mark.long
def test_public_recipe_of_nemotron_ports_by_its_type(package: Path, sounds: Any, tmp_path: Path) -> None:
    """The check is green, and the recipe runs."""
    blocks: dict[str, Any] = {
        "data_configs": [tones(sounds[0], max_samples=2)],
        "metrics": [declared("speech_accuracy", "accuracy", ["wer", "rtfx"], "tones")],
        "evaluators": {"common_evaluator": {"type": METRICS_TYPE, "metrics": ["speech_accuracy"]}},
    }
    blocks["evaluators"]["common_evaluator"]["output_dir"] = str(tmp_path / "reports")
    written = recipe(tmp_path, {"type": "OnnxModel", "model_path": str(package)}, **blocks)
    assert check_recipe(Path(saved(tmp_path, written))).problems == []
    assert cli_run(["--config", saved(tmp_path, written)]) == 0
    found = json.loads((tmp_path / "out" / "input_model_metrics.json").read_text(encoding="utf-8"))
    report = json.loads((tmp_path / "reports" / "input_model" / "report.json").read_text(encoding="utf-8"))
    values = {one["metric"]: (one["value"], one["n"]) for one in report["metrics"]}
    assert values["wer"] == (found["speech_accuracy-wer"]["value"], 2)


def test_tasks_are_refused_for_a_transducer(package: Path) -> None:
    """The graph or the folder is given, and a task; without one it is a model for `OrtEvaluator`."""
    assert transducer_in(package / "decoder.onnx", [])
    with refused(ModelError, "unsupported", holds=("nemotron_speech", "OrtEvaluator")):
        transducer_in(package, [TaskInputs("task", False, False, False)])

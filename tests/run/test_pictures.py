"""An evaluation with pictures: compared with a reference, resumed, each picture encoded once, memory flat."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import olive_ext
from olive_ext.config import EvaluationConfig
from olive_ext.run import evaluate
from olive_ext.text.requests import ScoringRequest
from tests.exports.media import plain_encoder_export
from tests.families.pictures import picture

TASKS = Path(__file__).parents[2] / "recipes" / "vision" / "tasks"
NUM_DOCUMENTS = 6

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def package() -> Path:
    return plain_encoder_export("f32", "default")


@pytest.fixture(scope="module")
def other(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package with another encoder: half of the weights, and nothing else, are rounded."""
    folder = tmp_path_factory.mktemp("other") / "package"
    shutil.copytree(package, folder)
    file = folder / "vision_encoder" / "model.onnx"
    proto = onnx.load(file)
    (weight,) = (tensor for tensor in proto.graph.initializer if tensor.name == "weight")
    weight.CopyFrom(onnx.numpy_helper.from_array(np.round(onnx.numpy_helper.to_array(weight), 1), "weight"))
    onnx.save(proto, file)
    return folder


def _config(package: Path, **values: Any) -> EvaluationConfig:
    given = {"tasks": ["shapes_colour", "shapes_name"], "include_path": str(TASKS), "limit": NUM_DOCUMENTS}
    return EvaluationConfig.parse({**given, "bootstrap_iters": 0, "model": {"path": str(package)}, **values})


def test_quantized_encoder_shows_against_a_reference_resident_and_recorded(
    package: Path, other: Path, tmp_path: Path
) -> None:
    found = []
    for mode in ("resident", "recorded"):
        against = {"path": str(package), "mode": mode, "records_dir": str(tmp_path / "records")}
        report = evaluate(_config(other, reference=against))
        found.append({(one.task, one.metric, one.filter): one.value for one in report.metrics})
    assert found[0] == pytest.approx(found[1], rel=1e-3, abs=1e-6)
    assert found[0]["shapes_colour", "kl_mean", "none"] > 1e-4
    assert found[0]["shapes_name", "kl_mean", "none"] > 1e-4
    same = evaluate(_config(package, reference={"path": str(package), "mode": "resident"}))
    kl = [one.value for one in same.metrics if one.metric == "kl_mean"]
    assert kl
    assert max(kl) < 1e-6


def test_second_run_takes_every_answer_from_the_journal_and_encodes_nothing(package: Path, tmp_path: Path) -> None:
    reports = []
    for _ in range(2):
        evaluate(_config(package, output_dir=str(tmp_path)))
        reports.append(json.loads((tmp_path / "report.json").read_text(encoding="utf-8")))
    executions = [report["results"]["config"]["execution"] for report in reports]
    assert [one["images_encoded"] for one in executions] == [NUM_DOCUMENTS, 0]
    assert [one["counters"]["tokens_fed"] > 0 for one in executions] == [True, False]
    metrics = [[(one["task"], one["metric"], one["value"]) for one in report["metrics"]] for report in reports]
    assert metrics[0] == metrics[1]


def test_worker_process_gives_the_same_answers_and_encodes_each_picture_once(package: Path, tmp_path: Path) -> None:
    found = []
    for isolation in ("none", "process"):
        folder = tmp_path / isolation
        report = evaluate(_config(package, output_dir=str(folder), isolation=isolation))
        execution = json.loads((folder / "report.json").read_text(encoding="utf-8"))["results"]["config"]["execution"]
        facts = execution["images_encoded"], execution["counters"]["tokens_fed"]
        found.append(([(one.task, one.metric, one.value) for one in report.metrics], *facts))
    assert found[0] == found[1]
    assert found[0][1] == NUM_DOCUMENTS
    assert "workers" in execution


def test_memory_does_not_grow_with_the_number_of_pictures(package: Path, tmp_path: Path) -> None:
    """Requests name files of 750 kB of pixels each; prepared pixels and features are kept within their budgets."""
    files = []
    for seed in range(24):
        files.append(tmp_path / f"{seed}.png")
        picture(seed, 500, 500).save(files[-1], compress_level=0)
    peaks = []
    with olive_ext.open(package) as session:
        session.loglikelihood([ScoringRequest("<image> and", " stone", images=files[:1])])
        assert session.media is not None
        session.media.processor.kept_bytes = 1 << 16
        for count in (4, 24):
            session.gc()
            tracemalloc.start()
            session.loglikelihood([ScoringRequest("<image> a", " stone", images=[file]) for file in files[:count]])
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]

"""A Hugging Face model run as its ONNX export: equal to transformers, made once, and left alone where it is not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import onnx
import pytest
import torch
from lm_eval.models.huggingface import HFLM

from olive_ext.config import EvaluationConfig, ModelSettings
from olive_ext.model import resolve
from olive_ext.report import Report
from olive_ext.run import evaluate, export
from olive_ext.run.export import exported
from olive_ext.session.local import read_texts
from tests.backends.local_tasks import NAMES, write_tasks
from tests.exports import genai_export, hf_model
from tests.refusals import tells
from tests.strangers import put_scaled

ON_TRANSFORMERS = "transformers (dtype float32; config.json names float32), "
MODEL = ModelSettings(model="", kind="hf", device="cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


def metrics(report: Report) -> dict[tuple[str, str, str], float]:
    return {(item.task, item.metric, item.filter): item.value for item in report.metrics}


def test_baseline_by_its_export_equals_lm_evals_hf(folder: Path) -> None:
    path = str(hf_model("llama"))
    values = {"tasks": NAMES, "include_path": str(folder), "bootstrap_iters": 0, "max_length": 128, "device": "cpu"}
    values["model_args"] = {"hflm_rolling_bos": True}
    config = EvaluationConfig.parse({"model": {"path": path}, **values})
    ours = evaluate(config)
    theirs = evaluate(config, lm=HFLM(path, device="cpu", max_length=128, dtype="float32", batch_size=8))
    assert (ours.model["kind"], theirs.model["kind"]) == ("hf", "hf")
    assert ours.model["deterministic"] is True
    assert "20 requests" in ours.model["export"]
    assert "export" not in theirs.model
    found, expected = metrics(ours), metrics(theirs)
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected, abs=1e-4, rel=1e-4)


def test_baseline_and_reference_ask_the_float_model_once(folder: Path, tmp_path: Path) -> None:
    path = str(hf_model("llama"))
    reference = {"path": path, "mode": "recorded", "records_dir": str(tmp_path)}
    values = {"tasks": NAMES, "include_path": str(folder), "bootstrap_iters": 0, "reference": reference}
    baseline = evaluate(EvaluationConfig.parse({"model": {"path": path}, **values}))
    candidate = evaluate(EvaluationConfig.parse({"model": {"path": str(genai_export("llama"))}, **values}))
    assert baseline.comparison is None
    assert candidate.comparison.reference["tokens_fed"] == 0
    assert candidate.comparison.reference["kind"] == "hf"
    assert candidate.comparison.metrics["results"] == baseline.results["results"]


def test_a_model_on_the_processor_is_exported_though_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model = resolve(MODEL.model_copy(update={"model": str(hf_model("llama"))}))
    assert export.obstacle(model) is None
    assert export.obstacle(model.patched({"device": None})) == "on a GPU transformers run it"


def test_export_ends_and_searches_as_its_checkpoint(tmp_path: Path) -> None:
    """Its own genai_config.json has neither: a checkpoint that suppresses all digits was "no difference found"."""
    shutil.copytree(hf_model("llama"), tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": 7, "suppress_tokens": [5]}))
    model = resolve(MODEL.model_copy(update={"model": str(tmp_path / "model")}))
    stops = read_texts(export._of(model, genai_export("llama"))).stops
    assert (stops.file, stops.ids, stops.search["suppress_tokens"]) == ("generation_config.json", {7}, [5])


def test_export_is_made_once_for_its_content() -> None:
    first, _ = exported(resolve(MODEL.model_copy(update={"model": str(hf_model("llama"))})))
    again, note = exported(resolve(MODEL.model_copy(update={"model": str(hf_model("llama"))})))
    assert first.kind == again.kind == "onnx"
    assert first.settings == again.settings
    assert "earlier" in note


def test_export_that_scores_differently_is_not_trusted(tmp_path: Path) -> None:
    model = resolve(MODEL.model_copy(update={"model": str(hf_model("llama"))}))
    made = Path(exported(model)[0].settings.model)
    shutil.copytree(made, tmp_path / made.name)
    compared = json.loads((made / "compared.json").read_text())
    (tmp_path / made.name / "compared.json").write_text(json.dumps({**compared, "largest_difference": 0.2}))
    found, note = exported(model, tmp_path)
    assert found is model
    assert tells(note, f"{ON_TRANSFORMERS}onnxruntime-genai 0.2 nats")


@pytest.mark.long
def test_export_that_was_edited_is_made_again(tmp_path: Path) -> None:
    model = resolve(MODEL.model_copy(update={"model": str(hf_model("llama"))}))
    made = Path(exported(model)[0].settings.model)
    shutil.copytree(made, tmp_path / made.name)
    weights = tmp_path / made.name / "model.onnx.data"
    weights.write_bytes(bytes(len(weights.read_bytes())))
    assert "exported" in exported(model, tmp_path)[1]
    assert weights.read_bytes() == (made / "model.onnx.data").read_bytes()


def test_builder_for_a_device_is_the_builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`.[gpu]` installs it as onnxruntime-genai-cuda."""
    (tmp_path / "own_builder_cuda-1.2.dist-info").mkdir()
    (tmp_path / "own_builder_cuda-1.2.dist-info" / "METADATA").write_text("Name: own-builder-cuda\nVersion: 1.2\n")
    model = resolve(MODEL.model_copy(update={"model": str(hf_model("llama"))}))
    monkeypatch.setattr(export, "BUILDER", "own-builder")
    assert "own-builder" in export._lack(model)
    monkeypatch.syspath_prepend(tmp_path)
    assert export._lack(model) is None


def test_check_finds_another_models_export() -> None:
    model = resolve(MODEL.model_copy(update={"model": str(hf_model("llama"))}))
    own, other = Path(exported(model)[0].settings.model), genai_export("llama", precision="int4")
    assert export._compared(model, own)["largest_difference"] < 1e-4
    assert export._compared(model, other)["largest_difference"] > 1e-3


def test_export_that_is_wrong_beyond_a_long_window_alone_is_not_trusted(tmp_path: Path) -> None:
    """The builder's Gemma 2 of 0.14 has the windows on the wrong layers, which texts within the window do not show."""
    folder, wide = genai_export("gemma2"), tmp_path / "wide"
    shutil.copytree(hf_model("gemma2"), wide)
    config = json.loads((wide / "config.json").read_text())
    (wide / "config.json").write_text(json.dumps(config | {"sliding_window": 256}))
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "local_window_size" and attribute.i > 0:
                attribute.i = 256
    shutil.copytree(folder, tmp_path / "made")
    (tmp_path / "made" / "model.onnx").write_bytes(model.SerializeToString())
    compared = export._compared(resolve(MODEL.model_copy(update={"model": str(wide)})), tmp_path / "made")
    assert compared["largest_difference"] > 0.1
    assert compared["requests"] == export.NUM_REQUESTS + 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "bfloat16"}, "float32 'dtype' bfloat16"),
        ({"device": "cuda:0"}, "GPU"),
        ({"model": "owner/name"}, "folder"),
    ],
)
def test_what_is_not_exported_says_why(changes: dict[str, str], reason: str) -> None:
    model = resolve(MODEL.model_copy(update={"model": str(hf_model("llama")), **changes}))
    found, note = exported(model)
    type_ = f"{model.settings.dtype}; {'config.json names float32' if model.size else 'no file names one'}"
    assert found == model
    assert tells(note, f"(dtype {type_}), {reason}")


@pytest.mark.long  # the builder's imports alone
def test_builder_that_fails_is_told_in_a_line(tmp_path: Path) -> None:
    model = resolve(MODEL.model_copy(update={"model": str(hf_model("gpt2"))}))
    found, note = exported(model, tmp_path)
    assert found is model
    assert tells(note, f"{ON_TRANSFORMERS}onnxruntime-genai cannot: ")
    assert [item.name for item in tmp_path.iterdir() if item.is_dir()] == []


@pytest.mark.long
@pytest.mark.usefixtures("forked_exports")
def test_export_of_a_checkpoint_with_code_is_made_anew_for_each_code(tmp_path: Path) -> None:
    path = Path(shutil.copytree(hf_model("llama"), tmp_path / "model"))
    notes = []
    reading = "float((HERE / 'times.txt').read_text())"
    for times, code in (("1", "1"), ("1", "3"), ("1", reading), ("3", reading)):
        (path / "times.txt").write_text(times)
        put_scaled(path, code)
        settings = MODEL.model_copy(update={"model": str(path), "dtype": "float32", "trust_remote_code": True})
        notes.append(exported(resolve(settings), tmp_path / "exports")[1])
    assert ["within" in note for note in notes] == [True, False, True, False]
    assert ["scores" in note for note in notes] == [False, True, False, True]

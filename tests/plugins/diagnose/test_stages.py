"""The distance to a checkpoint by stage: of a quantized export, and of one whose conversion changed a layer. Which
stage is said to have lost, and which is called innocent: never one that would be noticed alone."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from olive_ext.config import EvaluationConfig, ModelSettings
from olive_ext.errors import OliveExtError
from olive_ext.model import resolve
from olive_ext.model.providers.devices import Provider
from olive_ext.plugins.diagnose import conversion, findings
from olive_ext.plugins.diagnose.findings import refuse_stages, stage_of, with_stages
from olive_ext.report import Report, from_json, numbers
from olive_ext.report.comparison import ClaimResult, Comparison, Spread
from olive_ext.report.diagnosis import Stage, stage_sentences
from olive_ext.report.verdict import verdict
from olive_ext.run import evaluate
from olive_ext.run.export import float_export
from olive_ext.run.models import Models
from olive_ext.run.reference.comparison_run import TaskRun
from tests.backends.local_tasks import write_tasks
from tests.exports import export, genai_export, hf_model
from tests.exports.edited import change, edited, weight
from tests.refusals import refused
from tests.report.test_comparison import divergence, outcome
from tests.run.reference.test_sampled_run import COUNT, write_many

pytestmark = pytest.mark.usefixtures("forked_exports")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


def rounded(model: onnx.ModelProto) -> None:
    """A weight to 4 bits, as quantization would."""

    def to_4_bits(values: np.ndarray) -> np.ndarray:
        scale = np.abs(values).max() / 7
        return np.round(values / scale) * scale

    change(weight(model, "layers.0", "down_proj"), to_4_bits)


def staged(folder: Path, model: Path, family: str, float_model: Path, **more: Any) -> Report:
    reference = {"path": str(hf_model(family)), "float_model": str(float_model), "mode": "resident", "export": "never"}
    reference |= {key: more.pop(key) for key in ("mode", "records_dir", "export") if key in more}
    values = {"tasks": ["tiny_choice"], "include_path": str(folder), "bootstrap_iters": 0, "max_length": 64}
    return evaluate(EvaluationConfig.parse({"model": {"path": str(model)}, "reference": reference, **values, **more}))


def test_quantization_is_charged_where_the_conversion_lost_nothing(folder: Path, tmp_path: Path) -> None:
    package = export("llama-genai-0.14-int4")
    report = staged(folder, package.path, "llama", genai_export("llama"), output_dir=str(tmp_path / "out"))
    conversion, quantization = report.comparison.stages
    assert (conversion.name, quantization.name) == ("conversion", "quantization")
    assert conversion.kl_mean < 1e-6
    overall = report.comparison.overall_divergence()
    assert quantization.kl_mean == pytest.approx(overall.kl.mean, rel=1e-3)
    assert conversion.finding == ""
    assert "quantization lost it (KL" in (tmp_path / "out" / "report.md").read_text()
    page = (tmp_path / "out" / "report.html").read_text()
    assert 'class="parts"' in page
    text = (tmp_path / "out" / "report.json").read_text()
    assert json.loads(text)["comparison"]["stages"][1]["kl_mean"] == quantization.kl_mean
    assert from_json(text).comparison == report.comparison


def test_conversion_is_charged_and_its_layer_is_named(folder: Path, tmp_path: Path) -> None:
    def tripled(model: onnx.ModelProto) -> None:
        change(weight(model, "layers.1", "o_proj"), lambda values: 3 * values)

    converted = edited(genai_export("llama"), tmp_path / "float", tripled)
    quantized = edited(converted, tmp_path / "quantized", rounded)
    report = staged(folder, quantized, "llama", converted, output_dir=str(tmp_path / "out"))
    conversion, quantization = report.comparison.stages
    assert conversion.kl_mean > quantization.kl_mean > 0
    assert "layer 1 (self_attn)" in conversion.finding
    assert "the conversion: differs from" in (tmp_path / "out" / "report.md").read_text().replace("\\", "")


def test_float_model_that_is_exported_is_held_against_transformers(folder: Path) -> None:
    report = staged(folder, export("llama-genai-0.14-int4").path, "llama", Path("export"), export="auto")
    checkpoint = resolve(ModelSettings(model=str(hf_model("llama")), device="cpu"))
    conversion, quantization = report.comparison.stages
    assert 0 < conversion.kl_mean < 1e-6 < quantization.kl_mean
    assert report.comparison.reference["float_model"] == str(float_export(checkpoint))


def test_float_model_that_is_the_evaluated_one_has_no_stages(folder: Path) -> None:
    report = staged(folder, genai_export("llama"), "llama", genai_export("llama"))
    assert report.comparison.stages == ()


def test_stage_that_fails_is_a_warning_and_the_report_stands(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = edited(genai_export("llama"), tmp_path / "float", lambda model: model.graph.initializer.pop())
    with caplog.at_level(logging.WARNING, "olive"):
        report = staged(folder, export("llama-genai-0.14-int4").path, "llama", broken)
    assert report.comparison.stages == ()
    assert "stages" in caplog.text


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ({"path": "onnx", "float_model": "onnx"}, {"code": "wrong_value"}),
        ({"path": "hf", "float_model": "hf"}, {"code": "unsupported", "holds": "ONNX"}),
        ({"path": "hf", "float_model": "int4"}, {"code": "wrong_value"}),
        (
            {"path": "hf", "float_model": "/nowhere"},
            {"code": "not_found", "field": "reference.float_model", "value": "/nowhere"},
        ),
        (
            {"path": "hf", "float_model": "auto"},
            {"code": "contradiction", "field": "reference.float_model", "value": "auto", "holds": "export"},
        ),
        (
            {"path": "owner/name", "float_model": "export"},
            {"code": "wrong_value", "field": "reference.float_model", "value": "export"},
        ),
        ({"path": "onnx", "float_model": "export"}, {"code": "wrong_value"}),
    ],
)
def test_float_model_that_cannot_be_is_refused_before_anything_runs(
    folder: Path, reference: dict[str, str], message: dict[str, Any]
) -> None:
    places = {"onnx": str(genai_export("llama")), "hf": str(hf_model("llama"))}
    places["int4"] = str(export("llama-genai-0.14-int4").path)
    named = {key: places.get(value, value) for key, value in reference.items()}
    values = {"tasks": ["tiny_choice"], "include_path": str(folder), "model": {"path": str(genai_export("qwen3"))}}
    with refused(OliveExtError, **message):
        evaluate(EvaluationConfig.parse({**values, "reference": named}))


@pytest.mark.parametrize("mode", ["recorded", pytest.param("resident", marks=pytest.mark.long)])
def test_drawn_documents_are_those_of_every_stage(tmp_path: Path, mode: str) -> None:
    folder = write_tasks(tmp_path / "tasks")
    write_many(folder)
    evaluated: list[tuple[str, set[int]]] = []
    original = TaskRun.finish

    def noted(self: TaskRun, lm: Any) -> Any:
        samples = {int(line["doc_id"]) for line in self.samples["many_choice"]}
        evaluated.append((self._models.config.documents, samples))
        return original(self, lm)

    claim = {"metric": "kl_mean", "above": 0.01}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TaskRun, "finish", noted)
        report = staged(
            folder, export("llama-genai-0.14-int4").path, "llama", genai_export("llama"), tasks=["many_choice"],
            documents="enough", certain=claim, mode=mode, records_dir=str(tmp_path / "records"),
        )  # fmt: skip
    comparison = report.comparison
    assert comparison.certainty.num_evaluated < COUNT
    assert [documents for documents, _ in evaluated] == ["enough", "all", "all"]
    assert evaluated[0][1] == evaluated[1][1] == evaluated[2][1]
    assert len(evaluated[0][1]) == comparison.certainty.num_evaluated
    conversion, quantization = comparison.stages
    whole = comparison.overall_divergence()
    assert conversion.is_exact
    assert quantization.kl_mean == pytest.approx(whole.kl.mean, rel=1e-3)
    assert quantization.kl_stderr == pytest.approx(whole.kl.stderr, rel=1e-2)


def test_stage_that_loses_more_answers_than_is_claimed_is_a_loss_alone() -> None:
    own = ("choice", "acc", "none")
    claim = ClaimResult("accuracy_difference", "above", -0.01, 0.95, "ok", 0, -0.01, 0.01, 40, 400, "", own)
    whole = Comparison({}, certainty=claim)
    for difference, is_loss in (-0.02, True), (-0.005, False):
        answers = outcome(difference=difference, low=-0.05, high=0.02, mcnemar_p=0.5)
        alone = Comparison({}, (divergence(kl=0.001, perplexity_ratio=1.0),), (answers,))
        assert stage_of("quantization", alone, whole).is_loss == is_loss


CUDA = "CUDAExecutionProvider"


def planned(monkeypatch: pytest.MonkeyPatch, provider: str, **values: Any) -> dict[str, EvaluationConfig]:
    """The evaluation of each stage of a quantized model on `provider`, none of which is made."""
    config = EvaluationConfig.parse(
        {"tasks": ["a"], "model": {"path": str(export("llama-genai-0.14-int4").path)}, **values}
    )
    models = Models(config)
    monkeypatch.setitem(vars(models.given_candidate), "providers", (Provider(provider, "gpu"),))
    refuse_stages(models)
    evaluated: list[EvaluationConfig] = []

    def compare(one: EvaluationConfig) -> Comparison:
        evaluated.append(one)
        return Comparison({}, (divergence(kl=1e-9),))

    whole = with_stages(Report((), comparison=Comparison({}, (divergence(),))), models, compare).comparison
    return dict(zip([stage.name for stage in whole.stages], evaluated, strict=True))


def places(config: EvaluationConfig) -> tuple[Any, Any]:
    """Where a stage's model and its reference run; None is where the candidate does."""
    return config.execution_provider, config.reference.execution_provider


def test_stages_run_where_the_model_does(monkeypatch: pytest.MonkeyPatch) -> None:
    float_model, own = str(genai_export("llama")), str(export("llama-genai-0.14-int4").path)
    reference = {"path": str(hf_model("llama")), "float_model": float_model}
    options: dict[str, Any] = {"engine": {"scoring": "packed"}, "provider_options": {"device_id": 1}}
    parts = planned(monkeypatch, CUDA, reference=reference, execution_provider="cuda", **options)
    assert list(parts) == ["conversion", "quantization"]
    assert [places(part) for part in parts.values()] == [("cuda", None)] * 2
    paths = [(part.model.path, part.reference.path) for part in parts.values() if part.reference is not None]
    assert paths == [(float_model, reference["path"]), (own, float_model)]
    assert [part.engine.scoring for part in parts.values()] == ["packed"] * 2
    assert [part.provider_options for part in parts.values()] == [{"device_id": 1}] * 2


def test_onnx_reference_alone_leaves_no_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert planned(monkeypatch, CUDA, reference=str(genai_export("llama"))) == {}


def test_remark_that_fails_in_any_way_costs_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise KeyError("a module that has another name")

    monkeypatch.setattr(conversion, "hold_against", failing)
    monkeypatch.setattr(findings, "_float_model", lambda *_: object())
    models: Any = SimpleNamespace(given_reference=None)
    assert "a module that has another name" in findings._finding(models)


NEAREST = 0.01
NAN = float("nan")


def sentences(*stages: Stage, most_kl: float = NEAREST) -> list[str]:
    return [text.replace(numbers.MINUS, "-") for text in stage_sentences(stages, most_kl)]


@pytest.mark.parametrize(
    ("conversion", "quantization", "text"),
    [
        (0.82, 0.0031, "the conversion lost it (KL 0.820 nats); quantization did not (KL 0.00310 nats)"),
        (1e-11, 0.02, "quantization lost it (KL 0.0200 nats); the conversion did not (KL 1.0e-11 nats)"),
        (0.1, 0.2, "both stages lost: quantization KL 0.200 nats, the conversion KL 0.100 nats"),
        (5.0, 0.5, "both stages lost: the conversion KL 5.00 nats, quantization KL 0.500 nats"),
        (0.82, 0.0095, "both stages lost: the conversion KL 0.820 nats, quantization KL 0.00950 nats"),
        (0.02, 0.002, "both stages lost: the conversion KL 0.0200 nats, quantization KL 0.00200 nats"),
        (1e-9, 1e-10, "neither the conversion nor quantization lost anything: at most KL 1.0e-09 nats"),
        (NAN, 0.2, "the stages cannot be separated: the conversion KL not a number nats, quantization KL 0.200 nats"),
    ],
)
def test_two_stages(conversion: float, quantization: float, text: str) -> None:
    stages = (
        Stage("conversion", conversion, None, 0.9, finding="equal up to 17 tokens"),
        Stage("quantization", quantization, 0.001, 0.97),
    )
    assert sentences(*stages) == [text, "the conversion: equal up to 17 tokens"]


def test_single_document_makes_nobody_innocent() -> None:
    """It has no interval."""
    assert sentences(Stage("conversion", 0.8, None, 0.5), Stage("quantization", 0.001, None, 1.0)) == [
        "both stages lost: the conversion KL 0.800 nats, quantization KL 0.00100 nats"
    ]


def test_one_stage_is_not_told_apart_from_anything() -> None:
    assert sentences(Stage("quantization", 0.8, 0.1, 0.5)) == []


shares = st.floats(0.0, 1.0)
distances = st.floats(-9, 1).map(lambda power: 10.0**power)


@st.composite
def alone(draw: st.DrawFn) -> Comparison:
    """The comparison of a stage's model with the one before it."""
    kl, half = draw(distances), draw(st.floats(0, 0.05))
    spread = Spread(kl, draw(st.none() | st.floats(0, 1).map(lambda part: part * kl)), kl, kl, kl, kl, 3 * kl)
    difference = draw(st.floats(-0.2, 0.2))
    own = outcome(difference=difference, low=difference - half, high=difference + half, mcnemar_p=draw(shares))
    error = draw(st.none() | st.floats(0, 0.1))
    distance = divergence(
        "choice", kl=0, perplexity_ratio=1.0, perplexity_ratio_stderr=1e-6, top1_agreement=draw(shares) ** 0.1,
        top1_agreement_stderr=error,
    )  # fmt: skip
    return Comparison({}, (replace(distance, kl=spread),), (own,))


@given(conversion=alone(), quantization=alone(), bound=st.none() | distances)
def test_innocent_stage_never_breaks_the_verdict_alone(
    conversion: Comparison, quantization: Comparison, bound: float | None
) -> None:
    parts = {"the conversion": conversion, "quantization": quantization}
    claim = None
    if bound is not None:
        claim = ClaimResult("kl_mean", "below", bound, 0.95, "loss", bound, bound, bound, 40, 400, "")
    stages = (
        stage_of("conversion", conversion, conversion),
        stage_of("quantization", quantization, quantization),
    )
    whole = Comparison({}, (divergence("choice", kl=1.0),), (outcome(),), certainty=claim, stages=stages)
    sentence = next(line for line in verdict(whole).lines if "lost" in line and "KL" in line)
    match = re.search(r"(?:^|; )((?:(?!; ).)*) did not", sentence)
    innocent = re.split(", | and ", match[1]) if match is not None else []
    if sentence.startswith("neither"):
        innocent = list(parts)
    largest = max(stage.kl_mean for stage in stages)
    for title in innocent:
        overall = parts[title].overall_divergence()
        assert verdict(parts[title]).code not in ("loss", "small_loss", "distant", "claim_broken")
        assert overall.kl.mean < 1e-6 or overall.kl.mean <= 0.1 * largest
        assert bound is None or overall.kl.mean <= max(1e-6, bound)

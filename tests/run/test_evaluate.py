"""`evaluate` end to end on a session that answers from a tiny model, with HFLM on the same weights beside it."""

from __future__ import annotations

import json
import math
import sys
from contextlib import closing
from dataclasses import replace
from datetime import date
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from olive_ext.config import EvaluationConfig
from olive_ext.errors import ConfigError, ModelError, OliveExtError, RecordsError, RunError, TaskError
from olive_ext.records.journal import Journal
from olive_ext.report import Metric, Report
from olive_ext.report.page import check_comparable
from olive_ext.run import evaluate
from tests.backends.local_tasks import CHOICE, NAMES, write_tasks
from tests.backends.reference import ForwardEngine, hflm, model, ort_lm
from tests.exports import genai_export
from tests.refusals import refused, tells
from tests.session.tiny import TEMPLATE, byte_level


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tasks(tmp_path / "tasks")


def config(folder: Path, tasks: list[Any] | None = None, **settings: Any) -> EvaluationConfig:
    given = {"tasks": tasks or NAMES, "include_path": str(folder), "bootstrap_iters": 0, **settings}
    return EvaluationConfig.parse({"model": {"path": "nowhere"}, **given})


def numbers(report: Report) -> dict[tuple[str, str, str], float]:
    return {(metric.task, metric.metric, metric.filter): metric.value for metric in report.metrics}


def test_metrics_are_hflms(folder: Path) -> None:
    ours = evaluate(config(folder), lm=ort_lm(has_bos=False))
    theirs = evaluate(config(folder), lm=hflm(has_bos=False))
    assert numbers(ours) == pytest.approx(numbers(theirs), rel=1e-5)
    assert set(numbers(ours)) == {
        ("tiny_choice", "acc", "none"),
        ("tiny_choice", "acc_norm", "none"),
        ("tiny_rolling", "word_perplexity", "none"),
        ("tiny_rolling", "bits_per_byte", "none"),
        ("tiny_generate", "exact_match", "strict"),
        ("tiny_generate", "exact_match", "loose"),
    }


def test_path_and_keywords_a_mapping_and_a_config_are_one_evaluation(folder: Path) -> None:
    given: dict[str, Any] = {"tasks": ["tiny_choice"], "include_path": folder, "bootstrap_iters": 0, "limit": 2}
    whole = EvaluationConfig.parse({"model": {"path": "nowhere"}, **given, "include_path": str(folder)})
    reports = [
        evaluate("nowhere", lm=ort_lm(), **given),
        evaluate(Path("nowhere"), lm=ort_lm(), **given),
        evaluate({"model": "nowhere", **given}, lm=ort_lm()),
        evaluate(model="nowhere", lm=ort_lm(), **given),
        evaluate({"model": {"path": "nowhere"}, **given, "limit": 3}, lm=ort_lm(), limit=2),
        evaluate(whole, lm=ort_lm()),
    ]
    assert {json.dumps(report.config) for report in reports} == {json.dumps(reports[-1].config)}
    assert all(numbers(report) == numbers(reports[-1]) for report in reports)


def test_chat_template_metrics_are_hflms(folder: Path) -> None:
    chat = {"apply_chat_template": True, "system_instruction": "be short", "tasks": ["tiny_choice"]}
    ours = evaluate(config(folder, **chat), lm=ort_lm())
    theirs = evaluate(config(folder, **chat), lm=hflm())
    assert ours.results["chat_template_sha"] == theirs.results["chat_template_sha"]
    assert numbers(ours) == pytest.approx(numbers(theirs), rel=1e-5)


def test_documents_that_are_their_own_examples_are_counted(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """lm-eval draws from the split that is evaluated where a task has no other, and takes out no document."""
    evaluate(config(folder, ["tiny_choice"], num_fewshot=2), lm=ort_lm())
    told = "'tiny_choice' 1 of 6 'fewshot_split: test'"
    assert tells(caplog.text, told)
    caplog.clear()
    (folder / "tiny_choice.yaml").write_text(CHOICE + "fewshot_split: test\n")
    evaluate(config(folder, ["tiny_choice"], num_fewshot=2), lm=ort_lm())
    assert "fewshot_split" not in caplog.text


def test_report_says_the_day_where_the_chat_template_prints_it(folder: Path) -> None:
    lm = ort_lm()
    before, lm.tokenizer.chat_template = lm.tokenizer.chat_template, "{{ strftime_now('%Y') }}" + TEMPLATE
    try:
        report = evaluate(config(folder, ["tiny_choice"], apply_chat_template=True), lm=lm)
    finally:
        lm.tokenizer.chat_template = before
    assert report.results["chat_template_date"] == str(date.today())
    yesterday = replace(report, results={**report.results, "chat_template_date": "2026-01-01"})
    with refused(ConfigError, "not_comparable", holds=("2026-01-01", "chat_template_date")):
        check_comparable([("a", yesterday), ("b", report)])


def test_chat_template_is_chosen_by_name_and_a_wrong_name_refused(folder: Path) -> None:
    lm = ort_lm()
    single, lm.tokenizer.chat_template = lm.tokenizer.chat_template, {"default": TEMPLATE, "short": "{{ 'q' }}"}
    try:
        chosen = evaluate(config(folder, ["tiny_choice"], apply_chat_template="short"), lm=lm)
        plain = evaluate(config(folder, ["tiny_choice"], apply_chat_template=True), lm=lm)
        shas = [report.results["chat_template_sha"] for report in (chosen, plain)]
        assert shas == [sha256(template.encode()).hexdigest() for template in ("{{ 'q' }}", TEMPLATE)]
        with refused(ConfigError, "not_comparable", holds=("chat_template_sha", "plain", "other")):
            check_comparable([("plain", plain), ("other", replace(plain, results=chosen.results))])
        assert chosen.engine["tokens_fed"] < plain.engine["tokens_fed"] - chosen.engine["tokens_fed"]
        with refused(ConfigError, "wrong_value", "apply_chat_template", "long", holds=("default", "short")):
            evaluate(config(folder, ["tiny_choice"], apply_chat_template="long"), lm=lm)
    finally:
        lm.tokenizer.chat_template = single
    with refused(ConfigError, "wrong_value", "apply_chat_template", "long"):
        evaluate(config(folder, ["tiny_choice"], apply_chat_template="long"), lm=lm)


def test_report_says_what_ran(folder: Path) -> None:
    report = evaluate(config(folder, limit=4), lm=ort_lm())
    perplexity = next(metric for metric in report.metrics if metric.metric == "word_perplexity")
    assert not perplexity.higher_is_better
    assert (perplexity.n, perplexity.stderr) == (4, None)
    assert all(metric.higher_is_better for metric in report.metrics if metric.metric.startswith("acc"))
    assert report.engine["tokens_fed"] > 0
    assert 0 < report.engine["seconds_tasks"] + report.engine["seconds_candidate"] <= report.engine["seconds"]
    assert report.providers == ({"name": "CPUExecutionProvider"},)
    assert report.model["kind"] == "onnx"
    assert report.config["limit"] == 4
    assert {"lm-eval", "olive-ext"} <= set(report.versions)
    assert "samples" not in report.results
    assert "sample_len" not in {metric.metric for metric in report.metrics}


def test_interrupted_run_resumes_and_computes_only_the_chunk_in_flight_again(folder: Path, tmp_path: Path) -> None:
    whole = ForwardEngine()
    expected = evaluate(config(folder), lm=ort_lm(engine=whole))
    num_answers = evaluate(config(folder, output_dir=str(tmp_path)), lm=ort_lm()).model["journal"]["answers_written"]
    known = []
    for fails_after in range(1, len(whole.requests), 6):
        stem = str(tmp_path / str(fails_after) / "answers")
        first, second, third = ForwardEngine(), ForwardEngine(), ForwardEngine()
        first.fails_after = fails_after
        with pytest.raises(KeyboardInterrupt):
            evaluate(config(folder, use_cache=stem), lm=ort_lm(engine=first))
        report = evaluate(config(folder, use_cache=stem), lm=ort_lm(engine=second))
        assert numbers(report) == numbers(expected)
        known.append(report.model["journal"]["answers_known"])
        assert report.model["journal"]["answers_used"] == known[-1]
        assert len(second.requests) == report.model["journal"]["answers_written"] == num_answers - known[-1]
        assert numbers(evaluate(config(folder, use_cache=stem), lm=ort_lm(engine=third))) == numbers(expected)
        assert third.requests == []
    assert len(set(known)) > 2


def test_answers_are_asked_anew_where_they_are_not_to_be_resumed(folder: Path, tmp_path: Path) -> None:
    out, asked = str(tmp_path / "out"), []
    for given in ({}, {}, {"resume": False}, {"tasks": ["tiny_choice", "tokens_per_second"]}):
        engine = ForwardEngine()
        evaluate(config(folder, **{"tasks": ["tiny_choice"], "output_dir": out, **given}), lm=ort_lm(engine=engine))
        asked.append(len(engine.requests))
    assert asked[0] == asked[2] == asked[3] > 0
    assert asked[1] == 0


def test_a_second_run_on_a_journal_in_use_is_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    given = config(folder, ["tiny_choice"], output_dir=str(tmp_path))
    expected = evaluate(given, lm=ort_lm())
    file = Path(expected.model["journal"]["file"])
    facts = json.loads(file.read_text(encoding="utf-8").splitlines()[0][9:])["facts"]
    with closing(Journal(file, facts)), refused(RecordsError, "records", holds=("'output_dir'", "'use_cache'")):
        evaluate(given, lm=ort_lm())
    assert numbers(evaluate(given, lm=ort_lm())) == numbers(expected)


def test_cached_answers_of_another_model_are_not_taken(folder: Path, tmp_path: Path) -> None:
    stem = str(tmp_path / "answers")
    evaluate(config(folder, use_cache=stem), lm=ort_lm())
    other = ForwardEngine(context_length=40)
    evaluate(config(folder, use_cache=stem), lm=ort_lm(engine=other))
    assert other.requests
    assert len(list(tmp_path.glob("answers_*.jsonl"))) == 2
    with refused(ConfigError, "wrong_value", "use_cache"):
        evaluate(config(folder, use_cache=stem), lm=hflm())


def test_missing_folder_task_and_model_are_refused_by_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model before the task, its reference and the package of its workers."""
    for field, more in (
        ("model", {}),
        ("reference", {"model": {"path": str(genai_export("llama"))}, "reference": "nowhere"}),
    ):
        with refused(ModelError, "not_found", field, "nowhere"):
            evaluate(config(folder, ["unknown_task"], **more))
    monkeypatch.setitem(sys.modules, "ray", None)
    with refused(ConfigError, "needs_package", "workers", holds="'.[ray]'"):
        evaluate(config(folder, ["unknown_task"], model={"path": str(genai_export("llama"))}, workers=2))


def test_failing_task_code_is_one_line_and_writes_nothing(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with refused(TaskError, "task", holds=("tiny_broken", "document 0", "no such field", "local.py, line 14")):
        evaluate(config(folder, ["tiny_broken"], output_dir=str(out), sample_log_num=1), lm=ort_lm())
    assert [path.name for path in out.iterdir()] == ["journal"]


@pytest.mark.parametrize(("error", "kind"), [(MemoryError("full"), RunError), (RunError("step 3"), RunError)])
def test_failing_machine_is_a_run_error(folder: Path, error: Exception, kind: type[OliveExtError]) -> None:
    engine = ForwardEngine()
    engine.fails_after, engine.error = 3, error
    with pytest.raises(kind):
        evaluate(config(folder), lm=ort_lm(engine=engine))


@pytest.mark.usefixtures("forked_exports")
def test_hf_model_is_opened_measured_and_scored(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "hf"
    model().save_pretrained(path)
    byte_level(False).hf.save_pretrained(path)
    values = {"path": str(path)}
    given = EvaluationConfig.parse(
        {"model": values, "tasks": ["size_on_disk", "tiny_choice"], "include_path": str(folder), "max_length": 48,
         "device": "cpu", "bootstrap_iters": 0}
    )  # fmt: skip
    report = evaluate(given)
    assert report.model["kind"] == "hf"
    size = (path / "model.safetensors").stat().st_size
    assert report.metrics[-1] == Metric("size_on_disk", "bytes", "none", float(size), None, False, None)
    assert (
        report.metrics[0].value == evaluate(config(folder, ["tiny_choice"]), lm=ort_lm(has_bos=False)).metrics[0].value
    )


def test_size_alone_opens_no_model(tmp_path: Path) -> None:
    import onnx
    from onnx import TensorProto, helper

    value = helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1])
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["logits"])], "g", [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])], [value])  # fmt: skip
    onnx.save(helper.make_model(graph), tmp_path / "model.onnx")
    byte_level(False).hf.save_pretrained(tmp_path)
    given = EvaluationConfig.parse({"model": {"path": str(tmp_path)}, "tasks": ["size_on_disk"]})
    (metric,) = evaluate(given).metrics
    assert metric.value == (tmp_path / "model.onnx").stat().st_size
    assert math.isfinite(metric.value)

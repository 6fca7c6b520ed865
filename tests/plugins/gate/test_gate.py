"""The gate: what passes, fails and cannot be told, what it writes for machines, and what it refuses by name."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from olive_ext.cli import main
from olive_ext.config import LossBound
from olive_ext.errors import ConfigError, NotComparableError
from olive_ext.plugins.gate.decision import (
    GateBound,
    GateResult,
    annotation_lines,
    gate,
    gate_answers,
    junit,
    lines,
    markdown,
    read_baseline,
    refuse_other_definitions,
)
from olive_ext.report import from_json, to_json
from olive_ext.report.changes import changes_of
from olive_ext.report.comparison import Comparison
from olive_ext.report.metrics import comparison_metrics
from olive_ext.report.report import plain
from olive_ext.report.verdict import EXIT_STATUS, Reason, Verdict, verdict, worst_status
from olive_ext.run import compare
from olive_ext.run.bounds import broken_bounds
from olive_ext.run.earlier_reports import load
from olive_ext.run.reference.answers import Answers, DocumentAnswer, packed, unpacked
from olive_ext.run.reference.pairing import compare_answers, compare_texts
from olive_ext.stats.paired_answers import compare_outcomes
from tests.backends.local_tasks import write_tasks
from tests.refusals import refused, tells
from tests.run.test_against_reference import answered, copied, with_ends
from tests.run.test_earlier_reports import line, place, results, with_comparison

ROOT = Path(__file__).resolve().parents[3]
NUMBER = 400


def rows(wrong: int, count: int = NUMBER, prefix: str = "p") -> list[dict[str, Any]]:
    """The log of `count` documents, the first `wrong` of which are answered wrongly."""
    return [line(number, number >= wrong, prompt_hash=f"{prefix}{number}") for number in range(count)]


def folder(parent: Path, name: str, wrong: int, *, count: int = NUMBER, prefix: str = "p") -> Path:
    """An evaluation of `count` documents, the first `wrong` of which are answered wrongly."""
    return place(parent, name, rows(wrong, count, prefix))


def held(run: Path, file: Path, within: float | None = None) -> GateResult:
    """The decision on a folder."""
    return gate(str(run), str(file), within)


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    """The baseline of an evaluation with 40 wrong answers of 400."""
    file = tmp_path / "baseline.json"
    assert main(["gate", str(folder(tmp_path, "before", 40)), "--baseline", str(file), "--update-baseline"]) == 0
    return file


@pytest.mark.parametrize(
    ("wrong", "within", "status", "words"),
    [
        (40, 1.0, 0, "passed"),
        (80, 1.0, 1, "loss: colours acc"),
        (42, 1.0, 3, "cannot tell: colours acc"),
        (42, 5.0, 0, "passed"),
    ],
)
def test_statuses_tell_passed_lost_and_unknown(
    wrong: int, within: float, status: int, words: str, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """0, 1 and 3 go with the verdict's own words, for the documents that both have."""
    run = folder(baseline.parent, "after", wrong)
    assert main(["gate", str(run), "--baseline", str(baseline), "--within", str(within)]) == status
    out = capsys.readouterr().out
    assert tells(out, words)
    assert "400 documents" in out
    assert [line[:8] for line in out.splitlines() if "next:" in line] == ["  next: "] * (status != 0)
    assert "fail_on_loss" not in out, "the gate refuses it"
    assert ("(`--within 1.8`)" in out) == (status == 3)


def test_baseline_keeps_every_value_number_and_error(baseline: Path) -> None:
    """What was packed comes back: numbers, values, margins, the metric with its error, the versions."""
    read = read_baseline(baseline)
    (answers,) = unpacked(read.documents)
    assert [item.values["acc"] for item in answers.by_document.values()] == [0.0] * 40 + [1.0] * 360
    assert list(answers.by_document) == list(range(NUMBER))
    assert {item.margin for item in answers.by_document.values()} == {1.0}
    assert (read.metrics[0].value, read.metrics[0].stderr) == (0.9, 0.1)
    assert read.versions
    assert baseline.stat().st_size < 20_000


def other_choice(item: dict[str, Any]) -> dict[str, Any]:
    (prompt, _), *rest = item["arguments"]
    return {"arguments": [(prompt, " violet"), *rest]}


def other_picture(item: dict[str, Any]) -> dict[str, Any]:
    return {"arguments": [(*texts, {"visual": ["another"]}) for texts in item["arguments"]]}


def asked(change: Callable[[dict[str, Any]], dict[str, Any]]) -> list[dict[str, Any]]:
    """The baseline's answers, with something else in the first 30."""
    return [item | change(item) if number < 30 else item for number, item in enumerate(rows(40))]


LESS = "370 of 400 30 documents of the baseline without a value in the run 370 documents"
KNOWN = rows(40, 300)
OF_300 = results("metrics", [{"task": "colours", "metric": "acc", "filter": "none", "value": 260 / 300, "n": 300}])
CORPUS = results("results.results", {"colours": {"acc,none": 0.9, "f1,none": 0.1}})
HELD: dict[str, tuple[list[dict[str, Any]], Callable[[dict[str, Any]], Any], str, str]] = {
    # What is asked otherwise may all be lost; another place of the same question is nothing.
    "another prompt": (asked(lambda _: {"prompt_hash": "another"}), id, "too_few", LESS),
    "another target": (asked(lambda _: {"target_hash": "another"}), id, "too_few", LESS),
    "another choice": (asked(other_choice), id, "too_few", LESS),
    "another picture": (asked(other_picture), id, "no_loss_found", "370 of 400"),
    "another column": (asked(lambda _: {"doc_hash": "column"}), id, "no_difference", "400 documents"),
    "another order": (asked(lambda item: {"doc_id": 29 - item["doc_id"]}), id, "no_difference", "400 documents"),
    "another place": (asked(lambda item: {"doc_id": item["doc_id"] + 1000}), id, "no_difference", "400 documents"),
    "fewer by a limit": (rows(40, 80), results("config.limit", 80), "too_few", "320 (limit 80)"),
    "100 are not there": (KNOWN, id, "too_few", "100"),
    "100 have no value": ([*KNOWN, *({**item, "acc": math.nan} for item in rows(0)[300:])], OF_300, "damaged", "100"),
    # What nothing judges by document, of this task and of another, and what its documents do not reach.
    "a value of the corpus": (rows(40), CORPUS, "no_values", "colours f1"),
    "of another task": (
        rows(40), results("results.configs.shapes", {"metric_list": [{"metric": "f1"}]}), "no_values", "shapes",
    ),
    "the last token alone": (rows(40), results("model.parts_failure", "11 nats off"), "damaged", "11 nats"),
    "a file": (rows(40), results("model.unjudged", {"tokenizer_config.json": "x"}), "damaged", "tokenizer_config"),
}  # fmt: skip


@pytest.mark.parametrize("name", HELD)
def test_run_passes_where_every_document_of_the_baseline_is_judged(name: str, baseline: Path) -> None:
    log, change, code, words = HELD[name]
    gated = held(place(baseline.parent, "after", log, change), baseline, 5.0)
    assert (gated.verdict.code, gated.status) == (
        code,
        "ok" if code.startswith("no_") and code != "no_values" else "unknown",
    )
    assert tells(gated, words)
    assert ("no answer" in str(gated)) == (name == "100 have no value")


ROUNDED = {"head": "is rounded"}


@pytest.mark.parametrize("damage", [results("model.parts_failure", "11 nats off"), with_comparison(damaged=ROUNDED)])
def test_damage_that_the_baseline_has_is_no_worse(
    damage: Callable[[dict[str, Any]], Any], baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is new, by name or text, counts. The baseline is not written without a word."""
    run = place(baseline.parent, "known", rows(40), damage)
    assert main(["gate", str(run), "--baseline", str(baseline), "--update-baseline"]) == 0
    assert tells(capsys.readouterr().err, "WARNING damaged")
    gated = held(run, baseline)
    assert (gated.status, tells(gated.notes, "head")) == ("ok", not read_baseline(baseline).model.get("parts_failure"))
    for number, other in enumerate(({"head": "is all zeros"}, {**ROUNDED, "tail": "is rounded"})):
        gated = held(place(baseline.parent, f"other{number}", rows(40), with_comparison(damaged=other)), baseline)
        assert (gated.status, gated.verdict.code) == ("unknown", "damaged")


@pytest.mark.parametrize("lost", [0, 5, 200])
def test_baseline_of_a_model_that_lost_is_written_with_a_warning(
    lost: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Five of 400 leave it undecided, which is no finding."""
    before, after = (np.arange(NUMBER) >= wrong for wrong in (0, lost))
    compared = Comparison({}, outcomes=(compare_outcomes("colours", "acc", "none", before, after),))
    run = place(tmp_path, "run", rows(lost), results("comparison", plain(compared)))
    assert main(["gate", str(run), "--baseline", str(tmp_path / "baseline.json"), "--update-baseline"]) == 0
    assert tells(capsys.readouterr().err, "WARNING loss acc 50") == (lost == 200)


def baseline_with(path: str, value: Any) -> Callable[[str], str]:
    """An edit of a baseline's text: the value at a dotted path of its only task."""

    def change(text: str) -> str:
        values = json.loads(text)
        results(path, value)(values["documents"][0])
        return json.dumps(values)

    return change


def twice(text: str) -> str:
    values = json.loads(text)
    return json.dumps({**values, "documents": values["documents"] * 2})


REFUSED: dict[str, tuple[Callable[[str], str], list[dict[str, Any]], Callable[[dict[str, Any]], Any], str, str]] = {
    "truncated": (lambda text: text[: len(text) // 2], rows(40), id, "damaged", "baseline"),
    "half of the values": (baseline_with("num_documents", 200), rows(40), id, "damaged", "'colours' 'numbers' 200"),
    "a task twice": (twice, rows(40), id, "damaged", "colours none"),
    "a key twice": (lambda text: text.replace("{", '{"documents": [],', 1), rows(40), id, "damaged", "'documents'"),
    "other tasks": (baseline_with("task", "shapes"), rows(40), id, "not_comparable", "shapes 'after' colours"),
    "other documents": (str, rows(40, prefix="other"), id, "not_comparable", "documents"),
    "another day": (
        str, rows(40, prefix="other"), results("results.chat_template_date", "2026-11-28"), "not_comparable",
        "2026-11-28",
    ),
    # Prompts and targets are the same, and the task scores them otherwise.
    "another version": (str, rows(0), results("results.versions", {"colours": 2.0}), "not_comparable", "colours"),
    "another aggregation": (
        str, rows(0), results("results.configs.colours.metric_list", [{"metric": "acc", "x": 1}]), "not_comparable",
        "colours",
    ),
    "another helper": (
        str, rows(0), results("results.task_helpers", {"colours": "0"}), "not_comparable", "colours",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compared_is_refused(name: str, baseline: Path) -> None:
    edit, log, change, code, words = REFUSED[name]
    run = place(baseline.parent, "after", log, change)
    baseline.write_text(edit(baseline.read_text()))
    with pytest.raises(ConfigError) as raised:
        gate(str(run), str(baseline), 5.0)
    assert raised.value.code == code
    assert tells(raised.value, words)


def texts(parent: Path, name: str, nats: float, *, lost: int = 0, metric: str = "word_perplexity") -> Path:
    """An evaluation of 30 texts of 90 to 119 words at about `nats` nats a word, the first `lost` without a value."""
    random = np.random.default_rng(7)  # the same texts, to both models as hard
    lines = []
    for number in range(30):
        value = [-(nats + random.normal(0, 0.3)) * (90 + number), 90 + number]
        lines.append(line(number, True, metrics=[metric], **({metric: value} if number >= lost else {})))

    def change(values: dict[str, Any]) -> None:
        values["metrics"][0] |= {"metric": metric, "value": float(np.exp(nats))}
        values["results"]["configs"]["colours"]["metric_list"] = [{"metric": metric}]

    return place(parent, name, lines, change)


@pytest.mark.parametrize(
    ("nats", "lost", "status", "words"),
    [
        (3.0, 0, 0, "passed"),
        (2.0, 0, 0, "gain colours word_perplexity"),
        (3.0049, 0, 0, "small colours word_perplexity (+0.49 1"),
        (3.62, 0, 1, "loss: colours word_perplexity"),
        (3.0, 1, 3, "cannot tell: colours word_perplexity"),
    ],
)
def test_perplexity_of_texts_is_held(
    nats: float, lost: int, status: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its interval in per cent: 86 % worse is a loss, and a text without a value may have lost anything."""
    file = str(tmp_path / "baseline.json")
    assert main(["gate", str(texts(tmp_path, "before", 3.0)), "--baseline", file, "--update-baseline"]) == 0
    assert main(["gate", str(texts(tmp_path, "after", nats, lost=lost)), "--baseline", file]) == status
    out = capsys.readouterr().out
    assert tells(out, words)
    assert "inf" not in out


@pytest.mark.parametrize(
    "wrong", [41, 60, 3.004, 3.06, *(pytest.param(one, marks=pytest.mark.long) for one in (30, 47, 80, 3.0, 3.02))]
)
def test_every_command_gives_the_same_answers_the_same_status_for_every_bound(wrong: float, tmp_path: Path) -> None:
    """Wrong answers of 400, or nats a word: of texts `evaluate` has tokens instead, where it compares distributions."""
    make = folder if isinstance(wrong, int) else texts
    before, after = make(tmp_path, "before", 40 if make is folder else 3.0), make(tmp_path, "after", wrong)
    file, written = tmp_path / "baseline.json", after / "report.json"
    assert main(["gate", str(before), "--baseline", str(file), "--update-baseline"]) == 0
    kept, answers = from_json(written.read_text()), [load([str(one)])[0].answers for one in (before, after)]
    for bound in (0.5, 1, 4, 11):
        texts_changed = tuple(compare_texts(*answers))
        found = replace(compare_answers(Comparison({}, matters=bound), *answers), texts=texts_changed)
        for loss in ({}, {"fail_on_loss": bound}):
            compared = replace(found, over_all=bool(loss))
            broken = broken_bounds([LossBound.of(bound)] if loss else [], comparison_metrics(found), found)
            evaluated = replace(kept, comparison=compared, config={"matters": bound, **loss}, broken=tuple(broken))
            written.write_text(to_json(evaluated))
            statuses = {worst_status([evaluated.verdict]), main(["compare", str(before), str(after)])}
            if not loss:
                gated = held(after, file, bound)
                statuses.add(EXIT_STATUS[gated.status])
                names = [item.name for item in changes_of(found)]
                assert [item.name for item in gated.bounds] == names
            assert len(statuses) == 1, (bound, loss, statuses)


@pytest.mark.parametrize(("other", "code"), [("before", "no_difference"), ("another", "too_few")])
def test_few_answers_of_the_baselines_own_files_pass_as_compare_says(other: str, code: str, tmp_path: Path) -> None:
    runs = {
        name: str(place(tmp_path, name, rows(2, 20), results("model.content_hash", content)))
        for name, content in (("before", "before"), ("after", other))
    }
    file = tmp_path / "baseline.json"
    gate(runs["before"], str(file), update=True)
    gated = held(Path(runs["after"]), file)
    (models,) = compare([*runs.values()]).compared
    assert gated.verdict.headline == models.verdict.headline
    assert (gated.verdict.code, gated.status) == (code, "ok" if code == "no_difference" else "unknown")
    assert [bound.status for bound in gated.bounds] == [gated.status]


@pytest.mark.parametrize(("kind", "is_other"), [("loglikelihood_rolling", True), ("multiple_choice", False)])
def test_texts_in_other_windows_are_refused_as_compare_does(kind: str, is_other: bool, tmp_path: Path) -> None:
    """Their perplexities differ by the windows, and shorter ones never reach what a model does beyond. Baselines of
    earlier versions do not name the number."""

    def of_length(length: int) -> Callable[[dict[str, Any]], None]:
        def change(values: dict[str, Any]) -> None:
            results("results.configs.colours.output_type", kind)(values)
            results("results.max_length", length)(values)

        return change

    before, after = (str(place(tmp_path, f"of{one}", rows(40), of_length(one))) for one in (512, 256))
    file = tmp_path / "baseline.json"
    gate(before, str(file), update=True)
    for ask in (lambda: gate(after, str(file)), lambda: compare([before, after])):
        with (
            refused(NotComparableError, "not_comparable", holds=("longest context is 512", "256"))
            if is_other
            else nullcontext()
        ):
            ask()
    content = json.loads(file.read_text())
    del content["model"]["max_length"]
    file.write_text(json.dumps(content))
    assert held(Path(after), file).status == "ok"


def test_bytes_stand_for_words_and_a_baseline_without_texts_is_refused(tmp_path: Path) -> None:
    file, run = str(tmp_path / "baseline.json"), str(texts(tmp_path, "a", 3.0, metric="bits_per_byte"))
    gate(run, file, update=True)
    gated = gate(run, file)
    assert [(item.name, item.status) for item in gated.bounds] == [("colours bits_per_byte", "ok")]
    (before,) = unpacked(read_baseline(Path(file)).documents)
    with refused(ConfigError, "not_comparable", "--baseline", "the baseline", holds="colours/bits_per_byte"):
        gate_answers([replace(before, text_metric="")], [before])


def test_a_missing_baseline_missing_answers_and_drawn_documents_are_named(baseline: Path, tmp_path: Path) -> None:
    """The message says what writes a baseline, and what a run lacks; drawn documents are no baseline, nor a run."""
    run = place(tmp_path, "bare", [])
    with refused(ConfigError, "no_access", "--baseline"):
        gate(str(run), str(tmp_path / "no.json"))
    with refused(ConfigError, "missing", holds="document"):
        gate(str(run), str(tmp_path / "no.json"), update=True)
    assert not (tmp_path / "no.json").exists()
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps({"model": "m", "tasks": ["colours"], "documents": "enough"}))
    for update in (False, True):
        with refused(ConfigError, "contradiction", "documents", "enough"):
            gate(str(settings), str(baseline), update=update)


def test_decision_is_written_as_junit_as_annotations_and_as_markdown(baseline: Path) -> None:
    """A loss is a failure, what cannot be told an error; Python's own parser reads it. GitHub's and Azure's commands
    are one line each, nothing elsewhere, and nothing where all passed. The summary says what 5 % means."""
    folders = (folder(baseline.parent, f"run{wrong}", wrong) for wrong in (80, 42, 40))
    loss, open_, passed = (held(one, baseline) for one in folders)
    lost, unknown = (ElementTree.fromstring(junit(item)) for item in (loss, open_))
    assert (lost.get("failures"), lost.get("errors"), unknown.get("errors")) == ("1", "0", "1")
    (failure,) = lost.iter("failure")
    assert "flips 40 lost / 0 won" in str(failure.get("message"))
    assert [case.get("name") for case in lost.iter("testcase")] == ["colours acc"]
    (github,) = annotation_lines(loss, {"GITHUB_ACTIONS": "true"})
    (azure,) = annotation_lines(loss, {"TF_BUILD": "True"})
    assert github.startswith("::error title=colours acc::loss: ")
    assert azure.startswith("##vso[task.logissue type=error]")
    assert list(annotation_lines(loss, {})) == []
    assert list(annotation_lines(passed, {"GITHUB_ACTIONS": "true"})) == []
    text = markdown(loss)
    assert "| ❌ loss | colours acc |" in text
    assert "at most 5 %" in text


def test_metrics_that_are_not_the_same_on_both_sides_are_refused(baseline: Path) -> None:
    """One that disappeared would go unnoticed; of one whose direction turned, less is better now."""
    (before,) = unpacked(read_baseline(baseline).documents)
    more = replace(before, metrics={**before.metrics, "acc_norm": True})
    with refused(ConfigError, "not_comparable", "--baseline", "the baseline", holds="colours/acc_norm"):
        gate_answers([more], [before])
    with refused(ConfigError, "not_comparable", "--baseline", "the baseline"):
        gate_answers([before], [replace(before, metrics={"acc": False})])


def test_pipes_and_doubled_keys_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe as the baseline is neither waited for nor replaced, and a key that is there twice, as two merged branches
    leave it, is no choice of the parser's in settings either."""
    run, pipe = str(folder(tmp_path, "after", 40)), tmp_path / "pipe"
    os.mkfifo(pipe)
    assert main(["gate", run, "--baseline", str(pipe)]) == 2
    assert "is a pipe" in capsys.readouterr().err
    assert main(["gate", run, "--baseline", str(pipe), "--update-baseline"]) == 2
    assert "is a pipe" in capsys.readouterr().err
    assert pipe.is_fifo()
    settings = tmp_path / "settings.json"
    settings.write_text('{"matters": 1, "matters": 50}', encoding="utf-8")
    assert main(["gate", str(settings), "--baseline", "new.json", "--update-baseline"]) == 2
    assert "'matters'" in capsys.readouterr().err


def test_a_lost_end_token_never_passes(tmp_path: Path) -> None:
    _, packages = with_ends(tmp_path)
    folder, tasks = write_tasks(tmp_path / "tasks"), {"tasks": ["tiny_generate"]}
    for name, model in packages.items():
        answered(model, packages["whole"], folder, tmp_path, f"{name}_out", **tasks)
    baseline = str(tmp_path / "baseline.json")
    gate(str(tmp_path / "same_out"), baseline, update=True)
    whole, lost = (held(tmp_path / f"{name}_out", Path(baseline)) for name in ("whole", "lost"))
    assert lost.status != "ok"
    assert ["stop at" in one.verdict.finding for one in (whole, lost)] == [False, True]


def test_a_template_that_the_packages_own_runtime_reads_and_is_not_judged_never_passes(tmp_path: Path) -> None:
    """onnxruntime-genai reads that of tokenizer_config.json, transformers that of chat_template.jinja."""
    folder, model = write_tasks(tmp_path / "tasks"), copied(tmp_path, "model", lambda _: None)
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    settings = {"model": str(model), "tasks": ["tiny_choice"], "include_path": str(folder), "apply_chat_template": True}
    run, baseline = tmp_path / "settings.json", str(tmp_path / "baseline.json")
    run.write_text(json.dumps({**settings, "matters": 99}))
    gate(str(run), baseline, update=True)
    config = model / "tokenizer_config.json"
    found = []
    for template in ("{{ messages[0].content }}", "damaged"):
        config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": template}))
        gated = gate(str(run), baseline)
        found.append((gated.status, gated.verdict.code == "damaged"))
    assert found == [("ok", False), ("unknown", True)]


# What must never leave the gate as passed: losses that answers, baseline or the choice of a metric would hide.


def scores(task: str, columns: dict[str, list[float]], *, better: bool = True) -> Answers:
    """Answers with a column of values a metric."""
    count = len(next(iter(columns.values())))
    documents = {
        number: DocumentAnswer("d", {name: column[number] for name, column in columns.items()}, "")
        for number in range(count)
    }
    return Answers(task, "none", dict.fromkeys(columns, better), documents)


def test_documents_pair_by_all_columns_where_own_code_scores_them() -> None:
    """The column that decides what is right was made lenient in the commit that broke the model."""
    before = scores("own", {"acc": [1.0] * NUMBER})
    lenient = {number: replace(one, digest="other d") for number, one in before.by_document.items()}
    before = replace(before, by_document={n: replace(one, digest="one d") for n, one in before.by_document.items()})
    after = replace(before, by_document=lenient)
    assert gate_answers([before], [after]).status == "ok"
    own = Comparison({}, metrics={"configs": {"own": {"process_results": "def scored(doc, results): ..."}}})
    with refused(ConfigError, "not_comparable"):
        gate_answers([before], [after], own)


def test_a_failed_evaluation_becomes_no_baseline(tmp_path: Path) -> None:
    """Against answers of NaN or none every later model would pass."""

    def failed(values: dict[str, Any]) -> None:
        values["missing"] = [{"task": "colours", "doc_id": 3, "reason": "too long"}]

    run = place(tmp_path, "before", [line(number, True) for number in range(9)], failed)
    file = tmp_path / "baseline.json"
    assert main(["gate", str(run), "--baseline", str(file), "--update-baseline"]) == 2
    assert not file.exists()


def test_names_start_no_line_of_their_own() -> None:
    """GitHub obeys lines that start with two colons: a task's name must not make one."""
    bad = "task\n::error title=x::y"
    gated = GateResult(
        "loss", Verdict("loss", f"loss found in {bad}", (Reason("loss", bad),)), (GateBound(bad, "loss", bad),), (bad,)
    )
    assert [text for text in lines(gated) if "\n" in text] == []


def test_task_that_the_run_lacks_is_not_said_to_be_asked_otherwise(baseline: Path) -> None:
    """As where drawn documents are of fewer tasks than the baseline's."""
    known = replace(read_baseline(baseline), definitions={"colours": "0"})
    with refused(ConfigError, "not_comparable", holds="'colours'"):
        refuse_other_definitions(known, {"configs": {"shapes": {}}})


@pytest.mark.parametrize("metrics", [["f1"], ["acc", "f1"]])
@pytest.mark.parametrize(("count", "change", "status"), [(NUMBER, 0, "ok"), (NUMBER, 1, "unknown"), (20, 0, "unknown")])
def test_a_metric_over_the_corpus_is_decided_by_many_documents_that_add_the_same(
    metrics: list[str], count: int, change: int, status: str, tmp_path: Path
) -> None:
    """Also where a task has no other metric, as CoLA has MCC. One document that adds something else may move it."""

    def scored(values: dict[str, Any]) -> None:
        values["results"]["configs"]["colours"]["metric_list"] = [
            {"metric": name, "aggregation": "mean" if name == "acc" else name} for name in metrics
        ]
        values["results"]["results"] = {"colours": {"f1,none": 0.8}}
        del values["model"]["content_hash"]  # one model's own files need no statistics

    def run(name: str, change: int) -> Path:
        items = [(number % 2, (number + (number < change)) % 2) for number in range(count)]
        rows = [line(number, True, prompt_hash=f"p{number}", f1=item) for number, item in enumerate(items)]
        return place(tmp_path, name, rows, scored)

    file = tmp_path / "baseline.json"
    gate(str(run("before", 0)), str(file), update=True)
    gated = held(run("after", change), file, 5.0)
    assert gated.status == status
    judged = [bound for bound in gated.bounds if bound.name == "colours f1"]
    assert [bound.status for bound in judged] == [status] * (not change)


@pytest.mark.parametrize(("wrong", "status"), [(0, 3), (80, 3), (41, 0)])
def test_a_certain_change_whose_direction_nobody_knows_is_not_decided(wrong: int, status: int, tmp_path: Path) -> None:
    """A task's own metric without `higher_is_better`: its rise may be a loss, as its fall may be. Also by `compare`."""

    def unsaid(values: dict[str, Any]) -> None:
        values["results"]["configs"]["colours"]["metric_list"][0]["higher_is_better"] = None

    file = tmp_path / "baseline.json"
    for name, number in (("before", 40), ("after", wrong)):
        rows = [line(at, at >= number, prompt_hash=f"p{at}") for at in range(NUMBER)]
        place(tmp_path, name, rows, unsaid)
    gate(str(tmp_path / "before"), str(file), update=True)
    gated = held(tmp_path / "after", file, 5.0)
    assert EXIT_STATUS[gated.status] == status
    assert [EXIT_STATUS[bound.status] for bound in gated.bounds] == [status]
    (models,) = compare([str(tmp_path / name) for name in ("before", "after")]).compared
    codes = {verdict(replace(models.for_verdict, matters=5.0)).code, gated.verdict.code}
    assert codes == {"no_direction" if status else "no_loss_found"}
    known = folder(tmp_path, "known", 40)
    with refused(ConfigError, "not_comparable", "--baseline", holds="without `higher_is_better`"):
        gate(str(known), str(file))


@pytest.mark.parametrize(
    ("share", "spread", "factor", "status"),
    [
        (0.0, 4.0, 1.0, "unknown"),
        (0.9, 4.0, 1.0, "unknown"),
        (0.99, 4.0, 1.0, "ok"),
        (0.0, 0.2, 1.0, "ok"),
        (math.nan, 4.0, 1.0, "unknown"),
        (1.0, 4.0, 0.25, "unknown"),
        (1.0, 0.2, 1.6, "unknown"),
        (1.0, 4.0, 1.4, "ok"),
    ],
)
def test_another_model_does_not_pass_a_task_whose_answers_are_wrong(
    share: float, spread: float, factor: float, status: str
) -> None:
    """Both are right as often. Where nothing is decided, as of margins near 0, they are rounding. Equal scores of all
    choices (NaN) take the first, which is always right. A factor of all logits keeps each answer."""
    random = np.random.default_rng(0)
    theirs, noise = spread * random.normal(size=(2, 4000))
    if math.isnan(share):
        theirs, noise, share = np.abs(theirs), np.full(4000, 1e-9), 0.0
    columns = theirs, factor * (share * theirs + math.sqrt(1 - share**2) * noise)
    runs = []
    for margins in columns:
        documents = {
            number: DocumentAnswer(f"d p{number} t", {"acc": float(margin > 0)}, "", abs(margin))
            for number, margin in enumerate(margins)
        }
        runs += unpacked(packed([Answers("choice", "none", {"acc": True}, documents)]))
    gated = gate_answers(runs[:1], runs[1:], Comparison({}, matters=4))
    assert gated.status == status
    assert (gated.verdict.code == "damaged") == (status != "ok")

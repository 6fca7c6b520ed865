"""The gate: what passes, fails and cannot be told, what it writes for machines, and what it refuses by name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from olive_ext.cli import main
from olive_ext.errors import ConfigError
from olive_ext.plugins.gate.decision import Gated, baseline_of, gate, gate_answers, keyed, read_baseline
from olive_ext.plugins.gate.forms import annotation_lines, junit, markdown
from olive_ext.report import Report
from olive_ext.report.comparison import Comparison
from olive_ext.run.reference.answers import Answers, DocumentAnswer
from olive_ext.run.reference.pairing import compare_answers
from tests.backends.local_tasks import write_tasks
from tests.refusals import refused
from tests.run.reference.test_answers_paired import TASK, answers, samples
from tests.run.test_against_reference import answered, with_ends
from tests.run.test_earlier_reports import line, place

ROOT = Path(__file__).resolve().parents[3]
NUMBER = 400


def folder(parent: Path, name: str, wrong: int, *, count: int = NUMBER, prefix: str = "p") -> Path:
    """An evaluation of `count` documents, the first `wrong` of which are answered wrongly."""
    lines = [line(number, number >= wrong, prompt_hash=f"{prefix}{number}") for number in range(count)]
    return place(parent, name, lines)


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    """The baseline of an evaluation with 40 wrong answers of 400."""
    file = tmp_path / "baseline.json"
    assert main(["gate", str(folder(tmp_path, "before", 40)), "--baseline", str(file), "--update-baseline"]) == 0
    return file


@pytest.mark.parametrize(
    ("wrong", "within", "status", "words"),
    [
        (40, 1.0, 0, "passed: no loss found"),
        (80, 1.0, 1, "loss: loss found in colours acc"),
        (42, 1.0, 3, "cannot tell: not decided: colours acc may have lost up to"),
        (42, 5.0, 0, "passed: no loss found"),
    ],
)
def test_statuses_tell_passed_lost_and_unknown(
    wrong: int, within: float, status: int, words: str, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """0, 1 and 3 go with the verdict's own words, for the documents that both have."""
    run = folder(baseline.parent, "after", wrong)
    assert main(["gate", str(run), "--baseline", str(baseline), "--within", str(within)]) == status
    out = capsys.readouterr().out
    assert words in out
    assert "400 documents" in out


def test_baseline_keeps_every_value_number_and_error(baseline: Path) -> None:
    """What was packed comes back: numbers, values, margins, the metric with its error, the versions."""
    read = read_baseline(baseline)
    (answers,) = read.answers()
    assert [item.values["acc"] for item in answers.by_document.values()] == [0.0] * 40 + [1.0] * 360
    assert list(answers.by_document) == list(range(NUMBER))
    assert {item.margin for item in answers.by_document.values()} == {1.0}
    assert (read.metrics[0].value, read.metrics[0].stderr) == (0.9, 0.1)
    assert read.versions
    assert baseline.stat().st_size < 20_000


def test_baseline_names_the_records_of_its_reference(tmp_path: Path) -> None:
    """The key of a recorded reference, without the place of this machine's cache."""
    (answers,) = [Answers("task", "none", {"acc": True}, {0: DocumentAnswer("d", {"acc": 1.0}, "")})]
    reference = {"path": "models/float", "folder": str(tmp_path / "4fd1"), "seconds": 3.0}
    made = baseline_of(Report((), comparison=Comparison(reference)), [answers])
    assert made.reference == {"path": "models/float", "records": "4fd1"}


def test_documents_that_changed_are_not_paired(baseline: Path) -> None:
    """A prompt that differs leaves the pair out, and the notes say how many are left."""
    run = folder(baseline.parent, "after", 40)
    log = run / "samples_colours.jsonl"
    lines = [json.loads(text) for text in filter(None, log.read_text().split("\n"))]
    for item in lines[:30]:
        item["prompt_hash"] = "another"
    log.write_text("".join(json.dumps(item) + "\n" for item in lines))
    gated = gate(str(run), str(baseline))
    assert isinstance(gated, Gated)
    assert gated.notes == ("colours: 370 of 400 documents are the same in both",)


def texts(parent: Path, name: str, nats: float, *, lost: int = 0, metric: str = "word_perplexity") -> Path:
    """An evaluation of 30 texts of 90 to 119 words at about `nats` nats a word, the first `lost` without a value."""
    random = np.random.default_rng(7)  # the same texts, to both models as hard
    lines = []
    for number in range(30):
        value = [-(nats + random.normal(0, 0.3)) * (90 + number), 90 + number]
        lines.append(line(number, True, **({metric: value} if number >= lost else {})))

    def change(values: dict[str, Any]) -> None:
        values["metrics"][0] |= {"metric": metric, "value": float(np.exp(nats))}
        values["results"]["configs"]["colours"]["metric_list"] = [{"metric": metric}]

    return place(parent, name, lines, change)


@pytest.mark.parametrize(
    ("nats", "lost", "status", "words"),
    [
        (3.0, 0, 0, "passed: no loss found"),
        (2.0, 0, 0, "gain in colours word_perplexity"),
        (3.0049, 0, 0, "small loss found in colours word_perplexity, of less than 1 %"),
        (3.62, 0, 1, "loss: loss found in colours word_perplexity"),
        (3.0, 1, 3, "cannot tell: not decided: colours word_perplexity"),
    ],
)
def test_perplexity_of_texts_is_held(
    nats: float, lost: int, status: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its interval in per cent: 86 % worse is a loss, and a text without a value may have lost anything."""
    file = str(tmp_path / "baseline.json")
    assert main(["gate", str(texts(tmp_path, "before", 3.0)), "--baseline", file, "--update-baseline"]) == 0
    assert main(["gate", str(texts(tmp_path, "after", nats, lost=lost)), "--baseline", file]) == status
    assert words in capsys.readouterr().out


def test_bytes_stand_for_words_and_a_baseline_without_texts_is_refused(tmp_path: Path) -> None:
    file, run = str(tmp_path / "baseline.json"), str(texts(tmp_path, "a", 3.0, metric="bits_per_byte"))
    gate(run, file, update=True)
    gated = gate(run, file)
    assert isinstance(gated, Gated)
    assert [(item.name, item.decision) for item in gated.bounds] == [("colours bits_per_byte", "passed")]
    (before,) = read_baseline(Path(file)).answers()
    with refused(ConfigError, "not_comparable", "--baseline", "the baseline", holds="colours/bits_per_byte"):
        gate_answers([replace(before, text_metric="")], [before])


def test_a_task_that_nothing_judges_by_document_is_never_passed(baseline: Path) -> None:
    """A corpus' F1 beside an accuracy of another task, as the verdict on a reference has it."""
    run = folder(baseline.parent, "after", 40)
    report = json.loads((run / "report.json").read_text())
    report["results"]["configs"]["shapes"] = {"metric_list": [{"metric": "f1"}]}
    (run / "report.json").write_text(json.dumps(report))
    gated = gate(str(run), str(baseline))
    assert isinstance(gated, Gated)
    assert (gated.decision, gated.verdict.code) == ("cannot tell", "no_values")


def _shorter(text: str) -> str:
    return text[: len(text) // 2]


def _other_task(text: str) -> str:
    return text.replace('"colours"', '"shapes"')


def _half_of_values(text: str) -> str:
    values = json.loads(text)
    values["documents"][0]["num_documents"] = 200
    return json.dumps(values)


@pytest.mark.parametrize(
    ("change", "prefix", "words"),
    [
        (_shorter, "p", ": no baseline: "),
        (_half_of_values, "p", "documents of 'colours': 'numbers' is not of 200 documents"),
        (_other_task, "p", "has the tasks shapes, and 'after' colours: evaluate the same, or write the baseline anew"),
        (str, "other", "share no documents"),
    ],
)
def test_bad_baselines_are_one_line(
    change: Callable[[str], str], prefix: str, words: str, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A truncated file, packed numbers of another length, other tasks, no common documents: status 2 and one line."""
    run = folder(baseline.parent, "after", 40, prefix=prefix)
    baseline.write_text(change(baseline.read_text()))
    capsys.readouterr()
    assert main(["gate", f"after={run}", "--baseline", str(baseline)]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_documents_of_another_day_are_told(baseline: Path) -> None:
    """The chat template of the run prints the date, so that no prompt of the baseline's day comes back."""
    run = folder(baseline.parent, "after", 40, prefix="other")
    report = json.loads((run / "report.json").read_text())
    report["results"]["chat_template_date"] = "2026-11-28"
    (run / "report.json").write_text(json.dumps(report))
    with refused(ConfigError, "not_comparable", holds="2026-11-28"):
        gate(str(run), str(baseline))


def test_a_missing_baseline_and_missing_logs_are_named(tmp_path: Path) -> None:
    """The message says what writes a baseline, and what a run lacks."""
    run = place(tmp_path, "bare", [])
    with refused(ConfigError, "no_access", "--baseline"):
        gate(str(run), str(tmp_path / "no.json"))
    with refused(ConfigError, "wrong_value", holds="sample_log_num"):
        gate(str(run), str(tmp_path / "no.json"), update=True)
    assert not (tmp_path / "no.json").exists()


def decided(baseline: Path, wrong: int) -> Gated:
    """The decision on an evaluation with so many wrong answers."""
    gated = gate(str(folder(baseline.parent, f"run{wrong}", wrong)), str(baseline))
    assert isinstance(gated, Gated)
    return gated


def test_junit_has_a_case_a_bound_with_its_figures(baseline: Path) -> None:
    """A loss is a failure, what cannot be told an error; Python's own parser reads it."""
    lost, unknown = (ElementTree.fromstring(junit(decided(baseline, wrong))) for wrong in (80, 42))
    assert (lost.get("failures"), lost.get("errors"), unknown.get("errors")) == ("1", "0", "1")
    (failure,) = lost.iter("failure")
    assert "flips 40 lost / 0 won" in str(failure.get("message"))
    assert [case.get("name") for case in lost.iter("testcase")] == ["colours acc"]


def test_annotations_are_of_the_machine_that_reads_them(baseline: Path) -> None:
    """GitHub's and Azure's commands are one line each, nothing elsewhere, and nothing where all passed."""
    lost = decided(baseline, 80)
    (github,) = annotation_lines(lost, {"GITHUB_ACTIONS": "true"})
    (azure,) = annotation_lines(lost, {"TF_BUILD": "True"})
    assert github.startswith("::error title=colours acc::loss: ")
    assert azure.startswith("##vso[task.logissue type=error]")
    assert list(annotation_lines(lost, {})) == []
    assert list(annotation_lines(decided(baseline, 40), {"GITHUB_ACTIONS": "true"})) == []


def test_markdown_states_the_level(baseline: Path) -> None:
    """The summary has a row a bound and says what 5 % means."""
    text = markdown(decided(baseline, 80))
    assert "| ❌ loss | colours acc |" in text
    assert "at most 5 %" in text


@pytest.mark.long
def test_equal_models_seldom_fail_and_a_planted_loss_is_found() -> None:
    """Of 60 pairs of exchangeable models at most 8 fail (the 99 % limit of 5 %); 10 points lost are always found."""

    def made(right: np.ndarray) -> list[Answers]:
        documents = {place: DocumentAnswer("d", {"acc": float(value)}, "") for place, value in enumerate(right)}
        return [Answers("task", "none", {"acc": True}, documents)]

    alarms = 0
    for seed in range(60):
        random = np.random.default_rng(seed)
        margins = random.logistic(size=500) + 1
        one, two = (margins + 0.4 * random.logistic(size=500) > 0 for _ in range(2))
        alarms += gate_answers(made(one), made(two)).decision == "loss"
        assert gate_answers(made(one), made(two & (random.random(500) > 0.15))).decision == "loss"
    assert alarms <= 8


def test_a_metric_that_only_one_side_has_is_refused(baseline: Path) -> None:
    """A metric that disappeared would go unnoticed."""
    (before,) = read_baseline(baseline).answers()
    more = replace(before, metrics={**before.metrics, "acc_norm": True})
    with refused(ConfigError, "not_comparable", "--baseline", "the baseline", holds="colours/acc_norm"):
        gate_answers([more], [before])


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_settings_are_evaluated_and_stop_early(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The quickstart's model against itself: a baseline from a file of settings, all documents, and some of them."""
    quickstart = ROOT / "recipes" / "quickstart"
    settings = {
        "model": str(quickstart / "model"),
        "tasks": ["quickstart_choice", "quickstart_letters"],
        "include_path": str(quickstart / "tasks"),
        "matters": 5,
    }
    run, enough, file = tmp_path / "all.json", tmp_path / "enough.json", str(tmp_path / "baseline.json")
    run.write_text(json.dumps(settings))
    enough.write_text(json.dumps({**settings, "documents": "enough"}))
    assert main(["gate", str(run), "--baseline", file, "--update-baseline"]) == 0
    assert main(["gate", str(run), "--baseline", file]) == 0
    assert "320 documents, flips 0 lost / 0 won" in capsys.readouterr().out
    assert main(["gate", str(enough), "--baseline", file]) == 0
    assert "of 320 documents, stopped: loss below 5 points is certain" in capsys.readouterr().out


def test_pipes_devices_and_doubled_keys_are_refused(
    baseline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe as the baseline is neither waited for nor replaced, and a key that is there twice, as two merged branches
    leave it, is no choice of the parser's: in a baseline and in settings."""
    run, pipe = str(folder(tmp_path, "after", 40)), tmp_path / "pipe"
    os.mkfifo(pipe)
    assert main(["gate", run, "--baseline", str(pipe)]) == 2
    assert "is a pipe" in capsys.readouterr().err
    assert main(["gate", run, "--baseline", str(pipe), "--update-baseline"]) == 2
    assert "is a pipe" in capsys.readouterr().err
    assert pipe.is_fifo()
    doubled = baseline.read_text(encoding="utf-8").replace("{", '{"documents": [],', 1)
    baseline.write_text(doubled, encoding="utf-8")
    assert main(["gate", run, "--baseline", str(baseline)]) == 2
    assert "the key 'documents' is there twice" in capsys.readouterr().err
    settings = tmp_path / "settings.json"
    settings.write_text('{"matters": 1, "matters": 50}', encoding="utf-8")
    assert main(["gate", str(settings), "--baseline", "new.json", "--update-baseline"]) == 2
    assert "the key 'matters' is there twice" in capsys.readouterr().err


def test_a_document_that_two_tasks_ask_counts_once_over_all() -> None:
    both = [[answers("a", {"acc": right}), answers("part", {"acc": right})] for right in ([1, 1, 1, 0], [0, 0, 1, 1])]
    for own in both:
        asked = {number: replace(one, digest=f"a-{number} asked") for number, one in own[1].by_document.items()}
        own[1] = replace(own[1], by_document=asked)
    lines = {**samples("a", 4), **samples("part", 4)}
    outcomes, *_ = compare_answers(*(list(map(keyed, own)) for own in both), lines, {"a": TASK, "part": TASK})
    assert outcomes[-1].num_documents == 4


@pytest.mark.slow
def test_a_lost_end_token_never_passes(tmp_path: Path) -> None:
    _, packages = with_ends(tmp_path)
    folder, tasks = write_tasks(tmp_path / "tasks"), {"tasks": ["tiny_generate"]}
    for name, model in packages.items():
        answered(model, packages["whole"], folder, tmp_path, f"{name}_out", **tasks)
    baseline = str(tmp_path / "baseline.json")
    gate(str(tmp_path / "same_out"), baseline, update=True)
    whole, lost = (gate(str(tmp_path / f"{name}_out"), baseline) for name in ("whole", "lost"))
    assert isinstance(whole, Gated)
    assert isinstance(lost, Gated)
    assert lost.decision != "passed"
    assert ["does not stop at token" in one.verdict.finding for one in (whole, lost)] == [False, True]
    settings = {**tasks, "include_path": str(folder), "documents": "enough", "matters": 99}
    decisions = {}
    for name in ("same", "lost"):
        (tmp_path / f"{name}.json").write_text(json.dumps({**settings, "model": str(packages[name])}))
        decisions[name] = gate(str(tmp_path / f"{name}.json"), baseline).decision
    assert decisions == {"same": "passed", "lost": "cannot tell"}

"""Earlier reports side by side: what is read, what is refused by name, what the logs beside them say."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lm_eval.api.registry import get_aggregation

from olive_ext.backends.lm_eval_run import sample_line
from olive_ext.cli import main
from olive_ext.errors import ConfigError
from olive_ext.report import to_json
from olive_ext.report.html.render import render
from olive_ext.report.page import ComparedModels
from olive_ext.report.report import plain
from olive_ext.report.verdict import verdict
from olive_ext.run import compare
from olive_ext.run.reference.answers import NATS, UNITS, Answers, DocumentAnswer, packed, read_answers
from olive_ext.run.sample_logs import sample_fields, write_samples
from tests.refusals import refused, tells
from tests.report.synthetic import comparison, report

CHOICES = ("red", "green", "blue\u2028ish")


def line(number: int, is_right: bool, **changes: Any) -> dict[str, Any]:
    """A multiple-choice document as lm-eval hands it over; the first choice is the right one."""
    scores = [-1.5, -2.5, -3.5] if is_right else [-2.5, -3.5, -1.5]
    return {
        "doc_id": number,
        "doc": {"question": f"Colour {number}?"},
        "target": 0,
        "arguments": [(f"Example.\n\nColour {number}?", f" {choice}") for choice in CHOICES],
        "resps": [[(score, False)] for score in scores],
        "filtered_resps": [(score, False) for score in scores],
        "filter": "none",
        "metrics": ["acc"],
        "doc_hash": f"d{number}",
        "prompt_hash": f"p{number}",
        "target_hash": "t",
        "acc": float(is_right),
        **changes,
    }


def place(folder: Path, name: str, lines: list[dict[str, Any]], change: Callable[[dict[str, Any]], Any] = id) -> Path:
    """A report's folder with the answers `lines` of the task `colours`, and their log; `change` edits report.json."""
    target = folder / name
    target.mkdir(parents=True)
    values = json.loads(to_json(report(f"models/{name}")))
    share = sum(item["acc"] for item in lines) / max(1, len(lines))
    metric = {"task": "colours", "metric": "acc", "filter": "none", "value": share, "stderr": 0.1, "n": len(lines)}
    values["metrics"] = [metric]
    values["results"] = {
        "configs": {
            "colours": {
                "output_type": "multiple_choice",
                "doc_to_text": "{{question}}",
                "metric_list": [{"metric": "acc", "aggregation": "mean"}],
            }
        },
        "versions": {"colours": 1.0},
        "n-shot": {"colours": 1},
        "n-samples": {"colours": {"original": 90, "effective": len(lines)}},
        "higher_is_better": {"colours": {"acc": True}},
        "config": {"fewshot_seed": 1234},
        "max_length": 512,
    }
    change(values)
    listed = values["results"]["configs"].get("colours", {"metric_list": ()})["metric_list"]
    task = SimpleNamespace(
        aggregation=lambda: {item["metric"]: get_aggregation(item.get("aggregation", "mean")) for item in listed},
        higher_is_better=lambda: {item["metric"]: item.get("higher_is_better", True) for item in listed},
        doc_to_text=lambda doc: doc["question"],
        doc_to_choice=lambda doc: [*CHOICES],
    )
    samples = {"colours": lines} if lines else {}
    answers = read_answers(samples, {"colours": task})
    values["answers"] = plain(packed(answers))
    (target / "report.json").write_text(json.dumps(values))
    write_samples(samples, len(lines), target, sample_fields({"colours": task}, answers))
    return target


def results(path: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    """An edit of a report: the value at a dotted path."""

    def change(values: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        place = values
        for parent in parents:
            place = place[parent]
        place[last] = value

    return change


def side_by_side(folder: Path, *sides: tuple[list[dict[str, Any]], Callable[[dict[str, Any]], Any]]) -> ComparedModels:
    """The second report beside the first; a side is its log and the edit of its report."""
    paths = [str(place(folder, name, *side)) for name, side in zip("ab", sides, strict=True)]
    return compare(paths).compared[0]


BASE = [line(number, number < 7) for number in range(10)]
WORSE = [line(number, 2 <= number < 8) for number in range(10)]


def with_comparison(**more: Any) -> Callable[[dict[str, Any]], Any]:
    """The report's own comparison, with a reference."""
    return results("comparison", json.loads(to_json(report(found=comparison(40))))["comparison"] | more)


def scaled(factor: float) -> list[dict[str, Any]]:
    """The answers of 40 documents with all logits times a factor."""
    lines = [line(number, number % 4 > 0) for number in range(40)]
    return [{**one, "resps": [[(factor * score, False)] for ((score, _),) in one["resps"]]} for one in lines]


def without_values(values: dict[str, Any]) -> None:
    """A second task, of which there is a value over its corpus alone."""
    values["results"]["configs"]["cola"] = {}
    values["results"]["n-samples"]["cola"] = {"original": 1, "effective": 1}
    values["results"]["results"] = {"cola": {"mcc,none": 0.5}}


def model(facts: dict[str, Any]) -> Callable[[dict[str, Any]], Any]:
    """Facts of the evaluated model, beside the stored report's."""
    return lambda values: values["model"].update(facts)


def infinite(values: dict[str, Any]) -> None:
    values["metrics"].append({"task": "non_finite", "metric": "requests", "filter": "none", "value": 2.0})


C, D, WHOLE, TURNED, LOST = (
    {"content_hash": "c"},
    {"content_hash": "d"},
    {"stop_ids": [1, 2], "unused_stop_ids": []},
    {"stop_ids": [2, 1], "unused_stop_ids": []},
    {"stop_ids": [1], "unused_stop_ids": []},
)
UNKNOWN = results("model", {"path": "a"})
MISSING = results("missing", [{"task": "colours", "doc_id": number, "reason": "crashed"} for number in range(3)])
DAMAGED = with_comparison(divergences=[], damaged={"cos_cache": "is missing"})
F1 = results("results.results", {"colours": {"acc,none": 0.7, "f1,none": 0.1}})
UNJUDGED = results("model.unjudged", {"tokenizer_config.json": "has another chat template"})
CODES: dict[str, tuple[Any, Any, str]] = {
    "the same contents": ((BASE, model(C)), (BASE, model(C)), "no_difference"),
    "the same contents with other answers": ((BASE, model(C)), (WORSE, model(C)), "too_few"),
    "other contents": ((BASE, model(C)), (BASE, model(D)), "too_few"),
    "contents that are not known": ((BASE, UNKNOWN), (BASE, UNKNOWN), "too_few"),
    # The same answers by logits times a factor are of another model. Compared distributions say so themselves.
    "the same margins": ((scaled(1), id), (scaled(1), id), "no_difference"),
    "other margins": ((scaled(1), id), (scaled(0.25), id), "damaged"),
    "other margins beside distributions": ((scaled(1), id), (scaled(0.25), with_comparison()), "no_difference"),
    "missing answers": ((BASE, id), (BASE, MISSING), "missing"),
    "missing answers of the first": ((BASE, MISSING), (BASE, id), "missing"),
    "no numbers": ((BASE, id), (BASE, infinite), "cannot_tell"),
    "no numbers of the first": ((BASE, infinite), (BASE, id), "cannot_tell"),
    "the same ends": ((BASE, model(WHOLE)), (BASE, model(TURNED)), "no_difference"),
    "a lost end": ((BASE, model(WHOLE)), (BASE, model(LOST)), "stops"),
    "a damaged part": ((BASE, id), (BASE, DAMAGED), "damaged"),
    "a damaged file": ((BASE, id), (BASE, UNJUDGED), "damaged"),
    "a damaged file of both": ((BASE, UNJUDGED), (BASE, UNJUDGED), "no_difference"),
    "a task without values by document": ((BASE, without_values), (BASE, without_values), "no_values"),
    "the same contents with a score of the whole": ((BASE, F1), (BASE, F1), "no_values"),
    "only such a task, as of a median": (([], id), ([], id), "nothing_compared"),
    "such a task of the first alone": ((BASE, without_values), (BASE, id), "no_difference"),
}


@pytest.mark.parametrize("name", CODES)
def test_what_the_reports_say_of_their_models_stays_in_the_verdict(name: str, tmp_path: Path) -> None:
    first, second, code = CODES[name]
    assert code in [reason.code for reason in verdict(side_by_side(tmp_path, first, second).comparison).reasons]


def test_reports_without_tasks_have_scores_only_and_others_keep_their_own_comparison(tmp_path: Path) -> None:
    first = place(tmp_path, "a", [])
    page = compare([str(place(tmp_path, name, [], results("results.configs", {}))) for name in "bc"])
    assert page.compared == ()
    assert "Scores" in render(page)
    second = place(tmp_path, "int4", [], with_comparison())
    page = compare([str(first), str(second)])
    assert page.compared[0].comparison.divergences == comparison(40).divergences


def test_reports_are_named_by_folder_file_pass_or_as_given(tmp_path: Path) -> None:
    """A folder of reports stands for them, in the order of their dates."""
    place(tmp_path / "chain", "one", BASE, lambda values: values.update(created="2026-01-02"))
    place(tmp_path / "chain", "two", BASE, lambda values: values.update(created="2026-01-01"))
    other = place(tmp_path, "other", BASE)
    for name, passes in (("71c0", []), ("9ab1", ["conversion"]), ("aa07", ["conversion", "int4"])):
        place(tmp_path, name, [], results("model.passes", passes))
    first = place(tmp_path, "model", []) / "report.json"
    shutil.copy(first, first.with_name("report-2.json"))
    for paths, names in (
        ([tmp_path / "chain", f"mine={other / 'report.json'}"], ["two", "one", "mine"]),
        ([first, first.with_name("report-2.json")], ["model", "report-2"]),
        ([tmp_path / name for name in ("71c0", "9ab1", "aa07")], ["input model", "conversion", "conversion → int4"]),
    ):
        assert [column.name for column in compare([*map(str, paths)]).columns] == names


def test_baseline_is_told_by_name_or_path(tmp_path: Path) -> None:
    paths = [str(place(tmp_path, name, BASE)) for name in ("a", "b", "c")]
    for baseline in ("b", paths[1], f"{paths[1]}/report.json"):
        assert [column.name for column in compare(paths, baseline).columns] == ["b", "a", "c"]
    with refused(ConfigError, "wrong_value", "--baseline", "x"):
        compare(paths, "x")


@pytest.mark.parametrize(
    ("reference", "model", "is_same"),
    [
        ({"path": str(Path("models/float").absolute())}, {"path": "models/float", "content_hash": "a"}, True),
        ({"path": "records", "facts": {"model": "a"}}, {"path": "models/float", "content_hash": "a"}, True),
        ({"path": "models/float", "facts": {"model": "b"}}, {"path": "models/float", "content_hash": "a"}, False),
        ({"path": "models/p", "variant": "fp32"}, {"path": "models/p", "variant": "int8", "content_hash": "a"}, False),
    ],
)
def test_own_reference_is_known_by_its_content_else_by_its_path_from_here(
    reference: dict[str, Any], model: dict[str, Any], is_same: bool, tmp_path: Path
) -> None:
    first = place(tmp_path, "float", [], lambda values: values.update(model=model))
    second = place(tmp_path, "int4", [], with_comparison(reference=reference, over_all=True))
    (models,) = compare([str(first), str(second)]).compared
    assert models.comparison.over_all, "it was 'not decided', and advised what the report was made with"
    assert (models.is_of_another, models.note.startswith("divergence")) == (not is_same, not is_same)
    assert ("files were not compared" in models.note) == (not is_same)


def test_a_loss_that_matters_is_said_where_a_report_had_another(tmp_path: Path) -> None:
    first, other = place(tmp_path, "float", BASE), place(tmp_path, "plain", BASE)
    second = place(tmp_path, "int4", BASE, lambda values: values.update(config={**values["config"], "matters": 0.5}))
    notes = [models.note for models in compare([str(first), str(second), str(other)]).compared]
    assert "files" not in str(notes), "they are the same"
    assert [tells(note, "0.5 int4") for note in notes] == [True, False]
    (models,) = compare([str(second), str(other)]).compared
    assert tells(models.note, "1 plain")


@pytest.mark.parametrize(
    ("loss", "status", "words"),
    [
        (5, 1, "int4: 10 pt, 5 pt (`--fail-on-loss`)"),
        (10, 3, "int4: not decided: colours acc 45 pt"),
    ],
)
def test_bound_of_the_candidates_evaluation_is_held_against_what_is_measured(
    loss: float, status: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = {"matters": loss, "fail_on_loss": loss}
    given = (
        place(tmp_path, "float", BASE),
        place(
            tmp_path,
            "int4",
            [line(number, number < 6) for number in range(10)],
            lambda values: values.update(config={**values["config"], **kept}),
        ),
    )
    assert main(["compare", *map(str, given)]) == status
    out = capsys.readouterr().out
    assert tells(out, f"{words} 90 colours 320" if status == 1 else f"{words} `--limit`")


@pytest.mark.parametrize(("change", "status"), [(1.0, "ok"), (1.3, "loss")])
def test_texts_are_compared_between_the_reports_and_not_with_another_reference(
    tmp_path: Path, change: float, status: str
) -> None:
    """Whose own reference, a float model, is far better."""
    found = json.loads(to_json(report(found=comparison(40))))["comparison"]

    def of_texts(name: str, ratio: float) -> str:
        nats = [-50.0 - number for number in range(20)]
        values = [{NATS: one - 20 * math.log(ratio), UNITS: 20.0} for one in nats]
        texts = {number: DocumentAnswer(f"d{number} p{number}", one, "") for number, one in enumerate(values)}
        answers = packed([Answers("colours", "none", {}, texts, "word_perplexity")])
        folder = place(tmp_path, name, [], lambda kept: kept.update(comparison=found))
        kept = json.loads((folder / "report.json").read_text())
        metric = {"task": "colours", "metric": "word_perplexity", "filter": "none", "value": 9.0, "stderr": None}
        kept |= {"answers": plain(answers), "metrics": [{**metric, "n": 20, "higher_is_better": False}]}
        kept["config"] = {"fail_on_loss": 1}
        (folder / "report.json").write_text(json.dumps(kept))
        return str(folder)

    (models,) = compare([of_texts("first", 1.0), of_texts("second", change)]).compared
    judged = verdict(models.for_verdict)
    assert models.comparison.divergences
    (text,) = models.comparison.texts
    assert (text.num_documents, text.perplexity_ratio) == (20, pytest.approx(change))
    assert judged.status == status, judged.lines
    line = "colours word_perplexity rose by 30 %, more than 1 % (`fail_on_loss`)"  # `evaluate`: per token
    assert [item.words for item in models.broken] == [line] * (status == "loss")


def rolling(values: dict[str, Any]) -> None:
    results("results.configs.colours.output_type", "loglikelihood_rolling")(values)


def shorter(values: dict[str, Any]) -> None:
    results("results.max_length", 256)(values)


def templated(sha: str) -> Callable[[dict[str, Any]], Any]:
    setting = results("config.apply_chat_template", True)
    return lambda values: (setting(values), results("results.chat_template_sha", sha)(values))


def renamed(values: dict[str, Any]) -> None:
    values["metrics"][0]["task"] = "another"


COLOURS = "results.configs.colours"
OTHER_PROMPT = [*WORSE[:4], {**WORSE[4], "prompt_hash": "other"}, *WORSE[5:]]
THINKS = {"chat_template_args": {"enable_thinking": False}}
UNLIKE: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    "version": (BASE, results("results.versions.colours", 2.0), ("version is 1.0 in 'a' and 2.0 in 'b'",)),
    "examples": (BASE, results("results.n-shot.colours", 0), ("examples", "1", "0")),
    "documents": (BASE, results("results.n-samples.colours.effective", 9), ("documents", "10", "9")),
    "prompt": (BASE, results(f"{COLOURS}.doc_to_text", "Q: {{question}}"), ("doc_to_text", "'Q: {{question}}'")),
    "generation": (BASE, results(f"{COLOURS}.generation_kwargs", {"until": []}), ("generation_kwargs", "not set")),
    "template": (BASE, results("config.apply_chat_template", True), ("apply_chat_template", "not set", "true")),
    "template's arguments": (BASE, results("config.model_args", THINKS), ("chat_template_args", "enable_thinking")),
    "seed": (BASE, results("results.config.fewshot_seed", 7), ("seed", "1234", "7")),
    "template's text": (templated("12"), templated("34"), ("chat_template_sha", "12", "34")),
    "longest context": (rolling, lambda values: (rolling(values), shorter(values)), ("longest context", "512", "256")),
    "prompts that are cut": (BASE, results("config.max_length", 12), ("max_length", "'a'", "12")),
    "tasks": ([], renamed, ("task",)),
    "prompts in the logs": (BASE, OTHER_PROMPT, ("document 4",)),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_what_was_asked_differently_is_refused_by_name(name: str, tmp_path: Path) -> None:
    """A side is a log, an edit of a report without one, or of one whose log is `WORSE`."""
    first, second, holds = UNLIKE[name]
    paths = []
    for folder, side in (("a", first), ("b", second)):
        is_log = isinstance(side, list)
        lines = side if is_log else WORSE if first is BASE else []
        paths.append(str(place(tmp_path, folder, lines, id if is_log else side)))
    with refused(ConfigError, "not_comparable", holds=("cannot compare", *holds)):
        compare(paths)


@pytest.mark.parametrize(("first", "second"), [(templated("12"), templated("12")), (id, shorter)])
def test_the_same_template_and_another_context_of_choices_are_compared(
    first: Callable[[dict[str, Any]], Any], second: Callable[[dict[str, Any]], Any], tmp_path: Path
) -> None:
    page = compare([str(place(tmp_path, "a", [], first)), str(place(tmp_path, "b", [], second))])
    assert len(page.columns) == 2


@pytest.mark.parametrize(
    ("log", "code", "holds"),
    [(BASE, "not_comparable", ("samples_colours", "document 0")), ([*WORSE, {}], "damaged", ("samples_colours", "11"))],
)
def test_log_of_another_run_and_a_broken_one_are_refused(
    log: list[dict[str, Any]], code: str, holds: tuple[str, ...], tmp_path: Path
) -> None:
    first, second = place(tmp_path, "a", BASE), place(tmp_path, "b", WORSE)
    (second / "samples_colours.jsonl").write_text("".join(sample_line(item) if item else "{}\n" for item in log))
    with refused(ConfigError, code, holds=holds):
        compare([str(first), str(second)])


def test_command_prints_the_table_and_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(place(tmp_path, "float", BASE)), str(place(tmp_path, "int4", WORSE))]
    assert main(["compare", *paths, "--output", str(tmp_path / "out")]) == 3  # not decided
    out, err = capsys.readouterr()
    assert err == ""
    assert "0.70 ± 0.10" in out
    assert "0.10)" not in out, "the difference stands in points, once"
    assert "\N{MINUS SIGN}10\N{NO-BREAK SPACE}pt (" in out
    assert "int4: not decided: " in out
    assert "  next: with `olive-ext evaluate`: " in out, "`compare` takes no settings"
    assert "  documents of colours by number: lost 0, 1; won 7" in out
    assert (tmp_path / "out" / "compare.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("", "[]", "olive-ext"),
        ("", '{"metrics": 3}', "olive-ext"),
        ('"created": "', '"created": 5, "x": "', "olive-ext"),
        ('"n": 2', '"n": ' + "9" * 5000, "Exceeds"),
        ('"n": 2', '"n": ' + "[" * 100_000, "nested"),
        ('"acc": true', '"acc": [' * 3 + "]" * 3, "Expecting"),
        ('"num_documents": 2', '"num_documents": 3', "'numbers' 3"),
        ('"configs": {', '"configs": 5, "x": {', "broken"),
    ],
)
def test_forged_report_is_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, error: str
) -> None:
    """As one that is alone, or that is not there, is."""
    lines = [line(0, is_right=True), line(1, is_right=False)]
    one, two = (place(tmp_path, name, lines) for name in ("one", "two"))
    text = json.dumps(json.loads((two / "report.json").read_text(encoding="utf-8")))
    assert old in text
    (two / "report.json").write_text(text.replace(old, new) if old else new, encoding="utf-8")
    for paths, told in (
        ([one, two], error),
        ([one], "two"),
        ([one, tmp_path / "none two"], "none two': "),
    ):
        assert main(["compare", *map(str, paths)]) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert tells(said, told)
        assert ("two" in said) or len(paths) == 1

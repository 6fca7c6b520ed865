"""What is kept of lm-eval's samples: values, answers as texts, whether two runs asked the same; and known scores, which
are not computed again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from olive_ext.backends.lm_eval_run import run_tasks
from olive_ext.backends.task_loading import LoadedTasks, load_tasks
from olive_ext.backends.word_errors import word_error_rate
from olive_ext.config import EvaluationSettings
from olive_ext.errors import RunError, TaskError
from olive_ext.run.reference import answers as answers_module
from olive_ext.run.reference.answers import (
    Answers,
    check_same_questions,
    mean_metrics,
    packed,
    question_of,
    read_answers,
    target_of,
    unpacked,
)
from olive_ext.run.reference.observer import ReferenceScores
from tests.backends.local_tasks import CHOICE, NAMES, write_tasks
from tests.backends.reference import instances, ort_lm
from tests.refusals import refused

Ran = tuple[dict[str, Any], LoadedTasks]
ByFilter = dict[tuple[str, str], Answers]
LETTERS = """task: tiny_letters
custom_dataset: !function local.load
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}\\nA.{{choices[0]}}\\nAnswer:"
doc_to_choice: ["A", "BB", "CCC"]
doc_to_target: answer
metric_list:
  - metric: acc_norm
"""
LAMBADA = """task: tiny_last_word
custom_dataset: !function local.load
test_split: test
output_type: loglikelihood
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
metric_list:
  - metric: perplexity
  - metric: acc
"""
BESIDE = CHOICE.replace("tiny_choice", "tiny_beside") + "process_results: !function own.scored\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = write_tasks(tmp_path_factory.mktemp("tasks"))
    (folder / "tiny_letters.yaml").write_text(LETTERS)
    (folder / "tiny_last_word.yaml").write_text(LAMBADA)
    (folder / "own.py").write_text(
        "def scored(doc, results):\n    return {'acc': 1.0, 'length': len(doc['question'])}\n"
    )
    (folder / "tiny_beside.yaml").write_text(BESIDE)
    names = [*NAMES, "tiny_letters", "tiny_last_word", "tiny_beside"]
    tasks = load_tasks(names, str(folder))
    settings = EvaluationSettings(tasks=names, bootstrap_iters=0, num_fewshot=0)
    results = run_tasks(ort_lm(), tasks, settings)
    return results, tasks


@pytest.fixture
def answers(run: Ran) -> ByFilter:
    results, tasks = run
    return {(item.task, item.filter): item for item in read_answers(results["samples"], tasks.tasks)}


def test_metrics_are_means_only(answers: ByFilter) -> None:
    assert {key: list(item.metrics) for key, item in answers.items()} == {
        ("tiny_choice", "none"): ["acc", "acc_norm"],
        ("tiny_rolling", "none"): [],
        ("tiny_generate", "strict"): ["exact_match", "cut_off", "stopped"],
        ("tiny_generate", "loose"): ["exact_match", "cut_off", "stopped"],
        ("tiny_letters", "none"): ["acc_norm"],
        ("tiny_last_word", "none"): ["acc"],
        ("tiny_beside", "none"): ["acc", "length"],
    }


def test_values_average_to_lm_evals_results(run: Ran, answers: ByFilter) -> None:
    for (task, filter_name), item in answers.items():
        for metric in item.metrics.keys() - {"cut_off", "stopped"}:  # ours: how an answer ended
            values = [answer.values[metric] for answer in item.by_document.values()]
            expected = run[0]["results"][task][f"{metric},{filter_name}"]
            assert sum(values) / len(values) == pytest.approx(expected)
    targets = answers["tiny_last_word", "none"]
    mean = np.mean([answer.values["loglikelihood"] for answer in targets.by_document.values()])
    assert targets.text_metric == "perplexity"
    assert np.exp(-mean) == pytest.approx(run[0]["results"]["tiny_last_word"]["perplexity,none"])


def test_answers_and_questions_are_texts(run: Ran, answers: ByFilter) -> None:
    """A choice is right where it is the target; of a single target it is said whether it was the most likely."""
    results, tasks = run
    for task, metric in (("tiny_choice", "acc"), ("tiny_letters", "acc_norm")):
        found, lines = answers[task, "none"], results["samples"][task]
        assert len(lines) == 6
        for line in lines:
            answer = found.by_document[line["doc_id"]]
            is_right = answer.text == target_of(tasks.tasks[task], line)
            assert is_right == bool(answer.values[metric])
    line = results["samples"]["tiny_choice"][2]
    assert question_of(tasks.tasks["tiny_choice"], line) == "the cat sat"
    assert target_of(tasks.tasks["tiny_choice"], line) == "on"
    assert question_of(object(), line) == "the cat sat"
    line = results["samples"]["tiny_generate"][0]
    assert answers["tiny_generate", "loose"].by_document[0].text == line["resps"][0][0].strip()
    for answer in answers["tiny_last_word", "none"].by_document.values():
        assert answer.text.startswith("most likely" if answer.values["acc"] else "not most likely")
        assert answer.text.endswith("nats)")


def test_other_questions_are_refused_by_task(answers: ByFilter) -> None:
    found = answers["tiny_choice", "none"]
    check_same_questions(found, found)
    changed = {**found.by_document, 3: replace(found.by_document[3], digest="other")}
    with refused(TaskError, "not_comparable", holds=("tiny_choice", "3")):
        check_same_questions(found, replace(found, by_document=changed))
    fewer = {number: answer for number, answer in found.by_document.items() if number}
    with refused(TaskError, "not_comparable"):
        check_same_questions(found, replace(found, by_document=fewer))


def test_word_errors_of_documents_average_to_the_rate_of_all() -> None:
    """Of documents of different lengths; a rate that is another one than all errors by all words has no such values."""
    pairs = [("a b c d", "a b c d"), ("a b", "a x"), ("a", "a b c"), ("a b c d e f", "a b")]
    lines = [
        {"doc_id": number, "filter": "none", "doc": {}, "arguments": [("", {})], "target": said, "wer": (said, written)}
        | {
            "resps": [[written]],
            "filtered_resps": [written],
            **dict.fromkeys(("doc_hash", "prompt_hash", "target_hash")),
        }
        for number, (said, written) in enumerate(pairs)
    ]

    def read(rate: Any) -> Answers:
        task = SimpleNamespace(
            aggregation=lambda: {"wer": rate}, higher_is_better=lambda: {"wer": False}, OUTPUT_TYPE="generate_until"
        )
        return read_answers({"speech": lines}, {"speech": task})[0]

    kept = read(word_error_rate)
    values = [answer.values["wer"] for answer in kept.by_document.values()]
    assert values == pytest.approx([0, 1 / 3.25, 2 / 3.25, 4 / 3.25])
    assert sum(values) / 4 == pytest.approx(word_error_rate(pairs))
    assert kept.metrics == {"wer": False}
    assert "wer" not in next(iter(read(lambda given: 0.5).by_document.values())).values
    assert unpacked(packed([kept]))[0].by_document[3].values == kept.by_document[3].values

    plain = {
        number: replace(answer, values={"wer": answer.values["wer"]}) for number, answer in kept.by_document.items()
    }
    (as_numbers,) = packed(
        [replace(kept, by_document=plain)]
    )  # as a task has them whose rate of a document is a number
    assert as_numbers.values.keys() == {"wer"}
    assert unpacked([as_numbers])[0].by_document[3].values == {"wer": values[3]}


def test_means_are_known_by_their_function_and_directions_by_task_or_lm_eval(tmp_path: Path) -> None:
    """A task's own aggregation may be called as one of lm-eval's; nobody knows which way its own metric is better."""
    folder = write_tasks(tmp_path)
    own = "def own(doc, results):\n    return {}\n\n\ndef mean(values):\n    return min(values)\n"
    (folder / "own.py").write_text(own, encoding="utf-8")
    listed = "".join(
        f"  - {{metric: {name}, aggregation: {how}}}\n"
        for name, how in [
            ("acc", "mean"),
            ("error", "mean"),
            ("bad", "mean, higher_is_better: false"),
            ("lowest", "!function own.mean"),
        ]
    )
    (folder / "own.yaml").write_text(
        CHOICE.replace("tiny_choice", "own").replace("  - metric: acc\n  - metric: acc_norm\n", listed)
        + "process_results: !function own.own\n",
        encoding="utf-8",
    )
    task = load_tasks(["own"], str(folder)).tasks["own"]
    assert mean_metrics(task) == {"acc": True, "error": None, "bad": False}


def test_word_errors_are_looked_for_where_a_task_has_them(run: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[Any] = []
    monkeypatch.setattr(answers_module, "word_errors", looked_at.append)
    assert read_answers(run[0]["samples"], run[1].tasks)
    assert looked_at == []


GREEDY = {"until": ["\n"], "max_gen_toks": 5}


@pytest.mark.parametrize(
    ("known", "kind", "asked", "answer"),
    [
        (("the cat", " sat"), "loglikelihood", ("the cat", " sat"), (-0.75, True)),
        (("the cat sat",), "loglikelihood_rolling", ("the cat sat",), -0.75),
        (("a", "b"), "loglikelihood", ("the cat", ""), (0.0, True)),
        (("a",), "loglikelihood_rolling", ("",), 0.0),  # an empty page
        (("a", "b"), "generate_until", ("the cat", GREEDY), "asked 1"),  # the model's own in the second run
        (("the cat", " sat"), "loglikelihood", ("the dog", " sat"), None),  # prompts change from run to run
    ],
)
def test_scores_of_the_reference_answer_the_second_run(
    known: tuple[str, ...], kind: str, asked: tuple[Any, ...], answer: Any
) -> None:
    scores = ReferenceScores()
    compared: Any = SimpleNamespace(reference_logprobs=[-0.5, -0.25], reference_is_greedy=[True, True])
    scores.note(known, compared)
    requests = instances(kind, [asked])
    if answer is None:
        with refused(RunError, "failed"):
            scores(requests, list)
    else:
        assert scores(requests, lambda passed: [f"asked {len(passed)}"]) == [answer]

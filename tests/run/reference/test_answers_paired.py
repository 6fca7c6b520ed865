"""Outcomes and flips from two runs of lm-eval, against a count over its samples, and thumbnails of what flips."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from olive_ext.backends.evaluated_task import GeneratedText
from olive_ext.backends.task_loading import load_tasks
from olive_ext.config import ClaimConfig
from olive_ext.engine.requests import FinishReason
from olive_ext.errors import TaskError
from olive_ext.media.pictures import data_of_url
from olive_ext.report.comparison import ALL, Comparison
from olive_ext.report.metrics import comparison_metrics
from olive_ext.run.reference.answers import Answers, DocumentAnswer, changed_answers, keyed, read_answers
from olive_ext.run.reference.pairing import MOST_THUMBNAILS, compare_answers, thumbnails_of
from olive_ext.run.reference.sampled_run import ReferenceRun, question_of
from olive_ext.session.requests import GenerationOutput
from tests.families.pictures import picture
from tests.refusals import refused

TASK = SimpleNamespace(doc_to_text=lambda doc: f"question {doc}", doc_to_choice=lambda doc: None)


def answers(
    task: str, values: Mapping[str, Sequence[float]], higher: bool = True, filter_name: str = "none"
) -> Answers:
    count = len(next(iter(values.values())))
    by_document = {
        number: DocumentAnswer(
            f"{task}-{number} asked", {name: given[number] for name, given in values.items()}, f"{values} {number}"
        )
        for number in range(count)
    }
    return Answers(task, filter_name, dict.fromkeys(values, higher), by_document)


def samples(task: str, count: int, filter_name: str = "none") -> dict[str, list[dict[str, Any]]]:
    lines = [
        {"doc_id": number, "doc": number, "target": f"t{number}", "arguments": [("p", "c")], "filter": filter_name}
        for number in range(count)
    ]
    return {task: lines}


def paired(*given: Any, **more: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    """Outcomes, flips, and outcomes of lengths."""
    found = compare_answers(Comparison({}), *given, **more)
    return found.outcomes, found.flips, found.lengths


def test_task_of_which_nothing_was_drawn_is_a_part_of_the_whole() -> None:
    reference = [answers("a", {"acc": [1, 1, 0, 0]}), answers("b", {"error": [0, 0, 0, 1]}, higher=False)]
    drawn = answers("a", {"acc": [1, 0]})
    outcomes, *_ = paired(reference, [drawn], samples("a", 2), {"a": TASK}, weights={"a": dict.fromkeys(range(2), 2.0)})
    assert [item.task for item in outcomes] == ["a", ALL]
    assert (outcomes[-1].num_population, outcomes[-1].reference) == (8, 5 / 8)


def test_flips_name_the_documents_and_both_answers() -> None:
    reference, candidate = answers("t", {"acc": [1, 1, 0, 0, 1]}), answers("t", {"acc": [1, 0, 0, 1, 1]})
    outcomes, flips, _ = paired([reference], [candidate], samples("t", 5), {"t": TASK})
    (found,) = outcomes
    assert (found.right_to_wrong, found.wrong_to_right, found.difference, found.mcnemar_p) == (1, 1, 0.0, 1.0)
    assert [(flip.doc_id, flip.direction, flip.question, flip.target, flip.metric) for flip in flips] == [
        (1, "right_to_wrong", "question 1", "t1", "acc"),
        (3, "wrong_to_right", "question 3", "t3", "acc"),
    ]
    assert flips[0].reference_answer == reference.by_document[1].text
    assert flips[0].candidate_answer == candidate.by_document[1].text


def test_documents_without_a_value_are_left_out() -> None:
    reference, candidate = answers("t", {"acc": [1, 1]}), answers("t", {"acc": [0, 1]})
    candidate.by_document[0].values.clear()
    outcomes, *_ = paired([reference], [candidate], samples("t", 2), {"t": TASK})
    assert (outcomes[0].num_documents, outcomes[0].difference) == (1, 0.0)


def test_other_prompts_are_refused() -> None:
    reference, candidate = answers("t", {"acc": [1, 1]}), answers("t", {"acc": [1, 1, 1]})
    with refused(TaskError, "not_comparable"):
        paired([reference], [candidate], samples("t", 3), {"t": TASK})


def test_a_metric_that_the_reference_never_meets_speaks_for_no_task() -> None:
    """Differences, bounds, flips and claims are of the first one that can be lost: GSM8K's second filter."""
    strict, loose = ("t", {"em": [0] * 4}), ("t", {"em": [1, 1, 1, 0]})
    reference = [answers(*strict, filter_name="strict"), answers(*loose, filter_name="loose")]
    candidate = [answers(*strict, filter_name="strict"), answers("t", {"em": [0, 0, 1, 0]}, filter_name="loose")]
    lines = {"t": [*samples("t", 4, "strict")["t"], *samples("t", 4, "loose")["t"]]}
    outcomes, flips, _ = paired(reference, candidate, lines, {"t": TASK})
    assert [(flip.filter, flip.doc_id) for flip in flips] == [("loose", 0), ("loose", 1)]
    found = comparison_metrics(Comparison({}, (), outcomes))
    assert {item.value for item in found if item.metric == "accuracy_difference"} == {-0.5}
    question = question_of(ClaimConfig(metric="accuracy_difference", within=0.01), ReferenceRun({}, reference, None))
    assert question.outcome == ("t", "em", "loose")


def test_tasks_in_which_nothing_can_be_lost_are_no_part_of_the_whole() -> None:
    """A filter that never finds an answer made a loss of 2.5 points over one task 0.4 over nine."""
    heard, silent = ([answers("a", {"acc": right})] for right in ([1, 1, 1, 0], [1, 0, 0, 0])), [0] * 8
    both = [[*own, answers("b", {"acc": silent}), answers("c", {"acc": silent})] for own in heard]
    assert [(one.task, one.num_documents, one.difference) for one in paired(*both)[0]][-1] == (ALL, 4, -0.5)
    both = [own[1:] for own in both]
    assert [(one.task, one.num_documents, one.difference) for one in paired(*both)[0]][-1] == (ALL, 16, 0)


def test_answers_that_only_their_limit_ends_are_counted() -> None:
    """Of two models' generated answers, those that ended in one alone give an outcome; equal ones none."""
    task = SimpleNamespace(higher_is_better=dict, aggregation=dict, **vars(TASK))

    def generated(count: int) -> tuple[dict[str, Any], list[Answers]]:
        reasons = [FinishReason.LENGTH if number < count else FinishReason.STOP_ID for number in range(20)]
        made = [GeneratedText.of("same", GenerationOutput("same", (1,), reason)) for reason in reasons]
        lines = samples("solve", 20)
        hashes = dict.fromkeys(("doc_hash", "prompt_hash", "target_hash"), "h")
        for line, text in zip(lines["solve"], made, strict=True):
            line |= {"resps": [[text]], **hashes}
        return lines, read_answers(lines, {"solve": task})

    (_, ended), (lines, endless) = generated(0), generated(12)
    outcomes, flips, (cut_off,) = paired(ended, endless, lines, {"solve": task})
    assert (outcomes, flips, changed_answers(ended, endless)) == ((), (), 12)
    assert (cut_off.task, cut_off.metric, cut_off.reference, cut_off.candidate) == ("solve", "cut_off", 0, 0.6)
    assert cut_off.low > 0
    assert paired(ended, ended, lines, {"solve": task})[2] == ()
    assert changed_answers(ended, ended) == 0


@pytest.mark.parametrize("of_a_report", [lambda answers: answers, keyed], ids=["answers", "packed"])
@pytest.mark.parametrize("prompt", ["asked", "otherwise"])
def test_a_document_that_two_tasks_ask_counts_once_over_all(prompt: str, of_a_report: Callable[..., Answers]) -> None:
    """A benchmark and a part of it, or the same by other prompts: the exact test knows no document twice."""
    both = [[answers("a", {"acc": right}), answers("part", {"acc": right})] for right in ([1, 1, 1, 0], [0, 0, 1, 1])]
    for own in both:
        part = {number: replace(answer, digest=f"a-{number} {prompt}") for number, answer in own[1].by_document.items()}
        own[1] = replace(own[1], by_document=part)
    both = [[of_a_report(one) for one in own] for own in both]
    lines = {**samples("a", 4), **samples("part", 4)}
    outcomes, *_ = paired(*both, lines, {"a": TASK, "part": TASK})
    assert [(item.task, item.num_documents, item.right_to_wrong) for item in outcomes][-1] == (ALL, 4, 2)
    assert changed_answers(*both) == 0


def test_a_document_that_two_tasks_ask_has_the_mean_of_both_whatever_their_order() -> None:
    """A prompt by which nothing is lost hides no loss by the other."""
    alone = answers("a", {"acc": [1, 1, 1, 0]})
    both = [alone, replace(alone, task="b")], [alone, replace(answers("a", {"acc": [0, 0, 1, 0]}), task="b")]
    for reference, candidate in (both, [own[::-1] for own in both]):
        outcomes, *_ = paired(reference, candidate)
        found = outcomes[-1]
        assert (found.task, found.num_documents, found.reference, found.difference) == (ALL, 4, 0.75, -0.25)
        assert (found.is_binary, found.right_to_wrong, found.wrong_to_right) == (True, 2, 0)
        assert (found.low < 0 < found.high, found.mcnemar_p > 0.5) == (True, True)
        names = {item.metric: item.value for item in comparison_metrics(Comparison({}, outcomes=outcomes))}
        assert names["accuracy_difference"] == -0.25


TASKS = Path(__file__).parents[3] / "recipes" / "vision" / "tasks"


def task(pictures: Any) -> Any:
    return SimpleNamespace(
        config=SimpleNamespace(doc_to_image="image"), eval_docs=[{}], doc_to_image=lambda doc: pictures
    )


def test_document_of_a_picture_task_has_its_own_picture() -> None:
    (loaded,) = load_tasks(["shapes_colour"], str(TASKS)).tasks.values()
    (url,) = thumbnails_of(loaded, 3)
    assert Image.open(io.BytesIO(data_of_url(url))).size == loaded.eval_docs[3]["image"].size
    assert url != thumbnails_of(loaded, 4)[0]


def test_few_pictures_of_a_document_are_shown_and_none_that_cannot_be_read(caplog: pytest.LogCaptureFixture) -> None:
    assert len(thumbnails_of(task([picture(0, 8, 8)] * 9), 0)) == MOST_THUMBNAILS
    assert len(thumbnails_of(task(picture(0, 8, 8)), 0)) == 1
    assert thumbnails_of(SimpleNamespace(), 0) == (), "a document of a text"
    assert thumbnails_of(task([b"no picture"]), 0) == ()
    assert "document 0: " in caplog.text

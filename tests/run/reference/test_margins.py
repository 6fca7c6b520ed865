"""Margins of two models' answers and tokens, against plain counts from their whole distributions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from olive_ext.backends.task_loading import LoadedTasks, Seeds, load_tasks
from olive_ext.report.margins import Margins, TaskMargins
from olive_ext.run.reference.answers import Answers, DocumentAnswer
from olive_ext.run.reference.margins import MORE, Both, _first_difference, measured
from olive_ext.run.reference.observer import Observer
from tests.backends.local_tasks import NAMES, write_tasks
from tests.backends.reference import model
from tests.run.duo import logprobs, perturbed
from tests.run.reference.test_comparison_run import MODES, NOISE, compare
from tests.text.tiny import byte_level


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> LoadedTasks:
    return load_tasks(NAMES, str(write_tasks(tmp_path_factory.mktemp("tasks"))), Seeds())


@pytest.fixture(scope="module")
def found(tasks: LoadedTasks) -> dict[str, Any]:
    return {mode: compare(tasks, mode, perturbed(NOISE)) for mode in MODES}


@pytest.fixture(scope="module")
def same(tasks: LoadedTasks) -> dict[str, Any]:
    return {mode: compare(tasks, mode, model()) for mode in ("resident", "answers")}


def by_task(margins: Margins | None) -> dict[str, TaskMargins]:
    return {} if margins is None else {item.task: item for item in margins.tasks}


def test_modes_agree_and_answers_alone_have_choices(found: dict[str, Any]) -> None:
    """Recorded and resident references give the same margins; without distributions those of choices are the same."""
    recorded, resident, alone = (found[mode][0].margins for mode in MODES)
    assert recorded == resident
    assert by_task(alone)["tiny_choice"].shrink == pytest.approx(by_task(recorded)["tiny_choice"].shrink, rel=1e-6)
    assert "tiny_rolling" in by_task(recorded)
    assert "tiny_rolling" not in by_task(alone)


def test_choices_are_those_of_lm_evals_log_probabilities(same: dict[str, Any], found: dict[str, Any]) -> None:
    """Margin, factor, noise and changes of the choices by a plain count over both models' logged answers."""
    comparison, results, models = found["recorded"]
    pairs = []
    theirs = same["answers"][1]["samples"]["tiny_choice"]
    for one, two in zip(theirs, results["samples"]["tiny_choice"], strict=True):
        first, second = ([item[0][0] for item in line["resps"]] for line in (one, two))
        best = first.index(max(first))
        pairs.append([own[best] - max(own[:best] + own[best + 1 :]) for own in (first, second)])
        logged = models.fields("tiny_choice", two)["margins"]
        assert list(logged.values()) == pytest.approx(pairs[-1], rel=1e-5, abs=1e-6)
    reference, candidate = np.array(pairs).T
    own = by_task(comparison.margins)["tiny_choice"]
    assert (own.item, own.unit, own.num_items) == ("answer", "nats", len(pairs))
    assert own.changed == (candidate < 0).sum()
    assert own.shrink == pytest.approx(candidate.sum() / reference.sum(), rel=1e-5)
    spread = np.quantile(np.abs(candidate - own.shrink * reference), 0.95)
    assert own.noise == pytest.approx(spread, rel=1e-5)
    assert own.within_noise == (own.shrink * reference < spread).mean()
    kept = sorted(margin for margin in candidate if margin >= 0)
    shown = [item.candidate_margin for item in comparison.margins.fragile if item.task == "tiny_choice"]
    assert sorted(shown) == pytest.approx(kept, rel=1e-5)


def test_tokens_of_texts_are_those_of_whole_distributions(tasks: LoadedTasks, found: dict[str, Any]) -> None:
    """The best token's margin over the next at every position, by a plain count."""
    pairs = []
    for _, doc in tasks.tasks["tiny_rolling"].doc_iterator(rank=0, limit=None, world_size=1):
        tokens = byte_level(True).encode(doc["text"])
        for one, two in zip(*(logprobs(net, tokens[:-1]) for net in (model(), perturbed(NOISE))), strict=True):
            best = int(one.argmax())
            pairs.append([own[best] - max(np.delete(own, best)) for own in (one, two)])
    reference, candidate = np.array(pairs).T
    own = by_task(found["recorded"][0].margins)["tiny_rolling"]
    assert (own.item, own.num_items, own.changed) == ("token", len(pairs), (candidate < 0).sum())
    assert own.shrink == pytest.approx(candidate.sum() / reference.sum(), rel=1e-5)
    assert (own.predicted, own.num_differing) == (None, None)


def test_first_differences_are_where_greedy_answers_part(found: dict[str, Any]) -> None:
    """Each document's first other token, both continuations and both margins, by both models' own greedy steps."""
    comparison, results, _ = found["recorded"]
    tokenizer, expected = byte_level(True), {}
    for line in results["samples"]["tiny_generate"][:6]:
        made = []
        for net in (model(), perturbed(NOISE)):
            tokens = tokenizer.encode(line["arguments"][0][0])
            start = len(tokens)
            for _ in range(6):
                tokens.append(int(logprobs(net, tokens)[-1].argmax()))
            made.append(tokens)
        index = next((place for place in range(start, start + 6) if made[0][place] != made[1][place]), None)
        if index is not None:
            one, two = (logprobs(net, made[0][:index])[-1] for net in (model(), perturbed(NOISE)))
            best = made[0][index]
            margins = [own[best] - max(np.delete(own, best)) for own in (one, two)]
            expected[line["doc_id"]] = (index - start, *margins)
    own = comparison.margins.differences
    assert expected
    assert by_task(comparison.margins)["tiny_generate"].num_differing == len(expected)
    assert {item.doc_id for item in own} == set(expected)
    for item in own:
        assert (item.index, item.reference_margin, item.candidate_margin) == pytest.approx(
            expected[item.doc_id], rel=1e-4
        )
        assert item.reference != item.candidate


@pytest.mark.parametrize("mode", ["resident", "answers"])
def test_a_model_against_itself_has_a_factor_of_one(same: dict[str, Any], mode: str) -> None:
    """No change, no noise, no difference, nothing predicted; the factor and its interval are exactly 1."""
    margins = same[mode][0].margins
    for item in margins.tasks:
        assert (item.shrink, item.shrink_low, item.shrink_high) == pytest.approx((1, 1, 1), abs=1e-7)
        assert (item.changed, item.within_noise, item.num_differing or 0) == (0, 0, 0)
        assert item.noise < 1e-6
    assert margins.differences == ()
    assert [item.shrink for item in margins.tasks if item.item == "answer"] == [1.0]


def both(reference: Sequence[Any], candidate: Sequence[Any], **more: Any) -> Both:
    """Answers of two models to one task, from the scores of each document's choices; None where it was not run."""
    pair = []
    for own in (reference, candidate):
        answers = {
            number: DocumentAnswer("", {"acc": 1.0}, "a", None, tuple(scores))
            for number, scores in enumerate(own)
            if scores is not None
        }
        pair.append([Answers("t", "none", {"acc": True}, answers)])
    lines = [
        {"doc_id": number, "filter": "none", "doc": {}, "arguments": [("q", f" {choice}") for choice in "abc"]}
        for number in range(len(candidate))
    ]
    task = SimpleNamespace(doc_to_text=lambda doc: "q", doc_to_choice=lambda doc: list("abc"))
    return Both(*pair, {"samples": {"t": lines}, **more.pop("results", {})}, {"t": task}, **more)


RANDOM = np.random.default_rng(0)
SCORES = RANDOM.normal(0, 2, (200, 3))
OTHER = SCORES + RANDOM.normal(0, 0.7, (200, 3))


def test_documents_without_numbers_are_left_out() -> None:
    """NaN in any place of either model's scores, an answer without a choice, and one of infinite margin."""
    bad = [(math.nan, 0, 1), (0, math.nan, 1), (0, 1, math.nan), (-math.inf, -math.inf, 0)]
    rest = [(0.0, 1.0, 3.0), (0.0, 1.0, 2.0)]
    for one, two in ((bad, [(0.0, 1.0, 2.0)] * 4), ([(0.0, 1.0, 2.0)] * 4, bad)):
        margins, known = measured(both([*one, *rest], [*two, *rest]))
        assert by_task(margins)["t"].num_items == 2
        assert known == {("t", 4): (2.0, 2.0), ("t", 5): (1.0, 1.0)}
    assert measured(both([(1.0,)], [(1.0,)])) == (None, {})
    assert measured(both([(math.nan, 0.0)], [(1.0, 0.0)])) == (None, {})
    assert measured(both([], [])) == (None, {})


def test_a_single_document_has_a_factor_without_an_interval() -> None:
    """And nothing is predicted of others."""
    (item,) = by_task(measured(both([(0.0, 2.0)], [(0.0, 1.0)]))[0]).values()
    assert (item.shrink, item.shrink_low, item.shrink_high) == (0.5, -math.inf, math.inf)
    assert (item.num_documents, item.noise, item.predicted) == (1, 0.0, None)


def test_choices_that_always_tie_have_no_factor() -> None:
    """All margins 0 in the reference: the factor is no number, and nothing breaks; unmoved ones predict nothing."""
    (item,) = by_task(measured(both([(1.0, 1.0)] * 30, [(2.0, 2.0)] * 30))[0]).values()
    assert math.isnan(item.shrink)
    assert (item.changed, item.num_items, item.predicted) == (0, 30, None)
    (item,) = by_task(measured(both([(1.0, 1.0)] * 30, [(2.0, 1.0), (0.0, 1.0)] * 15))[0]).values()
    assert math.isnan(item.shrink)
    assert item.changed == 15
    assert item.predicted.low < MORE / 2 < item.predicted.high


def test_predictions_are_about_documents_that_were_not_run() -> None:
    """Those that the reference alone has answered; else those behind the limit; else as many as `MORE`."""
    drawn = [scores if number < 80 else None for number, scores in enumerate(OTHER)]
    known = by_task(measured(both(SCORES, drawn))[0])["t"].predicted
    assert (known.documents, known.num_documents) == ("not run", 120)
    real = (SCORES[80:].argmax(1) != OTHER[80:].argmax(1)).sum()
    assert known.low <= real <= known.high
    counts = {"results": {"n-samples": {"t": {"original": 290, "effective": 200}}}}
    limited = by_task(measured(both(SCORES, OTHER, **counts))[0])["t"].predicted
    assert (limited.documents, limited.num_documents) == ("left out by the limit", 90)
    more = by_task(measured(both(SCORES, OTHER))[0])["t"].predicted
    assert (more.documents, more.num_documents) == ("more", MORE)


def test_drawn_documents_count_as_many_as_they_stand_for() -> None:
    """The factor and the share within the noise of a weighted sample are those of its documents repeated."""
    weights = {number: 1.0 + number % 3 for number in range(200)}
    own = by_task(measured(both(SCORES, OTHER, weights={"t": weights}))[0])["t"]
    times = [int(weights[number]) for number in range(200)]
    best, rows = SCORES.argmax(1), np.arange(200)
    reference, candidate = (
        np.repeat([row[top] - max(np.delete(row, top)) for row, top in zip(values, best, strict=True)], times)
        for values in (SCORES, OTHER)
    )
    assert len(rows) == own.num_items
    assert own.shrink == pytest.approx(candidate.sum() / reference.sum())
    assert own.within_noise == pytest.approx((own.shrink * reference < own.noise).mean())


def test_a_difference_within_a_character_shows_whole_characters() -> None:
    """Two letters whose first byte is one and the same token: the common text ends before it."""
    tokenizer = byte_level(False)
    one, two = tuple(tokenizer.encode("cat \u00eb dog")), tuple(tokenizer.encode("cat \u00ea hat"))
    index = next(place for place, pair in enumerate(zip(one, two, strict=False)) if pair[0] != pair[1])
    assert tokenizer.decode(one[:index]).endswith("\ufffd")
    found = _first_difference(Observer(), ("t", 0, ()), one, two, tokenizer)
    assert (found.before.rstrip(), found.index) == ("cat", index)
    assert (found.before + found.reference, found.before + found.candidate) == ("cat \u00eb dog", "cat \u00ea hat")
    ended = _first_difference(Observer(), ("t", 0, ()), one[:2], one, tokenizer)
    assert (ended.index, ended.reference, ended.reference_margin) == (2, "", None)

"""What the one line says, and what it never says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from olive_ext.report.comparison import ACCURACY, ALL, Comparison, Outcome, Reach, Spread, Stops
from olive_ext.report.place import Place
from olive_ext.report.verdict import band_of, verdict, worst_status
from olive_ext.stats.paired_answers import compare_outcomes
from tests.report.test_comparison import divergence, outcome

SAFE = {"difference": -0.002, "low": -0.008, "high": 0.004}
"""An interval that excludes the loss that matters, one point."""


def test_no_loss_is_found_where_one_that_matters_is_excluded() -> None:
    found = verdict(Comparison({}, (divergence("choice"),), (outcome(**SAFE),)))
    assert found.code == "no_loss_found"
    assert "; ".join(found.lines) == (
        "no loss found; choice acc difference \N{MINUS SIGN}0.20 pt (\N{MINUS SIGN}0.80 to +0.40), "
        "choice flips lost / won 4 / 2, "
        "mean KL 0.0123 nats (± 0.0010, as with weights of 4 to 5 bits), same top token 97.10\N{NO-BREAK SPACE}% "
        "(400 documents)"
    )


def test_no_difference_names_the_positions_and_the_vocabulary_that_were_reached() -> None:
    same = replace(divergence("choice"), kl=Spread(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0), top1_agreement=1.0)
    equal = outcome(difference=0.0, low=0.0, high=0.0, right_to_wrong=0, wrong_to_right=0)
    reach = Reach(384, 512, 0.23)
    found = verdict(Comparison({}, (same,), (equal,), reach=reach))
    assert found.code == "no_difference"
    assert found.headline == "no difference found, in up to 384 of 512 positions and 23 % of the vocabulary"
    short, cut = (
        verdict(Comparison({}, (same,), (equal,), reach=Reach(longest, 512, None), contexts=(64, 512)))
        for longest in (63, 64)
    )
    assert short.headline == "no difference found, in up to 63 of 512 positions"
    told = "the candidate's files allow 64 tokens, the reference's 512: no longer texts were compared"
    assert (short.evidence, short.reasons[1].code) == ((told,), "shorter")
    assert (cut.status, cut.headline, cut.code) == ("unknown", f"not decided: {told}", "shorter"), "texts filled it"
    damaged = {"cos_cache": "rows 450 to 511 of 512 are not the reference's", "norm": "is missing"}
    found = verdict(Comparison({}, (same,), (equal,), reach=reach, damaged=damaged))
    assert found.headline == "damaged: 'cos_cache' rows 450 to 511 of 512 are not the reference's, and 1 other"
    assert found.code == "damaged"
    lost = verdict(Comparison({}, (), (outcome(difference=-0.1, low=-0.15, high=-0.05),), damaged=damaged))
    assert lost.code == "loss"
    assert any("'cos_cache'" in line for line in lost.evidence)


def test_exit_status_is_the_worst_of_all_comparisons() -> None:
    kept, open_, lost = (
        Comparison({}, (), (outcome(**values),))
        for values in (SAFE, {}, {"difference": -0.1, "low": -0.15, "high": -0.05})
    )
    lost = replace(lost, outcomes=(replace(lost.outcomes[0], mcnemar_p=0.0),))
    assert [*map(worst_status, ([], [kept], [kept, open_], [kept, open_, lost]))] == [0, 0, 3, 1]


def test_interval_that_reaches_a_loss_that_matters_cannot_be_green() -> None:
    found = verdict(Comparison({}, (), (outcome(),)))
    assert (found.code, found.finding) == (
        "too_few",
        "not decided: choice acc may have lost up to 1.2 pt (evaluate 1,500 documents or more to know)",
    )
    assert verdict(Comparison({}, (), (outcome(),), matters=2.0)).code == "no_loss_found"


def test_number_of_documents_is_of_the_loss_that_matters() -> None:
    few = outcome(low=-0.05, high=0.05, documents_needed={"0.01": 5234, "0.03": 601})
    assert "evaluate 610 documents or more" in verdict(Comparison({}, (), (few,), matters=3.0)).finding
    near = outcome(low=-0.012, documents_needed={"0.01": 300})
    assert "near the loss that matters" in verdict(Comparison({}, (), (near,))).finding


def test_answers_without_a_flip_ask_for_as_many_as_exclude_the_loss() -> None:
    none = compare_outcomes("choice", "acc", "none", [1.0, 0.0] * 20, [1.0, 0.0] * 20)
    found = verdict(Comparison({}, (), (none,)))
    assert "evaluate 370 documents or more to know" in found.finding
    enough = compare_outcomes("choice", "acc", "none", [1.0, 0.0] * 185, [1.0, 0.0] * 185)
    assert verdict(Comparison({}, (), (enough,))).code == "no_loss_found"
    assert set(none.documents_needed.values()) == {None}, "no number comes from nothing"


def test_distance_overrules_silence() -> None:
    silent = outcome(difference=0.0, low=-0.26, high=0.26)
    text = divergence("wiki", perplexity_ratio=0.9, perplexity_ratio_stderr=0.01)
    far = divergence("choice", kl=0.31)
    found = verdict(Comparison({}, (far, text, replace(far, task=ALL)), (silent,)))
    assert (found.code, found.finding) == (
        "far",
        "the distributions are far apart, as with weights of 2 bits or fewer",
    )
    doubtful = divergence("choice", kl=0.15)
    found = verdict(Comparison({}, (doubtful,), (outcome(**SAFE),)))
    assert (found.code, found.finding) == ("distant", "the distributions are far apart, as with weights of 3 bits")


@pytest.mark.parametrize(
    ("kl", "agreement", "words"),
    [  # llama.cpp's numbers for Llama 3 8B: q8_0, q6_K, q4_K_M, q2_K; for Llama 2 7B: q4_K_M
        (0.001355, 0.97674, "as with weights of 6 to 8 bits"),
        (0.005452, 0.96031, "as with weights of 6 to 8 bits"),
        (0.031273, 0.91901, "as with weights of 4 to 5 bits"),
        (0.445132, 0.71138, "as with weights of 2 bits or fewer"),
        (0.012686, 0.94665, "as with weights of 4 to 5 bits"),
    ],
)
def test_bands_name_what_was_published(kl: float, agreement: float, words: str) -> None:
    assert band_of(divergence(kl=kl, top1_agreement=agreement)).words == words


def test_near_ties_of_a_weak_model_are_no_loss_and_another_model_is_named() -> None:
    """The share of equal top tokens is a figure: 0.75 % at 0.0033 nats are ties. 0 % at 3 nats are another model's."""
    ties = divergence("choice", kl=0.0033, top1_agreement=0.0075)
    found = verdict(Comparison({}, (ties,), (outcome(**SAFE),)))
    assert (found.status, found.code) == ("ok", "no_loss_found")
    assert "as with weights of 6 to 8 bits" in found.lines[-1]
    assert "same top token 0.75" in found.lines[-1]
    other = verdict(Comparison({}, (divergence("choice", kl=3.0, top1_agreement=0.0),), (outcome(**SAFE),)))
    assert (other.status, other.headline) == ("loss", "the distributions are far apart, this looks like another model")


@pytest.mark.parametrize(("lost", "won", "documents"), [(20, 6, 200), (14, 3, 200)])
def test_green_is_of_every_task_and_names_the_one_that_is_not(lost: int, won: int, documents: int) -> None:
    """Ten tasks without a flip hide nothing: Holm's correction for eleven keeps the loss, and no green covers it."""
    right = np.ones(1000)
    tasks = [compare_outcomes(f"task{number}", "acc", "none", right, right) for number in range(10)]
    flipped = np.repeat([-1.0, 1.0, 0.0], [lost, won, documents - lost - won])
    worse = compare_outcomes("worse", "acc", "none", flipped <= 0, (flipped == 1) | (flipped == 0))
    whole = compare_outcomes(ALL, ACCURACY, "none", np.ones(10_200), np.arange(10_200) >= 2)
    found = verdict(Comparison({}, (), (*tasks, worse, whole)))
    assert (found.status, found.code) == ("unknown", "too_few")
    (reason,) = (item for item in found.reasons if item.code == "too_few")
    assert (reason.task, reason.metric, reason.unit) == ("worse", "acc", "pt")
    assert reason.size == pytest.approx(-100 * worse.low)
    assert found.headline.startswith("not decided: worse acc may have lost up to 1")
    assert "over all tasks together a loss of 1 pt is excluded" in found.evidence
    fine = verdict(Comparison({}, (), (*tasks, whole)))
    assert fine.status == "ok"


def test_many_undecided_tasks_are_counted_and_the_worst_named() -> None:
    """What decides is said: so many documents exclude so much at best."""
    numbers = 40, 50, 60, 70, 80
    tasks = [compare_outcomes(f"task{number}", "acc", "none", np.ones(number), np.ones(number)) for number in numbers]
    found = verdict(Comparison({}, (), tuple(tasks)))
    assert [item.task for item in found.reasons] == ["task40", "task50", "task60", "task70", "task80"]
    assert found.headline.endswith(", task50 acc up to 7.1 pt, task60 acc up to 6 pt and 2 more")
    assert "40 documents can exclude 8.8 pt at best; evaluate 370 documents or more to know" in found.headline


@pytest.mark.parametrize("count", [1, 2, 5])
def test_one_document_of_a_graded_metric_passes_nothing(count: int) -> None:
    """F1, ROUGE and what has no upper end: a better answer to a few documents excludes nothing."""
    for scale in 1.0, 40.0:
        better = compare_outcomes("drop", "f1", "none", np.full(count, 0.03 * scale), np.full(count, 1.0 * scale))
        assert verdict(Comparison({}, (), (better,))).status == "unknown"


def test_small_loss_is_told_as_one() -> None:
    certain = outcome(low=-0.006, high=-0.001)
    found = verdict(Comparison({}, (), (certain,)))
    assert (found.code, found.finding) == ("small_loss", "small loss found in choice acc, of less than 1 pt")


def test_interval_below_zero_is_a_loss() -> None:
    worse = outcome(difference=-0.03, low=-0.05, high=-0.01, right_to_wrong=14, wrong_to_right=2, mcnemar_p=0.004)
    found = verdict(Comparison({}, (), (worse,)))
    assert (found.code, found.finding) == ("loss", "loss found in choice acc")


def test_lower_is_better_turns_the_sign() -> None:
    better = outcome(metric="error", difference=-0.03, low=-0.05, high=-0.01, higher_is_better=False)
    assert verdict(Comparison({}, (), (better,))).code == "gain"


def test_perplexity_of_texts_is_a_loss_even_where_answers_hold() -> None:
    found = verdict(Comparison({}, (divergence("wiki"),), (outcome(**SAFE),)))
    assert (found.code, found.finding) == ("loss", "loss found in wiki perplexity")
    assert str(found.figures[-1]) == "wiki perplexity +2.00 % (± 0.79)"


def test_few_texts_cannot_tell() -> None:
    found = verdict(Comparison({}, (divergence("wiki", perplexity_ratio=1.0, perplexity_ratio_stderr=0.02),)))
    assert (found.code, found.finding) == (
        "too_few",
        "not decided: wiki perplexity may have lost up to 3.9 % (evaluate 6,400 documents or more to know)",
    )
    for number in 1, 4:
        few = divergence("wiki", perplexity_ratio=1.3, perplexity_ratio_stderr=0.01, num_documents=number)
        found = verdict(Comparison({}, (few,)))
        assert (found.code, found.reasons[0].task, found.reasons[0].size) == ("too_few", "wiki", None)
        assert f"wiki perplexity is known of too few texts ({number} text" in found.finding


def test_certain_but_tiny_change_of_perplexity_is_not_named() -> None:
    tiny = divergence("wiki", perplexity_ratio=1.0009, perplexity_ratio_stderr=1e-5)
    assert verdict(Comparison({}, (tiny,), (outcome(**SAFE),))).code == "no_loss_found"


def test_perplexity_of_answers_is_neither_a_loss_nor_a_figure() -> None:
    found = verdict(Comparison({}, (divergence("choice"), divergence(ALL)), (outcome(**SAFE),)))
    assert found.code == "no_loss_found"
    assert not [figure for figure in found.figures if "perplexity" in figure.name]


def test_one_of_many_tasks_must_stand_correction() -> None:
    others = [outcome(f"task{number}", mcnemar_p=0.5, **SAFE) for number in range(9)]
    whole = outcome(ALL, "accuracy", **SAFE)
    worse = outcome("worse", mcnemar_p=0.02, right_to_wrong=10, wrong_to_right=1, low=-0.009, difference=-0.005)
    assert verdict(Comparison({}, (), (*others, worse, whole))).code == "no_loss_found"
    found = verdict(Comparison({}, (), (*others, replace(worse, mcnemar_p=0.004), whole)))
    assert (found.code, found.finding) == ("small_loss", "small loss found in worse acc, of less than 1 pt")


def test_outcome_over_all_tasks_leads_and_documents_are_counted_once() -> None:
    whole = outcome(ALL, "accuracy", num_documents=400, difference=-0.02, low=-0.03, high=-0.01)
    found = verdict(Comparison({}, (divergence("wiki"), divergence(ALL)), (outcome(), whole)))
    assert found.finding == "loss found in accuracy and wiki perplexity"
    assert (
        str(found.figures[0]) == "accuracy difference \N{MINUS SIGN}2.00 pt (\N{MINUS SIGN}3.00 to \N{MINUS SIGN}1.00)"
    )
    assert found.lines[-1].endswith("(600 documents)")


def test_metrics_without_right_or_wrong_are_judged_by_holm() -> None:
    one = outcome("one", "f1", is_binary=False, difference=-0.02, low=-0.039, high=-0.001, mcnemar_p=0.03)
    assert verdict(Comparison({}, (), (one,))).code == "loss"
    assert verdict(Comparison({}, (), (one, outcome("two", "f1", is_binary=False)))).code == "too_few"
    old = replace(one, mcnemar_p=1.0)
    assert verdict(Comparison({}, (), (old,))).code == "loss", "reports without its p-value have the interval alone"


def test_the_same_model_is_no_difference_found_and_not_called_equal() -> None:
    same = divergence("t", kl=0.0, perplexity_ratio=1.0, perplexity_ratio_stderr=0.0, top1_agreement=1.0)
    same = replace(same, kl=Spread(1e-9, 1e-9, 0, 0, 0, 0, 1e-8))
    nothing = outcome("t", difference=0.0, low=-0.009, high=0.009, right_to_wrong=0, wrong_to_right=0, mcnemar_p=1.0)
    line = "; ".join(verdict(Comparison({}, (same,), (nothing,))).lines)
    assert line.startswith("no difference found; t acc difference 0.00 pt (\N{MINUS SIGN}0.90 to +0.90)")
    assert "equal" not in line


def test_requests_without_an_answer_may_hide_a_loss() -> None:
    many = {"num_documents": 4000, **SAFE}
    whole = verdict(Comparison({}, (divergence("choice"),), (outcome(**many),)))
    partial = verdict(Comparison({}, (divergence("choice"),), (outcome(**many),), missing=3))
    assert partial.code == whole.code == "no_loss_found"
    assert partial.finding == f"{whole.finding}; 3 requests have no answer and are not in this"
    few = verdict(Comparison({}, (divergence("choice"),), (outcome(**SAFE),), missing=3))
    assert (few.code, few.finding) == (
        "too_few",
        "not decided: choice acc may have lost up to 1.5 pt (3 requests have no answer); "
        "3 requests have no answer and are not in this",
    )


def test_requests_without_an_answer_may_all_be_of_one_task() -> None:
    """Nine other tasks of as many documents dilute nothing."""
    tasks = tuple(replace(outcome(**SAFE), task=f"t{number}", num_documents=400) for number in range(10))
    assert verdict(Comparison({}, (), tasks)).code == "no_loss_found"
    assert verdict(Comparison({}, (), tasks, missing=8)).code == "too_few"


def test_equal_answers_say_nothing_of_those_that_are_missing() -> None:
    same = divergence("choice", kl=0.0, top1_agreement=1.0)
    same = replace(same, kl=Spread(0, 0, 0, 0, 0, 0, 0))
    none = outcome(right_to_wrong=0, wrong_to_right=0, difference=0.0, low=-0.001, high=0.001)
    assert verdict(Comparison({}, (same,), (none,))).code == "no_difference"
    assert verdict(Comparison({}, (same,), (none,), missing=1)).code == "no_difference"
    assert verdict(Comparison({}, (same,), (none,), missing=200)).code == "too_few"


def test_broken_task_is_not_hidden_among_many_positions() -> None:
    whole, near = divergence(ALL, kl=0.05), divergence("near", kl=0.01)
    far = divergence("far", kl=3.0, top1_agreement=0.3)
    found = verdict(Comparison({}, (near, far, whole), (outcome("near", **SAFE), outcome("far", **SAFE))))
    assert (found.code, found.finding) == (
        "far",
        "the distributions of far are far apart, as with weights of 2 bits or fewer",
    )
    alone = replace(far, kl=replace(far.kl, stderr=None), top1_agreement_stderr=None)
    assert (
        verdict(Comparison({}, (near, alone, whole), (outcome("near", **SAFE), outcome("far", **SAFE)))).code != "loss"
    )


def test_nothing_compared_says_so() -> None:
    assert verdict(Comparison({})).code == "nothing_compared"
    lost = verdict(Comparison({}, missing=7))
    assert (lost.code, lost.finding) == ("cannot_tell", "nothing was compared: 7 requests have no answer")
    broken = verdict(Comparison({}, missing=7, non_finite=3))
    assert (broken.code, broken.finding) == ("cannot_tell", "cannot tell: non-finite output of 3 requests")


def test_distance_that_is_no_number_is_never_no_loss() -> None:
    whole = divergence("choice")
    broken = replace(whole, kl=replace(whole.kl, mean=float("nan")))
    found = verdict(Comparison({}, (broken,), (outcome(),)))
    assert (found.code, found.finding) == ("cannot_tell", "cannot tell: non-finite KL of choice")


def test_difference_that_is_no_number_is_never_no_loss() -> None:
    found = verdict(Comparison({}, (), (outcome(difference=float("nan")),)))
    assert found.code == "cannot_tell"
    for end in "low", "high":
        assert verdict(Comparison({}, (), (outcome(**{**SAFE, end: float("nan")}),))).code == "cannot_tell"
    ratio = divergence("wiki", perplexity_ratio=float("nan"))
    assert verdict(Comparison({}, (ratio,))).finding == "cannot tell: non-finite wiki perplexity"


def _graded(metric: str, filter_name: str, right: int, lost: int, won: int = 0, task: str = "gsm8k") -> Outcome:
    """1,319 documents of which the reference answers so many rightly."""
    reference = np.arange(1319) < right
    candidate = reference.copy()
    candidate[:lost], candidate[right : right + won] = False, True
    return compare_outcomes(task, metric, filter_name, reference, candidate)


@pytest.mark.parametrize(
    "beside", [(), (compare_outcomes(ALL, ACCURACY, "none", [1.0, 0.0] * 5000, [1.0, 0.0] * 5000),)]
)
def test_a_first_metric_that_nothing_meets_does_not_hide_a_loss_in_another(beside: tuple[Outcome, ...]) -> None:
    """GSM8K's strict match, which a model that words its answers otherwise never meets, is the task's first."""
    strict = _graded("exact_match", "strict-match", 0, 0)
    flexible = _graded("exact_match", "flexible-extract", 900, 130)
    found = verdict(Comparison({}, (divergence("gsm8k"),), (strict, flexible, *beside)))
    assert (found.code, found.headline) == ("loss", "loss found in gsm8k exact_match (flexible-extract)")
    unsure = _graded("exact_match", "flexible-extract", 900, 30, 24)
    found = verdict(Comparison({}, (divergence("gsm8k"),), (strict, unsure, *beside)))
    assert found.code == "too_few"
    assert "gsm8k exact_match (flexible-extract) may have lost up to 1." in found.finding


def test_a_loss_in_a_second_metric_is_one_of_the_model() -> None:
    plain, normed = _graded("acc", "none", 700, 0, task="choice"), _graded("acc_norm", "none", 900, 60, task="choice")
    found = verdict(Comparison({}, (divergence("choice"),), (plain, normed)))
    assert (found.code, found.headline) == ("loss", "loss found in choice acc_norm")
    equal = _graded("acc_norm", "none", 900, 4, 3, task="choice")
    assert verdict(Comparison({}, (divergence("choice"),), (plain, equal))).code == "no_loss_found"


def _valued(lost: float, task: str = "drop") -> Outcome:
    """F1 of 400 documents of which every other one lost so much, and each tenth won a little."""
    reference = np.linspace(0.2, 0.9, 400)
    numbers = np.arange(400)
    candidate = reference - lost * (numbers % 2) + 0.01 * (numbers % 10 == 0)
    return compare_outcomes(task, "f1", "none", reference, candidate)


@pytest.mark.parametrize("right", [0, 900])
def test_a_loss_in_f1_beside_a_silent_metric_is_one_of_the_model(right: int) -> None:
    """DROP has an exact match, which may hold or be met by nothing, beside its F1."""
    exact = _graded("em", "none", right, 0, task="drop")
    found = verdict(Comparison({}, (divergence("drop"),), (exact, _valued(0.15))))
    assert (found.code, found.headline) == ("loss", "loss found in drop f1")
    assert verdict(
        Comparison({}, (divergence("drop"),), (_graded("em", "none", 900, 0, task="drop"), _valued(0)))
    ).code in (
        "no_loss_found",
        "gain",
    )


def test_equal_distributions_do_not_hide_answers_of_another_quality() -> None:
    """Both score one text alike, and generate others: by other stop tokens, or another chat template."""
    same = divergence("drop", kl=0.0, perplexity_ratio=1.0, perplexity_ratio_stderr=0.0, top1_agreement=1.0)
    same = replace(same, kl=Spread(1e-9, 1e-9, 0, 0, 0, 0, 1e-8))
    assert verdict(Comparison({}, (same,), (_valued(0.15),))).code == "loss"


def test_few_documents_of_equal_f1_are_no_evidence() -> None:
    six = [0.2, 0.5, 0.5, 0.7, 0.9, 1.0]
    found = verdict(Comparison({}, (divergence("drop"),), (compare_outcomes("drop", "f1", "none", six, six),)))
    assert (found.code, found.headline) == (
        "too_few",
        "not decided: drop f1 may have lost up to 46 pt (6 documents can exclude 46 pt at best; evaluate 370 documents "
        "or more to know)",
    )
    one = compare_outcomes("drop", "f1", "none", [0.5], [0.4])
    assert verdict(Comparison({}, (divergence("drop"),), (one,))).code == "too_few"


@pytest.mark.parametrize("ratio", [0.9, 1.0, 1.1])
def test_a_task_without_a_mean_over_documents_is_never_no_loss_found(ratio: float) -> None:
    """Not by the perplexity of its choices, alone or beside others: nobody has compared its MCC, and it is named."""
    cola = divergence("cola", perplexity_ratio=ratio, perplexity_ratio_stderr=0.001)
    metrics = {"results": {"cola": {"mcc,none": 0.5, "mcc_stderr,none": 0.1}}}
    alone = verdict(Comparison({}, (cola,), metrics=metrics))
    beside = verdict(Comparison({}, (cola, divergence("choice")), (outcome(**SAFE),), metrics=metrics))
    for found in (alone, beside):
        assert (found.code, found.finding) == (
            "no_values",
            "not decided: cola (mcc) has no values by document to compare",
        )
        assert not [figure for figure in found.figures if "perplexity" in figure.name]


def test_tasks_that_have_neither_positions_nor_outcomes_are_named() -> None:
    """Where only answers are compared, whole texts are not compared either; a group has its tasks' documents."""
    results = {"cola": {"mcc,none": 0.5}, "wiki": {"word_perplexity,none": 9.0}, "glue": {"acc,none": 0.5}}
    metrics = {"results": {**results, "choice": {"acc,none": 0.5}}, "configs": {"cola": {}, "wiki": {}, "choice": {}}}
    found = verdict(Comparison({}, (), (outcome(**SAFE),), metrics=metrics))
    rest = "cola (mcc) and wiki (word_perplexity) have no values by document to compare"
    assert (found.code, found.finding) == ("no_values", f"not decided: {rest}")
    metrics["configs"].pop("choice")  # type: ignore[attr-defined]
    found = verdict(Comparison({}, metrics=metrics))
    assert (found.code, found.finding) == ("nothing_compared", f"nothing was compared: {rest}")


def test_equal_distributions_say_nothing_of_a_task_without_any() -> None:
    same = divergence("choice", perplexity_ratio=1.0, perplexity_ratio_stderr=0.0)
    same = replace(same, kl=Spread(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0), top1_agreement=1.0)
    equal = outcome(difference=0.0, low=0.0, high=0.0, right_to_wrong=0, wrong_to_right=0, mcnemar_p=1.0)
    metrics = {"results": {}, "configs": {"choice": {}, "cola": {}}}
    assert verdict(Comparison({}, (same,), (equal,), metrics=metrics)).code == "no_values"
    both = (same, replace(same, task="cola"))
    assert verdict(Comparison({}, both, (equal,), metrics=metrics)).code == "no_difference"


@pytest.mark.parametrize("kind", ["same", "kernels"])
def test_places_are_not_green_beside_a_certain_loss_or_lost_requests(kind: str) -> None:
    """Noise that explains scored tokens explains neither answers that are certainly worse nor absent ones."""
    place = Place(kind, "a", "b", "float32", 1e-6, 1e-5, 400)
    fine = Comparison({}, (), (outcome(**SAFE),), place=place)
    assert verdict(fine).headline == place.headline
    lost = verdict(replace(fine, outcomes=(outcome(difference=-0.2, low=-0.25, high=-0.15),)))
    assert (lost.code, lost.evidence[-1]) == ("place_unknown", "as two models: loss found in choice acc")
    absent = verdict(replace(fine, missing=3))
    assert absent.code == "place_unknown"
    assert "3 requests have no answer" in absent.evidence[-1]


def test_answers_that_do_not_end_anymore_are_a_loss() -> None:
    """Where the candidate's answers certainly run to their limit, no equal metric makes the verdict green."""
    kept, lost = (compare_outcomes("solve", "cut_off", "none", np.zeros(40), np.arange(40) < n, False) for n in (0, 30))
    assert verdict(Comparison({}, (), (outcome(**SAFE),), lengths=(kept,))).code == "no_loss_found"
    some, few = (
        compare_outcomes("solve", "cut_off", "none", np.zeros(count), np.arange(count) < n, False)
        for count, n in ((400, 8), (4000, 8))
    )
    codes = [verdict(Comparison({}, (), (outcome(**SAFE),), lengths=(item,))).code for item in (some, few)]
    assert codes == ["cut_off", "no_loss_found"], "certain in both: two points, and a fifth of one"
    others = tuple(replace(outcome(**SAFE), task=f"t{number}") for number in range(19))
    assert verdict(Comparison({}, (), others, lengths=(some,))).status == "unknown", "whatever stands beside it"
    found = verdict(Comparison({}, (), (outcome(**SAFE),), lengths=(lost,)))
    assert (found.code, found.headline) == ("cut_off", "loss found: more answers of solve run to their limit")


def test_stop_ids_are_named_by_what_the_candidate_lacks_and_has_besides() -> None:
    """More ends are in doubt where no answer shows what they cost, unless another file of the reference has them."""
    safe, writes = outcome(**SAFE), {"configs": {"colours": {}, "solve": {"output_type": "generate_until"}}}
    lost, more = Stops((1, 2), "a", (1,), "b"), Stops((1,), "a", (1, 2), "b")
    other = Stops((1,), "a", (1,), "b", ("min_length 60 for 0",))
    stops = [lost, more, other, replace(more, unused=(2,))]
    found = [verdict(Comparison({}, (), (safe,), stops=item)) for item in stops]
    found.append(verdict(Comparison({}, (), (safe,), metrics=writes, stops=more)))
    assert [item.status for item in found] == ["unknown", "unknown", "unknown", "ok", "unknown"]
    assert [item.code for item in found] == ["stops", "stops", "stops", "no_loss_found", "no_values"]
    assert found[1].headline == "not decided: the candidate also stops at 2 (b), and no task has it write answers"
    assert "also stops at 2" in found[3].finding
    assert "min_length 60" in found[2].headline

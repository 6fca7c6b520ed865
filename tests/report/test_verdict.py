"""The verdicts: a table of comparisons with their status and the reasons in their order, and one sentence a code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from olive_ext.config import Bound, LossBound
from olive_ext.model.files.package_config import GENAI_CONFIG
from olive_ext.report.changes import changes_of
from olive_ext.report.comparison import (
    ACCURACY,
    ALL,
    CONSTANTS,
    GENERATED,
    KV_CACHE,
    PACKAGE_TOKENIZER,
    TOKENIZER,
    Comparison,
    Coverage,
    Divergence,
    Outcome,
    PromptDiff,
    Spread,
    StopTokens,
    TextChange,
)
from olive_ext.report.diagnosis import FirstPosition, PlaceFinding
from olive_ext.report.metrics import comparison_metrics
from olive_ext.report.verdict import Reason, Verdict, band_of, verdict, worst_status
from olive_ext.run.bounds import broken_bounds
from olive_ext.stats.paired_answers import compare_outcomes
from tests.report.test_comparison import divergence, outcome

MINUS = "\N{MINUS SIGN}"
SAFE = {"difference": -0.002, "low": -0.008, "high": 0.004}
"""An interval that excludes the loss that matters, one point."""

LOST = {"difference": -0.03, "low": -0.05, "high": -0.01}
UNSAID = {"difference": 0.03, "low": 0.01, "high": 0.05, "higher_is_better": None, "is_binary": False}
NAN = float("nan")
A_BOUND = Reason("bound_broken", words="kl_mean = 0.2, required at most 0.1", field="require")


def of(*items: Divergence | Outcome, **more: Any) -> Comparison:
    """A comparison of these divergences and outcomes."""
    divergences = tuple(item for item in items if isinstance(item, Divergence))
    return Comparison({}, divergences, tuple(item for item in items if isinstance(item, Outcome)), **more)


def reasons(found: Verdict) -> str:
    """ "unknown: too_few choice acc 1.2 pt"."""
    sizes = ["" if item.size is None else f"{item.size:.2g} {item.unit}" for item in found.reasons]
    names = zip(found.reasons, sizes, strict=True)
    parts = [" ".join(filter(None, (item.code, item.task, item.metric, size))) for item, size in names]
    return f"{found.status}: {', '.join(parts)}"


def same(task: str = "choice", **more: Any) -> Divergence:
    """Distributions that are equal but for rounding."""
    found = divergence(task, perplexity_ratio=1.0, perplexity_ratio_stderr=0.0, top1_agreement=1.0, **more)
    return replace(found, kl=Spread(1e-9, 1e-9, 0, 0, 0, 0, 1e-8))


def kept(*items: Divergence | Outcome, **more: Any) -> Comparison:
    """Answers that exclude the loss, of near distributions, and what stands beside them."""
    return of(divergence("choice"), outcome(**SAFE), *items, **more)


def equal(*items: Divergence | Outcome, **more: Any) -> Comparison:
    """Equal distributions and answers, and what stands beside them."""
    return of(same(), EQUAL, *items, **more)


GRADED = {"is_binary": False, "low": -0.022, "high": 0.022, "right_to_wrong": 0, "wrong_to_right": 0}
EQUAL = outcome(difference=0.0, low=-0.001, high=0.001, right_to_wrong=0, wrong_to_right=0, mcnemar_p=1.0)


def graded(metric: str, filter_name: str, right: int, lost: int, won: int = 0, task: str = "gsm8k") -> Outcome:
    """1,319 documents of which the reference answers so many rightly."""
    reference = np.arange(1319) < right
    candidate = reference.copy()
    candidate[:lost], candidate[right : right + won] = False, True
    return compare_outcomes(task, metric, filter_name, reference, candidate)


def valued(lost: float, task: str = "drop") -> Outcome:
    """F1 of 400 documents of which every other one lost so much, and each tenth won a little."""
    reference = np.linspace(0.2, 0.9, 400)
    numbers = np.arange(400)
    candidate = reference - lost * (numbers % 2) + 0.01 * (numbers % 10 == 0)
    return compare_outcomes(task, "f1", "none", reference, candidate)


def unflipped(task: str, count: int) -> Outcome:
    return compare_outcomes(task, "acc", "none", np.arange(count) % 2, np.arange(count) % 2)


def cut_off(count: int, cut: int, metric: str = "cut_off") -> dict[str, Any]:
    """Of so many answers none of the reference's and `cut` of the candidate's run to their limit."""
    item = compare_outcomes("solve", metric, "none", np.zeros(count), np.arange(count) < cut, higher_is_better=False)
    return {"lengths": (item,)}


def worse_beside_ten(lost: int, won: int) -> list[Outcome]:
    """One of eleven tasks has 200 documents, of which so many flip; the others have none."""
    right, flipped = np.ones(1000), np.repeat([-1.0, 1.0, 0.0], [lost, won, 200 - lost - won])
    tasks = [compare_outcomes(f"task{number}", "acc", "none", right, right) for number in range(10)]
    whole = compare_outcomes(ALL, ACCURACY, "none", np.ones(10_200), np.arange(10_200) >= 2)
    return [*tasks, whole, compare_outcomes("worse", "acc", "none", flipped <= 0, flipped >= 0)]


SMALL_LOSS = divergence("wiki", perplexity_ratio=1.004, perplexity_ratio_stderr=0.0005)
FAR = divergence("far", kl=3.0, top1_agreement=0.3)
NEAR = (divergence("near", kl=0.01), divergence(ALL, kl=0.05), outcome("near", **SAFE), outcome("far", **SAFE))
TEN = [replace(outcome(**SAFE), task=f"t{number}") for number in range(10)]
MANY = outcome(num_documents=4000, **SAFE)
FLOOR = outcome(
    "gsm8k", "exact_match", reference=0.0, candidate=0.0, difference=0.0, low=-0.009, high=0.009, right_to_wrong=0,
    wrong_to_right=0, mcnemar_p=1.0,
)  # fmt: skip
NINE = [*(outcome(f"task{number}", mcnemar_p=0.5, **SAFE) for number in range(9)), outcome(ALL, "accuracy", **SAFE)]
WORSE = outcome("worse", mcnemar_p=0.02, right_to_wrong=10, wrong_to_right=1, low=-0.009, difference=-0.005)
F1 = outcome("one", "f1", is_binary=False, difference=-0.02, low=-0.039, high=-0.001, mcnemar_p=0.03)
STRICT = graded("exact_match", "strict-match", 0, 0)
BESIDE = compare_outcomes(ALL, ACCURACY, "none", [1.0, 0.0] * 5000, [1.0, 0.0] * 5000)
FLEXIBLE = "exact_match (flexible-extract)"
PLAIN = graded("acc", "none", 700, 0, task="choice")
MCC: dict[str, Any] = {"results": {"cola": {"mcc,none": 0.5, "mcc_stderr,none": 0.1}}}
GROUP: dict[str, Any] = {
    "results": {**MCC["results"], "wiki": {"word_perplexity,none": 9.0}, "glue": {"acc,none": 0.5}},
    "configs": {"cola": {}, "wiki": {}},
}
RISEN = TextChange("choice", "perplexity", 1000, 1.17, 0.01)
LAST_WORD: dict[str, Any] = {"results": {"choice": {"perplexity,none": 6.3, "acc,none": 0.5}}}
CORPUS_F1: dict[str, Any] = {"results": {"choice": {"acc,none": 0.5, "f1,none": 0.8}}, "configs": {"choice": {}}}
DAMAGED = {"cos_cache": "rows 450 to 511 of 512 are not the reference's", "norm": "is missing"}
MORE = StopTokens((1,), "a", (1, 2), "b")
WRITES = {"configs": {"colours": {}, "solve": {"output_type": "generate_until"}}}

CASES: dict[str, tuple[Comparison, str]] = {
    # A loss that matters is excluded, or it is not.
    "excluded": (kept(), "ok: no_loss_found"),
    "not excluded": (of(outcome()), "unknown: too_few choice acc 1.2 pt"),
    "a larger one matters": (of(outcome(), matters=2.0), "ok: no_loss_found"),
    "excluded within reach": (kept(reach=Coverage(63, None, 0.12)), "ok: no_loss_found"),
    "certain": (of(outcome(**LOST, mcnemar_p=0.004)), "loss: loss choice acc 3 pt"),
    "grades above 1, in per cent of the reference's": (  # a fall of 0.6 was "of less than 1 pt", a whole unit
        of(outcome(metric="grade", reference=1.05, difference=-0.6, low=-0.7, high=-0.5, mcnemar_p=0, is_binary=False)),
        "loss: loss choice grade 57 %",
    ),
    "certain and small": (
        of(outcome(low=-0.006, high=-0.001), reach=Coverage(63, None, 0.12)),
        "small_loss: small_loss choice acc 0.4 pt",
    ),
    "four tasks lost": (
        of(*(outcome(task, **LOST, mcnemar_p=0.001) for task in "abcd")),
        "loss: loss a acc 3 pt, loss b acc 3 pt, loss c acc 3 pt, loss d acc 3 pt",
    ),
    "nobody says which is better": (of(outcome(metric="error", **UNSAID)), "unknown: no_direction choice error 3 pt"),
    "nobody says it of a fall": (
        of(outcome(metric="error", **UNSAID | LOST)),
        "unknown: no_direction choice error 3 pt",
    ),
    "nobody says it of a small change": (
        of(outcome(metric="error", **UNSAID), matters=9.0),
        "unknown: no_direction choice error 3 pt",
    ),
    "nobody says it, and all together decide": (
        of(outcome(metric="error", **UNSAID), matters=9.0, over_all=True),
        "ok: no_loss_found",
    ),
    "nobody says it of a change by chance": (
        of(outcome(metric="error", **UNSAID | SAFE, mcnemar_p=0.5)),
        "ok: no_loss_found",
    ),
    "nobody says it of what may have risen": (
        of(outcome(metric="error", **UNSAID | SAFE | {"high": 0.02}, mcnemar_p=0.5)),
        "unknown: too_few choice error 2 pt",
    ),
    "lower is better": (of(outcome(metric="error", **LOST, higher_is_better=False)), "ok: gain choice error 3 pt"),
    "few documents without a flip": (of(unflipped("choice", 40)), "unknown: too_few choice acc 8.8 pt"),
    "enough without a flip": (of(unflipped("choice", 370)), "ok: no_loss_found"),
    # Several tasks and metrics.
    "one of eleven by 14": (of(*worse_beside_ten(20, 6)), "unknown: too_few worse acc 13 pt, pooled all accuracy"),
    "one of eleven by 11": (of(*worse_beside_ten(14, 3)), "unknown: too_few worse acc 10 pt, pooled all accuracy"),
    "one of eleven beside a small loss, over all": (
        of(*worse_beside_ten(20, 6), SMALL_LOSS, over_all=True),
        "small_loss: small_loss wiki perplexity 0.4 %, pooled all accuracy, too_few worse acc 13 pt",
    ),
    "a certain loss of one, measured below the bound": (
        of(
            *(outcome(task, num_documents=4000, **SAFE) for task in "ab"),
            outcome(ALL, ACCURACY, num_documents=12_000, **SAFE),
            outcome("c", difference=-0.008, low=-0.012, high=-0.004, mcnemar_p=1e-4),
            over_all=True,
        ),
        "unknown: too_few c acc 1.2 pt, pooled all accuracy",
    ),
    "first metric excludes it, over all": (
        of(
            outcome(**SAFE),
            outcome(metric="acc_norm", low=-0.03, high=0.02),
            over_all=True,
            reach=Coverage(63, None, 0.12),
        ),
        "ok: pooled choice acc, too_few choice acc_norm 3 pt",
    ),
    "accuracy excludes it, and a rating above 1 is open, over all": (
        of(outcome(**SAFE), outcome(metric="rating", reference=4, low=-1, high=1, is_binary=False), over_all=True),
        "ok: pooled choice acc, too_few choice rating 25 %",
    ),
    "first metric excludes it": (
        of(outcome(**SAFE), outcome(metric="acc_norm", low=-0.03, high=0.02)),
        "unknown: too_few choice acc_norm 3 pt",
    ),
    "first metric is open, over all": (
        of(outcome(), outcome(metric="acc_norm", low=-0.03, high=0.02), over_all=True),
        "unknown: too_few choice acc 1.2 pt, too_few choice acc_norm 3 pt",
    ),
    "second metric is lost, over all": (
        of(outcome(**SAFE), outcome(metric="acc_norm", **LOST, mcnemar_p=0.004), over_all=True),
        "loss: loss choice acc_norm 3 pt",
    ),
    "the others alone": (of(*worse_beside_ten(14, 3)[:-1]), "ok: no_loss_found"),
    "many, the worst first": (
        of(*(unflipped(f"task{count}", count) for count in (40, 50, 60, 70, 80))),
        "unknown: too_few task40 acc 8.8 pt, too_few task50 acc 7.1 pt, too_few task60 acc 6 pt, "
        "too_few task70 acc 5.1 pt, too_few task80 acc 4.5 pt",
    ),
    "uncorrected": (of(*NINE, WORSE), "ok: no_loss_found"),
    "a text, uncorrected": (of(*NINE, replace(SMALL_LOSS, perplexity_ratio_stderr=0.0017)), "ok: no_loss_found"),
    "corrected": (of(*NINE, replace(WORSE, mcnemar_p=0.004)), "small_loss: small_loss worse acc 0.5 pt"),
    "the whole leads": (
        of(
            divergence("wiki"),
            divergence(ALL),
            outcome(),
            outcome(ALL, "accuracy", difference=-0.02, low=-0.03, high=-0.01),
        ),
        "loss: loss all accuracy 2 pt, loss wiki perplexity 2 %",
    ),
    "second metric lost": (
        of(divergence("choice"), PLAIN, graded("acc_norm", "none", 900, 60, task="choice")),
        "loss: loss choice acc_norm 4.5 pt",
    ),
    "second metric held": (
        of(divergence("choice"), PLAIN, graded("acc_norm", "none", 900, 4, 3, task="choice")),
        "ok: no_loss_found",
    ),
    # GSM8K's strict match, which a model that words its answers otherwise never meets, is the task's first metric.
    "behind a silent metric": (
        of(divergence("gsm8k"), STRICT, graded("exact_match", "flexible-extract", 900, 130)),
        f"loss: loss gsm8k {FLEXIBLE} 9.9 pt",
    ),
    "behind a silent metric and all": (
        of(divergence("gsm8k"), STRICT, graded("exact_match", "flexible-extract", 900, 130), BESIDE),
        f"loss: loss gsm8k {FLEXIBLE} 9.9 pt",
    ),
    "unsure behind a silent metric": (
        of(divergence("gsm8k"), STRICT, graded("exact_match", "flexible-extract", 900, 30, 24)),
        f"unknown: too_few gsm8k {FLEXIBLE} 1.6 pt",
    ),
    "unsure behind a silent metric and all": (
        of(divergence("gsm8k"), STRICT, graded("exact_match", "flexible-extract", 900, 30, 24), BESIDE),
        f"unknown: too_few gsm8k {FLEXIBLE} 1.6 pt, pooled all accuracy",
    ),
    # Metrics without right or wrong.
    "values alone": (of(F1), "loss: loss one f1 2 pt"),
    "values by Holm": (
        of(F1, outcome("two", "f1", is_binary=False)),
        "unknown: too_few one f1 3.9 pt, too_few two f1 1.2 pt",
    ),
    "f1 beside a silent match": (
        of(divergence("drop"), graded("em", "none", 0, 0, task="drop"), valued(0.15)),
        "loss: loss drop f1 7.4 pt",
    ),
    "f1 beside a match": (
        of(divergence("drop"), graded("em", "none", 900, 0, task="drop"), valued(0.15)),
        "loss: loss drop f1 7.4 pt",
    ),
    "f1 gained beside a match": (
        of(divergence("drop"), graded("em", "none", 900, 0, task="drop"), valued(-0.05)),
        "ok: gain drop f1 2.6 pt",
    ),
    "f1 of equal distributions": (of(same("drop"), valued(0.15)), "loss: loss drop f1 7.4 pt"),
    "six equal f1": (
        of(divergence("drop"), compare_outcomes("drop", "f1", "none", *[[0.2, 0.5, 0.5, 0.7, 0.9, 1.0]] * 2)),
        "unknown: too_few drop f1 46 pt",
    ),
    "one f1": (
        of(divergence("drop"), compare_outcomes("drop", "f1", "none", [0.5], [0.4])),
        "unknown: too_few drop f1 98 pt",
    ),
    # Perplexities are of whole texts, and of enough of them.
    "perplexity lost": (of(divergence("wiki"), outcome(**SAFE)), "loss: loss wiki perplexity 2 %"),
    "perplexity unsure": (
        of(divergence("wiki", perplexity_ratio=1.0, perplexity_ratio_stderr=0.02)),
        "unknown: too_few wiki perplexity 3.9 %",
    ),
    "perplexity certain, and measured below the bound": (
        of(divergence("wiki", perplexity_ratio=1.0069, perplexity_ratio_stderr=0.0012), matters=0.8, over_all=True),
        "unknown: too_few wiki perplexity 0.93 %",
    ),
    "perplexity certain, without a bound": (
        of(divergence("wiki", perplexity_ratio=1.0069, perplexity_ratio_stderr=0.0012), matters=0.8),
        "loss: loss wiki perplexity 0.69 %",
    ),
    "accuracy certain, and measured below the bound": (
        of(outcome(difference=-0.008, low=-0.012, high=-0.004, mcnemar_p=1e-4), over_all=True),
        "unknown: too_few choice acc 1.2 pt",
    ),
    "four texts": (
        of(divergence("wiki", perplexity_ratio=1.3, perplexity_ratio_stderr=0.01, num_documents=4)),
        "unknown: too_few wiki perplexity",
    ),
    "one text": (
        of(divergence("wiki", perplexity_ratio=1.3, perplexity_ratio_stderr=0.01, num_documents=1)),
        "unknown: too_few wiki perplexity",
    ),
    "tiny change": (
        of(divergence("wiki", perplexity_ratio=1.0009, perplexity_ratio_stderr=1e-5), outcome(**SAFE)),
        "ok: no_loss_found",
    ),
    "perplexity of answers": (of(divergence("choice"), divergence(ALL), outcome(**SAFE)), "ok: no_loss_found"),
    # Distances. Near ties of a weak model (0.75 % of top tokens are equal at 0.0033 nats) are no loss.
    "far": (
        of(
            divergence("choice", kl=0.31),
            divergence("wiki", perplexity_ratio=0.9, perplexity_ratio_stderr=0.01),
            divergence(ALL, kl=0.31),
            outcome(difference=0.0, low=-0.26, high=0.26),
        ),
        "loss: far 0.31 nats",
    ),
    "distant": (of(divergence("choice", kl=0.15), outcome(**SAFE)), "unknown: distant 0.15 nats"),
    "ties": (of(divergence("choice", kl=0.0033, top1_agreement=0.0075), outcome(**SAFE)), "ok: no_loss_found"),
    "another model": (of(divergence("choice", kl=3.0, top1_agreement=0.0), outcome(**SAFE)), "loss: far 3 nats"),
    "one task far": (of(FAR, *NEAR), "loss: far far 3 nats"),
    "one task far without an error": (of(replace(FAR, kl=replace(FAR.kl, stderr=None)), *NEAR), "ok: no_loss_found"),
    # Equal distributions.
    "the same": (equal(), "ok: no_difference"),
    "other answers of the same values": (equal(changed_answers=1), "ok: no_loss_found"),
    "the same with few documents": (
        of(same("t"), outcome("t", difference=0.0, low=-0.009, high=0.009, right_to_wrong=0, wrong_to_right=0)),
        "ok: no_difference",
    ),
    "the same but for a task without any": (
        equal(metrics={"results": {}, "configs": {"choice": {}, "cola": {}}}),
        "unknown: no_values",
    ),
    "the same with that task": (
        of(same(), same("cola"), EQUAL, metrics={"results": {}, "configs": {"choice": {}, "cola": {}}}),
        "ok: no_difference",
    ),
    "one content": (of(unflipped("choice", 40), is_same_content=True), "ok: no_difference"),
    "one content with other answers": (of(outcome(), is_same_content=True), "unknown: too_few choice acc 1.2 pt"),
    "one content with other texts": (
        of(unflipped("choice", 370), is_same_content=True, texts=(TextChange("wiki", "ppl", 40, 1.004, 0.01),)),
        "unknown: too_few wiki ppl 2.4 %",
    ),
    "one content that is damaged": (
        of(unflipped("choice", 40), is_same_content=True, damaged=DAMAGED),
        "unknown: damaged",
    ),
    "shorter context": (
        equal(reach=Coverage(63, 512, None), contexts=(64, 512)),
        "ok: no_difference, shorter 4.5e+02 tokens",
    ),
    "what a model takes beside texts": (
        equal(reach=Coverage(63, 512, 0.12, ("picture", GENERATED), 1, seconds=2.25, judged=("norm", "up"))),
        "ok: no_difference",
    ),
    "shorter context that texts fill": (
        equal(reach=Coverage(64, 512, None), contexts=(64, 512)),
        "unknown: shorter 4.5e+02 tokens",
    ),
    "the same but for a grade's rounding": (
        of(same("mc2"), outcome("mc2", "mc2", difference=-2e-6, mcnemar_p=0.03, **GRADED)),
        "ok: no_difference",
    ),
    # A task whose documents the reference all gets wrong can lose nothing: alone it says nothing of a model.
    "nothing to lose": (of(divergence("gsm8k"), FLOOR), "unknown: none_right"),
    "nothing to lose without distributions": (of(FLOOR), "unknown: none_right"),
    "nothing to lose and the same": (of(same(), FLOOR), "ok: no_difference"),
    "nothing to lose in one of two": (of(FLOOR, MANY), "ok: no_loss_found, none_right"),
    "nothing to lose beside texts": (
        of(FLOOR, divergence("wiki", perplexity_ratio=1.0009, perplexity_ratio_stderr=1e-5)),
        "ok: no_loss_found, none_right",
    ),
    "gained where nothing was": (
        of(replace(FLOOR, candidate=0.1, difference=0.1, low=0.05, high=0.15, wrong_to_right=40, mcnemar_p=1e-9)),
        "ok: gain gsm8k exact_match 10 pt",
    ),
    "damaged": (equal(damaged=DAMAGED), "unknown: damaged"),
    "not compared": (equal(damaged={CONSTANTS: "are not compared: no access"}), "unknown: damaged"),
    "damaged and lost": (
        of(outcome(difference=-0.1, low=-0.15, high=-0.05), damaged=DAMAGED),
        "loss: loss choice acc 10 pt, damaged",
    ),
    # Requests without an answer may all be lost, and all be of one task.
    "few of many missing": (of(divergence("choice"), MANY, missing=3), "ok: no_loss_found, missing"),
    "few of few missing": (kept(missing=3), "unknown: too_few choice acc 1.5 pt, missing"),
    "ten tasks": (of(*TEN), "ok: no_loss_found"),
    "ten tasks with some missing": (
        of(*TEN, missing=8),
        f"unknown: {', '.join(f'too_few t{number} acc 2.8 pt' for number in range(10))}, missing",
    ),
    "the same but one": (equal(missing=1), "ok: no_difference, missing"),
    "the same but a third": (equal(missing=200), "unknown: too_few choice acc 33 pt, missing"),
    # What cannot be compared, and what is no number.
    "nothing": (of(), "unknown: nothing_compared"),
    "all missing": (of(missing=7), "unknown: cannot_tell"),
    "broken outputs": (of(missing=7, non_finite=3), "unknown: cannot_tell"),
    "broken distance": (
        of(replace(divergence("choice"), kl=replace(divergence().kl, mean=NAN)), outcome()),
        "unknown: cannot_tell",
    ),
    "broken difference": (of(outcome(difference=NAN)), "unknown: cannot_tell"),
    "broken low end": (of(outcome(**{**SAFE, "low": NAN})), "unknown: cannot_tell"),
    "broken high end": (of(outcome(**{**SAFE, "high": NAN})), "unknown: cannot_tell"),
    "broken perplexity": (of(divergence("wiki", perplexity_ratio=NAN)), "unknown: cannot_tell"),
    "a task of mcc": (
        of(divergence("cola", perplexity_ratio=1.0, perplexity_ratio_stderr=0.001), metrics=MCC),
        "unknown: no_values",
    ),
    "a task of mcc beside answers": (
        of(divergence("cola"), divergence("choice"), outcome(**SAFE), metrics=MCC),
        "unknown: no_values",
    ),
    "a corpus's F1 beside answers": (kept(metrics=CORPUS_F1), "unknown: no_values"),
    "a corpus's F1 where accuracy decides": (kept(metrics=CORPUS_F1, over_all=True), "ok: no_loss_found, uncompared"),
    # The perplexity of targets rose by 17 %, beside an accuracy that stayed: it was judged by nothing.
    "a perplexity of targets beside answers": (
        kept(texts=(RISEN,), metrics=LAST_WORD),
        "loss: loss choice perplexity 17 %",
    ),
    "the same where accuracy decides": (
        kept(texts=(RISEN,), metrics=LAST_WORD, over_all=True, matters=8.0),
        "loss: loss choice perplexity 17 %",
    ),
    "the same without values": (kept(metrics=LAST_WORD, over_all=True), "ok: no_loss_found, uncompared"),
    "a metric that is no number beside answers": (
        kept(metrics={"results": {"choice": {"acc,none": 1.0, "both,none": "1"}}}),
        "unknown: no_values",
    ),
    "a corpus's F1 of equal models": (equal(metrics=CORPUS_F1), "ok: no_difference"),
    "answers beside a group": (kept(metrics=GROUP), "unknown: no_values"),
    "a group": (of(metrics=GROUP), "unknown: nothing_compared"),
    "a group of a damaged model": (of(metrics=GROUP, damaged=DAMAGED), "unknown: damaged, nothing_compared"),
    "a group cut off": (of(metrics=GROUP, **cut_off(40, 30)), "loss: cut_off solve cut_off 75 pt, nothing_compared"),
    # Answers that run to their limit.
    "none cut off": (kept(**cut_off(40, 0)), "ok: no_loss_found"),
    "most cut off": (kept(**cut_off(40, 30)), "loss: cut_off solve cut_off 75 pt"),
    "two points cut off": (kept(**cut_off(400, 8)), "loss: cut_off solve cut_off 2 pt"),
    "ends lost": (kept(**cut_off(100, 58, "stopped")), "unknown: stops solve stopped 58 pt"),
    "ends lost where accuracy decides": (
        kept(over_all=True, **cut_off(100, 58, "stopped")),
        "unknown: stops solve stopped 58 pt",
    ),
    "some ends lost": (kept(**cut_off(100, 31, "stopped")), "ok: no_loss_found"),
    "a rate that is tiny and lost": (
        of(compare_outcomes("rate", "share", "none", np.full(9000, 1e-3), np.full(9000, 3e-4))),
        "small_loss: small_loss rate share 0.07 pt",
    ),
    "a fifth of one cut off": (kept(**cut_off(4000, 8)), "ok: no_loss_found"),
    "cut off beside many tasks": (
        of(*(replace(outcome(**SAFE), task=f"t{number}") for number in range(19)), **cut_off(400, 8)),
        "unknown: too_few solve cut_off 3.9 pt",
    ),
    # More ends are in doubt where no answer shows what they cost, unless another file of the reference has them.
    "an end lost": (kept(stops=StopTokens((1, 2), "a", (1,), "b")), "unknown: stops"),
    "an end more": (kept(stops=MORE), "unknown: stops"),
    "another search": (kept(stops=StopTokens((1,), "a", (1,), "b", ("min_length 60 for 0",))), "unknown: stops"),
    "another search beside a loss": (
        of(outcome(**LOST, mcnemar_p=0.004), stops=StopTokens((1,), "a", (1,), "b", ("min_length 60 for 0",))),
        "loss: loss choice acc 3 pt, stops",
    ),
    "an end that is known": (kept(stops=replace(MORE, unused=(2,))), "ok: no_loss_found, more_stops"),
    "an end more beside answers": (kept(metrics=WRITES, stops=MORE), "unknown: no_values, more_stops"),
}


@pytest.mark.parametrize("name", CASES)
def test_verdict_and_its_reasons(name: str) -> None:
    """The headline alone has a grade, and what is not decided or lost has a next step."""
    compared, expected = CASES[name]
    found = verdict(compared)
    assert reasons(found) == expected
    assert bool(found.next_step) == (found.status in ("unknown", "loss")), found.headline
    grades = ("small loss found", "not decided", "cannot tell", "no loss found", "no difference found")
    for judged in (found, verdict(compared, (A_BOUND,))):
        assert not [text for text in judged.evidence if text.startswith(grades)]
        assert judged.headline.startswith(judged.reasons[0].grade)


def test_documents_are_all_that_any_metric_has_and_a_loss_may_be_in_those_that_its_own_lacks() -> None:
    """A task's code may give no value of its last metric."""
    known = outcome("choice", num_documents=300, **SAFE), outcome("choice", "stop", num_documents=200, **SAFE)
    found = verdict(of(divergence("choice"), *known, missing=100))
    assert found.num_documents == 300
    lost = {item.metric: item.size for item in found.reasons if item.code == "too_few"}
    assert lost == {"stop": pytest.approx(100 / 3 + 0.8), "acc": pytest.approx(100 / 4 + 0.8)}


SAFE_CHANGE = f"choice acc difference {MINUS}0.20 pt ({MINUS}0.80 to +0.40)"
LOST_CHANGE = f"{MINUS}3.0 pt, {MINUS}5.0 to {MINUS}1.0"
UNJUDGED = "cola (mcc) and wiki (word_perplexity) have no values by document to compare"
SENTENCES = {
    "excluded": f"no loss found: {SAFE_CHANGE}",
    "excluded within reach": f"no loss found: {SAFE_CHANGE}, in positions 1 to 63 and 12 % of the vocabulary",
    "not excluded": "not decided: choice acc may have lost up to 1.2 pt (evaluate 1,500 documents or more to know)",
    "certain": f"loss found in choice acc ({LOST_CHANGE})",
    "certain and small": (
        f"small loss found in choice acc ({MINUS}0.40 pt, {MINUS}0.60 to {MINUS}0.10), of less than 1 pt, "
        "in positions 1 to 63 and 12 % of the vocabulary"
    ),
    "nobody says which is better": (
        "not decided: choice error (+3.0 pt, +1.0 to +5.0) changed, and nothing says whether more is better "
        "(`higher_is_better`)"
    ),
    "lower is better": f"no loss found, gain in choice error ({LOST_CHANGE})",
    "the whole leads": (
        f"loss found in accuracy ({MINUS}2.00 pt, {MINUS}3.00 to {MINUS}1.00) and wiki perplexity (+2.00 %, ± 0.79)"
    ),
    "four tasks lost": f"loss found in a acc ({LOST_CHANGE}), b acc ({LOST_CHANGE}), c acc ({LOST_CHANGE}) and 1 more",
    "perplexity certain, and measured below the bound": (
        "not decided: wiki perplexity (+0.69 %, ± 0.24) may have lost up to 0.93 % (near the loss that matters)"
    ),
    "first metric excludes it, over all": (
        f"in choice acc a loss of 1 pt is excluded: {SAFE_CHANGE}, in positions 1 to 63 and 12 % of the vocabulary; "
        "choice acc_norm may have lost up to 3 pt (evaluate 1,500 documents or more to know)"
    ),
    "many, the worst first": (
        "not decided: task40 acc may have lost up to 8.8 pt (40 documents without a flip would exclude 8.8 pt; "
        "evaluate 370 documents or more to know), task50 acc up to 7.1 pt, task60 acc up to 6 pt and 2 more"
    ),
    "perplexity unsure": (
        "not decided: wiki perplexity may have lost up to 3.9 % (evaluate 6,400 documents or more to know)"
    ),
    "one text": "not decided: wiki perplexity is known of too few texts (1 text, 5 are needed)",
    "far": "the distributions are far apart, as with weights of 2 bits or fewer (KL 0.310 nats)",
    "distant": "not decided: the distributions are far apart, as with weights of 3 bits (KL 0.150 nats)",
    "another model": "the distributions are far apart, this looks like another model (KL 3.00 nats)",
    "one task far": "the distributions of far are far apart, as with weights of 2 bits or fewer (KL 3.00 nats)",
    "shorter context": (
        "no difference found, in positions 1 to 63 of 512; the candidate's files allow 64 tokens, the reference's "
        "512: no longer texts were compared"
    ),
    "what a model takes beside texts": (
        "no difference found, in positions 1 to 63 of 512, 12 % of the vocabulary, sounds of up to 2.25 s, no picture "
        "and no answer generated token by token, with 'norm' and 1 more not the reference's, "
        "with 1 constant not compared"
    ),
    "not compared": "not decided: the files' constants are not compared: no access",
    "damaged": "damaged: 'cos_cache' rows 450 to 511 of 512 are not the reference's, and 1 other",
    "few of few missing": (
        "not decided: choice acc may have lost up to 1.5 pt (3 requests have no answer); "
        "3 requests have no answer and are not in this"
    ),
    "all missing": "nothing was compared: 7 requests have no answer",
    "broken outputs": "cannot tell: non-finite output of 3 requests",
    "broken distance": "cannot tell: non-finite KL of choice",
    "broken perplexity": "cannot tell: non-finite wiki perplexity",
    "a corpus's F1 beside answers": "not decided: choice f1 has no values by document to compare",
    "a corpus's F1 where accuracy decides": (
        f"no loss found: {SAFE_CHANGE}; not compared, as one score of a whole task: choice f1"
    ),
    "answers beside a group": f"not decided: {UNJUDGED}",
    "a group": f"nothing was compared: {UNJUDGED}",
    "most cut off": "loss found: more answers of solve (+75.0 pt, +53.9 to +87.3) run to their limit",
    "ends lost": (
        "not decided: more answers of solve (+58.0 pt, +46.2 to +67.8) only end at a stop string of the task"
    ),
    "an end more": "not decided: the candidate also stops at 2 (b), and no task has it write answers",
    "an end that is known": f"no loss found: {SAFE_CHANGE}; the candidate also stops at 2 (b)",
}


@pytest.mark.parametrize("name", SENTENCES)
def test_sentences(name: str) -> None:
    assert verdict(CASES[name][0]).finding == SENTENCES[name]


ALL_OF_IT = (
    "400 documents are all that choice has, and 1,500 are needed: add tasks (`mmlu` has 14,042) and decide over all "
    "tasks together"
)
CLAIM = '(`documents: "enough"` and `require: ["kl_mean<=0.09"]`)'
OVER_ALL = "decide over all tasks together (`fail_on_loss: 1`)"
NEXT_STEPS = {
    "not excluded": f"{ALL_OF_IT} (`fail_on_loss: 1`), or accept a loss of 1.2 pt (`matters: 1.2`)",
    "one of eleven by 14": OVER_ALL,
    "the same but a third": "run it again: what has an answer is not asked twice",
    "values by Holm": (
        "400 documents are all that one has, and 1,500 are needed: ask another task in its place (`mmlu` has 14,042), "
        "or accept a loss of 3.9 pt (`matters: 3.9`)"
    ),
    "perplexity unsure": f"accept a loss of 4 % (`matters: 4`), or judge by the mean KL {CLAIM}",
    "one text": "1 document is all that wiki has, and 5 are needed: ask another task in its place (`wikitext` has 62)",
    "few of few missing": "run it again: what has an answer is not asked twice",
    "shorter context that texts fill": "give the candidate's files the reference's context length, 512 tokens",
    "an end more": "add a task that has it write answers (`gsm8k`)",
    "excluded": "",
}


@pytest.mark.parametrize("name", NEXT_STEPS)
def test_next_step_is_computed_from_what_the_tasks_have(name: str) -> None:
    found = verdict(CASES[name][0])
    assert found.next_step == NEXT_STEPS[name]
    assert found.lines[-1].startswith("next: ") == bool(found.next_step)


def test_next_step_has_this_run_s_command_and_names_of_tasks_as_they_are() -> None:
    """An evaluation of a task with such a name would have ended with a KeyError."""
    name, arguments = "list (ABC) {model}", "int4 --reference float --tasks '{a}'"
    undecided = CASES["not excluded"][0]
    named = replace(undecided, outcomes=tuple(replace(item, task=name) for item in undecided.outcomes))
    assert name in verdict(named).next_step
    lost = replace(of(*worse_beside_ten(20, 0)), arguments=arguments)
    for found in (verdict(lost), verdict(lost, [A_BOUND])):
        assert f"`olive-ext locate {arguments}`" in found.next_step


@pytest.mark.parametrize(
    ("change", "holds"),
    [
        (
            {"damaged": {GENAI_CONFIG: "says model.a 3, the graph has 2; says b.c 1"}},
            (GENAI_CONFIG, "`model.a` and `b.c`"),
        ),
        (
            {"damaged": {GENAI_CONFIG: "names 'a', not judged: 'onnx_file_name' chose 'b'"}},
            ("`model.decoder.filename`",),
        ),
        ({"damaged": {"tokenizer_config.json": "has another"}}, ("tokenizer_config.json", "chat_template.jinja")),
        ({"damaged": {"processor_config.json": "prepares"}}, ("the same numbers", "preprocessor_config.json")),
        ({"damaged": {"tokenizer.json": "lacks <|user|>"}}, ("`added_tokens` of tokenizer.json",)),
        ({"damaged": {PACKAGE_TOKENIZER: "is another"}}, ("into the package", "`tokenizer`")),
        ({"damaged": {TOKENIZER: "writes"}}, ("the reference's tokenizer",)),
        ({"damaged": {CONSTANTS: "are not compared: no access"}}, ("repair the file", "evaluate again")),
        ({"damaged": {KV_CACHE: "11 nats off"}}, ("export the model again", "graph")),
        ({"damaged": {"cos_cache": "rows"}}, ("olive-ext mend",)),
        ({"asked": PromptDiff(("chat template",), ("chat_template.jinja",))}, ("chat template (chat_template.jinja)",)),
        ({"stops": StopTokens((1, 2), "config.json", (1,), "genai_config.json")}, ("config.json", "genai_config.json")),
    ],
)
def test_next_step_names_the_file_to_repair(change: dict[str, Any], holds: tuple[str, ...]) -> None:
    found = verdict(replace(of(outcome()), **change)).next_step
    assert [part for part in holds if part not in found] == []
    assert "onnx_file_name" not in found, "it is what was chosen, or cannot help"
    assert ("mend" in found) == ("cos_cache" in str(change) or KV_CACHE in str(change))


def asked(of_documents: int) -> dict[str, Any]:
    return {"n-samples": {"choice": {"original": of_documents, "effective": 400}}}


def far_from(kind: str) -> Comparison:
    return replace(of(FAR), reference={"kind": kind, "path": "the float"}, arguments="int4 --tasks far")


def at_node(**known: str) -> Comparison:
    """A first difference at a node, or at one that is not known."""
    first = FirstPosition("t", 0, 1, 1.0, **known)
    return of(outcome(**SAFE), place=PlaceFinding("different", "a", "b", "float32", 1, 1, 400, first=first))


NEAR_CHOICE = of(outcome(), divergence("choice", kl=0.005))
STEPS: dict[str, tuple[Comparison, str, str]] = {
    # A larger `matters` beside the bound that all tasks are held to would let a loss of that bound pass.
    "over all": (replace(CASES["not excluded"][0], over_all=True), "1.2 pt (`fail_on_loss: 1.2`)", "`matters"),
    "never right": (of(FLOOR), "filter", "a value for each document"),
    "no values": (kept(metrics=GROUP), "a value for each document", "filter"),
    "all documents were asked": (of(outcome(), metrics=asked(900)), "900 documents are all that choice has", "of the"),
    "more documents are there": (of(outcome(), metrics=asked(5000)), "evaluate 1,500 of the 5,000 documents", "add"),
    "another task has enough": (
        of(outcome(**GRADED, documents_needed={"0.01": 13_000})), "in its place (`mmlu` has 14,042)", "all tasks"
    ),
    "no task has enough": (of(outcome(**GRADED, documents_needed={"0.01": 14_100})), "", "in its place"),
    "a claim about the distance": (replace(NEAR_CHOICE, arguments="m"), 'documents: "enough"', "without `limit`"),
    "which a limit excludes": (replace(NEAR_CHOICE, arguments="m --limit 60"), "without `limit`", "--limit 60 --limit"),
    "a checkpoint": (far_from("hf"), "`olive-ext check int4 --against 'the float'`", "CHECKPOINT"),
    "an unknown checkpoint": (far_from("onnx"), "`olive-ext check int4 --against CHECKPOINT`", "'the float'"),
    "a node": (at_node(node="a"), "--repro DIR", "repro.py"),
    "a node whose graph is written": (at_node(node="a", repro="r"), "`python r/repro.py`", "--repro DIR"),
    "no node": (at_node(), "each setting", "--repro"),
    "a loss by another search": (CASES["another search beside a loss"][0], "ends and search (a) into the", "locate"),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_next_step_is_what_helps_here(name: str) -> None:
    compared, words, others = STEPS[name]
    step = verdict(compared).next_step
    assert (words in step, others in step) == (True, False), step


def test_a_distance_has_one_grade_in_the_figures_alone() -> None:
    near = divergence("choice", kl=0.0095)
    assert near.kl_interval[1] > 0.01, "the interval reaches into the next band"
    found = verdict(of(near, outcome()))
    assert "distance as with weights of 6 to 8 bits" in "".join(map(str, found.figures))
    assert found.next_step.endswith(f"judge by the mean KL {CLAIM}")


def test_figures_stand_on_the_last_line_with_the_documents() -> None:
    names = ("excluded", "ties", "the whole leads", "the same")
    lines = {name: verdict(CASES[name][0]).lines for name in names}
    figures = {name: next(line for line in reversed(own) if not line.startswith("next")) for name, own in lines.items()}
    assert figures["excluded"] == (
        f"choice acc difference {MINUS}0.20 pt ({MINUS}0.80 to +0.40), choice flips lost / won 4 / 2, "
        "mean KL 0.0123 nats (0.0103 to 0.0143, distance as with weights of 4 to 5 bits), same top token "
        "97.10\N{NO-BREAK SPACE}% (400 documents)"
    )
    assert "as with weights of 6 to 8 bits), same top token 0.75" in figures["ties"]
    assert figures["the whole leads"].startswith(f"accuracy difference {MINUS}2.00 pt ({MINUS}3.00 to {MINUS}1.00)")
    assert figures["the whole leads"].endswith("wiki perplexity +2.00 % (± 0.79) (600 documents)")
    skewed = {"perplexity_ratio": 1.004, "perplexity_ratio_stderr": 0.002, "perplexity_ratio_skewness": 3.0}
    few = verdict(of(divergence("wiki", num_documents=12, degrees=11.0, **skewed))).figures
    assert f"wiki perplexity +0.40 % ({MINUS}0.04 to +1.26)" in [str(item) for item in few]
    for name in ("perplexity of answers", "a task of mcc", "a task of mcc beside answers"):
        assert not [item for item in verdict(CASES[name][0]).figures if "perplexity" in item.name]


def test_what_would_decide_is_of_the_loss_that_matters() -> None:
    few = outcome(low=-0.05, high=0.05, documents_needed={"0.01": 5234, "0.03": 601})
    near = outcome(low=-0.012, documents_needed={"0.01": 300})
    for compared, words in (
        (of(few, matters=3.0), "evaluate 610 documents or more"),
        (of(near), "near the loss that matters"),
        (of(unflipped("choice", 40)), "evaluate 370 documents or more to know"),
    ):
        assert words in verdict(compared).reasons[0].words
    assert set(unflipped("choice", 40).documents_needed.values()) == {None}, "no number comes from nothing"


def test_exit_status_is_the_worst_of_all_comparisons() -> None:
    kept, open_, lost = (CASES[name][0] for name in ("excluded", "not excluded", "certain"))
    given = ([], [kept], [kept, open_], [kept, open_, lost])
    assert [worst_status(map(verdict, found)) for found in given] == [0, 0, 3, 1]
    assert worst_status([None]) == 0


@pytest.mark.parametrize(
    ("more", "status"),
    [({}, 0), ({"missing": 1}, 3), ({"stops": StopTokens((1,), "a", (2,), "b")}, 3), ({"damaged": DAMAGED}, 3)],
)
def test_loss_excluded_over_all_tasks_passes_where_only_single_ones_are_undecided(
    more: dict[str, Any], status: int
) -> None:
    found = of(*worse_beside_ten(20, 6), **more)
    over_all = replace(found, over_all=True)
    assert (worst_status([verdict(found)]), worst_status([verdict(over_all)])) == (3, status)
    assert "fail_on_loss" not in verdict(over_all).next_step
    assert verdict(over_all).headline.startswith("over all tasks together a loss of 1 pt is excluded") == (status == 0)
    assert "worse acc may have lost up to 13 pt" in verdict(over_all).finding
    assert "over all tasks together a loss of 40 pt is excluded" in verdict(replace(over_all, matters=40)).finding
    assert worst_status([verdict(of(*worse_beside_ten(20, 0), over_all=True))]) == 1
    assert worst_status([verdict(of(outcome(), over_all=True))]) == 3


def broken_by(loss: float, found: Comparison) -> list[Reason]:
    return broken_bounds([LossBound.of(loss)], comparison_metrics(found), found)


def test_perplexity_measured_beyond_the_bound_breaks_it_whatever_matters() -> None:
    wiki = divergence("wiki", perplexity_ratio=1.011, perplexity_ratio_stderr=0.01)
    found = of(wiki, over_all=True)
    broken = verdict(found, broken_by(1, found))
    assert [reason.code for reason in broken.reasons] == ["bound_broken", "too_few"]
    assert broken.finding == (
        "bound broken: wiki perplexity rose by 1.1 %, more than 1 % (`fail_on_loss`); wiki perplexity may have lost up "
        "to 3.1 % (evaluate 1,600 documents or more to know)"
    )
    assert broken.status == "loss"
    assert broken_by(2, found) == broken_by(1, of(divergence("cola", perplexity_ratio=1.5, is_text=False))) == []


@pytest.mark.parametrize("name", CASES)
def test_larger_bound_never_gives_a_worse_status(name: str) -> None:
    found, worst_first = CASES[name][0], ("loss", "unknown", "small_loss", "ok")
    overall = found.overall_outcome()
    for over_all in (False, True):
        ranks = []
        for bound in (0.01, 0.3, 1.0, 1.3, 4.0, 11.0, 40.0):
            is_broken = over_all and overall is not None and overall.difference < -bound / 100
            judged = replace(found, matters=bound, over_all=over_all)
            broken = [*(broken_by(bound, judged) if over_all else []), *([A_BOUND] if is_broken else [])]
            ranks.append(worst_first.index(verdict(judged, broken).status))
        assert ranks == sorted(ranks), f"with over_all = {over_all}"


def test_words_below_the_headline_stay_as_they_are_where_they_read_like_a_grade() -> None:
    found = verdict(of(outcome(task="no answer was found"), damaged=DAMAGED))
    assert found.evidence[0].startswith("no answer was found acc may have lost up to ")


@pytest.mark.parametrize(
    ("found", "step"),
    [
        (of(outcome()), "400 documents are all that choice has, and 1,500 are needed: add tasks (`mmlu` has 14,042)"),
        (
            of(outcome(**SAFE), divergence("choice", kl=0.01), arguments="M --reference 'a b' --tasks x"),
            "`olive-ext locate M --reference 'a b' --tasks x` names the weights that lose it, `olive-ext mend M "
            "--reference 'a b' --tasks x --within kl_mean=0.005 --output DIR` keeps them finer",
        ),
        (of(outcome(), missing=1), "run it again: what has an answer is not asked twice"),
        (of(outcome(), asked=PromptDiff(("template",), ())), "give both models the same template, then evaluate again"),
    ],
)
def test_broken_bound_is_the_headline_the_status_and_what_the_next_step_is_about(found: Comparison, step: str) -> None:
    line = "accuracy_difference = -2 pt, required at least -1 pt"
    bounds = [replace(A_BOUND, words=words) for words in (line, "kl_mean = 0.2")]
    broken, kept = verdict(found, bounds), verdict(found)
    assert (broken.status, broken.code, broken.headline) == ("loss", "bound_broken", f"bound broken: {line}")
    graded = kept.headline.removeprefix(f"{kept.reasons[0].grade}: ")
    graded = graded.replace("no loss found", "otherwise no loss found")
    assert broken.evidence == ("bound broken: kl_mean = 0.2", graded, *kept.evidence)
    assert broken.figures == kept.figures
    assert broken.next_step == f"{step}, or allow more (`require`)", "the bound that is broken"
    assert verdict(found, [replace(A_BOUND, field="fail_on_loss")]).next_step.endswith(
        ", or allow more (`fail_on_loss`)"
    )


def test_nobody_is_sent_for_two_hundred_million_documents() -> None:
    (change, *_) = changes_of(of(outcome(documents_needed={"0.01": 200_000_000})))
    assert change.advice.endswith("a million documents would be too few")


@pytest.mark.parametrize(("bound", "proposed"), [(0.001, "0.001"), (0.00123, "0.00123"), (0.00999, "0.005")])
def test_model_is_mended_to_keep_the_bound_that_was_broken(bound: float, proposed: str) -> None:
    for answers in outcome(**SAFE), outcome():
        found = of(answers, divergence("choice", kl=0.01), arguments="M")
        step = verdict(found, broken_bounds([Bound(metric="kl_mean", max=bound)], comparison_metrics(found))).next_step
        assert f"--within kl_mean={proposed} --output" in step


def test_fall_that_may_be_chance_asks_for_documents_also_of_models_far_apart() -> None:
    found = of(outcome(), divergence("choice", kl=0.15))
    assert {item.code for item in verdict(found).reasons} >= {"too_few", "distant"}
    step = verdict(found, [replace(A_BOUND, metric="accuracy_difference")]).next_step
    assert [part in step for part in ("1,500 are needed", "`olive-ext locate ")] == [True, True]


def test_kept_bound_is_said_and_not_advised_again() -> None:
    line = "all/kl_mean = 0.0050, required at most 0.0100"
    found = of(outcome(), divergence("choice", kl=0.005))
    assert "judge by the mean KL" in verdict(found).next_step
    kept = verdict(replace(found, kept_bounds=(line,)))
    assert (kept.status, kept.evidence[-1]) == (verdict(found).status, f"bound kept: {line}")
    assert "judge by the mean KL" not in kept.next_step


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


@pytest.mark.parametrize("count", [1, 2, 5])
def test_one_document_of_a_graded_metric_passes_nothing(count: int) -> None:
    """F1, ROUGE and what has no upper end: a better answer to a few documents excludes nothing."""
    for scale in 1.0, 40.0:
        better = compare_outcomes("drop", "f1", "none", np.full(count, 0.03 * scale), np.full(count, 1.0 * scale))
        assert verdict(of(better)).status == "unknown"


@pytest.mark.parametrize("worse", [0.3, 0.7])
def test_more_errors_are_no_smaller_loss(worse: float) -> None:
    """A mean beyond 1 would be held in another unit than the reference's share."""
    errors = np.tile([0.5, 0.9], 100)
    told = verdict(of(compare_outcomes("solve", "mistakes", "none", errors, errors + worse, higher_is_better=False)))
    assert (told.code, told.reasons[0].size) == ("loss", pytest.approx(100 * worse))


@pytest.mark.parametrize("kind", ["same", "kernels"])
def test_places_are_not_green_beside_a_certain_loss_or_lost_requests(kind: str) -> None:
    """Noise that explains scored tokens explains neither answers that are certainly worse nor absent ones."""
    fine = of(outcome(**SAFE), place=PlaceFinding(kind, "a", "b", "float32", 1e-6, 1e-5, 400))
    assert verdict(fine).headline == fine.place.headline
    lost = verdict(replace(fine, outcomes=(outcome(difference=-0.2, low=-0.25, high=-0.15),)))
    assert (lost.code, lost.evidence[-1]) == (
        "place_unknown",
        f"as two models: loss found in choice acc ({MINUS}20.0 pt, {MINUS}25.0 to {MINUS}15.0)",
    )
    absent = verdict(replace(fine, missing=3))
    assert absent.code == "place_unknown"
    assert "3 requests have no answer" in absent.evidence[-1]
    endless = verdict(replace(fine, stops=StopTokens((1, 2), "a", (1,), "b")))
    assert endless.code == "place_unknown"


def test_loss_that_matters_is_said_where_it_is_not_the_usual_one() -> None:
    said = "a loss of 2 pt or % matters (`matters`)"
    assert said in verdict(of(outcome(), matters=2.0)).evidence
    assert said not in verdict(of(outcome(), matters=2.0, over_all=True)).evidence
    assert not any("or % matters" in line for line in verdict(of(outcome())).evidence)

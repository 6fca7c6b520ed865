"""What the one line says, and what it never says."""

from __future__ import annotations

from dataclasses import replace

from olive_ext.report.comparison import ALL, Comparison, Spread
from olive_ext.report.verdict import verdict
from tests.report.test_comparison import divergence, outcome


def test_interval_around_zero_is_no_loss_found() -> None:
    found = verdict(Comparison({}, (divergence("choice"),), (outcome(),)))
    assert found.kind == "no_loss_found"
    assert found.line == (
        "no loss found: accuracy difference -0.4 % [-1.2, +0.4], KL 0.012 nats, top-1 agreement 97.1 % (400 documents)"
    )


def test_interval_below_zero_is_a_loss() -> None:
    worse = outcome(difference=-0.03, low=-0.05, high=-0.01, right_to_wrong=14, wrong_to_right=2, mcnemar_p=0.004)
    found = verdict(Comparison({}, (), (worse,)))
    assert (found.kind, found.line.split(":")[0]) == ("loss", "loss found in choice acc")


def test_lower_is_better_turns_the_sign() -> None:
    better = outcome(metric="error", difference=-0.03, low=-0.05, high=-0.01, higher_is_better=False)
    assert verdict(Comparison({}, (), (better,))).kind == "gain"


def test_perplexity_of_texts_is_a_loss_even_where_answers_hold() -> None:
    found = verdict(Comparison({}, (divergence("wiki"),), (outcome(),)))
    assert found.kind == "loss"
    assert found.line.startswith("loss found in wiki perplexity (+2 ± 0.78 %): accuracy difference -0.4 %")


def test_certain_but_tiny_change_of_perplexity_is_not_named() -> None:
    tiny = divergence("wiki", perplexity_ratio=1.0009, perplexity_ratio_stderr=1e-5)
    assert verdict(Comparison({}, (tiny,), (outcome(),))).kind == "no_loss_found"


def test_perplexity_of_answers_is_no_loss() -> None:
    assert verdict(Comparison({}, (divergence("choice"), divergence(ALL)), (outcome(),))).kind == "no_loss_found"


def test_one_of_many_tasks_must_stand_correction() -> None:
    others = [outcome(f"task{number}", mcnemar_p=0.5) for number in range(9)]
    worse = outcome("worse", mcnemar_p=0.02, right_to_wrong=10, wrong_to_right=1)
    assert verdict(Comparison({}, (), (*others, worse))).kind == "no_loss_found"
    found = verdict(Comparison({}, (), (*others, replace(worse, mcnemar_p=0.004))))
    assert (found.kind, found.line.split(":")[0]) == ("loss", "loss found in worse acc")


def test_outcome_over_all_tasks_leads() -> None:
    whole = outcome(ALL, "accuracy", num_documents=4000, difference=-0.02, low=-0.03, high=-0.01)
    found = verdict(Comparison({}, (divergence(ALL),), (outcome(), whole)))
    assert found.line.startswith("loss found in accuracy: accuracy difference -2.0 % [-3.0, -1.0]")
    assert "(4,000 documents)" in found.line


def test_the_same_model_is_no_difference_found_and_not_called_equal() -> None:
    same = divergence("t", kl=0.0, perplexity_ratio=1.0, perplexity_ratio_stderr=0.0, top1_agreement=1.0)
    same = replace(same, kl=Spread(1e-9, 1e-9, 0, 0, 0, 0, 1e-8))
    nothing = outcome("t", difference=0.0, right_to_wrong=0, wrong_to_right=0, mcnemar_p=1.0)
    line = verdict(Comparison({}, (same,), (nothing,))).line
    assert line.startswith("no difference found: accuracy difference +0.0 % [-1.2, +0.4]")
    assert "equal" not in line


def test_nothing_compared_says_so() -> None:
    assert verdict(Comparison({})).kind == "nothing_compared"


def test_divergence_alone_is_enough() -> None:
    still = divergence("wiki", perplexity_ratio=1.001)
    assert verdict(Comparison({}, (still,))).line == (
        "no loss found: KL 0.012 nats, top-1 agreement 97.1 % (200 documents)"
    )


def test_distance_that_is_no_number_is_never_no_loss() -> None:
    whole = divergence("choice")
    broken = replace(whole, kl=replace(whole.kl, mean=float("nan")))
    found = verdict(Comparison({}, (broken,), (outcome(),)))
    assert (found.kind, found.line.split(":")[0]) == ("cannot_tell", "cannot tell")
    assert "non-finite KL of choice" in found.line


def test_difference_that_is_no_number_is_never_no_loss() -> None:
    found = verdict(Comparison({}, (), (outcome(difference=float("nan")),)))
    assert found.kind == "cannot_tell"

"""A comparison for people: the verdict and two tables of cells, for markdown and the terminal. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from olive_ext.report.comparison import ALL, Comparison, Divergence, Outcome
from olive_ext.report.verdict import verdict

DIVERGENCE_HEADS = (
    *("task", "positions", "KL mean", "± stderr", "99 %", "max"),
    *("same top", "perplexity ratio", "± stderr"),
)
OUTCOME_HEADS = (
    *("task", "metric", "filter", "n", "reference", "model", "difference", "95 %"),
    *("lost", "won", "p", "n for 1 %"),
)


@dataclass(frozen=True)
class Table:
    """Cells by row, in the order of `heads`; the first `num_names` columns are names, the others numbers."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_names: int


def heading(comparison: Comparison) -> str:
    """With what was compared, in which mode."""
    mode = comparison.reference.get("mode")
    return f"Compared with {_path(comparison)}{f' ({mode})' if mode else ''}"


def lines(comparison: Comparison) -> Iterator[str]:
    """The verdict, and what has to be said about how the numbers came about."""
    yield _sentence(verdict(comparison).line)
    partial = [item for item in _all_last(comparison.divergences) if item.kl_sampling_error > 0]
    if partial:
        worst = max(partial, key=lambda item: item.kl_sampling_error / max(item.kl.mean, 1e-12))
        yield (
            f"KL is estimated from a part of the reference's distributions: ± {worst.kl_sampling_error:.1g} nats for "
            f"{worst.task}, where it is at least {worst.kl_lower:.4g}."
        )


def tables(comparison: Comparison) -> Iterator[Table]:
    """Distances of distributions, and differences of answers; what there is."""
    if comparison.divergences:
        rows = [_divergence(item) for item in _all_last(comparison.divergences)]
        yield Table(f"Distributions, {_versus(comparison)}", DIVERGENCE_HEADS, rows, 1)
    if comparison.outcomes:
        rows = [_outcome(item) for item in comparison.outcomes]
        yield Table(f"Answers, {_versus(comparison)}", OUTCOME_HEADS, rows, 3)


def _versus(comparison: Comparison) -> str:
    return f"against {_path(comparison)}"


def _path(comparison: Comparison) -> str:
    return str(comparison.reference.get("path", "the reference"))


def _all_last(divergences: Sequence[Divergence]) -> list[Divergence]:
    return sorted(divergences, key=lambda item: item.task == ALL)


def _divergence(item: Divergence) -> tuple[str, ...]:
    return (
        item.task,
        str(item.num_positions),
        _nats(item.kl.mean),
        "" if item.kl.stderr is None else _nats(item.kl.stderr),
        _nats(item.kl.p99),
        _nats(item.kl.maximum),
        f"{100 * item.top1_agreement:.1f} %",
        f"{item.perplexity_ratio:.4f}",
        "" if item.perplexity_ratio_stderr is None else f"{item.perplexity_ratio_stderr:.4f}",
    )


def _outcome(item: Outcome) -> tuple[str, ...]:
    needed = item.documents_needed.get("0.01")
    flips = (str(item.right_to_wrong), str(item.wrong_to_right), f"{item.mcnemar_p:.2g}")
    return (
        item.task,
        item.metric,
        item.filter,
        str(item.num_documents),
        f"{item.reference:.4f}",
        f"{item.candidate:.4f}",
        f"{item.difference:+.4f}",
        f"{item.low:+.4f} to {item.high:+.4f}",
        *(flips if item.is_binary else ("",) * 3),
        "" if needed is None else str(needed),
    )


def _nats(value: float) -> str:
    return f"{value:.4f}" if value >= 0.001 or value == 0 else f"{value:.1e}"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."

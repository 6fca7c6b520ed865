"""How often the gate and the verdict cry wolf, are green over a loss, and find what was planted.

    python -m docs.benchmarks gate_rates [COMPARISONS]

Three tables. **The gate**: two tasks with two metrics each, and the gate's own decision. A document has a logistic
margin, and both models see it with independent noise of one law, so that they are equal (exchangeable) and some 8 % of
the answers flip. Every comparison has another seed of documents. A planted loss turns right answers of one model wrong;
the documents are as many as `documents_needed` states for 80 % power. Intervals of the rates are exact (Clopper and
Pearson).

**The verdict** over one task of 1 to 2,000 documents and 30 tasks of 1 to 200: of equal models (differences with a sign
at random), and of a candidate that lost exactly what matters in one task.

**Texts**: 95 % intervals of perplexities and of the mean KL, of documents drawn with replacement from real ones
(data/texts.csv: the quickstart's int4 model against its float one, 40 pages and 320 questions of its own tasks, and 62
pages of WikiText-2), and from a lognormal law whose long tail is of gains.
"""

from __future__ import annotations

import csv
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from scipy.stats import binomtest

from olive_ext.plugins.gate.decision import baseline_of, gate_answers
from olive_ext.report import Report, to_json
from olive_ext.report.changes import LEVEL
from olive_ext.report.comparison import Comparison, TextChange
from olive_ext.report.numbers import Z95
from olive_ext.report.verdict import EXIT_STATUS, verdict
from olive_ext.run.reference.answers import Answers, DocumentAnswer, packed
from olive_ext.stats import paired_answers
from olive_ext.stats.distances import clustered_mean, degrees_of_freedom
from olive_ext.stats.paired_answers import compare_outcomes, documents_needed

TASKS, METRICS = ("choices", "letters"), ("acc", "acc_norm")
NOISE, WIDTH = 0.35, 1.0
EQUAL = 5
"""Times as many comparisons of equal models: their rate is near its limit, which the interval is to exclude."""


def answers(margins_TMD: np.ndarray, random: np.random.Generator, planted: float = 0.0) -> list[Answers]:
    """One model's answers to all documents; a share `planted` of all answers, which are right, is turned wrong."""
    own = []
    for task, margins_MD in zip(TASKS, margins_TMD, strict=True):
        seen_MD = margins_MD + NOISE * random.logistic(size=margins_MD.shape[1])
        right_MD = seen_MD > 0
        turned_D = random.random(margins_MD.shape[1]) < planted / right_MD.mean()
        values_DM = (right_MD & ~turned_D).T.astype(float).tolist()
        documents = {
            number: DocumentAnswer(f"{task} {number}", dict(zip(METRICS, values, strict=True)), "", margin)
            for number, (values, margin) in enumerate(zip(values_DM, np.abs(seen_MD[0]).tolist(), strict=True))
        }
        own.append(Answers(task, "none", dict.fromkeys(METRICS, True), documents))
    return own


def margins(count: int, random: np.random.Generator) -> np.ndarray:
    """[T, M, D]: normalisation moves a document's margin a little."""
    both_TD = 1.0 + 1.6 * WIDTH * random.logistic(size=(len(TASKS), count))
    return np.stack([both_TD, both_TD + 0.2 * random.normal(size=both_TD.shape)], axis=1)


def rate(comparisons: int, count: int, planted: float = 0.0) -> Counter[int]:
    """Exit statuses of `comparisons` pairs of models over `count` documents a task."""
    statuses = Counter[int]()
    for seed in range(comparisons):
        random = np.random.default_rng([seed, count])
        drawn = margins(count, random)
        gated = gate_answers(answers(drawn, random), answers(drawn, random, planted))
        statuses[EXIT_STATUS[gated.status]] += 1
    return statuses


def shown(found: int, total: int) -> str:
    """A rate with its exact 95 % interval."""
    interval = binomtest(found, total).proportion_ci(0.95, method="exact")
    return f"{100 * found / total:.1f} % ({100 * interval.low:.1f} to {100 * interval.high:.1f})"


def differences(count: int = 20_000, planted: float = 0.0) -> np.ndarray:
    """Per-document differences of the first metric over many documents."""
    random = np.random.default_rng(0)
    drawn = margins(count, random)
    first, second = answers(drawn, random), answers(drawn, random, planted)
    pairs = [(one, two) for a, b in zip(first, second, strict=True)
             for one, two in zip(a.by_document.values(), b.by_document.values(), strict=True)]  # fmt: skip
    return np.array([two.values["acc"] - one.values["acc"] for one, two in pairs])


MATTERS, DRAWS = 5.0, 1000
"""Points of a loss that matters; numbers drawn for each interval, a tenth of the package's."""

Law = Callable[[np.random.Generator, int], np.ndarray]
LAWS: dict[str, tuple[Law, float]] = {
    "flips": (lambda random, n: random.choice((-1.0, 0.0, 1.0), n, p=(0.05, 0.9, 0.05)), 1.0),
    "light tails": (lambda random, n: np.clip(0.1 * random.normal(size=n), -0.95, 0.95), 1.0),
    "heavy tails": (lambda random, n: np.clip(0.02 * random.standard_t(1.5, n), -0.95, 0.95), 1.0),
    "ties": (lambda random, n: random.choice((-0.5, 0.0, 0.5), n, p=(0.05, 0.9, 0.05)), 1.0),
    "rare beside small": (lambda random, n: np.clip(0.01 * random.normal(size=n), -0.95, 0.95), 1.0),
    "no upper end": (lambda random, n: 10 * random.standard_t(3, n), 100.0),
}
"""Differences of equal models by document, and what makes points of them."""


def compared(differences: np.ndarray, task: str, scale: float) -> paired_answers.Outcome:
    """Values with these differences; of shares one of both is 0, others lie around 200."""
    base = 200.0 if scale > 1 else 0.0
    first, second = base + np.maximum(-differences, 0), base + np.maximum(differences, 0)
    return compare_outcomes(task, "f1", "none", first, second, matters=MATTERS)


def lossy(name: str, random: np.random.Generator, count: int) -> np.ndarray:
    """The law with a mean loss of `MATTERS` points: in all documents, or by flips and rare losses of a whole point."""
    law, scale = LAWS[name]
    if name in ("light tails", "heavy tails", "no upper end"):
        return law(random, count) - MATTERS / 100 * scale
    size = 0.5 if name == "ties" else 1.0
    is_lost = random.random(count) < MATTERS / 100 / size
    return np.where(is_lost, -size, 0.0 if name != "rare beside small" else law(random, count))


def called(name: str, count: int, tasks: int, total: int, is_equal: bool) -> int:
    """How often equal models are called a loss, or a loss that matters in one task is green."""
    wrong = 0
    for seed in range(total):
        random = np.random.default_rng([seed, count, tasks])
        law, scale = LAWS[name]
        differences = [law(random, count) if is_equal else lossy(name, random, count)]
        differences += [law(random, count) for _ in range(tasks - 1)]
        outcomes = tuple(compared(each, f"task{place}", scale) for place, each in enumerate(differences))
        status = verdict(Comparison({}, (), outcomes, matters=MATTERS)).status
        wrong += status in (("loss", "small_loss") if is_equal else ("ok", "small_loss"))
    return wrong


def verdicts(total: int) -> Iterator[str]:
    """The table of the verdict's errors, in per cent: equal models called a loss, a lost task called green."""
    paired_answers.NUM_DRAWS = DRAWS
    cells = [(1, count) for count in (1, 2, 5, 10, 20, 72, 200, 500, 2000)] + [(30, count) for count in (1, 20, 200)]
    yield f"| loss / green | {' | '.join(f'{tasks} x {count:,}' for tasks, count in cells)} |"
    yield f"|---|{'--:|' * len(cells)}"
    for name in LAWS:
        both = [[share(name, count, tasks, total, one) for one in (True, False)] for tasks, count in cells]
        yield f"| {name} | {' | '.join(map(' / '.join, both))} |"


def share(name: str, count: int, tasks: int, total: int, is_equal: bool) -> str:
    """In per cent, of a third of the comparisons where there are many tasks."""
    number = total if tasks == 1 else max(1, total // 3)
    return f"{100 * called(name, count, tasks, number, is_equal) / number:.1f}"


def texts(total: int) -> Iterator[str]:
    """The table of intervals that hold, in per cent; how often a mean of no change is called a rise; and, in brackets,
    how many intervals of 1.96 standard errors hold."""
    with (Path(__file__).parent / "data" / "texts.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    rows += [
        {"task": "lognormal", "positions": "1", "log_ratio": str(-value), "kl": str(value)}
        for value in np.exp(np.random.default_rng(1).normal(size=20_000))
    ]
    numbers = 5, 7, 10, 15, 20, 40, 100, 500, 2000
    yield f"| texts | of | {' | '.join(map(str, numbers))} |\n|---|---|{'--:|' * len(numbers)}"
    random = np.random.default_rng(0)
    for task in dict.fromkeys(row["task"] for row in rows):
        own = [row for row in rows if row["task"] == task]
        sizes = np.array([float(row["positions"]) for row in own])
        for column in ("log_ratio", "kl")[task not in ("quickstart_perplexity", "wikitext", "lognormal") :]:
            means = np.array([float(row[column]) for row in own])
            true, cells = float(np.average(means, weights=sizes)), []
            for number in numbers:
                held = np.zeros(3)
                for _ in range(total):
                    drawn = random.integers(0, len(own), number)
                    mean, stderr, skewness = clustered_mean(means[drawn], np.arange(number), sizes[drawn])
                    change = TextChange(task, "", number, mean, stderr, skewness, degrees_of_freedom(sizes[drawn]))
                    low, high = change.interval(mean, stderr, skewness)
                    lost = change.p(mean - true, stderr, skewness) < LEVEL and mean > true
                    held += (low <= true <= high), lost, abs(mean - true) <= Z95 * (stderr or 0.0)
                cells.append("{:.1f}, {:.1f} ({:.1f})".format(*(100 * held / total)))
            yield f"| {task} | {'perplexity' if column == 'log_ratio' else 'mean KL'} | {' | '.join(cells)} |"


def main() -> None:
    """Prints the rates of docs/design/comparison.md."""
    asked = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    for table in (texts(10 * asked), verdicts(asked), gates(asked)):
        for line in table:
            print(line, flush=True)
        print()


def gates(asked: int) -> Iterator[str]:
    """The table of the gate."""
    yield f"flips of equal models: {100 * np.mean(differences() != 0):.1f} %"
    kept = packed(answers(margins(1000, np.random.default_rng(1)), np.random.default_rng(2)))
    baseline = baseline_of(Report((), answers=kept))
    yield f"baseline: {len(to_json(baseline)):,} bytes of 2,000 documents with two metrics\n"
    yield "| planted loss | documents | loss found | passed | cannot tell |\n|--:|--:|--:|--:|--:|"
    for points in (0, 1, 2, 5):
        needed = documents_needed(differences(planted=points / 100), (points or 2) / 100, True)
        assert needed is not None
        count, total = -(-needed // len(TASKS)), asked if points else EQUAL * asked
        found = rate(total, count, points / 100)
        rates = " | ".join(shown(found[status], total) for status in (1, 0, 3))
        yield f"| {points} point{'s' * (points != 1)} | {len(TASKS) * count:,} | {rates} |"


if __name__ == "__main__":
    main()

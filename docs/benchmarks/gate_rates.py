"""How often the gate cries wolf, and finds what was planted.

python docs/benchmarks/gate_rates.py [COMPARISONS]

Two tasks with two metrics each, and the gate's own decision. A document has a logistic margin, and both models see it
with independent noise of one law, so that they are equal (exchangeable) and some 8 % of the answers flip. Every
comparison has another seed of documents. A planted loss turns right answers of one model wrong; the documents are as
many as `documents_needed` states for 80 % power. Intervals of the rates are exact (Clopper and Pearson).
"""

from __future__ import annotations

import sys

import numpy as np
from scipy.stats import binomtest

from olive_ext.gate.baseline import baseline_of
from olive_ext.gate.decision import gate_answers
from olive_ext.report import Report, to_json
from olive_ext.run.reference.answers import Answers, DocumentAnswer
from olive_ext.stats.paired_answers import documents_needed

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


def rate(comparisons: int, count: int, planted: float = 0.0) -> dict[str, int]:
    """Decisions on `comparisons` pairs of models over `count` documents a task."""
    decisions = {"passed": 0, "loss": 0, "cannot tell": 0}
    for seed in range(comparisons):
        random = np.random.default_rng([seed, count])
        drawn = margins(count, random)
        gated = gate_answers(answers(drawn, random), answers(drawn, random, planted))
        decisions[gated.decision] += 1
    return decisions


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


def main() -> None:
    """Prints the table of docs/gate.md."""
    asked = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    print(f"flips of equal models: {100 * np.mean(differences() != 0):.1f} %")
    baseline = baseline_of(Report(()), answers(margins(1000, np.random.default_rng(1)), np.random.default_rng(2)))
    print(f"baseline: {len(to_json(baseline)):,} bytes of 2,000 documents with two metrics\n")
    print("| planted loss | documents | loss found | passed | cannot tell |\n|--:|--:|--:|--:|--:|")
    for points in (0, 1, 2, 5):
        needed = documents_needed(differences(planted=points / 100), (points or 2) / 100, True)
        assert needed is not None
        count, total = -(-needed // len(TASKS)), asked if points else EQUAL * asked
        found = rate(total, count, points / 100)
        rates = " | ".join(shown(found[name], total) for name in ("loss", "passed", "cannot tell"))
        print(f"| {points} point{'s' * (points != 1)} | {len(TASKS) * count:,} | {rates} |", flush=True)


if __name__ == "__main__":
    main()

"""How often the interval of `"repeats": "enough"` holds, and how many answers it takes: simulated benchmarks of
30 and of 200 documents, whose answers are right with chances from several distributions; alone, and against a
reference.

    python -m docs.benchmarks answer_spread --benchmarks 2000

`fixed` is the least n by which an interval of the same kind that is looked at once, of the true variance, is as narrow.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from olive_ext.config import Narrow
from olive_ext.stats.answer_spread import drawn_interval

Array = npt.NDArray[np.float64]

CHANCES: dict[str, Callable[[np.random.Generator, int], Array]] = {
    "U-shaped": lambda rng, count: rng.beta(0.3, 0.3, count),
    "flat": lambda rng, count: rng.random(count),
    "near 1": lambda rng, count: rng.beta(20, 0.4, count),
    "rare": lambda rng, count: np.full(count, 0.005),
    "few open": lambda rng, count: np.where(np.arange(count) < 2, 0.5, 1.0),
}


def simulated(
    name: str, documents: int, narrow: Narrow, rng: np.random.Generator, agree: float | None, undivided: bool = False
) -> list[float]:
    """Whether the interval holds, n, whether it is as narrow as asked, and n of a run that knows the variance. With
    `agree` the difference to a reference, whose answer is the same with this chance and else drawn by itself."""
    chances = CHANCES[name](rng, documents)[:, None]
    values = (rng.random((documents, narrow.most)) < chances).astype(np.float64)
    truth, variance = float(chances.mean()), float((chances * (1 - chances)).sum())
    if agree is not None:
        others = np.clip(chances + rng.normal(0, 0.1, chances.shape), 0, 1)
        drawn = (rng.random(values.shape) < others).astype(np.float64)
        values -= np.where(rng.random(values.shape) < agree, values, drawn)
        truth = (1 - agree) * (truth - float(others.mean()))
        means = (1 - agree) * (chances - others)
        differing = (1 - agree) * (chances * (1 - others) + others * (1 - chances))
        variance = float((differing - means**2).sum())
    num_looks = 1 if undivided else len(narrow.looks)
    for n in narrow.looks:
        mean, width = drawn_interval(list(values[:, :n]), narrow.confidence, num_looks)
        if width <= narrow.within:
            break
    z = NormalDist().inv_cdf((1 + narrow.confidence) / 2)
    fixed = math.ceil(variance * (z / narrow.within / documents) ** 2)
    return [abs(mean - truth) <= width + 1e-12, n, width <= narrow.within, max(fixed, 1)]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--benchmarks", type=int, default=2000)
    parser.add_argument("--undivided", action="store_true", help="as if there were one look")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = np.random.default_rng(given.seed)
    print("| chances | of | documents | within | holds, % | mean n | reached, % | fixed n |")
    print("|---|---|--:|--:|--:|--:|--:|--:|")
    for name in CHANCES:
        for documents, within in ((30, 0.05), (30, 0.02), (200, 0.02), (200, 0.01)):
            for agree in (None, 0.5):
                narrow = Narrow(within=within)
                rows = [
                    simulated(name, documents, narrow, rng, agree, given.undivided) for _ in range(given.benchmarks)
                ]
                holds, n, reached, fixed = np.mean(rows, axis=0)
                of = "a model" if agree is None else "a difference"
                cells = f"{100 * holds:.1f} | {n:.1f} | {100 * reached:.0f} | {fixed:.1f}"
                print(f"| {name} | {of} | {documents} | {within:g} | {cells} |", flush=True)


if __name__ == "__main__":
    main()

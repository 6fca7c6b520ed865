"""How often the intervals of a loss map hold, and how often a weight that is called certain is not among the largest.

Every weight of a quantized model is measured on all documents once. Then documents are drawn from these, with
replacement, many times: an interval holds where it has the loss on all documents, and a race is right where all that
it calls certain are among the largest there.

    python -m docs.benchmarks loss_intervals INT4 FLOAT --tasks NAME ... [--include-path DIR] [--top N] [--draws N]
"""

from __future__ import annotations

import json
from typing import Any

import harness
import numpy as np

from olive_ext.plugins.diagnose.remedy import locate as location
from olive_ext.plugins.diagnose.remedy.locate import Race, estimate

SHARES = (16, 8, 4, 2, 1)
"""An interval is of one of so many documents."""


class _WholeRace(Race):
    """Measures all on all documents, and keeps what it measured."""

    measured: Any = None

    def run(self, num_largest: int, *rest: Any) -> frozenset[int]:
        for quantity in range(len(self._counts_Q)):
            self.extend(quantity, len(self.order))
        type(self).measured = self._sums_QN, self._positions_N
        return super().run(num_largest, *rest)


def main() -> None:
    """Measures, draws, and prints one line a share of the documents and one of the races."""
    parser = harness.parser_of(__doc__, "model", "reference")
    parser.add_argument("--tasks", metavar="NAME", nargs="+", required=True)
    parser.add_argument("--include-path", metavar="DIR")
    parser.add_argument("--limit", metavar="N", type=int)
    parser.add_argument("--top", metavar="N", type=int, default=10)
    parser.add_argument("--draws", metavar="N", type=int, default=200)
    options = parser.parse_args()
    work = {"tasks": options.tasks, "include_path": options.include_path, "limit": options.limit}
    location.Race = _WholeRace  # type: ignore[attr-defined]
    location.locate(str(options.model), reference=str(options.reference), top=options.top, **work)
    sums_QN, positions_N = _WholeRace.measured
    rng = np.random.default_rng(0)
    facts = {
        "weights": len(sums_QN),
        "documents": len(positions_N),
        "covered": {f"1/{share}": covered(sums_QN, positions_N, share, options.draws, rng) for share in SHARES},
        **races(sums_QN, positions_N, options.top, options.draws, rng),
    }
    print(json.dumps(facts))
    if options.output:
        options.output.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def covered(sums_QN: Any, positions_N: Any, share: int, draws: int, rng: np.random.Generator) -> float:
    """The share of intervals that have the loss on all documents."""
    losses_Q, count = sums_QN.sum(1) / positions_N.sum(), len(positions_N) // share
    held = []
    for _ in range(draws):
        drawn = rng.integers(len(positions_N), size=count)
        for sums_N, loss in zip(sums_QN, losses_Q, strict=True):
            interval = estimate(sums_N[drawn], positions_N[drawn])
            held.append(interval.low <= loss <= interval.high)
    return float(np.mean(held))


def races(sums_QN: Any, positions_N: Any, top: int, draws: int, rng: np.random.Generator) -> dict[str, float]:
    """Races over drawn documents: how many called a weight certain that is not among the largest of all documents, how
    many weights they called certain, and how many passes over the documents they took, as means."""
    largest = set(np.argsort(-sums_QN.sum(1))[:top].tolist())
    wrong, certain, passes = [], [], []
    for number in range(draws):
        drawn = rng.integers(len(positions_N), size=len(positions_N))
        race = Race(len(sums_QN), positions_N[drawn], lambda row, columns, of=drawn: sums_QN[row, of[columns]], number)
        named = race.run(top)
        wrong.append(not named <= largest)
        certain.append(len(named))
        passes.append(race.num_passes)
    return {"wrong": float(np.mean(wrong)), "certain": float(np.mean(certain)), "passes": float(np.mean(passes))}


if __name__ == "__main__":
    main()

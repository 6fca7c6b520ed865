"""How many documents are enough, and how often the verdict is wrong: simulated draws over recorded margins.

    python docs/benchmarks/enough.py [--output OUT] [--seeds 200] [--runs 10000]

Prints two tables and writes `enough.png`: documents evaluated until a claim about accuracy is certain, over `--seeds`
draws; and how often a truth is ever rejected when draws go on to the last document, over `--runs` draws. Margins are
those that `record_margins.py` recorded, or drawn from a logistic distribution. Knows no model. Minutes on one core.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import common
import numpy as np

from olive_ext.stats.betting import ABOVE, BELOW, Evidence, mixed
from olive_ext.stats.sampling_design import (
    FloatArray,
    Population,
    difference_population,
    draw_probabilities,
    mean_population,
)
from olive_ext.stats.stopping import batch_size

POINT = 0.01
LEVEL = np.log(20)
CHUNK = 20_000_000
"""Documents times runs that are in memory at once."""


@dataclass(frozen=True)
class Case:
    """Documents of a task, and where a candidate's shares lie between their limits."""

    name: str
    population: Population
    shares_N: FloatArray
    bound: float = -POINT
    distance: float = POINT
    num_assumed: int = 0
    """Documents that are taken for granted and stand in no stratum."""

    @property
    def truth(self) -> float:
        return self.population.offset + float(self.population.weights_N @ self.shares_N)


# Candidates --------------------------------------------------------------------------------------------------------


def recorded() -> tuple[FloatArray, dict[str, FloatArray]]:
    """Signed margins of the quickstart's model in nats, and which documents its quantized forms answer rightly."""
    file = np.load(Path(common.__file__).parent / "data" / "quickstart_margins.npz")
    margins = file["margins"].astype(np.float64)
    names = [name for name in file.files if name not in ("margins", "num_documents")]
    return margins, {name: np.unpackbits(file[name])[: len(margins)].astype(np.float64) for name in names}


def logistic_margins(count: int, accuracy: float) -> FloatArray:
    return np.random.default_rng(count).logistic(np.log(accuracy / (1 - accuracy)), 1.0, count)


def noisy(margins: FloatArray, noise: float, loss: float) -> FloatArray:
    """Answers of a candidate whose margins are the reference's and normal noise, and that loses exactly `loss` in all:
    as many more answers as that takes become wrong (or right), the less sure the likelier."""
    random = np.random.default_rng(7)
    right, answers = margins > 0, margins + noise * random.standard_normal(len(margins)) > 0
    wrong_by = int(answers.sum() - right.sum() + round(loss * len(margins)))
    likely = np.argsort(np.abs(margins) + noise * random.gumbel(size=len(margins)))
    changeable = likely[(answers & right)[likely]] if wrong_by > 0 else likely[(~answers & ~right)[likely]]
    answers[changeable[: abs(wrong_by)]] = wrong_by < 0
    return answers.astype(np.float64)


def breaks_the_surest(margins: FloatArray, loss: float) -> FloatArray:
    answers = (margins > 0).astype(np.float64)
    answers[np.argsort(-margins)[: round(loss * len(margins))]] = 0
    return answers


def case(name: str, margins: FloatArray, answers: FloatArray, knows_margins: bool = True) -> Case:
    population = difference_population(margins > 0, np.abs(margins) if knows_margins else None)
    return Case(name, population, answers)


def without_guard(name: str, margins: FloatArray, answers: FloatArray) -> Case:
    """The claim about the less sure half of the right and of the wrong answers, if no other document flipped."""
    surest = np.zeros(len(margins), bool)
    for side in (margins > 0, margins <= 0):
        surest |= side & (np.abs(margins) > np.median(np.abs(margins[side])))
    one = case(name, margins[~surest], answers[~surest])
    scale = len(margins) / len(one.shares_N)
    return Case(name, one.population, one.shares_N, one.bound * scale, one.distance * scale, int(surest.sum()))


def cases() -> Iterator[Case]:
    margins, candidates = recorded()
    for name, answers in candidates.items():
        yield case(f"quickstart, {name}", margins, answers)
        yield without_guard(f"quickstart, {name}, surer halves assumed equal", margins, answers)
    yield case("quickstart, the float model itself", margins, (margins > 0).astype(np.float64))
    yield case("quickstart, int4_b32, margins unknown", margins, candidates["int4_b32"], knows_margins=False)
    yield case("quickstart, broken by 5 points", margins, noisy(margins, 0.2, 5 * POINT))
    yield case("quickstart, surest 5 points broken", margins, breaks_the_surest(margins, 5 * POINT))
    hellaswag = logistic_margins(10_042, 0.45)
    for noise in (0.2, 0.4, 0.8):
        for loss in (0, 0.5, 1.5, 2, 5):
            flips = np.mean((noisy(hellaswag, noise, 0) > 0) != (hellaswag > 0))
            answers = noisy(hellaswag, noise, loss * POINT)
            yield case(f"HellaSwag's size, {flips:.0%} flips, {loss:g} lost", hellaswag, answers)
    mmlu, arc = logistic_margins(14_042, 0.6), logistic_margins(1_172, 0.55)
    for size, drawn in (("MMLU's size", mmlu), ("ARC's size", arc), ("1,000", logistic_margins(1_000, 0.55))):
        for noise, loss in ((0.2, 0), (0.4, 0), (0.4, 5)):
            yield case(f"{size}, noise {noise:g}, {loss:g} lost", drawn, noisy(drawn, noise, loss * POINT))


def at_their_bounds() -> Iterator[Case]:
    """Cases for coverage: the bound is the truth, where wrong verdicts are likeliest; two with their intervals."""
    margins, candidates = recorded()
    mmlu, small, tiny = logistic_margins(14_000, 0.6), logistic_margins(1_000, 0.55), logistic_margins(50, 0.6)
    rare = (small > 0).astype(np.float64)
    rare[np.argsort(np.abs(small))[:3]] = 0
    random = np.random.default_rng(3)
    positions, disagreements = random.integers(0, 60, 200), random.beta(0.3, 8, 200)
    exact = [
        case("quickstart, int4_b128, 10,000", margins, candidates["int4_b128"]),
        case("surest 3 points broken, 14,000", mmlu, breaks_the_surest(mmlu, 3 * POINT)),
        case("heavy ties, 1,000", np.sign(small) * np.ceil(np.abs(small)), noisy(small, 0.4, 0.01)),
        case("rare flips, 1,000", small, rare),
        case("50 documents", tiny, noisy(tiny, 0.4, 0.04)),
        case("50 documents, margins unknown", tiny, noisy(tiny, 0.8, 0.0), knows_margins=False),
        Case("disagreement, 200 documents of 0 to 59 positions", mean_population(positions, 1.0), disagreements),
    ]
    for one in exact:
        yield Case(one.name, one.population, one.shares_N, one.truth)
    yield case("interval, quickstart, int4_b32, 1,000", margins[::10], candidates["int4_b32"][::10])
    yield case("interval, broken by 5 points, 1,000", small, noisy(small, 0.4, 5 * POINT))


# Simulation --------------------------------------------------------------------------------------------------------


class Runs:
    """Many independent draws from one case, a document of each at a time."""

    def __init__(self, case: Case, num_runs: int, random: np.random.Generator) -> None:
        self._case, self._random, self.num_drawn = case, random, 0
        population = case.population
        (counted,) = np.nonzero(population.weights_N > 0)
        self.num_documents = len(counted)
        late = random.exponential(size=(num_runs, len(counted))) / population.weights_N[counted]
        self._orders = counted[np.argsort(population.strata_N[counted] + late / (1 + late), axis=1)]
        sizes = np.bincount(population.strata_N[counted], minlength=len(population.expected_H))
        self._next_RH = np.tile(np.cumsum(sizes) - sizes, (num_runs, 1))
        self._runs = np.arange(num_runs)
        self.evidence = Evidence(population, case.bound, case.distance, num_runs)
        self._log_wealth_SKR = np.zeros((2, 3, num_runs))
        self.truth_peaks_SR = np.zeros((2, num_runs))
        """Logarithm of the greatest wealth so far against the truth."""

    def batch(self) -> None:
        """Draws as many documents as the sampler would."""
        scores = self.evidence.scores()
        count = min(batch_size(self.num_documents, self.num_drawn), self.num_documents - self.num_drawn)
        self.num_drawn += count
        for _ in range(count):
            self._draw(scores)

    def _draw(self, scores_RH: FloatArray) -> None:
        chances = draw_probabilities(self.evidence.unseen_RH, scores_RH).cumsum(axis=1)
        levels = self._random.random(len(self._runs)) * chances[:, -1]
        strata = np.sum(levels[:, None] >= chances, axis=1)
        documents = self._orders[self._runs, self._next_RH[self._runs, strata]]
        self._next_RH[self._runs, strata] += 1
        population = self._case.population
        bet = self.evidence.observe(strata, self._case.shares_N[documents], population.weights_N[documents], scores_RH)
        if self._case.truth == self._case.bound:
            self.truth_peaks_SR = self.evidence.peaks_SR
            return
        gains = bet.stakes_SKR * (bet.values_R - self._case.truth) * np.array([1, -1])[:, None, None]
        self._log_wealth_SKR += np.log1p(np.maximum(gains, -1 + 1e-12))  # of the side that tests other values: unused
        self.truth_peaks_SR = np.maximum(self.truth_peaks_SR, mixed(self._log_wealth_SKR))

    def verdicts(self) -> FloatArray:
        """1 above, -1 below, 0 open, [R]."""
        lows = self._case.population.offset + self.evidence.seen_R + 1e-12
        highs = lows + self.evidence.unseen_RH.sum(axis=1)
        above, below = self.evidence.peaks_SR >= LEVEL
        bound = self._case.bound
        return np.select([lows >= bound, highs < bound, above, below], [1.0, -1.0, 1.0, -1.0])


def evaluated(case: Case, seeds: int) -> tuple[FloatArray, FloatArray]:
    """Documents evaluated [R] until the verdict, and the verdicts."""
    runs, counts, verdicts = Runs(case, seeds, np.random.default_rng(11)), np.zeros(seeds), np.zeros(seeds)
    while not verdicts.all():
        runs.batch()
        is_open = verdicts == 0
        verdicts = np.where(is_open, runs.verdicts(), verdicts)
        counts[is_open] = runs.num_drawn
    return counts, verdicts


def ever_rejected(case: Case, num_runs: int) -> tuple[float, float]:
    """Share of runs where the truth is rejected at any draw by the bets ABOVE, and by those BELOW."""
    rejected, done = np.zeros(2), 0
    while done < num_runs:
        size = min(num_runs - done, CHUNK // len(case.shares_N))
        runs = Runs(case, size, np.random.default_rng(1000 + done))
        while runs.num_drawn < runs.num_documents:
            runs.batch()
        rejected += np.sum(runs.truth_peaks_SR >= LEVEL, axis=1)
        done += size
    return rejected[ABOVE] / num_runs, rejected[BELOW] / num_runs


def least_draws(case: Case) -> int:
    """Draws until the best bets reach the level if each stratum's share was known beforehand, in expectation.

    With the best allocation a draw has the variance S^2, S = sum of weight left x standard deviation, and the logarithm
    of a Kelly bettor's wealth grows by distance^2 / (2 S^2) (small distances); S shrinks as strata are used up. No
    guard is in it: where hardly anything flips it is less than anyone needs who does not know that beforehand.
    """
    population, gap, grown, count = case.population, case.truth - case.bound, 0.0, 0
    means = np.bincount(population.strata_N, weights=case.shares_N) / np.bincount(population.strata_N)
    deviations, left = np.sqrt(means * (1 - means)), population.unseen_H.copy()
    while grown < LEVEL and count < len(case.shares_N):
        spread = float(left @ deviations)
        if spread < abs(gap):
            return count + 1
        grown += gap**2 / (2 * spread**2)
        left -= population.weights_N[0] * left * deviations / spread
        count += 1
    return count


# Tables ------------------------------------------------------------------------------------------------------------


def savings(seeds: int) -> Iterator[tuple[str, FloatArray, int]]:
    print("| case | difference | flips | least | evaluated, median | 10 % | 90 % | of all | as the full run |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    for one in cases():
        population, total = one.population, len(one.shares_N) + one.num_assumed
        counts, verdicts = evaluated(one, seeds)
        flips, least = np.abs(one.shares_N + population.lows_N).mean(), least_draws(one)
        low, middle, high = np.quantile(counts, [0.1, 0.5, 0.9])
        right = np.mean((verdicts > 0) == (one.truth + 1e-12 >= one.bound))
        print(
            f"| {one.name} | {one.truth:+.2%} | {flips:.1%} | {least:,} | {middle:,.0f} | {low:,.0f} | {high:,.0f} | "
            f"{counts.mean() / total:.1%} | {right:.1%} |",
            flush=True,
        )
        yield one.name, counts / total, total


def coverage(num_runs: int) -> Iterator[tuple[str, float]]:
    print("\n| case | the truth rejected as too low | as too high |\n|---|--:|--:|")
    for one in at_their_bounds():
        above, below = ever_rejected(one, num_runs)
        errors = {ABOVE: above, BELOW: below}
        if one.truth != one.bound:  # the bets of the other side do not test this truth
            del errors[ABOVE if one.truth > one.bound else BELOW]
        cells = [f"{errors[side]:.2%}" if side in errors else "" for side in (ABOVE, BELOW)]
        print(f"| {one.name} | {cells[0]} | {cells[1]} |", flush=True)
        yield one.name, max(errors.values())


def draw(saved: list[tuple[str, FloatArray, int]], covered: list[tuple[str, float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 9), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[2, 1])
    left.boxplot([shares for _, shares, _ in saved][::-1], orientation="horizontal", whis=(10, 90), showfliers=False)
    left.set_yticks(range(1, len(saved) + 1), [f"{name} ({total:,})" for name, _, total in saved][::-1], fontsize=8)
    left.set(xlim=(0, 1), xlabel="share of the documents evaluated until a loss below 1 point is certain, or excluded")
    right.barh(range(len(covered)), [100 * error for _, error in covered][::-1])
    right.set_yticks(range(len(covered)), [name for name, _ in covered][::-1], fontsize=8)
    right.axvline(5, color="black", linestyle="--")
    right.set(xlabel="% of runs that ever reject the truth")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--runs", type=int, default=10_000)
    args = parser.parse_args()
    saved, covered = list(savings(args.seeds)), list(coverage(args.runs))
    draw(saved, covered, args.output / "enough.png")


if __name__ == "__main__":
    main()

"""One model in two places: what the comparison costs, and how often its verdict is wrong.

    python -m docs.benchmarks places cost MODEL [--against K=V,...] [--limit N] [--rounds N]
    python -m docs.benchmarks places rates MODEL [--comparisons N] [--documents N] [--draws N]

`cost`: the processor's seconds of `evaluate` in each place alone and with the two against each other, each in a process
of its own after a warm-up. `rates`: pairs that differ by nothing but the rounding of kernels, by inputs that are moved
by random numbers of their own, and the share of them that is called different (exact interval of Clopper and Pearson);
another form of running the model; and the same with distances that a fault makes so many times as large.
The tasks are the quickstart's, or --tasks in --include-path.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from harness import ROOT, measured, parser_of, spread, timed, write
from scipy.stats import binomtest

from olive_ext.plugins.diagnose.places.judge import LEAST_DOCUMENTS, LEAST_POSITIONS

TASKS = "quickstart_choice,quickstart_letters,quickstart_perplexity"
FAULTS = (1.5, 2.0, 3.0, 10.0)


def evaluated(given: Any, limit: int, **settings: Any) -> Any:
    """An evaluation of the model in this process."""
    from olive_ext.run import evaluate

    work = {"tasks": given.tasks.split(","), "include_path": str(given.include_path), "limit": limit}
    return evaluate(given.model, **work, bootstrap_iters=0, isolation="none", **settings)


def cost_of(part: str, given: Any) -> dict[str, Any]:
    """Seconds of one part in this process."""
    from olive_ext.cli.options import place_of

    place = place_of(given.against, "--against")
    other = {key: value for key, value in place.items() if key not in ("path", "is_same_model")}
    settings = {"own": {}, "other": other, "against": {"reference": place}}[part]
    evaluated(given, 2, **settings)
    report, wall, processor = timed(lambda: evaluated(given, given.limit, **settings))
    fed = report.engine["tokens_fed"]
    return {"seconds": wall, "cpu_seconds": processor, "tokens_fed": fed}


def cost(given: Any) -> None:
    """Prints the ratio of the comparison to both runs alone."""
    words = ["cost", given.model, "--against", given.against, "--limit", given.limit, "--tasks", given.tasks]
    words += ["--include-path", given.include_path]
    ratios, rounds = [], []
    for _ in range(given.rounds):
        one = {part: measured(__file__, [*words, "--part", part]) for part in ("own", "other", "against")}
        ratios.append(one["against"]["cpu_seconds"] / (one["own"]["cpu_seconds"] + one["other"]["cpu_seconds"]))
        rounds.append(one)
        print(", ".join(f"{part} {values['cpu_seconds']:.1f} s" for part, values in one.items()), flush=True)
    print(f"over both alone, processor's seconds: {spread(ratios)}")
    write(given.output, given, rounds=rounds, ratio=median(ratios))


def rates(given: Any) -> None:
    """Prints the shares of pairs that are called different."""
    from olive_ext.config import ModelSettings
    from olive_ext.model import resolve
    from olive_ext.plugins.diagnose.places.judge import Variant, computed_in, form_of, held, log_probabilities, moved

    model = resolve(ModelSettings(model=str(given.model), deterministic=True))
    documents = requests_of(given, model)
    plain = log_probabilities(model, Variant("as it is", {}), documents, given.max_length)

    def apart(variant: Variant) -> list[Any]:
        said = log_probabilities(model, variant, documents, given.max_length)
        return [np.abs(new - old) for new, old in zip(said, plain, strict=True)]

    unit, rng = computed_in(model), np.random.default_rng(0)
    draws = [apart(variant) for variant in moved(unit, given.draws)]
    form = apart(form_of(model))
    lengths = np.array([len(values) for values in plain])
    print(f"{given.draws} draws, {len(documents)} documents, {lengths.sum()} positions, computed in {unit}")
    called = dict.fromkeys((1.0, *FAULTS, "form"), 0)
    for _ in range(given.comparisons):
        picked, order = rng.permutation(len(draws)), rng.permutation(len(documents))
        count = max(LEAST_DOCUMENTS, int(np.searchsorted(np.cumsum(lengths[order]), LEAST_POSITIONS)) + 1)
        chosen = order[:count]
        noise = [[draws[draw][at] for at in chosen] for draw in picked[:2]]
        pairs = {factor: [factor * values for values in draws[picked[2]]] for factor in (1.0, *FAULTS)}
        for what, pair in {**pairs, "form": form}.items():
            called[what] += held([pair[at] for at in chosen], noise, np.concatenate(pair)).is_farther
    for what, count in called.items():
        names = {1.0: "the noise of kernels once more", "form": "another form of running it"}
        told(names.get(what, f"{what} times that noise"), count, given.comparisons)
    write(given.output, given, called={str(what): count for what, count in called.items()})


def told(what: str, count: int, of: int) -> None:
    """One line: the rate, with the interval that it would have if no draw were used twice."""
    interval = binomtest(count, of).proportion_ci(0.95, method="exact")
    print(f"{what}: different in {count} of {of} ({count / of:.1%}, {interval.low:.1%} to {interval.high:.1%})")


def requests_of(given: Any, model: Any) -> list[Any]:
    """Requests of the tasks, as a comparison keeps them; their numbers are found anew."""
    from docs.benchmarks.speed.peers import record
    from olive_ext.config import EvaluationSettings
    from olive_ext.plugins.diagnose.places.judge import Probe
    from olive_ext.session.local import open_tokenizer
    from olive_ext.session.requests import RollingRequest, ScoringRequest

    tokenizer = open_tokenizer(model)
    tasks, folder = given.tasks.split(","), str(given.include_path)
    asked = record(EvaluationSettings(tasks=tasks, include_path=folder, limit=given.documents))
    made: list[Any] = []
    for one in asked:
        if one.kind == "loglikelihood_rolling":
            made.append(RollingRequest(tokenizer.encode(one.args[0])))
        elif one.kind == "loglikelihood":
            made.append(ScoringRequest(*one.args))
    nothing = np.zeros(0), np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64)
    rng = np.random.default_rng(0)
    picked = rng.permutation(len(made))[: given.documents]
    return [Probe("", int(at), made[at], *nothing) for at in picked]


def main() -> None:
    """Runs `cost` or `rates`."""
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=("cost", "rates"))
    parser.add_argument("model", metavar="MODEL", type=Path)
    parser.add_argument("--tasks", metavar="A,B", default=TASKS)
    parser.add_argument("--include-path", metavar="DIR", type=Path, default=ROOT / "recipes" / "quickstart" / "tasks")
    parser.add_argument("--against", metavar="K=V,...", default="num_threads=1")
    parser.add_argument("--limit", metavar="N", type=int, default=160)
    parser.add_argument("--comparisons", metavar="N", type=int, default=1000)
    parser.add_argument("--documents", metavar="N", type=int, default=40)
    parser.add_argument("--draws", metavar="N", type=int, default=40)
    parser.add_argument("--max-length", metavar="N", type=int, default=512)
    parser.add_argument("--part", help="of `cost`, in this process")
    given = parser.parse_args()
    if given.part:
        print(json.dumps(cost_of(given.part, given)))
    else:
        (cost if given.what == "cost" else rates)(given)


if __name__ == "__main__":
    main()

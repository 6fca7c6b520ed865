"""Random texts on both sides of every length that decides in a graph, and random settings of the engine.

    python -m tests.families.lengths_at_random --seeds 0 40 --packages phi3_longrope-mobius dynamic-genai llama-optimum

Prints what differs from one plain pass of the export's own graph over each text alone, and under which seed. Packages
are those of `tests.exports.step_wide` (FORM-EXPORTER) and of the catalog.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

import olive_ext
from olive_ext.errors import OliveExtError
from olive_ext.session import Session
from olive_ext.session.requests import GenerationOutput, GenerationRequest, RollingRequest, ScoringRequest
from tests.exports.catalog import CATALOG, Export, export
from tests.exports.hf import hf_model
from tests.exports.plain import cached_logits, plain_logits
from tests.exports.ropes import FIRST_MAXIMUM, ORIGINAL
from tests.exports.step_wide import ALIKE, FORMS, RARE, step_wide_export
from tests.exports.text import CONTEXT

NATS = {"fp32": 2e-4, "fp16": 0.05, "bf16": 0.5}
"""A log-probability may be as far from a plain pass, by the type that is computed in: steps of other shapes round
otherwise. Integer weights are computed with in fp32."""

_PLAIN: tuple[Any, ...] = ("fp32", "fp32", "", "", False)
"""What a `tests.exports.Export` says behind its exporter."""

WINDOW = 16
STATIC = 128
"""Places of the suite's static caches."""

BY_THE_TOKEN = ("dynamic", "fed_tokens", "rare_tokens", "batch_size")
"""Forms that have no two sides: answers there are what a cache says that no step computes anew, as in transformers'
`generate` for dynamic NTK."""

STEP_WIDE = [f"{form}-mobius" for form in FORMS] + [f"{form}-genai" for form in FORMS if form not in ALIKE]
LONGROPE = [name for name, recipe in CATALOG.items() if recipe.family in FIRST_MAXIMUM and not recipe.not_on_cpu]


@dataclass(frozen=True)
class Package:
    """An export, the lengths that decide in its graph, and the longest text that it takes."""

    export: Export
    limits: tuple[int, ...]
    longest: int


@dataclass(frozen=True)
class Text:
    """What is asked: a context and a target to score; a prompt and a number of tokens; or a text to roll over."""

    kind: str
    context: tuple[int, ...] = ()
    target: tuple[int, ...] = ()
    num_tokens: int = 0

    def __repr__(self) -> str:
        return f"{self.kind} of {len(self.context)} + {len(self.target) or self.num_tokens} tokens"


def package(name: str) -> Package:
    if name in CATALOG:
        made = export(name)
        limits = (FIRST_MAXIMUM.get(made.family, ORIGINAL), WINDOW)
        longest = {"static": STATIC, "graph": ORIGINAL}  # a provider that is not used would take the second table
        return Package(made, limits, longest.get(name.rpartition("-")[2], CONTEXT))
    form, _, exporter = name.rpartition("-")
    family = "llama_dynamic" if form == "dynamic" else "llama"
    made = step_wide_export(form, exporter)
    return Package(Export(name, made, hf_model(family), family, exporter, *_PLAIN), (ORIGINAL, 20), CONTEXT)


class Oracle:
    """Plain passes over one text at a time."""

    def __init__(self, made: Export) -> None:
        self._export = made
        self._logprobs = lru_cache(maxsize=512)(lambda tokens: _normal(plain_logits(made, list(tokens))))

    def score(self, context: Sequence[int], target: Sequence[int]) -> list[float]:
        """What is fed is all but the last target, which nothing follows."""
        rows_SV = self._logprobs((*context, *target)[:-1])[-len(target) :]
        return [float(row[token]) for row, token in zip(rows_SV, target, strict=True)]

    def behind_the_best(self, prompt: Sequence[int], answer: GenerationOutput) -> float:
        """How far an answer's tokens, and the one that ended it, are from the most likely ones behind a pass over all
        that is before each, in nats; or behind a cache, see `BY_THE_TOKEN`."""
        ended = () if answer.stop_id is None else (answer.stop_id,)
        tokens = (*answer.tokens, *ended)
        rows = [self._behind(tuple(prompt), tokens[:at]) for at in range(len(tokens))]
        return max(float(row_V.max() - row_V[token]) for row_V, token in zip(rows, tokens, strict=True))

    def _behind(self, prompt: tuple[int, ...], answer: tuple[int, ...]) -> Any:
        if self._export.name.rpartition("-")[0] in BY_THE_TOKEN:
            return _normal(cached_logits(self._export, list(prompt), list(answer))[None])[0]
        return self._logprobs((*prompt, *answer))[-1]


def _normal(logits_SV: Any) -> Any:
    logits_SV = logits_SV.astype(np.float64)
    largest_S1 = logits_SV.max(-1, keepdims=True)
    return logits_SV - largest_S1 - np.log(np.exp(logits_SV - largest_S1).sum(-1, keepdims=True))


class Draw:
    """Texts and settings that follow from a seed."""

    def __init__(self, name: str, seed: int) -> None:
        self.rng = random.Random(f"{name} {seed}")
        self.package = package(name)
        self._stems = [self._tokens(self._length()) for _ in range(4)]

    def texts(self, count: int) -> list[Text]:
        return [self._text() for _ in range(count)]

    def settings(self) -> dict[str, Any]:
        """Arguments of `olive_ext.open`."""
        rng = self.rng
        rounds = "int4" in self.package.export.name  # one token a step is rounded otherwise: docs/design/engine.md
        engine: dict[str, Any] = {
            "chunk_size": rng.choice([7 if rounds else 1, 7, 31, 64, 256, "auto"]),
            "num_slots": rng.choice([1, 2, 3, 5, 8]),
            "scoring": rng.choice(["auto", "auto", "rows"]),
            "graph": rng.choice(["scoring_head", "scoring_head", "untouched"]),
            "overlaps_steps": rng.choice(["auto", True]),
            "num_threads": rng.choice([1, 2]),
        }
        if "genai" in self.package.export.name and rng.random() < 0.3:
            engine |= {"shapes": "bucketed", "overlaps_steps": "auto"}
        deterministic = rng.choice(["auto", True, False])
        model = self.package.export.path
        return {"model": model, "execution_provider": "cpu", "deterministic": deterministic, "engine": engine}

    def _length(self) -> int:
        """Often just before or behind a length that decides."""
        limit = self.rng.choice(self.package.limits)
        near = [limit + self.rng.randint(-4, 4), limit * 2 // 3, limit + self.rng.randint(1, 80)]
        length = self.rng.choice([*near, self.rng.randint(1, 30), self.rng.randint(1, self.package.longest - 30)])
        return min(max(length, 1), self.package.longest - 30)

    def _tokens(self, count: int) -> tuple[int, ...]:
        tokens = [self.rng.randrange(RARE + 1, 1000) for _ in range(count)]
        if tokens and self.rng.random() < 0.1:
            tokens[self.rng.randrange(count)] = RARE
        return tuple(tokens)

    def _context(self) -> tuple[int, ...]:
        """A part of a stem and something of its own, so that prefixes are shared and end on either side."""
        stem = self.rng.choice(self._stems)
        kept = self.rng.choice([len(stem), len(stem), min(len(stem), self._length())])
        more = self.rng.choice([0, 1, 2, self.rng.randint(0, 25)])
        return (stem[:kept] + self._tokens(more))[: self.package.longest - 30]

    def _text(self) -> Text:
        context, kind = self._context(), self.rng.random()
        if kind < 0.25:
            return Text("answer", context, num_tokens=self.rng.choice([1, 3, 8]))
        if kind < 0.3:
            return Text("roll", (), context)
        return Text("score", context, self._tokens(self.rng.choice([1, 1, 2, 4, self.rng.randint(1, 28)])))


def run(session: Session, texts: Sequence[Text], rng: random.Random) -> dict[Text, Any]:
    """All of them in a random order, in one call of each kind or several, which alternate."""
    jobs = list(dict.fromkeys(texts))
    rng.shuffle(jobs)
    cuts = sorted({0, len(jobs), *rng.sample(range(len(jobs) + 1), rng.choice((0, 1, 2, 3)))})
    found: dict[Text, Any] = {}
    for begin, end in pairwise(cuts):
        of = {kind: [one for one in jobs[begin:end] if one.kind == kind] for kind in ("score", "answer", "roll")}
        scored = session.loglikelihood([ScoringRequest(one.context, one.target) for one in of["score"]])
        found |= {one: output.token_logprobs for one, output in zip(of["score"], scored, strict=True)}
        wanted = [GenerationRequest(one.context, max_new_tokens=one.num_tokens) for one in of["answer"]]
        if rng.random() < 0.5:
            found |= {of["answer"][at]: output for at, output in session.generate_continuous(enumerate(wanted))}
        else:
            found |= dict(zip(of["answer"], session.generate(wanted), strict=True))
        rolled = session.loglikelihood_rolling([RollingRequest(one.target) for one in of["roll"]])
        found |= {one: output.logprob for one, output in zip(of["roll"], rolled, strict=True)}
    return found


def problems(name: str, seed: int, count: int = 24) -> tuple[dict[str, Any], list[str]]:
    """The settings that were drawn, and what is wrong with what a session under them answers. A package that is refused
    when it is opened has nothing wrong: the settings then hold the reason."""
    draw = Draw(name, seed)
    texts, settings = draw.texts(count), draw.settings()
    try:
        session = olive_ext.open(**settings)
    except OliveExtError as error:
        return {**settings, "refused": str(error)}, []
    with session:
        try:
            found = run(session, texts, draw.rng)
        except OliveExtError as error:
            return settings, [f"ended with: {error}"]
        prefix = session.tokenizer.prefix_token_id
    made = draw.package.export
    bound = max(NATS.get(made.dtype, 0.0), NATS.get(made.kv_dtype, NATS["fp32"]))
    off = _off(Oracle(made), found, prefix)
    return settings, [f"{one!r}: {nats:.2g} nats" for one, nats in off if not nats < bound]


def _off(oracle: Oracle, found: dict[Text, Any], prefix: int) -> list[tuple[Text, float]]:
    off = []
    for one, answer in found.items():
        if one.kind == "answer":
            off.append((one, oracle.behind_the_best(one.context, answer)))
            continue
        expected = oracle.score(one.context or [prefix], one.target)
        if one.kind == "roll":
            off.append((one, abs(answer - sum(expected)) / len(expected)))
        else:
            off.append((one, float(np.abs(np.subtract(answer, expected)).max())))
    return off


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs=2, type=int, default=(0, 20), metavar=("FIRST", "END"))
    parser.add_argument("--packages", nargs="+", default=[*LONGROPE, *STEP_WIDE], metavar="NAME")
    arguments = parser.parse_args()
    wrong = 0
    for name in arguments.packages:
        for seed in range(*arguments.seeds):
            settings, found = problems(name, seed)
            wrong += bool(found)
            refused = f", refused: {settings['refused']}" if "refused" in settings else ""
            print(f"{name} {seed}: {len(found)} wrong{refused}", flush=True)
            for line in found:
                print(f"    {line}")
            if found:
                print(f"    {settings}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()

"""Random texts on both sides of every length that decides in a graph, and random settings of the engine; and what
differs from one plain pass of the export's own graph over each text alone. Packages are those of
`tests.exports.step_wide` (FORM-EXPORTER) and of the catalog."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import pytest

import olive_ext
from olive_ext.errors import OliveExtError
from olive_ext.session.requests import GenerationRequest, RollingRequest, ScoringRequest
from tests.agreement.asked import Request
from tests.agreement.references import Reference, normal
from tests.agreement.table import in_any_order, largest
from tests.exports.catalog import CATALOG, Export, export
from tests.exports.hf import hf_model
from tests.exports.plain import cached_logits, plain_logits
from tests.exports.ropes import FIRST_MAXIMUM, ORIGINAL
from tests.exports.step_wide import ALIKE, FORMS, RARE, step_wide_export
from tests.exports.text import CONTEXT

NATS = {"fp32": 2e-4, "fp16": 0.05, "bf16": 0.5}
"""A log-probability may be as far from a plain pass, by the type that is computed in: steps of other shapes round
otherwise. Integer weights are computed with in fp32."""

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


def package(name: str) -> Package:
    if name in CATALOG:
        made = export(name)
        limits = (FIRST_MAXIMUM.get(made.family, ORIGINAL), WINDOW)
        longest = {"static": STATIC, "graph": ORIGINAL}  # a provider that is not used would take the second table
        return Package(made, limits, longest.get(name.rpartition("-")[2], CONTEXT))
    form, _, exporter = name.rpartition("-")
    family = "llama_dynamic" if form == "dynamic" else "llama"
    made = step_wide_export(form, exporter)
    return Package(Export(name, made, hf_model(family), family, exporter), (ORIGINAL, 20), CONTEXT)


class Oracle(Reference):
    """Plain passes over one text at a time."""

    def __init__(self, made: Export) -> None:
        self._export = made
        self._passed = lru_cache(maxsize=512)(lambda tokens: normal(plain_logits(made, list(tokens))))

    def logprobs(self, tokens: Sequence[int], given: Any = ()) -> Any:
        return self._passed(tuple(tokens))

    def rows_after(self, ids: Sequence[int], tokens: Sequence[int], given: Any) -> list[Any]:
        """Of a pass over all that is before each token; or with a cache, see `BY_THE_TOKEN`."""
        before = [tuple(tokens[:at]) for at in range(len(tokens) + 1)]
        if self._export.name.rpartition("-")[0] in BY_THE_TOKEN:
            return [normal(cached_logits(self._export, list(ids), list(own))[None])[0] for own in before]
        return [self.logprobs((*ids, *own))[-1] for own in before]


class Draw:
    """Texts and settings that follow from a seed."""

    def __init__(self, name: str, seed: int) -> None:
        self.rng = random.Random(f"{name} {seed}")
        self.package = package(name)
        self._stems = [self._tokens(self._length()) for _ in range(4)]

    def requests(self, count: int) -> list[Request]:
        return [self._request() for _ in range(count)]

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

    def _request(self) -> Request:
        context, kind = self._context(), self.rng.random()
        if kind < 0.25:
            return GenerationRequest(context, max_new_tokens=self.rng.choice([1, 3, 8]))
        if kind < 0.3:
            return RollingRequest(context)
        return ScoringRequest(context, self._tokens(self.rng.choice([1, 1, 2, 4, self.rng.randint(1, 28)])))


def problems(name: str, seed: int, count: int = 24) -> tuple[dict[str, Any], list[str]]:
    """The settings that were drawn, and what is wrong with what a session under them answers. A package that is refused
    when it is opened has nothing wrong: the settings then hold the reason."""
    draw = Draw(name, seed)
    asked, settings = draw.requests(count), draw.settings()
    try:
        session = olive_ext.open(**settings)
    except OliveExtError as error:
        return {**settings, "refused": str(error)}, []
    with session:
        try:
            found = in_any_order(session, dict(enumerate(asked)), draw.rng)
        except OliveExtError as error:
            return settings, [f"ended with: {error}"]
        prefix = session.tokenizer.prefix_token_id
    made, oracle = draw.package.export, Oracle(draw.package.export)
    bound = max(NATS.get(made.dtype, 0.0), NATS.get(made.kv_dtype, NATS["fp32"]))
    off = ((asked[at], _off(oracle, asked[at], output, prefix)) for at, output in found.items())
    return settings, [f"{one}: {nats:.2g} nats" for one, nats in off if not nats < bound]


def _off(oracle: Oracle, asked: Request, output: Any, prefix: int) -> float:
    if isinstance(asked, GenerationRequest):
        return oracle.below_the_best(list(asked.prompt), (), output)  # type: ignore[arg-type]
    if isinstance(asked, ScoringRequest):
        return largest(output.token_logprobs, oracle.score(asked.context, asked.target))
    expected = oracle.score([prefix], list(asked.text))
    return abs(float(output.logprob) - sum(expected)) / len(expected)


IN_DEFAULT_RUN = ("phi3_longrope-mobius", "phi3_longrope-genai-0.14", "largest_position-mobius", "dynamic-genai")
NEVER_REFUSED = (*LONGROPE, *(f"{form}-mobius" for form in ALIKE))


CASES = [
    *product(IN_DEFAULT_RUN, range(2)),
    *(
        pytest.param(name, seed, marks=pytest.mark.exporters)
        for name in (*LONGROPE, *STEP_WIDE)
        for seed in range(2, 12)
    ),
]


@pytest.mark.parametrize(("name", "seed"), CASES)
def test_answers_are_those_of_plain_passes(name: str, seed: int) -> None:
    settings, found = problems(name, seed)
    assert not found, f"seed {seed}: {settings}"
    assert "refused" not in settings or name not in NEVER_REFUSED, settings["refused"]

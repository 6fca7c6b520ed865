"""Random requests with pictures, sounds and texts, and random settings of the engine, for the families that take them;
and what differs in their answers from whole forward passes of transformers."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

import olive_ext
from olive_ext.session.requests import GenerationRequest, ScoringRequest
from tests.agreement.table import in_any_order, largest, reference
from tests.exports.media import MEDIA_FAMILIES, SOUND_FAMILIES, media_export
from tests.exports.text import TEXT
from tests.families.pictures import RATE, Item, MediaReference, field_of, picture, sound

WORDS = TEXT.replace(".", "").split()
NATS = 1e-4
"""A log-probability may be as far from a whole forward pass: steps of other shapes round otherwise."""

FAR = {"qwen3_5": 5e-4, **dict.fromkeys(SOUND_FAMILIES, 2e-4)}
"""As in tests/agreement: a recurrence adds up rounding, and so does a tower of convolutions."""

IN_PLACE = ("qwen2_5_vl", "gemma4_vl", "llava")
"""Families of which there is a package for WebGPU, too, which writes its KV in place and so may have shape buckets."""

FAMILIES = tuple(dict.fromkeys([*MEDIA_FAMILIES, *SOUND_FAMILIES]))


@dataclass(frozen=True)
class Asked:
    """A prompt in one of its forms, its items, and what is asked behind it: texts to score, or a number of tokens."""

    text: str
    """With markers in the places of the items."""

    items: tuple[Item, ...]
    form: str
    targets: tuple[str, ...] = ()
    num_tokens: int = 0


class Draw:
    """Requests and settings that follow from a seed."""

    def __init__(self, family: str, seed: int) -> None:
        self.rng = random.Random(f"{family} {seed}")
        self.theirs: MediaReference = reference("transformers", family)
        pictures = [picture(seed * 100 + at, self._side(), self._side()) for at in range(6)]
        sounds = [sound(seed * 100 + at, int(RATE * self.rng.choice((0.05, 0.3, 1.0, 1.7, 3.1)))) for at in range(4)]
        self.pool: dict[str, list[Any]] = {"images": pictures, "audio": sounds}
        self._stems = [self._pieces(self.rng.randint(0, 3)) for _ in range(4)]

    def requests(self, count: int) -> list[Asked]:
        return [self._request() for _ in range(count)]

    def settings(self) -> dict[str, Any]:
        """Arguments of `olive_ext.open`; with shapes that are few where the package allows them."""
        rng, family = self.rng, self.theirs.family
        largest = max(self.theirs.num_tokens(item) for kind in self.theirs.markers for item in self.pool[kind])
        engine: dict[str, Any] = {
            "chunk_size": rng.choice([largest, largest + 1, largest + rng.randint(2, 9), 256, "auto"]),
            "num_slots": rng.choice([1, 2, 3, 5, 8]),
            "scoring": rng.choice(["auto", "rows", "tree"]),
            "encoder_batch_rows": rng.choice(["auto", 1, 40, 150, 2048]),
            "graph": rng.choice(["scoring_head", "scoring_head", "untouched"]),
            "overlaps_steps": rng.choice(["auto", True]),
            "num_threads": rng.choice([1, 2]),
        }
        provider = "default"
        if family in IN_PLACE and rng.random() < 0.4:
            provider = "webgpu"
            engine |= rng.choice([{}, {"shapes": "bucketed"}, {"strict_shapes": True}])
            engine["scoring"] = rng.choice(["auto", "rows"] if len(engine) > 7 else ["auto", "rows", "answers"])
            engine["overlaps_steps"] = "auto"
        if engine["scoring"] == "tree" and family.startswith("qwen3_5"):
            engine["scoring"] = "auto"  # states cannot be scored in tree batches
        model = media_export(family, "f32", provider)[0]
        deterministic = rng.choice(["auto", True, False])
        return {"model": model, "execution_provider": "cpu", "deterministic": deterministic, "engine": engine}

    def _side(self) -> int:
        return self.rng.choice((16, 24, 40, 64, 90))

    def _words(self, least: int, most: int) -> str:
        start = self.rng.randrange(len(WORDS) - most)
        return " ".join(WORDS[start : start + self.rng.randint(least, most)])

    def _pieces(self, num_items: int) -> tuple[str, tuple[Item, ...]]:
        """A text with places for items, and the items: some stand at its beginning or end, or beside each other."""
        text, items = self._words(0, 12), []
        for _ in range(num_items):
            kind, marker = self.rng.choice([*self.theirs.markers.items()])
            items.append(self.rng.choice(self.pool[kind]))
            text += f"{self.rng.choice(('', ' '))}{marker}{self.rng.choice(('', ' ' + self._words(1, 6)))}"
        return text, tuple(items)

    def _request(self) -> Asked:
        (stem, first), (end, more) = self.rng.choice(self._stems), self._pieces(self.rng.choice((0, 0, 0, 1)))
        text, items = f"{stem} {end}", (*first, *more)
        while len(self.theirs.ids(text, items)) > 400:  # the context has 512
            text, items = self._pieces(1)
        text = text.rstrip()  # a space at the end of a context would be the target's
        forms = ["text", "ids"]
        if not any(one in text for one in {*self.theirs.markers.values()} - {self.theirs.marker}):  # a template has one
            forms += ["open parts", "held parts"]
        form = self.rng.choice(forms)
        if self.rng.random() < 0.3:
            return Asked(text, items, form, num_tokens=self.rng.randint(1, 6))
        targets = [" " + self._words(1, 5) for _ in range(self.rng.choice((1, 1, 2, 4)))]
        return Asked(text, items, form, tuple(targets))


def prompt(theirs: MediaReference, asked: Asked) -> dict[str, Any]:
    """The session's fields of a request: the prompt in its form, and the items that it does not hold itself."""
    of_kind = {kind: [item for item in asked.items if field_of(item) == kind] for kind in ("images", "audio")}
    if asked.form == "text":
        return {"prompt": asked.text, **of_kind}
    if asked.form == "ids":
        return {"prompt": list(theirs.tokenizer.encode(asked.text)), **of_kind}
    parts, waiting = [], iter(asked.items)
    for text in filter(None, re.split(f"({theirs.pattern})", asked.text)):
        if text not in theirs.markers.values():
            parts.append({"type": "text", "text": text})
            continue
        name = field_of(item := next(waiting)).removesuffix("s")
        parts.append({"type": name, name: item} if asked.form == "held parts" else {"type": name})
    return {"prompt": [{"role": "user", "content": parts}], **(of_kind if asked.form == "open parts" else {})}


def expected_scores(theirs: MediaReference, asked: Asked, target: str) -> list[float]:
    if asked.form == "text":
        return theirs.score(asked.text, target, asked.items)
    context = theirs.ids(asked.text, asked.items, is_chat=asked.form.endswith("parts"))
    return theirs.score(context, theirs.tokenizer.encode(target, add_special_tokens=False), asked.items)


def problems(family: str, seed: int, count: int = 10) -> tuple[dict[str, Any], list[str]]:
    """The settings that were drawn, and what is wrong with what a session under them answers; features beyond a budget
    of bytes are dropped."""
    draw = Draw(family, seed)
    theirs, asked, settings = draw.theirs, draw.requests(count), draw.settings()
    budget = draw.rng.choice((1 << 28, 9000, 1))
    requests: dict[Any, Any] = {}
    for number, one in enumerate(asked):
        fields = prompt(theirs, one)
        text = fields.pop("prompt")
        requests |= {(number, target): ScoringRequest(text, target, **fields) for target in one.targets}
        if one.num_tokens:
            requests[number, ""] = GenerationRequest(text, max_new_tokens=one.num_tokens, **fields)
    with olive_ext.open(**settings) as session:
        runner: Any = session.executor.runner  # type: ignore[attr-defined]
        for encoder in getattr(runner, "inner", runner)._parts.embedding._encoders.values():
            encoder.kept.budget = budget
        outputs, facts = in_any_order(session, requests, draw.rng), session.describe_execution()
    found = []
    for (number, target), output in outputs.items():
        one = asked[number]
        if target:
            off = largest(output.token_logprobs, expected_scores(theirs, one, target))
        else:
            ids = theirs.ids(one.text, one.items, is_chat=one.form.endswith("parts"))
            off = theirs.below_the_best(ids, one.items, output)
            assert output.stop_id is not None or len(output.tokens) == one.num_tokens
        if not off < FAR.get(family, NATS):
            found.append(f"{_shown(one)} -> {target!r}: {off} nats")
    return {**settings, "budget": budget}, found + _miscounted(facts, asked, budget)


def _miscounted(facts: dict[str, Any], asked: Sequence[Asked], budget: int) -> list[str]:
    """Whether an encoder ran for anything but once for each distinct item, where there was room for their features."""
    found = []
    items = {id(item): item for one in asked for item in one.items}.values()
    for name, kind in (("image", False), ("sound", True)):
        if f"{name}s_encoded" not in facts:
            continue
        distinct = sum(isinstance(item, tuple) == kind for item in items)
        encoded, evicted, runs = (
            facts[key] for key in (f"{name}s_encoded", f"{name}s_evicted", f"{name}_encoder_runs")
        )
        if encoded - evicted > distinct or runs > encoded or (budget > 1 << 20 and (encoded, evicted) != (distinct, 0)):
            found.append(f"{distinct} {name}s: {encoded} encoded in {runs} runs, {evicted} evicted, budget {budget}")
        if budget > 1 and not facts[f"{name}_feature_bytes"] <= max(budget, 80 * 64 * 4):
            found.append(f"{facts[f'{name}_feature_bytes']} bytes of {name} features, budget {budget}")
    return found


def _shown(asked: Asked) -> str:
    items = [item.size if not isinstance(item, tuple) else f"{len(item[0])} samples" for item in asked.items]
    return f"{asked.form} {asked.text!r} {items}"


IN_DEFAULT_RUN = ("qwen2_5_vl", "llava_clip", "qwen3_asr")


def _mark(name: str, seed: int) -> Any:
    if name not in IN_DEFAULT_RUN or seed >= 12:
        return pytest.mark.exporters
    return pytest.mark.long if seed else ()


SEEDS = [pytest.param(name, seed, marks=_mark(name, seed)) for name in FAMILIES for seed in range(30)]


@pytest.mark.parametrize(("family", "seed"), SEEDS)
def test_answers_are_those_of_whole_passes(family: str, seed: int) -> None:
    settings, found = problems(family, seed)
    assert not found, f"seed {seed}: {settings}"

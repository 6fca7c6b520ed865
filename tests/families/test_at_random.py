"""Random requests with pictures, sounds and texts, and random settings of the engine, for the families that take them;
and what differs in their answers from whole forward passes of the export's own graphs (`PlainMedia`)."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import olive_ext
from olive_ext.errors import OliveExtError
from olive_ext.session.requests import GenerationRequest, ScoringRequest
from tests.agreement.table import in_any_order, largest
from tests.exports.media import MEDIA_FAMILIES, SOUND_FAMILIES, media_export
from tests.exports.step_wide import ENCODER_FORMS, step_wide_encoder
from tests.exports.text import TEXT
from tests.families.pictures import PictureReference, picture
from tests.families.plain_media import AUDIO, IMAGE, Item, PlainMedia, plain_media
from tests.families.sounds import RATE, SoundReference, sound

WORDS = TEXT.replace(".", "").split()
NATS = 1e-4
"""A log-probability may be as far from a whole forward pass: steps of other shapes round otherwise."""

IN_PLACE = ("qwen2_5_vl", "gemma4_vl", "llava")
"""Families of which there is a package for WebGPU, too, which writes its KV in place and so may have shape buckets."""

FAMILIES = tuple(dict.fromkeys([*MEDIA_FAMILIES, *SOUND_FAMILIES]))


@dataclass(frozen=True)
class Asked:
    """A prompt in one of its forms, its items, and what is asked behind it: texts to score, or a number of tokens."""

    text: str
    """With `IMAGE` and `AUDIO` in the places of the items."""

    items: tuple[Item, ...]
    form: str
    targets: tuple[str, ...] = ()
    num_tokens: int = 0


class Draw:
    """Requests and settings that follow from a seed."""

    def __init__(self, family: str, seed: int) -> None:
        self.rng = random.Random(f"{family} {seed}")
        self.plain: PlainMedia = plain_media(family)
        pictures = [picture(seed * 100 + at, self._side(), self._side()) for at in range(6)]
        sounds = [sound(seed * 100 + at, int(RATE * self.rng.choice((0.05, 0.3, 1.0, 1.7, 3.1)))) for at in range(4)]
        self.pool: dict[str, list[Any]] = {IMAGE: pictures, AUDIO: sounds}
        self._stems = [self._pieces(self.rng.randint(0, 3)) for _ in range(4)]

    def requests(self, count: int) -> list[Asked]:
        return [self._request() for _ in range(count)]

    def settings(self) -> dict[str, Any]:
        """Arguments of `olive_ext.open`; with shapes that are few where the package allows them."""
        rng, family = self.rng, self.plain.export.family
        largest = max(len(self.plain.features(item)) for kind in self.plain.kinds for item in self.pool[kind])
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
            kind = self.rng.choice(self.plain.kinds)
            items.append(self.rng.choice(self.pool[kind]))
            text += f"{self.rng.choice(('', ' '))}{kind}{self.rng.choice(('', ' ' + self._words(1, 6)))}"
        return text, tuple(items)

    def _request(self) -> Asked:
        (stem, first), (end, more) = self.rng.choice(self._stems), self._pieces(self.rng.choice((0, 0, 0, 1)))
        text, items = f"{stem} {end}", (*first, *more)
        while len(self.plain.ids(text, items)) > 400:  # the context has 512
            text, items = self._pieces(1)
        text = text.rstrip()  # a space at the end of a context would be the target's
        forms = ["text", "ids"]
        if not (len(self.plain.kinds) > 1 and IMAGE in text):  # that template has one marker
            forms += ["open parts", "held parts"]
        form = self.rng.choice(forms)
        if self.rng.random() < 0.3:
            return Asked(text, items, form, num_tokens=self.rng.randint(1, 6))
        targets = [" " + self._words(1, 5) for _ in range(self.rng.choice((1, 1, 2, 4)))]
        return Asked(text, items, form, tuple(targets))


def prompt(plain: PlainMedia, asked: Asked) -> dict[str, Any]:
    """The session's fields of a request: the prompt in its form, and the items that it does not hold itself."""
    marked = asked.text.replace(IMAGE, plain.marker(IMAGE)).replace(AUDIO, plain.marker(AUDIO))
    of_kind = {"images": [], "audio": []}
    for item in asked.items:
        of_kind["audio" if isinstance(item, tuple) else "images"].append(item)
    if asked.form == "text":
        return {"prompt": marked, **of_kind}
    if asked.form == "ids":
        return {"prompt": list(plain.tokenizer.encode(marked)), **of_kind}
    parts, waiting, text = [], iter(asked.items), ""
    for one in asked.text:
        if one not in (IMAGE, AUDIO):
            text += one
            continue
        name, item = ("image" if one == IMAGE else "audio"), next(waiting)
        parts += [{"type": "text", "text": text}] if text else []
        parts.append({"type": name, name: item} if asked.form == "held parts" else {"type": name})
        text = ""
    parts += [{"type": "text", "text": text}] if text else []
    return {"prompt": [{"role": "user", "content": parts}], **(of_kind if asked.form == "open parts" else {})}


def expected_scores(plain: PlainMedia, asked: Asked, target: str) -> list[float]:
    is_chat = asked.form.endswith("parts")
    context = plain.ids(asked.text, asked.items, is_chat=is_chat)
    if asked.form == "text":
        whole = plain.ids(asked.text + target, asked.items)
        assert whole[: len(context)] == context
    else:
        whole = context + list(plain.tokenizer.encode(target, add_special_tokens=False))
    return plain.score(context, whole[len(context) :], asked.items)


def problems(family: str, seed: int, count: int = 10) -> tuple[dict[str, Any], list[str]]:
    """The settings that were drawn, and what is wrong with what a session under them answers; features beyond a budget
    of bytes are dropped."""
    draw = Draw(family, seed)
    plain, asked, settings = draw.plain, draw.requests(count), draw.settings()
    budget = draw.rng.choice((1 << 28, 9000, 1))
    requests: dict[Any, Any] = {}
    for number, one in enumerate(asked):
        fields = prompt(plain, one)
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
            expected = expected_scores(plain, one, target)
            off = largest(output.token_logprobs, expected)
        else:
            ids = plain.ids(one.text, one.items, is_chat=one.form.endswith("parts"))
            off = plain.below_the_best(ids, one.items, output)
            assert output.stop_id is not None or len(output.tokens) == one.num_tokens
        if not off < NATS:
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
    return pytest.mark.long if seed > 1 else ()


MARKED = [pytest.param(name, marks=_mark(name, 0)) for name in FAMILIES]
SEEDS = [pytest.param(name, seed, marks=_mark(name, seed)) for name in FAMILIES for seed in range(30)]


@pytest.mark.parametrize(("family", "seed"), SEEDS)
def test_answers_are_those_of_whole_passes(family: str, seed: int) -> None:
    settings, found = problems(family, seed)
    assert not found, f"seed {seed}: {settings}"


@pytest.mark.parametrize("family", MARKED)
def test_whole_passes_are_transformers(family: str) -> None:
    """What the others are held against. (transformers fills sounds of one prompt up to the longest, and Qwen3-ASR's
    encoder there gives others than alone: so all are of one length here.)"""
    draw = Draw(family, 0)
    made = SoundReference if family in SOUND_FAMILIES else PictureReference
    reference, kind = made(family, media_export(family)[1]), AUDIO if family in SOUND_FAMILIES else IMAGE
    asked = [one for one in draw.requests(40) if one.form == "text" and set(one.text) & {IMAGE, AUDIO} <= {kind}]
    asked = [one for one in asked if kind == IMAGE or len({len(item[0]) for item in one.items}) < 2]  # type: ignore[arg-type]
    scored = [(one, target) for one in asked for target in one.targets]
    assert any(one.items for one, _ in scored)
    for one, target in scored:
        theirs = reference.score(one.text.replace(kind, reference.marker), target, one.items)
        np.testing.assert_allclose(expected_scores(draw.plain, one, target), theirs, atol=NATS)


TARGET = " blue stone"


@pytest.mark.parametrize("form", ENCODER_FORMS)
def test_encoder_whose_rows_depend_on_what_else_it_is_given_is_right_or_refused(form: str) -> None:
    """Small and large items, each as alone."""
    family, path = ENCODER_FORMS[form][0], step_wide_encoder(form)
    plain = PlainMedia(family)
    plain.export = dataclasses.replace(plain.export, path=path)
    kind = IMAGE if IMAGE in plain.kinds else AUDIO
    items = [picture(at, side, side) for at, side in enumerate((24, 90, 40, 24, 100, 32))]
    if kind == AUDIO:
        items = [sound(at, int(RATE * seconds)) for at, seconds in enumerate((0.3, 3.0, 0.5, 0.9, 1.7, 0.3))]
    asked = [Asked(f"Ann sees {kind} and a", (item,), "text", (TARGET,)) for item in items]
    try:
        session = olive_ext.open(path, engine={"num_slots": 8, "encoder_batch_rows": 2048})
    except OliveExtError:
        return
    with session:
        requests = [ScoringRequest(one.pop("prompt"), TARGET, **one) for one in (prompt(plain, ask) for ask in asked)]
        found = [output.token_logprobs for output in session.loglikelihood(requests)]
    for ask, scores in zip(asked, found, strict=True):
        np.testing.assert_allclose(scores, expected_scores(plain, ask, TARGET), atol=NATS)

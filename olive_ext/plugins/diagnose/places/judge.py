"""The finding on one model in two places: how far apart they are, beside this model's own noise, and beside what the
rounding of their arithmetic does to it. Noise passes each of the two with a probability of at most 1 %."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from olive_ext.errors import OliveExtError, first_line
from olive_ext.model import ResolvedModel
from olive_ext.plugins.diagnose.places.decision import RESOLUTION, FloatArray, held
from olive_ext.plugins.diagnose.places.noise import (
    UNITS,
    Variant,
    coarser,
    computed_in,
    form_of,
    log_probabilities,
    moved,
)
from olive_ext.plugins.diagnose.places.sample import Kept, Sample
from olive_ext.report.numbers import nats
from olive_ext.report.place import FirstPosition, Noise, Place, PlaceKind

logger = logging.getLogger(__name__)

SHARE = 0.06
"""Part of the tokens that both places were fed which noise runs may take together, but for `LEAST_DOCUMENTS`."""

MOST_AMPLIFIED = 10_000
"""Times its unit roundoff that a model's rounding amounts to at most, as a root mean square in nats: of float32 28 on
the quickstart's model and 270 on a recurrent one, of 8-bit activations 14. Moved inputs that change more met a place
that does not repeat itself."""

HARMLESS = 1e-4
"""Nats up to which statistics alone make a pair green; more, nodes have to hold. Other kernels in float32 are up to
1e-5 apart, and a product 0.01 % too large 2.6e-4."""

LEAST_DOCUMENTS, LEAST_POSITIONS = 8, 100
"""What noise is measured on at least, whatever that costs: a tail needs some positions to be seen."""


@dataclass(frozen=True)
class Places:
    """The evaluated model and the reference; None of a reference that is records, which were `recorded_in`."""

    model: ResolvedModel
    reference: ResolvedModel | None
    names: tuple[str, str]
    max_length: int
    recorded_in: str = "float32"


@dataclass(frozen=True)
class _Run:
    noise: Noise
    apart: list[FloatArray]


def judged(
    places: Places, sample: Sample, everywhere: FloatArray, tokens_fed: int
) -> tuple[Place, tuple[Kept, int] | None]:
    """The finding, and the request and target where the places part for the first time, or where they are farthest
    apart if noise explains it, and it is not harmless. `everywhere` [N]: distances in nats at all positions;
    `tokens_fed` to one of the models."""
    models = (model for model in (places.model, places.reference) if model is not None)
    unit = coarser(*map(computed_in, models), places.recorded_in)
    size = _size(everywhere) if len(everywhere) else (0.0, 0.0)
    found = Place("cannot_tell", *places.names, unit, *size, len(everywhere))
    if not len(everywhere):
        return replace(found, reason="no log-probability was compared"), None
    if not np.isfinite(everywhere).all():
        return replace(found, reason="a log-probability is not finite"), None
    own, rounding, failures = _runs(places, unit, sample, tokens_fed)
    documents = [np.concatenate([kept.apart for kept in one]) for one in sample.documents()]
    noises = tuple(run.noise for run in (*own, *rounding))
    sizes = [len(run.apart) for run in (*own, *rounding)]
    if not own or not rounding:
        why = failures[0] if failures else "no place can be run in another form"
        found = replace(found, noise=noises, reason=f"its noise was not measured ({why})")
        if size[1] <= RESOLUTION:
            return replace(found, kind="same", reason=""), None
        early = _first(sample.apart(), size[1] / 2)
        return replace(found, first=_first_position(*early)), early
    pair = documents[: min(sizes)]
    nearer, farther = (held(pair, [run.apart for run in runs], everywhere) for runs in (own, rounding))
    excuse = _no_noise(own, rounding, unit)
    near: PlaceKind = "cannot_tell" if excuse else "kernels" if nearer.is_farther else "same"
    kind: PlaceKind = "different" if farther.is_farther and (excuse or nearer.is_farther) else near
    is_open = kind == "different" or (kind != "cannot_tell" and size[1] > HARMLESS)
    where = _first(sample.apart(), farther.limit if kind == "different" else size[1] / 2) if is_open else None
    first = None if where is None else _first_position(*where)
    limits = replace(found, noise_limit=nearer.limit, kernel_limit=farther.limit, ratio=farther.ratio)
    limits = replace(limits, reason=excuse if kind == "cannot_tell" else "")
    return replace(limits, kind=kind, noise=noises, first=first), where


def _no_noise(own: Sequence[_Run], rounding: Sequence[_Run], unit: str) -> str:
    """Why what was measured is no noise: a place that is wrong in some forms, or from run to run, is not excused by
    itself. Empty where it is noise."""
    most = MOST_AMPLIFIED * UNITS[unit]
    if large := [run.noise for run in rounding if run.noise.rms > most]:
        return f"{large[0].place} does not repeat itself: {large[0].form}, it is {nats(large[0].rms)} nats off"
    scales = [run.apart for run in rounding]
    for run in own:
        pair = run.apart[: min(map(len, scales))]
        if held(pair, scales, np.concatenate(run.apart)).is_farther:
            noise = run.noise
            return f"{noise.place} gives other numbers by {noise.form}: {nats(noise.rms)} nats off, beyond rounding"
    return ""


def _size(apart: FloatArray) -> tuple[float, float]:
    """The root mean square and the largest."""
    return float(np.sqrt(np.mean(apart**2))), float(apart.max())


def _first_position(kept: Kept, target: int) -> FirstPosition:
    return FirstPosition(kept.task, kept.document, int(kept.positions[target]), float(kept.apart[target]))


def _runs(places: Places, unit: str, sample: Sample, tokens_fed: int) -> tuple[list[_Run], list[_Run], list[str]]:
    """Noise runs of both places, those with moved inputs, and why others are not there."""
    jobs = list(_jobs(places, unit))
    documents = _affordable(sample, int(2 * tokens_fed * SHARE / max(len(jobs), 1)))
    own: list[_Run] = []
    rounding: list[_Run] = []
    failures: list[str] = []
    for name, model, is_own, variant in jobs:
        try:
            said = log_probabilities(model, variant, documents, places.max_length)
        except OliveExtError as error:
            failures.append(f"{variant.words}: {first_line(error)}")
            logger.info("no noise of %s, %s: %s", name, variant.words, first_line(error))
            continue
        known = [np.concatenate([kept.own if is_own else kept.other for kept in one]) for one in documents]
        apart = [np.abs(new - old) for new, old in zip(said, known, strict=True)]
        whole, is_rounding = np.concatenate(apart), variant.edit_graph is not None
        if not np.isfinite(whole).all():
            failures.append(f"{variant.words}: a log-probability is not finite")
            continue
        noise = Noise(name, variant.words, *_size(whole), len(whole), is_rounding)
        (rounding if is_rounding else own).append(_Run(noise, apart))
    return own, rounding, failures


def _jobs(places: Places, unit: str) -> Iterator[tuple[str, ResolvedModel, bool, Variant]]:
    """Name and model of the place, whether it is the evaluated one, and how it is run. One moves inputs."""
    both = list(zip(places.names, (places.model, places.reference), (True, False), strict=True))
    there = [(name, model, is_own) for name, model, is_own in both if model is not None]
    kinds = {_kind_of(model): (name, model, is_own) for name, model, is_own in reversed(there)}
    for name, model, is_own in reversed(kinds.values()):
        yield name, model, is_own, form_of(model)
    graphs = [one for one in there if one[1].kind == "onnx" and one[1].runtime.name == "onnxruntime"]
    graphs.sort(key=lambda one: one[1].device.kind != "cpu")
    for name, model, is_own in graphs[:1]:
        yield from ((name, model, is_own, variant) for variant in moved(unit))


def _kind_of(model: ResolvedModel) -> tuple[str, ...]:
    """What decides how a place computes: two places of one kind have the same noise."""
    if model.kind == "hf":
        return model.kind, model.settings.dtype
    return model.kind, model.runtime.name, *(provider.name for provider in model.providers)


def _affordable(sample: Sample, most_tokens: int) -> list[list[Kept]]:
    """The first documents of so many tokens in all, and at least a few."""
    chosen: list[list[Kept]] = []
    num_positions = 0
    for document in sample.documents():
        most_tokens -= sum(kept.size for kept in document)
        if most_tokens < 0 and len(chosen) >= LEAST_DOCUMENTS and num_positions >= LEAST_POSITIONS:
            break
        chosen.append(document)
        num_positions += sum(len(kept.own) for kept in document)
    return chosen


def _first(requests: Sequence[Kept], limit: float) -> tuple[Kept, int]:
    """The request and the target of the earliest position beyond the limit among the requests that are farthest apart;
    the farthest where only all together are."""
    beyond = [
        (int(kept.positions[at]), kept, int(at)) for kept in requests for at in np.flatnonzero(kept.apart > limit)
    ]
    if beyond:
        return min(beyond, key=lambda one: one[0])[1:]
    return requests[0], int(requests[0].apart.argmax())

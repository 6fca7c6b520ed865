"""One model in two places: the finding on an evaluation of such a pair, and where in the model they part. Knows no
statistics."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from olive_ext.backends.package_versions import runtimes
from olive_ext.config import ReferenceConfig
from olive_ext.errors import OliveExtError, RunError, first_line
from olive_ext.model import ResolvedModel
from olive_ext.plugins.diagnose.stages import Compare, with_stages
from olive_ext.report import Report
from olive_ext.report.comparison import Comparison
from olive_ext.report.numbers import nats
from olive_ext.report.place import FirstPosition, Place
from olive_ext.report.verdict import verdict
from olive_ext.run.models import Models
from olive_ext.run.reference.observer import Observer

if TYPE_CHECKING:
    from olive_ext.plugins.diagnose.places import Kept, Places
    from olive_ext.plugins.diagnose.places.first_difference import FirstDifference

LEAST_EXPLAINED = 0.5
"""Share of the logits' difference that a node has to make to be the fault of a pair that noise explains."""

MOST_BEYOND = 2
"""Times the largest distance of noise that it may be taken to reach. Of 1,000 pairs of equal noise on the quickstart's
model 1.8 % were beyond it in float16, and none in float32."""


def finish_report(
    report: Report, models: Models, observer: Observer | None, reference: Observer | None, compare: Compare
) -> Report:
    """The report with the stages of its difference, or with the finding on two places."""
    return with_place(with_stages(report, models, compare), models, observer, reference)


def with_place(report: Report, models: Models, observer: Observer | None, reference: Observer | None) -> Report:
    """The report with the finding on two places, where the evaluated model was held against itself; what cannot be
    measured is said in it, since the numbers may have taken hours. `reference` has seen the reference alone."""
    comparison, sample = report.comparison, observer.sample if observer is not None else None
    if comparison is None or sample is None or observer is None:
        return report
    from olive_ext.plugins.diagnose.places import Places, judged

    rows = [observer.rows(task) for task in observer.tasks]
    file = models.records_file
    other = models.other if file is None else None
    names = _names(models, other)
    recorded_in = str(file.manifest.get("computed_in", "float32")) if file is not None else "float32"
    places = Places(models.own, other, names, int(report.model["max_length"]), recorded_in)
    apart = [np.abs(one["logprobs"].astype(np.float64) - one["reference_logprobs"]) for one in rows]
    fed = int(report.engine.get("tokens_fed", 0))
    place, where = judged(places, sample, np.concatenate([np.empty(0), *apart]), fed)
    if where is not None and place.first is not None:
        place = _looked_into(place, place.first, places, *where, models.config.reference)
    return replace(report, comparison=replace(comparison, place=_with_answers(place, comparison, observer, reference)))


def recorded_facts(model: ResolvedModel) -> dict[str, str]:
    """What records of a model keep, to be held against another place."""
    from olive_ext.plugins.diagnose.places.noise import computed_in

    return {"computed_in": computed_in(model)}


def _with_answers(place: Place, comparison: Comparison, observer: Observer, reference: Observer | None) -> Place:
    """The finding with what was generated: both places score one text alike, and may write another where decoding steps
    are wrong. Answers that part where both are surer than any rounding are different."""
    if place.kind not in ("same", "kernels"):
        return place
    limit = 2 * max(place.noise_limit, place.kernel_limit)
    parted = () if reference is None else observer.parted(reference)
    least, (task, number, prompt), index = max(parted, key=lambda one: one[0], default=(0.0, ("", 0, ""), 0))
    if least > limit:
        before = 0 if isinstance(prompt, str) else len(prompt)
        finding = (
            f"token {index + 1} of the generated answer is another one, where both places score one "
            f"{nats(least)} nats before all others: decoding steps give other numbers than whole texts"
        )
        first = FirstPosition(task, number, before + index, least, finding=finding)
        return replace(place, kind="different", first=first)
    found = verdict(comparison)
    if found.status == "loss" or found.code == "gain":
        reason = f"scores differ by rounding, and answers do not: {found.headline}"
        return replace(place, kind="cannot_tell", reason=reason)
    return place


def _names(models: Models, reference: ResolvedModel | None) -> tuple[str, str]:
    """What the places are called: their providers and versions, and what else was asked of the reference."""
    versions, asked = runtimes(), models.config.reference
    own, file = _name(models.own, versions), models.records_file
    if reference is None:
        assert file is not None
        providers = [str(one.get("name", one)) for one in file.manifest["providers"]]
        return own, f"{', '.join(providers)} ({_version(file.manifest['versions'])}, recorded)"
    engine = {} if asked is None or asked.engine is None else asked.engine.model_dump(exclude_unset=True)
    more = [f"{name} {value}" for name, value in engine.items()]
    path = [] if asked is None or asked.is_same else [asked.path]
    return own, ", ".join([_name(reference, versions), *path, *more])


def _name(model: ResolvedModel, versions: dict[str, str]) -> str:
    if model.kind == "hf":
        return f"transformers in {model.settings.dtype}"
    runtime = model.runtime.name
    with_version = _version(versions) if runtime == "onnxruntime" else runtime
    return f"{model.providers[0].name} ({with_version})"


def _version(versions: Any) -> str:
    return next((f"{name} {text}" for name, text in versions.items() if name.startswith("onnxruntime")), "unknown")


def _looked_into(
    place: Place, first: FirstPosition, places: Places, kept: Kept, target: int, asked: ReferenceConfig | None
) -> Place:
    """The finding with the node where the places part, or why it is not known. What noise explains stays green where
    the nodes hold it; where they cannot be run, as far as noise was seen to go."""
    from olive_ext.plugins.diagnose.places.place import HeldError, NotLocatedError

    is_green = place.kind != "different"
    try:
        found = _first_difference(places, kept.tokens(target), asked, first.distance if is_green else None)
    except OliveExtError as error:
        why = first_line(error)
        is_held = isinstance(error, HeldError) or (_is_seen(place) and not isinstance(error, NotLocatedError))
        held = "no node gives other numbers" if isinstance(error, HeldError) else "the node is not known"
        is_only_seen = is_green and is_held and not isinstance(error, HeldError)
        seen = f"; up to {nats(MOST_BEYOND * _seen(place))} nats are within {MOST_BEYOND} times the noise that was seen"
        first = replace(first, finding=f"{held}: {why}{seen if is_only_seen else ''}")
    else:
        why = f"'{found.node}' makes {found.explained:.0%} of it"
        is_held = False
        first = replace(first, layer=found.layer, node=found.node, finding=str(found), repro=str(found.repro or ""))
        is_green &= found.explained < LEAST_EXPLAINED
    if not is_green:
        return replace(place, kind="different", first=first, reason="")
    if is_held:
        return replace(place, kind="same" if place.kind == "same" else "kernels", first=first, reason="")
    reason = place.reason or "it is no more than noise may be"
    reason += f"; {nats(first.distance)} nats at {first}, which no nodes hold: {why}"
    return replace(place, kind="cannot_tell", first=first, reason=reason)


def _is_seen(place: Place) -> bool:
    """Whether noise was seen to go about as far, beyond which its tail is extrapolated; rounding of activations to 8
    bits goes farther than many faults."""
    return place.computed_in != "8-bit activations" and place.largest <= MOST_BEYOND * _seen(place)


def _seen(place: Place) -> float:
    return max((one.largest for one in place.noise), default=0.0)


def _first_difference(
    places: Places, tokens: list[int] | None, asked: ReferenceConfig | None, distance: float | None
) -> FirstDifference:
    from olive_ext.plugins.diagnose.places.first_difference import first_difference

    model, reference = places.model, places.reference
    if reference is None:
        raise RunError("nodes are run where both places are on one machine (--against)")
    if tokens is None or model.kind != "onnx" or reference.kind != "onnx":
        raise RunError("nodes are run of ONNX models and texts alone")
    repro = None if asked is None or asked.repro is None else Path(asked.repro)
    settings = model.settings, reference.settings
    return first_difference(*settings, tokens, len(tokens) - 1, repro=repro, distance=distance)

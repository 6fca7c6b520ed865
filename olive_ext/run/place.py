"""One model in two places: the finding on an evaluation of such a pair, and where in the model they part. Knows no
statistics."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from olive_ext.backends.package_versions import runtimes
from olive_ext.config import ReferenceConfig
from olive_ext.errors import OliveExtError, first_line
from olive_ext.model import ResolvedModel
from olive_ext.report import Report
from olive_ext.report.comparison import Comparison
from olive_ext.report.numbers import nats
from olive_ext.report.place import FirstPosition, Place
from olive_ext.report.verdict import verdict
from olive_ext.run.models import Models
from olive_ext.run.reference.observer import Observer

if TYPE_CHECKING:
    from olive_ext.places import Kept

logger = logging.getLogger("olive.olive_ext")


def with_place(report: Report, models: Models, observer: Observer | None) -> Report:
    """The report with the finding on two places, where the evaluated model was held against itself; what cannot be
    measured is said in it, since the numbers may have taken hours."""
    comparison, sample = report.comparison, observer.sample if observer is not None else None
    if comparison is None or sample is None or observer is None:
        return report
    from olive_ext.places import Places, judged

    rows = [observer.rows(task) for task in observer.tasks]
    file = models.records_file
    reference = models.other if file is None else None
    names = _names(models, reference)
    recorded_in = str(file.manifest.get("computed_in", "float32")) if file is not None else "float32"
    places = Places(models.own, reference, names, int(report.model["max_length"]), recorded_in)
    apart = [np.abs(one["logprobs"].astype(np.float64) - one["reference_logprobs"]) for one in rows]
    fed = int(report.engine.get("tokens_fed", 0))
    place, where = judged(places, sample, np.concatenate([np.empty(0), *apart]), fed)
    if where is not None and place.first is not None:
        first = _looked_into(place.first, places.model, reference, *where, models.config.reference)
        place = replace(place, first=first)
    return replace(report, comparison=replace(comparison, place=_with_answers(place, comparison, observer)))


def _with_answers(place: Place, comparison: Comparison, observer: Observer) -> Place:
    """The finding with what was generated: both places score one text alike, and may write another where decoding steps
    are wrong. Answers that part where both are surer than any rounding are different."""
    if place.kind not in ("same", "kernels"):
        return place
    limit = 2 * max(place.noise_limit, place.kernel_limit)
    for one in () if comparison.margins is None else comparison.margins.differences:
        least = min(one.reference_margin or 0.0, one.candidate_margin or 0.0)
        if least > limit:
            prompts = (asked[2] for asked in observer.greedy if asked[:2] == (one.task, one.doc_id))
            before = sum(len(prompt) for prompt in [next(prompts, "")] if not isinstance(prompt, str))
            finding = (
                f"token {one.index + 1} of the generated answer is another one, where both places score one "
                f"{nats(least)} nats before all others: decoding steps give other numbers than whole texts"
            )
            first = FirstPosition(one.task, one.doc_id, before + one.index, least, finding=finding)
            return replace(place, kind="different", first=first)
    found = verdict(comparison)
    if found.kind in ("loss", "gain"):
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
    first: FirstPosition,
    model: ResolvedModel,
    reference: ResolvedModel | None,
    kept: Kept,
    target: int,
    asked: ReferenceConfig | None,
) -> FirstPosition:
    """With the node where the places part; why it is not known where it is not."""
    tokens = kept.tokens(target)
    if reference is None:
        return replace(first, finding="the node is told where both places are on one machine (--against)")
    if tokens is None or model.kind != "onnx" or reference.kind != "onnx":
        return replace(first, finding="the node is told of ONNX models and texts alone")
    repro = None if asked is None or asked.repro is None else Path(asked.repro)
    from olive_ext.places.first_difference import first_difference

    try:
        found = first_difference(model.settings, reference.settings, tokens, len(tokens) - 1, repro=repro)
    except OliveExtError as error:
        logger.warning("where in the model the two places part is not told: %s", first_line(error))
        return replace(first, finding=f"the node is not known: {first_line(error)}")
    written = "" if found.repro is None else str(found.repro)
    return replace(first, layer=found.layer, node=found.node, finding=str(found), repro=written)

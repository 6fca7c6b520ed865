"""What a report gets beside its comparison: the stages of the distance to a checkpoint, or the finding on one model in
two places. Knows no statistics.

The stages are the conversion, up to the float ONNX model, and the quantization after it. Each is an evaluation of its
own against the stage before, on the same documents.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from olive_ext.config import AT_HAND, EXPORT, EvaluationConfig, ReferenceConfig
from olive_ext.config.model import ModelConfig
from olive_ext.errors import (
    ANY_FAILURE,
    ConfigError,
    ContradictionError,
    OliveExtError,
    RunError,
    UnsupportedError,
    first_line,
)
from olive_ext.graph.nodes import quantizing_operator
from olive_ext.model import ResolvedModel, resolve
from olive_ext.model.files.content import load_graph
from olive_ext.model.files.package_config import is_same_path
from olive_ext.package_versions import runtimes
from olive_ext.report import Report
from olive_ext.report.comparison import Comparison
from olive_ext.report.diagnosis import FirstPosition, PlaceFinding, Stage, StageName
from olive_ext.report.numbers import nats
from olive_ext.report.verdict import verdict
from olive_ext.run.bounds import requested_tasks
from olive_ext.run.models import Models
from olive_ext.run.reference.comparison_run import TaskRun
from olive_ext.run.reference.observer import Observer

if TYPE_CHECKING:
    from olive_ext.plugins.diagnose.places.judge import Places, Probe


logger = logging.getLogger("olive.olive_ext")

Compare = Callable[[EvaluationConfig], Comparison | None]
"""Evaluates, and gives the comparison alone."""

LOST_NATS = 1e-4
"""A conversion is examined from this mean KL on: rounding in fp32 gives 1e-7."""


def refuse_stages(models: Models) -> None:
    """Raises `ConfigError` or `ModelError` for a float model that is not there, or that no checkpoint was made into."""
    reference = models.config.reference
    if reference is None or reference.float_model is None:
        return
    if reference.is_records or reference.is_same:
        raise ContradictionError("leave out float_model", "reference", reference.path)
    if reference.float_model == AT_HAND:
        raise ContradictionError(
            f"no workflow is running: give its path, or '{EXPORT}'", "reference.float_model", AT_HAND
        )
    where = f"'reference.float_model' = '{reference.float_model}'"
    if models.given_reference.kind != "hf":
        raise ConfigError(
            f"{where} needs a Hugging Face model as the reference, and '{reference.path}' is an ONNX model"
        )
    model = _float_model(models)
    if model.kind != "onnx":
        raise UnsupportedError(f"{where} is no ONNX model")
    if operator := quantizing_operator(load_graph(model.files.decoder)):
        raise ConfigError(f"{where} is quantized ({operator}): give the float model that it was made of")


def with_stages(report: Report, models: Models, compare: Compare) -> Report:
    """The report with the stages between the reference and the model, where the settings name the float model between
    them. A stage that fails is a warning: the report stands without."""
    comparison = report.comparison
    if comparison is None:
        return report
    stages: list[Stage] = []
    try:
        for name, config in _evaluations(models).items():
            alone = compare(config)
            if alone is None or alone.overall_divergence() is None:
                return report
            stages.append(stage_of(name, alone, comparison))
    except OliveExtError as error:
        logger.warning("the stages of the difference are not reported: %s", first_line(error))
        return report
    if not stages:
        return report
    if not stages[0].kl_mean < LOST_NATS:
        stages[0] = replace(stages[0], finding=_finding(models))
    reference = {**comparison.reference, "float_model": models.float_path}
    return replace(report, comparison=replace(comparison, reference=reference, stages=tuple(stages)))


def stage_of(name: StageName, alone: Comparison, whole: Comparison) -> Stage:
    """A stage by its own comparison, which has a divergence; `whole` has the claim about all stages."""
    divergence, outcome = alone.overall_divergence(), alone.overall_outcome()
    assert divergence is not None
    judged, claim = verdict(alone), whole.certainty
    of_claim = [item for item in alone.outcomes if claim and claim.outcome == item.key]
    losses = [item.difference if item.higher_is_better else -item.difference for item in of_claim]
    # Claims on distributions are held against their intervals by the report.
    breaks = claim is not None and claim.side != "below" and any(loss < claim.bound for loss in losses)
    flips = (outcome.right_to_wrong, outcome.wrong_to_right) if outcome is not None and outcome.is_binary else (0, 0)
    return Stage(
        name,
        divergence.kl.mean,
        divergence.kl.stderr,
        divergence.top1_agreement,
        *flips,
        top1_agreement_stderr=divergence.top1_agreement_stderr,
        kl_margin=divergence.kl_interval[1] - divergence.kl.mean,
        is_loss=judged.status in ("loss", "small_loss") or judged.code == "distant" or breaks,
    )


def _evaluations(models: Models) -> dict[StageName, EvaluationConfig]:
    """The evaluation of each stage; empty where there are none, as where the float model is the evaluated one."""
    config, reference = models.config, models.config.reference
    if reference is None or models.given_candidate.kind != "onnx" or reference.float_model is None:
        return {}
    float_model, float_path = _float_model(models), models.float_path
    if is_same_path(str(models.given_candidate.files.decoder), str(float_model.files.decoder)):
        return {}
    shared: dict[str, Any] = {"tasks": requested_tasks(config), "use_cache": config.journal, "output_dir": None}
    shared |= {"require": [], "sample_log_num": 0, "documents": "all", "certain": None}
    config = config.model_copy(update=shared)
    tokenizer = models.given_candidate.files.tokenizer
    origin = reference.model_copy(update={"float_model": None})
    if reference.float_model == EXPORT:  # else the reference would be this export
        origin = origin.model_copy(update={"export": "never"})
    to_float = {"model": ModelConfig(path=float_path), "tokenizer": tokenizer, "reference": origin}
    kept = {"mode": reference.mode, "records_dir": reference.records_dir, "tokenizer": tokenizer}
    return {
        "conversion": config.model_copy(update=to_float),
        "quantization": config.model_copy(update={"reference": ReferenceConfig(path=float_path, **kept)}),
    }


def _finding(models: Models) -> str:
    """The loss of the conversion in a sentence, or why it is not known."""
    from olive_ext.plugins.diagnose.conversion import hold_against

    try:
        return str(hold_against(_float_model(models), models.given_reference).sentence())
    except ANY_FAILURE as error:  # a remark must not cost the report, which is not written yet
        logger.warning("the loss of the conversion is not reported: %s", first_line(error))
        return first_line(error)


def _float_model(models: Models) -> ResolvedModel:
    """The model that `reference.float_model` names, opened as the evaluated model is."""
    path = models.float_path
    assert path is not None
    which: dict[str, Any] = {**ModelConfig(path=path).model_dump(exclude={"path"}), "model": path}
    which["tokenizer"] = models.given_candidate.files.tokenizer
    return resolve(models.given_candidate.settings.model_copy(update=which), key="reference.float_model")


LEAST_EXPLAINED = 0.5
"""The share of the logits' difference that a node must make to be the fault of a pair that noise explains."""

MOST_BEYOND = 2
"""How far noise may reach, in multiples of its largest distance. Of 1,000 pairs of equal noise on the quickstart's
model, 1.8 % were beyond it in float16, and none in float32."""


def finish_report(report: Report, models: Models, task_run: TaskRun, compare: Compare) -> Report:
    """The report with the stages of its difference, or with the finding on two places, where the evaluated model was
    held against itself; what cannot be measured is said in it, since the numbers may have taken hours."""
    report = with_stages(report, models, compare)
    comparison, observer, reference = report.comparison, task_run.observer, task_run.reference
    if comparison is None or observer is None or observer.sample is None or reference is None:
        return report
    from olive_ext.plugins.diagnose.places.judge import Places, located

    rows = [observer.rows(task) for task in observer.tasks]
    file = models.records_file
    other = models.reference if file is None else None
    names = _names(models, other)
    recorded_in = str(file.manifest.get("computed_in", "float32")) if file is not None else "float32"
    places = Places(models.candidate, other, names, int(report.model["max_length"]), recorded_in)
    apart = [np.abs(row["logprobs"].astype(np.float64) - row["reference_logprobs"]) for row in rows]
    fed = int(report.engine.get("tokens_fed", 0))
    place, where = located(places, observer.sample, np.concatenate([np.empty(0), *apart]), fed)
    if where is not None and place.first is not None:
        place = _looked_into(place, place.first, places, *where, models.config.reference)
    place = _with_answers(place, comparison, observer, reference.observer)
    folder = models.config.reference and models.config.reference.repro
    if folder is not None and not (place.first is not None and place.first.repro):
        why = "no node is known that differs" if place.kind == "different" else "no difference is certain"
        logging.getLogger(__name__).warning("'reference.repro' = '%s': nothing is written, because %s", folder, why)
    return replace(report, comparison=replace(comparison, place=place))


def recorded_facts(model: ResolvedModel) -> dict[str, str]:
    """Facts that records of a model keep, so that they can be held against another place."""
    from olive_ext.plugins.diagnose.places.judge import computed_in

    return {"computed_in": computed_in(model)}


def _with_answers(
    place: PlaceFinding, comparison: Comparison, observer: Observer, reference: Observer | None
) -> PlaceFinding:
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
    judged = verdict(comparison)
    if judged.status == "loss" or judged.code == "gain":
        reason = f"scores differ only by rounding, but answers differ by more: {judged.headline}"
        return replace(place, kind="cannot_tell", reason=reason)
    return place


def _names(models: Models, reference: ResolvedModel | None) -> tuple[str, str]:
    """The names of the places: providers and versions, and for the reference its own settings."""
    versions, asked = runtimes(), models.config.reference
    candidate, file = _name(models.candidate, versions), models.records_file
    if reference is None:
        assert file is not None
        providers = [str(one.get("name", one)) for one in file.manifest["providers"]]
        return candidate, f"{', '.join(providers)} ({_version(file.manifest['versions'])}, recorded)"
    engine = {} if asked is None or asked.engine is None else asked.engine.model_dump(exclude_unset=True)
    more = [f"{name} {value}" for name, value in engine.items()]
    path = [] if asked is None or asked.is_same else [asked.path]
    return candidate, ", ".join([_name(reference, versions), *path, *more])


def _name(model: ResolvedModel, versions: dict[str, str]) -> str:
    if model.kind == "hf":
        return f"transformers in {model.settings.dtype}"
    runtime = model.runtime.name
    with_version = _version(versions) if runtime == "onnxruntime" else runtime
    variant = f"variant {model.files.variant} on " if model.files.variant else ""
    return f"{variant}{model.providers[0].name} ({with_version})"


def _version(versions: Any) -> str:
    return next((f"{name} {text}" for name, text in versions.items() if name.startswith("onnxruntime")), "unknown")


def _looked_into(
    place: PlaceFinding, first: FirstPosition, places: Places, kept: Probe, target: int, asked: ReferenceConfig | None
) -> PlaceFinding:
    """The finding with the node where the places part, or why it is not known. What noise explains stays green where
    the nodes hold it; where they cannot be run, as far as noise was seen to go."""
    from olive_ext.plugins.diagnose.places.first_difference import first_difference
    from olive_ext.plugins.diagnose.places.place import HeldError, NotLocatedError

    is_green, seen = place.kind != "different", max((one.largest for one in place.noise), default=0.0)
    # Noise's tail is extrapolated beyond what was seen; rounding of activations to 8 bits goes farther than faults do.
    is_seen = place.computed_in != "8-bit activations" and place.largest <= MOST_BEYOND * seen
    model, reference, tokens = places.model, places.reference, kept.tokens(target)
    repro = None if asked is None or asked.repro is None else Path(asked.repro)
    try:
        if reference is None:
            raise RunError("nodes are run where both places are on one machine (--against)")
        if tokens is None or model.kind != "onnx" or reference.kind != "onnx":
            raise RunError("nodes are run of ONNX models and texts alone")
        distance = first.distance if is_green else None
        settings = model.settings, reference.settings
        fault = first_difference(*settings, tokens, repro=repro, distance=distance)
    except OliveExtError as error:
        why = first_line(error)
        is_held = isinstance(error, HeldError) or (is_seen and not isinstance(error, NotLocatedError))
        held = "no node gives other numbers" if isinstance(error, HeldError) else "the node is not known"
        first = replace(first, finding=f"{held}: {why}")
    else:
        why = f"'{fault.node}' makes {fault.explained:.0%} of it"
        is_held = False
        first = replace(first, layer=fault.layer, node=fault.node, finding=str(fault), repro=str(fault.repro or ""))
        is_green &= fault.explained < LEAST_EXPLAINED
    if not is_green:
        return replace(place, kind="different", first=first, reason="")
    if is_held:
        return replace(place, kind="same" if place.kind == "same" else "kernels", first=first, reason="")
    reason = place.reason or "it is no more than noise may be"
    reason += f"; {nats(first.distance)} nats at {first}, and no run of its nodes explains them: {why}"
    return replace(place, kind="cannot_tell", first=first, reason=reason)

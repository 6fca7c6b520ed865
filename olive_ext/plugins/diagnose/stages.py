"""Splits a model's distance to its checkpoint into stages: the conversion, up to the float ONNX model, the quantization
after it, and the provider that the result runs on. Each is an evaluation of its own against the stage before, on the
same documents. Where the provider is a stage, the other two are measured on the CPU."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from olive_ext.config import AT_HAND, EXPORT, EngineConfig, EvaluationConfig, ReferenceConfig
from olive_ext.config.model import ModelConfig
from olive_ext.errors import (
    ANY_FAILURE,
    ConfigError,
    ContradictionError,
    MissingError,
    OliveExtError,
    UnsupportedError,
    first_line,
)
from olive_ext.graph.nodes import quantizing_operator
from olive_ext.model import ResolvedModel, resolve
from olive_ext.model.files.content import load_graph
from olive_ext.model.files.folders import is_same_path
from olive_ext.model.providers.table import CPU
from olive_ext.report import Report
from olive_ext.report.comparison import Certainty, Comparison
from olive_ext.report.stages import Stage, StageName
from olive_ext.report.verdict import verdict
from olive_ext.run.costs import asked_tasks
from olive_ext.run.models import Models

logger = logging.getLogger("olive.olive_ext")

Compare = Callable[[EvaluationConfig], Comparison | None]
"""Evaluates, and gives the comparison alone."""

LOST_NATS = 1e-4
"""Mean KL of a conversion from which on it is looked into: rounding in fp32 gives 1e-7."""

_ON_CPU: dict[str, Any] = {"execution_provider": CPU, "provider_options": None}


def refuse_stages(models: Models) -> None:
    """Raises `ConfigError` or `ModelError` for a float model that is not there, or that no checkpoint was made into."""
    reference = models.config.reference
    if reference is None:
        return
    if reference.is_records or reference.is_same:
        if reference.float_model or reference.provider_stage:
            raise ContradictionError("leave out float_model and provider_stage", "reference", reference.path)
        return
    is_hf = models.given_reference.kind == "hf"
    if reference.float_model == AT_HAND:
        raise ContradictionError(
            f"no workflow is running: give its path, or '{EXPORT}'", "reference.float_model", AT_HAND
        )
    if reference.float_model is None:
        if reference.provider_stage and is_hf:
            raise MissingError("'reference.float_model' is needed, too", "reference.provider_stage", True)
        return
    where = f"'reference.float_model' = '{reference.float_model}'"
    if not is_hf:
        raise ConfigError(
            f"{where} needs a Hugging Face model as the reference, and '{reference.path}' is an ONNX model"
        )
    model = _float_model(models)
    if model is not None and model.kind != "onnx":
        raise UnsupportedError(f"{where} is no ONNX model")
    if model is not None and (operator := quantizing_operator(load_graph(model.files.decoder))):
        raise ConfigError(f"{where} is quantized ({operator}): give the float model that it was made of")


def with_stages(report: Report, models: Models, compare: Compare) -> Report:
    """The report with the stages between the reference and the model, where the settings name the float model between
    them or ask for the provider's. A stage that fails is a warning: the report stands without."""
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
        logger.warning("the stages of the difference are not told: %s", first_line(error))
        return report
    between = {"float_model": models.float_path} if stages and models.float_path is not None else {}
    if stages and stages[0].name == "conversion" and not stages[0].kl_mean < LOST_NATS:
        stages[0] = replace(stages[0], finding=_finding(models))
    reference = {**comparison.reference, **between}
    return replace(report, comparison=replace(comparison, reference=reference, stages=tuple(stages)))


def stage_of(name: StageName, alone: Comparison, whole: Comparison) -> Stage:
    """A stage by its own comparison, which has a divergence; `whole` has the claim that was made of all stages."""
    divergence, outcome = alone.overall_divergence(), alone.overall_outcome()
    assert divergence is not None
    judged = verdict(alone)
    flips = (outcome.right_to_wrong, outcome.wrong_to_right) if outcome is not None and outcome.is_binary else (0, 0)
    return Stage(
        name,
        divergence.kl.mean,
        divergence.kl.stderr,
        divergence.top1_agreement,
        *flips,
        top1_agreement_stderr=divergence.top1_agreement_stderr,
        kl_margin=divergence.kl_interval[1] - divergence.kl.mean,
        is_loss=judged.status in ("loss", "small_loss") or judged.code == "distant" or _breaks(alone, whole.certainty),
    )


def _breaks(alone: Comparison, claim: Certainty | None) -> bool:
    """Whether the stage alone loses more of the answers than is claimed of all stages; claims on distributions are held
    against their intervals by the report."""
    outcomes = {(item.task, item.metric, item.filter): item for item in alone.outcomes}
    outcome = outcomes.get(claim.outcome) if claim is not None and claim.outcome is not None else None
    if claim is None or outcome is None or claim.side == "below":
        return False
    return (outcome.difference if outcome.higher_is_better else -outcome.difference) < claim.bound


def _evaluations(models: Models) -> dict[StageName, EvaluationConfig]:
    """What to evaluate for each stage; nothing where there are fewer than two."""
    config, reference = models.config, models.config.reference
    if reference is None or models.given.kind != "onnx" or not reference.has_stages:
        return {}
    shared: dict[str, Any] = {"tasks": asked_tasks(config), "use_cache": config.journal, "output_dir": None}
    config = config.model_copy(update={**shared, "sample_log_num": 0, "documents": "all", "certain": None})
    kept = {"mode": reference.mode, "records_dir": reference.records_dir, "tokenizer": models.given.files.tokenizer}
    has_provider = _has_provider_stage(models)
    before = _on_cpu(config, models) if has_provider else config
    origin = reference.model_copy(update={"float_model": None, "provider_stage": None})
    stages: dict[StageName, EvaluationConfig] = {}
    float_model, float_path = _float_model(models), models.float_path
    if float_path is not None:
        if reference.float_model == EXPORT:  # else the reference would be this export
            origin = origin.model_copy(update={"export": "never"})
        to_float = {"model": ModelConfig(path=float_path), "tokenizer": kept["tokenizer"], "reference": origin}
        stages["conversion"] = before.model_copy(update=to_float)
        origin = ReferenceConfig(path=float_path, **kept)
    origin_files = (float_model or models.given_reference).files
    if not is_same_path(str(models.given.files.decoder), str(origin_files.decoder)):
        origin = origin.model_copy(update=_ON_CPU) if has_provider else origin
        stages["quantization"] = before.model_copy(update={"reference": origin})
    if has_provider:
        itself = ReferenceConfig(**config.model.model_dump(), **kept, execution_provider=CPU)
        stages["provider"] = config.model_copy(update={"reference": itself})
    return stages if len(stages) > 1 else {}


def _has_provider_stage(models: Models) -> bool:
    reference = models.config.reference
    if reference is None or models.given.providers[0].name == CPU:
        return False
    return reference.float_model is not None if reference.provider_stage is None else reference.provider_stage


def _on_cpu(config: EvaluationConfig, models: Models) -> EvaluationConfig:
    """The evaluation on the CPU, by an engine without what belongs to another provider."""
    free = {name: value for name, value in config.model_args.items() if name not in (*_ON_CPU, "engine")}
    return config.model_copy(update={**_ON_CPU, "engine": _plain_engine(models), "model_args": free})


def _plain_engine(models: Models) -> EngineConfig:
    engine = models.given.settings.engine
    return EngineConfig(adapters=engine.adapters, num_threads=engine.num_threads)


def _finding(models: Models) -> str:
    """What the conversion lost, or why that is not known."""
    from olive_ext.plugins.diagnose.conversion import hold_against

    try:
        float_model = _float_model(models)
        assert float_model is not None
        return str(hold_against(float_model, models.given_reference).sentence())
    except ANY_FAILURE as error:  # a remark must not cost the report, which is not written yet
        logger.warning("what the conversion lost is not told: %s", first_line(error))
        return first_line(error)


def _float_model(models: Models) -> ResolvedModel | None:
    """Opened as the evaluated model is; on the CPU where the provider is a stage of its own. None where there is
    none."""
    path = models.float_path
    if path is None:
        return None
    which: dict[str, Any] = {**ModelConfig(path=path).model_dump(exclude={"path"}), "model": path}
    which["tokenizer"] = models.given.files.tokenizer
    if _has_provider_stage(models):
        which |= {**_ON_CPU, "engine": _plain_engine(models)}
    return resolve(models.given.settings.model_copy(update=which))

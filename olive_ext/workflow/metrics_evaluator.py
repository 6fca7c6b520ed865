"""The evaluator type `OrtEvaluator`: Olive's own metrics, of generative models on this package's engine, of others by
Olive's own evaluator. Knows no recipe."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from olive.evaluator.metric_result import MetricResult, joint_metric_key
from olive.evaluator.olive_evaluator import OliveEvaluator
from olive.evaluator.registry import Registry
from olive.hardware import Device
from olive.model import ONNXModelHandler

from olive_ext.backends.package_versions import versions
from olive_ext.config import METRICS_TYPE, MetricSettings
from olive_ext.errors import ConfigError, OliveExtError, first_line
from olive_ext.model import ResolvedModel
from olive_ext.model.files.folders import GENAI_CONFIG
from olive_ext.model.files.package_config import read_json
from olive_ext.report import Metric, Report, write
from olive_ext.run.machine import describe_hardware
from olive_ext.run.models import Models
from olive_ext.session import Session
from olive_ext.session.transducer import is_transducer, opened
from olive_ext.workflow.current_run import logger, running
from olive_ext.workflow.evaluator import surfaced
from olive_ext.workflow.generated_answers import answered, documents, is_speech, is_vision, refuse_no_data, scored
from olive_ext.workflow.generation_times import timed
from olive_ext.workflow.handlers import handler_of, hf_config, label, onnx_config, torch_device
from olive_ext.workflow.metric_results import text_of

_TIMED = ("latency", "throughput")
_WITHOUT_SUB_TYPES = ("size_on_disk", "custom")


def is_of_answers(metric: Any) -> bool:
    """Whether a metric is of transcriptions or of answers about pictures. Raises `ConfigError` for a mixture."""
    return is_speech(metric) or is_vision(metric)


def is_of_generations(metric: Any) -> bool:
    """Whether a generative model's metric is measured here: of answers, or of how long they take."""
    return metric.type.value in _TIMED or is_of_answers(metric)


def refuse_metrics(metrics: Sequence[Any], where: str) -> None:
    """Raises `ConfigError` for metrics that cannot be measured; to be called before anything runs."""
    if not metrics:
        raise ConfigError(f"'{where}.metrics' is missing: give Olive's metrics, of wer or exact_match for instance")
    for metric in metrics:
        if not metric.sub_types and metric.type.value not in _WITHOUT_SUB_TYPES:
            raise ConfigError(f"'{where}.metrics.{metric.name}.sub_types' is missing: give wer, for instance")
        if is_of_answers(metric):
            refuse_no_data(metric)


def resolved_model(model: Any, settings: MetricSettings, providers: Any, device: Any) -> ResolvedModel:
    """A model handler as this package runs it: a Hugging Face model as its export, where there is one. Raises
    `OliveExtError`."""
    kind, handler = handler_of(model)
    if kind == "onnx":
        config = onnx_config(handler, settings.as_evaluation(), providers)
    else:
        config = hf_config(handler, settings.as_evaluation())
        config = config.model_copy(update={"device": torch_device(config.device, device)})
    spoken = {"language": settings.language, "speech_task": settings.speech_task}
    return Models(config).own.patched({name: value for name, value in spoken.items() if value is not None})


def with_file_name(model: Any) -> Any:
    """Olive's configuration of a model, with the decoder's file as genai_config.json names it where a folder has
    several graphs: Olive 0.13 refuses it without."""
    path, name = model.config.get("model_path"), model.config.get("onnx_file_name")
    if (
        model.type.lower() != "onnxmodel"
        or name
        or not isinstance(path, str)
        or len(list(Path(path).glob("*.onnx"))) == 1
    ):
        return model
    file = Path(path, GENAI_CONFIG)
    decoder = read_json(file).get("model", {}).get("decoder", {}).get("filename") if file.is_file() else None
    if not isinstance(decoder, str) or not Path(path, decoder).is_file():
        return model
    return model.model_copy(update={"config": {**model.config, "onnx_file_name": decoder}})


class OrtEvaluator(OliveEvaluator):  # type: ignore[misc]
    """Measures Olive's metrics. Its keys are those of `MetricSettings`; Olive makes a new one for each evaluation."""

    def __init__(self, **settings: Any) -> None:
        """Raises `ConfigError` for unknown keys and wrong values."""
        super().__init__()
        self.settings = MetricSettings.parse(copy.deepcopy(settings))

    def evaluate(self, model: Any, metrics: Any = None, device: Any = None, execution_providers: Any = None) -> Any:
        """Olive's `MetricResult` for a model handler: the declared metrics, and without a priority what is told beside
        them. Raises an `OliveExtError` for every failure."""
        declared = list(metrics or ())
        with surfaced("the evaluation stopped"):
            refuse_metrics(declared, METRICS_TYPE)
            resolved = self._generative(model, declared, execution_providers, device)
            own = [metric for metric in declared if resolved is not None and is_of_generations(metric)]
            others = [metric for metric in declared if metric not in own]
            path = str(model.get_resource("model_path"))
            found = self._measured(resolved, path, own) if resolved is not None and own else {}
            if others:
                olives = Registry.get(str(model.framework))()
                found |= olives.evaluate(model, others, device or Device.CPU, execution_providers).root
            logger.info("metrics measured here: %s; by Olive's own evaluator: %s", *map(_listed, (own, others)))
            return MetricResult.model_validate(found)

    def _generative(self, model: Any, metrics: Sequence[Any], providers: Any, device: Any) -> ResolvedModel | None:
        """The model as this package runs it; None where no metric is of generations, or where Olive's own evaluator is
        to run it: what is no generative model, and has metrics of its own form. Raises `OliveExtError` for others."""
        answers = [metric for metric in metrics if is_of_answers(metric)]
        if not any(map(is_of_generations, metrics)) or not (answers or isinstance(model, ONNXModelHandler)):
            return None
        try:
            resolved = resolved_model(model, self.settings, providers, device)
            _ = resolved.kind == "onnx" and not is_transducer(resolved) and resolved.spec
        except OliveExtError as error:
            if not all(map(_decodes_itself, answers)):
                raise
            logger.info("the model's metrics are measured by Olive's own evaluator: %s", first_line(error))
            return None
        return resolved

    def _measured(self, model: ResolvedModel, path: str, metrics: Sequence[Any]) -> dict[str, Any]:
        """Olive's entries of metrics of generations, by their keys; a report of them where the settings name a
        folder."""
        found: dict[str, Any] = {}
        told: list[Metric] = []
        with opened(model) as session:
            for metric in metrics:
                if is_of_answers(metric):
                    answers = answered(documents(metric, session, self.settings), session)
                    result, beside = scored(metric, answers, self.settings.bootstrap_iters)
                    count: int | None = len(answers.texts)
                else:
                    (result, beside), count = timed(metric, session, self.settings), None
                for name, entry in ((text_of(name), entry) for name, entry in result.root.items()):
                    found[joint_metric_key(metric.name, name)] = entry
                    stderr = beside.get(f"{name}_stderr")
                    told.append(Metric(metric.name, name, "none", entry.value, stderr, entry.higher_is_better, count))
                for name, value in beside.items():
                    is_better = name.endswith("_per_second")
                    entry = {"value": value, "priority": -1, "higher_is_better": is_better}
                    found[joint_metric_key(metric.name, name)] = entry
                    if not name.endswith("_stderr"):
                        told.append(Metric(metric.name, name, "none", value, None, is_better, count))
            self._report(model, path, session, told)
        return found

    def _report(self, model: ResolvedModel, path: str, session: Session, metrics: Sequence[Metric]) -> None:
        """Writes what was found, where the settings name a folder, and tells the run in progress of it."""
        if self.settings.output_dir is None:
            return
        folder = str(Path(self.settings.output_dir) / label(path))
        execution = session.describe_execution()
        providers = execution.pop("providers", ())
        counters = execution.pop("counters", {})
        report = Report(
            metrics=tuple(metrics),
            model={"path": path, "kind": model.kind, **execution},
            providers=tuple({"name": item} if isinstance(item, str) else item for item in providers),
            versions=versions(),
            hardware=describe_hardware(),
            engine=counters,
            config={**self.settings.model_dump(mode="json", exclude_unset=True), "output_dir": folder},
            created=datetime.now().astimezone().isoformat(timespec="seconds"),
        )
        write(report, folder)
        if (run := running.get()) is not None:
            run.reports.append(report)


def _listed(metrics: Sequence[Any]) -> str:
    return ", ".join(metric.name for metric in metrics) or "none"


def _decodes_itself(metric: Any) -> bool:
    """Whether the metric's data brings code, which Olive's own evaluator has make texts of a model's outputs."""
    return metric.data_config is not None and metric.data_config.user_script is not None

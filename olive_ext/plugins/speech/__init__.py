"""Olive's own metrics of generative models (`OrtEvaluator`: speech, pictures, times), and streaming transducers, which
transcribe sound and do no tasks."""

from olive_ext.registry import Evaluator, Plugin

_ROOM = "olive_ext.plugins.speech"

plugin = Plugin(
    evaluators={
        "OrtEvaluator": Evaluator(
            module=f"{_ROOM}.metrics_evaluator",
            settings=f"{_ROOM}.settings:MetricSettings",
            description="of Olive's own metrics",
            mistakes=f"{_ROOM}.settings:metric_mistakes",
            describe=f"{_ROOM}.settings:described",
        )
    },
    hooks={
        "settle_recipe": f"{_ROOM}.settings:with_named_metrics",
        "refuse_package": f"{_ROOM}.transducer:refuse_transducer",
        "package_without_scores": f"{_ROOM}.transducer:transducer_in",
    },
)

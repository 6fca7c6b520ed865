"""What a user may write: frozen pydantic models, the source of the JSON schemas and of the configuration docs.

Every room may import them from here; `ModelSettings` is the one declaration of how a model is opened. Knows no file, no
model and no framework.
"""

from olive_ext.config.base import Strict, accepts
from olive_ext.config.certain import Bound, Certain
from olive_ext.config.evaluation import EvaluationConfig, EvaluationSettings, WorkflowSettings
from olive_ext.config.execution import EngineConfig, ExecutionSettings
from olive_ext.config.model import ModelConfig, ModelSettings, OpenSettings
from olive_ext.config.olive_metrics import METRICS_TYPE, MetricSettings, with_named_metrics
from olive_ext.config.schema import (
    EVALUATOR_TYPE,
    PASS_TYPE,
    SCHEMA_KINDS,
    pass_settings,
    schema,
    settings_of_pass,
)
from olive_ext.config.work import (
    AT_HAND,
    EXPORT,
    INPUT_MODEL,
    RECORDS_SUFFIX,
    SAME_MODEL,
    PassSettings,
    ReferenceConfig,
)

__all__ = [
    "AT_HAND",
    "EVALUATOR_TYPE",
    "EXPORT",
    "INPUT_MODEL",
    "METRICS_TYPE",
    "PASS_TYPE",
    "RECORDS_SUFFIX",
    "SAME_MODEL",
    "SCHEMA_KINDS",
    "Bound",
    "Certain",
    "EngineConfig",
    "EvaluationConfig",
    "EvaluationSettings",
    "ExecutionSettings",
    "MetricSettings",
    "ModelConfig",
    "ModelSettings",
    "OpenSettings",
    "PassSettings",
    "ReferenceConfig",
    "Strict",
    "WorkflowSettings",
    "accepts",
    "pass_settings",
    "schema",
    "settings_of_pass",
    "with_named_metrics",
]

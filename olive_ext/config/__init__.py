"""What a user may write: frozen pydantic models, the source of the JSON schemas and of the configuration docs.

Every room may import them from here; `ModelSettings` is the one declaration of how a model is opened. Knows no file, no
model and no framework.
"""

from olive_ext.config.base import Strict, accepts
from olive_ext.config.certain import Certain
from olive_ext.config.evaluation import (
    INPUT_MODEL,
    Bound,
    EvaluationConfig,
    EvaluationSettings,
    ReferenceConfig,
    WorkflowSettings,
)
from olive_ext.config.model import EngineConfig, ExecutionSettings, ModelConfig, ModelSettings, OpenSettings
from olive_ext.config.schema import EVALUATOR_TYPE, PASS_TYPE, SCHEMA_KINDS, schema

__all__ = [
    "EVALUATOR_TYPE",
    "INPUT_MODEL",
    "PASS_TYPE",
    "SCHEMA_KINDS",
    "Bound",
    "Certain",
    "EngineConfig",
    "EvaluationConfig",
    "EvaluationSettings",
    "ExecutionSettings",
    "ModelConfig",
    "ModelSettings",
    "OpenSettings",
    "ReferenceConfig",
    "Strict",
    "WorkflowSettings",
    "accepts",
    "schema",
]

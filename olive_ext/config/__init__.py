"""What a user may write: frozen pydantic models, the source of the JSON schemas and of the configuration docs."""

from olive_ext.config.accepts import accepts
from olive_ext.config.base import Strict
from olive_ext.config.engine import EngineConfig
from olive_ext.config.evaluation import EvaluationConfig, EvaluationSettings, ModelConfig
from olive_ext.config.reference import INPUT_MODEL, ReferenceConfig
from olive_ext.config.require import Bound, WorkflowSettings
from olive_ext.config.schema import EVALUATOR_TYPE, PASS_TYPE, SCHEMA_KINDS, SchemaKind, schema

__all__ = [
    "EVALUATOR_TYPE",
    "INPUT_MODEL",
    "PASS_TYPE",
    "SCHEMA_KINDS",
    "Bound",
    "EngineConfig",
    "EvaluationConfig",
    "EvaluationSettings",
    "ModelConfig",
    "ReferenceConfig",
    "SchemaKind",
    "Strict",
    "WorkflowSettings",
    "accepts",
    "schema",
]

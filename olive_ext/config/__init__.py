"""What a user may write: frozen pydantic models, the source of the JSON schemas and of the configuration docs.

Every room may import them from here; `ModelSettings` is the one declaration of how a model is opened. Knows no file, no
model and no framework.
"""

from olive_ext.config.base import StrictModel, accepts
from olive_ext.config.evaluation import (
    Bound,
    ClaimConfig,
    EvaluationConfig,
    EvaluationSettings,
    EvaluatorSettings,
    LossBound,
)
from olive_ext.config.model import EngineConfig, ExecutionSettings, ModelConfig, ModelSettings, OpenSettings
from olive_ext.config.schema import (
    EVALUATOR_TYPE,
    PASS_TYPE,
    RECIPE_SUFFIXES,
    SCHEMA_KINDS,
    evaluator_settings,
    pass_settings,
    schema,
    settings_of_pass,
    settled_recipe,
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
    "PASS_TYPE",
    "RECIPE_SUFFIXES",
    "RECORDS_SUFFIX",
    "SAME_MODEL",
    "SCHEMA_KINDS",
    "Bound",
    "ClaimConfig",
    "EngineConfig",
    "EvaluationConfig",
    "EvaluationSettings",
    "EvaluatorSettings",
    "ExecutionSettings",
    "LossBound",
    "ModelConfig",
    "ModelSettings",
    "OpenSettings",
    "PassSettings",
    "ReferenceConfig",
    "StrictModel",
    "accepts",
    "evaluator_settings",
    "pass_settings",
    "schema",
    "settings_of_pass",
    "settled_recipe",
]

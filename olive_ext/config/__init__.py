"""What a user may write: frozen pydantic models, the source of the JSON schemas and of the configuration docs."""

from olive_ext.config.base import Strict
from olive_ext.config.engine import EngineConfig
from olive_ext.config.evaluation import EvaluationConfig, EvaluationSettings, ModelConfig

__all__ = ["EngineConfig", "EvaluationConfig", "EvaluationSettings", "ModelConfig", "Strict"]

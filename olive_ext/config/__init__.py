"""What a user may write: frozen pydantic models, the source of the JSON schemas and of the configuration docs. Every
room may import them from here; `ModelSettings` alone declares how a model is opened. Knows no file, model or
framework."""

from olive_ext.config.base import StrictModel as StrictModel
from olive_ext.config.base import accepts as accepts
from olive_ext.config.evaluation import Bound as Bound
from olive_ext.config.evaluation import ClaimConfig as ClaimConfig
from olive_ext.config.evaluation import EvaluationConfig as EvaluationConfig
from olive_ext.config.evaluation import EvaluationSettings as EvaluationSettings
from olive_ext.config.evaluation import EvaluatorSettings as EvaluatorSettings
from olive_ext.config.evaluation import LossBound as LossBound
from olive_ext.config.model import EngineConfig as EngineConfig
from olive_ext.config.model import ExecutionSettings as ExecutionSettings
from olive_ext.config.model import ModelConfig as ModelConfig
from olive_ext.config.model import ModelSettings as ModelSettings
from olive_ext.config.model import OpenSettings as OpenSettings
from olive_ext.config.schema import EVALUATOR_TYPE as EVALUATOR_TYPE
from olive_ext.config.schema import PASS_TYPE as PASS_TYPE
from olive_ext.config.schema import RECIPE_SUFFIXES as RECIPE_SUFFIXES
from olive_ext.config.schema import SCHEMA_KINDS as SCHEMA_KINDS
from olive_ext.config.schema import evaluator_settings as evaluator_settings
from olive_ext.config.schema import pass_settings as pass_settings
from olive_ext.config.schema import schema as schema
from olive_ext.config.schema import settings_of_pass as settings_of_pass
from olive_ext.config.schema import settled_recipe as settled_recipe
from olive_ext.config.work import AT_HAND as AT_HAND
from olive_ext.config.work import EXPORT as EXPORT
from olive_ext.config.work import INPUT_MODEL as INPUT_MODEL
from olive_ext.config.work import RECORDS_SUFFIX as RECORDS_SUFFIX
from olive_ext.config.work import SAME_MODEL as SAME_MODEL
from olive_ext.config.work import PassSettings as PassSettings
from olive_ext.config.work import ReferenceConfig as ReferenceConfig

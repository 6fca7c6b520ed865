"""Makes Olive know this package's evaluator and pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from olive.engine import Engine
from olive.engine.footprint import FootprintNode
from olive.evaluator.registry import Registry
from olive.package_config import OlivePackageConfig
from olive.passes import PassModuleConfig

from olive_ext.config import EVALUATOR_TYPE
from olive_ext.workflow.evaluator import OrtLMEvaluator
from olive_ext.workflow.olive_engine import mend
from olive_ext.workflow.passes import OrtLMEvaluation
from olive_ext.workflow.preflight import is_our_pass
from olive_ext.workflow.search import update
from olive_ext.workflow.wrapping import wrap_once


def register() -> None:
    """Registers both types and mends Olive's engine for them; may be called again."""
    if Registry.get(EVALUATOR_TYPE) is not OrtLMEvaluator:
        Registry.register(EVALUATOR_TYPE)(OrtLMEvaluator)
    # A table of passes that a recipe brings along (--package-config) replaces Olive's own: one that we had added an
    # entry to would be gone. Every way to a pass leads through this method.
    wrap_once(OlivePackageConfig, "get_pass_module_config", _with_our_pass)
    mend(Engine)
    if "model_config_data" in FootprintNode.model_fields:
        wrap_once(FootprintNode, "update", update)


def pass_module_config() -> Any:
    """How Olive finds the pass. It runs on the target, so that Olive checks the target's execution providers."""
    return PassModuleConfig(
        module_path=f"{OrtLMEvaluation.__module__}.{OrtLMEvaluation.__name__}",
        supported_providers=["*"],
        supported_accelerators=["*"],
        supported_precisions=["*"],
        supported_algorithms=["*"],
        supported_quantization_encodings=["*"],
        run_on_target=True,
    )


def _with_our_pass(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_pass_module_config(self: Any, pass_type: str) -> Any:
        try:
            return original(self, pass_type)
        except ValueError:
            if is_our_pass(pass_type):
                return pass_module_config()
            raise

    return get_pass_module_config

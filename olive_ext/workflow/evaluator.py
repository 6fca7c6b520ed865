"""The evaluator type `OrtLMEvaluator`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar

from olive.evaluator.olive_evaluator import OliveEvaluator

from olive_ext.config import EVALUATOR_TYPE, WorkflowSettings
from olive_ext.report import Report
from olive_ext.workflow.measure import measure
from olive_ext.workflow.metric_results import check_declared, to_metric_result, with_asked


class OrtLMEvaluator(OliveEvaluator):  # type: ignore[misc]
    """Scores a model with lm-eval tasks. Its keys are those of `WorkflowSettings`.

    Olive makes a new one for each evaluation, from the same keys.
    """

    measure: ClassVar[Callable[..., Report]] = staticmethod(measure)
    """How a handler becomes a report; a subclass may have another way."""

    def __init__(self, **settings: Any) -> None:
        """Raises `ConfigError` for unknown keys and wrong values."""
        super().__init__()
        # Olive hands the recipe's own lists and mappings over, and lm-eval writes into inline task definitions.
        self.settings = WorkflowSettings.parse(copy.deepcopy(settings))

    def evaluate(self, model: Any, metrics: Any = None, device: Any = None, execution_providers: Any = None) -> Any:
        """Olive's `MetricResult` for a model handler.

        `metrics` are those that the recipe declares, `execution_providers` a name, a list of names or None. Raises an
        `OliveExtError` for every failure.
        """
        declared = list(metrics or ())
        check_declared(declared, EVALUATOR_TYPE)
        report = type(self).measure(
            model,
            with_asked(self.settings, declared),
            device=device,
            execution_providers=execution_providers,
        )
        return to_metric_result(report, declared)

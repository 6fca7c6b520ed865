"""Olive's door. Importing this package makes Olive know the evaluator `OrtLMEvaluator` and the pass `OrtLMEvaluation`.

Nothing else of Olive is imported anywhere in `olive_ext`; importing Olive takes seconds.
"""

from olive_ext.workflow.evaluator import OrtLMEvaluator
from olive_ext.workflow.passes import OrtLMEvaluation
from olive_ext.workflow.registration import register
from olive_ext.workflow.run_command import cli_run

__all__ = ["OrtLMEvaluation", "OrtLMEvaluator", "cli_run", "register"]

register()

"""The connection to Olive: importing this package registers the evaluator `OrtLMEvaluator`, the pass `OrtLMEvaluation`,
and those of plug-ins.

Everything that imports Olive is here: these types, hooks in Olive's engine, the conversion of its model handlers, and
`olive-ext run`. Only the names below may be imported from it; importing Olive takes seconds. Knows no graph and no
kernel: evaluations go through `run.evaluate`.
"""

from olive_ext.workflow.evaluator import OrtLMEvaluator
from olive_ext.workflow.olive_run import cli_run
from olive_ext.workflow.passes import OrtLMEvaluation
from olive_ext.workflow.registration import register

__all__ = ["OrtLMEvaluation", "OrtLMEvaluator", "cli_run", "register"]

register()

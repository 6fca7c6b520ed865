"""`OrtLM`, the model class that lm-eval drives: one client of the public session. Import `OrtLM` from here.

Knows arguments, requests and answers of lm-eval; no task, no engine and no file of a model.
"""

from olive_ext.backends.lm_eval.ort_lm import OrtLM

__all__ = ["OrtLM"]

"""`OrtLM`, the model class that lm-eval drives: one client of the public session."""

from olive_ext.backends.lm_eval.ort_lm import OrtLM

__all__ = ["OrtLM"]

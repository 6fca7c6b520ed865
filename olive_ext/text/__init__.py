"""Strings to token requests and back: tokenizer, chat templates, stop strings, windows, truncation.

The session converts every request here; its requests, its outputs and `Tokenizer` may be imported from this package by
any floor above. Of the engine it imports data types only; knows no engine run, no model file and no lm-eval.
"""

from olive_ext.text.requests import (
    GenerationOutput,
    GenerationRequest,
    RollingOutput,
    RollingRequest,
    ScoringOutput,
    ScoringRequest,
)
from olive_ext.text.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "GenerationOutput",
    "GenerationRequest",
    "RollingOutput",
    "RollingRequest",
    "ScoringOutput",
    "ScoringRequest",
    "Tokenizer",
    "load_tokenizer",
]

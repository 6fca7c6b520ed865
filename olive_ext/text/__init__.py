"""Strings to requests and back: tokenizer, chat templates, stop strings, windows, truncation. Knows no engine run."""

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

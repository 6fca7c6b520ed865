"""Tiny models with random weights, exported by real exporters, kept in a folder between test runs.

What is kept depends on nothing but this package, the exporters' releases and what is in the test environment, so it can
be deleted at any time.
"""

from __future__ import annotations

from tests.exports.cache import cache_folder
from tests.exports.genai import genai_export
from tests.exports.hf import hf_model
from tests.exports.text import CONTEXT, TEXT, VOCAB, tokenizer

__all__ = ["CONTEXT", "TEXT", "VOCAB", "cache_folder", "genai_export", "hf_model", "tokenizer"]

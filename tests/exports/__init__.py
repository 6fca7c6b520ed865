"""Tiny models with random weights, exported by real exporters, kept in a folder between test runs.

What is kept depends on nothing but this package, the exporters' releases and what is in the test environment, so it can
be deleted at any time. `export(name)` gives one of `ALL`; `hf_model` and `genai_export` what a test wants itself.
"""

from __future__ import annotations

from tests.exports.cache import cache_folder
from tests.exports.catalog import ALL, Export, export
from tests.exports.genai import genai_export
from tests.exports.hf import MEDIA, hf_model
from tests.exports.text import CONTEXT, TEXT, VOCAB, tokenizer

__all__ = [
    "ALL",
    "CONTEXT",
    "MEDIA",
    "TEXT",
    "VOCAB",
    "Export",
    "cache_folder",
    "export",
    "genai_export",
    "hf_model",
    "tokenizer",
]

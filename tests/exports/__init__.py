"""Tiny models with random weights, exported by real exporters, kept in a folder between test runs.

What is kept depends on nothing but this package, the exporters' releases and what is in the test environment, so it can
be deleted at any time. `export(name)` gives one of `ALL`; `hf_model` and `genai_export` what a test wants itself.
"""

from __future__ import annotations

from tests.exports.cache import cache_folder as cache_folder
from tests.exports.catalog import ALL as ALL
from tests.exports.catalog import Export as Export
from tests.exports.catalog import export as export
from tests.exports.genai import genai_export as genai_export
from tests.exports.hf import MEDIA as MEDIA
from tests.exports.hf import hf_model as hf_model
from tests.exports.text import CONTEXT as CONTEXT
from tests.exports.text import TEXT as TEXT
from tests.exports.text import VOCAB as VOCAB
from tests.exports.text import tokenizer as tokenizer

"""Windowed caches at full length: the numbers of Hugging Face on texts shorter and longer than the window.

Gemma 3 (two layers of three look back 16 tokens), Gemma 4's layers of two shapes, gpt-oss with attention sinks; each
exported with caches that drop what is behind the window.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

import olive_ext
from olive_ext.model.files.content import load_graph
from olive_ext.model.spec.decoder_spec import read_spec
from olive_ext.session import Session
from tests.agreement.reference import Reference
from tests.exports import export
from tests.families.agreement import Plain, expected_scores, generated, largest_difference, prompts, scoring_requests

pytestmark = pytest.mark.slow

REQUESTS = scoring_requests()


@cache
def _expected(hf: Path) -> tuple[list[list[float]], list[list[int]]]:
    reference = Reference(hf)
    return expected_scores(reference, REQUESTS), [reference.generate(prompt, 24) for prompt in prompts()]


def _open(path: Path, **engine: object) -> Session:
    return olive_ext.open(path, engine=engine)


@pytest.mark.parametrize("graph", ["scoring_head", "untouched"])
@pytest.mark.parametrize(("num_slots", "chunk_size"), [(1, 1), (3, 7), (8, 256)])
@pytest.mark.parametrize("name", ["gemma3_text-genai-0.18", "gpt_oss-genai-0.18"])
def test_windowed_export_agrees_with_its_source(name: str, num_slots: int, chunk_size: int, graph: str) -> None:
    package = export(name)
    scores, answers = _expected(package.hf)
    with _open(package.path, num_slots=num_slots, chunk_size=chunk_size, graph=graph) as session:
        assert largest_difference(session, REQUESTS, scores) < 1e-4
        assert generated(session) == answers
        facts = session.describe_execution()
        assert facts["kv_cache"] == "in_place"
        assert any("sliding_window_cache" in note for note in facts["notes"])
        assert session.counters.tokens_reused > 0


@pytest.mark.exporters
def test_layers_of_two_shapes_agree_with_the_file_run_plainly() -> None:
    package = export("gemma4_unified-genai-0.18")
    reference = Plain(package)
    scores = expected_scores(reference, REQUESTS)
    for num_slots, chunk_size in ((1, 1), (3, 7), (8, 256)):
        with _open(package.path, num_slots=num_slots, chunk_size=chunk_size) as session:
            assert largest_difference(session, REQUESTS, scores) < 1e-4
            assert generated(session) == [reference.generate(prompt, 24) for prompt in prompts()]


def test_slots_that_are_chosen_count_windowed_layers_at_full_length() -> None:
    package = export("gemma3_text-genai-0.18")
    config = json.loads((package.path / "genai_config.json").read_text())
    spec = read_spec(load_graph(package.path / "model.onnx"), config)
    assert {tensor.window for tensor in spec.kv} == {16, None}
    assert spec.bytes_per_position == sum(tensor.heads * tensor.head_size * 4 for tensor in spec.kv)

"""Caches and weights that are not fp32: bound as raw memory, scored in fp32, compared with the same file run plainly.

Bounds, in nats: 1e-4 where every value is computed from the same numbers (quantized caches, 4-bit weights with fp32
activations). 2e-2 for fp16, whose 11 bits the edited graph and the steps round at other places; measured 4e-3.
MatMulNBits of accuracy_level 4 rounds activations to 8 bits and is exact for rows of several tokens; a step of one
takes another kernel, tree batches add up attention in another order, and a flipped rounding has been measured to
change a score by 6e-2.
"""

from __future__ import annotations

from functools import cache

import pytest

import olive_ext
from olive_ext.errors import ModelError
from tests.exports import export
from tests.families.agreement import Plain, expected_scores, generated, largest_difference, prompts, scoring_requests

REQUESTS = scoring_requests(25, longest_stem=100)
SHAPES = [(1, 1, "rows"), (3, 7, "rows"), (3, 7, "tree"), (8, 256, "rows"), (8, 256, "tree")]


@cache
def _plain_scores(name: str) -> list[list[float]]:
    return expected_scores(Plain(export(name)), REQUESTS)


@cache
def _plain_answers(name: str) -> list[list[int]]:
    reference = Plain(export(name))
    return [reference.generate(prompt, 24) for prompt in prompts()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "bound", "kv_cache"),
    [
        ("llama-genai-0.18-kv8", 1e-4, "in_place"),
        ("llama-genai-0.18-kv4", 1e-4, "in_place"),
        ("llama-genai-0.18-fp16-cuda", 2e-2, "in_place"),
        ("llama-genai-0.18-fp16-cpu", 2e-2, "returned"),
        ("llama-genai-0.18-int4", 1e-1, "in_place"),
    ],
)
@pytest.mark.parametrize("graph", ["scoring_head", "untouched"])
def test_scores_and_answers_equal_the_files_own(name: str, bound: float, kv_cache: str, graph: str) -> None:
    package = export(name)
    scores = _plain_scores(name)
    for num_slots, chunk_size, scoring in SHAPES:
        engine = {"num_slots": num_slots, "chunk_size": chunk_size, "graph": graph, "scoring": scoring}
        with olive_ext.open(package.path, execution_provider="cpu", engine=engine) as session:
            is_exact = bound == 1e-1 and chunk_size > 1 and session.describe_execution()["scoring"] == "rows"
            assert largest_difference(session, REQUESTS, scores) < (1e-4 if is_exact else bound)
            assert session.describe_execution()["kv_cache"] == kv_cache
            if bound < 1e-3:
                assert generated(session) == _plain_answers(name)


@pytest.mark.slow
def test_graph_that_takes_one_token_behind_a_past_gets_one_and_says_so() -> None:
    with olive_ext.open(export("llama-genai-0.18-fp16-cpu").path, engine={"chunk_size": 64}) as session:
        facts = session.describe_execution()
    assert facts["chunk_size"] == 1
    assert any("steps are cut to 1 token" in note for note in facts["notes"])


@pytest.mark.exporters
@pytest.mark.parametrize(
    ("name", "kernel"),
    [("qwen3-genai-0.18-bf16-cuda", "MatMul"), ("qwen3-genai-0.18-kvfp8-cuda", "GroupQueryAttention")],
)
def test_type_without_a_kernel_is_refused_by_one_line(name: str, kernel: str) -> None:
    with pytest.raises(ModelError, match=kernel) as refusal:
        olive_ext.open(export(name).path, execution_provider="cpu")
    assert "\n" not in str(refusal.value)

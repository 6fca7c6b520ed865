"""Scores of decoders whose last layer runs on the scored rows only equal those of the untouched graph, and of plain
forward passes."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest

import olive_ext
from olive_ext.graph.scoring_head import add_scoring_head
from olive_ext.model.files.content import load_graph
from olive_ext.session import Session
from olive_ext.session.requests import GenerationRequest
from tests.exports import VOCAB, Export, export
from tests.families.agreement import Plain, expected_scores, largest_difference, prompts, scoring_requests

pytestmark = pytest.mark.slow

PRODUCTS = {
    "llama-genai-0.18": 4,
    "qwen3-genai-0.14": 4,
    "gemma3_text-genai-0.18": 4,
    "phi3-genai-0.18": 4,
    "llama-mobius": 4,
    "gemma4_text-mobius": 6,  # two of them around per-layer embeddings
    "gpt2-mobius": 3,
    "qwen3_5_text-mobius": 4,
    "llama-optimum": 4,
    "llama-genai-0.18-hidden": 0,  # its last hidden states are an output
    "llama-genai-0.18-int4": 0,  # its activations are rounded
}
PLAIN_ATOL = {"qwen3_5_text-mobius": 3e-4}
"""From a plain forward pass, where it is not 2e-5: steps of other lengths round otherwise, whatever the head does."""


def _scores(session: Session) -> np.ndarray:
    return np.array([score for found in session.loglikelihood(scoring_requests()) for score in found.token_logprobs])


OWN_ENVIRONMENT = ("gemma4_text-mobius", "llama-optimum")
"""Nothing else of the default run is exported as these are: their exporters take seconds to install."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in OWN_ENVIRONMENT)) for name in PRODUCTS]
)
def test_scores_equal_those_of_the_untouched_graph(name: str) -> None:
    package = export(name)
    with olive_ext.open(package.path) as moved, olive_ext.open(package.path, engine={"graph": "untouched"}) as whole:
        assert len(moved.describe_execution()["scored_row_products"]) == PRODUCTS[name]
        assert whole.describe_execution()["scored_row_products"] == []
        np.testing.assert_allclose(_scores(moved), _scores(whole), atol=2e-6)
        requests = [GenerationRequest(prompt, max_new_tokens=8) for prompt in prompts()]
        tokens = [[list(output.tokens) for output in session.generate(requests)] for session in (moved, whole)]
        assert tokens[0] == tokens[1]
        requests = scoring_requests()[::4]
        expected = expected_scores(Plain(package), requests)
        assert largest_difference(moved, requests, expected) < PLAIN_ATOL.get(name, 2e-5)


@pytest.mark.parametrize("rows", [[5], [3, 5], list(range(12))], ids=len)
def test_logits_in_half_precision_equal_those_of_the_whole_layer(rows: list[int]) -> None:
    """On the graph itself: the untouched one rounds its logits to half precision, the scoring head does not."""
    package = export("llama-mobius-fp16")
    whole, moved = (_logits(package, rows, keeps) for keeps in ("kept for comparison", ""))
    assert whole.std() > 0.1
    np.testing.assert_allclose(moved, whole, atol=2e-6)


def _logits(package: Export, rows: list[int], keeps_layers: str) -> np.ndarray:
    """float32[R, V] behind 12 tokens."""
    path = package.path / "model.onnx"
    scoring = add_scoring_head(load_graph(path), "logits", keeps_layers=keeps_layers)
    assert bool(scoring.late_products) != bool(keeps_layers)
    options = ort.SessionOptions()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    session = ort.InferenceSession(scoring.model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    tokens = np.random.default_rng(1).integers(4, VOCAB, (1, 12))
    none = np.zeros(0, np.int64)
    feeds = {"input_ids": tokens, "attention_mask": np.ones_like(tokens), "position_ids": np.arange(12)[None]}
    feeds |= {"score_rows": np.array(rows), "target_rows": none, "target_ids": none}
    feeds["sample_rows"] = np.arange(len(rows))
    for value in session.get_inputs():
        if value.name.startswith("past"):
            feeds[value.name] = np.zeros((1, value.shape[1], 0, value.shape[3]), np.float16)
    return session.run(["sample_logits"], {value.name: feeds[value.name] for value in session.get_inputs()})[0]


def test_reason_says_where_rows_are_picked_or_why_not() -> None:
    with olive_ext.open(export("llama-genai-0.18").path) as session:
        reason = session.describe_execution()["scoring_head_reason"]
        assert "after the last GroupQueryAttention: besides the head's MatMul, 4 products" in reason
    with olive_ext.open(export("llama-genai-0.18-int4").path) as session:
        assert "rounding of activations" in session.describe_execution()["scoring_head_reason"]

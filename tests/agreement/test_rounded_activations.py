"""int4 and int8 weights whose activations are rounded to 8 bits (MatMulNBits of accuracy_level 4): scores are those of
a plain pass over the whole text, whatever shares its steps and wherever these begin. Another last bit would grow to
tenths of a nat."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

import olive_ext
from olive_ext.text.requests import ScoringRequest
from tests.exports import quickstart

pytestmark = pytest.mark.slow

VOCAB = 1024
ATOL = 1e-5
FORMS: dict[str, dict[str, Any]] = {
    "int4, blocks of 32": {"bits": 4, "block_size": 32},
    "int4, blocks of 128": {"bits": 4, "block_size": 128},
    "int4, blocks of 64, zero points": {"bits": 4, "block_size": 64, "symmetric": False},
    "int8, blocks of 32": {"bits": 8, "block_size": 32},
    "int8, blocks of 128": {"bits": 8, "block_size": 128},
}


@cache
def package(form: str) -> Path:
    return quickstart.quantized(**FORMS[form], accuracy_level=4)


class Plain:
    """The graph in whole forward passes, whose rows come in pairs: a token is added to an odd number."""

    def __init__(self, folder: Path) -> None:
        self._session = ort.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
        self._pasts = [item for item in self._session.get_inputs() if item.name.startswith("past")]

    def run(self, tokens: list[int], past: list[np.ndarray] | None = None) -> tuple[np.ndarray, list[np.ndarray]]:
        """Log-probabilities [S, V] in float64, and the caches."""
        num_past = past[0].shape[2] if past else 0
        feed = {"input_ids": np.array([tokens]), "attention_mask": np.ones((1, num_past + len(tokens)), np.int64)}
        for place, item in enumerate(self._pasts):
            empty = np.zeros((1, item.shape[1], 0, item.shape[3]), np.float32)
            feed[item.name] = past[place] if past else empty
        logits, *caches = self._session.run(None, feed)
        logits_SV = logits[0].astype(np.float64)
        largest_S1 = logits_SV.max(-1, keepdims=True)
        return logits_SV - largest_S1 - np.log(np.exp(logits_SV - largest_S1).sum(-1, keepdims=True)), caches

    def score(self, request: ScoringRequest) -> list[float]:
        tokens = [*request.context, *request.target][:-1]
        logprobs_SV, _ = self.run([*tokens, *[5] * (len(tokens) % 2)])
        rows = range(len(request.context) - 1, len(tokens))
        return [float(logprobs_SV[row, token]) for row, token in zip(rows, request.target, strict=True)]


def requests() -> list[ScoringRequest]:
    """Stems of odd and even lengths, with ends that leave one token, two, three or many behind what is shared."""
    rng = random.Random(7)

    def draw(count: int) -> list[int]:
        return [rng.randrange(4, VOCAB) for _ in range(count)]

    found = []
    for length in (1, 2, 16, 17, 40, 63):
        stem = draw(length)
        found += [ScoringRequest(stem + draw(behind), draw(ahead)) for behind in (0, 1, 2, 3) for ahead in (1, 2, 5)]
        found += [ScoringRequest(stem[: length // 2 + 1], draw(1)), ScoringRequest(stem, stem[:3] + draw(9))]
    return found


def differences(session: Any, asked: list[ScoringRequest], expected: list[list[float]]) -> float:
    outputs = session.loglikelihood(asked)
    pairs = [
        pair
        for output, row in zip(outputs, expected, strict=True)
        for pair in zip(output.token_logprobs, row, strict=True)
    ]
    return max(abs(one - other) for one, other in pairs)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("engine", [{}, {"num_slots": 1, "chunk_size": 7}], ids=["as it comes", "one slot, odd chunks"])
def test_scores_are_those_of_a_plain_pass(form: str, engine: dict[str, Any]) -> None:
    asked, plain = requests(), Plain(package(form))
    expected = [plain.score(request) for request in asked]
    with olive_ext.open(package(form), engine=engine) as session:
        assert session.describe_execution()["scoring"] == "rows"
        assert differences(session, asked, expected) < ATOL
        assert differences(session, asked[::-3], expected[::-3]) < ATOL  # behind what is resident


def test_rows_alone_are_computed_otherwise() -> None:
    """What the promise costs nothing for: without whole groups of rows it would not hold."""
    rng, apart = random.Random(3), {}
    tokens = [rng.randrange(4, VOCAB) for _ in range(48)]
    for form in FORMS:
        plain = Plain(package(form))
        whole, _ = plain.run(tokens)
        for cut in (24, 17, 47):
            first, past = plain.run(tokens[:cut])
            last, _ = plain.run(tokens[cut:], past)
            apart[form, cut] = float(np.abs(np.concatenate([first, last]) - whole).max())
    assert all(apart[form, 24] == 0 for form in FORMS)  # pairs of rows: the same bits
    assert all(apart[form, 47] > 0 for form in FORMS)  # one token has another attention kernel
    assert {form for form in FORMS if apart[form, 17] > 0} == {form for form in FORMS if "32" not in form}
    assert max(apart.values()) > 100 * ATOL

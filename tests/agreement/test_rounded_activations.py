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
from olive_ext.engine.runners.trials import GROUPS
from olive_ext.session.requests import ScoringRequest
from tests.emulated import IS_EMULATED
from tests.exports import quickstart

pytestmark = [pytest.mark.slow, pytest.mark.rounded]

VOCAB = 1024
ATOL = 5e-5
"""The scoring head takes few rows, whose last bits are its own: up to 1e-5 with AVX2, 2.5e-5 without."""

LENGTHS = (17,) if IS_EMULATED else (1, 2, 16, 17, 40, 63)
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
    """The graph in whole forward passes, filled up to whole groups of rows, however many these are."""

    def __init__(self, folder: Path) -> None:
        self._session = ort.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
        self._pasts = [item for item in self._session.get_inputs() if item.name.startswith("past")]

    def run(self, tokens: list[int]) -> np.ndarray:
        """Log-probabilities [S, V] in float64."""
        feed = {"input_ids": np.array([tokens]), "attention_mask": np.ones((1, len(tokens)), np.int64)}
        feed |= {item.name: np.zeros((1, item.shape[1], 0, item.shape[3]), np.float32) for item in self._pasts}
        logits_SV = self._session.run(["logits"], feed)[0][0].astype(np.float64)
        largest_S1 = logits_SV.max(-1, keepdims=True)
        return logits_SV - largest_S1 - np.log(np.exp(logits_SV - largest_S1).sum(-1, keepdims=True))

    def score(self, request: ScoringRequest) -> list[float]:
        tokens = [*request.context, *request.target][:-1]
        logprobs_SV = self.run([*tokens, *[5] * (-len(tokens) % GROUPS[-1])])
        rows = range(len(request.context) - 1, len(tokens))
        return [float(logprobs_SV[row, token]) for row, token in zip(rows, request.target, strict=True)]


def requests() -> list[ScoringRequest]:
    """Stems of odd and even lengths, with ends that leave one token, two, three or many behind what is shared."""
    rng = random.Random(7)

    def draw(count: int) -> list[int]:
        return [rng.randrange(4, VOCAB) for _ in range(count)]

    found = []
    for length in LENGTHS:
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


@cache
def expected_of(form: str) -> list[list[float]]:
    plain = Plain(package(form))
    return [plain.score(request) for request in requests()]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("engine", [{}, {"num_slots": 1, "chunk_size": 7}], ids=["as it comes", "one slot, odd chunks"])
def test_scores_are_those_of_a_plain_pass(form: str, engine: dict[str, Any]) -> None:
    asked, expected = requests(), expected_of(form)
    with olive_ext.open(package(form), engine=engine) as session:
        facts = session.describe_execution()
        assert facts["scoring"] == "rows"
        assert facts["row_group"] in GROUPS  # not fed whole: each processor that has been tried has one
        assert differences(session, asked, expected) < ATOL
        assert differences(session, asked[::-3], expected[::-3]) < ATOL  # behind what is resident

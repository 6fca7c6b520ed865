"""Families whose attention is not all alike are opened for packed steps: windows, norms, heads of two sizes, layers
that share a cache, positions as an input, and tokens that a graph of its own embeds."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import olive_ext
from tests.cuda_stub.counts import counts
from tests.cuda_stub.test_cuda import CHUNK, SLOTS, STEPS, TEXT, _texts
from tests.exports import genai_export, hf_model
from tests.exports.mobius import mobius_export

pytestmark = [pytest.mark.cuda_stub, pytest.mark.slow]


def _embedded(folder: Path) -> Path:
    """Gemma 4's package of a decoder, whose layers share caches, and a graph that embeds tokens for each layer."""
    package = folder / "package"
    shutil.copytree(mobius_export("gemma4_vl", "f16", 0, "cuda"), package)
    shutil.copy(hf_model("gemma4_vl") / "config.json", package)
    return package


FAMILIES: dict[str, Callable[[Path], Path]] = {
    "gemma3_text": lambda _: genai_export("gemma3_text", "0.18.0", "fp16", "cuda"),
    "gemma4_unified": lambda _: genai_export("gemma4_unified", "0.18.0", "fp16", "cuda"),
    "gemma4_text": lambda _: mobius_export("gemma4_text", "f16", 0, "cuda"),
    "gemma4_vl": _embedded,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_family_is_scored_in_full_steps_and_nothing_large_crosses(family: str, tmp_path: Path) -> None:
    engine = {"num_slots": SLOTS, "chunk_size": CHUNK}
    pairs = [(text[:60], text[60:]) for text in _texts(6, TEXT)]
    with olive_ext.open(FAMILIES[family](tmp_path), execution_provider="cuda", engine=engine) as session:
        session.loglikelihood(pairs)
        session.gc()
        counts()
        before = session.describe_execution()["counters"]["steps"]
        session.loglikelihood(pairs)
        facts, found = session.describe_execution(), counts()
    num_steps = facts["counters"]["steps"] - before
    assert facts["scoring"] == "packed", facts["notes"]
    assert num_steps == STEPS["packed"](len(pairs))
    assert found.wrong_copies == 0
    assert found.bytes_to_host <= 20 * len(pairs) * (4 + 8)
    assert found.bytes_to_device <= 1_500 * num_steps  # positions are one more number a token


def test_positions_on_three_axes_keep_single_rows_and_say_so() -> None:
    path = genai_export("qwen2_5_vl", "0.18.0", "fp16", "cuda")
    with olive_ext.open(path, execution_provider="cuda", engine={"num_slots": SLOTS}) as session:
        facts = session.describe_execution()
    assert facts["scoring"] == "rows"
    assert any("positions are on three axes" in note for note in facts["notes"])

"""Families whose attention is not all alike are opened for packed steps: windows, norms, heads of two sizes, layers
that share a cache, positions as an input, and tokens that a graph of its own embeds."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import olive_ext
from tests.agreement.table import opened
from tests.agreement.test_table import ROWS
from tests.cuda_stub.test_cuda import CHUNK, SLOTS, STEPS, TEXT, _pairs, scored
from tests.exports import genai_export, hf_model
from tests.exports.mobius import mobius_export

pytestmark = pytest.mark.cuda_stub


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
    with olive_ext.open(FAMILIES[family](tmp_path), execution_provider="cuda", engine=engine) as session:
        facts, num_steps, found = scored(session, _pairs(6, 60, TEXT))
    assert facts["scoring"] == "packed", facts["notes"]
    assert num_steps == STEPS["packed"](6)
    assert found.bytes_to_host <= 20 * 6 * (4 + 8)
    assert found.bytes_to_device <= 1_500 * num_steps  # positions are one more number a token


def test_packages_of_the_table_of_agreement_run_there(pytestconfig: pytest.Config) -> None:
    """Six, drawn by the day: nothing of theirs falls to the CPU. The stub cannot run experts."""
    rows = [row for given in ROWS for row in given.values if row.provider == "cuda" and "gpt_oss" not in row.package]
    packages = sorted({row.package for row in rows})
    for name in random.Random(pytestconfig.option.hypothesis_seed).sample(packages, 6):
        row = next(row for row in rows if row.package == name)
        with opened(row, row.engine, "cuda") as session:
            assert session.describe_execution()["providers"][0] == "CUDAExecutionProvider", name


def test_positions_on_three_axes_keep_single_rows_and_say_so() -> None:
    path = genai_export("qwen2_5_vl", "0.18.0", "fp16", "cuda")
    with olive_ext.open(path, execution_provider="cuda", engine={"num_slots": SLOTS}) as session:
        facts = session.describe_execution()
    assert facts["scoring"] == "rows"
    assert facts["scoring_reason"].startswith("by rule")
    assert any("positions are on three axes" in note for note in facts["notes"])

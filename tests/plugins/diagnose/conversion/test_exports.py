"""Real exports of many families against their checkpoints: what exporters left out is told, of good ones nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from olive_ext.config import ModelSettings
from olive_ext.model import resolve
from olive_ext.plugins.diagnose.conversion import Agreement, hold_against
from tests.exports import export, genai_export, hf_model
from tests.exports.differing import WINDOW
from tests.exports.mobius import mobius_export
from tests.exports.optimum import optimum_export

EXCHANGED = "windowed and full layers are exchanged"
MISSING = f"a sliding window of {WINDOW} is missing"
PARTIAL = "'partial_rotary_factor' = 0.5 is missing"

Case = tuple[str, Callable[[str], Path], int, str, str, str]
DIFFERING: list[Case] = [
    ("gemma2", genai_export, WINDOW + 1, EXCHANGED, "layer 0", "self_attn"),
    ("gemma2", mobius_export, WINDOW + 1, EXCHANGED, "layer 0", "self_attn"),
    ("gemma2", optimum_export, 0, "'attn_logit_softcapping' = 50.0 is missing", "layer 0", "self_attn"),
    ("olmo3", mobius_export, WINDOW + 1, MISSING, "layer 0", "self_attn"),
    (
        "cohere",
        mobius_export,
        0,
        "rotary positions turn halves of a head instead of neighbours",
        "layer 0",
        "self_attn",
    ),
    ("cohere2", mobius_export, 0, "", "layer 0", "self_attn"),
    ("exaone4", mobius_export, 0, f"{MISSING} and full layers are computed as windowed ones", "layer 0", "self_attn"),
    ("deepseek_v3", optimum_export, 4, "", "layer 1", "mlp"),
    ("falcon_alibi", optimum_export, 258, "", "layer 0", "self_attention"),
    ("olmo_clipped", genai_export, 0, "", "layer 0", "input_layernorm"),
    ("llama_yarn", genai_export, 0, "'rope_type' = yarn is missing", "layer 0", "self_attn"),
    ("llama_yarn_factor", mobius_export, 0, "'attention_factor' = 1.5 is missing", "layer 0", "self_attn"),
    ("nemotron", genai_export, 0, PARTIAL, "layer 0", "self_attn"),
    ("phi", genai_export, 0, PARTIAL, "layer 0", "self_attn"),
]
"""Family, exporter, tokens that are equal, what was left out, layer and part."""

GOOD = (
    "gpt_oss-genai-0.18",  # experts, sinks, windows, YaRN
    "gemma3_text-genai-0.18",  # windows, tied embeddings
    "qwen3-genai-0.18",
    "gpt2-mobius",
    "llama-mobius-fp16",
    "phi3_longrope-mobius",
    "qwen3_5_text-mobius",  # linear attention
    "llama-optimum",
)


def held(path: Path, hf: Path) -> Agreement:
    model = ModelSettings(model=str(path), device="cpu")
    return hold_against(resolve(model), resolve(ModelSettings(model=str(hf), device="cpu")))


@pytest.mark.exporters
@pytest.mark.parametrize("case", DIFFERING, ids=lambda case: f"{case[0]}-{case[1].__name__}")
def test_what_an_exporter_lost_is_told(case: Case) -> None:
    family, make, equal_up_to, omission, place, part = case
    found = held(make(family), hf_model(family))
    assert found.equal_up_to == equal_up_to
    assert (found.omission.text if found.omission is not None else "") == omission
    assert (found.state_difference.place, found.state_difference.part) == (place, part)


@pytest.mark.exporters
@pytest.mark.parametrize("name", GOOD)
def test_good_export_is_equal(name: str) -> None:
    package = export(name)
    found = held(package.path, package.hf)
    assert found.is_equal, found.sentence()


@pytest.mark.exporters
def test_graph_of_one_token_a_run_names_no_layer() -> None:
    package = export("jamba-mobius")
    found = held(package.path, package.hf)
    assert found.equal_up_to == 0
    assert found.state_difference is None
    assert "whole text" in found.states_note

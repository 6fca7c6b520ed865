"""What an export computes otherwise than its original is told by the graph and config.json, and only then."""

from __future__ import annotations

import re
from typing import Any

import pytest
from onnx import ModelProto, TensorProto, helper

from olive_ext.model.spec.attention import tensor_spec
from olive_ext.model.spec.media_spec import known_faults
from olive_ext.model.types import ItemMasks


def graph(*outputs: str, producer: str = "mobius") -> ModelProto:
    made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", 64]) for name in outputs]
    return helper.make_model(helper.make_graph([], "encoder", [], made), producer_name=producer)


@pytest.mark.parametrize(
    ("part", "encoder", "config", "told"),
    [
        (
            "vision",
            graph("image_features"),
            {"vision_config": {"deepstack_visual_indexes": [5, 11]}},
            r"layers \[5, 11\]",
        ),
        ("vision", graph("image", "deep"), {"vision_config": {"deepstack_visual_indexes": [5, 11]}}, None),
        ("vision", graph("image_features"), {"vision_config": {"deepstack_visual_indexes": []}}, None),
        (
            "audio",
            graph("audio_features"),
            {"audio_config": {"num_attention_heads": 4}},
            "num_attention_heads 4.* in 8",
        ),
        ("audio", graph("audio_features"), {"audio_config": {"num_attention_heads": 8}}, None),
        ("audio", graph("audio_features", producer="pytorch"), {"audio_config": {"num_attention_heads": 4}}, None),
        (
            "vision",
            graph("image_features"),
            {"text_config": {"use_bidirectional_attention": "vision"}},
            "see each other",
        ),
    ],
)
def test_fault_is_told_where_graph_and_configuration_show_it(
    part: str, encoder: ModelProto, config: dict[str, Any], told: str | None
) -> None:
    taken = [tensor_spec(value) for value in encoder.graph.output]
    found = known_faults({part: (encoder, taken)}, ({}, {"model_type": "gemma4", **config}))
    assert len(found) == (told is not None)
    for sentence in found:
        assert re.search(str(told), sentence)


@pytest.mark.parametrize(
    ("masks", "told"),
    [
        (ItemMasks(), "this decoder takes no token types"),
        (
            ItemMasks((0, 1, 2), (0, 2)),
            "1 layers of full attention and in 2 sliding .* window of 16, too",
        ),
        (ItemMasks((0, 2), (2,)), "do so in 1 sliding layers beyond the window of 16, too"),
        (ItemMasks((0, 2)), None),
    ],
)
def test_masks_of_gemma_4_are_held_against_transformers(masks: ItemMasks, told: str | None) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    text = {"use_bidirectional_attention": "vision", "layer_types": kinds, "sliding_window": 16}
    found = known_faults({}, ({}, {"model_type": "gemma4", "text_config": text}), masks)
    assert len(found) == (told is not None)
    for sentence in found:
        assert re.search(str(told), sentence)

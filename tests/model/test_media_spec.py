"""Which tokens of an item see each other, by the masks' own nodes, and what an export computes otherwise than its
original."""

from __future__ import annotations

import re
from typing import Any

import pytest
from onnx import ModelProto, TensorProto, helper, parser

from olive_ext.model.spec.attention import tensor_spec
from olive_ext.model.spec.media_spec import known_faults, read_item_masks
from olive_ext.model.types import ItemMasks

WINDOW = 3
GRAPH = """
<ir_version: 10, opset_import: ["": 24]>
decoder (int64[B, S] input_ids, float[B, S, 8] x, float[B, 1, P, 8] past)
=> (float[B, S, 8] full, float[B, S, 8] near) {{
    placeholder = Constant <value_int = 9> ()
    window = Constant <value_int = {window}> ()
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    first = Constant <value_ints = [1]> ()
    last = Constant <value_ints = [2]> ()
    number = Shape <start = 1, end = 2> (input_ids)
    length = Squeeze (number)
    places = Range (zero, length, one)
    row = Unsqueeze (places, zero)
    column = Unsqueeze (places, one)
    distance = Sub (column, row)
    before = GreaterOrEqual (distance, zero)
    within = Less (distance, window)
    is_item = Equal (input_ids, placeholder)
    asks = Unsqueeze (is_item, last)
    answers = Unsqueeze (is_item, first)
    is_one = And (asks, answers)
    joined = Or (before, is_one)
    recent = And (before, within)
    {masks}
    full = Attention <q_num_heads = 1, kv_num_heads = 1> (x, x, x, full_mask)
    near = Attention <q_num_heads = 1, kv_num_heads = 1> (x, x, x, near_mask)
}}
"""


def masked_graph(masks: str) -> ModelProto:
    return parser.parse_model(GRAPH.format(window=WINDOW, masks=masks))


OLDER = "full_mask = Identity (joined) near_mask = Or (recent, is_one)"
ADDED = """
    nothing = Constant <value_float = 0.0> () hidden = Constant <value_float = -65504.0> ()
    full_mask = Where (joined, nothing, hidden) near_mask = Where (recent, nothing, hidden)
"""


@pytest.mark.parametrize(
    ("masks", "num_tokens", "joined", "beyond_window"),
    [
        ("full_mask = Identity (before) near_mask = And (joined, within)", WINDOW + 2, (1,), ()),
        (OLDER, WINDOW + 2, (0, 1), (1,)),
        ("full_mask = Identity (joined) near_mask = Identity (recent)", WINDOW + 2, (0,), ()),
        ("full_mask = Identity (before) near_mask = Identity (recent)", WINDOW + 2, (), ()),
        (ADDED, WINDOW + 2, (0,), ()),
        (OLDER, 1 << 40, (0, 1), (1,)),
    ],
    ids=["5.23", "5.10", "neither", "none", "numbers that are added", "a window of any length"],
)
def test_layers_in_which_an_items_tokens_see_each_other(
    masks: str, num_tokens: int, joined: tuple[int, ...], beyond_window: tuple[int, ...]
) -> None:
    """Masks of Gemma 4 in two versions of transformers, and others."""
    found = read_item_masks(masked_graph(masks), "input_ids", ["past"], {9}, num_tokens)
    assert found == ItemMasks(joined, beyond_window)


def test_a_mask_that_explodes_or_may_never_end_is_not_run() -> None:
    """An Expand to 8 GB, and a Loop."""
    huge = """
        many = Constant <value_ints = [1000000000]> () wide = Expand (number, many)
        most = ReduceMax <keepdims = 0> (wide) near = Less (distance, most)
        full_mask = And (joined, near) near_mask = Identity (full_mask)
    """
    with pytest.raises(ValueError, match="Expand of"):
        read_item_masks(masked_graph(huge), "input_ids", ["past"], {9}, WINDOW + 2)
    graph = masked_graph(OLDER)
    body = helper.make_graph(
        [helper.make_node("Identity", ["on"], ["still"])],
        "body",
        [helper.make_tensor_value_info(name, kind, []) for name, kind in (("i", 7), ("on", 9))],
        [helper.make_tensor_value_info("still", 9, [])],
    )
    loop = next(node for node in graph.graph.node if node.output[0] == "joined")
    loop.CopyFrom(helper.make_node("If", ["before"], ["joined"], then_branch=body))
    loop.attribute[0].g.node.append(helper.make_node("Loop", ["", "on"], [], body=body))
    assert read_item_masks(graph, "input_ids", ["past"], {9}, WINDOW + 2) == ItemMasks((1,), (1,)), (
        "the other one is read"
    )


def graph(*outputs: str, producer: str = "mobius") -> ModelProto:
    made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", 64]) for name in outputs]
    return helper.make_model(helper.make_graph([], "encoder", [], made), producer_name=producer)


@pytest.mark.parametrize(
    ("part", "encoder", "config", "told"),
    [
        ("vision", graph("image"), {"deepstack_visual_indexes": [5, 11]}, r"layers \[5, 11\]"),
        ("vision", graph("image", "deep"), {"deepstack_visual_indexes": [5, 11]}, None),
        ("vision", graph("image"), {"deepstack_visual_indexes": []}, None),
        ("audio", graph("audio"), {"num_attention_heads": 4}, "num_attention_heads 4.* in 8"),
        ("audio", graph("audio"), {"num_attention_heads": 8}, None),
        ("audio", graph("audio", producer="pytorch"), {"num_attention_heads": 4}, None),
        ("text", graph("image"), {"use_bidirectional_attention": "vision"}, "see each other"),
    ],
)
def test_fault_is_told_where_graph_and_configuration_show_it(
    part: str, encoder: ModelProto, config: dict[str, Any], told: str | None
) -> None:
    taken = [tensor_spec(value) for value in encoder.graph.output]
    found = [*known_faults({part: (encoder, taken)}, ({}, {"model_type": "gemma4", f"{part}_config": config}))]
    assert len(found) == (told is not None)
    for sentence in found:
        assert re.search(str(told), sentence)


@pytest.mark.parametrize(
    ("masks", "told"),
    [
        (ItemMasks(), "this decoder takes no token types"),
        (ItemMasks((0, 1, 2), (0, 2)), "1 layers of full attention and in 2 sliding .* window of 16, too"),
        (ItemMasks((0, 2), (2,)), "do so in 1 sliding layers beyond the window of 16, too"),
        (ItemMasks((0, 2)), None),
    ],
)
def test_masks_of_gemma_4_are_held_against_transformers(masks: ItemMasks, told: str | None) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    text = {"use_bidirectional_attention": "vision", "layer_types": kinds, "sliding_window": 16}
    found = [*known_faults({}, ({}, {"model_type": "gemma4", "text_config": text}), masks)]
    assert len(found) == (told is not None)
    for sentence in found:
        assert re.search(str(told), sentence)

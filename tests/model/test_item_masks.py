"""What a decoder's masks let an item's tokens see is found by running the masks' own nodes."""

from __future__ import annotations

import pytest
from onnx import ModelProto, parser

from olive_ext.model.spec.media_spec import read_item_masks
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


def graph(masks: str) -> ModelProto:
    return parser.parse_model(GRAPH.format(window=WINDOW, masks=masks))


@pytest.mark.parametrize(
    ("masks", "joined", "beyond_window"),
    [
        ("full_mask = Identity (before) near_mask = And (joined, within)", (1,), ()),
        ("full_mask = Identity (joined) near_mask = Or (recent, is_one)", (0, 1), (1,)),
        ("full_mask = Identity (joined) near_mask = Identity (recent)", (0,), ()),
        ("full_mask = Identity (before) near_mask = Identity (recent)", (), ()),
    ],
)
def test_layers_in_which_an_items_tokens_see_each_other(
    masks: str, joined: tuple[int, ...], beyond_window: tuple[int, ...]
) -> None:
    """transformers 5.23's masks of Gemma 4, 5.10's, those of neither, and none."""
    found = read_item_masks(graph(masks), "input_ids", ["past"], {9}, WINDOW + 2)
    assert found == ItemMasks(joined, beyond_window)


def test_mask_of_numbers_that_are_added_to_scores_is_read() -> None:
    added = """
        nothing = Constant <value_float = 0.0> () hidden = Constant <value_float = -65504.0> ()
        full_mask = Where (joined, nothing, hidden) near_mask = Where (recent, nothing, hidden)
    """
    assert read_item_masks(graph(added), "input_ids", ["past"], {9}, WINDOW + 2).joined == (0,)


def test_window_of_any_length_takes_a_mask_of_some_length() -> None:
    masks = "full_mask = Identity (joined) near_mask = Or (recent, is_one)"
    assert read_item_masks(graph(masks), "input_ids", ["past"], {9}, 1 << 40) == ItemMasks((0, 1), (1,))

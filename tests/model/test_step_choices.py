"""What of a step decides a decoder's numbers is read from the nodes between its lengths and its layers."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from olive_ext.model.spec.step_choices import read_step_choices, table_offset
from olive_ext.model.types import InputSpec, KvTensor, LengthChoice, Role, StepChoices, TensorSpec

IDS = InputSpec(Role.INPUT_IDS, TensorSpec("input_ids", 7, ("B", "S")))
MASK = InputSpec(Role.ATTENTION_MASK, TensorSpec("attention_mask", 7, ("B", "T")))
POSITIONS = InputSpec(Role.POSITION_IDS, TensorSpec("position_ids", 7, ("B", "S")))

Nodes = list[onnx.NodeProto]


def _node(operator: str, inputs: str, output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(operator, inputs.split(), [output], output, **attributes)


def _read(
    nodes: Nodes,
    entries: tuple[InputSpec, ...] = (IDS, MASK, POSITIONS),
    caches: tuple[KvTensor, ...] = (),
    **constants: Any,
) -> StepChoices:
    """Of a graph that multiplies embeddings [B, S, 4] with the value `scale` that `nodes` compute."""
    table = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)
    given = {"table": table, "long": LONG, "short": SHORT, "zero": 0, "one": 1, "axis": [2], **constants}
    layers = [_node("Gather", "table input_ids", "embedded"), _node("Mul", "embedded scale", "logits")]
    inputs = [helper.make_tensor_value_info(one.tensor.name, 7, one.tensor.shape) for one in entries]
    inputs += [helper.make_tensor_value_info(one.past, 1, ["B", one.heads, "P", one.head_size]) for one in caches]
    output = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["B", "S", 4])
    weights = [numpy_helper.from_array(np.array(value), name) for name, value in given.items()]
    own = helper.make_tensor_value_info("own", TensorProto.FLOAT, ["B", "S", 4])
    graph = helper.make_graph([*nodes, *layers], "decoder", inputs, [output], weights, value_info=[own])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
    return read_step_choices(model, entries, caches, 512)


LARGEST = [_node("ReduceMax", "position_ids", "largest", keepdims=0)]
WIDTH = [_node("Shape", "attention_mask", "shape", start=1, end=2), _node("Squeeze", "shape", "width")]
SHORT, LONG = np.float32(1.0), np.float32(1.7)
GREATER = [*LARGEST, _node("Greater", "largest last", "is_long")]


def _where(*condition: onnx.NodeProto) -> Nodes:
    return [*condition, _node("Where", "is_long long short", "scale")]


CHOICES: dict[str, tuple[Nodes, dict[str, Any], tuple[int, bool]]] = {
    "greater": (_where(*GREATER), {"last": 59}, (60, True)),
    "not less": (_where(*LARGEST, _node("GreaterOrEqual", "largest last", "is_long")), {"last": 60}, (60, True)),
    "wider": (_where(*WIDTH, _node("Greater", "width last", "is_long")), {"last": 60}, (60, True)),
    "narrower": (_where(*WIDTH, _node("Less", "width last", "is_long")), {"last": 61}, (60, False)),
    "turned": (_where(*WIDTH, _node("LessOrEqual", "last width", "is_long")), {"last": 60}, (59, True)),
    "few tokens": (_where(*GREATER), {"last": 2}, (3, True)),
    "a product": (
        _where(*LARGEST, _node("Mul", "tens six", "last"), _node("GreaterOrEqual", "largest last", "is_long")),
        {"tens": 10, "six": 6},
        (60, True),
    ),
    "a fraction": (
        _where(*LARGEST, _node("Cast", "largest", "wide", to=1), _node("Greater", "wide last", "is_long")),
        {"last": np.float32(376.5)},
        (377, True),
    ),
    "one of several": (
        _where(*LARGEST, _node("Greater", "largest last", "both"), _node("Gather", "both zero", "is_long")),
        {"last": [376, 376]},
        (377, True),
    ),
    "beside whether it is a prompt, which changes once, too": (
        [
            *GREATER,
            _node("Greater", "largest zero", "is_prompt"),
            _node("Where", "is_prompt long long", "same"),
            _node("Where", "is_long same short", "scale"),
        ],
        {"last": 59},
        (60, True),
    ),
    "an index into two tables, as mobius writes it": (
        [
            *GREATER,
            _node("Cast", "is_long", "is_second", to=TensorProto.INT64),
            _node("Mul", "is_second rows", "shift"),
            _node("Add", "position_ids shift", "places"),
            _node("Gather", "tables places", "picked"),
            _node("Unsqueeze", "picked axis", "scale"),
        ],
        {"last": 59, "rows": 60, "tables": np.arange(600, dtype=np.float32)},
        (60, True),
    ),
}


@pytest.mark.parametrize(("nodes", "constants", "choice"), CHOICES.values(), ids=CHOICES)
def test_a_choice_by_length_is_found_with_its_last_length(
    nodes: Nodes, constants: dict[str, Any], choice: tuple[int, bool]
) -> None:
    found = _read(nodes, **constants)
    assert found.by_length == (LengthChoice("is_long", 0, *choice),)
    assert (found.lengths, found.leak) == ((choice[0],), "")
    if (last := constants.get("last")) in (59, 60, 61):
        assert last in found.numbers


DEPENDS = "'scale', which 'logits' (Mul) reads, depends on the step"
MOD = [*LARGEST, _node("Mod", "largest two", "rest"), _node("Cast", "rest", "is_long", to=9)]
LEAKS: dict[str, tuple[Nodes, dict[str, Any], str]] = {
    "each length has its own": ([*LARGEST, _node("Cast", "largest", "scale", to=TensorProto.FLOAT)], {}, DEPENDS),
    "a table of lengths": (
        [*LARGEST, _node("Gather", "tables largest", "scale")],
        {"tables": np.where(np.arange(512) < 377, SHORT, LONG)},
        DEPENDS,
    ),
    "a logarithm after a length": (
        [
            *LARGEST,
            _node("Cast", "largest", "wide", to=1),
            _node("Max", "wide last", "most"),
            _node("Log", "most", "scale"),
        ],
        {"last": np.float32(300.5)},
        DEPENDS,
    ),
    "odd and even": (_where(*MOD), {"two": 2}, DEPENDS),
    "more than once": (
        _where(*WIDTH, _node("Mod", "width last", "rest"), _node("Greater", "rest half", "is_long")),
        {"last": 60, "half": 30},
        DEPENDS,
    ),
    "the first position of the step": (
        _where(_node("ReduceMin", "position_ids", "first", keepdims=0), _node("Greater", "first last", "is_long")),
        {"last": 59},
        DEPENDS,
    ),
    "rows": ([_node("Shape", "input_ids", "rows", start=0, end=1), _node("Cast", "rows", "scale", to=1)], {}, DEPENDS),
    "tokens that are fed": (
        _where(_node("Size", "input_ids", "fed"), _node("Greater", "fed last", "is_long")),
        {"last": 20},
        DEPENDS,
    ),
    **{
        f"one number of all, axes {axes}": (
            [
                _node("Gather", "table input_ids", "own"),
                _node("ReduceMax", "own axes" if axes else "own", "scale", keepdims=0),
            ],
            {"axes": axes} if axes else {},
            "'scale' (ReduceMax) makes one number of all tokens of a step",
        )
        for axes in (None, [0, 1])
    },
    "one number of all, axes of a node": (
        [
            _node("Constant", "", "axes", value_ints=[0, 1]),
            _node("Gather", "table input_ids", "own"),
            _node("ReduceMax", "own axes", "scale", keepdims=0),
        ],
        {},
        "'scale' (ReduceMax) makes one number of all tokens of a step",
    ),
    "a position": ([_node("Cast", "position_ids", "wide", to=1), _node("Unsqueeze", "wide axis", "scale")], {}, ""),
    "a threshold of each token's own": (
        [
            _node("Greater", "position_ids last", "far"),
            _node("Cast", "far", "wide", to=1),
            _node("Unsqueeze", "wide axis", "scale"),
        ],
        {"last": 60},
        "",
    ),
    "a size of the weights": (
        [
            _node("Shape", "table", "sizes"),
            _node("Gather", "sizes zero", "size"),
            _node("Cast", "size", "scale", to=1),
        ],
        {},
        "",
    ),
}


@pytest.mark.parametrize(("nodes", "constants", "leak"), LEAKS.values(), ids=LEAKS)
def test_what_else_a_step_decides_is_named(nodes: Nodes, constants: dict[str, Any], leak: str) -> None:
    found = _read(nodes, **constants)
    assert found.by_length == ()
    assert leak in found.leak
    assert bool(leak) == bool(found.leak)


def _endless() -> Nodes:
    given = [("i", 7), ("goes_on", 9), ("sum", 7)]
    inputs = [helper.make_tensor_value_info(name, kind, []) for name, kind in given]
    outputs = [helper.make_tensor_value_info("still", 9, []), helper.make_tensor_value_info("more", 7, [])]
    body = [_node("Identity", "goes_on", "still"), _node("Add", "sum one", "more")]
    loop = helper.make_node(
        "Loop", ["", "always", "width"], ["last_sum"], body=helper.make_graph(body, "b", inputs, outputs)
    )
    return [*WIDTH, loop, _node("Cast", "last_sum", "scale", to=1)]


def _chain() -> Nodes:
    steps = [_node("Add", f"sum_{at} one", f"sum_{at + 1}") for at in range(20_000)]
    return [*LARGEST, _node("Identity", "largest", "sum_0"), *steps, _node("Cast", "sum_20000", "scale", to=1)]


def _wide() -> Nodes:
    return [*WIDTH, _node("Expand", "width many", "sums"), _node("ReduceMax", "sums", "most", keepdims=0)]


@pytest.mark.parametrize(
    ("nodes", "constants", "reason"),
    [
        (_endless(), {"always": True}, ""),
        (_chain(), {}, "20003 nodes"),
        ([*_wide(), _node("Cast", "most", "scale", to=1)], {"many": [10**9]}, ""),
    ],
    ids=["a loop without an end", "many nodes", "a tensor of 8 GB"],
)
def test_hostile_nodes_cost_neither_seconds_nor_memory(nodes: Nodes, constants: dict[str, Any], reason: str) -> None:
    """Each would take minutes, or gigabytes."""
    begun = time.process_time()
    assert _read(nodes, **constants).leak.startswith(reason)
    assert time.process_time() - begun < 10


@pytest.mark.parametrize("entry", [IDS, MASK])
def test_places_by_the_shape_of_the_past_are_no_leak_where_nothing_tells_rows_apart(entry: InputSpec) -> None:
    """As Whisper's decoder takes its embeddings of positions: with a mask beside them, rows have different pasts."""
    nodes = [
        _node("Shape", "past_key", "before", start=2, end=3),
        _node("Shape", "input_ids", "fed", start=1, end=2),
        _node("Add", "before fed", "length"),
        _node("Slice", "places before length first", "scale"),
    ]
    places = np.random.default_rng(1).standard_normal((512, 4)).astype(np.float32)
    past = KvTensor("past_key", "present_key", TensorProto.FLOAT, 1, 4)
    found = _read(nodes, tuple(dict.fromkeys((IDS, entry))), (past,), places=places, first=[0])
    assert bool(found.leak) == (entry is MASK)


@pytest.mark.parametrize(
    ("options", "offset"),
    [
        ({"provider_options": [{"webgpu": {"multiRotaryCacheConcatOffset": "4096"}}]}, 4096),
        ([None, {"multi_rotary_cache_concat_offset": 60}], 60),
        ({"nv_multi_rotary_cache_concat_offset": "60"}, 60),
        ({"provider_options": [{"webgpu": {"validationMode": "disabled"}}]}, None),
        (None, None),
        ({"multiRotaryCacheConcatOffset": "many"}, None),
    ],
)
def test_the_rows_of_a_providers_first_table_are_found_in_its_options(options: Any, offset: int | None) -> None:
    assert table_offset(options) == offset

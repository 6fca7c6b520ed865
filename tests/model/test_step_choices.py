"""What of a step decides a decoder's numbers is read from the nodes between its lengths and its layers."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from olive_ext.model.spec.step_choices import read_step_choices, table_offset
from olive_ext.model.types import InputSpec, KvTensor, LengthChoice, Role, StepChoices, TensorSpec
from tests.graph.text import model_from

IDS = InputSpec(Role.INPUT_IDS, TensorSpec("input_ids", 7, ("B", "S")))
MASK = InputSpec(Role.ATTENTION_MASK, TensorSpec("attention_mask", 7, ("B", "T")))
POSITIONS = InputSpec(Role.POSITION_IDS, TensorSpec("position_ids", 7, ("B", "S")))


def _read(
    nodes: str,
    entries: tuple[InputSpec, ...] = (IDS, MASK, POSITIONS),
    caches: tuple[KvTensor, ...] = (),
    **constants: Any,
) -> StepChoices:
    """Of a graph that multiplies embeddings [B, S, 4] with the value `scale` that `nodes` compute."""
    layers = "embedded = Gather (table, input_ids) logits = Mul (embedded, scale)"
    table = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)
    given = {"table": table, "long": LONG, "short": SHORT, "zero": 0, "one": 1, "axis": [2], **constants}
    model = model_from(f"decoder () => (float[B, S, 4] logits) {{ {nodes} {layers} }}", **given)
    inputs = [(one.tensor.name, 7, one.tensor.shape) for one in entries]
    inputs += [(one.past, 1, ["B", one.heads, "P", one.head_size]) for one in caches]
    model.graph.input.extend(helper.make_tensor_value_info(*value) for value in inputs)
    model.graph.value_info.append(helper.make_tensor_value_info("own", TensorProto.FLOAT, ["B", "S", 4]))
    return read_step_choices(model, entries, caches, 512)


SHORT, LONG = np.float32(1.0), np.float32(1.7)
LARGEST = "largest = ReduceMax <keepdims = 0> (position_ids)"
WIDTH = "shape = Shape <start = 1, end = 2> (attention_mask) width = Squeeze (shape)"
GREATER = f"{LARGEST} is_long = Greater (largest, last)"
SCALE = "scale = Where (is_long, long, short)"
CHOICES: dict[str, tuple[str, dict[str, Any], tuple[int, bool]]] = {
    "greater": (GREATER + SCALE, {"last": 59}, (60, True)),
    "not less": (f"{LARGEST} is_long = GreaterOrEqual (largest, last) {SCALE}", {"last": 60}, (60, True)),
    "wider": (f"{WIDTH} is_long = Greater (width, last) {SCALE}", {"last": 60}, (60, True)),
    "narrower": (f"{WIDTH} is_long = Less (width, last) {SCALE}", {"last": 61}, (60, False)),
    "turned": (f"{WIDTH} is_long = LessOrEqual (last, width) {SCALE}", {"last": 60}, (59, True)),
    "few tokens": (GREATER + SCALE, {"last": 2}, (3, True)),
    "a product": (
        f"{LARGEST} last = Mul (tens, six) is_long = GreaterOrEqual (largest, last) {SCALE}",
        {"tens": 10, "six": 6},
        (60, True),
    ),
    "a fraction": (
        f"{LARGEST} wide = Cast <to = 1> (largest) is_long = Greater (wide, last) {SCALE}",
        {"last": np.float32(376.5)},
        (377, True),
    ),
    "one of several": (
        f"{LARGEST} both = Greater (largest, last) is_long = Gather (both, zero) {SCALE}",
        {"last": [376, 376]},
        (377, True),
    ),
    "beside whether it is a prompt, which changes once, too": (
        f"{GREATER} is_prompt = Greater (largest, zero) same = Where (is_prompt, long, long)"
        "scale = Where (is_long, same, short)",
        {"last": 59},
        (60, True),
    ),
    "an index into two tables, as mobius writes it": (
        f"{GREATER} is_second = Cast <to = 7> (is_long) shift = Mul (is_second, rows)"
        "places = Add (position_ids, shift) picked = Gather (tables, places) scale = Unsqueeze (picked, axis)",
        {"last": 59, "rows": 60, "tables": np.arange(600, dtype=np.float32)},
        (60, True),
    ),
}


@pytest.mark.parametrize(("nodes", "constants", "choice"), CHOICES.values(), ids=CHOICES)
def test_a_choice_by_length_is_found_with_its_last_length(
    nodes: str, constants: dict[str, Any], choice: tuple[int, bool]
) -> None:
    found = _read(nodes, **constants)
    assert found.by_length == (LengthChoice("is_long", 0, *choice),)
    assert (found.lengths, found.leak) == ((choice[0],), "")
    if (last := constants.get("last")) in (59, 60, 61):
        assert last in found.numbers


DEPENDS = "'scale', which 'logits' (Mul) reads, depends on the step"
OF_ALL = "'scale' (ReduceMax) makes one number of all tokens of a step"
OWN = "own = Gather (table, input_ids)"
FIRST = "first = ReduceMin <keepdims = 0> (position_ids)"
FAR = "far = Greater (position_ids, last) wide = Cast <to = 1> (far) scale = Unsqueeze (wide, axis)"
LEAKS: dict[str, tuple[str, dict[str, Any], str]] = {
    "each length has its own": (f"{LARGEST} scale = Cast <to = 1> (largest)", {}, DEPENDS),
    "a table of lengths": (
        f"{LARGEST} scale = Gather (tables, largest)",
        {"tables": np.where(np.arange(512) < 377, SHORT, LONG)},
        DEPENDS,
    ),
    "a logarithm after a length": (
        f"{LARGEST} wide = Cast <to = 1> (largest) most = Max (wide, last) scale = Log (most)",
        {"last": np.float32(300.5)},
        DEPENDS,
    ),
    "odd and even": (
        f"{LARGEST} rest = Mod (largest, two) is_long = Cast <to = 9> (rest) {SCALE}",
        {"two": 2},
        DEPENDS,
    ),
    "more than once": (
        f"{WIDTH} rest = Mod (width, last) is_long = Greater (rest, half) {SCALE}",
        {"last": 60, "half": 30},
        DEPENDS,
    ),
    "the first position of the step": (f"{FIRST} is_long = Greater (first, last) {SCALE}", {"last": 59}, DEPENDS),
    "rows": ("rows = Shape <start = 0, end = 1> (input_ids) scale = Cast <to = 1> (rows)", {}, DEPENDS),
    "tokens that are fed": (f"fed = Size (input_ids) is_long = Greater (fed, last) {SCALE}", {"last": 20}, DEPENDS),
    "one number of all": (f"{OWN} scale = ReduceMax <keepdims = 0> (own)", {}, OF_ALL),
    "one number of all, axes": (f"{OWN} scale = ReduceMax <keepdims = 0> (own, axes)", {"axes": [0, 1]}, OF_ALL),
    "one number of all, axes of a node": (
        f"axes = Constant <value_ints = [0, 1]> () {OWN} scale = ReduceMax <keepdims = 0> (own, axes)",
        {},
        OF_ALL,
    ),
    "a position": ("wide = Cast <to = 1> (position_ids) scale = Unsqueeze (wide, axis)", {}, ""),
    "a threshold of each token's own": (FAR, {"last": 60}, ""),
    "a size of the weights": ("sizes = Shape (table) size = Gather (sizes, zero) scale = Cast <to = 1> (size)", {}, ""),
}


@pytest.mark.parametrize(("nodes", "constants", "leak"), LEAKS.values(), ids=LEAKS)
def test_what_else_a_step_decides_is_named(nodes: str, constants: dict[str, Any], leak: str) -> None:
    found = _read(nodes, **constants)
    assert found.by_length == ()
    assert leak in found.leak
    assert bool(leak) == bool(found.leak)


BODY = """b (int64 i, bool goes_on, int64 sum) => (bool still, int64 more) {
    still = Identity (goes_on) more = Add (sum, one)
}"""
CHAIN = " ".join(f"sum_{at + 1} = Add (sum_{at}, one)" for at in range(20_000))
HOSTILE: dict[str, tuple[str, dict[str, Any], str]] = {
    "a loop without an end": (
        f"{WIDTH} last_sum = Loop <body = {BODY}> (trips, always, width) scale = Cast <to = 1> (last_sum)",
        {"always": True, "trips": 2**62},
        "",
    ),
    "many nodes": (
        f"{LARGEST} sum_0 = Identity (largest) {CHAIN} scale = Cast <to = 1> (sum_20000)",
        {},
        "20003 nodes",
    ),
    "a tensor of 8 GB": (
        f"{WIDTH} sums = Expand (width, many) most = ReduceMax <keepdims = 0> (sums) scale = Cast <to = 1> (most)",
        {"many": [10**9]},
        "",
    ),
}


@pytest.mark.parametrize(("nodes", "constants", "reason"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_nodes_cost_neither_seconds_nor_memory(nodes: str, constants: dict[str, Any], reason: str) -> None:
    """Each would take minutes, or gigabytes."""
    begun = time.process_time()
    assert _read(nodes, **constants).leak.startswith(reason)
    assert time.process_time() - begun < 10


@pytest.mark.parametrize("entry", [IDS, MASK])
def test_places_by_the_shape_of_the_past_are_no_leak_where_nothing_tells_rows_apart(entry: InputSpec) -> None:
    """As Whisper's decoder takes its embeddings of positions: with a mask beside them, rows have different pasts."""
    nodes = """
        before = Shape <start = 2, end = 3> (past_key) fed = Shape <start = 1, end = 2> (input_ids)
        length = Add (before, fed) scale = Slice (places, before, length, first)
    """
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

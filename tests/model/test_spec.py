"""What a decoder takes and returns, read from graphs that declare as exporters do."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from olive_ext.errors import ModelError
from olive_ext.model.files.package_config import GenaiConfig, read_json
from olive_ext.model.spec.attention import embedding_rows
from olive_ext.model.spec.decoder_spec import read_embedding, read_spec
from olive_ext.model.types import InputSpec, Role, StateTensor, TensorSpec
from tests.refusals import refused, tells

FLOAT, INT64, INT32 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32
Shape = Sequence[int | str]
Value = tuple[str, int, Shape]

TOKENS: list[Value] = [("input_ids", INT64, ["B", "S"]), ("attention_mask", INT64, ["B", "P+S"])]
LOGITS: Value = ("logits", FLOAT, ["B", "S", 100])
PARTS = ("key", "value")


def names(past: str, present: str) -> dict[str, Any]:
    """The names in genai_config.json's section of a decoder, with such caches."""
    return {
        "inputs": {"input_ids": "input_ids", **{f"past_{part}_names": past.format(part=part) for part in PARTS}},
        "outputs": {"logits": "logits", **{f"present_{part}_names": present.format(part=part) for part in PARTS}},
    }


DECODER = {"head_size": 16, "num_key_value_heads": 2, **names("past_key_values.%d.{part}", "present.%d.{part}")}
GENAI_CONFIG = {"model": {"context_length": 512, "vocab_size": 100, "decoder": DECODER}}


def model(
    *,
    layers: Sequence[Shape] = ((2, "kv_cache_dim"), (2, "kv_cache_dim")),
    tokens: Sequence[Value] = TOKENS,
    extra: Sequence[Value] = (),
    outputs: Sequence[Value] = (LOGITS,),
    elem_type: int = FLOAT,
    past: str = "past_key_values.{layer}.{part}",
    present: str = "present.{layer}.{part}",
    op: str = "GroupQueryAttention",
    cos_rows: int | None = 512,
    **attributes: int,
) -> onnx.ModelProto:
    """One attention node for each of `layers` (heads, head size). Never run, so nothing else is needed."""
    inputs, results, nodes, infos = [*tokens, *extra], list(outputs), [], []
    for part in ("key", "value"):  # genai's order: all keys, then all values
        for layer, (heads, size) in enumerate(layers):
            inputs.append((past.format(layer=layer, part=part), elem_type, ["B", heads, "P", size]))
            results.append((present.format(layer=layer, part=part), elem_type, ["B", heads, "T", size]))
    for layer in range(len(layers)):
        pair = [past.format(layer=layer, part=part) for part in ("key", "value")]
        returned = [present.format(layer=layer, part=part) for part in ("key", "value")]
        nodes.append(
            helper.make_node(
                op,
                ["q", "", "", *pair, "seqlens", "total", "cos_cache"],
                [f"attention{layer}", *returned],
                domain="com.microsoft",
                **{"num_heads": 4, "kv_num_heads": 2, **attributes},
            )
        )
        infos.append(helper.make_tensor_value_info(f"attention{layer}", FLOAT, ["B", "S", 64]))
    weights = []
    if cos_rows is not None:
        weights.append(helper.make_tensor("cos_cache", FLOAT, [cos_rows, 1], [0.0] * cos_rows))
    infos_of = [[helper.make_tensor_value_info(*value) for value in values] for values in (inputs, results)]
    return helper.make_model(helper.make_graph(nodes, "g", *infos_of, weights, value_info=infos))


def changed(*path: str, **values: Any) -> Mapping[str, Any]:
    """GENAI_CONFIG with `values` written into the section at `path`."""
    return _changed(GENAI_CONFIG, path, values)


def _changed(section: Mapping[str, Any], path: Sequence[str], values: Mapping[str, Any]) -> Mapping[str, Any]:
    if not path:
        return {**section, **values}
    return {**section, path[0]: _changed(section.get(path[0], {}), path[1:], values)}


@pytest.mark.parametrize("decoder", [{}, {"head_size": -42}])
def test_head_size_is_refused_when_nothing_states_it(decoder, tmp_path):
    """-42 is what mobius writes where a model has no attention."""
    file = tmp_path / "genai_config.json"
    file.write_text(json.dumps({"model": {"decoder": decoder}}))
    graph = model(op="MultiHeadAttention", num_heads=0)
    with refused(ModelError, "unsupported", holds=("past_key_values", "0", "kv_cache_dim", "head_size")):
        read_spec(graph, read_json(file, GenaiConfig))


def test_kv_may_be_quantized():
    graph = model(elem_type=TensorProto.UINT8, kv_cache_bit_width=4)
    spec = read_spec(graph, GENAI_CONFIG)
    assert (spec.kv[0].elem_type, spec.kv[0].head_size) == (TensorProto.UINT8, 8)
    assert spec.is_kv_in_place
    # onnxruntime-genai keeps two buffers on the CPU; the kernel shares one all the same.
    assert read_spec(graph, changed("search", past_present_share_buffer=False)).is_kv_in_place


@pytest.mark.parametrize(
    ("configured", "hf_config", "rows", "max_length", "expected", "winner"),
    [
        (512, {}, 2048, None, 512, "genai_config.json"),
        (4096, {"max_position_embeddings": 512}, 1024, None, 512, "config.json"),
        (4096, {"text_config": {"max_position_embeddings": 256}}, 512, None, 256, "config.json"),
        (4096, {}, 512, None, 512, "the rows of the rotary cache"),
        (4096, {}, None, 100, 100, "max_length"),
        (512, {}, None, 9999, 512, "genai_config.json"),
        (None, {}, None, 77, 77, "max_length"),
    ],
)
def test_context_length_is_the_smallest_stated(configured, hf_config, rows, max_length, expected, winner):
    spec = read_spec(model(cos_rows=rows), changed("model", context_length=configured), max_length, hf_config)
    assert spec.context_length == expected
    assert any(tells(note, f"context {expected} {winner}") for note in spec.notes)


@pytest.mark.parametrize(("max_length", "warnings"), [(512, 0), (513, 1)])
def test_length_beyond_the_models_own_is_warned_of(max_length, warnings, caplog):
    with caplog.at_level("WARNING", logger="olive_ext"):
        spec = read_spec(model(), changed("model", context_length=512), max_length)
    assert spec.context_length == 512
    assert len([line for line in caplog.messages if tells(line, "'max_length' = 513 512")]) == warnings


STATES = [
    ("past.0.conv", "present.0.conv"),
    ("past_conv.0", "present_conv.0"),
    ("past_key_values.0.recurrent_state", "present.0.recurrent_state"),
    ("past_states.0.ssm_state", "present_states.0.ssm_state"),
]


@pytest.mark.parametrize(("past", "present"), STATES)
def test_states_are_paired_by_name_and_keep_kv_from_being_in_place(past, present):
    spec = read_spec(
        model(extra=[(past, FLOAT, ["B", 8, 3])], outputs=[LOGITS, (present, FLOAT, ["B", 8, 3])]), GENAI_CONFIG
    )
    assert spec.states == (StateTensor(past, present, FLOAT, (8, 3)),)
    assert not spec.is_kv_in_place


def test_static_cache_is_read_with_its_capacity_as_context():
    spec = read_spec(
        model(
            layers=[],
            tokens=[TOKENS[0]],
            extra=[("key_cache.0", FLOAT, ["B", 128, 32]), ("write_indices", INT64, ["B"])],
            outputs=[LOGITS, ("updated_key_cache.0", FLOAT, ["B", 128, 32])],
        ),
        {},
    )
    (tensor,) = spec.kv
    assert tensor.shape(3, 128) == [3, 128, 32]
    assert (spec.context_length, spec.is_kv_in_place) == (128, True)


def test_paged_cache_is_in_place_and_its_inputs_have_roles():
    packed = [("input_ids", INT64, ["N"]), ("block_table", INT32, ["B", "M"])]
    packed += [("cumulative_sequence_lengths", INT32, ["B + 1"]), ("past_sequence_lengths", INT32, ["B"])]
    blocks = [(f"past_key_values.0.{part}", FLOAT, ["blocks", "size", 2, 16]) for part in ("key", "value")]
    results = [(f"present.0.{part}", FLOAT, ["blocks", "size", 2, 16]) for part in ("key", "value")]
    spec = read_spec(model(layers=[], tokens=packed, extra=blocks, outputs=[LOGITS, *results]), GENAI_CONFIG)
    assert [(tensor.heads, tensor.head_size) for tensor in spec.kv] == [(2, 16), (2, 16)]
    assert spec.is_paged
    assert spec.is_kv_in_place
    roles = [Role.INPUT_IDS, Role.BLOCK_TABLE, Role.CUMULATIVE_LENGTHS, Role.PAST_LENGTHS]
    assert [found.role for found in spec.inputs] == roles


def cast(graph: onnx.ModelProto) -> None:
    graph.graph.node[0].output[2] = "raw"
    graph.graph.node.append(helper.make_node("Cast", ["raw"], ["present.0.value"], to=FLOAT))


def cast_all(graph: onnx.ModelProto) -> None:
    """As a tool does that stores halves and keeps the types of inputs and outputs: nodes are in no order."""
    for node in [*graph.graph.node]:
        for name in node.input[3:5]:
            graph.graph.node.append(helper.make_node("Cast", [name], [f"half {name}"], to=TensorProto.FLOAT16))
        for name in node.output[1:]:
            graph.graph.node.append(helper.make_node("Cast", [f"half {name}"], [name], to=FLOAT))
        node.input[3:5] = [f"half {name}" for name in node.input[3:5]]
        node.output[1:] = [f"half {name}" for name in node.output[1:]]


def second(graph: onnx.ModelProto) -> None:
    graph.graph.node.append(helper.make_node("Shape", ["past_key_values.1.value"], ["length"]))


NOTED: dict[str, tuple[onnx.ModelProto, Any, Mapping[str, Any], bool, str]] = {
    "another operator": (model(op="MultiHeadAttention"), None, GENAI_CONFIG, False, "GroupQueryAttention"),
    "a second reader": (model(), second, GENAI_CONFIG, False, "'past_key_values.1.value'"),
    "a cast": (model(), cast, {}, False, "'present.0.value'"),
    "casts": (model(), cast_all, GENAI_CONFIG, False, "KV is returned grown"),
    "casts before another operator": (model(op="Concat"), cast_all, GENAI_CONFIG, False, "GroupQueryAttention"),
    "a window": (model(sliding_window_cache=1, local_window_size=16), None, {}, True, "keep 16 positions"),
    "a larger vocabulary": (model(), None, changed("model", vocab_size=90), True, "100 entries, as in 'logits'; the"),
    "logits by prefix": (
        model(outputs=[("logits_Q4", FLOAT, ["B", "S", 100])]),
        None,
        GENAI_CONFIG,
        True,
        "'logits_Q4'",
    ),
}


@pytest.mark.parametrize(("graph", "edit", "config", "in_place", "note"), NOTED.values(), ids=NOTED)
def test_what_is_not_obvious_is_noted(graph, edit, config, in_place, note):
    if edit is not None:
        edit(graph)
    spec = read_spec(graph, config)
    assert spec.is_kv_in_place == in_place
    assert spec.vocab_size == 100
    assert any(note in one for one in spec.notes)
    said = read_spec(graph, {**config, "search": {"past_present_share_buffer": True}}).contradicted
    # onnxruntime-genai fails at the first step.
    grows = any(node.op_type in ("MultiHeadAttention", "Concat") for node in graph.graph.node)
    assert any("past_present_share_buffer" in text for text in said) == grows


def test_layers_have_their_own_sizes_in_the_order_of_their_numbers():
    spec = read_spec(model(layers=[(2, 16), (1, 32)]), GENAI_CONFIG)
    assert [(tensor.heads, tensor.head_size) for tensor in spec.kv] == [(2, 16), (2, 16), (1, 32), (1, 32)]
    spec = read_spec(model(layers=[(2, 16)] * 12), {})
    assert [tensor.past for tensor in spec.kv][::2] == [f"past_key_values.{layer}.key" for layer in range(12)]


LENGTHS: list[Value] = [("past_seq_len", INT32, ["B", 1]), ("total_seq_len", INT32, [1])]
ROLES: list[tuple[list[Value], list[Role]]] = [
    ([("input_ids", INT32, ["B", "S"])], [Role.INPUT_IDS]),
    ([*TOKENS, ("position_ids", INT64, ["B", "S"])], [Role.INPUT_IDS, Role.ATTENTION_MASK, Role.POSITION_IDS]),
    ([*TOKENS, ("position_ids", INT64, [3, "B", "S"])], [Role.INPUT_IDS, Role.ATTENTION_MASK, Role.POSITION_IDS]),
    ([TOKENS[0], *LENGTHS], [Role.INPUT_IDS, Role.LAST_POSITIONS, Role.TOTAL_LENGTH]),
]


@pytest.mark.parametrize(("tokens", "roles"), ROLES)
def test_inputs_have_roles_by_their_names(tokens, roles):
    found = read_spec(model(tokens=tokens), {}).inputs
    expected = [TensorSpec(name, elem_type, tuple(shape)) for name, elem_type, shape in tokens]
    assert found == tuple(map(InputSpec, roles, expected))


EMBEDS: list[Value] = [("inputs_embeds", FLOAT, ["B", "S", 64]), ("per_layer_inputs", FLOAT, ["B", "S", 48])]


def embedding(*features: Value) -> onnx.ModelProto:
    return model(layers=[], tokens=[TOKENS[0]], extra=features, outputs=EMBEDS[:1])


def test_embeddings_come_from_another_graph_with_features_without_rows():
    assert read_spec(model(tokens=[TOKENS[1]], extra=EMBEDS), GENAI_CONFIG).embeddings == (EMBEDS[0][0], EMBEDS[1][0])
    spec = read_embedding(embedding(("image_features", FLOAT, ["N", 64])), ["inputs_embeds"])
    assert spec.features == (TensorSpec("image_features", FLOAT, ("N", 64)),)
    assert spec.outputs == ("inputs_embeds",)


def without_axis(graph: onnx.ModelProto) -> None:
    del graph.graph.input[2].type.tensor_type.shape.dim[1]


def without_output(graph: onnx.ModelProto) -> None:
    del graph.graph.output[1]


SYMBOLIC: Value = ("logits", FLOAT, ["B", "S", "V"])
KV = "past_key_values 0"
UNKNOWN = ("past_state_of_a_new_kind", "encoder_lengths", "deepstack_visual_embeds", "vision_gate", "mystery")
REFUSED: dict[str, tuple[dict[str, Any], Any, str]] = {
    "position_ids of one axis": ({"tokens": [*TOKENS, ("position_ids", INT64, ["N"])]}, None, "position_ids 1 2 3"),
    "no vocabulary": ({"outputs": [SYMBOLIC]}, None, "logits"),
    "KV of three axes": ({}, without_axis, f"{KV} 3"),
    "KV without an output": ({}, without_output, KV),
    "no KV": ({"layers": []}, None, KV),
    "no tokens": ({"tokens": []}, None, f"input_ids {KV}"),
    "tokens that are no integers": ({"tokens": [("input_ids", FLOAT, ["B", "S"])]}, None, "input_ids FLOAT"),
    **{name: ({"extra": [(name, FLOAT, ["B"])]}, None, f"{name} input_ids") for name in UNKNOWN},
    **{
        f"{past} without an output": ({"extra": [(past, FLOAT, ["B", 8, 3])]}, None, f"{past} {present}")
        for past, present in STATES
    },
    **{
        f"{past} of any size": (
            {"extra": [(past, FLOAT, ["B", "N", 3])], "outputs": [LOGITS, (present, FLOAT, ["B", "N", 3])]},
            None,
            past,
        )
        for past, present in STATES
    },
}


@pytest.mark.parametrize(("given", "edit", "holds"), REFUSED.values(), ids=REFUSED)
def test_graph_that_is_not_understood_is_refused_by_name(given, edit, holds):
    graph = model(**given)
    if edit is not None:
        edit(graph)
    with refused(ModelError, "unsupported", holds=tuple(holds.split())) as error:
        read_spec(graph, {})
    assert "\n" not in str(error.value)


def test_what_is_not_clear_or_not_stated_is_refused():
    two = [("logits_a", FLOAT, ["B", "S", 100]), ("logits_b", FLOAT, ["B", "S", 100])]
    with refused(ModelError, "contradiction", holds=("logits_a", "logits_b")):
        read_spec(model(outputs=two), {})
    with refused(ModelError, "contradiction", holds=("logits", "present.0.key")):
        read_spec(model(outputs=[("hidden", FLOAT, ["B", "S", 64])]), {})
    with refused(ModelError, "missing", "max_length"):
        read_spec(model(cos_rows=None), {})
    assert read_spec(model(outputs=[SYMBOLIC]), GENAI_CONFIG).vocab_size == 100
    with refused(ModelError, "unsupported", holds=("per_layer_inputs", "inputs_embeds")):
        read_embedding(embedding(), ["inputs_embeds", "per_layer_inputs"])
    with refused(ModelError, "unsupported", holds="gate"):
        read_embedding(embedding(("gate", FLOAT, [1])), ["inputs_embeds"])


@pytest.mark.parametrize("axis", [0, 1])
def test_embedding_has_as_many_rows_as_its_axis_of_lookup(axis):
    table = helper.make_tensor("table", TensorProto.FLOAT, (50, 4)[:: 1 - 2 * axis], [0] * 200)
    node = helper.make_node("Gather", ["table", "ids"], ["out"], axis=axis)
    assert embedding_rows(helper.make_graph([node], "g", [], [], [table]), "ids") == 50

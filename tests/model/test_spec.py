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
from olive_ext.model.spec.decoder_spec import read_embedding, read_spec
from olive_ext.model.types import InputSpec, KvTensor, Role, StateTensor, TensorSpec
from tests.refusals import refused

FLOAT, INT64, INT32 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32
Shape = Sequence[int | str]
Value = tuple[str, int, Shape]

TOKENS: list[Value] = [("input_ids", INT64, ["B", "S"]), ("attention_mask", INT64, ["B", "P+S"])]
LOGITS: Value = ("logits", FLOAT, ["B", "S", 100])
GENAI_CONFIG = {
    "model": {
        "context_length": 512,
        "vocab_size": 100,
        "decoder": {
            "head_size": 16,
            "num_key_value_heads": 2,
            "inputs": {
                "input_ids": "input_ids",
                "past_key_names": "past_key_values.%d.key",
                "past_value_names": "past_key_values.%d.value",
            },
            "outputs": {
                "logits": "logits",
                "present_key_names": "present.%d.key",
                "present_value_names": "present.%d.value",
            },
        },
    }
}


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


def test_spec_of_a_genai_package_is_complete():
    spec = read_spec(model(), GENAI_CONFIG)
    assert spec.inputs == (
        InputSpec(Role.INPUT_IDS, TensorSpec("input_ids", INT64, ("B", "S"))),
        InputSpec(Role.ATTENTION_MASK, TensorSpec("attention_mask", INT64, ("B", "P+S"))),
    )
    assert [tensor.past for tensor in spec.kv] == [
        f"past_key_values.{layer}.{part}" for layer in (0, 1) for part in ("key", "value")
    ]
    assert spec.kv[0] == KvTensor("past_key_values.0.key", "present.0.key", FLOAT, 2, 16)
    assert spec.logits == TensorSpec("logits", FLOAT, ("B", "S", 100))
    assert (spec.vocab_size, spec.context_length, spec.is_kv_in_place) == (100, 512, True)


def test_spec_is_read_from_the_graph_alone_when_there_is_no_config():
    spec = read_spec(model(), {})
    assert {(tensor.heads, tensor.head_size) for tensor in spec.kv} == {(2, 16)}
    assert (spec.vocab_size, spec.context_length) == (100, 512)


def test_layers_keep_their_own_sizes_when_the_graph_declares_them():
    spec = read_spec(model(layers=[(2, 16), (1, 32)]), GENAI_CONFIG)
    assert [(tensor.heads, tensor.head_size) for tensor in spec.kv] == [(2, 16), (2, 16), (1, 32), (1, 32)]


@pytest.mark.parametrize("decoder", [{}, {"head_size": -42}])
def test_head_size_is_refused_when_nothing_states_it(decoder, tmp_path):
    """-42 is what mobius writes where a model has no attention."""
    file = tmp_path / "genai_config.json"
    file.write_text(json.dumps({"model": {"decoder": decoder}}))
    graph = model(op="MultiHeadAttention", num_heads=0)
    with refused(ModelError, "unsupported", holds=("past_key_values", "0", "kv_cache_dim", "head_size")):
        read_spec(graph, read_json(file, GenaiConfig))


@pytest.mark.parametrize(
    ("past", "present", "config"),
    [
        ("past_{part}_{layer}", "present_{part}_{layer}", {}),
        (
            "in.{layer}.{part}",
            "out.{layer}.{part}",
            changed(
                "model",
                "decoder",
                inputs={"past_key_names": "in.%d.key", "past_value_names": "in.%d.value"},
                outputs={"present_key_names": "out.%d.key", "present_value_names": "out.%d.value"},
            ),
        ),
    ],
    ids=["known", "configured"],
)
def test_kv_is_paired_by_name(past, present, config):
    spec = read_spec(model(past=past, present=present), config)
    assert [(tensor.past, tensor.present) for tensor in spec.kv][:3] == [
        (past.format(layer=layer, part=part), present.format(layer=layer, part=part))
        for layer, part in ((0, "key"), (0, "value"), (1, "key"))
    ]
    assert spec.is_kv_in_place


def test_layers_are_ordered_by_number_when_there_are_more_than_ten():
    spec = read_spec(model(layers=[(2, 16)] * 12), {})
    assert [tensor.past for tensor in spec.kv][::2] == [f"past_key_values.{layer}.key" for layer in range(12)]


def test_kv_may_be_quantized():
    graph = model(elem_type=TensorProto.UINT8, kv_cache_bit_width=4)
    spec = read_spec(graph, GENAI_CONFIG)
    assert (spec.kv[0].elem_type, spec.kv[0].head_size) == (TensorProto.UINT8, 8)
    assert spec.is_kv_in_place
    # onnxruntime-genai keeps two buffers on the CPU; the kernel shares one all the same.
    assert read_spec(graph, changed("search", past_present_share_buffer=False)).is_kv_in_place


def test_input_ids_may_be_int32():
    (tokens,) = read_spec(model(tokens=[("input_ids", INT32, ["B", "S"])]), {}).inputs
    assert tokens.tensor.elem_type == INT32


@pytest.mark.parametrize("shape", [["B", "S"], [3, "B", "S"]], ids=len)
def test_position_ids_may_have_rank_two_or_three(shape):
    spec = read_spec(model(tokens=[*TOKENS, ("position_ids", INT64, shape)]), {})
    assert spec.inputs[-1] == InputSpec(Role.POSITION_IDS, TensorSpec("position_ids", INT64, tuple(shape)))


def test_position_ids_are_refused_when_of_rank_one():
    with refused(ModelError, "unsupported", holds=("position_ids", "1", "2", "3")):
        read_spec(model(tokens=[*TOKENS, ("position_ids", INT64, ["N"])]), {})


def test_logits_are_found_by_prefix_when_renamed():
    spec = read_spec(model(outputs=[("logits_Q4", FLOAT, ["B", "S", 100])]), GENAI_CONFIG)
    assert spec.logits.name == "logits_Q4"
    assert any("logits_Q4" in note for note in spec.notes)


def test_error_lists_candidates_when_several_could_be_the_logits():
    two = [("logits_a", FLOAT, ["B", "S", 100]), ("logits_b", FLOAT, ["B", "S", 100])]
    with refused(ModelError, "contradiction", holds=("logits_a", "logits_b")):
        read_spec(model(outputs=two), {})


def test_error_lists_outputs_when_there_are_no_logits():
    with refused(ModelError, "contradiction", holds=("logits", "present.0.key")):
        read_spec(model(outputs=[("hidden", FLOAT, ["B", "S", 64])]), {})


def test_vocabulary_is_that_of_the_logits_when_the_config_differs():
    spec = read_spec(model(), changed("model", vocab_size=90))
    assert spec.vocab_size == 100
    assert any("the config says 90" in note for note in spec.notes)


def test_vocabulary_is_that_of_the_config_when_the_logits_are_symbolic():
    graph = model(outputs=[("logits", FLOAT, ["B", "S", "V"])])
    assert read_spec(graph, GENAI_CONFIG).vocab_size == 100
    with refused(ModelError, "unsupported", holds="logits"):
        read_spec(graph, {})


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
    assert any(f"the context length {expected} is that of {winner}" in note for note in spec.notes)


@pytest.mark.parametrize(("max_length", "warnings"), [(512, 0), (513, 1)])
def test_length_beyond_the_models_own_is_warned_of(max_length, warnings, caplog):
    with caplog.at_level("WARNING", logger="olive_ext"):
        spec = read_spec(model(), changed("model", context_length=512), max_length)
    assert spec.context_length == 512
    assert caplog.text.count("'max_length' = 513 is beyond the model's context length, which is used: 512") == warnings


def test_context_length_is_an_error_when_nothing_states_it():
    with refused(ModelError, "missing", "max_length"):
        read_spec(model(cos_rows=None), {})


def test_kv_is_not_in_place_when_another_operator_reads_it():
    spec = read_spec(model(layers=[(2, 16)], op="MultiHeadAttention"), {})
    assert not spec.is_kv_in_place
    assert any("'past_key_values.0.key' is not read by one GroupQueryAttention alone" in note for note in spec.notes)


def test_kv_is_not_in_place_when_a_second_node_reads_it():
    graph = model()
    graph.graph.node.append(helper.make_node("Shape", ["past_key_values.1.value"], ["length"]))
    assert not read_spec(graph, GENAI_CONFIG).is_kv_in_place


def test_kv_is_not_in_place_when_present_comes_from_a_cast():
    graph = model(layers=[(2, 16)])
    graph.graph.node[0].output[2] = "raw"
    graph.graph.node.append(helper.make_node("Cast", ["raw"], ["present.0.value"], to=FLOAT))
    spec = read_spec(graph, {})
    assert not spec.is_kv_in_place
    assert any("'present.0.value' does not come from the GroupQueryAttention" in note for note in spec.notes)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("past_state_of_a_new_kind", "state whose output is not known"),
        ("encoder_lengths", "encoder-decoder"),
        ("block_table_windowed", "paged KV cache"),
        ("total_sequence_length", "lengths in place of an attention mask"),
        ("deepstack_visual_embeds", "a vision tower's inner layers"),
        ("visual_pos_masks", "a vision tower's inner layers"),
        ("vision_gate", "modality gates"),
    ],
)
def test_input_is_refused_by_name_when_not_supported_yet(name, reason):
    with refused(ModelError, "unsupported", holds=(name, reason)) as error:
        read_spec(model(extra=[(name, FLOAT, ["B"])]), GENAI_CONFIG)
    assert "\n" not in str(error.value)


def test_input_is_refused_by_name_when_not_understood():
    with refused(ModelError, "unsupported", holds=("mystery", "input_ids")):
        read_spec(model(extra=[("mystery", FLOAT, ["B"])]), GENAI_CONFIG)


def test_windowed_kv_is_read_at_full_length_and_noted():
    spec = read_spec(model(sliding_window_cache=1, local_window_size=16), GENAI_CONFIG)
    assert spec.is_kv_in_place
    assert any("sliding_window_cache" in note for note in spec.notes)


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


@pytest.mark.parametrize(("past", "present"), STATES)
def test_state_is_refused_when_its_output_is_missing_or_its_size_unknown(past, present):
    with refused(ModelError, "unsupported", holds=(past, present)):
        read_spec(model(extra=[(past, FLOAT, ["B", 8, 3])]), GENAI_CONFIG)
    with refused(ModelError, "unsupported", holds=past):
        read_spec(model(extra=[(past, FLOAT, ["B", "N", 3])], outputs=[LOGITS, (present, FLOAT, ["B", 8, 3])]), {})


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


def test_decoder_of_embeddings_names_the_inputs_that_another_graph_computes():
    embeds = [("inputs_embeds", FLOAT, ["B", "S", 64]), ("per_layer_inputs", FLOAT, ["B", "S", 48])]
    spec = read_spec(model(tokens=[TOKENS[1]], extra=embeds), GENAI_CONFIG)
    assert spec.embeddings == ("inputs_embeds", "per_layer_inputs")


def _embedding(features: Sequence[Value] = (), outputs: Sequence[str] = ("inputs_embeds",)) -> onnx.ModelProto:
    return model(
        layers=[], tokens=[TOKENS[0]], extra=features, outputs=[(name, FLOAT, ["B", "S", 64]) for name in outputs]
    )


def test_embedding_graph_has_features_without_rows_and_the_wanted_outputs():
    images = ("image_features", FLOAT, ["N", 64])
    spec = read_embedding(_embedding([images]), ["inputs_embeds"])
    assert spec.features == (TensorSpec("image_features", FLOAT, ("N", 64)),)
    assert spec.outputs == ("inputs_embeds",)


def test_embedding_graph_is_refused_when_an_output_is_missing_or_an_input_not_understood():
    with refused(ModelError, "unsupported", holds=("per_layer_inputs", "inputs_embeds")):
        read_embedding(_embedding(), ["inputs_embeds", "per_layer_inputs"])
    with refused(ModelError, "unsupported", holds="gate"):
        read_embedding(_embedding([("gate", FLOAT, [1])]), ["inputs_embeds"])


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


def test_lengths_in_place_of_a_mask_are_inputs_of_their_own():
    lengths = [("past_seq_len", INT32, ["B", 1]), ("total_seq_len", INT32, [1])]
    spec = read_spec(model(tokens=[TOKENS[0], *lengths]), GENAI_CONFIG)
    assert [found.role for found in spec.inputs] == [Role.INPUT_IDS, Role.LAST_POSITIONS, Role.TOTAL_LENGTH]


def test_kv_is_refused_when_of_rank_three():
    graph = model()
    del graph.graph.input[2].type.tensor_type.shape.dim[1]
    with refused(ModelError, "unsupported", holds=("past_key_values", "0", "3")):
        read_spec(graph, GENAI_CONFIG)


def test_kv_is_refused_when_its_output_is_missing():
    graph = model()
    del graph.graph.output[1]
    with refused(ModelError, "unsupported", holds=("past_key_values", "0")):
        read_spec(graph, GENAI_CONFIG)


def test_decoder_is_refused_when_it_has_no_kv_cache():
    with refused(ModelError, "unsupported", holds=("past_key_values", "0")):
        read_spec(helper.make_model(helper.make_graph([], "g", [helper.make_tensor_value_info(*TOKENS[0])], [])), {})


def test_decoder_is_refused_when_it_takes_no_tokens():
    with refused(ModelError, "unsupported", holds=("input_ids", "past_key_values", "0")):
        read_spec(model(tokens=[]), GENAI_CONFIG)

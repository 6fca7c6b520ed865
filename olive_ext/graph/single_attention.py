"""A graph of one attention node, to see how a device computes it. Knows no session."""

from __future__ import annotations

from onnx import ModelProto, TensorProto, helper

INPUTS = ("query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length")
OUTPUT = "attended"


def attention_graph(elem_type: int, num_heads: int, head_size: int) -> bytes:
    """GroupQueryAttention over `query`, `key`, `value` [1, S, num_heads * head_size] behind a past [1, num_heads, P,
    head_size], to `attended` of the same shape as `query`. `seqlens_k` int32[1] is the total length less one."""
    value = helper.make_tensor_value_info
    tokens: list[str | int | None] = [1, "S", num_heads * head_size]
    past: list[str | int | None] = [1, num_heads, "P", head_size]
    inputs = [value(name, elem_type, tokens if i < 3 else past) for i, name in enumerate(INPUTS[:5])]
    inputs += [value("seqlens_k", TensorProto.INT32, [1]), value("total_sequence_length", TensorProto.INT32, [])]
    outputs = [value(OUTPUT, elem_type, tokens)]
    outputs += [value(name, elem_type, [1, num_heads, "T", head_size]) for name in ("present_key", "present_value")]
    node = helper.make_node(
        "GroupQueryAttention",
        INPUTS,
        [output.name for output in outputs],
        domain="com.microsoft",
        num_heads=num_heads,
        kv_num_heads=num_heads,
    )
    graph = helper.make_graph([node], "attention", inputs, outputs)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    model: ModelProto = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return bytes(model.SerializeToString())

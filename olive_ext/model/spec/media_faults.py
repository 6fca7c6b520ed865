"""Which tokens of a picture see which, by a decoder's own masks, whose nodes are run on a few token ids; and what
exporters are known to make of a multimodal model that the original does not compute: told, not mended.

Knows no session, and no picture.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from olive_ext.model.types import ItemMasks, TensorSpec

if TYPE_CHECKING:
    import onnx

Array = npt.NDArray[Any]

_MASK_AT = {"Attention": 3, "MultiHeadAttention": 5, "GroupQueryAttention": 10}
"""The input of an attention's operator that hides tokens: false, or a very negative number."""

_HIDDEN = -1e4

MOST_TOKENS = 4098
"""That masks are made for: their memory is the square of it, and a configuration may name any window."""


def read_item_masks(
    model: onnx.ModelProto, tokens: str, past: Collection[str], placeholders: Collection[int], num_tokens: int
) -> ItemMasks:
    """The masks behind `placeholders`, with which the graph compares its input `tokens`; `past` are its KV inputs. They
    are made for `num_tokens` tokens, more than a window has, all of text and all of one item; behind a window of more
    than `MOST_TOKENS` nothing is looked at."""
    from olive_ext.graph.nodes import nodes_behind

    num_tokens = min(num_tokens, MOST_TOKENS)
    attentions = [node for node in model.graph.node if node.op_type in _MASK_AT]
    inputs = [[*node.input[_MASK_AT[node.op_type] :], ""][0] for node in attentions]
    nodes = {name: nodes_behind(model.graph.node, [name]) for name in {*inputs} - {""}}
    made = [name for name, behind in nodes.items() if tokens in {value for node in behind for value in node.input}]
    layers = [(layer, name) for layer, name in enumerate(inputs) if name in made]
    seen: list[dict[str, Array]] = []
    for number in (max(placeholders) + 1, *sorted(placeholders)):
        given = {tokens: np.full((1, num_tokens), number)}
        seen.append({name: _visible(model, nodes[name], name, _given(given, past, num_tokens)) for name in made})
    text, *items = seen
    joined = [(layer, name) for layer, name in layers if any(item[name][0, 1] for item in items)]
    further = [layer for layer, name in joined if not text[name][-1, 0] and any(item[name][-1, 0] for item in items)]
    return ItemMasks(tuple(layer for layer, _ in joined), tuple(further))


def _given(arrays: dict[str, Array], past: Collection[str], num_tokens: int) -> Callable[[onnx.ValueInfoProto], Array]:
    """What an input is given: one row of so many tokens behind nothing, `arrays` by name."""

    def of(value: onnx.ValueInfoProto) -> Array:
        from onnx.helper import tensor_dtype_to_np_dtype

        tensor = value.type.tensor_type
        dtype = tensor_dtype_to_np_dtype(tensor.elem_type)
        if value.name in arrays:
            return arrays[value.name].astype(dtype)
        length = 0 if value.name in past else num_tokens
        first, *sizes = (dim.dim_value if dim.HasField("dim_value") else length for dim in tensor.shape.dim)
        return np.ones((1 if first == length else first, *sizes), dtype)

    return of


def _visible(
    model: onnx.ModelProto, nodes: list[onnx.NodeProto], name: str, given: Callable[[onnx.ValueInfoProto], Array]
) -> Array:
    """[S, S]: which token sees which by the mask `name`, which `nodes` make."""
    from onnx import TensorProto, helper
    from onnx.reference import ReferenceEvaluator

    read = {value for node in nodes for value in node.input}
    weights = [tensor for tensor in model.graph.initializer if tensor.name in read]
    known = {tensor.name for tensor in weights}
    inputs = [value for value in model.graph.input if value.name in read - known]
    output = helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None)
    graph = helper.make_graph(nodes, "mask", inputs, [output], weights)
    part = helper.make_model(graph, opset_imports=model.opset_import, functions=model.functions)
    (values,) = ReferenceEvaluator(part).run(None, {value.name: given(value) for value in inputs})
    mask: Array = np.asarray(values)
    flat: Array = mask.reshape(-1, *mask.shape[-2:])[0]
    return flat if flat.dtype == np.bool_ else flat > _HIDDEN


Configs = tuple[Mapping[str, Any], Mapping[str, Any]]
"""genai_config.json's `model` and config.json; each may be empty."""

Encoders = Mapping[str, "tuple[onnx.ModelProto, Sequence[TensorSpec]]"]
"""Graphs by their part, and those of their outputs that the embedding graph takes."""

_BUILT_IN = {
    "num_attention_heads": 8,
    "conv_kernel_size": 5,
    "attention_context_left": 13,
    "attention_context_right": 0,
    "attention_logit_cap": 50.0,
    "residual_weight": 0.5,
}
"""Numbers of Gemma 4's audio encoder in mobius 0.1.0, whatever config.json's `audio_config` has."""


def known_faults(encoders: Encoders, configs: Configs, masks: ItemMasks | None = None) -> tuple[str, ...]:
    """One sentence on each fault; `encoders` by their part ("vision", "audio"), `masks` the decoder's."""
    genai, config = configs
    kind = str(genai.get("type") or config.get("model_type") or "")
    faults = [*_other_masks(kind, config, masks or ItemMasks())]
    if "vision" in encoders:
        graph, taken = encoders["vision"]
        faults += [*_last_norm(graph, config), *_deepstack(taken, config)]
    if "audio" in encoders:
        faults += _built_in(encoders["audio"][0], kind, config)
    return tuple(faults)


def _other_masks(kind: str, config: Mapping[str, Any], masks: ItemMasks) -> Iterator[str]:
    """Gemma 3's and Gemma 4's; mobius 0.1.0 gives the latter the former's masks, as transformers 5.10 did."""
    text = config.get("text_config", {})
    is_seen = text.get("use_bidirectional_attention") in ("vision", True, "all")
    if not masks.joined and (is_seen or kind.startswith("gemma3")):
        yield (
            "a picture's tokens see each other in the original model; this decoder takes no token types, so that each "
            "sees those before it: its numbers behind pictures are not the original's"
        )
    kinds = dict(enumerate(text.get("layer_types") or ()))
    full = [layer for layer in masks.joined if kinds.get(layer) == "full_attention"]
    more = [f"in {len(full)} layers of full attention"] if full else []
    if masks.beyond_window:
        more.append(f"in {len(masks.beyond_window)} sliding layers beyond the window of {text.get('sliding_window')}")
    if is_seen and more:
        yield (
            "a picture's tokens see each other in the sliding layers of the original model, within the window "
            f"(transformers 5.23); in this decoder they do so {' and '.join(more)}, too (as in transformers 5.10): its "
            "numbers behind pictures are not the original's"
        )


def _last_norm(encoder: onnx.ModelProto, config: Mapping[str, Any]) -> Iterator[str]:
    weights = (tensor.name for tensor in encoder.graph.initializer)
    norm = min((name for name in weights if "post_layernorm" in name), default=None)
    if norm is not None and isinstance(layer := config.get("vision_feature_layer"), int):
        yield (
            f"the original model takes the features of the vision tower's layer {layer}, before its last norm; this "
            f"encoder ends with '{norm}': its features are not the original's"
        )


def _deepstack(taken: Sequence[TensorSpec], config: Mapping[str, Any]) -> Iterator[str]:
    """Qwen3-VL adds features of inner layers of its tower to the decoder's first layers."""
    layers = config.get("vision_config", {}).get("deepstack_visual_indexes")
    if layers and len(taken) == 1:
        yield (
            f"the original model adds the features of the vision tower's layers {layers} to its first layers "
            f"(deepstack); of this encoder '{taken[0].name}' alone is taken: numbers behind pictures are not the "
            "original's"
        )


def _built_in(encoder: onnx.ModelProto, kind: str, config: Mapping[str, Any]) -> Iterator[str]:
    audio = config.get("audio_config") or {}
    if encoder.producer_name != "mobius" or not kind.startswith("gemma4"):
        return
    for name, number in _BUILT_IN.items():
        if audio.get(name, number) != number:
            yield (
                f"the original model's audio_config has {name} {audio[name]}; mobius builds in {number}: the features "
                "of sound are not the original's"
            )

"""Reads from the graphs of a multimodal package which encoder makes which features, which tokens they replace, and
which tokens of a picture see which. Also names what exporters are known to compute otherwise than the original.

The graphs come first and the configurations second; where both say something and differ, that is an error. Knows no
session, and no picture.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from olive_ext.errors import ModelError, listed
from olive_ext.graph.nodes import constants_of
from olive_ext.model.spec.attention import graph_inputs, tensor_spec
from olive_ext.model.spec.encoder_spec import width_fits
from olive_ext.model.spec.step_choices import PositionalNodes
from olive_ext.model.spec.tensor_names import GATES
from olive_ext.model.types import (
    MEDIA_PARTS,
    PLACEHOLDER_KEYS,
    DecoderSpec,
    EmbeddingSpec,
    GraphFiles,
    ItemMasks,
    MediaEncoderSpec,
    MediaSpec,
    Modality,
    Role,
    TensorSpec,
    modality_of,
)

_MASK_AT = {"Attention": 3, "MultiHeadAttention": 5, "GroupQueryAttention": 10}
"""The input of an attention's operator that hides tokens: false, or a very negative number."""

HIDDEN = -1e4
"""A mask hides where it is at most this: converters to half precision write -65504, or this, for infinity."""

MOST_TOKENS = 4098
"""The most tokens of a mask. Its memory is the square of them, and a configuration may name any window."""


def read_item_masks(part: PositionalNodes, placeholders: Collection[int], num_tokens: int) -> ItemMasks:
    """The layers whose masks depend on `placeholders`, with which the graph compares token ids. Masks are computed for
    `num_tokens` tokens, more than a window has but at most `MOST_TOKENS`: first all text, then all of one item. A mask
    whose nodes may never end is left out."""
    num_tokens = min(num_tokens, MOST_TOKENS)
    attentions = [node for node in part.graph.node if node.op_type in _MASK_AT]
    inputs = [[*node.input[_MASK_AT[node.op_type] :], ""][0] for node in attentions]
    values = [max(placeholders) + 1, *sorted(placeholders)]
    joined, further = set[str](), set[str]()
    for name in part.tokens & {*inputs}:
        run = part.cut([name])
        masks = [run([(0, num_tokens, *[value] * num_tokens)], False)[name] for value in values]
        seen = (mask if mask.dtype == np.bool_ else mask > HIDDEN for mask in masks)
        text, *items = (mask.reshape(-1, *mask.shape[-2:])[0] for mask in seen)
        joined.update([name] if any(item[0, 1] for item in items) else [])
        further.update([name] if not text[-1, 0] and any(item[-1, 0] for item in items) else [])
    layers = [(layer, name) for layer, name in enumerate(inputs) if name in joined]
    return ItemMasks(tuple(layer for layer, _ in layers), tuple(layer for layer, name in layers if name in further))


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
"""Numbers of Gemma 4's audio encoder in mobius 0.1.0, whatever `audio_config` of config.json has."""


def known_faults(encoders: Encoders, configs: Configs, masks: ItemMasks | None = None) -> Iterator[str]:
    """One sentence on each fault. `encoders` are by their part ("vision", "audio"); `masks` are the decoder's."""
    genai, config = configs
    kind = str(genai.get("type") or config.get("model_type") or "")
    yield from _other_masks(kind, config, masks or ItemMasks())
    if "vision" in encoders:
        encoder, taken = encoders["vision"]
        norm = min((one.name for one in encoder.graph.initializer if "post_layernorm" in one.name), default=None)
        if norm is not None and isinstance(layer := config.get("vision_feature_layer"), int):
            yield (
                f"the original model takes the features of the vision tower's layer {layer}, before its last norm; "
                f"this encoder ends with '{norm}': its features are not the original's"
            )
        layers = config.get("vision_config", {}).get("deepstack_visual_indexes")
        if layers and len(taken) == 1:  # Qwen3-VL
            yield (
                f"the original model adds the features of the vision tower's layers {layers} to its first layers "
                f"(deepstack); of this encoder '{taken[0].name}' alone is taken: numbers after pictures are not the "
                "original's"
            )
    if "audio" in encoders and encoders["audio"][0].producer_name == "mobius" and kind.startswith("gemma4"):
        audio = config.get("audio_config") or {}
        for name, number in _BUILT_IN.items():
            if audio.get(name, number) != number:
                yield (
                    f"the original model's audio_config has {name} {audio[name]}; mobius builds in {number}: the "
                    "features of sound are not the original's"
                )


def _other_masks(kind: str, config: Mapping[str, Any], masks: ItemMasks) -> Iterator[str]:
    """Gemma 3's and Gemma 4's; mobius 0.1.0 gives the latter the former's masks, as transformers 5.10 did."""
    text = config.get("text_config", {})
    is_seen = text.get("use_bidirectional_attention") in ("vision", True, "all")
    if not masks.joined and (is_seen or kind.startswith("gemma3")):
        yield (
            "a picture's tokens see each other in the original model; this decoder takes no token types, so that each "
            "sees those before it: its numbers after pictures are not the original's"
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
            "numbers after pictures are not the original's"
        )


_WHOLE = (TensorProto.BOOL, TensorProto.INT32, TensorProto.INT64)


def read_media(
    spec: DecoderSpec,
    embedding: tuple[onnx.ModelProto, EmbeddingSpec],
    encoders: Mapping[str, tuple[GraphFiles, onnx.ModelProto]],
    configs: Configs,
) -> MediaSpec:
    """What the package takes besides text. `encoders` are graphs by their part ("vision", "audio"); `configs` are
    genai_config.json's `model` and config.json.

    An input of the embedding graph for which there is no encoder stays empty. Raises `ModelError` for an encoder that
    is not understood, or that contradicts the embedding graph or a configuration.
    """
    graph, interface = embedding
    # A graph sets the switches of adapters by the tokens of a step, right for text; where a request has pictures they
    # are on for all of it, text before them and answers, too.
    gates = sorted(GATES & {*spec.embeddings, *(value.name for value in graph.graph.output)})
    if gates and gates[0] in spec.embeddings:
        raise ModelError(
            f"the decoder's '{gates[0]}' is set by the tokens of one step, and switches an adapter for a request"
        )
    if gates:
        raise ModelError(
            f"the embedding graph returns '{gates[0]}', and the decoder takes no such input: the adapter is missing"
        )
    specs = []
    for part, (files, proto) in encoders.items():
        modality = MEDIA_PARTS[part]
        taken = [tensor for tensor in interface.features if modality_of(tensor.name) is modality]
        if not taken:
            shown = listed(f"'{tensor.name}'" for tensor in interface.features) or "no features"
            raise ModelError(f"'{files.graph}' encodes an {modality.value}; the embedding graph takes {shown}")
        given = {value.name: tensor_spec(value) for value in proto.graph.output}
        inputs = tuple(graph_inputs(proto.graph).values())
        unnamed = [tensor.name for tensor in taken if tensor.name not in given]
        if len(taken) > 1 and unnamed:  # several are told apart by their names alone
            shown = f"'{unnamed[0]}' of the embedding graph"
            raise ModelError(f"'{files.graph}' returns {listed(given)}, and not {shown}")
        outputs = tuple(_output(files, given, tensor) for tensor in taken)
        placeholder = _placeholder(modality, graph.graph, taken, interface, configs)
        others = (tensor for tensor in given.values() if tensor != outputs[0])
        whole = [tensor for tensor in others if tensor.elem_type in _WHOLE and len(tensor.shape) in (1, 2)]
        marks = [tensor for tensor in whole if any(word in tensor.name for word in ("mask", "length", "size"))]
        real = marks[0] if marks and len(outputs[0].shape) == 3 else None  # beside features [B, rows, size]
        specs.append(MediaEncoderSpec(modality, placeholder, part, files, inputs, outputs, tuple(taken), real))
    positions = next((entry.tensor for entry in spec.inputs if entry.role is Role.POSITION_IDS), None)
    notes = known_faults({one.part: (encoders[one.part][1], one.outputs) for one in specs}, configs, spec.item_masks)
    return MediaSpec(tuple(specs), positions is not None and len(positions.shape) == 3, tuple(notes))


def _output(files: GraphFiles, outputs: Mapping[str, TensorSpec], feature: TensorSpec) -> TensorSpec:
    """The output that is the embedding graph's input: the one of its name, else the only one of its width and type."""
    fitting = [tensor for tensor in outputs.values() if width_fits(tensor, feature)]
    named = outputs.get(feature.name)
    if named is not None and named not in fitting:
        raise ModelError(
            f"'{files.graph}' gives '{named.name}' {list(named.shape)}; the embedding takes {list(feature.shape)}"
        )
    if named is None and len(fitting) != 1:
        listing = ", ".join(f"'{tensor.name}' {list(tensor.shape)}" for tensor in outputs.values())
        raise ModelError(
            f"'{files.graph}' returns {listing}; '{feature.name}' of the embedding graph has {feature.shape[-1]}"
        )
    return named or fitting[0]


def _placeholder(
    modality: Modality,
    graph: onnx.GraphProto,
    features: Sequence[TensorSpec],
    interface: EmbeddingSpec,
    configs: Configs,
) -> int:
    """The token id that features replace. Raises `ModelError` where none is known, or two are."""
    known = {
        f"{origin} {config[key]}": int(config[key])
        for origin, config in zip(("genai_config.json", "config.json"), configs, strict=True)
        for key in PLACEHOLDER_KEYS[modality]
        if isinstance(config.get(key), int)
    }
    compared = compared_ids(graph, interface.inputs[0].tensor.name)
    name = features[0].name
    if len(interface.features) == len(features) and len(compared) == 1:
        known[f"the embedding graph {min(compared)}"] = min(compared)
    unmet = [origin for origin, number in known.items() if compared and number not in compared]
    if unmet or len(set(known.values())) > 1:
        ids = f"; the embedding graph compares ids with {sorted(compared)}" if unmet else ""
        raise ModelError(f"the token that '{name}' replaces is not clear: {listed(known)}{ids}", code="missing")
    if not known:
        raise ModelError(
            f"no graph and none of {listed(PLACEHOLDER_KEYS[modality])} says which token '{name}' replaces",
            code="missing",
        )
    return next(iter(known.values()))


def compared_ids(graph: onnx.GraphProto, tokens: str) -> set[int]:
    """The numbers that a graph compares its input `tokens` with."""
    constants = constants_of(graph)
    names = {name for node in graph.node if node.op_type == "Equal" and tokens in node.input for name in node.input}
    single = [constants[name] for name in names & constants.keys() if math.prod(constants[name].dims) == 1]
    return {int(numpy_helper.to_array(tensor).item()) for tensor in single}

"""Reads from the graphs of a multimodal package which encoder makes which features, and which tokens they replace.

The graphs are asked first and the configurations second; where both speak and differ, that is an error. Knows no
session, and no picture.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from olive_ext.errors import ModelError, listed
from olive_ext.model.attention import graph_inputs, tensor_spec
from olive_ext.model.components import width_fits
from olive_ext.model.media_types import (
    MEDIA_PARTS,
    PLACEHOLDER_KEYS,
    MediaEncoderSpec,
    MediaSpec,
    Modality,
    modality_of,
)
from olive_ext.model.types import DecoderSpec, EmbeddingSpec, GraphFiles, Role, TensorSpec

Configs = tuple[Mapping[str, Any], Mapping[str, Any]]
"""genai_config.json's `model` and config.json; each may be empty."""


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
    features = {modality_of(tensor.name): tensor for tensor in interface.features}
    found = []
    for part, (files, proto) in encoders.items():
        modality = MEDIA_PARTS[part]
        if modality not in features:
            raise ModelError(
                f"'{files.graph}' encodes an {modality.value}; the embedding graph takes {_names(interface.features)}"
            )
        output = _output(files, proto, features[modality])
        inputs = tuple(graph_inputs(proto.graph).values())
        placeholder = _placeholder(modality, graph.graph, features[modality], interface, configs)
        found.append(MediaEncoderSpec(modality, placeholder, part, files, inputs, output, features[modality]))
    positions = next((entry.tensor for entry in spec.inputs if entry.role is Role.POSITION_IDS), None)
    notes = _faults([proto for _, proto in encoders.values()], configs)
    return MediaSpec(tuple(found), positions is not None and len(positions.shape) == 3, notes)


def _faults(encoders: Iterable[onnx.ModelProto], configs: Configs) -> tuple[str, ...]:
    """What exporters are known to make otherwise than the original model."""
    genai, config = configs
    kind = str(genai.get("type") or config.get("model_type") or "")
    text = config.get("text_config", {})
    found = []
    if kind.startswith("gemma3") or text.get("use_bidirectional_attention") in ("vision", True, "all"):
        found.append(
            "a picture's tokens see each other in the original model; this decoder takes no token types, so that each "
            "sees those before it: its numbers behind pictures are not the original's"
        )
    weights = {tensor.name for proto in encoders for tensor in proto.graph.initializer}
    norm = min((name for name in weights if "post_layernorm" in name), default=None)
    if norm is not None and isinstance(layer := config.get("vision_feature_layer"), int):
        found.append(
            f"the original model takes the features of the vision tower's layer {layer}, before its last norm; this "
            f"encoder ends with '{norm}': its features are not the original's"
        )
    return tuple(found)


def _output(files: GraphFiles, proto: onnx.ModelProto, feature: TensorSpec) -> TensorSpec:
    """The output that is the embedding graph's input: of its name, else the only one of its width and type."""
    outputs = {value.name: tensor_spec(value) for value in proto.graph.output}
    fitting = [tensor for tensor in outputs.values() if width_fits(tensor, feature)]
    named = outputs.get(feature.name)
    if named is not None and named not in fitting:
        raise ModelError(
            f"'{files.graph}' returns '{named.name}' {list(named.shape)}; the embedding graph takes "
            f"{list(feature.shape)}"
        )
    if named is None and len(fitting) != 1:
        found = ", ".join(f"'{tensor.name}' {list(tensor.shape)}" for tensor in outputs.values())
        raise ModelError(
            f"'{files.graph}' returns {found}: not one output of the size {feature.shape[-1]} of the embedding graph's "
            f"'{feature.name}'"
        )
    return named or fitting[0]


def _placeholder(
    modality: Modality,
    graph: onnx.GraphProto,
    feature: TensorSpec,
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
    if len(interface.features) == 1 and len(compared) == 1:
        known[f"the embedding graph {min(compared)}"] = min(compared)
    unmet = [origin for origin, number in known.items() if compared and number not in compared]
    if unmet or len(set(known.values())) > 1:
        told = f"; the embedding graph compares ids with {sorted(compared)}" if unmet else ""
        raise ModelError(f"the token that '{feature.name}' replaces is not clear: {listed(known)}{told}")
    if not known:
        raise ModelError(
            f"the token that '{feature.name}' replaces is unknown: neither does the embedding graph compare the ids "
            f"with one, nor does a configuration have {listed(PLACEHOLDER_KEYS[modality])}"
        )
    return next(iter(known.values()))


def compared_ids(graph: onnx.GraphProto, tokens: str) -> set[int]:
    """The numbers that a graph compares its input `tokens` with."""
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer if _is_number(tensor)}
    for node in graph.node:
        if node.op_type == "Constant":
            value = onnx.helper.get_attribute_value(node.attribute[0])
            constants[node.output[0]] = (
                numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.array(value)
            )
    names = {name for node in graph.node if node.op_type == "Equal" and tokens in node.input for name in node.input}
    return {int(constants[name].item()) for name in names if name in constants and constants[name].size == 1}


def _is_number(tensor: TensorProto) -> bool:
    return list(tensor.dims) in ([], [1])


def _names(tensors: Iterable[TensorSpec]) -> str:
    return listed(f"'{tensor.name}'" for tensor in tensors) or "no features"

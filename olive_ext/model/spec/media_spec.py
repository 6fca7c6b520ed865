"""Reads from the graphs of a multimodal package which encoder makes which features, and which tokens they replace.

The graphs are asked first and the configurations second; where both speak and differ, that is an error. Knows no
session, and no picture.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from olive_ext.errors import ModelError, listed
from olive_ext.model.spec.attention import graph_inputs, tensor_spec
from olive_ext.model.spec.components import width_fits
from olive_ext.model.spec.media_faults import Configs, known_faults
from olive_ext.model.spec.media_types import (
    MEDIA_PARTS,
    PLACEHOLDER_KEYS,
    EmbeddingSpec,
    MediaEncoderSpec,
    MediaSpec,
    Modality,
    modality_of,
)
from olive_ext.model.spec.tensor_names import GATES
from olive_ext.model.types import DecoderSpec, GraphFiles, Role, TensorSpec

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
    _refuse_gates(graph.graph, spec)
    specs = []
    for part, (files, proto) in encoders.items():
        modality = MEDIA_PARTS[part]
        taken = [tensor for tensor in interface.features if modality_of(tensor.name) is modality]
        if not taken:
            raise ModelError(
                f"'{files.graph}' encodes an {modality.value}; the embedding graph takes {_names(interface.features)}"
            )
        outputs, inputs = _outputs(files, proto, taken), tuple(graph_inputs(proto.graph).values())
        placeholder = _placeholder(modality, graph.graph, taken, interface, configs)
        real = _real_rows(proto, outputs[0])
        specs.append(MediaEncoderSpec(modality, placeholder, part, files, inputs, outputs, tuple(taken), real))
    positions = next((entry.tensor for entry in spec.inputs if entry.role is Role.POSITION_IDS), None)
    notes = known_faults({one.part: (encoders[one.part][1], one.outputs) for one in specs}, configs, spec.item_masks)
    return MediaSpec(tuple(specs), positions is not None and len(positions.shape) == 3, notes)


def _refuse_gates(graph: onnx.GraphProto, spec: DecoderSpec) -> None:
    """Raises `ModelError` for switches of adapters. The graph sets them by the tokens of a step, and they are right for
    text; where a request has pictures they are on for all of it, text before them and answers, too."""
    gates = sorted(GATES & {*spec.embeddings, *(value.name for value in graph.output)})
    if gates and gates[0] in spec.embeddings:
        raise ModelError(
            f"the decoder's '{gates[0]}' switches an adapter for a whole request, and the embedding graph sets it by "
            "the tokens of one step: this is not run"
        )
    if gates:
        raise ModelError(
            f"the embedding graph returns '{gates[0]}', which switches an adapter of the decoder; the decoder takes no "
            "such input, so that the adapter is missing from it"
        )


def _outputs(files: GraphFiles, proto: onnx.ModelProto, features: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The outputs that are these inputs of the embedding graph; several are told by their names alone."""
    returned = [value.name for value in proto.graph.output]
    missing = [feature.name for feature in features if feature.name not in returned]
    if len(features) > 1 and missing:
        raise ModelError(
            f"the embedding graph takes {_names(features)}; '{files.graph}' returns {listed(returned)}: not "
            f"'{missing[0]}'"
        )
    return tuple(_output(files, proto, feature) for feature in features)


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
        listing = ", ".join(f"'{tensor.name}' {list(tensor.shape)}" for tensor in outputs.values())
        raise ModelError(
            f"'{files.graph}' returns {listing}: not one output of the size {feature.shape[-1]} of the embedding "
            f"graph's '{feature.name}'"
        )
    return named or fitting[0]


def _real_rows(proto: onnx.ModelProto, output: TensorSpec) -> TensorSpec | None:
    """The output beside features [B, rows, size] that tells padding: a mask, or the number of others."""
    others = [tensor_spec(value) for value in proto.graph.output if value.name != output.name]
    told = [tensor for tensor in others if tensor.elem_type in _WHOLE and len(tensor.shape) in (1, 2)]
    named = [tensor for tensor in told if any(word in tensor.name for word in ("mask", "length", "size"))]
    return named[0] if named and len(output.shape) == 3 else None


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
        told = f"; the embedding graph compares ids with {sorted(compared)}" if unmet else ""
        raise ModelError(f"the token that '{name}' replaces is not clear: {listed(known)}{told}", code="missing")
    if not known:
        raise ModelError(
            f"the token that '{name}' replaces is unknown: neither does the embedding graph compare the ids "
            f"with one, nor does a configuration have {listed(PLACEHOLDER_KEYS[modality])}",
            code="missing",
        )
    return next(iter(known.values()))


def compared_ids(graph: onnx.GraphProto, tokens: str) -> set[int]:
    """The numbers that a graph compares its input `tokens` with."""
    constants = {
        tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer if list(tensor.dims) in ([], [1])
    }
    for node in graph.node:
        if node.op_type == "Constant":
            value = onnx.helper.get_attribute_value(node.attribute[0])
            constants[node.output[0]] = (
                numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.array(value)
            )
    names = {name for node in graph.node if node.op_type == "Equal" and tokens in node.input for name in node.input}
    return {int(constants[name].item()) for name in names if name in constants and constants[name].size == 1}


def _names(tensors: Iterable[TensorSpec]) -> str:
    return listed(f"'{tensor.name}'" for tensor in tensors) or "no features"

"""Reads what a decoder takes from an encoder, how an encoder's graph gives it, and which graph of a model does what.
The graphs themselves come first, then the names that a user, a configuration or an exporter gives them; where both say
something and differ, that is an error. Knows no session and no folder's layout."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import onnx
from onnx import TensorProto

from olive_ext.errors import MismatchError, ModelError, listed
from olive_ext.model.spec import tensor_names
from olive_ext.model.spec.attention import graph_inputs, step_scale
from olive_ext.model.spec.tensor_names import EMBEDDING_NAMES, STATES_OUTPUTS, Outline
from olive_ext.model.types import (
    MEDIA_PARTS,
    CrossInputs,
    Modality,
    NamedGraph,
    Role,
    SourceKind,
    TensorSpec,
    modalities_of,
    modality_of,
)

_FEATURES = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16})
TOKEN_TYPES = frozenset({TensorProto.INT64, TensorProto.INT32})


@dataclass(frozen=True)
class FirstStepSpec:
    """A graph that computes cross-attention KV from the encoder's hidden states, and its inputs."""

    outputs: Mapping[str, str]
    """The decoder's input -> this graph's output."""

    states: str
    masks: tuple[TensorSpec, ...] = ()
    tokens: tuple[TensorSpec, ...] = ()
    """Token ids [B, S], of which it reads the shape alone."""


@dataclass(frozen=True)
class EncoderSpec:
    """How a source becomes the decoder's `CrossInputs`."""

    kind: SourceKind
    source: TensorSpec
    """The encoder's input, [B, S] or [B, ...features]."""

    mask: TensorSpec | None
    """The encoder's input with a 1 for each token of the source."""

    states: str
    """The encoder's output of hidden states."""

    outputs: Mapping[str, str]
    """The decoder's input -> the encoder's output."""

    masks: tuple[TensorSpec, ...] = ()
    first_step: FirstStepSpec | None = None
    takes_padding: bool = False
    """Whether masks hide padding from all that reads a source, and no rounding shows it."""

    unused: tuple[TensorSpec, ...] = ()
    """Cross-attention KV that no graph computes: the decoder computes it from the hidden states."""


def read_cross_inputs(inputs: Mapping[str, TensorSpec], model_config: Mapping[str, Any]) -> CrossInputs:
    """The decoder's `inputs` that an encoder gives. `model_config` is genai_config.json's `model`, or empty."""
    names = tensor_names.configured_names(
        tensor_names.pairs("cross_past_{}_names", "cross_present_{}_names"),
        model_config.get("decoder", {}).get("inputs", {}),
        model_config.get("encoder", {}).get("outputs", {}),
    )
    kv: dict[str, TensorSpec] = {}
    for name, _, present in tensor_names.by_layer(inputs, (*names, *tensor_names.CROSS_KV_NAMES)):
        if inputs[name] not in kv.values():
            kv[present] = inputs[name]
    return CrossInputs(
        states=tuple(tensor for name, tensor in inputs.items() if name in tensor_names.STATES_INPUTS),
        masks=tuple(tensor for name, tensor in inputs.items() if name in tensor_names.CROSS_MASKS),
        kv=kv,
    )


def read_encoder(
    model: onnx.ModelProto,
    cross: CrossInputs,
    model_config: Mapping[str, Any],
    first_step: onnx.ModelProto | None = None,
) -> EncoderSpec:
    """How the encoder `model` gives what a decoder takes. `first_step` is a decoder that returns cross-attention KV, if
    any. Raises `ModelError` where the encoder is not understood, or does not give all of it."""
    inputs, outputs = graph_inputs(model.graph), {value.name for value in model.graph.output}
    taken = read_source(model, model_config)
    configured = _configured(model_config, "outputs", ("encoder_hidden_states",))
    states = _first(outputs, (*configured, *tensor_names.STATES_OUTPUTS))
    if taken is None or states is None:
        raise ModelError(
            f"the encoder takes {_listed(inputs)} and returns {_listed(outputs)}; one of "
            f"{_listed(tensor_names.SOURCE_INPUTS)} and one of {_listed(tensor_names.STATES_OUTPUTS)} is needed"
        )
    kind, source = taken
    mask = inputs.get(_first(inputs, tensor_names.SOURCE_MASKS) or "") if kind is SourceKind.TOKENS else None
    known = {source.name, *([mask.name] if mask is not None else [])}
    if others := sorted(inputs.keys() - known):
        raise ModelError(f"input '{others[0]}' of the encoder is not understood; it takes {_listed(inputs)}")
    returned = {value.name for value in first_step.graph.output} - outputs if first_step is not None else set()
    computed = {tensor.name: present for present, tensor in cross.kv.items() if present in returned}
    unused = {present: tensor for present, tensor in cross.kv.items() if present not in outputs | returned}
    if unused and not cross.states:
        present, tensor = next(iter(unused.items()))
        raise ModelError(
            f"the decoder takes '{tensor.name}'; neither the encoder nor a decoder without a past returns '{present}'"
        )
    return EncoderSpec(
        kind=kind,
        source=source,
        mask=mask,
        states=states,
        outputs={tensor.name: states for tensor in cross.states}
        | {tensor.name: present for present, tensor in cross.kv.items() if present in outputs},
        masks=cross.masks,
        takes_padding=bool(mask is not None and cross.masks and not step_scale(model.graph.node)),
        first_step=_first_step(first_step, computed) if computed and first_step is not None else None,
        unused=tuple(unused.values()),
    )


def read_source(model: onnx.ModelProto, model_config: Mapping[str, Any]) -> tuple[SourceKind, TensorSpec] | None:
    """What the encoder `model` takes, and its input; None where no input has a known name. Raises `ModelError` for one
    that holds neither ids nor features."""
    inputs = graph_inputs(model.graph)
    configured = _configured(model_config, "inputs", ("audio_features", "input_ids"))
    name = _first(inputs, (*configured, *tensor_names.SOURCE_INPUTS))
    if name is None:
        return None
    source = inputs[name]
    if source.elem_type in TOKEN_TYPES and len(source.shape) == 2:
        return SourceKind.TOKENS, source
    if source.elem_type in _FEATURES:
        return SourceKind.FEATURES, source
    kind = TensorProto.DataType.Name(source.elem_type)
    raise ModelError(f"input '{name}' of the encoder is {kind} {list(source.shape)}, neither ids nor features")


def _first_step(model: onnx.ModelProto, outputs: Mapping[str, str]) -> FirstStepSpec:
    inputs = graph_inputs(model.graph)
    states = _first(inputs, sorted(tensor_names.STATES_INPUTS))
    others = sorted(inputs.keys() - {states, *tensor_names.CROSS_MASKS, *tensor_names.ROLE_NAMES[Role.INPUT_IDS]})
    if states is None or others:
        raise ModelError(
            f"the decoder without a past computes cross KV from {_listed(inputs)}, which is not understood"
        )
    return FirstStepSpec(
        outputs,
        states,
        masks=tuple(tensor for name, tensor in inputs.items() if name in tensor_names.CROSS_MASKS),
        tokens=tuple(tensor for name, tensor in inputs.items() if name in tensor_names.ROLE_NAMES[Role.INPUT_IDS]),
    )


def _configured(model_config: Mapping[str, Any], side: str, keys: Iterable[str]) -> list[str]:
    written = model_config.get("encoder", {}).get(side, {})
    return [written[key] for key in keys if key in written]


def _first(names: Container[str], wanted: Iterable[str]) -> str | None:
    return next((name for name in wanted if name in names), None)


def _listed(names: Iterable[str]) -> str:
    return listed(f"'{name}'" for name in names)


_PARTS = {modality: part for part, modality in MEDIA_PARTS.items()}


class Part(NamedTuple):
    """What a graph does for a decoder, and how its interface shows that."""

    name: str
    why: str


def find_parts(decoder: Outline, others: Mapping[Path, Outline]) -> dict[Path, Part]:
    """What each of `others` does for `decoder`, for those whose graphs show it."""
    parts: dict[Path, Part] = {}
    for file, graph in others.items():
        made = EMBEDDING_NAMES & decoder.inputs.keys() & graph.outputs.keys()
        if made and not graph.has_logits:
            parts[file] = Part("embedding", f"it returns '{min(made)}', which the decoder takes")
    features = [
        tensor
        for file in parts
        for tensor in others[file].inputs.values()
        if len(tensor.shape) == 2 and tensor.elem_type in (1, 10, 11, 16)  # of floats
    ]
    for file, graph in others.items():
        if file not in parts and (feature := _feature_of(graph, features)) is not None:
            part = _PARTS[modality_of(feature.name)]
            parts[file] = Part(part, f"it returns what the embedding graph takes as '{feature.name}'")
    cross = read_cross_inputs(decoder.inputs, {})
    for file, graph in others.items():
        shared = graph.outputs.keys() & {*STATES_OUTPUTS, *cross.kv}
        if cross and shared and file not in parts:
            name = "first_step" if graph.has_logits else "encoder"
            parts[file] = Part(name, f"it returns '{min(shared)}', which the decoder's attention takes")
    return parts


def settle(named: Mapping[str, NamedGraph], parts: Mapping[Path, Part]) -> dict[str, NamedGraph]:
    """The graph of each part: those that are `named`, and those that the graphs show. Raises `ModelError` where a name
    and the graphs contradict each other, or where two unnamed graphs do the same."""
    for part, (file, rule) in named.items():
        real = parts.get(file)
        if real is not None and real.name != part:
            raise ModelError(f"by {rule} '{file}' is the part '{part}'; by the graphs it is '{real.name}': {real.why}")
    settled = dict(named)
    for file, real in parts.items():
        if real.name in named:
            continue
        if real.name in settled:
            raise MismatchError(
                f"both '{settled[real.name][0]}' and '{file}' are '{real.name}' by the graphs: name one in 'components'"
            )
        settled[real.name] = (file, real.why)
    return settled


def _feature_of(graph: Outline, features: list[TensorSpec]) -> TensorSpec | None:
    """The embedding graph's input that `graph` makes: the one of its output's name; else the only one of an output's
    size whose modality is that of the graph's own inputs, by their names."""
    named = [feature for feature in features if feature.name in graph.outputs]
    if named or graph.has_logits:
        return named[0] if named else None
    meant = {modality for name in graph.inputs for modality in modalities_of(name)} or set(Modality)
    fitting = [
        feature
        for feature in features
        if meant.intersection(modalities_of(feature.name))
        and any(width_fits(output, feature) for output in graph.outputs.values())
    ]
    return fitting[0] if len(fitting) == 1 else None


def width_fits(tensor: TensorSpec, feature: TensorSpec) -> bool:
    """Whether an encoder's output may be the embedding graph's input `feature`, by its type and last axis."""
    width = tensor.shape[-1] if tensor.shape else None
    is_width = width == feature.shape[-1] or isinstance(width, str)
    return len(tensor.shape) in (2, 3) and tensor.elem_type == feature.elem_type and is_width

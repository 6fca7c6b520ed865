"""Reads what a decoder takes of an encoder, and how an encoder's graph gives it. Knows no session and no files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import TensorProto

from olive_ext.errors import ModelError, listed
from olive_ext.model.spec import tensor_names
from olive_ext.model.spec.attention import graph_inputs
from olive_ext.model.types import CrossInputs, Role, SourceKind, TensorSpec

_FEATURES = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16})
TOKEN_TYPES = frozenset({TensorProto.INT64, TensorProto.INT32})


@dataclass(frozen=True)
class FirstStepSpec:
    """A graph that computes cross KV from the encoder's hidden states, and its inputs."""

    outputs: Mapping[str, str]
    """The decoder's input -> this graph's output."""

    states: str
    masks: tuple[TensorSpec, ...] = ()
    tokens: tuple[TensorSpec, ...] = ()
    """Token ids [B, S], whose shape it reads."""


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
    unused: tuple[TensorSpec, ...] = ()
    """Cross KV that nothing computes: the decoder does, from the hidden states; it is given none."""


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
    """How the encoder `model` gives what a decoder takes. `first_step` is a decoder that returns cross KV, if any.

    Raises `ModelError` where the encoder is not understood, or does not give all of it.
    """
    inputs, outputs = graph_inputs(model.graph), {value.name for value in model.graph.output}
    section = model_config.get("encoder", {})
    source = _source(inputs, section)
    states = _first(
        outputs, (*_configured(section, "outputs", ("encoder_hidden_states",)), *tensor_names.STATES_OUTPUTS)
    )
    if source is None or states is None:
        raise ModelError(
            f"the encoder takes {_listed(inputs)} and returns {_listed(outputs)}; one of "
            f"{_listed(tensor_names.SOURCE_INPUTS)} and one of {_listed(tensor_names.STATES_OUTPUTS)} is needed"
        )
    kind = _kind(inputs[source])
    mask = inputs.get(_first(inputs, tensor_names.SOURCE_MASKS) or "") if kind is SourceKind.TOKENS else None
    known = {source, *([mask.name] if mask is not None else [])}
    if others := sorted(inputs.keys() - known):
        raise ModelError(f"input '{others[0]}' of the encoder is not understood; it takes {_listed(inputs)}")
    returned = {value.name for value in first_step.graph.output} - outputs if first_step is not None else set()
    computed = {tensor.name: present for present, tensor in cross.kv.items() if present in returned}
    return EncoderSpec(
        kind=kind,
        source=inputs[source],
        mask=mask,
        states=states,
        outputs={tensor.name: states for tensor in cross.states}
        | {tensor.name: present for present, tensor in cross.kv.items() if present in outputs},
        masks=cross.masks,
        first_step=_first_step(first_step, computed) if computed and first_step is not None else None,
        unused=_unused(cross, outputs | returned),
    )


def read_source(model: onnx.ModelProto, model_config: Mapping[str, Any]) -> tuple[SourceKind, TensorSpec] | None:
    """What the encoder `model` takes, and its input; None where that is not understood."""
    inputs = graph_inputs(model.graph)
    source = _source(inputs, model_config.get("encoder", {}))
    return None if source is None else (_kind(inputs[source]), inputs[source])


def _source(inputs: Iterable[str], section: Mapping[str, Any]) -> str | None:
    configured = _configured(section, "inputs", ("audio_features", "input_ids"))
    return _first(inputs, (*configured, *tensor_names.SOURCE_INPUTS))


def _unused(cross: CrossInputs, outputs: set[str]) -> tuple[TensorSpec, ...]:
    """Cross KV that is none of `outputs`. Raises `ModelError` where the decoder has no hidden states to compute it."""
    unused = {present: tensor for present, tensor in cross.kv.items() if present not in outputs}
    if unused and not cross.states:
        present, tensor = next(iter(unused.items()))
        raise ModelError(
            f"the decoder takes '{tensor.name}'; neither the encoder nor a decoder without a past returns '{present}'"
        )
    return tuple(unused.values())


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


def _kind(source: TensorSpec) -> SourceKind:
    if source.elem_type in TOKEN_TYPES and len(source.shape) == 2:
        return SourceKind.TOKENS
    if source.elem_type in _FEATURES:
        return SourceKind.FEATURES
    name = TensorProto.DataType.Name(source.elem_type)
    raise ModelError(f"input '{source.name}' of the encoder is {name} {list(source.shape)}, neither ids nor features")


def _configured(section: Mapping[str, Any], side: str, keys: Iterable[str]) -> list[str]:
    written = section.get(side, {})
    return [written[key] for key in keys if key in written]


def _first(names: Iterable[str], wanted: Iterable[str]) -> str | None:
    there = set(names)
    return next((name for name in wanted if name in there), None)


def _listed(names: Iterable[str]) -> str:
    return listed(f"'{name}'" for name in names)

"""The settings with which Olive makes a mended model again, ready to paste into a recipe, and what they cannot say.

Knows the parameters of Olive 0.13's passes by name; imports no Olive. Names of nodes are the float graph's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

from olive_ext.graph.nodes import attribute
from olive_ext.plugins.diagnose.remedy.pairing import Target
from olive_ext.plugins.diagnose.remedy.precision import PackedWeight, Precision
from olive_ext.plugins.diagnose.remedy.sources import Sources

QUANTIZATION = "OnnxBlockWiseRtnQuantization"

_WEIGHT = {"MatMul": 1, "Gather": 0}
"""By operator that the pass quantizes the input that is the weight."""


@dataclass(frozen=True)
class OliveSettings:
    """Passes behind the float ONNX model, and behind the checkpoint; what they leave open, one sentence each."""

    passes: dict[str, dict[str, Any]]
    """For a recipe whose model is the float ONNX model at this place."""

    builder_passes: dict[str, dict[str, Any]]
    """The same for the checkpoint, with ModelBuilder; empty where it could not have made the model."""

    notes: tuple[str, ...] = field(default=())


def olive_settings(choices: Mapping[Target, Precision | None], sources: Sources) -> OliveSettings:
    """For all targets of a model, each with its new precision or None where it stays."""
    floats = sources.floats.model
    notes = list(_notes(choices, sources))
    kept = [target for target, precision in choices.items() if precision is None]
    passes: dict[str, dict[str, Any]] = {}
    if kept and (form := _form(kept[0])) is not None:
        names = {own.node.name for target in kept for own in target.floats}
        excluded = [name for name in _quantizable(floats) if name not in names]
        passes["quantize"] = {"type": QUANTIZATION, **form, "nodes_to_exclude": excluded}
    by_precision: dict[Precision, list[str]] = {}
    for target, precision in choices.items():
        if precision is not None and precision.bits:
            names_of = by_precision.setdefault(precision, [])
            names_of += [own.node.name for own in target.floats]
    for precision, names_of in by_precision.items():
        own_form = {
            "bits": precision.bits,
            "block_size": precision.block_size,
            "is_symmetric": precision.bits == 8 or bool(passes.get("quantize", {}).get("is_symmetric", True)),
            **_level(next(target for target, one in choices.items() if one == precision)),
        }
        passes[f"int{precision.bits}_b{precision.block_size}"] = {
            "type": QUANTIZATION,
            **own_form,
            "nodes_to_include": names_of,
        }
    return OliveSettings(_named(passes, floats), _named(_with_builder(passes), floats), tuple(notes))


def _named(passes: Mapping[str, dict[str, Any]], floats: onnx.ModelProto) -> dict[str, dict[str, Any]]:
    """The passes, and behind them one that gives the outputs of quantized nodes their names back: Olive's appends the
    bits to those of the graph, too."""
    outputs = {value.name for value in floats.graph.output}
    old_names, new_names = [], []
    for one in passes.values():
        if one["type"] != QUANTIZATION:
            continue
        names = one.get("nodes_to_include") or [*set(_quantizable(floats)).difference(one["nodes_to_exclude"])]
        renamed = [name for node in floats.graph.node if node.name in names for name in node.output if name in outputs]
        old_names += [f"{name}_Q{one['bits']}" for name in renamed]
        new_names += renamed
    if not new_names:
        return dict(passes)
    surgery = {"surgeon": "RenameOutputs", "old_names": old_names, "new_names": new_names}
    return {**passes, "names": {"type": "GraphSurgeries", "surgeries": [surgery]}}


def _with_builder(passes: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """ModelBuilder in the place of the first pass: it quantizes while it exports."""
    first = passes.get("quantize")
    if first is None or first["bits"] != 4:
        return {}
    builder: dict[str, Any] = {
        "type": "ModelBuilder",
        "precision": "int4",
        "int4_block_size": first["block_size"],
        "int4_is_symmetric": first["is_symmetric"],
        "int4_nodes_to_exclude": [name for name in first["nodes_to_exclude"] if name.endswith("/MatMul")],
    }
    if "accuracy_level" in first:
        builder["int4_accuracy_level"] = first["accuracy_level"]
    return {"build": builder, **{name: one for name, one in passes.items() if name != "quantize"}}


def _form(target: Target) -> dict[str, Any] | None:
    """The parameters that made a weight: None where the pass writes no such node."""
    node = target.quantized[0].node
    if node.op_type not in ("MatMulNBits", "GatherBlockQuantized"):
        return None
    zeros = 3
    return {
        "bits": attribute(node, "bits", 4),
        "block_size": attribute(node, "block_size", 0),
        "is_symmetric": not (len(node.input) > zeros and node.input[zeros]),
        **_level(target),
    }


def _level(target: Target) -> dict[str, int]:
    level = attribute(target.quantized[0].node, "accuracy_level", 0)
    return {"accuracy_level": level} if level else {}


def _quantizable(model: onnx.ModelProto) -> Iterator[str]:
    """Names of the nodes whose weight the pass would quantize."""
    initializers = {tensor.name for tensor in model.graph.initializer}
    for node in model.graph.node:
        weight = _WEIGHT.get(node.op_type)
        if weight is not None and node.input[weight] in initializers:
            yield node.name


def _notes(choices: Mapping[Target, Precision | None], sources: Sources) -> Iterator[str]:
    """What the passes cannot say."""
    kept = [target for target, precision in choices.items() if precision is None]
    forms = {tuple((_form(target) or {}).items()) for target in kept}
    if any(_form(target) is None for target in kept):
        yield "experts and weights behind DequantizeLinear are another pass's: exclude the nodes there"
    elif len(forms) > 1:
        yield f"the quantized model has weights of {len(forms)} forms: the pass has the parameters of the first"
    elif kept and not _is_nearest(min(kept, key=lambda target: target.bytes), sources):
        yield (
            "the quantized model's integers are not those of rounding to nearest (k_quant, GPTQ, AWQ, HQQ): give "
            "'nodes_to_exclude' to the pass that made them"
        )
    changed = [target for target, precision in choices.items() if precision is not None]
    for target in changed:
        if any(own.value not in sources.floats.initializers for own in target.floats):
            yield f"'{target.name}' is tied or computed in the float graph: Olive's pass leaves it as it is"
        if target.is_of_experts:
            yield f"'{target.name}' are experts: Olive's pass leaves them as they are"


def _is_nearest(target: Target, sources: Sources) -> bool:
    """Whether a weight's integers are those of ONNX Runtime's own tool."""
    form, own, use = _form(target), target.floats[0], target.quantized[0]
    weight = sources.weight(own)
    if form is None or weight is None or use.node.op_type != "MatMulNBits":
        return True
    name = use.node.input[1]
    precision = Precision(form["bits"], form["block_size"])
    dtype = sources.quantized.numbers(use.node.input[2]).dtype
    packed = PackedWeight(weight, dtype, precision, is_symmetric=form["is_symmetric"])
    made = np.concatenate(list(packed.packed())).reshape(-1)
    if name not in sources.quantized.initializers:
        return False
    return bool(np.mean(made == sources.quantized.numbers(name).reshape(-1)[: len(made)]) > 0.99)

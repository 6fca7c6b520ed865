"""What is damaged in a model's files, whatever texts reach: constants, and the numbers that nodes compute with
(windows, epsilons, scales, heads), held against a reference's graph, or a checkpoint's tensors and config.json.

Knows files; not what runs them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper

from olive_ext.graph.nodes import attribute, layer_of, nested_graphs
from olive_ext.model.files.constants import (
    FLOATS,
    ROTARY,
    Apart,
    Array,
    Constants,
    apart,
    broken,
    checkpoint_floats,
    constants_of,
    distances,
    kind_of,
    meant_others,
    outliers,
    plain_name,
)
from olive_ext.model.files.package_files import json_object
from olive_ext.model.spec.checkpoint import entries, read_length
from olive_ext.model.types import ModelFiles

_HEADS = ("num_heads", "q_num_heads", "kv_num_heads")
_FREE = ("epsilon", "softcap", *_HEADS)
"""Attributes that mean the same whatever else a node is given."""

_DECIDING = (
    *_FREE, "local_window_size", "scale", "do_rotary", "rotary_interleaved", "interleaved", "is_causal",
    "unidirectional", "smooth_softmax", "alpha", "beta", "approximate", "p", "k", "activation", "activation_type",
    "activation_alpha", "activation_beta", "swiglu_limit", "normalize_routing_weights", "update_rule",
)  # fmt: skip
"""Attributes that decide results. Others say how numbers are stored, or follow from shapes."""

_ABSENT: Mapping[str, Any] = {"softcap": 0.0, "scale": 0.0, "local_window_size": -1, "epsilon": 1e-5}
"""Values of attributes that are left out, of others 0. An epsilon is ONNX's; ONNX Runtime's operators "Skip..." have
1e-12."""

_ATTENTIONS = ("GroupQueryAttention", "MultiHeadAttention", "PagedAttention")
_ATTENTION_BIAS = 10
"""GroupQueryAttention's input that may hold a window's mask."""

_SCALAR_READERS = ("Add", "Sub", "Mul", "Div", "Pow", "Clip", "Min", "Max", "TopK")
_LARGE = 6e4
"""Numbers beyond stand for infinity in masks: each type of floats has its own."""

_BASES = ("rope_theta", "rope_local_base_freq", "rotary_emb_base")


def damage(model: ModelFiles, reference: ModelFiles | None) -> dict[str, str]:
    """What of a model's constants texts need not show, by name: rows that are not the reference's, numbers that are
    none, a single vector that is another or product that lies farther from the float one than rounding puts any; and
    nodes that compute with other numbers. The reference is an ONNX model, a checkpoint, or not on disk. Raises
    `ModelError`."""
    told: dict[str, str] = {}
    graphs = {"": model.decoder, **{part: one.graph for part, one in model.companions.items()}}
    floats, config, others = {}, {}, {}
    if reference is not None and reference.decoder.suffix == ".onnx":
        others = {"": reference.decoder, **{part: one.graph for part, one in reference.companions.items()}}
    elif reference is not None:
        written = reference.directory / "config.json"
        floats, config = checkpoint_floats(reference.directory), json_object(written) if written.is_file() else {}
    for part, graph in graphs.items():
        own, other = constants_of(graph), constants_of(others[part]) if part in others else None
        constants, named = own.floats(), {}
        if other is not None:
            known, named = _renamed(other.floats(), constants), differing_numbers(other, own)
        else:
            known = floats
            if config and not part:
                known, named = floats | rotary_tables(config, constants), numbers_against(config, own.model)
        far = {} if other is None else outliers(distances(other, own))
        found = hidden(apart(known, constants), far, constants) | broken(known, constants) | named
        told |= {f"{name}{f', {part}' if part else ''}": how for name, how in found.items()}
    return told


def hidden(others: Mapping[str, Apart], far: Mapping[str, str], constants: Mapping[str, Array]) -> dict[str, str]:
    """Of constants that are `others`, and products that are `far` from their float ones, those that may be damage which
    no text shows. What is another as a whole, in half of its numbers or more, is reached by any text. Several such are
    what rotations, smoothing and folded norms make, and so is a matrix alone, as a folded multiplier's: these compute
    the same."""
    whole = {name for name, what in others.items() if not ROTARY.search(name) and 2 * what.share >= 1}
    is_meant = len(whole) + len(far) > 1
    meant = whole if is_meant else {name for name in whole if constants[name].ndim > 1}
    told = {name: what.told(constants[name]) for name, what in others.items() if name not in meant}
    return told if is_meant else {**told, **far}


def _renamed(reference: dict[str, Array], model: Mapping[str, Array]) -> dict[str, Array]:
    """The reference's constants with its rotary tables under the names of the model's: by use, width and order, where
    both have as many that have no name in common."""
    unpaired = [
        {name: one for name, one in own.items() if name not in other and one.ndim == 2 and ROTARY.search(name)}
        for own, other in ((reference, model), (model, reference))
    ]
    uses = [sorted((_turn(name), one.shape[1]) for name, one in own.items()) for own in unpaired]
    if uses[0] != uses[1]:
        return reference
    in_order = (sorted(own, key=lambda name: (_turn(name), own[name].shape[1])) for own in unpaired)
    names = dict(zip(*in_order, strict=True))
    return {names.get(name, name): one for name, one in reference.items()}


def _turn(name: str) -> str:
    match = ROTARY.search(name)
    return "" if match is None else match[2]


def rotary_tables(config: Mapping[str, Any], constants: Mapping[str, Array]) -> dict[str, Array]:
    """The tables of rotary positions by config.json under the names that the model has them by; none where positions
    are scaled, and of tables of another width than the heads'."""
    text = config.get("text_config", config)
    ropes = [*entries({key: text.get(key) for key in ("rope_parameters", "rope_scaling")})]
    bases = [float(rope[key]) for rope in (text, *ropes) for key in _BASES if rope.get(key)]
    size = text.get("head_dim") or text.get("hidden_size", 0) // (text.get("num_attention_heads") or 1)
    shares = {rope.get("partial_rotary_factor") or 1 for rope in (text, *ropes)}
    scaled = {rope.get("rope_type", rope.get("type")) for rope in ropes} - {None, "default", "mrope"}
    tables = {}
    for name, own in constants.items() if bases and not scaled else ():
        half = own.shape[-1] if own.ndim == 2 and ROTARY.search(name) else 0
        if not half or len(own) < 2 or all(half != int(size * share) // 2 for share in shares):
            continue
        turn = np.cos if _turn(name) == "cos" else np.sin
        base = min(bases, key=lambda one: float(np.abs(turn(one ** -(np.arange(half) / half)) - own[1]).max()))
        tables[name] = turn(np.outer(np.arange(len(own)), base ** -(np.arange(half) / half))).astype(np.float32)
    return tables


def differing_numbers(reference: Constants, model: Constants) -> dict[str, str]:
    """Nodes of `model` that compute with other numbers than the reference's, by name: which.

    Nodes pair by name. Where those of a kind have none of the reference's names, as another exporter's, they pair by
    order, or, where there are not as many, a number is another that no node of the reference has; then only what does
    not depend on other nodes is compared.
    """
    told: dict[str, str] = {}
    sizes = {dim.dim_value for value in model.model.graph.input for dim in value.type.tensor_type.shape.dim[3:4]}
    theirs = _by_kind(reference.model)
    for kind, nodes in _by_kind(model.model).items():
        others = theirs.get(kind, [])
        names = Counter(map(_name, others))
        named = {name: node for node in others if names[name := _name(node)] == 1}
        is_named = not named.keys().isdisjoint(map(_name, nodes))
        for index, node in enumerate(nodes):
            pair = others[index : index + 1] if len(others) == len(nodes) else others
            if is_named:
                pair = [named[_name(node)]] if _name(node) in named else []
            is_alike = len(pair) == 1 and _form(pair[0]) == _form(node)
            for name in (_DECIDING if is_named else (*_FREE, "local_window_size")) if is_alike else _FREE:
                own, *known = (_value(one, name, sizes) for one in (node, *pair))
                if known and not any(_is_same(name, own, other) for other in known):
                    told[node.name] = f"has '{name}' {_shown(own)}, the reference's {_shown(known[0])}"
    scalars = _scalars(reference)
    for name, value in _scalars(model).items():
        other = scalars.get(name, value)
        is_mask = min(abs(value), abs(other)) > _LARGE
        if not is_mask and not math.isclose(value, other, rel_tol=2**-7, abs_tol=6e-8):
            told[name] = f"is {value:.6g}, the reference's {other:.6g}"
    return told


def numbers_against(config: Mapping[str, Any], model: onnx.ModelProto) -> dict[str, str]:
    """Norms and attentions that compute with other numbers than config.json says, by name: which. A kind of norms may
    have its epsilon in the checkpoint's code, where others have the one that is written."""
    text = config.get("text_config", config)
    fields = [(key, value) for entry in entries(text) for key, value in entry.items()]
    epsilons = [value for key, value in fields if key.endswith(("eps", "epsilon"))]
    heads = [(key, value) for key, value in fields if key.endswith(("heads", "n_head"))]
    queries = [value for key, value in heads if "key_value" not in key and "kv" not in key]
    caps = [value or 0.0 for key, value in fields if key.startswith("attn") and "softcap" in key]
    windowed = {attribute(node, "local_window_size", -1) for node in _nodes(model)} != {-1}
    told: dict[str, str] = {}
    norms: dict[str, str] = {}
    for kind, nodes in _by_kind(model).items():
        for node in nodes:
            allowed: dict[str, Sequence[Any]] = {"epsilon": epsilons} if kind == "norm" else {}
            if node.op_type in _ATTENTIONS:
                shared = [value for _, value in heads] + [1] * bool(heads)
                allowed = {
                    "num_heads": queries,
                    "kv_num_heads": shared,
                    "softcap": caps,
                    "local_window_size": _windows(text, node, is_some=windowed),
                }
            for name, values in allowed.items():
                own = attribute(node, name, _ABSENT.get(name))
                if own is not None and values and not any(_is_same(name, own, value) for value in values):
                    how = f"has '{name}' {_shown(own)}, config.json {_shown(values[0])}"
                    (norms if kind == "norm" else told)[node.name] = how
    all_norms = [node.name for node in _by_kind(model).get("norm", ())]
    meant = meant_others(all_norms, norms, kind_of) if len(norms) < len(all_norms) else ()
    return told | {name: how for name, how in norms.items() if name not in meant}


def _windows(text: Mapping[str, Any], node: onnx.NodeProto, *, is_some: bool) -> list[int]:
    """The windows that an attention may have by config.json, where some of the graph have one or none has; empty where
    it does not say, and where a mask may hold the window."""
    types, layer, window = text.get("layer_types") or (), layer_of(node.name), text.get("sliding_window", 0) or -1
    has_mask = any(node.input[_ATTENTION_BIAS:][:1])
    if node.op_type != "GroupQueryAttention" or "sliding_window" not in text or has_mask:
        return []
    if layer is not None and layer < len(types):
        return [window] if types[layer] == "sliding_attention" else [-1]
    is_reached = 0 < window < (read_length(text) or 0)
    is_everywhere = text.get("use_sliding_window", True) and "max_window_layers" not in text
    return [window] if is_reached and is_everywhere and not is_some else [window, -1]


def _by_kind(model: onnx.ModelProto) -> dict[str, list[onnx.NodeProto]]:
    """Nodes with deciding attributes by their operators; those with an epsilon are one kind."""
    kinds: dict[str, list[onnx.NodeProto]] = {}
    for node in _nodes(model):
        names = {entry.name for entry in node.attribute}
        if not names.isdisjoint(_DECIDING):
            kinds.setdefault("norm" if "epsilon" in names else node.op_type.replace("QMoE", "MoE"), []).append(node)
    return kinds


def _nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    yield from chain(model.graph.node, *(body.node for body in nested_graphs(model.graph.node)))


def _name(node: onnx.NodeProto) -> str:
    return plain_name(node.name).replace("QMoE", "MoE")


def _form(node: onnx.NodeProto) -> tuple[str, list[bool]]:
    """A node's operator and which inputs it has; of experts' no inputs, which are others where quantized."""
    operator = node.op_type.replace("QMoE", "MoE")
    return operator, [bool(name) for name in node.input] if operator != "MoE" else []


def _value(node: onnx.NodeProto, name: str, sizes: set[int]) -> Any:
    """A node's number; 0 for a scale that is what attentions of heads of `sizes` have by themselves."""
    absent = 1e-12 if name == "epsilon" and node.op_type.startswith("Skip") else _ABSENT.get(name, 0)
    value = attribute(node, name, absent)
    return 0.0 if name == "scale" and any(size and _is_same(name, value, size**-0.5) for size in sizes) else value


def _is_same(name: str, one: Any, other: Any) -> bool:
    if name in _HEADS and 0 in (one, other):  # it follows from shapes
        return True
    if isinstance(one, float) or isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-3)
    return bool(one == other)


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else value.decode() if isinstance(value, bytes) else str(value)


def _scalars(constants: Constants) -> dict[str, float]:
    """Single numbers (an epsilon, a cap, a multiplier, the number of experts) by the node and the input that read them,
    as far as no other node has that name, or by their own as in `Constants.floats`."""
    made = {
        node.output[0]: attribute(node, "value", None) for node in _nodes(constants.model) if node.op_type == "Constant"
    }
    tensors = {name: one for name, one in {**constants.initializers, **made}.items() if one is not None}
    keys = {name: key for key, name in constants.float_names.items()}
    readers = [node for node in _nodes(constants.model) if node.op_type in _SCALAR_READERS]
    names, scalars = Counter(plain_name(node.name) for node in readers), {}
    reads = ((node, index, value) for node in readers for index, value in enumerate(node.input))
    for node, index, value in reads:
        is_single = value in tensors and math.prod(tensors[value].dims) == 1
        is_number = is_single and (tensors[value].data_type in FLOATS or node.op_type == "TopK")
        if is_number and (value in keys or names[plain_name(node.name)] == 1):
            array = constants.numbers(value) if value not in made else onnx.numpy_helper.to_array(tensors[value])
            scalars[keys.get(value, f"{plain_name(node.name)}, input {index}")] = float(array.reshape(-1)[0])
    return scalars

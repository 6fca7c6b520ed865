"""The numbers with which nodes compute (windows, epsilons, scales, heads), and what nodes read, held against a
reference's graph or config.json.

Knows graphs as files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain, permutations, repeat
from operator import gt
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto

from olive_ext.graph.nodes import attribute, layer_of, reads
from olive_ext.model.files.constants import (
    FLOATS,
    MOST_SIZES,
    Constants,
    graph_nodes,
    is_one,
    kind_of,
    meant_others,
    plain_name,
)
from olive_ext.model.spec.checkpoint import entries, read_length

_FREE = ("epsilon", "softcap", "num_heads", "kv_num_heads")
"""Attributes that mean the same whatever inputs a node has, and whoever exported it."""

_BY_NAME = (
    "local_window_size", "scale", "smooth_softmax", "alpha", "beta", "approximate", "p", "k", "activation",
    "activation_type", "activation_alpha", "activation_beta", "swiglu_limit", "normalize_routing_weights",
    "update_rule",
)  # fmt: skip
"""Attributes that mean the same in two nodes of one name: another exporter may scale queries elsewhere."""

_BY_FORM = ("do_rotary", "rotary_interleaved", "interleaved", "is_causal", "unidirectional")
"""Attributes that mean the same in two nodes of one name with the same inputs."""

_LIMITS = ("local_window_size", "softcap", "swiglu_limit")
"""Attributes that texts need not show: few numbers are as large, and few tokens as far apart. All others decide every
position: weights in another order, or scaled, may have others."""

_ABSENT: Mapping[str, Any] = {
    "softcap": 0.0, "scale": 0.0, "local_window_size": -1, "epsilon": 1e-5, "activation_alpha": 1.0, "alpha": 1.0,
    "beta": 1.0, "k": 1, "p": 2, "activation": b"none", "activation_type": b"relu", "approximate": b"none",
    "update_rule": b"gated_delta", "GatedRMSNorm activation": b"silu", "PagedAttention is_causal": 1,
    "SkipLayerNormalization epsilon": 1e-12, "SkipSimplifiedLayerNormalization epsilon": 1e-12,
    "EmbedLayerNormalization epsilon": 1e-12, "LeakyRelu alpha": 0.01, "QuickGelu alpha": 1.702,
}  # fmt: skip
"""The defaults of attributes, or of one operator's; 0 for all others. ONNX Runtime writes them out when it saves."""

_EXPERTS = {
    "k": ("experts_per_tok", "experts_per_token", "top_k"),
    "swiglu_limit": ("swiglu_limit",),
    "normalize_routing_weights": ("norm_topk_prob",),
}
"""Attributes of experts, by the ends of the keys in config.json."""

_NORMS = ("LayerNormalization", "RMSNormalization", "RMSNorm")
_ATTENTIONS = ("GroupQueryAttention", "MultiHeadAttention", "PagedAttention", "Attention")
BASES = ("rope_theta", "rope_local_base_freq", "rotary_emb_base")
_TURNS = (*BASES, "partial_rotary_factor")
"""The keys in config.json of how positions turn."""

_SCALED_TURNS = (
    "factor", "long_factor", "short_factor", "low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast",
    "beta_slow", "mscale", "mscale_all_dim", "original_max_position_embeddings",
)  # fmt: skip
_LIMITING_KEY = re.compile(r"softcap|logit_cap|swiglu_limit")
_DECIDING = re.compile(
    rf"{_LIMITING_KEY.pattern}|eps(ilon)?$|multiplier$|_scalar$|logits?_scal|scaling_factor$|topk|experts_per_tok"
)
"""Numbers in config.json with which layers compute."""

_WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""The keys in config.json of the windows that layers have, by the layers' type."""

_BIAS = {"GroupQueryAttention": 10, "MultiHeadAttention": 5, "Attention": 3}
"""The inputs of attentions that may hold a window's mask."""

_FACTORS = {"Mul": (1, 1), "Div": (0, -1)}
"""The power with which a number multiplies what its node computes, by an operator's input."""

_BOUNDING = ("Clip", "Min", "Max")
_LIMITING = ("TopK", "Trilu", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", *_BOUNDING)
"""Operators with integers that decide: experts, windows in masks, the ids of pictures, the farthest position. Masks add
such integers, too."""

_TURNED = {*permutations(("Less", "Greater")), *permutations(("LessOrEqual", "GreaterOrEqual"))}
"""Comparisons that are the same with their inputs in the other order."""

_WITH_INTEGERS = ("Add", "Sub", "Div", "Mod", *_LIMITING)
_SCALAR_READERS = (*_FACTORS, "Pow", *_WITH_INTEGERS)
_TRACED = re.compile(r"_output_\d+( |$)")
"""Values of TorchScript's exporter, whose names are counts within a module."""

_PASSING = ("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "QuantizeLinear", "DequantizeLinear")
_LARGE = 6e4
"""Numbers beyond this stand for infinity in masks: each float type has its own."""


def differing_numbers(
    reference: Constants, model: Constants, longest: int | None = None, *, with_reached: bool = True
) -> dict[str, str]:
    """Nodes of `model` that compute with other numbers than the reference's, by name, with these numbers; those that
    every text reaches only `with_reached`.

    Nodes pair by name, and in order where only counters differ. Those of a kind without a name of the reference's, as
    in another exporter's graph, pair by order. Where the two sides have different numbers of them, a node's numbers
    must be those of some node of the reference. In both cases only attributes that do not depend on other nodes are
    compared.
    """
    findings: dict[str, str] = {}
    sizes = {dim.dim_value for value in model.model.graph.input for dim in value.type.tensor_type.shape.dim[3:4]}
    theirs = _by_kind(reference.model)
    tensors = (constants.model.graph.initializer for constants in (model, reference))
    widths = [{one.name: one.dims[0] for one in own if len(one.dims) == 1} for own in tensors]
    for kind, nodes in _by_kind(model.model).items():
        groups, others = _by_name(nodes), _by_name(theirs.get(kind, []))
        shared = groups.keys() & others.keys()
        rest = [[one for name in own if name not in shared for one in own[name]] for own in (groups, others)]
        for group, known in (*((groups[name], others[name]) for name in groups if name in shared), rest):
            if {one.name for one in group} == {one.name for one in known}:
                group, known = (sorted(own, key=lambda one: str(one.name)) for own in (group, known))
            pairs = [[one] for one in known] if len(known) == len(group) else [known] * len(group)
            for node, pair in zip(group, pairs, strict=True):
                findings |= _unlike(node, pair, sizes, widths, is_named=group is not rest[0], with_reached=with_reached)
    scalars = [_scalars(one, longest) for one in (reference, model)]
    return findings | _differing_scalars(*scalars, with_reached=with_reached)


def _differing_scalars(
    reference: Mapping[str, Scalar], model: Mapping[str, Scalar], *, with_reached: bool
) -> dict[str, str]:
    findings: dict[str, str] = {}
    for name, own in model.items():
        value, other = own.value, reference.get(name, own).value
        products = value**own.power, other ** reference.get(name, own).power  # 8 divides as 0.125 multiplies
        compared = products if own.power and value and other else (value, other)
        is_mask = min(abs(value), abs(other)) > _LARGE
        is_same = is_mask or math.isclose(*compared, rel_tol=2**-7, abs_tol=6e-8)
        if not is_same and (with_reached or not own.is_reached):
            findings[name] = f"is {value:.6g}, the reference's {other:.6g}"
    return findings


def _unlike(
    node: onnx.NodeProto,
    pair: Sequence[onnx.NodeProto],
    sizes: set[int],
    widths: Sequence[Mapping[str, int]],
    *,
    is_named: bool,
    with_reached: bool,
) -> dict[str, str]:
    """The first attribute of a node that no node of `pair` has: its counterpart, or several candidates. The epsilon of
    a norm over more numbers, some of which are zeros, is smaller in proportion."""
    is_alike = len(pair) == 1 and _form(pair[0]) == _form(node)
    names = (*_FREE, *_BY_NAME[: None if is_named else is_alike], *(_BY_FORM if is_named and is_alike else ()))
    names = names if len(pair) == 1 else _FREE if pair else ()
    for name in (key for key in names if with_reached or key in _LIMITS):
        is_said = all(_attribute(one, name) is not None for one in (node, *pair))
        own, *known = (_value(one, name, sizes) for one in (node, *pair))
        is_known = is_said or node.op_type == pair[0].op_type or name in ("epsilon", "softcap")
        over = [max(map(of.get, one.input, repeat(0))) for of, one in zip(widths, (node, pair[0]), strict=True)]
        widened = own * over[0] / over[1] if name == "epsilon" and node.op_type.endswith(_NORMS) and all(over) else own
        is_other = not any(_is_same(one, other) for one in {widened, widened if is_named else own} for other in known)
        if is_known and is_other and not ("heads" in name and 0 in (own, *known)):
            return {node.name: f"has '{name}' {_shown(own)}, the reference's {_shown(known[0])}"}
    return {}


def numbers_against(
    config: Mapping[str, Any], model: onnx.ModelProto, longest: int | None = None, *, with_reached: bool = True
) -> dict[str, str]:
    """Norms, attentions and experts that compute with other numbers than config.json says, by name, with these numbers;
    those that every text reaches only `with_reached`.
    One kind of norms may have its epsilon in the checkpoint's code, where others have the one that is written."""
    text = config.get("text_config", config)
    fields = [(key, value) for entry in entries(text) for key, value in entry.items()]
    epsilons = [value for key, value in fields if key.endswith(("eps", "epsilon")) and isinstance(value, float)]
    size = text.get("hidden_size") or math.inf
    wider = {tensor.dims[0] for tensor in model.graph.initializer if len(tensor.dims) == 1 and tensor.dims[0] > size}
    epsilons += [value * size / width for value in epsilons for width in wider]  # zeros beside the numbers of a norm
    queries = [value for key, value in fields if key.endswith(("attention_heads", "n_head")) and type(value) is int]
    shared = [value for key, value in fields if key.endswith("heads") and type(value) is int]
    caps = [value or 0.0 for key, value in fields if key.startswith("attn") and "cap" in key] or [0.0]
    kinds = _by_kind(model)
    has_windows = any(attribute(node, "local_window_size", -1) > 0 for node in kinds.get("attention", ()))
    findings: dict[str, str] = {}
    for node in chain(*(kinds.get(kind, ()) for kind in ("norm", "attention", "MoE"))):
        allowed: dict[str, Sequence[Any]] = {"epsilon": epsilons}
        if node.op_type.endswith("MoE"):
            allowed = {name: [value for key, value in fields if key.endswith(ends)] for name, ends in _EXPERTS.items()}
        if node.op_type in _ATTENTIONS:
            allowed = {"num_heads": queries, "kv_num_heads": [*shared, 1] if shared else [], "softcap": caps}
            windows = _windows(text, node, longest, has_windows=has_windows)
            allowed |= {"scale": _scales(text), "local_window_size": windows}
        for name in (key for key in allowed if allowed[key] and (with_reached or key in _LIMITS)):
            number, values = _value(node, name, set()), allowed[name]
            if not any(_is_same(number, value) for value in (*values, 0 if "heads" in name else values[0])):
                findings[node.name] = f"has '{name}' {_shown(number)}, config.json {_shown(values[0])}"
    norms = {node.name for node in kinds.get("norm", ())}
    meant = meant_others(norms, norms & findings.keys(), kind_of) if norms - findings.keys() else ()
    return {name: how for name, how in findings.items() if name not in meant}


def differing_settings(
    reference: Mapping[str, Any], model: Mapping[str, Any], longest: int | None = None, *, with_reached: bool = True
) -> dict[str, str]:
    """Layers' windows, rotary settings and numbers by which two checkpoints' config.json differ in a text of `longest`
    positions; numbers that every text reaches only `with_reached`. What neither a file nor its class says is taken to
    be as the other's."""
    read = [_as_read(config) for config in (reference, model)]
    texts = [config.get("text_config", config) for config in read]
    number = _DECIDING if with_reached else _LIMITING_KEY
    known, own = (
        _turns(one, longest)
        | _layers(one, other, longest)
        | {key: _shown(value) for key, value in one.items() if number.search(key)}
        for one, other in (texts, texts[::-1])
    )
    others = [key for key in own if key in known and own[key] != known[key]]
    return {f"config.json, {key}": f"is {own[key]}, the reference's {known[key]}" for key in others}


def _as_read(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config.json in the form, and with the defaults, of transformers' class for it; as it is where it has none."""
    from transformers import CONFIG_MAPPING

    with suppress(Exception):  # a class computes with what is written
        if "auto_map" not in config and config.get("model_type") in CONFIG_MAPPING:
            read: Mapping[str, Any] = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config)).to_dict()
            return read
    return config


def _turns(text: Mapping[str, Any], longest: int | None) -> dict[str, str]:
    """What is said of how positions turn in a text of `longest` positions, by the layers' type where each has its own.
    What scales nothing is left out."""
    whole = {key: text[key] for key in _TURNS if key in text}
    whole |= (text.get("rope_scaling") or {}) | (text.get("rope_parameters") or {})
    kinds = {f" ({kind})": rope for kind, rope in whole.items() if isinstance(rope, Mapping)} or {"": whole}
    turns: dict[str, str] = {}
    for kind, rope in kinds.items():
        scaled = [name for name, _ in scaled_ropes({**text, "rope_parameters": rope, "rope_scaling": None}, longest)]
        turns[f"rope_type{kind}"] = "longrope" if "su" in scaled else ", ".join(scaled) or "none"
        said = {key: rope.get(key) for key in (*_TURNS, *(_SCALED_TURNS if scaled else ()))}
        turns |= {
            f"{key}{kind}": ", ".join(map(_shown, np.ravel(value).astype(float)))
            for key, value in said.items()
            if value is not None
        }
    return turns


def _said_windows(text: Mapping[str, Any]) -> dict[str, Any]:
    """The windows by layers' types, and the layers' "types", as far as they are written."""
    said = {kind: text[key] for kind, key in _WINDOWS.items() if key in text}
    said |= {} if text.get("use_sliding_window", True) else {"sliding_attention": None}
    first, count, types = map(text.get, ("max_window_layers", "num_hidden_layers", "layer_types"))
    if not types and isinstance(first, int) and isinstance(count, int):
        types = ["full_attention" if layer < first else "sliding_attention" for layer in range(count)]
    return said | ({"types": types} if isinstance(types, list) and types else {})


def _layers(text: Mapping[str, Any], other: Mapping[str, Any], longest: int | None) -> dict[str, str]:
    """The windows that layers have in a text of `longest` positions; of each type, where no layer's is written."""
    said = _said_windows(other) | _said_windows(text)
    types = {f"window of layer {layer}": str(kind) for layer, kind in enumerate(said.get("types", ()))}
    most = math.inf if longest is None else longest
    seen = {kind: f"{size} ({kind})" for kind, size in said.items() if isinstance(size, int) and 0 < size < most}
    return {key: seen.get(kind, "none") for key, kind in (types or {_WINDOWS[kind]: kind for kind in _WINDOWS}).items()}


def _scales(text: Mapping[str, Any]) -> list[float]:
    """The scales that attentions may have: left out, folded into the weights, a head's, or a written one. Empty for
    latent attention, and where rotary positions scale as well."""
    size = text.get("head_dim") or text.get("hidden_size", 0) // (text.get("num_attention_heads") or 1)
    if not size or text.get("rope_scaling") or "qk_rope_head_dim" in text or scaled_ropes(text):
        return []
    sizes = [*(text.get(key) for key in ("query_pre_attn_scalar", "global_head_dim")), size]
    written = [value for key, value in text.items() if key.endswith(("attn_multiplier", "attention_multiplier"))]
    return [*(one for one in written if type(one) is float), *(one**-0.5 for one in sizes if one), 0.0, 1.0, 1 / size]


def _windows(text: Mapping[str, Any], node: onnx.NodeProto, longest: int | None, *, has_windows: bool) -> list[int]:
    """The windows that an attention may have by config.json, where some attentions of the graph have one or none has.
    Empty where it does not say, and where a mask may hold the window."""
    said, layer = _said_windows(text), layer_of(node.name)
    types, window = said.get("types", ()), said.get("sliding_attention") or -1
    has_mask = any(node.input[_BIAS["GroupQueryAttention"] :][:1])
    if node.op_type != "GroupQueryAttention" or has_mask or not isinstance(window, int):
        return []
    if "sliding_attention" not in said:  # other keys: "attention_chunk_size", "local_attention", "window_size"
        return [] if any(word in key for key in text for word in ("window", "chunk", "local")) else [-1]
    length = longest or read_length(text) or 0
    window = -1 if window >= length > 0 else window
    if layer is not None and layer < len(types):
        return [window] if types[layer] == "sliding_attention" else [-1]
    is_everywhere = 0 < window < length and "max_window_layers" not in text
    return [window] if is_everywhere and not has_windows else [window, -1]


def _by_kind(model: onnx.ModelProto) -> dict[str, list[onnx.NodeProto]]:
    """Nodes with deciding attributes, by operator; all norms are one kind, and so are all attentions."""
    kinds: dict[str, list[onnx.NodeProto]] = {}
    for node in graph_nodes(model):
        is_deciding = not {entry.name for entry in node.attribute}.isdisjoint((*_FREE, *_BY_NAME, *_BY_FORM))
        kind = "norm" if node.op_type.endswith(_NORMS) else "attention" if node.op_type in _ATTENTIONS else ""
        if kind or is_deciding:
            kinds.setdefault(kind or node.op_type.replace("QMoE", "MoE"), []).append(node)
    return kinds


def _by_name(nodes: Iterable[onnx.NodeProto]) -> dict[str, list[onnx.NodeProto]]:
    named: dict[str, list[onnx.NodeProto]] = {}
    for node in nodes:
        named.setdefault(plain_name(node.name), []).append(node)
    return named


def _form(node: onnx.NodeProto) -> tuple[str, list[int]]:
    """A node's operator and which inputs it has; for experts without inputs, which differ where they are quantized."""
    operator = node.op_type.replace("QMoE", "MoE")
    return operator, [index for index, name in enumerate(node.input) if name and operator != "MoE"]


def _attribute(node: onnx.NodeProto, name: str) -> Any:
    value = attribute(node, name, None)
    return attribute(node, "q_num_heads", None) if value is None and name == "num_heads" else value


def _value(node: onnx.NodeProto, name: str, sizes: set[int]) -> Any:
    """A node's number; 0 for a scale that attentions with heads of `sizes` have by default."""
    absent = _ABSENT.get(f"{node.op_type} {name}", _ABSENT.get(name, 0))
    value = absent if (value := _attribute(node, name)) is None else value
    if name == "smooth_softmax":  # ONNX Runtime writes -1 out where nothing is said, and both mean no
        return max(0, value)
    return 0.0 if name == "scale" and any(size and _is_same(value, size**-0.5) for size in sizes) else value


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, float) or isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-3)
    return bool(one == other)


def _shown(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode()
    return f"{np.float32(value):.6g}" if isinstance(value, float) else str(value)


class Scalar(NamedTuple):
    """A number that a node computes with."""

    value: float
    power: int
    """The power with which it multiplies; 0 where it is no factor."""

    is_reached: bool
    """Whether every text shows it: all but what limits large numbers, chooses experts, or makes masks."""


def _scalars(constants: Constants, longest: int | None) -> dict[str, Scalar]:
    """Single numbers (an epsilon, a cap, a multiplier, the number of experts) by the node and the input that read them,
    or by their own name as in `Constants.floats`. Those of several nodes of one name are in the order of their size."""
    tensors = constants.tensors
    keys = {name: key for key, name in constants.float_names.items()}
    nodes = [*graph_nodes(constants.model)]
    steps = {node.output[1] for node in nodes if node.op_type == "DynamicQuantizeLinear"}  # beside a weight's own scale
    readers = [node for node in nodes if node.op_type in _SCALAR_READERS and steps.isdisjoint(node.input)]
    capped = {value for node in nodes if node.op_type == "Tanh" for value in (*node.input, *node.output)}
    scalars, named = dict[str, Scalar](), dict[str, list[Scalar]]()
    reads = ((node, index, value) for node in readers for index, value in enumerate(node.input))
    for node, index, read in reads:
        value = _source(constants, read)
        is_single = value in tensors and math.prod(tensors[value].dims) == 1
        is_integer = is_single and tensors[value].data_type not in FLOATS
        if is_single and (not is_integer or node.op_type in _WITH_INTEGERS):
            number = float(constants.numbers(value).reshape(-1)[0])
            if is_integer and longest is not None:  # a window as long as the context is none
                number = max(-longest, min(number, longest))
            is_limit = is_integer or node.op_type in _LIMITING or not capped.isdisjoint((*node.input, *node.output))
            power = 0 if is_limit else _FACTORS.get(node.op_type, (0, 0))[min(index, 1)]
            scalar = Scalar(number, power, not is_limit)
            if value in keys:
                scalars[keys[value]] = scalar
            else:
                named.setdefault(f"{plain_name(node.name)}, input {index}", []).append(scalar)
    for name, numbers in named.items():
        for place, scalar in enumerate(sorted(numbers), 1):
            scalars[f"{name} ({place} of {len(numbers)})" if len(numbers) > 1 else name] = scalar
    return scalars


class Rewired(NamedTuple):
    """A node that reads another value, or limits otherwise, than the reference's node of its name."""

    how: str
    is_reached: bool
    """Whether every text shows it: all but the masks and the tables of positions that attentions read."""


def rewired(reference: Constants, model: Constants) -> dict[str, Rewired]:
    """The nodes of `model` that read values which both graphs have, and which the reference's nodes of their names do
    not read, but for their sizes. Empty where a quarter of the nodes do: these are not of one export. Constants of few
    numbers are compared as such."""
    sides, fed = [], []
    for constants in (reference, model):
        nodes = [node for node in graph_nodes(constants.model) if node.op_type != "Shape"]
        fed.append([(plain_name(node.name), value) for node in nodes for value in node.input])
        named = {name: same[0] for name, same in _by_name(nodes).items() if len(same) == 1}
        values = {*constants.maker, *constants.initializers, *(one.name for one in constants.model.graph.input)}
        few = {name for name, one in constants.tensors.items() if math.prod(one.dims) <= MOST_SIZES}
        sides.append((named, values - few))
    (theirs, known_values), (owns, values) = sides
    found: dict[str, Rewired] = {}
    for name in sorted(owns.keys() & theirs.keys()):
        node, other = owns[name], theirs[name]
        kinds = node.op_type, other.op_type
        known = [_source(reference, value) for value in other.input]
        is_turned = kinds in _TURNED and [_source(model, value) for value in node.input] == known[::-1]
        is_limit = {*kinds} <= {*_LIMITING, *_PASSING} and not {*kinds} <= {*_PASSING}
        if kinds[0] != kinds[1] and is_limit and not is_turned:
            found[name] = Rewired("is {}, the reference's {}".format(*kinds), is_reached=False)
        first_position = 3 if node.op_type in _ATTENTIONS else 1 if "Rotary" in node.op_type else len(known)
        for index, (was, value) in enumerate(zip(known, chain(node.input, repeat("")), strict=False)):
            own, is_position = _source(model, value), index >= first_position
            is_table = is_position and was in reference.initializers
            is_moved = own not in known and was in values  # sums read their values in any order
            is_other = own in known_values and (is_position or is_moved)
            is_other |= is_table and own not in (known_values | model.initializers.keys())  # new nodes made it
            is_other &= "/" in name or is_table  # other names are counts
            is_other = is_other and own not in ("", was) and not _is_alike(reference, model, was, own)
            is_lost = not own and index == _BIAS.get(node.op_type) and not _has_more(node, other)
            if was and (node.op_type == other.op_type or index == 0) and (is_other or is_lost):
                read = f"'{own}'" if own else "nothing"
                found[name] = Rewired(f"reads {read}, the reference's '{was}'", not is_position)
    lost = {one.name for one in model.model.graph.input} - {value for _, value in fed[1]}
    for name, value in fed[0]:
        if name in owns and value in lost:
            found[name] = Rewired(f"does not read '{value}'", is_reached=False)
    found |= {} if found else _without_masks(reference.model.graph, model.model.graph)
    return found if 4 * len(found) < len(owns.keys() & theirs.keys()) else {}


def _without_masks(reference: onnx.GraphProto, model: onnx.GraphProto) -> dict[str, Rewired]:
    """The first node of each layer that computes with positions, windows or masks, where no node of the layer has a
    mask that some of the reference's have, nor anything in its place. Where the first ones have two names, the graphs
    are of two exports."""
    known, own = map(_limits, (reference, model))
    masks = {one.name for one in model.input if "mask" in one.name}
    found = {}
    for layer, (name, limits) in own.items():
        first, theirs = known.get(layer, ("", limits))
        if first == name and limits <= theirs and (lost := (theirs - limits) & masks):
            found[name] = Rewired(f"does not read '{min(lost)}'", is_reached=False)
    return found


def _limits(graph: onnx.GraphProto) -> dict[int | None, tuple[str, frozenset[str]]]:
    """By layer, the first node that computes with values made of masks, positions and lengths alone (integers that are
    no tokens), their sizes aside, and the inputs of the graph that all such values of the layer are made of."""
    made = {one.name: frozenset([one.name]) for one in graph.input}
    types = {one.name: one.type.tensor_type.elem_type for one in graph.input if not one.name.endswith("input_ids")}
    limits = {name for name, kind in types.items() if kind in (TensorProto.INT32, TensorProto.INT64, TensorProto.BOOL)}
    found: dict[int | None, tuple[str, frozenset[str]]] = {}
    for node in graph.node:
        sources = [made.get(value, frozenset()) for value in (() if node.op_type == "Shape" else reads([node]))]
        made |= dict.fromkeys(node.output, whole := frozenset(chain(*sources)))
        if not whole <= limits and any(one and one <= limits for one in sources):
            layer = layer_of(node.name)
            name, before = found.get(layer, (node.name, frozenset[str]()))
            found[layer] = name, before.union(*(one for one in sources if one <= limits))
    return found


def _has_more(node: onnx.NodeProto, other: onnx.NodeProto) -> bool:
    """Whether a node has a window, or inputs that another one lacks: they may do what its mask did."""
    is_longer = any(node.input[len(other.input) :]) or any(map(gt, map(bool, node.input), map(bool, other.input)))
    return is_longer or attribute(node, "local_window_size", -1) > 0


def _is_alike(reference: Constants, model: Constants, was: str, own: str) -> bool:
    """Whether a value may stand for the reference's: it has no name of its own, is a constant of its numbers or of
    another form, or was made alike."""
    if _TRACED.search(f"{own} {was}"):
        return True
    if own in model.initializers and was in reference.initializers:
        array, known = model.numbers(own), reference.numbers(was)
        return array.shape != known.shape or is_one(known, array)
    return _is_equal(reference, own, was)


def _is_equal(constants: Constants, one: str, other: str) -> bool:
    """Whether two values of a graph are made alike: a tool that finds such ones keeps the first."""

    def made(value: str) -> Any:
        maker = constants.maker.get(value)
        place = None if maker is None else [*maker.output].index(value)
        return maker and (maker.op_type, place, len(maker.input), [*maker.attribute])

    pairs, seen = [(one, other)], set[tuple[str, str]]()
    while pairs:
        left, right = pairs.pop()
        if left == right or (left, right) in seen:
            continue
        seen.add((left, right))
        if left in constants.tensors and right in constants.tensors:
            if not np.array_equal(constants.numbers(left), constants.numbers(right)):
                return False
        elif made(left) is None or made(left) != made(right):
            return False
        else:
            pairs += zip(constants.maker[left].input, constants.maker[right].input, strict=True)
    return True


def _source(constants: Constants, value: str) -> str:
    """The value that another one is made of by casts and the like."""
    while (maker := constants.maker.get(value)) is not None and maker.op_type in _PASSING:
        value = maker.input[0]
    return value


def ropes_of(text: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The entries of a checkpoint's configuration that say how positions turn."""
    return [*entries({key: text.get(key) for key in ("rope_parameters", "rope_scaling")})]


def scaled_ropes(text: Mapping[str, Any], longest: int | None = None) -> list[tuple[str, Mapping[str, Any]]]:
    """The kinds, and the entries, by which positions turn by more than a base in a text of `longest` positions."""
    is_within = longest is not None and longest <= (read_length(text) or 0)
    kinds = [(str(rope.get("rope_type", rope.get("type"))), rope) for rope in ropes_of(text)]
    return [
        (kind, rope)
        for kind, rope in kinds
        if kind not in ("None", "mrope", "default")
        and not (kind in ("linear", "llama3") and rope.get("factor") == 1)
        and not (kind == "dynamic" and is_within and not rope.get("alpha"))  # Hunyuan's is for every length
    ]

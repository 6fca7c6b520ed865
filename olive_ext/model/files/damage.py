"""What is damaged in a model's files, whether or not texts reach it: constants, and the numbers with which nodes
compute (windows, epsilons, scales, heads). They are compared with a reference's graph, or with a checkpoint's tensors
and config.json.

Knows files, and not what runs them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx.inliner
import onnx.numpy_helper

from olive_ext.graph.nodes import QUANTIZING, attribute, layer_of, quantizing_operator
from olive_ext.model.files.constants import (
    FLOATS,
    ROTARY,
    ROUNDING,
    Constants,
    Differing,
    apart,
    are_frequencies,
    broken,
    checkpoint_floats,
    checkpoint_pairs,
    float_weights,
    graph_nodes,
    is_alike,
    is_one,
    kind_of,
    meant_others,
    outliers,
    pairs_of,
    plain_name,
    rounding_of,
)
from olive_ext.model.files.content import load_graph
from olive_ext.model.files.grids import (
    AT_A_TIME,
    Array,
    Pair,
    distance,
    is_unlike,
    likeness_of,
    likeness_to_grid,
    other_tokens,
)
from olive_ext.model.files.package_config import json_object
from olive_ext.model.spec.checkpoint import entries, read_length
from olive_ext.model.types import ModelFiles

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
    "softcap": 0.0, "scale": 0.0, "local_window_size": -1, "epsilon": 1e-5, "activation_alpha": 1.0,
}  # fmt: skip
"""The defaults of attributes; 0 for all others. This epsilon is ONNX's; ONNX Runtime's "Skip..." have 1e-12."""

_EXPERTS = {
    "k": ("experts_per_tok", "experts_per_token", "top_k"),
    "swiglu_limit": ("swiglu_limit",),
    "normalize_routing_weights": ("norm_topk_prob",),
}
"""Attributes of experts, by the ends of the keys in config.json."""

_NORMS = ("LayerNormalization", "RMSNormalization", "RMSNorm")
_ATTENTIONS = ("GroupQueryAttention", "MultiHeadAttention", "PagedAttention", "Attention")
_ATTENTION_BIAS = 10
"""The input of GroupQueryAttention that may hold a window's mask."""

_FACTORS = {"Mul": (1, 1), "Div": (0, -1)}
"""The power with which a number multiplies what its node computes, by an operator's input."""

_BOUNDING = ("Clip", "Min", "Max")
_LIMITING = ("TopK", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal")
"""Operators with integers that decide: experts, windows in masks, the ids of pictures. Masks add such integers, too."""

_SCALAR_READERS = ("Add", "Sub", *_FACTORS, "Pow", *_BOUNDING, *_LIMITING)
_LARGE = 6e4
"""Numbers beyond this stand for infinity in masks: each float type has its own."""

_BASES = ("rope_theta", "rope_local_base_freq", "rotary_emb_base")

_EXPERT = re.compile(r"[./]experts[./]\d")
"""Names of one expert's weights, which a router may send no text to."""

_SELECTED = re.compile(rf"embed|position|pos_emb|wte|wpe|relative|lm_head|rotary|[Gg]ather|{_EXPERT.pattern}|/fc\d$")
"""Names of weights of which texts need not show all rows: tables of tokens and positions, the head, and experts."""

_LAST_NORM = re.compile(r"(^|\.)(final_norm_layernorm|final_layernorm|(?<!\d\.)norm|norm_f|ln_f)\.weight$")
_ROUNDED = 0.7
"""The relative error below which a weight was only rounded: with 2 bits it is 0.5 and less, with rotations 1.4."""

_NEAR = 0.01
"""The mean KL in nats below which texts were near: as of weights of 6 to 8 bits."""


class Damage(NamedTuple):
    """What is damaged, by name."""

    findings: dict[str, str]
    judged: tuple[str, ...]
    """Constants that are not the reference's, and that texts judge."""

    uncompared: int
    """How many constants have no other in the reference."""

    rounding: float = math.inf
    """The mean KL in nats that rounding explains in a model with exactly the reference's constants; infinite where it
    has others, or rounds to 8 bits or to bfloat16."""


def damage(
    model: ModelFiles,
    reference: ModelFiles | None,
    *,
    nats: float | None = None,
    longest: int | None = None,
    num_tokens: int | None = None,
    vocab_sizes: Collection[int | None] = (),
    unreached: Collection[str] = (),
) -> Damage:
    """The damage to a model's constants and nodes that texts need not show, and what they show of them.

    Texts judge what every text reaches, by the mean KL of `nats` that they measured (None where they did not): whole
    vectors and products, which smoothing, folded norms, rotations and training change, and numbers of nodes beyond
    `_LIMITS`. Such a constant is damage only if texts were not near, and it has nothing in common with the reference's,
    or is a single vector of a float model. Files judge the rest: rows of tables that differ, experts, rotary tables,
    NaN and infinity, windows, and every part that is `unreached`. A window of the model's `longest` text is not one.
    Rows of `vocab_sizes` beyond the tokenizer's `num_tokens`, and rotary ones beyond `longest`, are never read. The
    reference is an ONNX model, a checkpoint, or not on disk. Raises `ModelError`."""
    findings, judged, uncompared, rounding = dict[str, str](), list[str](), 0, math.inf if model.pipeline else 0.0
    floats, config, others = {}, {}, {}
    if reference is not None and reference.decoder.suffix == ".onnx":
        others = _graphs(reference)
    elif reference is not None:
        written = reference.directory / "config.json"
        floats, config = checkpoint_floats(reference.directory), json_object(written) if written.is_file() else {}
    is_near, lengths = nats is not None and nats < _NEAR, {*vocab_sizes, num_tokens}
    if model.decoder.suffix != ".onnx":
        both = (floats, checkpoint_floats(model.directory))
        floats, constants = (_reached(arrays, num_tokens, vocab_sizes, longest) for arrays in both)
        causes, shown = _compared(floats, constants, {}, lengths, is_near=is_near)
        return Damage(causes, tuple(shown), len(constants.keys() - floats.keys()))
    for part, graph in _graphs(model).items():
        own, known, alike, numbers, other = _constants(graph), floats, set[str](), {}, None
        pairs: dict[str, Pair] = {}
        constants, is_quantized = own.floats, quantizing_operator(own.model) != ""
        with_reached = part in unreached or not (is_near or (is_quantized and nats is not None))
        _without_idle_windows(own.model, longest)
        if part in others:
            other = _constants(others[part])
            _without_idle_windows(other.model, longest)
            pairs, known = pairs_of(other, own), other.floats
            shared = own.grids.keys() & other.grids.keys()
            alike = {name for name in shared if all(map(np.array_equal, own.grids[name], other.grids[name]))}
            numbers = differing_numbers(other, own, longest, with_reached=with_reached)
        elif config and not part:
            known = floats | rotary_tables(config, constants)
            numbers = numbers_against(config, own.model, longest, with_reached=with_reached)
            pairs = checkpoint_pairs(floats, own)
        known, constants = (_reached(arrays, num_tokens, vocab_sizes, longest) for arrays in (known, constants))
        known = _renamed(known, constants)
        which = {"is_near": is_near, "is_quantized": is_quantized, "is_unreached": part in unreached}
        causes, shown = _compared(known, constants, pairs, lengths, **which)
        is_far = nats is not None and nats > ROUNDING and not (causes or numbers)
        rounding = max(rounding, rounding_of(own, other, known, constants) if is_far else math.inf)
        unpaired = own.grids.keys() - {name.split(",")[0] for name in pairs} - alike
        uncompared += len(unpaired) + len(constants.keys() - known.keys())
        suffix = f", {part}" if part else ""
        findings |= {f"{name}{suffix}": how for name, how in (causes | numbers).items()}
        judged += [f"{name}{suffix}" for name in shown]
    return Damage(findings, tuple(judged), uncompared, rounding)


def _compared(
    reference: Mapping[str, Array],
    constants: Mapping[str, Array],
    pairs: Mapping[str, Pair],
    num_tokens: Collection[int | None],
    *,
    is_near: bool,
    is_quantized: bool = False,
    is_unreached: bool = False,
) -> tuple[dict[str, str], list[str]]:
    """What is damage among constants that are not the reference's and quantized weights that are far from their float
    ones, and what is left to the texts: what all of them read, and what was changed on purpose. `num_tokens`: rows that
    tables of tokens may have."""
    differing = apart(reference, constants)
    distances = {name: distance(*pair) for name, pair in pairs.items()}
    far = outliers(distances)
    every = differing.found | differing.meant
    others = {name: what.sentence(constants[name]) for name, what in every.items()} | far
    rows = {name for name, one in distances.items() if 0 < 2 * len(one.rows) < one.num_rows and _SELECTED.search(name)}
    judged = {*differing.meant}
    if not is_unreached:
        judged = {name for name in far.keys() - rows if is_near or not is_unlike(likeness_to_grid(*pairs[name]))}
        judged |= _left_to_texts(differing, reference, constants, num_tokens, is_near=is_near)
    if not is_near and not is_quantized and len(judged) == 1:
        judged = {name for name in judged if constants[name].ndim > 1}
    causes = {name: how for name, how in others.items() if name not in judged}
    return causes | broken(reference, constants), sorted(judged)


def _constants(file: Path) -> Constants:
    """Those of a graph, in which functions of its own are written out where onnx can do it: not of calls with more
    inputs than a function takes. A node without a name has that of its first output."""
    model = load_graph(file)
    with suppress(RuntimeError):
        model = onnx.inliner.inline_local_functions(model) if model.functions else model
    for node in graph_nodes(model):
        node.name = node.name or node.output[0]
    return Constants(model, file)


def replace_weights(tensors: Mapping[str, Array], model: Constants) -> bool:
    """Writes the decoded values of a graph's quantized weights into the `tensors` of its checkpoint. Returns whether
    the graph should then compute what the checkpoint does: everything that is rounded in it is a weight that pairs and
    is near, its other constants, which smoothing would change, are the checkpoint's, and no adapter (as PEFT and
    onnxruntime-genai name them) adds to them."""
    is_exact = not any("lora_" in name for name in float_weights(model))
    for name, array in model.floats.items():
        is_exact &= name not in tensors or tensors[name].shape != array.shape or is_one(tensors[name], array)
    names = set()
    for name, (whole, grid, first) in checkpoint_pairs(tensors, model).items() if is_exact else ():
        decoded, _ = grid.rows(first, first + len(whole))
        is_exact &= bool(np.linalg.norm(decoded - whole) < _ROUNDED * np.linalg.norm(whole))
        whole[:] = decoded
        names.add(name.split(",")[0])
    read = (model.parts.intersection(node.input) for node in model.model.graph.node if node.op_type in QUANTIZING)
    return is_exact and bool(names) and model.grids.keys() == names and all(read)


def _graphs(files: ModelFiles) -> dict[str, Path]:
    return {"": files.decoder, **{part: companion.graph for part, companion in files.companions.items()}}


def _reached(
    arrays: Mapping[str, Array], num_tokens: int | None, sizes: Collection[int | None], longest: int | None
) -> dict[str, Array]:
    """Tables and heads without differences that only ids beyond `num_tokens` reach, or positions beyond `longest`."""

    def cut(name: str, array: Array) -> Array:
        if ROTARY.search(name):
            return array[:longest]
        is_long = [size in sizes for size in array.shape]
        return array[tuple(slice(num_tokens if each else None) for each in is_long)] if sum(is_long) == 1 else array

    return {name: cut(name, array) if array.ndim == 2 else array for name, array in arrays.items()}


def _left_to_texts(
    differing: Differing,
    reference: Mapping[str, Array],
    constants: Mapping[str, Array],
    num_tokens: Collection[int | None],
    *,
    is_near: bool,
) -> set[str]:
    """Those of the `constants` that differ from the `reference`'s of which every text reads what differs, or that were
    changed on purpose. A text need not reach an expert, or some tokens of a table or head (`other_tokens`), or part of
    a stack of experts. Where texts were not near, a matrix must have something in common with the reference's."""
    names = set[str]()
    for name, what in (differing.found | differing.meant).items():
        array, is_meant = constants[name], name in differing.meant
        is_table = _SELECTED.search(name) is not None or not {*array.shape}.isdisjoint(num_tokens)
        is_rotary = ROTARY.search(name) is not None or are_frequencies(reference[name])
        if not is_meant and (_EXPERT.search(name) or is_rotary or array.dtype.kind in "iu"):
            continue  # integers may be ids, which are rare
        if is_table and array.ndim == 1 and not is_meant and 2 * what.share < 1:
            continue
        if array.ndim > 1 and (is_table or array.ndim > 2) and other_tokens(reference[name], array):
            continue
        if array.ndim == 2 and not (is_near or is_meant) and is_unlike(likeness_of(reference[name], array)):
            continue
        names.add(name)
    return names


def _renamed(reference: dict[str, Array], model: Mapping[str, Array]) -> dict[str, Array]:
    """The reference's constants, with its matrices under the model's names. Matrices without a common name pair by
    shape, where most of their numbers are equal. Rotary tables pair by use, width and the angles of position 1, where
    both sides have as many: another exporter may read those of windowed layers first. The norm before the head pairs by
    its names."""
    kinds: list[dict[Any, list[str]]] = [{}, {}]
    for kind, own, other in zip(kinds, (reference, model), (model, reference), strict=True):
        for name, one in own.items():
            if name not in other and one.ndim > 1:
                kind.setdefault((_turn(name), one.shape[1:] if ROTARY.search(name) else one.shape), []).append(name)
    last = [[name for name in own if _LAST_NORM.search(name)] for own in (reference, model)]
    names: dict[str, str] = dict(zip(*last, strict=True)) if [*map(len, last)] == [1, 1] else {}
    for kind, mine in kinds[1].items():
        theirs = kinds[0].get(kind, [])
        if kind[0]:
            angles = {one: float(of[one][:2].sum()) for own, of in ((theirs, reference), (mine, model)) for one in own}
            by_angles = [sorted(own, key=angles.__getitem__) for own in (theirs, mine)]
            names |= dict(zip(*by_angles, strict=True)) if len(theirs) == len(mine) else {}
            continue
        for name in mine:
            rest = (label for label in theirs if label not in names and is_alike(reference[label], model[name]))
            names |= dict.fromkeys(islice(rest, 1), name)
    return {names.get(name, name): one for name, one in reference.items()}


def _turn(name: str) -> str:
    match = ROTARY.search(name)
    return "" if match is None else match[2]


def rotary_tables(config: Mapping[str, Any], constants: Mapping[str, Array]) -> dict[str, Array]:
    """The tables of rotary positions by config.json, under the model's names for them. Empty where positions are
    scaled, and for tables of another width than the heads'."""
    text = config.get("text_config", config)
    ropes = _ropes(text)
    bases = [float(rope[key]) for rope in (text, *ropes) for key in _BASES if rope.get(key)]
    size = text.get("head_dim") or text.get("hidden_size", 0) // (text.get("num_attention_heads") or 1)
    shares = {rope.get("partial_rotary_factor") or 1 for rope in (text, *ropes)}
    tables = {}
    for name, table in constants.items() if bases and not _is_scaled(ropes) else ():
        half = table.shape[-1] if table.ndim == 2 and ROTARY.search(name) else 0
        if not half or len(table) < 2 or all(half != int(size * share) // 2 for share in shares):
            continue
        turn = np.cos if _turn(name) == "cos" else np.sin
        angles = [base ** -(np.arange(half) / half) for base in bases]
        nearest = angles[int(np.argmin([np.abs(turn(angle) - table[1]).max() for angle in angles]))]
        tables[name] = np.empty(table.shape, np.float32)
        for rows in np.array_split(np.arange(len(table)), 1 + table.size // AT_A_TIME):
            tables[name][rows] = turn(np.outer(rows, nearest))
    return tables


def _ropes(text: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*entries({key: text.get(key) for key in ("rope_parameters", "rope_scaling")})]


def _is_scaled(ropes: Sequence[Mapping[str, Any]]) -> bool:
    return any(rope.get("rope_type", rope.get("type")) not in (None, "mrope", "default") for rope in ropes)


def _without_idle_windows(model: onnx.ModelProto, longest: int | None) -> None:
    """Turns off, in place, windows that a text of `longest` positions does not leave."""
    for entry in (entry for node in graph_nodes(model) for entry in node.attribute):
        if entry.name == "local_window_size" and longest is not None and entry.i >= longest:
            entry.i = -1


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
    return findings | _differing_scalars(
        *(_scalars(one, longest) for one in (reference, model)), with_reached=with_reached
    )


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
        for name, values in allowed.items():
            if name not in _LIMITS and not with_reached:
                continue
            number = _value(node, name, set())
            if values and not any(_is_same(number, value) for value in (*values, 0 if "heads" in name else values[0])):
                findings[node.name] = f"has '{name}' {_shown(number)}, config.json {_shown(values[0])}"
    norms = {node.name for node in kinds.get("norm", ())}
    meant = meant_others(norms, norms & findings.keys(), kind_of) if norms - findings.keys() else ()
    return {name: how for name, how in findings.items() if name not in meant}


def _scales(text: Mapping[str, Any]) -> list[float]:
    """The scales that attentions may have: left out, folded into the weights, a head's, or a written one. Empty for
    latent attention, and where rotary positions scale as well."""
    size = text.get("head_dim") or text.get("hidden_size", 0) // (text.get("num_attention_heads") or 1)
    if not size or text.get("rope_scaling") or "qk_rope_head_dim" in text or _is_scaled(_ropes(text)):
        return []
    sizes = [*(text.get(key) for key in ("query_pre_attn_scalar", "global_head_dim")), size]
    written = [value for key, value in text.items() if key.endswith(("attn_multiplier", "attention_multiplier"))]
    return [*(one for one in written if type(one) is float), *(one**-0.5 for one in sizes if one), 0.0, 1.0, 1 / size]


def _windows(text: Mapping[str, Any], node: onnx.NodeProto, longest: int | None, *, has_windows: bool) -> list[int]:
    """The windows that an attention may have by config.json, where some attentions of the graph have one or none has.
    Empty where it does not say, and where a mask may hold the window."""
    types, layer, window = text.get("layer_types") or (), layer_of(node.name), text.get("sliding_window") or -1
    if node.op_type != "GroupQueryAttention" or any(node.input[_ATTENTION_BIAS:][:1]) or not isinstance(window, int):
        return []
    if "sliding_window" not in text:  # other keys: "attention_chunk_size", "local_attention", "window_size"
        return [] if any(word in key for key in text for word in ("window", "chunk", "local")) else [-1]
    length = longest or read_length(text) or 0
    window = -1 if window >= length > 0 else window
    if layer is not None and layer < len(types):
        return [window] if types[layer] == "sliding_attention" else [-1]
    is_reached = 0 < window < length
    is_everywhere = text.get("use_sliding_window", True) and "max_window_layers" not in text
    return [window] if is_reached and is_everywhere and not has_windows else [window, -1]


def _by_kind(model: onnx.ModelProto) -> dict[str, list[onnx.NodeProto]]:
    """Nodes with deciding attributes, by operator; all norms are one kind, and so are all attentions."""
    kinds: dict[str, list[onnx.NodeProto]] = {}
    for node in graph_nodes(model):
        is_deciding = not {entry.name for entry in node.attribute}.isdisjoint((*_FREE, *_BY_NAME, *_BY_FORM))
        kind = "norm" if node.op_type.endswith(_NORMS) else "attention" if node.op_type in _ATTENTIONS else ""
        if kind or is_deciding:
            kinds.setdefault(kind or node.op_type.replace("QMoE", "MoE"), []).append(node)
    return kinds


def _by_name(nodes: Sequence[onnx.NodeProto]) -> dict[str, list[onnx.NodeProto]]:
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
    absent = 1e-12 if name == "epsilon" and node.op_type.startswith("Skip") else _ABSENT.get(name, 0)
    value = absent if (value := _attribute(node, name)) is None else value
    if name == "smooth_softmax":  # ONNX Runtime writes -1 out where nothing is said, and both mean no
        return max(0, value)
    return 0.0 if name == "scale" and any(size and _is_same(value, size**-0.5) for size in sizes) else value


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, float) or isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-3)
    return bool(one == other)


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else value.decode() if isinstance(value, bytes) else str(value)


class Scalar(NamedTuple):
    """A number that a node computes with."""

    value: float
    power: int
    """The power with which it multiplies; 0 where it is no factor."""

    is_reached: bool
    """Whether every text shows it: all but what limits large numbers, chooses experts, or makes masks."""


def _scalars(constants: Constants, longest: int | None) -> dict[str, Scalar]:
    """Single numbers (an epsilon, a cap, a multiplier, the number of experts) by the node and the input that read them,
    if no other node has that name, or by their own name as in `Constants.floats`."""
    tensors = constants.tensors
    keys = {name: key for key, name in constants.float_names.items()}
    nodes = [*graph_nodes(constants.model)]
    steps = {node.output[1] for node in nodes if node.op_type == "DynamicQuantizeLinear"}  # beside a weight's own scale
    readers = [node for node in nodes if node.op_type in _SCALAR_READERS and steps.isdisjoint(node.input)]
    capped = {value for node in nodes if node.op_type == "Tanh" for value in (*node.input, *node.output)}
    names, scalars = Counter(plain_name(node.name) for node in readers), {}
    reads = ((node, index, value) for node in readers for index, value in enumerate(node.input))
    for node, index, value in reads:
        is_single = value in tensors and math.prod(tensors[value].dims) == 1
        is_integer = is_single and tensors[value].data_type not in FLOATS
        is_number = is_single and (not is_integer or node.op_type in ("Add", "Sub", *_LIMITING))
        if is_number and (value in keys or names[plain_name(node.name)] == 1):
            number = float(constants.numbers(value).reshape(-1)[0])
            number = min(number, longest or number) if is_integer else number  # a window as long as the context is none
            is_limit = is_integer or node.op_type in _BOUNDING or not capped.isdisjoint((*node.input, *node.output))
            power = 0 if is_limit else _FACTORS.get(node.op_type, (0, 0))[min(index, 1)]
            scalars[keys.get(value, f"{plain_name(node.name)}, input {index}")] = Scalar(number, power, not is_limit)
    return scalars

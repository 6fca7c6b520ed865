"""The constants of a graph on disk, and those of two graphs compared where they should be equal.

Knows graphs and checkpoints as files; not what runs them. Nothing is loaded as a whole: numbers are mapped from their
files and compared `AT_A_TIME` at a time (1.07 GB of float32 take 0.3 s against themselves, 1.8 s against float16).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, reduce
from itertools import chain
from operator import eq, or_
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import onnx.numpy_helper
from onnx import TensorProto, helper
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from olive_ext.graph.nodes import (
    attribute,
    constants_of,
    external_locations,
    few_bits,
    layer_of,
    nested_graphs,
    quantizing_operator,
    subgraphs,
)
from olive_ext.model.files.content import weight_files
from olive_ext.model.files.grids import (
    Array,
    Distance,
    Grid,
    Pair,
    blocks_of,
    dequantized_grid,
    packed_grid,
)
from olive_ext.model.spec.attention import rotary_nodes
from olive_ext.model.spec.media_spec import HIDDEN

ROUNDING = 1e-3
"""The least mean KL in nats that anything but rounding explains (`rounding_of`)."""

FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)

QUANTIZER_SUFFIX = re.compile(r"((_matmul)?_Q\d+|_quant(ized)?)+$", re.IGNORECASE)
"""What quantizers append to the name of the node whose weight they replace: ONNX Runtime's for MatMulNBits and
GatherBlockQuantized "_Q4", for a product after DequantizeLinear "_matmul_Q4", its dynamic one "_quant"."""

COUNTER = re.compile(r"_node_\d+$")
"""The suffix that mobius gives every node's name: a count over all nodes of the graph."""

_COUNTED = re.compile(r"(::|^|/)[A-Za-z]+_?\d+$")
"""Names that exporters count over a whole graph ("onnx::MatMul_123", "val_7"): another export's may be others'."""

ROTARY = re.compile(r"(^|[._/])(cos|sin|freqs)(_cache|_cached|_cis|[._]|$)")
"""Names of tables of rotary positions; one may have both."""

_EPSILON = 2.0**-7
"""Two roundings of a number to bfloat16, relative to it. Whatever type stores numbers now, they may have been rounded
to it before, as by a builder that reads a checkpoint in bfloat16 and writes float32. Half of it, relative to a row's
largest number, is half a step of 8 bits: tables that were rounded to integers may be stored as floats again."""

MOST_SIZES = 64
"""A tensor of no more integers may hold a graph's sizes and axes. A longer one is a table: stored ids or weights."""

_ANGLE = 2.5e-7
"""How far two exporters' float32 angles of a position may be apart, in radians for each position."""

WEIGHTS: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "MatMul": {"": (1,)},
    "Gemm": {"": (1,)},
    "Gather": {"": (0,)},
    "MatMulNBits": {"": (1, 2, 3)},
    "GatherBlockQuantized": {"": (0, 2, 3)},
    "MoE": {"fc1": (2,), "fc2": (4,), "fc3": (6,)},
    "QMoE": {"fc1": (2, 3, 11), "fc2": (5, 6, 12), "fc3": (8, 9, 13)},
}
"""For each operator its weights, and the inputs of each: the numbers and, if packed, scales and zero points."""

_INTEGER_PRODUCTS: Mapping[str, tuple[int, ...]] = {
    "MatMulInteger": (),
    "MatMulIntegerToFloat": (1, 3, 5),
    "DynamicQuantizeMatMul": (1, 2, 3),
}
"""Products whose inputs are quantized in each step, and where they have their weight's numbers, scales and zero points;
empty where other nodes have the scales."""

OUTLIER = 0.2
"""The share of a product's numbers beyond a step of its grid above which it was not just rounded, where the median
product has a tenth of it. Rounding to nearest has none, GPTQ and AWQ have their shares in every product, and zero
points that are off by one have a half."""


JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Products that one export may have as one, and their parts in another export, in the order of their outputs."""

_SYNONYMS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj", "out_proj": "o_proj"}
"""Words of checkpoints (LFM2's), by the words that exporters use for them."""

_PLAIN_WORDS = ("", "weight", "MatMul", "Gemm", "Gather")
_BESIDE = re.compile(r"(^|[./])(vis|audio|encoder)")
"""Parts beside the decoder, whose layers may have names of their own."""


class Constants:
    """The initializers of a graph and the values that are made of nothing else."""

    def __init__(self, model: onnx.ModelProto, path: Path) -> None:
        """`path`: the file that `model` was read from. Raises `ModelError` for weights that are missing."""
        self.model = model
        self.initializers = {tensor.name: tensor for tensor in model.graph.initializer}
        self.tensors = reduce(or_, map(constants_of, (*nested_graphs(model.graph.node), model.graph)))
        """Also those of Constant nodes and of nested graphs."""

        self.maker = {name: node for node in model.graph.node for name in node.output if name}
        self._files = weight_files(path, external_locations(model))
        self._parts = set[str]()

    def view(self, value: str) -> Array | None:
        """A constant as a view of its file, transposed as its nodes say; None where these do something else."""
        if value in self.initializers:
            return self.numbers(value)
        node = self.maker.get(value)
        if node is None or node.op_type not in ("Transpose", "Identity"):
            return None
        whole = self.view(node.input[0])
        if whole is None or node.op_type == "Identity":
            return whole
        return np.transpose(whole, attribute(node, "perm", None))

    def numbers(self, name: str) -> Array:
        """The numbers of a tensor, mapped from the file where they are external; of 4 bits, read, one to a byte."""
        tensor = self.tensors[name]
        if not uses_external_data(tensor) or tensor.data_type in (TensorProto.INT4, TensorProto.UINT4):
            return onnx.numpy_helper.to_array(self.tensor(name))
        path, offset, _ = self.place(tensor)
        dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
        return np.memmap(path, dtype, "r", offset, tuple(tensor.dims))

    def tensor(self, name: str) -> onnx.TensorProto:
        """The tensor with its numbers inside."""
        tensor: onnx.TensorProto = self.tensors[name]
        if not uses_external_data(tensor):
            return tensor
        path, offset, length = self.place(tensor)
        with path.open("rb") as file:
            file.seek(offset)
            stored = file.read(length)
        return onnx.TensorProto(name=name, data_type=tensor.data_type, dims=tensor.dims, raw_data=stored)

    def packed(self, values: Sequence[str]) -> tuple[Array, Array, Array | None] | None:
        """The stored numbers, scales and zero points (None where left out) of the first three values, empty where a
        node has none. None where one of the first two is missing, or one is not an initializer."""
        stored, scales, zeros = (*values, "", "", "")[:3]
        if not {stored, scales, zeros or stored} <= self.initializers.keys():
            return None
        self._parts |= {stored, scales, zeros}
        return self.numbers(stored), self.numbers(scales), self.numbers(zeros) if zeros else None

    def place(self, tensor: onnx.TensorProto) -> tuple[Path, int, int]:
        """File, offset and bytes of an external tensor's numbers."""
        stored = ExternalDataInfo(tensor)
        path, offset = self._files[stored.location], stored.offset or 0
        return path, offset, stored.length if stored.length is not None else path.stat().st_size - offset

    @cached_property
    def grids(self) -> dict[str, Grid]:
        """Quantized weights by the names that their float ones have in `float_weights`."""
        return _quantized_weights(self)

    @cached_property
    def parts(self) -> set[str]:
        """The tensors of the `grids`: numbers, scales and zero points."""
        return self._parts if self.grids else set()

    @cached_property
    def floats(self) -> dict[str, Array]:
        """The floating-point tensors, masks, and the tables of integers that ids are looked up in, by `float_names`,
        without the `parts` of quantized weights."""
        return {key: self.numbers(name) for key, name in self.float_names.items() if name not in self.parts}

    @cached_property
    def float_names(self) -> dict[str, str]:
        """As `floats`, by names that other exports of the model have, too: their own names, or the name of the node
        that reads them where their own is a count. Single numbers of Constant nodes are left out."""
        known = {
            name: one for name, one in self.tensors.items() if name in self.initializers or math.prod(one.dims) > 1
        }
        nodes = [*graph_nodes(self.model)]
        tables = {node.input[0] for node in nodes if node.op_type == "Gather"}
        names = {name for name, tensor in known.items() if tensor.data_type in FLOATS and 0 not in tensor.dims}
        is_long = {name for name, tensor in known.items() if math.prod(tensor.dims) > MOST_SIZES}
        names |= {name for name in is_long if name in tables or known[name].data_type == TensorProto.BOOL}
        read = [*rotary_nodes(self.model.graph)]
        turns = {cosines: "cos" for _, cosines, _ in read} | {sines: "sin" for _, _, sines in read}
        bodies = [(node, body) for node in nodes for body in subgraphs(node)]
        readers = {one.name: (node, index) for node, body in bodies for index, one in enumerate(body.output)}
        readers |= {name: (node, index) for node in nodes for index, name in enumerate(node.input)}
        keys: dict[str, list[str]] = {}
        for name, (node, index) in readers.items():
            if name in names:
                key = f"{plain_name(node.name)}, input {index}" if _COUNTED.search(name) else name
                key = f"{turns[name]}_cache.{key}" if name in turns and not ROTARY.search(key) else key
                is_turned = node.op_type == "Gemm" and attribute(node, "transB", 0) and index == 1
                keys.setdefault(f"{key}, transposed" if is_turned else key, []).append(name)
        for key, own in [*keys.items()]:  # nodes whose names differ in counts alone: in the order of their own counts
            own.sort(key=lambda name: (len(name), name))
            keys |= {f"{key} ({place})": [name] for place, name in enumerate(own[1:], 2)}
        return {key: own[0] for key, own in keys.items()}


def graph_nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """All nodes, those of nested graphs after the others."""
    yield from chain(model.graph.node, *(body.node for body in nested_graphs(model.graph.node)))


def plain_name(name: str) -> str:
    """A node's name without what quantizers append and without counters; quantized nodes have the name of float
    ones."""
    name = COUNTER.sub("", QUANTIZER_SUFFIX.sub("", name))
    for packed, plain in (("QMoE", "MoE"), ("MatMulNBits", "MatMul"), ("GatherBlockQuantized", "Gather")):
        name = name.replace(packed, plain)
    return name


def part_name(node: onnx.NodeProto, part: str) -> str:
    """The name of a weight by its node and, of experts, its part."""
    return f"{plain_name(node.name)}/{part}" if part else plain_name(node.name)


class Apart(NamedTuple):
    """How two constants differ beyond rounding."""

    rows: list[int]
    """The rows that differ, counted from 0; 0 for a vector."""

    share: float
    """The share of its numbers that differ."""

    error: float
    """The error of the whole, relative to the reference's size."""

    def sentence(self, array: Array) -> str:
        """ "rows 450 to 511 of 512 are not the reference's (relative error 0.3)"."""
        return _sentence(self.rows, array, f"not the reference's (relative error {self.error:.2g})")


class Differing(NamedTuple):
    """Constants that are not the reference's, beyond rounding."""

    found: dict[str, Apart]
    """Those that should be."""

    meant: dict[str, Apart]
    """Those that were changed on purpose."""


def apart(reference: Mapping[str, Array], model: Mapping[str, Array]) -> Differing:
    """The constants of `model` that are not `reference`'s.

    Two constants correspond where name and shape are equal, and matrices of one width as far as both reach. The vectors
    of a kind (one name over the layers) may have 1 added, as Gemma's norms have. Where more than half of a kind
    differ, or of all vectors or matrices, these were changed on purpose, as AWQ changes norms, and training or rounding
    weights: any text shows the effect. Of matrices they are those that differ in nearly all rows. Tables of rotary
    positions are compared unless everything else belongs to another model.
    """
    known, own, shared = {**reference}, {**model}, set[str]()
    for name in own.keys() & known.keys():
        shapes = own[name].shape, known[name].shape
        if {*map(len, shapes)} == {2} and any(map(eq, *shapes)):
            part = tuple(slice(min(sizes)) for sizes in zip(*shapes, strict=True))
            own[name], known[name] = own[name][part], known[name][part]
        if own[name].shape == known[name].shape:
            shared.add(name)
    vectors = {name for name in shared if own[name].ndim == 1}
    rotary = {name for name in shared if ROTARY.search(name)}
    plain = {name: _apart(name, known[name], own[name]) for name in own if name in shared}
    folded = {name: _apart(name, known[name], own[name], 1) for name in vectors}
    of_kinds = [Counter(kind_of(name) for name, what in read.items() if what) for read in (plain, folded)]
    plain |= {name: what for name, what in folded.items() if of_kinds[1][kind_of(name)] < of_kinds[0][kind_of(name)]}
    others = {name: what for name, what in plain.items() if what}
    stacked = {name for name in others if own[name].ndim > 2 and not _is_all(others[name], known[name])}
    meant = meant_others(shared, others, kind_of) - stacked  # one expert of each layer is not changed on purpose
    for whole in (vectors, shared - vectors - rotary):
        changed = whole & others.keys()
        if 2 < len(whole) < 2 * len(changed):
            meant |= {name for name in changed if _is_all(others[name], known[name])}
    meant -= rotary
    if rotary < shared and shared - rotary <= others.keys():  # another model: its positions may turn otherwise
        meant |= {name for name in rotary & others.keys() if _is_all(others[name], known[name])}
    found = {name: what for name, what in others.items() if name not in meant}
    return Differing(found, {name: what for name, what in others.items() if name in meant})


_NEARLY_ALL = 0.9
"""The share of its rows that a matrix changed on purpose differs in: some are zeros, or exact when they are rounded."""


def _is_all(what: Apart, array: Array) -> bool:
    """Whether nearly all rows that are not zeros differ."""
    rows = array.reshape(len(array), -1) if array.ndim > 1 else array.reshape(1, -1)
    return len(what.rows) >= _NEARLY_ALL * int(np.count_nonzero(rows.any(1)))


def broken(reference: Mapping[str, Array], model: Mapping[str, Array]) -> dict[str, str]:
    """What is wrong with constants of `model`, by name: they are NaN or infinite where the reference's are not, or a
    vector is missing, although other layers have one and this layer has others, or a rotary table beside others."""
    causes = {name: what for name, array in model.items() if (what := _broken(array))}
    causes = {name: what for name, what in causes.items() if name not in reference or _broken(reference[name]) != what}
    kinds, known = set(map(kind_of, model.keys() & reference.keys())), Counter(map(kind_of, model))
    # The highest layer of each stem; builders count the last norm as a layer more.
    last = dict(sorted(_layer(name) for name in model if known[kind_of(name)] > 1))
    has_tables = any(ROTARY.search(name) for name in model.keys() & reference.keys())
    lost = {name for name, array in reference.items() if array.ndim == 1 and name not in model}
    lost |= {name for name in reference.keys() - model.keys() if has_tables and ROTARY.search(name)}
    for name in sorted(lost):  # equal ones, as folded norms of ones, may be stored once, and zeros not at all
        alike = [array for array in model.values() if array.shape == reference[name].shape]
        is_there = any(is_one(reference[name], array) or (array == 1).all() for array in alike)
        stem, number = _layer(name)
        is_expected = reference[name].ndim > 1 or (kind_of(name) in kinds and number <= last.get(stem, -1))
        if is_expected and reference[name].any() and not is_there:
            causes[name] = "is missing"
    return causes


def is_alike(table: Array, other: Array) -> bool:
    """Whether most numbers of some rows of two tables of one shape are equal."""
    some = slice(None, None, -(-len(table) // 16))
    return (what := _apart("", table[some], other[some])) is None or (what.share < 0.5 and not is_mask(table))


def is_mask(array: Array) -> bool:
    """Whether all numbers are 0 or hide positions, as those of masks [..., S, S] or [1, 1, S, T] do."""
    if array.ndim < 2 or (array.ndim < 4 and array.shape[-1] != array.shape[-2]):
        return False
    return array.dtype == bool or all(((part == 0) | (part <= HIDDEN)).all() for _, part in blocks_of(array))


def is_one(array: Array, other: Array) -> bool:
    """Whether two constants are equal but for rounding and an added 1, as in Gemma's norms."""
    return array.shape == other.shape and not (_apart("", array, other) and _apart("", array, other, 1))


def meant_others(names: Collection[str], others: Collection[str], kind: Callable[[str], str]) -> set[str]:
    """The `others` that were changed on purpose: their kind has several constants, most of which differ."""
    all_kinds, other_kinds = Counter(map(kind, names)), Counter(map(kind, others))
    return {name for name in others if 1 < all_kinds[kind(name)] < 2 * other_kinds[kind(name)]}


def kind_of(name: str) -> str:
    """What a name has in common over the layers."""
    return re.sub(r"\d+", "#", name)


def _layer(name: str) -> tuple[str, int]:
    """The part of a name before its first number, and that number; 0 for a name without one."""
    stem, *rest = re.split(r"(\d+)", name, maxsplit=1)
    return stem, int(rest[0]) if rest else 0


def _broken(array: Array) -> str:
    """The rows of an array that have NaN or, unless it is a mask (else zeros and ones), infinity; empty without any."""
    rows: list[int] = []
    for first, block in blocks_of(array):
        is_finite = np.isfinite(block)
        if is_finite.all() or (not np.isnan(block).any() and np.isin(block[is_finite], (0, 1)).all()):
            continue
        rows += (first + np.flatnonzero(~is_finite.all(1))).tolist()
    return _sentence(rows, array, "NaN or infinite") if rows else ""


def _apart(name: str, own: Array, other: Array, added: int = 0) -> Apart | None:
    """How two arrays differ beyond rounding, if they do. A number is added to `own`, as exporters fold Gemma's norms'
    1."""
    is_rotary, rows, count, squares, whole = bool(ROTARY.search(name)), [], 0, 0.0, 0.0
    for (first, left), (_, right) in zip(blocks_of(own), blocks_of(other), strict=True):
        if not added and _is_equal(left, right):
            continue
        left, right = left.astype(np.float32) + added, right.astype(np.float32)
        size = np.where(np.isfinite(left), np.abs(left), 0)
        limit = _EPSILON * np.maximum(size, size.max(1, keepdims=True, initial=0) / (16 if own.ndim < 2 else 1.95))
        if own.dtype.kind in "biu":
            limit = np.zeros_like(limit)
        elif are_frequencies(own):
            limit = _EPSILON * size
        if is_rotary:
            limit = np.maximum(limit, _EPSILON / 16 + _ANGLE * np.arange(first, first + len(left))[:, None])
        with np.errstate(invalid="ignore"):
            difference = np.abs(left - right)
            is_hidden = (np.maximum(left, right) <= HIDDEN) | (np.isnan(left) & np.isnan(right))
            is_other = ~((difference <= limit) | (left == right) | is_hidden)
        rows += (first + np.flatnonzero(is_other.any(1))).tolist()
        count += int(is_other.sum())
        squares += float(np.nansum(np.square(difference, dtype=np.float64)))
        whole += float(np.square(left, dtype=np.float64).sum())
    return Apart(rows, count / own.size, (squares / (whole or 1)) ** 0.5) if rows else None


def are_frequencies(array: Array) -> bool:
    """Whether these may be those of rotary positions, which fall to small ones: these decide at long distances."""
    if array.dtype.kind in "iu" or array.size != max(array.shape, default=0) or array.size < 3:
        return False
    numbers = array.reshape(-1).astype(np.float32)
    return bool((np.diff(numbers) <= 0).all() and 0 < 10 * numbers[-1] < numbers[0])


def _sentence(rows: list[int], array: Array, what: str) -> str:
    """ "rows 450 to 511 of 512 are others"."""
    if array.ndim < 2 or len(rows) == len(array):
        return f"is {what}"
    return f"{rows_of(rows, len(array))} {'is' if len(rows) == 1 else 'are'} {what}"


def rows_of(rows: list[int], num_rows: int) -> str:
    """ "2 of the rows 3 to 90 of 100"."""
    which = f"row {rows[0]:,}" if len(rows) == 1 else f"rows {rows[0]:,} to {rows[-1]:,}"
    some = f"{len(rows):,} of the " if rows[-1] - rows[0] + 1 > len(rows) else ""
    return f"{some}{which} of {num_rows:,}"


def outliers(distances: Mapping[str, Distance]) -> tuple[dict[str, str], set[str]]:
    """How far off the weights, or rows of them, are that rounding as in the other weights does not explain; and those
    of which more than half of a kind are: these were changed on purpose (AWQ's smoothing, SpinQuant's rotations)."""
    usual = float(np.median([distance.share for distance in distances.values()])) if len(distances) > 2 else 1.0
    limit = max(OUTLIER, 10 * usual)
    far = {name: f"has {100 * one.share:.0f} % of its numbers" for name, one in distances.items() if one.share > limit}
    for name, one in distances.items():
        if one.rows and name not in far:
            far[name] = f"has {rows_of(one.rows, one.num_rows)}"
    meant = meant_others(distances, far, kind_of)
    return {name: f"{far[name]} farther off than rounding puts any" for name in far if name not in meant}, meant


def pairs_of(reference: Constants, model: Constants) -> dict[str, Pair]:
    """By node name: each quantized product, table and experts' weight whose float one `reference` has."""
    floats, grids = float_weights(reference), model.grids
    alike = (name for name, grid in grids.items() if name in floats and floats[name].shape == grid.shape)
    return {name: (floats[name], grids[name], 0) for name in alike}


def checkpoint_pairs(tensors: Mapping[str, Array], model: Constants) -> dict[str, Pair]:
    """As `pairs_of`, of a checkpoint's tensors. They pair by layer, last word and shape, and a packed product of one
    side (`JOINED`) with its parts by rows; a part has its own name. A head that the checkpoint lacks is its table."""
    grids, pairs = model.grids, dict[str, Pair]()
    names, owns = by_word(grids), {key: tensors[name] for key, name in by_word(tensors).items()}
    for (layer, word), whole in [*owns.items()]:
        if word == "embed_tokens":
            owns.setdefault((None, "lm_head"), whole)
        parts = [(layer, part) for part in JOINED.get(word, ()) if (layer, part) in names]
        ends = np.cumsum([grids[names[part]].shape[0] for part in parts])
        owns |= dict(zip(parts, np.split(whole, ends), strict=False)) if parts else {}
    for (layer, word), name in names.items():
        parts = [(layer, part) for part in ((word,) if (layer, word) in owns else JOINED.get(word, ()))]
        parts = [part for part in parts if part in owns]  # keys may stand for values, too
        ends = np.cumsum([0, *(len(owns[part]) for part in parts)])
        for part, first in zip(parts, ends, strict=False) if ends[-1] == grids[name].shape[0] else ():
            if owns[part].shape[1:] == grids[name].shape[1:]:
                pairs[name if part[1] == word else f"{name}, {part[1]}"] = owns[part], grids[name], int(first)
    return pairs


def by_word(names: Iterable[str]) -> dict[tuple[int | None, str], str]:
    """The names of a decoder's weights by layer and last word, with the number for experts, where no other has both."""
    keys = {}
    for name in names:
        words = [word for word in re.split(r"[./]", name) if word not in _PLAIN_WORDS]
        if words and not _BESIDE.search(name):
            begin = words.index("experts") if "experts" in words else -1
            keys[name] = layer_of(name), _SYNONYMS.get(words[-1], ".".join(words[begin:]))
    known = Counter(keys.values())
    return {key: name for name, key in keys.items() if known[key] == 1}


def float_weights(constants: Constants) -> dict[str, Array]:
    """Weights of products, tables and experts as rows by outputs [N, K], mapped, by their nodes' plain names."""
    weights: dict[str, list[Array]] = {}
    for node in constants.model.graph.node:
        for part, (index, *others) in WEIGHTS.get(node.op_type, {}).items():
            view = constants.view(node.input[index]) if index < len(node.input) and not others else None
            if view is not None and view.ndim > 1:
                rows = view.T if _is_turned(node) else view.reshape(-1, view.shape[-1])
                weights.setdefault(part_name(node, part), []).append(rows)
    return {name: named[0] for name, named in weights.items() if len(named) == 1}


def _quantized_weights(constants: Constants) -> dict[str, Grid]:
    nodes, grids = constants.model.graph.node, dict[str, Grid]()
    readers = {value: node for node in nodes for value in node.input}
    for node in nodes:
        for part, inputs in WEIGHTS.get(node.op_type, {}).items():
            name, is_turned = part_name(node, part), _is_turned(node)
            values = [node.input[index] if index < len(node.input) else "" for index in inputs]
            if len(inputs) > 1:
                stored = constants.packed(values)
                grids |= {name: packed_grid(node, *stored)} if stored is not None else {}
                continue
            decoder = constants.maker.get(values[0])
            if decoder is not None and decoder.op_type == "Transpose":
                is_turned, decoder = not is_turned, constants.maker.get(decoder.input[0])
            if node.op_type == "Gather" and decoder is None:  # rows that are looked up before they are decoded
                decoder = readers.get(node.output[0])
                values += decoder.input[1:] if decoder is not None else []
            elif decoder is not None:
                values = [*decoder.input]
            if decoder is not None and decoder.op_type == "DequantizeLinear":
                stored = constants.packed(values)
                grid = dequantized_grid(decoder, *stored, is_turned=is_turned) if stored is not None else None
                grids |= {name: grid} if grid is not None else {}
        stored = constants.packed(_of_integers(node, constants, readers)) if node.op_type in _INTEGER_PRODUCTS else None
        grid = dequantized_grid(node, *stored, is_turned=True) if stored is not None else None
        grids |= {plain_name(node.name): grid} if grid is not None else {}
    return grids


def _of_integers(node: onnx.NodeProto, constants: Constants, readers: Mapping[str, onnx.NodeProto]) -> list[str]:
    """The stored numbers, scales and zero points of a product of integers. Its result is cast, and multiplied by the
    product of both sides' scales, unless the node does it itself."""
    if inputs := _INTEGER_PRODUCTS[node.op_type]:
        return [node.input[index] if index < len(node.input) else "" for index in inputs]
    value = node.output[0]
    while (reader := readers.get(value)) is not None and reader.op_type == "Cast":
        value = reader.output[0]
    scales = [name for name in (() if reader is None else reader.input) if name != value][:1]
    of_both = constants.maker.get(scales[0]) if scales else None
    weight_scales = [name for name in (scales if of_both is None else of_both.input) if name in constants.initializers]
    return [node.input[1], *(weight_scales[:1] or [""]), *node.input[3:4]]


def _is_turned(node: onnx.NodeProto) -> bool:
    """Whether the weight's last axis is its outputs."""
    return node.op_type == "MatMul" or (node.op_type == "Gemm" and not attribute(node, "transB", 0))


def rounding_of(
    model: Constants, reference: Constants | None, known: Mapping[str, Array], constants: Mapping[str, Array]
) -> float:
    """The mean KL in nats that rounding explains in a graph with exactly the reference's constants; infinite where it
    has others, or one of both rounds to 8 bits or to bfloat16. Inputs of products in 16 bits moved the quickstart's
    model by 6e-8 nats, and a random mixture of experts, whose router turns, by 0.02."""
    if reference is None or any(quantizing_operator(one.model) for one in (model, reference)):
        return math.inf
    nodes = [node for one in (model, reference) for node in graph_nodes(one.model)]
    types = {attribute(node, "to", TensorProto.FLOAT) for node in nodes}
    types |= {value.type.tensor_type.elem_type for one in (model, reference) for value in one.model.graph.input}
    types |= {tensor.data_type for one in (model, reference) for tensor in one.tensors.values()}
    is_rounded = few_bits(types) or TensorProto.BFLOAT16 in types or any(node.op_type == "Round" for node in nodes)
    theirs, own = ({name: one for name, one in held.items() if not ROTARY.search(name)} for held in (known, constants))
    more = {name: one for name, one in own.items() if name not in theirs and one.size > 1}
    # Adapters beside the base are matrices, or a vector a layer; a single vector may be a mask.
    has_more = any(one.ndim > 1 for one in more.values()) or meant_others(more, more, kind_of)
    if is_rounded or has_more or not all(name in own and _is_exact(one, own[name]) for name, one in theirs.items()):
        return math.inf
    return 0.05 if TensorProto.FLOAT16 in types else ROUNDING


def _is_exact(one: Array, other: Array) -> bool:
    """Whether two arrays are equal, but for being stored in the other's precision."""
    pairs = zip(blocks_of(one), blocks_of(other), strict=True) if one.shape == other.shape else ()
    return one.shape == other.shape and all(_is_equal(left, right) for (_, left), (_, right) in pairs)


def _is_equal(left: Array, right: Array) -> bool:
    """Whether numbers are equal in the precision of those that have the smaller one."""
    coarser = min((left.dtype, right.dtype), key=lambda dtype: dtype.itemsize)
    with np.errstate(over="ignore"):
        return np.array_equal(left.astype(coarser, copy=False), right.astype(coarser, copy=False))

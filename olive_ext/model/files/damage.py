"""What is damaged in a model's files, whether or not texts reach it: constants, and nodes (`node_numbers`). They are
compared with a reference's graph, or with a checkpoint's tensors and config.json.

Knows files, and not what runs them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from os.path import normpath, relpath
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx.inliner
import onnx.numpy_helper

from olive_ext.graph.nodes import layer_of, quantizing_operator
from olive_ext.model.files.constants import (
    ROTARY,
    ROUNDING,
    Constants,
    Differing,
    apart,
    are_frequencies,
    broken,
    by_word,
    checkpoint_pairs,
    float_weights,
    graph_nodes,
    is_alike,
    is_mask,
    outliers,
    pairs_of,
    rounding_of,
    rows_of,
)
from olive_ext.model.files.content import checkpoint_floats, load_graph
from olive_ext.model.files.grids import (
    AT_A_TIME,
    Array,
    Grid,
    Pair,
    distance,
    factor_of,
    is_unlike,
    likeness_of,
    likeness_to_grid,
    other_rows,
    other_tokens,
)
from olive_ext.model.files.node_numbers import (
    BASES,
    differing_numbers,
    differing_settings,
    numbers_against,
    rewired,
    ropes_of,
    scaled_ropes,
)
from olive_ext.model.files.package_config import json_object
from olive_ext.model.types import ModelFiles

_EXPERT = re.compile(r"[./]experts[./]\d")
"""Names of one expert's weights, which a router may send no text to."""

_SELECTED = re.compile(rf"embed|position|pos_emb|wte|wpe|relative|lm_head|rotary|[Gg]ather|{_EXPERT.pattern}|/fc\d$")
"""Names of weights of which texts need not show all rows: tables of tokens and positions, the head, and experts."""

_POSITIONS = re.compile(r"position|pos_emb|wpe")
"""Names of tables of positions, whose rows are the last axis: a picture's may have one table for each of its axes."""

_TABLE = re.compile(r"(embed_tokens|wte|embed_in|word_embeddings)\.weight$")
_HEAD = "lm_head.weight"
_LAST_NORM = re.compile(r"(^|\.)(final_norm_layernorm|final_layernorm|(?<!\d\.)norm|norm_f|ln_f)\.weight$")
_MOST_HEADS, _MOST_TRAINED = 15, 0.9
"""Rows of so few numbers are alike by chance. Training changes nearly all of them."""

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


class Texts(NamedTuple):
    """What texts measured of a model, and what they reach of it."""

    nats: float | None = None
    """The mean KL; None where they measured none."""

    longest: int | None = None
    """The positions of the longest one: no window is as long, and no position beyond is read."""

    num_tokens: int | None = None
    """The tokenizer's ids: what is for ids beyond is never read."""

    vocab_sizes: Collection[int | None] = ()
    """How many ids tables and heads may have, by which they are known."""

    unreached: Collection[str] = ()
    """Parts of the model beside the decoder that they never run."""

    @property
    def are_near(self) -> bool:
        """Whether the mean KL is small (`_NEAR`)."""
        return self.nats is not None and self.nats < _NEAR

    def selects(self, name: str, *sizes: int) -> bool:
        """Whether a text need not show all rows of a weight, by its name or, outside of layers, its axes."""
        return _SELECTED.search(name) is not None or (self.is_long(*sizes) and layer_of(name) is None)

    def is_long(self, *sizes: int) -> bool:
        """Whether an axis has as many numbers as there are tokens."""
        return not {*sizes}.isdisjoint({*self.vocab_sizes, self.num_tokens})

    def end(self, name: str, size: int) -> int | None:
        """The end of the tokens on an axis of a weight; None for all of it."""
        return self.num_tokens if size in self.vocab_sizes and layer_of(name) is None else None

    def reached(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Tables, heads and masks without what no text reaches."""

        def cut(name: str, array: Array) -> Array:
            if array.ndim == 2 and ROTARY.search(name):
                return array[: self.longest]
            if is_mask(array):
                return array[..., : self.longest, : self.longest]
            is_cut = array.ndim < 3 and sum(size in self.vocab_sizes for size in array.shape) == 1
            return array[tuple(slice(self.end(name, size)) for size in array.shape)] if is_cut else array

        return {name: cut(name, array) for name, array in arrays.items()}


def damage(model: ModelFiles, reference: ModelFiles | None, texts: Texts) -> Damage:
    """The damage to a model's constants and nodes that texts need not show, and what they show of them.

    Texts judge what every text reaches: whole vectors and products, which smoothing, folded norms, rotations and
    training change, and numbers of nodes beyond `_LIMITS`. Such a constant is damage only if texts were not near, and
    it has nothing in common with the reference's, or is a single vector of a float model. Files judge the rest: rows of
    tables that differ, experts, rotary tables, NaN and infinity, windows, and every part that is `unreached`. The
    reference is an ONNX model, a checkpoint, or not on disk. Raises `ModelError`."""
    findings, judged, uncompared, rounding = dict[str, str](), list[str](), 0, math.inf if model.pipeline else 0.0
    floats, config, others = {}, {}, dict[str, list[Path]]()
    if reference is not None and reference.decoder.suffix == ".onnx":
        others = _counterparts(model, reference)
    elif reference is not None:
        floats, config = checkpoint_floats(reference.directory), _configuration(reference)
    if model.decoder.suffix != ".onnx":
        both = (floats, checkpoint_floats(model.directory))
        floats, constants = (texts.reached(_with_head(*pair)) for pair in (both, both[::-1]))
        causes, shown = _compared(floats, constants, {}, texts)
        if not floats.keys() & constants.keys() <= {*shown}:  # another model's positions may turn otherwise
            settings = config, _configuration(model)
            causes |= differing_settings(*settings, texts.longest, with_reached=not texts.are_near)
        if reference is not None and "auto_map" in config | _configuration(model):
            shown += _other_code(model, reference)
        return Damage(causes, tuple(shown), len(constants.keys() - floats.keys()))
    for part, graph in (_decoders(model) | _companions(model)).items():
        own, known, other = _constants([graph], texts.longest), floats, None
        alike, numbers = set[str](), dict[str, str]()
        suffix, is_unreached = f", {part}" if part else "", part in texts.unreached
        pairs: dict[str, Pair] = {}
        constants, is_quantized = own.floats, quantizing_operator(own.model) != ""
        with_reached = is_unreached or not (texts.are_near or (is_quantized and texts.nats is not None))
        if part in others:
            other = _constants(others[part], texts.longest)
            pairs, known = pairs_of(other, own), other.floats
            pairs |= _pairs_by_content(float_weights(other), own, _named(pairs) | other.grids.keys(), texts)
            shared = own.grids.keys() & other.grids.keys()
            alike = {name for name in shared if all(map(np.array_equal, own.grids[name], other.grids[name]))}
            theirs = other.grids | _renamed_heads(other.grids, own.grids, texts)
            for name in sorted((own.grids.keys() & theirs.keys()) - alike - _named(pairs)):
                grid = own.grids[name]
                end = texts.end(name, grid.shape[0])
                rows = [row for row in other_rows(theirs[name], grid) if end is None or row < end]
                if rows and texts.selects(name, grid.shape[0]):
                    numbers[name] = f"has {rows_of(rows, grid.shape[0])} that are not the reference's"
            numbers |= differing_numbers(other, own, texts.longest, with_reached=with_reached)
            for name, one in rewired(other, own).items():
                if one.is_reached and texts.are_near and not is_unreached:
                    judged.append(f"{name}{suffix}")
                else:
                    numbers[name] = one.how
        elif config and part not in model.companions:
            known = _turned(floats, constants) | floats | rotary_tables(config, constants)
            numbers = numbers_against(config, own.model, texts.longest, with_reached=with_reached)
            pairs = checkpoint_pairs(floats, own)
            pairs |= _pairs_by_content(floats, own, _named(pairs), texts)
        known, constants = map(texts.reached, (known, constants))
        pairs = {name: (one[: texts.end(name, len(one))], grid, first) for name, (one, grid, first) in pairs.items()}
        known = _renamed(known, constants)
        which = {"is_quantized": is_quantized, "is_unreached": is_unreached}
        causes, shown = _compared(known, constants, pairs, texts, **which)
        is_far = texts.nats is not None and texts.nats > ROUNDING and not (causes or numbers)
        rounding = max(rounding, rounding_of(own, other, known, constants) if is_far else math.inf)
        unpaired = own.grids.keys() - _named(pairs) - alike
        uncompared += len(unpaired) + len(constants.keys() - known.keys())
        findings |= {f"{name}{suffix}": how for name, how in (causes | numbers).items()}
        judged += [f"{name}{suffix}" for name in shown]
    return Damage(findings, tuple(judged), uncompared, rounding)


def _counterparts(model: ModelFiles, reference: ModelFiles) -> dict[str, list[Path]]:
    """The reference's graphs that hold what each graph of the model does: that of its name, and of a decoder that is
    cut otherwise all."""
    parts, known = _decoders(model), {part: [file] for part, file in _decoders(reference).items()}
    known = known if parts.keys() == known.keys() else {part: [*_decoders(reference).values()] for part in parts}
    return known | {part: [file] for part, file in _companions(reference).items()}


def _compared(
    reference: Mapping[str, Array],
    constants: Mapping[str, Array],
    pairs: Mapping[str, Pair],
    texts: Texts,
    *,
    is_quantized: bool = False,
    is_unreached: bool = False,
) -> tuple[dict[str, str], list[str]]:
    """What is damage among constants that are not the reference's and quantized weights that are far from their float
    ones, and what is left to the texts: what all of them read, and what was changed on purpose."""
    reference, constants = map(_flat, (reference, constants))
    differing = apart(reference, constants)
    distances = {name: distance(*pair) for name, pair in pairs.items()}
    far, meant = outliers(distances)
    every = differing.found | differing.meant
    others = {name: what.sentence(constants[name]) for name, what in every.items()} | far
    few = {name: one.num_rows for name, one in distances.items() if 0 < 2 * len(one.rows) < one.num_rows}
    rows = {name for name, num_rows in few.items() if texts.selects(name, num_rows)}
    judged = {*differing.meant}
    if not is_unreached:
        judged = {name for name in far.keys() - rows if texts.are_near or not is_unlike(likeness_to_grid(*pairs[name]))}
        judged |= _left_to_texts(differing, reference, constants, texts)
    if not texts.are_near and not is_quantized and len(judged) == 1:
        judged = {name for name in judged if constants[name].ndim > 1}
    causes = {name: how for name, how in others.items() if name not in judged}
    return causes | broken(reference, constants), sorted(judged | meant)


def _with_head(floats: dict[str, Array], other: Collection[str]) -> dict[str, Array]:
    """A checkpoint's tensors with the head that the `other` one stores: its table of tokens where it has none."""
    tables = [one for name, one in floats.items() if _TABLE.search(name)]
    return {_HEAD: tables[0], **floats} if tables and _HEAD in other else floats


def _constants(files: Sequence[Path], longest: int | None) -> Constants:
    """Those of graphs, in which functions of their own are written out where onnx can do it: not of calls with more
    inputs than a function takes. A node without a name has that of its first output. Windows are off that a text of
    `longest` positions does not leave."""
    model, *others = map(load_graph, files)
    for other in others:  # two may hold the same layers, for prompts and for single tokens
        for kind in ("node", "initializer"):
            own, more = (getattr(one.graph, kind) for one in (model, other))
            known = {one.name or one.output[0] for one in own}
            own.extend(one for one in more if (one.name or one.output[0]) not in known)
            del more[:]
        model.graph.MergeFrom(other.graph)
    with suppress(RuntimeError):
        model = onnx.inliner.inline_local_functions(model) if model.functions else model
    for node in graph_nodes(model):
        node.name = node.name or node.output[0]
        for entry in node.attribute:
            if entry.name == "local_window_size" and longest is not None and entry.i >= longest:
                entry.i = -1
    return Constants(model, files[0])


def _configuration(files: ModelFiles) -> dict[str, Any]:
    file = files.directory / "config.json"
    return json_object(file) if file.is_file() else {}


def _other_code(model: ModelFiles, reference: ModelFiles) -> list[str]:
    """A checkpoint's own code that is not the reference's."""
    files = ((file, reference.directory / file.name) for file in sorted(model.directory.glob("*.py")))
    return [own.name for own, file in files if not file.is_file() or own.read_bytes() != file.read_bytes()]


def _decoders(files: ModelFiles) -> dict[str, Path]:
    """The graphs of a decoder: one, or a pipeline's by their place."""
    return {"": files.decoder, **{relpath(stage, files.directory): stage for stage in files.stages}}


def token_stages(files: ModelFiles) -> set[str]:
    """The graphs of a pipeline that only generated tokens run, by their place."""
    written = files.genai_config.get("model", {}).get("decoder", {}).get("pipeline", ())
    stages = [stage for part in written for stage in part.values()]
    reads_prompts = {normpath(one["filename"]): False for one in stages}
    reads_prompts |= {normpath(one["filename"]): True for one in stages if one.get("run_on_prompt", True)}
    return {name for name, does in reads_prompts.items() if not does}


def _companions(files: ModelFiles) -> dict[str, Path]:
    return {part: companion.graph for part, companion in files.companions.items()}


def _flat(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Vectors and matrices without axes of size 1, in which tools for some devices store them: masks have theirs."""
    flat = {name: one.squeeze() for name, one in arrays.items() if one.ndim > 2 and not is_mask(one)}
    return {**arrays, **{name: one for name, one in flat.items() if one.ndim in (1, 2)}}


def _left_to_texts(
    differing: Differing, reference: Mapping[str, Array], constants: Mapping[str, Array], texts: Texts
) -> set[str]:
    """Those of the `constants` that differ from the `reference`'s of which every text reads what differs, or that were
    changed on purpose. A text need not reach an expert, or some tokens of a table or head (`other_tokens`), or part of
    a stack of experts. Where texts were not near, a matrix must have something in common with the reference's."""
    names, lengths = set[str](), {*texts.vocab_sizes, texts.num_tokens}
    others = differing.found | differing.meant
    turned = [name for name in reference if ROTARY.search(name) and name in constants]
    pairs = [(reference[name], constants[name]) for name in turned if reference[name].ndim == 2]
    factors = [factor_of(*pair) for pair in pairs] if not others.keys().isdisjoint(turned) else []
    has_factor = bool(factors) and bool(np.ptp(factors) < 1e-2)  # which every position has
    for name, what in others.items():
        array, is_meant = constants[name], name in differing.meant
        is_table = texts.selects(name, *array.shape)
        is_rotary = ROTARY.search(name) is not None or are_frequencies(reference[name])
        is_hidden = is_rotary and not (has_factor and name in turned)
        is_hidden |= array.dtype.kind in "iu"  # perhaps ids, which are rare
        if not is_meant and (_EXPERT.search(name) or is_hidden or is_mask(reference[name])):
            continue
        if is_table and array.ndim == 1 and not is_meant and 2 * what.share < 1:
            continue
        is_narrow = array.ndim == 2 and array.shape[1] <= _MOST_HEADS  # one number a head for each distance
        if is_table and is_narrow and not is_meant and len(what.rows) < _MOST_TRAINED * len(array):
            continue
        axis = next((axis for axis, size in enumerate(array.shape) if size in lengths), None)
        known, own = reference[name], array
        if array.ndim > 2 and _POSITIONS.search(name):
            known, own, axis = known.reshape(-1, known.shape[-1]), own.reshape(-1, own.shape[-1]), 0
        if array.ndim > 1 and (is_table or array.ndim > 2) and other_tokens(known, own, axis):
            continue
        if array.ndim == 2 and not (texts.are_near or is_meant) and is_unlike(likeness_of(reference[name], array)):
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


def _turned(floats: Mapping[str, Array], model: Mapping[str, Array]) -> dict[str, Array]:
    """A checkpoint's matrices as products take them, by the graph's names; square ones as far as they are alike."""
    owns = {key: floats[name] for key, name in by_word(floats).items() if floats[name].ndim == 2}
    for table in [one for (_, word), one in owns.items() if word == "embed_tokens"]:
        owns.setdefault((None, "lm_head"), table)
    names = {name: owns[key].T for key, name in by_word(model).items() if key in owns}
    return {
        name: one
        for name, one in names.items()
        if one.shape == model[name].shape and (one.shape[0] != one.shape[1] or is_alike(one, model[name]))
    }


def _named(pairs: Iterable[str]) -> set[str]:
    """The names of whole weights, whose parts have names of their own."""
    return {name.split(",")[0] for name in pairs}


def _pairs_by_content(
    floats: Mapping[str, Array], model: Constants, named: Collection[str], texts: Texts
) -> dict[str, Pair]:
    """Quantized tables and heads by other names than the `named` ones, or of another length, each with the nearest
    float one."""
    pairs: dict[str, Pair] = {}
    for name, grid in model.grids.items():
        num_rows, width = grid.shape
        alike = [one[:num_rows] for one in floats.values() if one.shape[1:] == (width,) and texts.is_long(len(one))]
        if name not in named and alike and texts.is_long(num_rows):
            shares = [distance(one, grid).share for one in alike]
            nearest = alike[shares.index(min(shares))]
            pairs |= {} if is_unlike(likeness_to_grid(nearest, grid)) else {name: (nearest, grid, 0)}
    return pairs


def _renamed_heads(reference: Mapping[str, Grid], model: Mapping[str, Grid], texts: Texts) -> dict[str, Grid]:
    """The reference's quantized tables and heads without one of their name, under the names of the only ones of their
    shape."""
    rest = [
        {name: grid for name, grid in own.items() if name not in other and texts.is_long(grid.shape[0])}
        for own, other in ((reference, model), (model, reference))
    ]
    alike = {name: [one for one in rest[0].values() if one.shape == grid.shape] for name, grid in rest[1].items()}
    return {name: found[0] for name, found in alike.items() if len(found) == 1}


def _turn(name: str) -> str:
    match = ROTARY.search(name)
    return "" if match is None else match[2]


def rotary_tables(config: Mapping[str, Any], constants: Mapping[str, Array]) -> dict[str, Array]:
    """The tables of rotary positions by config.json, under the model's names for them. Empty where positions are
    scaled, and for tables of another width than the heads'."""
    text = config.get("text_config", config)
    ropes = ropes_of(text)
    bases = [float(rope[key]) for rope in (text, *ropes) for key in BASES if rope.get(key)]
    size = text.get("head_dim") or text.get("hidden_size", 0) // (text.get("num_attention_heads") or 1)
    shares = {rope.get("partial_rotary_factor") or 1 for rope in (text, *ropes)}
    tables = {}
    for name, table in constants.items() if bases and not scaled_ropes(text) else ():
        turn = {"cos": np.cos, "sin": np.sin}.get(_turn(name))
        half = table.shape[-1] if table.ndim == 2 and turn is not None else 0
        if turn is None or not half or len(table) < 2 or all(half != int(size * share) // 2 for share in shares):
            continue
        angles = [base ** -(np.arange(half) / half) for base in bases]
        nearest = angles[int(np.argmin([np.abs(turn(angle) - table[1]).max() for angle in angles]))]
        tables[name] = np.empty(table.shape, np.float32)
        for rows in np.array_split(np.arange(len(table)), 1 + table.size // AT_A_TIME):
            tables[name][rows] = turn(np.outer(rows, nearest))
    return tables

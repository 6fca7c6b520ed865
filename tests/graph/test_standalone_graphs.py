"""Small graphs against numpy, and how much an index of theirs moves."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from onnx import TensorProto

from olive_ext.graph import standalone_graphs
from olive_ext.graph.standalone_graphs import (
    INPUTS,
    MOST_BYTES,
    RowTensor,
    attention_graph,
    candidates_graph,
    copy_graph,
    copy_positions_graph,
    fold_graph,
    move_graph,
    pick_graph,
    put_rows_graph,
    stack_graph,
    zeros_graph,
)
from tests.graph.index_bytes import index_bytes, profiled

FLOAT, FLOAT16, INT64 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT64
Arrays = dict[str, np.ndarray]
Case = tuple[bytes, Arrays, Arrays]
"""A graph, its inputs, and the outputs that numpy finds."""

WIDE = 4096
"""Features of a row: 16 KiB."""


def _random(*shape: int, kind: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(kind)


def _ints(*values: int, kind: Any = np.int64) -> np.ndarray:
    return np.array(values, kind)


STACKED = [(2, None, 64), (1, None, 512), (4, None, 64), (None, 1500), (3,), (4, 8), (48, 32)]
"""Layers that differ, one with heads of 2 KiB, a cache of three axes, states of less than 1 KiB and of more."""


def _stack(num_parts: int) -> Case:
    rows, positions = [_ints(2, 0), _ints(1)], [_ints(3, 4, 0), _ints(5, 5, 1)]
    feeds: Arrays = {}
    expected: Arrays = {}
    for part in range(num_parts):
        feeds |= {f"rows_{part}": rows[part], f"positions_{part}": positions[part]}
    for i, shape in enumerate(STACKED):
        taken = []
        for part in range(num_parts):
            x = feeds[f"x{i}_{part}"] = _random(3, *(6 if size is None else size for size in shape))
            axis = 1 + shape.index(None) if None in shape else 0
            taken.append(x[rows[part]].take(positions[part], axis) if axis else x[rows[part]])
        expected[f"y{i}"] = np.concatenate(taken)
    return stack_graph([RowTensor(FLOAT, shape) for shape in STACKED], num_parts), feeds, expected


def _whole() -> Case:
    parts = _random(1, 2, 5, 64), _random(3, 2, 5, 64)
    feeds = {f"x0_{part}": array for part, array in enumerate(parts)}
    graph = stack_graph([RowTensor(FLOAT, (2, None, 64))], 2, is_whole=True)
    return graph, feeds, {"y0": np.concatenate(parts)}


ROWS = [RowTensor(FLOAT16, (2, None, 512)), RowTensor(FLOAT16, (4, None, 96)), RowTensor(FLOAT, (2, None, 512))]
SLOTS = [_random(5, heads, 7, size, kind=kind) for heads, size, kind in ((2, 512, "e"), (4, 96, "e"), (2, 512, "f"))]


def _move(is_within: bool) -> Case:
    """Four positions of rows of the same tensors, where row 1 is source and target, or of others."""
    others = SLOTS if is_within else [-array[:4] for array in SLOTS]
    source, target = _ints(1, 3, kind=np.int32), _ints(2, 1, kind=np.int32)
    feeds = {"count": _ints(4), "source": source.reshape(2, 1, 1, 1), "target": target.reshape(2, 1, 1, 1)}
    expected: Arrays = {}
    for i, (x, r) in enumerate(zip(SLOTS, others, strict=True)):
        feeds |= {f"x{i}": x, f"r{i}": r}
        expected[f"y{i}"] = x.copy()
        expected[f"y{i}"][target, :, :4] = r[source, :, :4]
    return move_graph(ROWS), feeds, expected


def _positions() -> Case:
    """Tensors of positions of one row, of eight rows and again of eight; position 1 is source and target."""
    arrays = [_random(6 * parts, 16).view(np.int32) for parts in (1, 8, 8)]
    source, target = _ints(1, 4, 5), _ints(2, 1, 0)
    expected = {f"y{i}": array.copy() for i, array in enumerate(arrays)}
    for i, array in enumerate(arrays):
        expected[f"y{i}"].reshape(6, -1)[target] = array.reshape(6, -1)[source]
    feeds = {f"x{i}": array for i, array in enumerate(arrays)}
    graph = copy_positions_graph([(TensorProto.INT32, parts) for parts in (1, 8, 8)])
    return graph, {**feeds, "source": source, "target": target}, expected


def _pick() -> Case:
    x = _random(2, 3, WIDE)
    return pick_graph(FLOAT, 3, WIDE), {"x": x, "rows": _ints(5, 0, 0)}, {"y": x.reshape(6, WIDE)[[5, 0, 0]]}


def _pick_of_short_rows() -> Case:
    x = _random(2, 3, 8)
    return pick_graph(FLOAT, 3, 8), {"x": x, "rows": _ints(5, 0, 0)}, {"y": x.reshape(6, 8)[[5, 0, 0]]}


def _put_rows() -> Case:
    a, b = _random(4, WIDE), _random(2, WIDE)
    return put_rows_graph(FLOAT, WIDE), {"a": a, "b": b, "rows": _ints(4, 5, 2, 3)}, {"y": np.concatenate([b, a[2:]])}


def _fold() -> Case:
    x = _random(1, 8, WIDE)
    feeds = {"x": x, "rows": _ints(2, 3), "count": _ints(6)}
    return fold_graph(FLOAT, 3), feeds, {"y": x[:, :6].reshape(2, 3, WIDE)}


def _candidates() -> Case:
    logits = _random(4, 128_000)
    ids = np.argsort(-logits[1:3], axis=1)[:, :5]
    feeds = {"logits": logits, "first": _ints(1), "stop": _ints(3), "count": _ints(5)}
    return candidates_graph(128_000), feeds, {"logprobs": np.take_along_axis(logits[1:3], ids, 1), "ids": ids}


def _attention() -> Case:
    """One token after nothing has its own value."""
    tokens, past = _random(1, 1, 128), np.zeros((1, 2, 0, 64), np.float32)
    values = [tokens, tokens, tokens, past, past, _ints(0, kind=np.int32), np.array(1, np.int32)]
    present = tokens.reshape(1, 2, 1, 64)
    expected = {"attended": tokens, "present_key": present, "present_value": present}
    return attention_graph(FLOAT, 2, 64), dict(zip(INPUTS, values, strict=True)), expected


CASES: Mapping[str, tuple[Callable[[], Case], ...]] = {
    "stack_graph": (partial(_stack, 1), partial(_stack, 2), _whole),
    "move_graph": (partial(_move, True), partial(_move, False)),
    "copy_positions_graph": (_positions,),
    "copy_graph": (lambda: (copy_graph([FLOAT16]), {"x0": SLOTS[0]}, {"y0": SLOTS[0]}),),
    "zeros_graph": (lambda: (zeros_graph(), {"count": _ints(9)}, {"y": np.zeros(9, np.uint8)}),),
    "pick_graph": (_pick, _pick_of_short_rows),
    "put_rows_graph": (_put_rows,),
    "fold_graph": (_fold,),
    "candidates_graph": (_candidates,),
    "attention_graph": (_attention,),
}


def builders(module: ModuleType) -> list[str]:
    """The public functions of a module that make a graph."""
    return [
        name
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and function.__annotations__["return"] == "bytes" and name[0] != "_"
    ]


def test_graphs_are_numpys_and_no_index_moves_more_than_a_kibibyte(tmp_path: Path) -> None:
    """Whole blocks of 512 KiB were copied by one index until an H200 showed the price."""
    assert sorted(builders(standalone_graphs)) == sorted(CASES)
    for name, case in ((name, case) for name, cases in CASES.items() for case in cases):
        graph, feeds, expected = case()
        session = profiled(graph, tmp_path)
        found = dict(zip(expected, session.run(None, feeds), strict=True))
        assert [output.name for output in session.get_outputs()] == list(expected)
        assert [key for key in expected if not np.array_equal(found[key], expected[key])] == [], name
        assert {op: each for op, each in index_bytes(session).items() if each > MOST_BYTES} == {}, name

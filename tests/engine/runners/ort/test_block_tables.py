"""Block tables against slots that each hold a list of their own, for random forks, rewinds and writes; and the bytes
of pools, of any type and size, after copies. Weights that a graph takes as inputs: other numbers hold from the next
run on, or from the opening of a session. Which provider runs the nodes of a session."""

from __future__ import annotations

import ctypes
from collections import Counter
from math import prod
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from olive_ext.engine.forms.kv_store import COPIED_BYTES, KvPlace
from olive_ext.engine.forms.packed import PagedKv
from olive_ext.engine.runners.ort.inputs import BoundWeights
from olive_ext.engine.runners.ort.opening import untaken
from olive_ext.engine.scheduling.blocks import BlockTables
from olive_ext.engine.step import Columns, Copy, Row
from olive_ext.graph.nodes import model_of
from olive_ext.model.decisions import BLOCK_SIZE
from olive_ext.model.providers.devices import Device
from olive_ext.model.types import ITEM_BYTES, DecoderSpec, InputSpec, KvTensor, Role, TensorSpec
from tests.graph.index_bytes import index_bytes, profiled
from tests.graph.text import model_from, session_of

SLOTS, CAPACITY, BLOCK = 4, 22, 4

OPERATIONS = st.lists(
    st.tuples(st.integers(0, SLOTS - 1), st.integers(0, SLOTS - 1), st.integers(0, CAPACITY), st.integers(1, 9)),
    max_size=40,
)
"""A fork from the first slot to the second up to a length, then as many tokens written behind that."""


class Model:
    """The tables with memory behind them, and what each slot should hold."""

    def __init__(self) -> None:
        self.tables = BlockTables(SLOTS, CAPACITY, BLOCK)
        self.memory = [[-1] * BLOCK for _ in range(self.tables.num_blocks)]
        self.expected: list[list[int]] = [[] for _ in range(SLOTS)]
        self.next_token = 0

    def fork(self, source: int, target: int, length: int) -> None:
        self.tables.fork(Copy(source, target, length))
        self.expected[target] = self.expected[source][:length]

    def write(self, slot: int, past: int, count: int) -> None:
        row, before = Columns.of([Row(slot, past, (0,) * count)]), self.tables.table(slot)
        is_due = self.tables.without_room(row) == [(slot, past, count)]
        copy = self.tables.make_room(slot, past, count)
        assert is_due or (copy is None and self.tables.table(slot) == before)
        if copy is not None:
            moved = slice(copy.num_positions)
            self.memory[copy.target][moved] = self.memory[copy.source][moved]
        assert self.tables.without_room(row) == []
        assert self.tables.make_room(slot, past, count) is None
        tokens = list(range(self.next_token, self.next_token + count))
        self.next_token += count
        table = self.tables.table(slot)
        for position, token in enumerate(tokens, start=past):
            self.memory[table[position // BLOCK]][position % BLOCK] = token
        self.expected[slot] = [*self.expected[slot][:past], *tokens]

    def check(self) -> None:
        for slot, expected in enumerate(self.expected):
            held = [token for block in self.tables.table(slot) for token in self.memory[block]]
            assert held[: len(expected)] == expected
        named = Counter(block for slot in range(SLOTS) for block in self.tables.table(slot))
        assert self.tables.num_blocks - self.tables.num_free == len(named)
        assert all(count == self.tables._num_users[block] for block, count in named.items())


@settings(max_examples=4 * settings().max_examples)
@given(OPERATIONS)
def test_slots_hold_what_was_written_however_they_share(operations: list[tuple[int, int, int, int]]) -> None:
    model = Model()
    for source, target, length, count in operations:
        length = min(length, len(model.expected[source]))
        if source != target:
            model.fork(source, target, length)
        past = min(length, CAPACITY - count)
        model.write(target, past, count)
        model.check()


POOLS = [
    *((TensorProto.FLOAT, 2, size) for size in (64, 96, 128, 256, 512)),
    *((TensorProto.FLOAT16, heads, size) for heads, size in ((8, 64), (4, 256), (1, 512), (1, 576))),
    *((TensorProto.BFLOAT16, 2, 128), (TensorProto.INT8, 8, 64), (TensorProto.FLOAT8E4M3FN, 2, 96)),
    (TensorProto.INT8, 1, 35),
]
"""Type, heads and head size of each layer's caches: a float model's of every size, and layers that differ as Gemma 4's
and a latent cache do; bf16, int8 and fp8; a row that no word but a byte divides."""


class Paged:
    """A store over pools of any types."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        names = [[f"{name}{i}" for name in ("past", "present")] for i in range(len(POOLS))]
        nodes = [helper.make_node("Identity", [past], [present]) for past, present in names]
        pasts, presents = (
            [
                helper.make_tensor_value_info(both[place], kind, [None, BLOCK_SIZE, heads, size])
                for both, (kind, heads, size) in zip(names, POOLS, strict=True)
            ]
            for place in (0, 1)
        )
        graph = model_of(helper.make_graph(nodes, "decoder", pasts, presents), 21)
        caches = [KvTensor(*both, *pool) for both, pool in zip(names, POOLS, strict=True)]
        table = InputSpec(Role.BLOCK_TABLE, TensorSpec("block_table", TensorProto.INT32, ("B", "blocks")))
        logits = TensorSpec("logits", TensorProto.FLOAT, ("N", 8))
        spec = DecoderSpec((table,), tuple(caches), logits, 8, 600, True)
        provider = f"{device.upper()}ExecutionProvider"
        session = ort.InferenceSession(graph.SerializeToString(), providers=[provider])
        self.opened: list[ort.InferenceSession] = []

        def opened(graph: bytes) -> ort.InferenceSession:
            self.opened.append(profiled(graph, folder, provider))
            return self.opened[-1]

        self.kv = PagedKv(KvPlace(session, spec, 4, Device(device), opened))
        self.kv.reserve(600)

    def share(self) -> list[Row]:
        """Three slots share blocks of slot 0 where they go on: block 2 behind 18 and 2 of its positions, block 1 behind
        44. What they write next."""
        self.kv.bind([Row(0, 0, (0,) * 540)])
        self.kv.copy([Copy(0, 1, 530), Copy(0, 2, 514), Copy(0, 3, 300)])
        return [Row(1, 530, (0,)), Row(2, 514, (0, 0)), Row(3, 300, (0,) * 5)]

    def memories(self) -> list[np.ndarray]:
        """The bytes of each pool, [blocks, positions, bytes of a position]."""
        found = []
        for (kind, heads, size), pool in zip(POOLS, self.kv._pools, strict=True):
            shape = self.kv.capacity.blocks.number, BLOCK_SIZE, heads * size * ITEM_BYTES[kind]
            found.append(np.ctypeslib.as_array((ctypes.c_uint8 * prod(shape)).from_address(pool._value.data_ptr())))
            found[-1] = found[-1].reshape(shape)
        return found


def test_positions_of_a_prefix_are_copied_in_pools_of_every_type_by_short_rows(tmp_path: Path) -> None:
    paged = Paged(tmp_path)
    for i, memory in enumerate(paged.memories()):
        memory[...] = np.random.default_rng(i).integers(0, 256, memory.shape)
    rows, tables = paged.share(), paged.kv._tables
    before, shared = [memory.copy() for memory in paged.memories()], tables.table(0)
    for _ in range(2):  # the second time every slot alone names what it writes to
        paged.kv.bind(rows)
    for old, new in zip(before, paged.memories(), strict=True):
        for slot, place, count in ((1, 2, 18), (2, 2, 2), (3, 1, 44)):
            old[tables.table(slot)[place], :count] = old[shared[place], :count]
        assert (old == new).all()
    assert len(paged.opened) == 1
    assert index_bytes(paged.opened[0]) == {"Gather": COPIED_BYTES, "ScatterND": COPIED_BYTES}


def opened(weights: BoundWeights) -> ort.InferenceSession:
    """x + w, with w of ones in the graph."""
    model = model_from("sum (float[2] x) => (float[2] y) { y = Add (x, w) }", w=np.ones(2, np.float32))
    weights.edit(model)
    session = session_of(model)
    weights.attach(Device("cpu"))
    return session


def run(session: ort.InferenceSession, weights: BoundWeights) -> list[float]:
    binding = session.io_binding()
    binding.bind_cpu_input("x", np.zeros(2, np.float32))
    weights.bind(binding)
    binding.bind_output("y")
    session.run_with_iobinding(binding)
    return binding.get_outputs()[0].numpy().tolist()


def test_other_numbers_hold_until_they_are_put_back_or_from_the_opening_on() -> None:
    """An encoder's session is opened when the first item comes."""
    other = {"w": np.array([2, 3], np.float32)}
    weights, early = (BoundWeights({"w": np.ones(2, np.float32)}) for _ in range(2))
    session = opened(weights)
    assert run(session, weights) == [1, 1]
    weights.put(other)
    assert run(session, weights) == [2, 3]
    weights.put_back(["w"])
    assert run(session, weights) == [1, 1]
    early.put(other)
    assert run(opened(early), early) == [2, 3]


@pytest.mark.parametrize(("provider", "is_told"), [("CPUExecutionProvider", False), ("QNNExecutionProvider", True)])
def test_provider_without_a_product_is_told_by_the_session_s_own_record(provider: str, *, is_told: bool) -> None:
    """ONNX Runtime's record of a session on the CPU names no other provider."""
    options = ort.SessionOptions()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    model = model_from("graph (float[1, 1] x) => (float[1, 1] y) { y = MatMul (x, x) }")
    session = ort.InferenceSession(model.SerializeToString(), options)
    told = f"{provider} takes none of its products, which CPUExecutionProvider would run"
    assert untaken(session, provider) == (told if is_told else None)


def test_versions_without_a_record_are_not_judged() -> None:
    """ONNX Runtime before 1.24 keeps none."""
    session: ort.InferenceSession = SimpleNamespace()  # type: ignore[assignment]
    assert untaken(session, "QNNExecutionProvider") is None

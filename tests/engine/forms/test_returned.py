"""Slots of a returned cache hold what was fed to each, however rows come together and part."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from olive_ext.engine.forms.kv_store import KvPlace
from olive_ext.engine.forms.returned import ReturnedKv
from olive_ext.engine.step import Copy, Row
from olive_ext.graph.nodes import model_of
from olive_ext.model.providers.devices import Device
from olive_ext.model.types import DecoderSpec, KvTensor, StateTensor, TensorSpec

FLOAT = TensorProto.FLOAT
SLOTS = 12


def _graph() -> bytes:
    """Keys are the tokens, appended; the state is their number and sum, of the tokens fed and those before."""
    value = helper.make_tensor_value_info
    inputs = [value("ids", FLOAT, ["B", "S"]), value("past", FLOAT, ["B", 1, "P", 1]), value("sum", FLOAT, ["B", 2])]
    outputs = [value("present", FLOAT, ["B", 1, "T", 1]), value("new_sum", FLOAT, ["B", 2])]
    nodes = [
        helper.make_node("Unsqueeze", ["ids", "middle"], ["new"]),
        helper.make_node("Concat", ["past", "new"], ["present"], axis=2),
        helper.make_node("Mul", ["ids", "zero"], ["none"]),
        helper.make_node("Add", ["none", "one"], ["ones"]),
        helper.make_node("ReduceSum", ["ids", "last"], ["total"], keepdims=1),
        helper.make_node("ReduceSum", ["ones", "last"], ["count"], keepdims=1),
        helper.make_node("Concat", ["count", "total"], ["added"], axis=1),
        helper.make_node("Add", ["sum", "added"], ["new_sum"]),
    ]
    constants = [
        helper.make_tensor("middle", TensorProto.INT64, [2], [1, 3]),
        helper.make_tensor("last", TensorProto.INT64, [1], [1]),
        helper.make_tensor("zero", FLOAT, [], [0.0]),
        helper.make_tensor("one", FLOAT, [], [1.0]),
    ]
    return model_of(helper.make_graph(nodes, "store", inputs, outputs, constants), 18).SerializeToString()


def _store(has_state: bool) -> tuple[ReturnedKv, ort.InferenceSession]:
    session = ort.InferenceSession(_graph(), providers=["CPUExecutionProvider"])
    logits = TensorSpec("logits", FLOAT, ("B", "S", 8))
    states = (StateTensor("sum", "new_sum", FLOAT, (2,)),) if has_state else ()
    spec = DecoderSpec((), (KvTensor("past", "present", FLOAT, 1, 1),), logits, 8, 99, False, states)
    store = ReturnedKv(KvPlace(session, spec, SLOTS, Device("cpu"), ort.InferenceSession))
    store.pad_in_front(True)
    store.reserve(99)
    return store, session


def _feed(store: ReturnedKv, session: ort.InferenceSession, rows: list[Row], has_state: bool) -> None:
    binding = store.bind(rows)
    binding.bind_cpu_input("ids", np.array([row.tokens for row in rows], np.float32))
    if not has_state:
        binding.bind_cpu_input("sum", np.zeros((len(rows), 2), np.float32))
    session.run_with_iobinding(binding)
    presents = binding.get_outputs()
    store.collect(rows, presents)
    for place, row in enumerate(rows):
        tokens = CONTENT[row.slot][: row.past] = [*CONTENT[row.slot][: row.past], *row.tokens]
        CONTENT[row.slot] = tokens
        keys = presents[0].numpy()[place, 0, :, 0]
        assert keys[len(keys) - len(tokens) :].tolist() == tokens
        if has_state:
            assert presents[1].numpy()[place].tolist() == [len(tokens), sum(tokens)]


CONTENT: list[list[int]] = []


@settings(max_examples=60, deadline=None)
@given(has_state=st.booleans(), data=st.data())
def test_slots_hold_what_was_fed_to_each(has_state: bool, data: st.DataObject) -> None:
    store, session = _store(has_state)
    CONTENT[:] = [[] for _ in range(SLOTS)]
    kept: list[set[int]] = [set() for _ in range(SLOTS)]
    for _ in range(data.draw(st.integers(1, 12))):
        slots = data.draw(st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=SLOTS, unique=True))
        num_tokens = 1
        if data.draw(st.booleans()):  # an input, and sometimes a copy before it
            slots, num_tokens = slots[:1], data.draw(st.integers(1, 4))
            giver = data.draw(st.integers(0, SLOTS - 1))
            lengths = {0, len(CONTENT[giver])} | (kept[giver] if has_state else set(range(len(CONTENT[giver]))))
            length = data.draw(st.sampled_from(sorted(lengths)))
            if giver != slots[0] and length:
                store.copy([Copy(giver, slots[0], length)])
                CONTENT[slots[0]], kept[slots[0]] = CONTENT[giver][:length], {length}
        is_kept = data.draw(st.booleans())
        rows = [
            Row(
                slot, len(CONTENT[slot]), tuple(data.draw(st.lists(st.integers(1, 7), min_size=n, max_size=n))), is_kept
            )
            for slot in sorted(slots)
            for n in [num_tokens]
        ]
        _feed(store, session, rows, has_state)
        for row in rows:
            kept[row.slot] |= {len(CONTENT[row.slot])} if is_kept else set()


def test_rows_that_leave_a_batch_keep_none_of_the_others_in_memory() -> None:
    store, session = _store(has_state=True)
    CONTENT[:] = [[] for _ in range(SLOTS)]
    for first in range(SLOTS):
        _feed(store, session, [Row(slot, first, (1,)) for slot in range(first, SLOTS)], has_state=True)
    batches = {id(slot.place.batch): slot.place.batch.num_rows for slot in store._slots}
    assert sum(batches.values()) == SLOTS

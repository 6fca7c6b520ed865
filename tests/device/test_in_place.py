"""KV stays where it was allocated: past and present of a row are the same memory, and rows do not touch each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from olive_ext.engine.forms.kv_store import KvPlace
from olive_ext.engine.forms.rows import ViewKv
from olive_ext.engine.step import Copy, Row
from olive_ext.model.files.content import load_graph
from olive_ext.model.files.locate import locate
from olive_ext.model.providers.devices import Device
from olive_ext.model.providers.ort_session import open_session
from olive_ext.model.providers.resolution import resolve_providers
from olive_ext.model.spec.decoder_spec import read_spec
from tests.exports import VOCAB, genai_export

pytestmark = pytest.mark.slow

SLOTS = 3
CAPACITY = 64
SLOT_BYTES = 2 * CAPACITY * 16 * 4
"""Of one KV tensor: 2 heads of 16 floats."""

Arrays = list[np.ndarray[Any, Any]]


class Rows:
    """The tiny Llama over a `ViewKv`, with the buffers in sight."""

    def __init__(self) -> None:
        files = locate(str(genai_export("llama")))
        spec = read_spec(load_graph(files.decoder), files.genai_config)
        providers = resolve_providers("cpu")
        session = open_session(files.decoder, providers)
        self.kv = ViewKv(KvPlace(session, spec, SLOTS, Device("cpu"), lambda graph: open_session(graph, providers)))
        self.kv.reserve(CAPACITY)
        self._session = session
        self._num_caches = len(spec.kv)

    def run(self, rows: Sequence[Row]) -> tuple[np.ndarray[Any, Any], list[ort.OrtValue]]:
        """Logits [rows, tokens, VOCAB] and the present values."""
        binding = self.kv.bind(rows)
        tokens = np.array([row.tokens for row in rows], np.int64)
        mask = np.zeros((len(rows), CAPACITY), np.int64)
        for place, row in enumerate(rows):
            mask[place, : row.past + len(row.tokens)] = 1
        binding.bind_cpu_input("input_ids", tokens)
        binding.bind_cpu_input("attention_mask", mask)
        binding.bind_output("logits")
        self._session.run_with_iobinding(binding)
        *presents, logits = binding.get_outputs()
        self.kv.collect(rows, presents)
        return logits.numpy().copy(), presents

    def memory(self) -> Arrays:
        """A copy of each KV tensor [SLOTS, 2, CAPACITY, 16]."""
        binding = self.kv.bind([Row(slot, 0, (0,)) for slot in range(SLOTS)])
        return [value.numpy().copy() for value in binding.get_outputs()[: self._num_caches]]


def test_presents_are_the_memory_of_their_rows_in_every_step() -> None:
    rows = Rows()
    seen: dict[int, list[int]] = {}
    for slot in (0, 2, 1):
        past = 0
        for tokens in (tuple(range(10, 23)), (5,), (6, 7)):
            _, presents = rows.run([Row(slot, past, tokens)])
            past += len(tokens)
            addresses = [value.data_ptr() for value in presents]
            assert seen.setdefault(slot, addresses) == addresses
    for slot in (1, 2):
        assert seen[slot] == [address + slot * SLOT_BYTES for address in seen[0]]
    _, presents = rows.run([Row(slot, 16, (8,)) for slot in (0, 1, 2)])
    assert [value.data_ptr() for value in presents] == seen[0]
    assert [value.shape() for value in presents] == [[SLOTS, 2, CAPACITY, 16]] * len(presents)


def test_what_is_in_place_is_what_is_read() -> None:
    """A past that is the present of earlier steps gives the logits of one whole pass."""
    tokens = tuple(np.random.default_rng(1).integers(4, VOCAB, 40).tolist())
    rows = Rows()
    whole, _ = rows.run([Row(0, 0, tokens)])
    for start, stop in ((0, 13), (13, 14), (14, 33), (33, 40)):
        logits, _ = rows.run([Row(1, start, tokens[start:stop])])
        assert np.abs(logits[0] - whole[0, start:stop]).max() < 1e-4


def test_a_row_writes_its_own_positions_only() -> None:
    rows = Rows()
    for slot in range(SLOTS):
        rows.run([Row(slot, 0, tuple(range(10 + slot, 30 + slot)))])
    before = rows.memory()
    rows.run([Row(1, 20, (9, 8, 7))])
    rows.run([Row(1, 23, (6,)), Row(2, 20, (6,))])
    for old, new in zip(before, rows.memory(), strict=True):
        changed = {tuple(place) for place in np.argwhere((old != new).any(axis=(1, 3))).tolist()}
        assert changed == {(1, 20), (1, 21), (1, 22), (1, 23), (2, 20)}


def test_a_copy_moves_the_asked_positions_and_no_more() -> None:
    rows = Rows()
    rows.run([Row(0, 0, tuple(range(10, 40)))])
    before = rows.memory()
    rows.kv.copy([Copy(0, 2, 17)])
    for old, new in zip(before, rows.memory(), strict=True):
        assert (new[:2] == old[:2]).all()
        assert (new[2, :, :17] == old[0, :, :17]).all()
        assert (new[2, :, 17:] == old[2, :, 17:]).all()

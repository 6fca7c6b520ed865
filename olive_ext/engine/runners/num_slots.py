"""How many KV slots an engine opens: the user's number, or as many as memory holds."""

from __future__ import annotations

from collections.abc import Callable

from olive_ext.config import EngineConfig
from olive_ext.engine.runners.ort.kv.base import Device, bytes_of_source, bytes_per_position
from olive_ext.model.free_memory import Memory, UnmeasuredError, memory_of
from olive_ext.model.types import DecoderSpec

MOST_SLOTS = {"cpu": 16, "cuda": 64}
"""Rows that are decoded together at most, by device. A step reads all weights once for all its rows, so that more rows
cost little until the arithmetic takes as long as that: on a CPU about 16 rows (measured), on a GPU one or two hundred
(its operations for each byte of memory). There the rows' own KV is the limit sooner: 64 slots of a thousand positions
are as much to read as the weights of a 1B model."""

MEMORY_SHARE = {"cpu": 0.25, "cuda": 0.5}
"""Part of the free memory that the slots may take; a device's is there for nothing else than the model."""

DEFAULT_SLOTS = 8
"""Where free memory is not known."""

PLANNED_POSITIONS = 4096
"""Positions of a slot that "auto" plans for, where the context is longer: slots are allocated as requests need them."""


def choose_num_slots(
    config: EngineConfig,
    batch_size: int | None,
    spec: DecoderSpec,
    device: Device,
    read: Callable[[str, int], Memory] = memory_of,
) -> tuple[int, str]:
    """The number of KV slots and which rule gave it. Asked once the weights are on the device; `read` gives the memory
    of a device, by kind and number, or raises `UnmeasuredError`."""
    if config.num_slots != "auto":
        return config.num_slots, "engine.num_slots"
    if batch_size is not None:
        return batch_size, "batch_size"
    try:
        free = read(device.kind, device.index).free
    except UnmeasuredError as error:
        return DEFAULT_SLOTS, f"auto: {DEFAULT_SLOTS}, {error}"
    slot_bytes = bytes_per_position(spec.kv) * min(spec.context_length, PLANNED_POSITIONS) + bytes_of_source(spec)
    most = MOST_SLOTS[device.kind]
    fitting = max(1, int(free * MEMORY_SHARE[device.kind] / max(1, slot_bytes)))
    why = f"auto: {slot_bytes / 2**20:.1f} MiB a slot, {free / 2**20:.0f} MiB free, at most {most}"
    return min(most, fitting), why

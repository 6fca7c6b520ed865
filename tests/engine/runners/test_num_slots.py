"""How many KV slots "auto" takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from olive_ext.config import EngineConfig
from olive_ext.engine.runners.num_slots import DEFAULT_SLOTS, choose_num_slots
from olive_ext.engine.runners.ort.kv.base import Device, bytes_per_position
from olive_ext.graph.onnx_file import load_graph
from olive_ext.model.decoder_spec import read_spec
from olive_ext.model.free_memory import Memory, UnmeasuredError
from olive_ext.model.types import DecoderSpec
from tests.exports import genai_export


@pytest.fixture(scope="module")
def spec() -> DecoderSpec:
    return read_spec(load_graph(genai_export("llama") / "model.onnx"), {}, None, {}, ())


def has(slots: float, spec: DecoderSpec) -> Callable[[str, int], Memory]:
    """Memory in which that many slots of the whole context would lie."""
    free = int(slots * bytes_per_position(spec.kv) * spec.context_length)
    return lambda kind, index: Memory(free, 2 * free)


@pytest.mark.parametrize(
    ("kind", "room", "expected"),
    [("cpu", 40.5, 10), ("cpu", 4000, 16), ("cuda", 40.5, 20), ("cuda", 4000, 64), ("cuda", 0.1, 1), ("cpu", 0, 1)],
)
def test_auto_takes_a_share_of_the_free_memory(kind: str, room: float, expected: int, spec: DecoderSpec) -> None:
    slots, why = choose_num_slots(EngineConfig(), None, spec, Device(kind), has(room, spec))
    assert slots == expected
    assert why.startswith("auto: ")
    assert "MiB free" in why


def test_the_device_that_runs_the_model_is_asked(spec: DecoderSpec) -> None:
    asked = []

    def read(kind: str, index: int) -> Memory:
        asked.append((kind, index))
        return Memory(2**40, 2**40)

    choose_num_slots(EngineConfig(), None, spec, Device("cuda", 3), read)
    assert asked == [("cuda", 3)]


def test_default_is_kept_and_says_why_where_nothing_can_be_measured(spec: DecoderSpec) -> None:
    def refuse(kind: str, index: int) -> Memory:
        raise UnmeasuredError("no driver")

    assert choose_num_slots(EngineConfig(), None, spec, Device("cuda"), refuse) == (DEFAULT_SLOTS, "auto: 8, no driver")
    slots, why = choose_num_slots(EngineConfig(), None, spec, Device("webgpu"))
    assert (slots, why) == (DEFAULT_SLOTS, "auto: 8, free memory of a webgpu device is not measured")


def test_what_the_user_says_goes_before(spec: DecoderSpec) -> None:
    assert choose_num_slots(EngineConfig(num_slots=5), 3, spec, Device("cuda"), has(9, spec))[0] == 5
    assert choose_num_slots(EngineConfig(), 3, spec, Device("cuda"), has(9, spec)) == (3, "batch_size")

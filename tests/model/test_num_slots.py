"""How many KV slots "auto" takes. Free memory of devices: the host's as it is, CUDA devices' through a runtime that
is made up, or the real one."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from olive_ext.config import ModelSettings
from olive_ext.errors import ConfigError
from olive_ext.model.decisions import DEFAULT_SLOTS, choose_num_slots, shared_positions
from olive_ext.model.files.content import load_graph
from olive_ext.model.providers.devices import Device, Memory, UnmeasuredError, cuda_memory, memory_of
from olive_ext.model.spec.decoder_spec import read_spec
from olive_ext.model.types import DecoderSpec
from tests.exports import genai_export
from tests.refusals import refused, tells


@pytest.fixture(scope="module")
def spec() -> DecoderSpec:
    return read_spec(load_graph(genai_export("llama") / "model.onnx"), {}, None, {}, ())


def settings(**given: Any) -> ModelSettings:
    return ModelSettings(model="m", **given)


def has(slots: float, spec: DecoderSpec) -> Callable[[str, int], Memory]:
    """Memory in which that many slots of the whole context would lie."""
    free = int(slots * spec.bytes_per_position * spec.context_length)
    return lambda kind, index: Memory(free, 2 * free)


@pytest.mark.parametrize(
    ("kind", "room", "expected"),
    [("cpu", 40.5, 20), ("cpu", 4000, 64), ("cuda", 40.5, 20), ("cuda", 4000, 64), ("cuda", 0.1, 1), ("cpu", 0, 1)],
)
def test_auto_takes_a_share_of_the_free_memory(kind: str, room: float, expected: int, spec: DecoderSpec) -> None:
    slots, why = choose_num_slots(settings(), spec, Device(kind), has(room, spec))
    assert slots == expected
    assert why.startswith("auto: ")
    assert "MiB free" in why


@pytest.mark.parametrize("deterministic", [True, False])
def test_workers_on_one_machine_take_half_of_its_memory_at_most_all_together(
    deterministic: bool, spec: DecoderSpec
) -> None:
    """Each as much as one alone, so that their number decides no bits, until that would be more; a cluster's do not."""

    def positions(workers: Any) -> int:
        given = settings(deterministic=deterministic, workers=workers)
        return shared_positions(given, spec, Device("cpu"), lambda *_: Memory(2**40, 2**40)) or 0

    together = 2**39 / spec.bytes_per_position
    fitting = [count * positions({"count": count}) for count in (1, 2, 3, 4, 8, 64)]
    assert max(fitting) <= together
    assert min(fitting[-2:]) >= 7 / 8 * together * 0.99
    few = (2, 4) if deterministic else (2,)
    assert {positions({"count": count}) for count in few} == {positions(None)}
    assert positions({"count": 64, "address": "auto"}) == positions(None)
    many = settings(deterministic=deterministic, workers={"count": 64})
    assert "each worker" in choose_num_slots(many, spec, Device("cpu"), has(40, spec))[1]


def test_machines_alike_have_room_for_as_many_positions(spec: DecoderSpec) -> None:
    """Their memory differs by kilobytes; workers that have not the same room are refused."""
    rooms = [
        shared_positions(settings(deterministic=True), spec, Device("cpu"), lambda *_, total=total: Memory(0, total))
        for total in range(9 * 2**30, 9 * 2**30 + 2**20, 2**14)
    ]
    assert len({*rooms}) == 1


def test_default_is_kept_and_says_why_where_the_models_device_cannot_be_measured(spec: DecoderSpec) -> None:
    def refuse(kind: str, index: int) -> Memory:
        raise UnmeasuredError(f"no {kind} {index}")

    assert choose_num_slots(settings(), spec, Device("cuda", 3), refuse) == (DEFAULT_SLOTS, "auto: 8, no cuda 3")
    slots, why = choose_num_slots(settings(), spec, Device("webgpu"))
    assert (slots, tells(why, "auto: 8, webgpu")) == (DEFAULT_SLOTS, True)


@pytest.mark.parametrize("name", ["input_ids", "past_key_values.1.value"])
def test_a_graph_with_a_batch_of_one_row_has_one_slot_and_refuses_more(name: str) -> None:
    graph = load_graph(genai_export("llama") / "model.onnx")
    for value in graph.graph.input:
        if value.name == name:
            value.type.tensor_type.shape.dim[0].dim_value = 1
    spec, device = read_spec(graph, {}, None, {}, ()), Device("cpu")
    assert choose_num_slots(settings(), spec, device, has(9, spec))[0] == 1
    assert choose_num_slots(settings(batch_size=8), spec, device)[0] == 1, "it is the most, and decides no number"
    assert choose_num_slots(settings(), spec, device, has(9, spec), is_paged=True)[0] > 1
    with refused(ConfigError, "wrong_value", "engine.num_slots", 2):
        choose_num_slots(settings(engine={"num_slots": 2}), spec, device)


@pytest.mark.parametrize(("cap", "expected"), [(96, 64), (16, 16), (4, 4)])
def test_the_largest_batch_caps_what_auto_takes_and_is_no_number_of_its_own(
    cap: int, expected: int, spec: DecoderSpec
) -> None:
    slots, why = choose_num_slots(settings(max_batch_size=cap), spec, Device("cpu"), has(4000, spec))
    assert slots == expected
    assert f"{cap} by max_batch_size" in why
    assert choose_num_slots(settings(max_batch_size=cap), spec, Device("webgpu"))[0] == min(cap, DEFAULT_SLOTS)
    assert choose_num_slots(settings(max_batch_size=cap, batch_size=5), spec, Device("cpu")) == (5, "batch_size")


GIB = 2**30
INVALID_DEVICE = 101


class Function:
    """A function of the runtime; ctypes' ones carry the type of their result."""

    restype: Any = None

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)


class FakeRuntime:
    """Two devices; device n has n + 1 GiB free of 8. Each thread chooses its own, at first 0, and makes a context there
    by that."""

    def __init__(self) -> None:
        self.thread = threading.local()
        self.contexts: set[int] = set()
        self.taken = 0
        self.cudaGetErrorString = Function(lambda status: b"invalid device ordinal")

    @property
    def present(self) -> int:
        """The device of the thread that asks."""
        return getattr(self.thread, "device", 0)

    def cudaSetDevice(self, number: ctypes.c_int) -> int:
        if number.value > 1:
            return INVALID_DEVICE
        self.thread.device = number.value
        self.contexts.add(number.value)
        return 0

    def cudaMemGetInfo(self, free: Any, total: Any) -> int:
        free._obj.value, total._obj.value = (self.present + 1) * GIB - self.taken, 8 * GIB
        return 0


def test_memory_is_read_anew_each_time_and_no_other_device_gets_a_context() -> None:
    """A worker of device 1 leaves device 0 to others, and its thread's own device is what it was; a device that is not
    there has the runtime's reason."""
    runtime = FakeRuntime()
    assert cuda_memory(1, lambda name: runtime) == Memory(2 * GIB, 8 * GIB)
    runtime.taken = GIB // 2
    assert cuda_memory(1, lambda name: runtime) == Memory(3 * GIB // 2, 8 * GIB)
    with pytest.raises(UnmeasuredError, match=r"CUDA says 'invalid device ordinal' \(101\)"):
        cuda_memory(2, lambda name: runtime)
    assert runtime.contexts == {1}
    assert runtime.present == 0


def test_the_newest_runtime_that_loads_is_taken_and_named_where_none_does() -> None:
    tried = []

    def load(name: str) -> FakeRuntime:
        tried.append(name)
        if there not in name:
            raise OSError(name)
        return FakeRuntime()

    there = "12"
    assert cuda_memory(1, load) == Memory(2 * GIB, 8 * GIB)
    assert tried == ["libcudart.so.13", "libcudart.so.12"]
    there = "none"
    with pytest.raises(UnmeasuredError, match="libcudart"):
        cuda_memory(0, lambda name: load(name))


def test_host_memory_is_what_the_system_says() -> None:
    found = memory_of("cpu")
    assert found.total == psutil.virtual_memory().total
    assert 0 < found.free < found.total


@pytest.mark.gpu
def test_cuda_device_is_measured() -> None:
    found = memory_of("cuda")
    assert 0 < found.free <= found.total

"""Free memory of devices: the host's as it is, CUDA devices' through a management library that is made up."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import psutil
import pytest

from olive_ext.model import available_providers
from olive_ext.model.free_memory import Memory, UnmeasuredError, cuda_reader, memory_of

GIB = 2**30
SAME, MIXED = ("H200", "H200", "H200"), ("T4", "H200", "T4")


class NVMLError(Exception):
    """As the library's own."""


class Found:
    """What the library returns of one device's memory."""

    def __init__(self, free: int, total: int) -> None:
        self.free, self.total, self.used = free, total, total - free


class FakeNvml(ModuleType):
    """Devices numbered by bus: device n has n + 1 GiB free of 8 and the UUID "GPU-n000". A handle is that number, or
    the name of a part of a divided device."""

    NVMLError = NVMLError

    def __init__(self, names: tuple[str, ...], divided: tuple[int, ...] = (), broken: str = "") -> None:
        super().__init__("pynvml")
        self.names, self.divided, self.broken = names, divided, broken
        self.taken = 0

    def nvmlInit(self) -> None:
        if self.broken:
            raise NVMLError(self.broken)

    def nvmlDeviceGetCount(self) -> int:
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, place: int) -> int:
        return place

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:
        if name != "MIG-a":
            raise NVMLError("Not Found")
        return name

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self.names[handle]

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}000"

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        if self.names[handle] == "T4":
            raise NVMLError("Not Supported")
        return [int(handle in self.divided), 0]

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Found:
        free = GIB // 2 if handle == "MIG-a" else (handle + 1) * GIB - self.taken
        return Found(free, 8 * GIB)


def free(index: int, nvml: ModuleType, **environment: str) -> float:
    """GiB."""
    return cuda_reader(index, nvml, environment)().free / GIB


def test_memory_is_read_anew_each_time() -> None:
    nvml = FakeNvml(SAME)
    read = cuda_reader(1, nvml, {})
    assert read() == Memory(2 * GIB, 8 * GIB)
    nvml.taken = GIB
    assert read() == Memory(GIB, 8 * GIB)


@pytest.mark.parametrize(
    ("visible", "index", "expected"),
    [
        ("2,0", 0, 3),
        ("2, 0", 1, 1),
        ("GPU-1000", 0, 2),
        ("GPU-2,GPU-1", 1, 2),  # beginnings of UUIDs
        ("MIG-a", 0, 0.5),
    ],
)
def test_numbers_are_those_that_cuda_counts(visible: str, index: int, expected: float) -> None:
    assert free(index, FakeNvml(SAME), CUDA_VISIBLE_DEVICES=visible) == expected


@pytest.mark.parametrize(
    ("nvml", "index", "environment", "reason"),
    [
        (FakeNvml(SAME), 3, {}, "3 CUDA devices are visible, 3 is not"),
        (FakeNvml(SAME), 0, {"CUDA_VISIBLE_DEVICES": ""}, "0 CUDA devices are visible"),
        (FakeNvml(SAME), 1, {"CUDA_VISIBLE_DEVICES": "0,-1,2"}, "1 CUDA devices are visible"),
        (FakeNvml(SAME), 0, {"CUDA_VISIBLE_DEVICES": "7"}, "names 7, which is missing"),
        (FakeNvml(SAME), 0, {"CUDA_VISIBLE_DEVICES": "MIG-b"}, "NVML says 'Not Found'"),
        (FakeNvml(SAME, divided=(0,)), 0, {}, "divided"),
        (FakeNvml(MIXED), 0, {}, "CUDA_DEVICE_ORDER"),
        (FakeNvml(SAME, broken="Driver Not Loaded"), 0, {}, "NVML says 'Driver Not Loaded'"),
    ],
)
def test_what_cannot_be_measured_has_a_reason(
    nvml: FakeNvml, index: int, environment: Mapping[str, str], reason: str
) -> None:
    with pytest.raises(UnmeasuredError, match=reason):
        cuda_reader(index, nvml, environment)


def test_devices_of_several_kinds_are_told_apart_by_bus_or_uuid() -> None:
    assert free(1, FakeNvml(MIXED), CUDA_DEVICE_ORDER="PCI_BUS_ID") == 2
    assert free(0, FakeNvml(MIXED), CUDA_VISIBLE_DEVICES="GPU-2000") == 3


def test_host_memory_is_what_the_system_says() -> None:
    found = memory_of("cpu")
    assert found.total == psutil.virtual_memory().total
    assert 0 < found.free < found.total


def test_other_devices_are_not_measured() -> None:
    with pytest.raises(UnmeasuredError, match="free memory of a webgpu device is not measured"):
        memory_of("webgpu")


@pytest.mark.gpu
@pytest.mark.skipif("CUDAExecutionProvider" not in available_providers(), reason="no CUDA provider")
def test_cuda_device_is_measured() -> None:
    found = memory_of("cuda")
    assert 0 < found.free <= found.total

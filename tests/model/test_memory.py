"""Free memory of devices: the host's as it is, CUDA devices' through a runtime that is made up, or the real one."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from olive_ext.model.providers.devices import Memory, UnmeasuredError, cuda_reader, memory_of

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
    """A worker of device 1 leaves device 0 to others, and its thread's own device is what it was."""
    runtime = FakeRuntime()
    read = cuda_reader(1, lambda name: runtime)
    assert read() == Memory(2 * GIB, 8 * GIB)
    runtime.taken = GIB // 2
    assert read() == Memory(3 * GIB // 2, 8 * GIB)
    assert runtime.contexts == {1}
    assert runtime.present == 0


def test_a_device_that_is_not_there_has_the_runtimes_reason() -> None:
    runtime = FakeRuntime()
    with pytest.raises(UnmeasuredError, match=r"CUDA says 'invalid device ordinal' \(101\)"):
        cuda_reader(2, lambda name: runtime)()
    assert not runtime.contexts


def test_the_newest_runtime_that_loads_is_taken_and_named_where_none_does() -> None:
    tried = []

    def load(name: str) -> FakeRuntime:
        tried.append(name)
        if there not in name:
            raise OSError(name)
        return FakeRuntime()

    there = "12"
    assert cuda_reader(1, load)() == Memory(2 * GIB, 8 * GIB)
    assert tried == ["libcudart.so.13", "libcudart.so.12"]
    there = "none"
    with pytest.raises(UnmeasuredError, match="libcudart"):
        cuda_reader(0, lambda name: load(name))


def test_host_memory_is_what_the_system_says() -> None:
    found = memory_of("cpu")
    assert found.total == psutil.virtual_memory().total
    assert 0 < found.free < found.total


@pytest.mark.gpu
def test_cuda_device_is_measured() -> None:
    found = memory_of("cuda")
    assert 0 < found.free <= found.total

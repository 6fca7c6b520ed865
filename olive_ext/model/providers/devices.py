"""A device, a provider to run on, and the free and total memory of the host and of CUDA devices.

Memory is read by the CUDA runtime, and not by NVIDIA's management library: the runtime numbers devices as ONNX Runtime
does (CUDA_VISIBLE_DEVICES, parts of divided devices), and is there wherever the CUDA provider is. Knows no model.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import psutil

_LIBRARIES = ("libcudart.so.13", "libcudart.so.12", "cudart64_13.dll", "cudart64_12.dll")
"""The CUDA runtime of CUDA 13 and 12. One that the process has loaded already is found by its name alone."""


@dataclass(frozen=True)
class Device:
    """Where values lie: ONNX Runtime's device type ("cpu", "cuda", ...) and number."""

    kind: str
    index: int = 0

    @property
    def has_pointers(self) -> bool:
        """Whether its values have an address that can be offset and bound."""
        return self.kind in ("cpu", "cuda")

    @property
    def arena(self) -> str | None:
        """The device's arena, as ONNX Runtime's run options name it; None where no arena can be shrunk."""
        return {"cpu": "cpu:0", "cuda": f"gpu:{self.index}"}.get(self.kind)


@dataclass(frozen=True)
class Provider:
    """One execution provider to run on, in order of preference."""

    name: str
    """ONNX Runtime's name, e.g. "CUDAExecutionProvider"."""

    device: str
    """Device type of its memory as ONNX Runtime spells it for IOBinding: "cpu", "cuda", "dml", "webgpu", ..."""

    options: Mapping[str, str] = field(default_factory=dict)
    origin: str = ""
    """The setting that names it."""

    plans_shapes: bool = False
    """Whether the provider plans or compiles for every input shape that it meets."""

    capture_option: str | None = None
    """The provider's option that makes it capture and replay runs; None where it has no such option."""

    @property
    def location(self) -> Device:
        """The device on which it keeps values."""
        return Device(self.device, int(self.options.get("device_id", 0)))


@dataclass(frozen=True)
class Memory:
    """Bytes of memory. `free` is what all processes have left."""

    free: int
    total: int


class UnmeasuredError(Exception):
    """Why a device's memory is not known, in words that end a sentence."""


def memory_of(kind: str, index: int = 0) -> Memory:
    """Memory of an ONNX Runtime device ("cpu", "cuda", ...) at this moment. Raises `UnmeasuredError`."""
    if kind == "cpu":
        host = psutil.virtual_memory()
        return Memory(int(host.available), int(host.total))
    if kind == "cuda":
        return cuda_memory(index)
    raise UnmeasuredError(f"free memory of a {kind} device is not measured")


def cuda_memory(index: int, load: Callable[[str], Any] = ctypes.CDLL) -> Memory:
    """Memory of the CUDA device `index`, as this process numbers devices. Raises `UnmeasuredError`.

    `load` loads a library by name. The first reading makes a CUDA context on the device, if the process has none there.
    It runs in a thread of its own, because a device is chosen for a thread: choosing the caller's device again would
    make a context there, too (from CUDA 12 on), of hundreds of megabytes on a device that others use.
    """
    runtime = _runtime(load)

    def measure() -> Memory:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        _check(runtime, runtime.cudaSetDevice(ctypes.c_int(index)))
        _check(runtime, runtime.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)))
        return Memory(free.value, total.value)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(measure).result()


def trim_host_memory() -> None:
    """Returns memory to the system that this process has freed and its allocator keeps. glibc's allocator keeps even
    megabytes after a buffer of that size was freed. Other allocators have no such function, and nothing happens."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


@cache
def _runtime(load: Callable[[str], Any]) -> Any:
    for name in _LIBRARIES:
        try:
            runtime = load(name)
        except OSError:
            continue
        runtime.cudaGetErrorString.restype = ctypes.c_char_p
        return runtime
    raise UnmeasuredError("its free memory is not measured: the CUDA runtime (libcudart) was not found")


def _check(runtime: Any, status: int) -> None:
    if status:
        reason = (runtime.cudaGetErrorString(ctypes.c_int(status)) or b"").decode(errors="replace")
        raise UnmeasuredError(f"its free memory is not measured: CUDA says '{reason}' ({status})")

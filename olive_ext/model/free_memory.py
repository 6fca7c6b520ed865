"""Memory of the host and of CUDA devices, free and in all, as the system and NVIDIA's library (NVML) have it.

NVML rather than torch: beside a GPU build of ONNX Runtime torch is often one for the CPU, and asking it would open a
CUDA context of its own. NVML numbers devices by their bus and knows nothing of CUDA_VISIBLE_DEVICES: numbers are
translated here. Knows no model.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import psutil

_MIG = "MIG-"
_UUIDS = ("GPU-", _MIG)


@dataclass(frozen=True)
class Memory:
    """Bytes. `free` counts what all processes have left."""

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
        return cuda_reader(index)()
    raise UnmeasuredError(f"free memory of a {kind} device is not measured")


def cuda_reader(
    index: int, nvml: ModuleType | None = None, environment: Mapping[str, str] = os.environ
) -> Callable[[], Memory]:
    """What reads the memory of the CUDA device with this number, as this process counts devices, again and again.

    `nvml` is the module pynvml, loaded here where it is not given. Raises `UnmeasuredError`.
    """
    nvml = nvml or _load()
    with _refusals(nvml):
        nvml.nvmlInit()
        handle = _handle(nvml, index, environment)

    def read() -> Memory:
        with _refusals(nvml):
            found = nvml.nvmlDeviceGetMemoryInfo(handle)
            return Memory(int(found.free), int(found.total))

    return read


def _load() -> ModuleType:
    try:
        import pynvml
    except ImportError as error:
        raise UnmeasuredError("its free memory is not measured without nvidia-ml-py (olive-ext[gpu])") from error
    module: ModuleType = pynvml
    return module


@contextmanager
def _refusals(nvml: Any) -> Iterator[None]:
    """Words for what NVML refuses: a driver that is not there, a device that is not, a call without permission."""
    try:
        yield
    except nvml.NVMLError as error:
        raise UnmeasuredError(f"its free memory is not measured: NVML says '{error}'") from error


def _handle(nvml: Any, index: int, environment: Mapping[str, str]) -> Any:
    """NVML's handle of a device as CUDA numbers it (CUDA C++ Programming Guide, "CUDA Environment Variables")."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    names = [str(number) for number in range(nvml.nvmlDeviceGetCount())] if visible is None else _listed(visible)
    if index >= len(names):
        raise UnmeasuredError(f"its free memory is not measured: {len(names)} CUDA devices are visible, {index} is not")
    name = names[index]
    handle = _by_uuid(nvml, name) if name.startswith(_UUIDS) else _by_number(nvml, int(name), environment)
    if not name.startswith(_MIG) and _is_divided(nvml, handle):
        raise UnmeasuredError("its free memory is not measured: it is divided (MIG), and no part is named")
    return handle


def _listed(visible: str) -> list[str]:
    """Entries of CUDA_VISIBLE_DEVICES; what stands behind an invalid one is not visible."""
    names: list[str] = []
    for entry in visible.split(","):
        name = entry.strip()
        if not (name.isdecimal() or name.startswith(_UUIDS)):
            break
        names.append(name)
    return names


def _by_number(nvml: Any, number: int, environment: Mapping[str, str]) -> Any:
    """CUDA puts the fastest first unless told otherwise, NVML goes by bus: the same order among devices of one kind."""
    if number >= nvml.nvmlDeviceGetCount():
        raise UnmeasuredError(f"its free memory is not measured: CUDA_VISIBLE_DEVICES names {number}, which is missing")
    handles = [nvml.nvmlDeviceGetHandleByIndex(place) for place in range(nvml.nvmlDeviceGetCount())]
    kinds = {nvml.nvmlDeviceGetName(handle) for handle in handles}
    if len(kinds) > 1 and environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        raise UnmeasuredError(
            "its free memory is not measured: devices of several kinds have CUDA's own numbers unless "
            "CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    return handles[number]


def _by_uuid(nvml: Any, name: str) -> Any:
    """CUDA takes the beginning of a UUID for all of it."""
    if not name.startswith(_MIG):
        for place in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(place)
            if str(nvml.nvmlDeviceGetUUID(handle)).startswith(name):
                return handle
    return nvml.nvmlDeviceGetHandleByUUID(name)


def _is_divided(nvml: Any, handle: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    except nvml.NVMLError:  # devices that cannot be divided refuse the question
        return False


def trim_host_memory() -> None:
    """Gives the system what this process has freed and its allocator keeps. glibc's allocator keeps even megabytes once
    it has seen a buffer of that size come and go; others have no such function, and nothing happens."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)

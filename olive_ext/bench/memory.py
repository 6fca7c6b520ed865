"""Memory of this process, in bytes: resident now, the most within a span, and on a CUDA device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")
_SECONDS_BETWEEN_LOOKS = 0.02


def resident() -> int:
    """What is resident now."""
    return int(psutil.Process().memory_info().rss)


@contextmanager
def peak(found: dict[str, float], device: str) -> Iterator[None]:
    """Puts the most that was resident while this was open into `found["peak"]`, and the device's `device_peak`.

    Linux keeps count itself; elsewhere, and on a device, a thread looks every 20 ms.
    """
    counted = _reset()
    looks = [name for name, wanted in (("peak", not counted), ("device_peak", on_device(device) is not None)) if wanted]
    stop = threading.Event()
    watch = threading.Thread(target=_watch, args=(found, looks, device, stop), daemon=True)
    if looks:
        watch.start()
    try:
        yield
    finally:
        stop.set()
        if looks:
            watch.join()
        if counted:
            found["peak"] = _high_water()


def on_device(device: str) -> int | None:
    """Bytes in use on the CUDA device, by all processes; None for another device."""
    if not device.startswith("cuda"):
        return None
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)


def _watch(found: dict[str, float], looks: list[str], device: str, stop: threading.Event) -> None:
    while True:
        for name in looks:
            now = resident() if name == "peak" else on_device(device)
            found[name] = max(found.get(name, 0), now or 0)
        if stop.wait(_SECONDS_BETWEEN_LOOKS):
            return


def _reset() -> bool:
    """Whether the kernel's own count of the most resident began anew."""
    try:
        _RESET.write_text("5")
        _high_water()
    except (OSError, StopIteration):
        return False
    return True


def _high_water() -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024

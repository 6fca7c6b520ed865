"""Memory in bytes: resident in this process, and in use on a CUDA device, now and the most within a span."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from olive_ext.run.memory import PeakMemory

_SECONDS_BETWEEN_LOOKS = 0.02


def now(device: str) -> dict[str, int]:
    """`resident`, and on a CUDA device `device`: in use by all processes."""
    used = _on_device(device)
    resident = int(psutil.Process().memory_info().rss)
    return {"resident": resident} if used is None else {"resident": resident, "device": used}


@contextmanager
def peak(found: dict[str, float], device: str) -> Iterator[None]:
    """Puts the most that was resident while this was open into `found["peak"]`, and the device's into `device_peak`."""
    stop = threading.Event()
    watch = threading.Thread(target=_watch, args=(found, device, stop), daemon=True)
    is_watched = _on_device(device) is not None
    if is_watched:
        watch.start()
    host = PeakMemory()
    try:
        with host:
            yield
    finally:
        stop.set()
        found["peak"] = host.bytes
        if is_watched:
            watch.join()


def _watch(found: dict[str, float], device: str, stop: threading.Event) -> None:
    while True:
        found["device_peak"] = max(found.get("device_peak", 0), _on_device(device) or 0)
        if stop.wait(_SECONDS_BETWEEN_LOOKS):
            return


def _on_device(device: str) -> int | None:
    if not device.startswith("cuda"):
        return None
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)

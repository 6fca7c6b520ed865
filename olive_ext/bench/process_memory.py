"""Memory in bytes: resident in this process, and in use on a CUDA device, now and the most within a span."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

from olive_ext.model.free_memory import UnmeasuredError, cuda_reader
from olive_ext.run.peak_memory import PeakMemory

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_LOOKS = 0.02


def memory_now(name: str, device: str) -> dict[str, float]:
    """`name`: resident in this process; on a CUDA device also `device_<name>`: in use by all processes."""
    used = _used_memory(device)
    resident: dict[str, float] = {name: psutil.Process().memory_info().rss}
    return resident if used is None else {**resident, f"device_{name}": used()}


@contextmanager
def peak(found: dict[str, float], device: str) -> Iterator[None]:
    """Puts the most that was resident while this was open into `found["peak"]`, and the device's into `device_peak`."""
    used, done = _used_memory(device), threading.Event()
    watch = threading.Thread(target=_watch, args=(found, used, done), daemon=True)
    watch.start()
    host = PeakMemory()
    try:
        with host:
            yield
    finally:
        done.set()
        found["peak"] = host.bytes
        watch.join()


def _watch(found: dict[str, float], used: Callable[[], int] | None, done: threading.Event) -> None:
    while used is not None:
        found["device_peak"] = max(found.get("device_peak", 0), used())
        if done.wait(_SECONDS_BETWEEN_LOOKS):
            return


def _used_memory(device: str) -> Callable[[], int] | None:
    """Reads what is in use on a CUDA device ("cuda", "cuda:1"); None elsewhere, and where it cannot be measured."""
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return None
    try:
        read = cuda_reader(int(number or 0))
    except UnmeasuredError as error:
        logger.warning("%s: %s", device, error)
        return None
    return lambda: (memory := read()).total - memory.free

"""Memory in bytes: resident in this process, and in use on a CUDA device, now and the most within a span."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

from olive_ext.model.free_memory import Memory, UnmeasuredError, cuda_reader
from olive_ext.run.peak_memory import PeakMemory

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_LOOKS = 0.02


def now(device: str) -> dict[str, int]:
    """`resident`, and on a CUDA device `device`: in use by all processes."""
    read = _reader(device)
    resident = int(psutil.Process().memory_info().rss)
    return {"resident": resident} if read is None else {"resident": resident, "device": _used(read)}


@contextmanager
def peak(found: dict[str, float], device: str) -> Iterator[None]:
    """Puts the most that was resident while this was open into `found["peak"]`, and the device's into `device_peak`."""
    stop = threading.Event()
    read = _reader(device)
    watch = threading.Thread(target=_watch, args=(found, read, stop), daemon=True) if read is not None else None
    if watch is not None:
        watch.start()
    host = PeakMemory()
    try:
        with host:
            yield
    finally:
        stop.set()
        found["peak"] = host.bytes
        if watch is not None:
            watch.join()


def _watch(found: dict[str, float], read: Callable[[], Memory], stop: threading.Event) -> None:
    while True:
        found["device_peak"] = max(found.get("device_peak", 0), _used(read))
        if stop.wait(_SECONDS_BETWEEN_LOOKS):
            return


def _used(read: Callable[[], Memory]) -> int:
    memory = read()
    return memory.total - memory.free


def _reader(device: str) -> Callable[[], Memory] | None:
    """What reads the memory of a CUDA device ("cuda", "cuda:1"); None elsewhere, and where it cannot be measured."""
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return None
    try:
        return cuda_reader(int(number or 0))
    except UnmeasuredError as error:
        logger.warning("%s: %s", device, error)
        return None

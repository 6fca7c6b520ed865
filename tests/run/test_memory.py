"""Peak memory of a piece of work."""

from __future__ import annotations

import time

import numpy as np
import psutil

from olive_ext.run.peak_memory import PeakMemory


def test_memory_that_is_gone_again_counts() -> None:
    before = psutil.Process().memory_info().rss
    with PeakMemory() as peak:
        block = np.ones(25_000_000)
        time.sleep(0.3)  # many looks, on a busy machine as well
        del block
    assert 190e6 < peak.bytes - before < 400e6


def test_memory_of_before_does_not_count() -> None:
    block = np.ones(50_000_000)
    del block
    with PeakMemory() as peak:
        pass
    assert abs(peak.bytes - psutil.Process().memory_info().rss) < 100e6

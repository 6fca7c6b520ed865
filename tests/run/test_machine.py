"""What a report says of the machine, and the peak memory of a piece of work."""

from __future__ import annotations

import json
import os
import time

import numpy as np
import psutil

from olive_ext.run.machine import PeakMemory, describe_hardware


def test_facts_are_json_and_tell_processor_memory_and_system() -> None:
    facts = json.loads(json.dumps(describe_hardware()))
    assert {"cpu", "threads", "memory_bytes", "os", "python"} <= set(facts)
    assert 1 <= facts["usable_threads"] <= (os.cpu_count() or 1)
    assert facts["memory_bytes"] > 1e8


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

"""What a report says of the machine."""

from __future__ import annotations

import json
import os

from olive_ext.run.hardware import describe_hardware


def test_facts_are_json_and_tell_processor_memory_and_system() -> None:
    facts = json.loads(json.dumps(describe_hardware()))
    assert {"cpu", "threads", "memory_bytes", "os", "python"} <= set(facts)
    assert 1 <= facts["usable_threads"] <= (os.cpu_count() or 1)
    assert facts["memory_bytes"] > 1e8

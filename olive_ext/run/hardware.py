"""What this machine is: processor, memory, GPUs, operating system. Facts for a report's reader; knows no model."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import psutil

_CPU_INFO = Path("/proc/cpuinfo")
_GPU_QUERY = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")
_TIMEOUT_S = 10


def describe_hardware() -> dict[str, Any]:
    """JSON-ready facts: `cpu`, `cores`, `threads`, `usable_threads`, `memory_bytes`, `gpus`, `os`, `python`.

    A fact that the machine does not give is left out. `usable_threads` are those that this process may run on, fewer
    in a container or under a job scheduler.
    """
    facts = {
        "cpu": _cpu_name(),
        "cores": psutil.cpu_count(logical=False),
        "threads": psutil.cpu_count(),
        "usable_threads": _usable_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": _nvidia_gpus(),
        "os": platform.platform(),
        "python": platform.python_version(),
    }
    return {name: value for name, value in facts.items() if value}


def _cpu_name() -> str:
    """The processor's name: Linux has it in a file only, macOS in a command's output, Windows in its environment."""
    if _CPU_INFO.exists():
        for line in _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Hardware", "Model") and value.strip():
                return value.strip()
    if platform.system() == "Darwin":
        return _output_of("sysctl", "-n", "machdep.cpu.brand_string")
    return platform.processor() or platform.machine()


def _usable_threads() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _nvidia_gpus() -> list[dict[str, Any]]:
    """Name, memory and driver of each GPU that NVIDIA's driver lists."""
    rows = [line.split(", ") for line in _output_of("nvidia-smi", *_GPU_QUERY).splitlines()]
    return [
        {"name": name, "memory_mib": int(memory) if memory.isdigit() else None, "driver": driver}
        for name, memory, driver in (row for row in rows if len(row) == 3)
    ]


def _output_of(*command: str) -> str:
    """The command's stdout; empty where the command is missing, fails or hangs."""
    path = shutil.which(command[0])
    if path is None:
        return ""
    try:
        done = subprocess.run([path, *command[1:]], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()

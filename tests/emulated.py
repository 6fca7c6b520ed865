"""Whether the suite runs on an emulated processor (`.ci/haswell.sh`), and what then has to hold.

There a floating-point operation takes a hundred times as long, so that tests ask for less; and a process that a test
starts would run on the machine's own processor.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from numpy._core._multiarray_umath import __cpu_features__ as features  # asks the processor itself

IS_EMULATED = "OLIVE_EXT_EMULATED" in os.environ


def hold() -> None:
    """Raises RuntimeError where the processor has AVX-512 after all, and later where a process is started, other than
    for an export."""
    found = [name for name, is_there in features.items() if name.startswith("AVX512") and is_there]
    if found or not features["AVX2"]:
        raise RuntimeError(f"the emulated processor must have AVX2 and no AVX-512, and has {found or 'none'}")
    sys.addaudithook(_refuse_processes)


def _refuse_processes(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen" and "tests.export_maker" not in arguments[1]:
        raise RuntimeError(f"{arguments[1]} would run on the machine's own processor")

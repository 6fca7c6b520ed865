"""Processes that are forked from one that has imported everything, and has opened nothing: evaluations by the thousand
without a start of seconds each. Knows no evaluation."""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def import_what_it_imports(action: Callable[[], object]) -> None:
    """Runs `action` in a process of its own, and imports here what was imported there."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "modules.json")
        pid = os.fork()
        if pid == 0:
            try:
                with suppress(Exception):
                    action()
                file.write_text(json.dumps(list(sys.modules)), encoding="utf-8")
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        for name in json.loads(file.read_text(encoding="utf-8")):
            if name not in sys.modules and "__" not in name:
                with suppress(Exception):
                    importlib.import_module(name)

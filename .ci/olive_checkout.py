"""The workflow's tests against a checkout of Olive, and what of Olive's that this package wraps has changed there.

    PYTHON .ci/olive_checkout.py CHECKOUT [PYTEST_ARGUMENT ...]

CHECKOUT is a folder that holds the package `olive`: a clone of its main branch, an unpacked sdist. It is put in front
of the installed release for these processes only; what else it needs is the caller's to install, perhaps in folders of
PYTHONPATH (its ModelBuilder of August 2026 runs with onnxruntime-genai 0.14.1 no longer, nor with 0.18.0). Ends as
pytest does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = """
import inspect
import olive
from olive.cache import OliveCache
from olive.engine import Engine
from olive.engine.footprint import FootprintNode
from olive.package_config import OlivePackageConfig
from olive.systems.python_environment import PythonEnvironmentSystem
from olive.systems.system_config import SystemConfig
from olive_ext.workflow.registration import _MARK

print("olive", olive.__version__)
for owner in (Engine, FootprintNode, OlivePackageConfig, OliveCache, SystemConfig, PythonEnvironmentSystem):
    for name, method in vars(owner).items():
        if hasattr(method, _MARK):
            print(f"{owner.__name__}.{name}{inspect.signature(method)}")
print(f"FootprintNode has model_config_data: {'model_config_data' in FootprintNode.model_fields}")
"""


def listed(path: str) -> list[str]:
    """What this package wraps, as the Olive on `path` has it."""
    environment = {**os.environ, "PYTHONPATH": path, "CI": "1"}
    done = subprocess.run([sys.executable, "-c", LIST], capture_output=True, text=True, env=environment, cwd=ROOT)
    said = [line for line in done.stdout.splitlines() if not line.startswith("[")]  # Olive logs to stdout
    return said or [done.stderr.strip().splitlines()[-1]]


def main(argv: list[str]) -> int:
    checkout = Path(argv[0]).resolve()
    if not (checkout / "olive" / "__init__.py").is_file():
        print(f"'{argv[0]}' holds no package 'olive'", file=sys.stderr)
        return 2
    here, there = listed(str(ROOT)), listed(f"{checkout}{os.pathsep}{ROOT}")
    print(f"installed: {here[0]}\nchecked out: {there[0]}")
    changes = [("-", line) for line in here[1:] if line not in there]
    changes += [("+", line) for line in there[1:] if line not in here]
    print("\n".join(f"{sign} {line}" for sign, line in changes) or "what is wrapped has not changed")
    paths = filter(None, [str(checkout), str(ROOT), os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    tests = argv[1:] or ["tests/workflow", "tests/check"]
    return subprocess.run([sys.executable, "-m", "pytest", "-q", *tests], cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) if len(sys.argv) > 1 else __doc__)

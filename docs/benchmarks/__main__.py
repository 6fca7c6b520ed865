"""python -m docs.benchmarks NAME ...: runs the script NAME of this folder; without a name, says which there are."""

import ast
import runpy
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
PARTS = ("__main__", "gpu_engine_parts", "gpu_parts", "harness", "ort_profile")


def main() -> None:
    """Runs a script with the words after its name."""
    names = sorted(file.stem for file in FOLDER.glob("*.py") if file.stem not in PARTS)
    if len(sys.argv) > 1 and sys.argv[1] in names:
        sys.path.insert(0, str(FOLDER))
        del sys.argv[0]
        sys.argv[0] = str(FOLDER / f"{sys.argv[0]}.py")
        runpy.run_path(sys.argv[0], run_name="__main__")
        return
    for name in names:
        doc = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))) or ""
        print(f"{name:20} {doc.splitlines()[0]}")


if __name__ == "__main__":
    main()

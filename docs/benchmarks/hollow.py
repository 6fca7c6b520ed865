"""Packages without weights: they travel to a machine without a network, where weights of the same sizes are made.

    python docs/benchmarks/hollow.py PACKAGE OUT       copies all files but the weights; `gpu.py` fills them

Times and memory do not depend on what weights say. `fill` makes them: normal numbers, small enough that nothing
overflows. All of a package have one form: scores of filled quantized weights mean nothing, such a package can be timed.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import numpy as np

SIZES = "hollow.json"
"""In a hollow package: the bytes of each file that was left out."""

LARGE = 1 << 16
BLOCK = 1 << 24


def hollow(package: Path, out: Path) -> None:
    """Copies `package` to `out`, and instead of large files that no graph is their sizes."""
    sizes = {}
    for file in sorted(path for path in package.rglob("*") if path.is_file()):
        name = file.relative_to(package)
        if file.suffix not in (".onnx", ".json") and file.stat().st_size > LARGE:
            sizes[str(name)] = file.stat().st_size
        else:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, out / name)
    (out / SIZES).write_text(json.dumps(sizes), encoding="utf-8")


def fill(package: Path) -> None:
    """Makes the weights of a hollow package; does nothing where they are there, or where it never was one."""
    listed = package / SIZES
    sizes = json.loads(listed.read_text(encoding="utf-8")) if listed.exists() else {}
    halves = _halves(package)
    for name, size in sizes.items():
        file = package / name
        if file.exists() and file.stat().st_size == size:
            continue
        draw = np.random.default_rng(0)
        # The same block again and again: drawing 2.5 GB would take a minute.
        block = (draw.standard_normal(BLOCK // 2) * 0.02).astype(np.float16).tobytes()
        if not halves:
            block = (draw.standard_normal(BLOCK // 4) * 0.02).astype(np.float32).tobytes()
        with file.open("wb") as stream:
            for start in range(0, size, BLOCK):
                stream.write(block[: min(BLOCK, size - start)])


def _halves(package: Path) -> bool:
    """Whether most weights of the package's graphs are in half precision."""
    import onnx

    kinds: dict[int, int] = {}
    for graph in package.rglob("*.onnx"):
        for tensor in onnx.load(graph, load_external_data=False).graph.initializer:
            kinds[tensor.data_type] = kinds.get(tensor.data_type, 0) + int(np.prod(tensor.dims))
    return kinds.get(onnx.TensorProto.FLOAT16, 0) >= kinds.get(onnx.TensorProto.FLOAT, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("package", metavar="PACKAGE", type=Path)
    parser.add_argument("out", metavar="OUT", type=Path)
    given = parser.parse_args()
    hollow(given.package, given.out)


if __name__ == "__main__":
    main()

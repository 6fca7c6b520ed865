"""What `pip install '.[EXTRA]'` resolves to: every extra, on every Python, with and without constraints.txt.

    PYTHON .ci/resolve.py [UV [EXTRA ...]]

Nothing is installed: `uv pip compile`, by UV or as found on the PATH (`pip install uv`), resolves much faster than pip
does, and for Pythons that are not here. Prints a table in markdown: the packages of each, and versions of those that
matter most. Ends with 1 where one does not resolve, and names why.
"""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.10", "3.11.5", "3.12", "3.13")  # the site's packages leave 3.11.0 to 3.11.4 out
SHOWN = re.compile(r"^(onnxruntime[\w-]*|torch|transformers)==(\S+)", re.MULTILINE)


def resolved(uv: str, extra: str, python: str, constraints: list[str]) -> tuple[int, str]:
    """How many packages there are and the versions that are shown; 0 and the last line of the refusal."""
    command = [uv, "pip", "compile", "-q", "--no-header", "--no-annotate", "setup.py", "--python-version", python]
    done = subprocess.run([*command, "--extra", extra, *constraints], capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        return 0, " ".join(done.stderr.split())
    return done.stdout.count("=="), ", ".join(" ".join(found) for found in SHOWN.findall(done.stdout))


def main(uv: str = "uv", *asked: str) -> int:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    need_311 = ("webgpu", "openvino", "qnn", "mteb")  # plugins go with ONNX Runtime 1.24 and later; mteb says so itself
    ways = {"constraints.txt": ["-c", "constraints.txt"], "the newest": []}
    extras = asked or tuple(setup["options.extras_require"])
    rows = [(extra, way, python) for extra in extras for way in ways for python in PYTHONS]
    rows = [row for row in rows if row[0] not in need_311 or row[2] != "3.10"]

    def results() -> Iterator[tuple[int, str]]:
        with ThreadPoolExecutor(2) as pool:
            yield from pool.map(lambda row: resolved(uv, row[0], row[2], ways[row[1]]), rows)

    failed = False
    print("| extra | versions | Python | packages | of these |\n|---|---|---|--:|---|")
    for (extra, way, python), (count, text) in zip(rows, results(), strict=True):
        failed |= not count
        print(f"| {extra} | {way} | {python} | {count or 'NONE'} | {text} |", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Makes the CUDA provider run on a machine without a GPU: the real onnxruntime-gpu beside stubs of CUDA's libraries.

python .ci/cuda_stub/make.py DIR          needs pip, gcc, nm and a package index; half a minute and 0.6 GB
DIR/run python -m pytest -m cuda_stub     onnxruntime is the GPU build there, and finds one H200

Sessions open, partition, bind, dispatch, copy and wait as on a GPU. Kernels do nothing, so numbers and device time mean
nothing: see `runtime.c`. Exits with 3 and a line that says why where the stub cannot be made on this machine.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from collections import defaultdict
from pathlib import Path

VERSION = "1.31.1"
"""Of onnxruntime-gpu, whose provider needs CUDA 13."""

HERE = Path(__file__).resolve().parent
CAPI = Path("onnxruntime") / "capi"
SOURCES = {"libcudart": ("runtime.c", ""), "libcublas": ("blas.c", "-DCUBLAS"), "libcublasLt": ("blas.c", "")}
"""Library -> the file with its functions that do something, and an option for the compiler."""


class CannotMake(Exception):
    """Why there is no stub on this machine."""


def main(folder: Path) -> None:
    """Fills `folder`; what is there already is kept."""
    for tool in ("gcc", "nm"):
        if shutil.which(tool) is None:
            raise CannotMake(f"{tool} is not installed")
    site, libraries = folder / "site", folder / "lib"
    libraries.mkdir(parents=True, exist_ok=True)
    if not (site / CAPI).is_dir():
        _unpack_wheel(folder, site)
    for library, names in _expected(site / CAPI / "libonnxruntime_providers_cuda.so").items():
        _build(libraries, library, names)
    runner = folder / "run"
    given = {"LD_LIBRARY_PATH": libraries, "PYTHONPATH": site}  # an empty entry of either is the working directory
    paths = " ".join(f'{name}="{place}${{{name}:+:${name}}}"' for name, place in given.items())
    runner.write_text(f'#!/bin/sh\nexport {paths} OLIVE_EXT_CUDA_STUB="{libraries}/libcudart.so.13"\nexec "$@"\n')
    runner.chmod(0o755)


def _unpack_wheel(folder: Path, site: Path) -> None:
    words = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
    _call(*words, f"onnxruntime-gpu=={VERSION}")
    wheel = next(folder.glob("onnxruntime_gpu-*.whl"))
    with zipfile.ZipFile(wheel) as files:
        files.extractall(site)
    wheel.unlink()
    for metadata in site.glob("*.dist-info"):  # or onnxruntime and onnxruntime-gpu would count as installed together
        shutil.rmtree(metadata)


def _expected(provider: Path) -> dict[str, set[str]]:
    """Library's file name -> names of the functions that the provider takes from it. A symbol's version is spelt as the
    library's file name (libcudart.so.13)."""
    expected: dict[str, set[str]] = defaultdict(set)
    for line in _call("nm", "-D", "--undefined-only", str(provider)).splitlines():
        name, _, version = line.split()[-1].partition("@")
        if version and re.match(r"cu|__cuda", name):
            expected[version.strip("@")].add(name)
        elif re.match(r"cu[A-Z]", name):  # the driver's, which have no version
            expected["libcuda.so.1"].add(name)
    expected.setdefault("libcurand.so.10", set())  # loaded, but nothing is taken from it
    return expected


def _build(folder: Path, library: str, names: set[str]) -> None:
    """Compiles `library`: its source where it has one, and a function that returns 0 for every other name."""
    source, option = SOURCES.get(library.split(".so")[0], ("", ""))
    written = (HERE / source).read_text(encoding="utf-8") if source else ""
    defined = set(re.findall(r"\b(\w+)\s*\([^;{}]*\)\s*\{", written))
    rest = folder / f"{library}.c"
    rest.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in sorted(names - defined)))
    versions = folder / f"{library}.map"
    versions.write_text(f"{library} {{ global: *; }};\n")
    options = ["-w", "-O1", "-shared", "-fPIC", f"-Wl,-soname,{library}", *([option] if option else [])]
    if library != "libcuda.so.1" and names:
        options.append(f"-Wl,--version-script,{versions}")
    files = [str(rest), *([str(HERE / source)] if source else [])]
    _call("gcc", *options, *files, "-o", str(folder / library), "-lpthread")


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise CannotMake(f"{command[0]} failed: {reason[-1] if reason else done.returncode}")
    return done.stdout


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        main(Path(sys.argv[1]).resolve())
    except CannotMake as error:
        print(f"the CUDA stub cannot be made here: {error}", file=sys.stderr)
        sys.exit(3)

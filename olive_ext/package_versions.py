"""Installed versions of the packages that decide an evaluation's numbers. Imports none of them."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version

_BUILDS = ("gpu", "directml", "openvino", "qnn", "ep-webgpu", "ep-openvino")
_RUNTIMES = ("olive-ext", "onnxruntime", *(f"onnxruntime-{name}" for name in _BUILDS), "torch")
_OTHERS = ("onnxruntime-genai", "onnxruntime-genai-cuda", "olive-ai", "lm-eval", "transformers", "datasets", "onnx")


@cache
def versions() -> dict[str, str]:
    """Distribution name to version, for those that are installed. Read once a process: each reads a file."""
    found = {}
    for name in (*_RUNTIMES, *_OTHERS):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def installed(distribution: str) -> str:
    """The version of a distribution, or of its build for a device, which has another name; empty where none is."""
    for name in (distribution, f"{distribution}-cuda", f"{distribution}-directml"):
        with suppress(PackageNotFoundError):
            return version(name)
    return ""


def runtimes() -> dict[str, str]:
    """Versions of the libraries that compute."""
    return {name: text for name, text in versions().items() if name in _RUNTIMES}

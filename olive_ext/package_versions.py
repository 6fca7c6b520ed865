"""Installed versions of the packages that decide an evaluation's numbers. Imports none of them."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

_BUILDS = ("gpu", "directml", "openvino", "qnn", "ep-webgpu", "ep-openvino")
_RUNTIMES = ("olive-ext", "onnxruntime", *(f"onnxruntime-{name}" for name in _BUILDS), "torch")
_OTHERS = ("onnxruntime-genai", "onnxruntime-genai-cuda", "olive-ai", "lm-eval", "transformers", "datasets", "onnx")


def version_of(distribution: str) -> str | None:
    """The version of a distribution; None where it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


@cache
def versions() -> dict[str, str]:
    """Distribution name to version, for those that are installed. Read once a process: each reads a file."""
    known = {name: version_of(name) for name in (*_RUNTIMES, *_OTHERS)}
    return {name: text for name, text in known.items() if text is not None}


def installed(distribution: str) -> str:
    """The version of a distribution, or of its build for a device, which has another name; empty where none is."""
    builds = (distribution, f"{distribution}-cuda", f"{distribution}-directml")
    return next(filter(None, map(version_of, builds)), "")


def runtimes() -> dict[str, str]:
    """Versions of the libraries that compute."""
    return {name: text for name, text in versions().items() if name in _RUNTIMES}

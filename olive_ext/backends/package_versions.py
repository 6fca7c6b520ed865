"""Installed versions of the packages that decide an evaluation's numbers. Imports none of them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

RUNTIMES = ("olive-ext", "onnxruntime", "onnxruntime-gpu", "onnxruntime-directml", "onnxruntime-ep-webgpu", "torch")
_OTHERS = ("onnxruntime-genai", "onnxruntime-genai-cuda", "olive-ai", "lm-eval", "transformers", "datasets", "onnx")


def versions() -> dict[str, str]:
    """Distribution name to version, for those that are installed."""
    wanted = (*RUNTIMES, *_OTHERS)
    found = {name: number for name in wanted if (number := _version(name)) is not None}
    if "olive-ext" not in found:  # run from a checkout that is not installed
        from olive_ext import __version__

        found["olive-ext"] = __version__
    return found


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None

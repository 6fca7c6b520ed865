"""Installed versions of the packages that decide an evaluation's numbers. Imports none of them."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from olive_ext import __version__

RUNTIMES = ("olive-ext", "onnxruntime", "onnxruntime-gpu", "onnxruntime-directml", "onnxruntime-ep-webgpu", "torch")
_OTHERS = ("onnxruntime-genai", "onnxruntime-genai-cuda", "olive-ai", "lm-eval", "transformers", "datasets", "onnx")


def versions() -> dict[str, str]:
    """Distribution name to version, for those that are installed. Read once a process: each reads a file."""
    return dict(_versions())


@cache
def _versions() -> dict[str, str]:
    found = {}
    for name in (*RUNTIMES, *_OTHERS):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    found.setdefault("olive-ext", __version__)  # run from a checkout that is not installed
    return found

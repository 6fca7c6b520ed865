"""Errors of ONNX Runtime, its providers and allocators as errors of this package: memory that ran out, or anything
else, with what was being done. Knows no step and no graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from onnxruntime.capi import onnxruntime_pybind11_state as library

from olive_ext.errors import MemoryShortageError, RunError
from olive_ext.model.providers.ort_session import reason_of

MEMORY_WORDS = (
    "to allocate",
    "smaller than requested bytes",
    "out of memory",
    "outofmemory",
    "alloc_failed",
    "bad_alloc",
    "bad allocation",
)
"""How ONNX Runtime's arena (two), CUDA, DirectML, cuBLAS, cuDNN, C++ and numpy say that memory ran out."""

FAILURES: tuple[type[Exception], ...] = (
    RuntimeError,
    MemoryError,
    *(kind for kind in vars(library).values() if isinstance(kind, type) and issubclass(kind, Exception)),
)
"""What ONNX Runtime, providers and allocators raise."""


@contextmanager
def named_ort_failures(doing: str) -> Iterator[None]:
    """Raises errors of ONNX Runtime as `named_failure`."""
    try:
        yield
    except FAILURES as error:
        raise named_failure(error, doing) from error


def named_failure(error: Exception, doing: str) -> Exception:
    """`MemoryShortageError` or `RunError` for what ONNX Runtime and allocators raise. Raises any other `error`."""
    if not isinstance(error, FAILURES):
        raise error
    shown = f"ONNX Runtime failed {doing}: {reason_of(error)}"
    return MemoryShortageError(shown) if is_memory_error(error) else RunError(shown)


def is_memory_error(error: Exception) -> bool:
    """Whether the message of ONNX Runtime, a provider or numpy says that memory ran out."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(words in text for words in MEMORY_WORDS)

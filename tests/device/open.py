"""Opens models on the CPU and on a device whose memory the host cannot address: WebGPU, where there is one."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import olive_ext
from olive_ext.errors import OliveExtError
from olive_ext.model.providers.devices import UnmeasuredError, memory_of
from olive_ext.model.providers.resolution import available_providers, register_libraries
from olive_ext.session import Session

LIBRARY = {"webgpu": "onnxruntime_ep_webgpu"}
STEP = 29
"""Most tokens that one step feeds here: fewer than 32, prime, and equal to no size of the tiny models."""


@functools.cache
def why_no_webgpu() -> str | None:
    """Why tests on the WebGPU device cannot run here; None where they can.

    Where a Vulkan driver was chosen by the environment, as `.ci/webgpu.sh` does, a device is expected: not finding it
    is an error.
    """
    try:
        register_libraries(LIBRARY)
    except OliveExtError as error:
        reason = f"no WebGPU provider ('pip install .[webgpu]' from Python 3.11 on): {error}"
    else:
        if "WebGpuExecutionProvider" in available_providers():
            return None
        reason = "the WebGPU provider finds no Vulkan device (.ci/webgpu.sh makes one on Debian 12)"
    if "VK_DRIVER_FILES" in os.environ:
        raise RuntimeError(reason)
    return reason


@functools.cache
def why_no_cuda() -> str | None:
    """Why tests on a CUDA device cannot run here; None where they can."""
    if "OLIVE_EXT_CUDA_STUB" in os.environ:
        return "kernels of the stub of CUDA compute nothing"
    if "CUDAExecutionProvider" not in available_providers():
        return "this ONNX Runtime has no CUDA provider ('pip install .[gpu]' in place of '.[cpu]')"
    try:
        memory_of("cuda")
    except UnmeasuredError as error:
        return f"no CUDA device: {error}"
    return None


def open_on(device: str, folder: Path, **engine: Any) -> Session:
    """The model in `folder` with three slots, on "cpu" or "webgpu"."""
    return olive_ext.open(
        folder,
        execution_provider=device,
        provider_libraries=LIBRARY if device == "webgpu" else None,
        engine={"num_slots": 3, "chunk_size": STEP, **engine},
    )

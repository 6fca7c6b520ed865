"""The execution providers, a row for each: names, memory, default options, and what is known of them. Only data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

CPU = "CPUExecutionProvider"
NOT_RUN = "not run so far"


@dataclass(frozen=True)
class Row:
    """One provider as ONNX Runtime knows it. `device` is where its tensors live, as IOBinding spells it: a provider
    that takes its inputs from host memory has "cpu". `aliases` are accepted like the short name and the full one."""

    short: str
    name: str
    device: str = "cpu"
    defaults: Mapping[str, str] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    plans_shapes: bool = False
    """Whether the provider plans or compiles for every input shape that it meets."""

    capture_option: str | None = None
    """The provider's option that has runs captured and replayed."""

    known: str = ""
    """What is known not to work on the provider, or that nothing was run on it, for the documentation."""


TABLE = (
    Row("cpu", CPU, known="bfloat16 decoders, fp8 and paged KV caches have no kernels"),
    # TF32 rounds the inputs of a float32 product to 10 bits: log-probabilities would no longer agree with the CPU's.
    Row(
        "cuda",
        "CUDAExecutionProvider",
        "cuda",
        {"use_tf32": "0"},
        capture_option="enable_cuda_graph",
        known=f"GroupQueryAttention has fp16 and bf16 kernels only, no fp32; {NOT_RUN}",
    ),
    Row(
        "tensorrt",
        "TensorrtExecutionProvider",
        "cuda",
        aliases=("trt",),
        plans_shapes=True,
        known=f"an engine per shape; {NOT_RUN}",
    ),
    Row(
        "nvtensorrtrtx",
        "NvTensorRTRTXExecutionProvider",
        "cuda",
        aliases=("trt-rtx",),
        plans_shapes=True,
        known=f"an engine per shape unless profiles are given in the options; {NOT_RUN}",
    ),
    Row(
        "dml",
        "DmlExecutionProvider",
        "dml",
        aliases=("directml",),
        plans_shapes=True,
        known=f"values without address; {NOT_RUN}",
    ),
    Row(
        "openvino",
        "OpenVINOExecutionProvider",
        plans_shapes=True,
        known=f'NPUs need fixed shapes: runtime "genai"; {NOT_RUN}',
    ),
    Row(
        "qnn",
        "QNNExecutionProvider",
        plans_shapes=True,
        known=f'fixed shapes and pipelines only: runtime "genai"; {NOT_RUN}',
    ),
    Row(
        "webgpu",
        "WebGpuExecutionProvider",
        "webgpu",
        capture_option="enableGraphCapture",
        known="no Attention of opset 23 and 24 (mobius' default exports run on the CPU); on Mesa's software Vulkan "
        "steps of 32 tokens are wrong, which is found by trying; encoder-decoders are refused there",
    ),
    Row("migraphx", "MIGraphXExecutionProvider", "gpu", plans_shapes=True),
    Row("rocm", "ROCMExecutionProvider", "gpu"),
    Row("coreml", "CoreMLExecutionProvider", plans_shapes=True),
    Row("vitisai", "VitisAIExecutionProvider", plans_shapes=True),
    Row("xnnpack", "XnnpackExecutionProvider"),
    Row("dnnl", "DnnlExecutionProvider", aliases=("onednn",)),
    Row("cann", "CANNExecutionProvider", "cann", plans_shapes=True),
    Row("acl", "ACLExecutionProvider"),
)

"""The execution providers, a row for each: names, memory, default options, and what is known of them. Only data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

CPU = "CPUExecutionProvider"
NOT_RUN = "not run so far"


@dataclass(frozen=True)
class Keeping:
    """How a provider is told to keep what it compiles, and to take it again."""

    options: Mapping[str, str] = field(default_factory=dict)
    """Its own options, a folder in place of FOLDER. Without any it writes what it compiled of a graph as a graph of
    EPContext nodes, which is opened in place of the first (`ep.context_enable`)."""

    files: str = "*"
    """What one compiled thing is called in that folder."""

    own: tuple[str, ...] = ()
    """More options by which a user keeps what is compiled in a way of their own."""

    libraries: tuple[str, ...] = ()
    """Python packages whose versions decide what is compiled, where the provider is not a plugin that tells its own."""


FOLDER = "{folder}"


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

    keeping: Keeping | None = None
    """How it keeps what it compiles; None where it compiles nothing that could be kept, or has no way."""

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
        keeping=Keeping(
            {
                "trt_engine_cache_enable": "1",
                "trt_engine_cache_path": FOLDER,
                "trt_timing_cache_enable": "1",
                "trt_timing_cache_path": FOLDER,
            },
            "*.engine",
            ("trt_dump_ep_context_model", "trt_ep_context_file_path"),
            ("tensorrt", "tensorrt-cu12", "tensorrt-cu13"),
        ),
        known=f"an engine per shape; {NOT_RUN}",
    ),
    Row(
        "nvtensorrtrtx",
        "NvTensorRTRTXExecutionProvider",
        "cuda",
        aliases=("trt-rtx",),
        plans_shapes=True,
        keeping=Keeping({"nv_runtime_cache_path": FOLDER}),
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
        # The plugin computes in bfloat16 where the processor can (3.6e-2 off in an encoder's features, else 2e-6).
        # On GPUs it takes 16 bits unless told otherwise.
        defaults={"load_config": json.dumps({name: {"EXECUTION_MODE_HINT": "ACCURACY"} for name in ("CPU", "GPU")})},
        plans_shapes=True,
        keeping=Keeping(own=("cache_dir",)),
        known="GroupQueryAttention, Attention and RMSNormalization stay on the CPU; encoders with a Scan (Qwen's) are "
        "refused: `engine.encoder_provider`; the plugin `onnxruntime-ep-openvino` has Intel's devices only, and "
        "`onnxruntime-openvino` 1.24.1 cannot open again what it compiled; "
        'NPUs need fixed shapes: runtime "genai"',
    ),
    Row(
        "qnn",
        "QNNExecutionProvider",
        plans_shapes=True,
        keeping=Keeping(),
        known="takes graphs of fixed shapes, in 16 bits: an encoder (`engine.encoder_provider` with the options "
        "backend_path and soc_model), 0.01 nats off on the x86 simulator; its plugin has the name by which it is "
        'registered: "QNNExecutionProvider" in `provider_libraries`; pipelines: runtime "genai"',
    ),
    Row(
        "webgpu",
        "WebGpuExecutionProvider",
        "webgpu",
        capture_option="enableGraphCapture",
        known="no Attention of opset 23 and 24 (mobius' default exports run on the CPU); on Mesa's software Vulkan "
        "steps of 32 tokens are wrong, which is found by trying; encoder-decoders are refused there",
    ),
    Row(
        "migraphx",
        "MIGraphXExecutionProvider",
        "gpu",
        plans_shapes=True,
        keeping=Keeping({"migraphx_model_cache_dir": FOLDER}, "*.mxr"),
    ),
    Row("rocm", "ROCMExecutionProvider", "gpu"),
    Row("coreml", "CoreMLExecutionProvider", plans_shapes=True, keeping=Keeping({"ModelCacheDirectory": FOLDER})),
    Row("vitisai", "VitisAIExecutionProvider", plans_shapes=True, keeping=Keeping(own=("cache_dir", "cache_key"))),
    Row("xnnpack", "XnnpackExecutionProvider"),
    Row("dnnl", "DnnlExecutionProvider", aliases=("onednn",)),
    Row("cann", "CANNExecutionProvider", "cann", plans_shapes=True),
    Row("acl", "ACLExecutionProvider"),
)

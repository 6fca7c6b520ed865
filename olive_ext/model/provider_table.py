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

    plain: frozenset[str] = frozenset()
    """Its options that a package may set without being trusted: they name no library, no file, no folder and no address
    in memory, and have nothing written. By ONNX Runtime 1.31's sources and documentation."""

    known: str = ""
    """What is known not to work on the provider, or that nothing was run on it, for the documentation."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


TABLE = (
    Row("cpu", CPU, known="bfloat16 decoders, fp8 and paged KV caches have no kernels"),
    # TF32 rounds the inputs of a float32 product to 10 bits: log-probabilities would no longer agree with the CPU's.
    Row(
        "cuda",
        "CUDAExecutionProvider",
        "cuda",
        plain=_names(
            "device_id gpu_mem_limit arena_extend_strategy max_mem initial_chunk_size_bytes "
            "max_dead_bytes_per_chunk initial_growth_chunk_size_bytes do_copy_in_default_stream "
            "cudnn_conv_algo_search cudnn_conv_use_max_workspace cudnn_conv1d_pad_to_nc1d enable_cuda_graph "
            "enable_skip_layer_norm_strict_mode use_tf32 prefer_nhwc prefer_nhwc_mode sdpa_kernel fuse_conv_bias "
            "use_ep_level_unified_stream tunable_op_enable tunable_op_tuning_enable "
            "tunable_op_max_tuning_duration_ms"
        ),
        defaults={"use_tf32": "0"},
        capture_option="enable_cuda_graph",
        known=f"GroupQueryAttention has fp16 and bf16 kernels only, no fp32; {NOT_RUN}",
    ),
    Row(
        "tensorrt",
        "TensorrtExecutionProvider",
        "cuda",
        plain=_names(
            "device_id trt_max_workspace_size trt_max_partition_iterations trt_min_subgraph_size trt_fp16_enable "
            "trt_bf16_enable trt_int8_enable trt_int8_use_native_calibration_table trt_dla_enable trt_dla_core "
            "trt_force_sequential_engine_build trt_context_memory_sharing_enable trt_layer_norm_fp32_fallback "
            "trt_build_heuristics_enable trt_sparsity_enable trt_builder_optimization_level trt_auxiliary_streams "
            "trt_tactic_sources trt_profile_min_shapes trt_profile_max_shapes trt_profile_opt_shapes "
            "trt_cuda_graph_enable trt_detailed_build_log trt_engine_hw_compatible trt_op_types_to_exclude"
        ),
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
        plain=_names(
            "device_id nv_max_workspace_size nv_max_shared_mem_size nv_profile_min_shapes nv_profile_max_shapes "
            "nv_profile_opt_shapes nv_multi_profile_enable nv_cuda_graph_enable enable_cuda_graph "
            "nv_multi_rotary_cache_concat_offset multi_rotary_cache_concat_offset nv_detailed_build_log"
        ),
        aliases=("trt-rtx",),
        plans_shapes=True,
        keeping=Keeping({"nv_runtime_cache_path": FOLDER}),
        known=f"an engine per shape unless profiles are given in the options; {NOT_RUN}",
    ),
    Row(
        "dml",
        "DmlExecutionProvider",
        "dml",
        plain=_names(
            "device_id device_index luid performance_preference device_filter disable_metacommands "
            "enable_graph_capture enable_dynamic_graph_fusion"
        ),
        aliases=("directml",),
        plans_shapes=True,
        known=f"values without address; {NOT_RUN}",
    ),
    Row(
        "openvino",
        "OpenVINOExecutionProvider",
        plain=_names(
            "device_type device_id precision num_of_threads num_streams enable_opencl_throttling "
            "enable_qdq_optimizer disable_dynamic_shapes model_priority enable_causallm reshape_input layout"
        ),
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
        plain=_names(
            "backend_path backend_type device_id soc_model htp_arch vtcm_mb rpc_control_latency "
            "htp_performance_mode htp_graph_finalization_optimization_mode qnn_context_priority "
            "enable_htp_fp16_precision enable_htp_weight_sharing offload_graph_io_quantization "
            "enable_htp_spill_fill_buffer enable_htp_shared_memory_allocator enable_dx12_shared_memory_allocator "
            "extended_udma genie_model genie_log_level"
        ),
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
        plain=_names(
            "preferredLayout enableGraphCapture weightLoadAcceleration sessionBufferPoolGenerations enableInt64 "
            "multiRotaryCacheConcatOffset kvCacheQuantizationBits enableMatmulFp32Accumulation dawnBackendType "
            "powerPreference adapterIndex storageBufferCacheMode uniformBufferCacheMode "
            "queryResolveBufferCacheMode defaultBufferCacheMode validationMode enableRobustness forceCpuNodeNames "
            "maxStorageBufferBindingSize maxStorageBuffersPerShaderStage maxNumPendingDispatches"
        ),
        capture_option="enableGraphCapture",
        known="no Attention of opset 23 and 24 (mobius' default exports run on the CPU); on Mesa's software Vulkan "
        "steps of 32 tokens are wrong, which is found by trying; encoder-decoders are refused there",
    ),
    Row(
        "migraphx",
        "MIGraphXExecutionProvider",
        "gpu",
        plain=_names(
            "device_id migraphx_fp16_enable migraphx_bf16_enable migraphx_fp8_enable migraphx_int8_enable "
            "migraphx_int8_use_native_calibration_table migraphx_exhaustive_tune migraphx_mem_limit "
            "migraphx_arena_extend_strategy migraphx_max_dynamic_batch migraphx_max_compiled_models"
        ),
        plans_shapes=True,
        keeping=Keeping({"migraphx_model_cache_dir": FOLDER}, "*.mxr"),
    ),
    Row(
        "rocm",
        "ROCMExecutionProvider",
        "gpu",
        plain=_names(
            "device_id gpu_mem_limit arena_extend_strategy do_copy_in_default_stream "
            "miopen_conv_exhaustive_search miopen_conv_use_max_workspace enable_hip_graph tunable_op_enable "
            "tunable_op_tuning_enable tunable_op_max_tuning_duration_ms"
        ),
    ),
    Row(
        "coreml",
        "CoreMLExecutionProvider",
        plans_shapes=True,
        keeping=Keeping({"ModelCacheDirectory": FOLDER}),
        plain=_names(
            "MLComputeUnits ModelFormat RequireStaticInputShapes EnableOnSubgraphs SpecializationStrategy "
            "ProfileComputePlan AllowLowPrecisionAccumulationOnGPU"
        ),
    ),
    Row(
        "vitisai",
        "VitisAIExecutionProvider",
        plans_shapes=True,
        keeping=Keeping(own=("cache_dir", "cache_key")),
        plain=_names("target opt_level"),
    ),
    Row(
        "xnnpack",
        "XnnpackExecutionProvider",
        plain=_names("intra_op_num_threads"),
    ),
    Row(
        "dnnl",
        "DnnlExecutionProvider",
        aliases=("onednn",),
        plain=_names("use_arena"),
    ),
    Row(
        "cann",
        "CANNExecutionProvider",
        "cann",
        plans_shapes=True,
        plain=_names(
            "device_id npu_mem_limit arena_extend_strategy enable_cann_graph do_copy_in_default_stream "
            "precision_mode op_select_impl_mode optypelist_for_implmode"
        ),
    ),
    Row(
        "acl",
        "ACLExecutionProvider",
        plain=_names("enable_fast_math"),
    ),
)

ROWS = {key.lower(): row for row in TABLE for key in (row.short, row.name, *row.aliases)}
"""The rows by all their names, in lower case."""

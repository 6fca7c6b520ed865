"""The execution providers, a row for each: names, memory and default options. Only data."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

CPU = "CPUExecutionProvider"


@dataclass(frozen=True)
class CompiledCache:
    """The options with which a provider writes what it compiles to disk, and reads it again."""

    options: Mapping[str, str] = field(default_factory=dict)
    """The provider's own options for that, with FOLDER where they take a folder. Where it is empty, ONNX Runtime writes
    the compiled graph as a graph of EPContext nodes, which is opened in place of the original (`ep.context_enable`)."""

    files: str = "*"
    """A pattern of the names of the compiled files in that folder."""

    user_options: tuple[str, ...] = ()
    """Further options with which users choose a place themselves: where one is set, nothing is kept here."""

    libraries: tuple[str, ...] = ()
    """Python packages whose versions decide what is compiled, unless a plugin reports its own version."""


FOLDER = "{folder}"


@dataclass(frozen=True)
class ProviderRow:
    """One provider: how users and ONNX Runtime name it, and what this package must know to run it."""

    short: str
    """The name for users, e.g. "cuda"."""

    name: str
    """ONNX Runtime's name, e.g. "CUDAExecutionProvider"; for a plugin, the name that its devices have (`ep_name`)."""

    device: str = "cpu"
    """Where its tensors live, as IOBinding spells it: "cpu" where it takes its inputs from host memory."""

    defaults: Mapping[str, str] = field(default_factory=dict)
    """Options that are set unless a user gives others."""

    aliases: tuple[str, ...] = ()
    """More names for users."""

    plans_shapes: bool = False
    """Whether the provider plans or compiles for every input shape that it meets."""

    capture_option: str | None = None
    """The provider's option that makes it capture and replay runs."""

    compiled_cache: CompiledCache | None = None
    """How it keeps what it compiles on disk; None where it compiles nothing, or cannot keep it."""

    extra: str = ""
    """This package's extra (setup.cfg) that brings it; empty where none does."""

    harmless: frozenset[str] = frozenset()
    """Options that a model's package may set without being trusted: they name no library, file, folder or address in
    memory, and write nothing. From ONNX Runtime 1.31's sources and documentation."""

    @property
    def options(self) -> frozenset[str]:
        """The provider's options that this package knows; it may have others."""
        cache = self.compiled_cache or CompiledCache()
        return self.harmless | {*self.defaults, *cache.options, *cache.user_options}


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


TABLE = (
    ProviderRow("cpu", CPU),
    # TF32 rounds the inputs of a float32 product to 10 bits: log-probabilities would no longer agree with the CPU's.
    ProviderRow(
        "cuda",
        "CUDAExecutionProvider",
        "cuda",
        extra="gpu",
        harmless=_names(
            "device_id gpu_mem_limit arena_extend_strategy max_mem initial_chunk_size_bytes "
            "max_dead_bytes_per_chunk initial_growth_chunk_size_bytes do_copy_in_default_stream "
            "cudnn_conv_algo_search cudnn_conv_use_max_workspace cudnn_conv1d_pad_to_nc1d enable_cuda_graph "
            "enable_skip_layer_norm_strict_mode use_tf32 prefer_nhwc prefer_nhwc_mode sdpa_kernel fuse_conv_bias "
            "use_ep_level_unified_stream tunable_op_enable tunable_op_tuning_enable "
            "tunable_op_max_tuning_duration_ms"
        ),
        defaults={"use_tf32": "0"},
        capture_option="enable_cuda_graph",
    ),
    ProviderRow(
        "tensorrt",
        "TensorrtExecutionProvider",
        "cuda",
        extra="gpu",
        harmless=_names(
            "device_id trt_max_workspace_size trt_max_partition_iterations trt_min_subgraph_size trt_fp16_enable "
            "trt_bf16_enable trt_int8_enable trt_int8_use_native_calibration_table trt_dla_enable trt_dla_core "
            "trt_force_sequential_engine_build trt_context_memory_sharing_enable trt_layer_norm_fp32_fallback "
            "trt_build_heuristics_enable trt_sparsity_enable trt_builder_optimization_level trt_auxiliary_streams "
            "trt_tactic_sources trt_profile_min_shapes trt_profile_max_shapes trt_profile_opt_shapes "
            "trt_cuda_graph_enable trt_detailed_build_log trt_engine_hw_compatible trt_op_types_to_exclude"
        ),
        aliases=("trt",),
        plans_shapes=True,
        compiled_cache=CompiledCache(
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
    ),
    ProviderRow(
        "nvtensorrtrtx",
        "NvTensorRTRTXExecutionProvider",
        "cuda",
        harmless=_names(
            "device_id nv_max_workspace_size nv_max_shared_mem_size nv_profile_min_shapes nv_profile_max_shapes "
            "nv_profile_opt_shapes nv_multi_profile_enable nv_cuda_graph_enable enable_cuda_graph "
            "nv_multi_rotary_cache_concat_offset multi_rotary_cache_concat_offset nv_detailed_build_log"
        ),
        aliases=("trt-rtx",),
        plans_shapes=True,
        compiled_cache=CompiledCache({"nv_runtime_cache_path": FOLDER}),
    ),
    ProviderRow(
        "dml",
        "DmlExecutionProvider",
        "dml",
        harmless=_names(
            "device_id device_index luid performance_preference device_filter disable_metacommands "
            "enable_graph_capture enable_dynamic_graph_fusion"
        ),
        aliases=("directml",),
        plans_shapes=True,
    ),
    ProviderRow(
        "openvino",
        "OpenVINOExecutionProvider",
        extra="openvino",
        harmless=_names(
            "device_type device_id precision num_of_threads num_streams enable_opencl_throttling "
            "enable_qdq_optimizer disable_dynamic_shapes model_priority enable_causallm reshape_input layout"
        ),
        # The plugin computes in bfloat16 where the processor can (3.6e-2 off in an encoder's features, else 2e-6).
        # On GPUs it takes 16 bits unless an option says otherwise.
        defaults={"load_config": json.dumps({name: {"EXECUTION_MODE_HINT": "ACCURACY"} for name in ("CPU", "GPU")})},
        plans_shapes=True,
        compiled_cache=CompiledCache(user_options=("cache_dir",)),
    ),
    ProviderRow(
        "qnn",
        "QNNExecutionProvider",
        extra="qnn",
        harmless=_names(
            "backend_path backend_type device_id soc_model htp_arch vtcm_mb rpc_control_latency "
            "htp_performance_mode htp_graph_finalization_optimization_mode qnn_context_priority "
            "enable_htp_fp16_precision enable_htp_weight_sharing offload_graph_io_quantization "
            "enable_htp_spill_fill_buffer enable_htp_shared_memory_allocator enable_dx12_shared_memory_allocator "
            "extended_udma genie_model genie_log_level"
        ),
        plans_shapes=True,
        compiled_cache=CompiledCache(),
    ),
    ProviderRow(
        "webgpu",
        "WebGpuExecutionProvider",
        "webgpu",
        extra="webgpu",
        harmless=_names(
            "preferredLayout enableGraphCapture weightLoadAcceleration sessionBufferPoolGenerations enableInt64 "
            "multiRotaryCacheConcatOffset kvCacheQuantizationBits enableMatmulFp32Accumulation dawnBackendType "
            "powerPreference adapterIndex storageBufferCacheMode uniformBufferCacheMode "
            "queryResolveBufferCacheMode defaultBufferCacheMode validationMode enableRobustness forceCpuNodeNames "
            "maxStorageBufferBindingSize maxStorageBuffersPerShaderStage maxNumPendingDispatches"
        ),
        capture_option="enableGraphCapture",
    ),
    ProviderRow(
        "migraphx",
        "MIGraphXExecutionProvider",
        "gpu",
        harmless=_names(
            "device_id migraphx_fp16_enable migraphx_bf16_enable migraphx_fp8_enable migraphx_int8_enable "
            "migraphx_int8_use_native_calibration_table migraphx_exhaustive_tune migraphx_mem_limit "
            "migraphx_arena_extend_strategy migraphx_max_dynamic_batch migraphx_max_compiled_models"
        ),
        plans_shapes=True,
        compiled_cache=CompiledCache({"migraphx_model_cache_dir": FOLDER}, "*.mxr"),
    ),
    ProviderRow(
        "rocm",
        "ROCMExecutionProvider",
        "gpu",
        harmless=_names(
            "device_id gpu_mem_limit arena_extend_strategy do_copy_in_default_stream "
            "miopen_conv_exhaustive_search miopen_conv_use_max_workspace enable_hip_graph tunable_op_enable "
            "tunable_op_tuning_enable tunable_op_max_tuning_duration_ms"
        ),
    ),
    ProviderRow(
        "coreml",
        "CoreMLExecutionProvider",
        plans_shapes=True,
        compiled_cache=CompiledCache({"ModelCacheDirectory": FOLDER}),
        harmless=_names(
            "MLComputeUnits ModelFormat RequireStaticInputShapes EnableOnSubgraphs SpecializationStrategy "
            "ProfileComputePlan AllowLowPrecisionAccumulationOnGPU"
        ),
    ),
    ProviderRow(
        "vitisai",
        "VitisAIExecutionProvider",
        plans_shapes=True,
        compiled_cache=CompiledCache(user_options=("cache_dir", "cache_key")),
        harmless=_names("target opt_level"),
    ),
    ProviderRow("xnnpack", "XnnpackExecutionProvider", harmless=_names("intra_op_num_threads")),
    ProviderRow("dnnl", "DnnlExecutionProvider", aliases=("onednn",), harmless=_names("use_arena")),
    ProviderRow(
        "cann",
        "CANNExecutionProvider",
        "cann",
        plans_shapes=True,
        harmless=_names(
            "device_id npu_mem_limit arena_extend_strategy enable_cann_graph do_copy_in_default_stream "
            "precision_mode op_select_impl_mode optypelist_for_implmode"
        ),
    ),
    ProviderRow("acl", "ACLExecutionProvider", harmless=_names("enable_fast_math")),
)

ROWS = {key.lower(): row for row in TABLE for key in (row.short, row.name, *row.aliases)}
"""The rows by all their names, in lower case. Providers without a row run, too (`resolution`)."""


def meant_provider(name: str) -> str:
    """Suggests the provider that has nearly this name, or whose extra has it; empty where there is none."""
    rows = {key.partition("exec")[0]: row for key, row in ROWS.items()}  # the rest is common to all
    near = difflib.get_close_matches(name.lower().partition("exec")[0], rows, n=1)
    named = [row for row in TABLE if row.extra and row.extra == name.lower()] + [rows[one] for one in near]
    meant = [f"'{row.short}'{f' (extra {row.extra!r})' if row.extra else ''}" for row in named]
    return f"did you mean {' or '.join(meant)}?" if meant else ""


def owner_of(option: str, row: ProviderRow) -> str:
    """The provider to which this option belongs, where that of `row` surely has no such option: the CPU's takes none at
    all, and others may have options that several have, such as `device_id`. Empty for a provider without a row in the
    table, whose options are unknown here."""
    owners = [other.name for other in TABLE if option in other.options]
    if not owners or row.name in owners or row.name.lower() not in ROWS:
        return ""
    return owners[0] if row.name == CPU or len(owners) == 1 else ""

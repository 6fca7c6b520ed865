"""What a package's genai_config.json sets for ONNX Runtime that may run code or touch files: libraries, addresses in
memory, places to read from and to write to. Known as harmless are options and entries that are listed; all others are
refused unless the package is trusted. Knows no session.

onnxruntime-genai reads more sections than this package, so that all are looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from olive_ext.errors import NOT_TRUSTED, ModelError
from olive_ext.model.providers.table import CPU, ROWS

_VALUES = {
    "backend_path": re.compile(r"(lib)?Qnn(Cpu|Gpu|Htp)(\.so|\.dll)?"),
    "backend_type": re.compile(r"cpu|gpu|htp"),
}
"""Options that are harmless with these values alone: QNN's own libraries by bare names, which Olive's packages have."""

_FIELDS = re.compile(
    r"log_(id|severity_level|verbosity_level)|(intra|inter)_op_num_threads|enable_(cpu_mem_arena|mem_pattern)"
    r"|graph_optimization_level|disable_(cpu_ep_fallback|quant_qdq)|enable_quant_qdq_cleanup|use_env_allocators"
)
"""Keys of `session_options` that onnxruntime-genai makes fields of ONNX Runtime's, or did in earlier releases;
all others become entries."""

_ENTRIES = re.compile(
    r"(session\.(intra_op|inter_op|qdq|prepack\.)\w*(\.\w+)*"
    r"|session\.(disable|enable)_(?!\w*(profiling|statistics))\w+"
    r"|session\.(set_denormal_as_zero|use_env_allocators|use_device_allocator_for_initializers|dynamic_block_base"
    r"|use_deterministic_compute|graph_optimizations_loop_level|strict_shape_type_inference|force_spinning_stop"
    r"|gqa_value_layout)"
    r"|(optimization|memory|mlas)\.[\w.]+|ep\.share_ep_contexts"
    r"|ep\.cuda\.(fpa_intb_(gemm|profile_m)|gqa_workspace_max_total_sequence_length))"
)
"""Session configuration entries without a file or an address in them; of CUDA's those that choose among its kernels,
which the builder writes."""

_RUN_ENTRIES = re.compile(
    r"memory\.enable_memory_arena_shrinkage|disable_synchronize_execution_providers|gpu_graph_id|nv_profile_index"
    r"|qnn\.(htp_perf_mode(_post_run)?|rpc_control_latency)"
)


_OPERATORS = "a library of operators, native code that would run here"


def operators_library(genai_config: Mapping[str, Any], file: Path, *, is_trusted: bool = False) -> str | None:
    """The library of operators that genai_config.json, read from `file`, names; None where it names none.

    Raises `ModelError` that names the first setting that needs trust, unless the package `is_trusted`."""
    settings = list(_untrusted(genai_config, ""))
    if settings and not is_trusted:
        key, value, what = settings[0]
        raise ModelError(f"'{file}' sets {what}: {NOT_TRUSTED}", key, value, code="untrusted")
    return next((str(value) for _, value, what in settings if what == _OPERATORS), None)


def _untrusted(value: Any, where: str) -> Iterator[tuple[str, Any, str]]:
    """Key, value and kind of every setting that needs trust in a part of the file."""
    if isinstance(value, list):
        for item in value:
            yield from _untrusted(item, where)
    for key, item in value.items() if isinstance(value, Mapping) else ():
        full_key = f"{where}.{key}" if where else str(key)
        if key == "custom_ops_library" and item:
            yield full_key, item, _OPERATORS
        elif key == "provider_options":
            yield from _options(item, full_key)
        else:
            if key in ("session_options", "run_options"):
                yield from _entries(item, full_key, is_run=key == "run_options")
            yield from _untrusted(item, full_key)


def _entries(given: Any, where: str, *, is_run: bool) -> Iterator[tuple[str, Any, str]]:
    for key, value in given.items() if isinstance(given, Mapping) else ():
        is_section = isinstance(value, (Mapping, list)) or key == "custom_ops_library"  # looked at for themselves
        is_harmless = _RUN_ENTRIES.fullmatch(key) if is_run else _FIELDS.fullmatch(key) or _ENTRIES.fullmatch(key)
        if not is_section and not is_harmless:
            yield f"{where}.{key}", value, "an entry of ONNX Runtime that is not known as harmless"


def _options(given: Any, where: str) -> Iterator[tuple[str, Any, str]]:
    entries = given if isinstance(given, list) else [given]
    named = [pair for entry in entries if isinstance(entry, Mapping) for pair in entry.items()]
    for name, options in named:
        row = ROWS.get(name.lower()) or ROWS.get(f"{name.lower()}executionprovider")
        harmless = row.harmless if row is not None else frozenset()
        for key, value in options.items() if isinstance(options, Mapping) and (row is None or row.name != CPU) else ():
            is_value = key not in _VALUES or _VALUES[key].fullmatch(str(value))
            if key != "device_filtering_options" and not (key in harmless and is_value):
                yield f"{where}.{name}.{key}", value, f"an option of {name} that is not known as harmless"

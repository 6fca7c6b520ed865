"""Which execution providers run the model: names, options, and what this build of ONNX Runtime has. Also what a
package's genai_config.json may set for ONNX Runtime. Some settings run code or touch files (libraries, addresses in
memory, places to read from and write to). Options and entries that are listed here are known as harmless; all others
are refused unless the package is trusted. All sections are checked, because onnxruntime-genai reads more of them than
this package.

Knows no model. What is special to one provider is in `table` alone.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from olive_ext.errors import NOT_TRUSTED, ModelError, ProviderError, joined_lines, warn_ignored
from olive_ext.model.files.package_config import GENAI_CONFIG
from olive_ext.model.providers.devices import Provider
from olive_ext.model.providers.table import CPU, ROWS, TABLE, ProviderRow, meant_provider, owner_of

logger = logging.getLogger(__name__)

Written = tuple[str, Mapping[str, Any]]

# Options in genai_config.json for onnxruntime-genai only: its captured graphs have fixed shapes, our steps vary.
_GENAI_ONLY = {"enable_cuda_graph", "enable_graph_capture", "enableGraphCapture", "device_filtering_options"}

_NOT_HERE = "is not in this build of ONNX Runtime, which has"

_DEVICE_FACTS = ("version", "FULL_DEVICE_NAME", "DEVICE_ARCHITECTURE", "ov_device", "npu_platform")
"""The device facts of plugins that decide what is compiled; other facts change from run to run."""

# Distributions that install the same package and so overwrite each other's files.
_RUNTIMES = ("", "-gpu", "-directml", "-openvino", "-qnn", "-rocm", "-migraphx", "-webgpu", "-training", "-vitisai")
_EXCLUSIVE = (
    tuple(f"onnxruntime{build}" for build in _RUNTIMES),
    ("onnxruntime-genai", "onnxruntime-genai-cuda", "onnxruntime-genai-directml", "onnxruntime-genai-winml"),
)


def resolve_providers(
    request: Any = None,
    options: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    *,
    genai_config: Mapping[str, Any] | None = None,
    available: Iterable[str] | None = None,
    allow_cpu_fallback: bool = False,
    setting: str = "execution_provider",
    section: str = "decoder",
    variant: str = "",
) -> tuple[Provider, ...]:
    """Providers in order of preference, the CPU last (once). The first source that names providers counts: `request`
    (the user's `setting`: a name, a list of names or of (name, options)), the `section` of genai_config.json, the model
    package's `variant` (the provider that it is for), the CPU.

    `options` belong to the first provider, or as a list one entry to each. An option that only another provider has is
    left out with a warning, because recipes give CUDA's options whatever their models run on. `available` are the full
    names of the providers in this build (by default ONNX Runtime's list). Raises `ProviderError` for a name that is
    unknown, given twice, or missing from this build; with `allow_cpu_fallback` a missing one is dropped with a warning.
    """
    written, origin = (_pairs(request, setting), setting) if request else _written(genai_config, section, variant)
    written = _with_options(written, options, origin)
    names = frozenset(available_providers() if available is None else available) | {CPU}
    providers: list[Provider] = []
    for asked, asked_options in written:
        row = _row(asked, names, origin)
        if any(row.name == provider.name for provider in providers):
            raise ProviderError(f"{origin} names {row.name} twice", code="contradiction")
        if row.name not in names:
            missing = f"{row.name} (from {origin}) {_NOT_HERE} {', '.join(sorted(names))}"
            if not allow_cpu_fallback:
                ways = f"{_install(row.name)}name another in '{setting}' or set 'allow_cpu_fallback'"
                raise ProviderError(f"{missing}; {ways}")
            logger.warning("%s; running without it", missing)
            continue
        others = {key: owner for key in asked_options if (owner := owner_of(key, row))}
        for key, owner in others.items():
            warn_ignored(f"the option '{key}' is one of {owner}, and the model runs on {row.name} ({origin})")
        asked_options = {key: value for key, value in asked_options.items() if key not in others}
        if row.name == CPU and asked_options:
            keys = ", ".join(f"'{key}'" for key in asked_options)
            keys += f" in {GENAI_CONFIG}" if origin == GENAI_CONFIG else ""
            raise ProviderError(f"{CPU} takes no options, and was given {keys}; threads are 'engine.num_threads'")
        chosen = {**row.defaults, **{key: _text(key, value, row.name) for key, value in asked_options.items()}}
        providers.append(Provider(row.name, row.device, chosen, origin, row.plans_shapes, row.capture_option))
    if all(provider.name != CPU for provider in providers):
        providers.append(Provider(CPU, "cpu", {}, "always last"))
    return tuple(providers)


def refuse_missing(names: Sequence[str], where: str) -> None:
    """Raises `ProviderError` where this build has none of the full `names` in a recipe's key `where`."""
    if CPU not in names and not set(names) & set(here := available_providers()):
        problem = f"{_NOT_HERE} {', '.join(sorted(here))}"
        raise ProviderError(f"{problem}; {_install(names[0])}name another", where, ", ".join(names))


def _install(name: str) -> str:
    extra = ROWS[name.lower()].extra if name.lower() in ROWS else ""
    return f"install the extra '{extra}' ('.[{extra}]' in a clone), " if extra else ""


def first_name(request: Any) -> str | None:
    """The full name of the first provider of a request, whether this build has it or not; None where there is none."""
    first = next(iter(_pairs(request, "execution_provider")), None) if request else None
    return None if first is None else ROWS[first[0].lower()].name if first[0].lower() in ROWS else first[0]


def available_providers() -> tuple[str, ...]:
    """Full names of the providers that this build has or that a registered library adds, without the remote Azure."""
    import onnxruntime

    names = [*onnxruntime.get_available_providers(), *(device.ep_name for device in onnxruntime.get_ep_devices())]
    return tuple(name for name in dict.fromkeys(names) if name != "AzureExecutionProvider")


def known_providers() -> list[str]:
    """Full names of the providers that this build has, and of those that others have."""
    return [*available_providers(), *(row.name for row in TABLE)]


def register_libraries(libraries: Mapping[str, str]) -> None:
    """Registers plugin provider libraries: a name of the user's choice, and the library's path or the Python package
    that ships it (its `get_library_path()`). A library that is registered already stays as it is. Raises
    `ProviderError` where there is no such library, or ONNX Runtime refuses it."""
    if not libraries:
        return
    import onnxruntime

    for name, written in libraries.items():
        path = _library_path(name, written)
        if path in {_resolved(device.ep_metadata.get("library_path")) for device in onnxruntime.get_ep_devices()}:
            continue
        try:
            onnxruntime.register_execution_provider_library(name, path)
        except Exception as error:  # a plugin's library may fail with anything
            # A library that found no device leaves no trace to look up before, only this refusal.
            if "already registered" not in str(error):
                raise ProviderError(f"provider library '{name}' = '{written}': {joined_lines(error)}") from error


def plugin_devices() -> dict[str, Any]:
    """The first device of each provider that a registered library added, by full name."""
    import onnxruntime

    plugins = [device for device in onnxruntime.get_ep_devices() if device.ep_metadata.get("library_path")]
    return {device.ep_name: device for device in reversed(plugins)}


def build_facts(names: Iterable[str]) -> dict[str, Any]:
    """What decides what is compiled: ONNX Runtime's version, the machine's devices, and facts of those of `names`."""
    import onnxruntime

    devices = onnxruntime.get_ep_devices()
    return {
        "onnxruntime": onnxruntime.__version__,
        "hardware": sorted({(str(one.device.type), one.device.vendor_id, one.device.device_id) for one in devices}),
        "devices": [
            [one.ep_name, *map(one.ep_metadata.get, _DEVICE_FACTS)] for one in devices if one.ep_name in set(names)
        ],
    }


@functools.cache
def _is_installed(distribution: str) -> bool:
    """Whether it is installed as a build of ONNX Runtime, and not as a plugin (onnxruntime-qnn from 2.0 on)."""
    try:
        files = importlib.metadata.files(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return files is None or any(file.parts[0] in ("onnxruntime", "onnxruntime_genai") for file in files)


def check_distributions(is_installed: Callable[[str], bool] = _is_installed) -> None:
    """Raises `ProviderError` where two builds of ONNX Runtime (or genai) are installed: they share a folder."""
    for builds in _EXCLUSIVE:
        if len(installed := [build for build in builds if is_installed(build)]) > 1:
            raise ProviderError(
                f"{' and '.join(installed)} are installed together: uninstall all, install one", code="contradiction"
            )


def _written(genai_config: Mapping[str, Any] | None, section: str, variant: str) -> tuple[list[Written], str]:
    written_section = ((genai_config or {}).get("model") or {}).get(section) or {}
    entries = (written_section.get("session_options") or {}).get("provider_options") or []
    written: list[Written] = [
        (name, {key: value for key, value in (options or {}).items() if key not in _GENAI_ONLY})
        for entry in entries
        for name, options in entry.items()
    ]
    if not written and variant not in ("", CPU):
        return [(variant, {})], "the package's variant"
    return (written, GENAI_CONFIG) if written else ([(CPU, {})], "default")


def _pairs(value: Any, origin: str) -> list[Written]:
    pairs: list[Written] = []
    for item in [value] if isinstance(value, str) else value:
        match item:
            case str():
                pairs.append((item, {}))
            case [str() as name, Mapping() as options]:
                pairs.append((name, options))
            case _:
                raise ProviderError(f"{origin} has {item!r}: give a name or a pair (name, options)", code="wrong_value")
    return pairs


def _with_options(written: list[Written], options: Any, origin: str) -> list[Written]:
    if not options:
        return written
    extra = [options, *([{}] * (len(written) - 1))] if isinstance(options, Mapping) else list(options)
    if len(extra) != len(written):
        raise ProviderError(
            f"provider_options has {len(extra)} entries for {len(written)} provider(s) of {origin}", code="wrong_value"
        )
    merged: list[Written] = []
    for (name, own), more in zip(written, extra, strict=True):
        if own and more and origin.endswith("execution_provider"):
            raise ProviderError(f"options of {name} are in {origin} and in provider_options; give them once")
        merged.append((name, {**own, **(more or {})}))
    return merged


def _row(asked: str, available: Iterable[str], origin: str) -> ProviderRow:
    row = ROWS.get(asked.lower())
    if row is not None:
        return row
    if asked in available:  # a plugin without a row, by its exact name; inputs in host memory suit any provider
        return ProviderRow(asked, asked)
    hint = meant_provider(asked) or f"known: {', '.join(row.short for row in TABLE)}"
    raise ProviderError(f"{origin} names the unknown execution provider '{asked}': {hint}", code="unknown_name")


def _text(key: str, value: Any, provider: str) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, (str, int, float)):
        return str(value)
    raise ProviderError(
        f"option '{key}' of {provider} = {value!r}: give a string, number or boolean", code="wrong_value"
    )


def _library_path(name: str, written: str) -> str:
    path = Path(written).expanduser()
    if path.is_file():
        return _resolved(path)
    if not written.isidentifier() or importlib.util.find_spec(written) is None:
        problem = "neither a file nor a Python package"
        raise ProviderError(problem, f"provider_libraries.{name}", written, code="not_found")
    package = importlib.import_module(written)
    if not hasattr(package, "get_library_path"):
        raise ProviderError(f"provider library '{name}': the package '{written}' has no get_library_path()")
    return _resolved(package.get_library_path())


def _resolved(path: str | Path | None) -> str:
    return str(Path(path).resolve()) if path else ""


_VALUES = {
    "backend_path": re.compile(r"(lib)?Qnn(Cpu|Gpu|Htp)(\.so|\.dll)?"),
    "backend_type": re.compile(r"cpu|gpu|htp"),
}
"""Options that are harmless with these values alone: QNN's own libraries by bare names, which Olive's packages have."""

_FIELDS = (
    r"log_(id|severity_level|verbosity_level)|(intra|inter)_op_num_threads|enable_(cpu_mem_arena|mem_pattern)"
    r"|graph_optimization_level|disable_(cpu_ep_fallback|quant_qdq)|enable_quant_qdq_cleanup|use_env_allocators"
)
"""Keys of `session_options` that onnxruntime-genai passes, or passed in earlier releases, as fields of ONNX Runtime's;
all others become configuration entries."""

_ENTRIES = (
    r"(session\.(intra_op|inter_op|qdq|prepack\.)\w*(\.\w+)*"
    r"|session\.(disable|enable)_(?!\w*(profiling|statistics))\w+"
    r"|session\.(set_denormal_as_zero|use_env_allocators|use_device_allocator_for_initializers|dynamic_block_base"
    r"|use_deterministic_compute|graph_optimizations_loop_level|strict_shape_type_inference|force_spinning_stop"
    r"|gqa_value_layout)"
    r"|(optimization|memory|mlas)\.[\w.]+|ep\.share_ep_contexts"
    r"|ep\.cuda\.(fpa_intb_(gemm|profile_m)|gqa_workspace_max_total_sequence_length))"
)
"""Session configuration entries without a file or an address. CUDA's, of the builder, choose among its kernels."""

_RUN_ENTRIES = (
    r"memory\.enable_memory_arena_shrinkage|disable_synchronize_execution_providers|gpu_graph_id|nv_profile_index"
    r"|qnn\.(htp_perf_mode(_post_run)?|rpc_control_latency)"
)
_HARMLESS = {"session_options": re.compile(f"{_FIELDS}|{_ENTRIES}"), "run_options": re.compile(_RUN_ENTRIES)}
"""By sections, the keys that need no trust."""

_OPERATORS = "a library of operators, native code that would run here"


def operators_library(genai_config: Mapping[str, Any], file: Path, *, is_trusted: bool = False) -> str | None:
    """The library of operators that genai_config.json, read from `file`, names; None where it names none. Raises
    `ModelError` that names the first setting that needs trust, unless the package `is_trusted`."""
    settings = list(_untrusted(genai_config, ""))
    if settings and not is_trusted:
        key, value, what = settings[0]
        raise ModelError(f"'{file}' sets {what}: {NOT_TRUSTED}", key, value, code="untrusted")
    return next((str(value) for _, value, what in settings if what == _OPERATORS), None)


def _untrusted(value: Any, where: str, harmless: re.Pattern[str] | None = None) -> Iterator[tuple[str, Any, str]]:
    """Key, value and kind of every setting that needs trust in a part of the file. Where it is a section of ONNX
    Runtime's entries, `harmless` are those that need none."""
    if isinstance(value, list):
        for item in value:
            yield from _untrusted(item, where)
    for key, item in value.items() if isinstance(value, Mapping) else ():
        full_key = f"{where}.{key}" if where else str(key)
        if key == "custom_ops_library":
            if item:
                yield full_key, item, _OPERATORS
        elif key == "provider_options":
            yield from _options(item, full_key)
        elif isinstance(item, (Mapping, list)):
            yield from _untrusted(item, full_key, _HARMLESS.get(key))
        elif harmless is not None and not harmless.fullmatch(key):
            yield full_key, item, "an entry of ONNX Runtime that is not known as harmless"


def _options(written: Any, where: str) -> Iterator[tuple[str, Any, str]]:
    entries = written if isinstance(written, list) else [written]
    named = [pair for entry in entries if isinstance(entry, Mapping) for pair in entry.items()]
    for name, options in named:
        row = ROWS.get(name.lower()) or ROWS.get(f"{name.lower()}executionprovider")
        harmless = row.harmless if row is not None else frozenset()
        for key, value in options.items() if isinstance(options, Mapping) and (row is None or row.name != CPU) else ():
            is_value = key not in _VALUES or _VALUES[key].fullmatch(str(value))
            if key != "device_filtering_options" and not (key in harmless and is_value):
                yield f"{where}.{name}.{key}", value, f"an option of {name} that is not known as harmless"

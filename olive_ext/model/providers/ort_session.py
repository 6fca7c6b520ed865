"""Opens an ONNX Runtime session on exactly the providers that were resolved. Knows no decoder."""

from __future__ import annotations

import contextlib
import difflib
import io
import logging
import mmap
import os
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from olive_ext.config import EngineConfig, ExecutionSettings
from olive_ext.errors import (
    ConfigError,
    DamagedError,
    ModelError,
    OliveExtError,
    ProviderError,
    joined_lines,
    special_kind,
)
from olive_ext.model.providers.compiled import Compiled
from olive_ext.model.providers.devices import Provider
from olive_ext.model.providers.resolution import plugin_devices
from olive_ext.model.providers.table import CPU

if TYPE_CHECKING:
    import onnxruntime

logger = logging.getLogger(__name__)

_SILENT, _WARNINGS = 4, 2
"""ONNX Runtime's log levels. What it has to say to a user is in its exceptions, which become our messages. Its log
lines go to stderr, in colour, past Python; OLIVE_EXT_DEBUG=1 shows them."""

_CODES = re.compile(r"\[ONNXRuntimeError\] : \d+ : (?P<code>[A-Z_]+) : ")
_SIGNATURE = r"[^()]*(\(\))?\(([^()]|\([^()]*\))*\)( const)?\s*"
_SOURCE = re.compile(rf"\S*/onnxruntime(_src)?/\S+\.(cc|h|cu|cpp):\d+ ({_SIGNATURE})?")
"""A C++ source location, and the signature after it, up to the bracket that closes it ("operator()(...)")."""

_NO_CUDNN_ATTENTION = ("ORT_ENABLE_CUDNN_FLASH_ATTENTION", "0")
"""ONNX Runtime prefers cuDNN's attention for prompts on compute capability 9.0, which makes a plan for every length of
a prompt. FlashAttention needs no plan. A variable that the user has set stays."""

_KNOWN_ENTRY = b"session.disable_prepacking"
_ENTRY = re.compile(rb"(?<=\0)((?:session|optimization|memory|mlas)\.[a-z0-9_.]{4,80})\0")

_DEFAULTS = ExecutionSettings()

LEVELS = {
    "disable": "ORT_DISABLE_ALL",
    **{name: f"ORT_ENABLE_{name.upper()}" for name in ("basic", "extended", "layout", "all")},
}
"""ONNX Runtime's levels of graph optimization, each with those before it, and its names for them."""


def open_session(
    model: bytes | Path,
    providers: Sequence[Provider],
    settings: ExecutionSettings = _DEFAULTS,
    *,
    external_data_folder: Path | None = None,
    custom_operators: Path | None = None,
    label: str | None = None,
    compiled: Compiled | None = None,
    weights: Sequence[Path] = (),
    level: str | None = None,
) -> onnxruntime.InferenceSession:
    """A session for `model` (a serialized graph, or its file) that runs on all of `providers`, in this order.

    A graph from memory finds its weights in `external_data_folder` (see `relocated`). `label` names the model in
    errors. `custom_operators` is a library that ONNX Runtime loads. `compiled` keeps what providers compile of a graph
    from memory with its external data in `weights`. `level` is one of `LEVELS`; None takes that of `settings`. Of
    `settings`, the CPU fallback, the number of threads and ONNX Runtime's options are read. Raises `ModelError` where
    ONNX Runtime refuses the model, and `ProviderError` where a provider does not come up; with `allow_cpu_fallback` the
    latter is a warning, and the session runs on the CPU.
    """
    name = label or (str(model) if isinstance(model, Path) else "the edited graph")

    def open_graph(
        graph: bytes | Path, wanted: Sequence[Provider], entries: Mapping[str, str]
    ) -> onnxruntime.InferenceSession:
        folder = external_data_folder if isinstance(graph, bytes) else None
        options = _session_options(folder, settings.engine, level)
        for key, value in entries.items():
            options.add_session_config_entry(key, value)
        return _open(graph, wanted, options, name, custom_operators)

    def open_on(wanted: Sequence[Provider]) -> onnxruntime.InferenceSession:
        if compiled is None or isinstance(model, Path):
            return open_graph(model, wanted, {})
        return compiled.opened(model, weights, wanted, open_graph)

    try:
        return open_on(providers)
    except ProviderError as error:
        if not settings.allow_cpu_fallback:
            raise error.saying(f"{error}; 'allow_cpu_fallback' would make this a warning") from error
        logger.warning("%s; running on the CPU", error)
        return open_on([Provider(CPU, "cpu")])


def reason_of(error: BaseException) -> str:
    """The message of an exception of ONNX Runtime, without the C++ locations and signatures that it may begin with, and
    without the middle of a long message: what is wrong with a graph comes after the node in question."""
    text = _SOURCE.sub("", _CODES.sub("", joined_lines(error, width=4000)))
    return text if len(text) <= 400 else f"{text[:240]} ... {text[-155:]}"


def _log_level() -> int:
    return _WARNINGS if os.environ.get("OLIVE_EXT_DEBUG", "") not in ("", "0") else _SILENT


def read_adapter(path: str) -> onnxruntime.AdapterFormat:
    """The LoRA adapter in an .onnx_adapter file. Raises `ModelError` where it is missing or is not one."""
    import onnxruntime

    if kind := special_kind(Path(path)):
        raise ModelError(f"adapter '{path}' in engine.adapters is {kind}: give a file", code="no_access")
    try:
        with Path(path).open("rb"):
            return onnxruntime.AdapterFormat.read_adapter(path)
    except OSError as error:
        raise ModelError(
            f"cannot read '{path}': {error.strerror or error}", "engine.adapters", code="no_access"
        ) from error
    except RuntimeError as error:
        raise DamagedError(f"'{path}' in engine.adapters is no .onnx_adapter file, or is damaged") from error


def _session_options(folder: Path | None, config: EngineConfig, level: str | None) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = _log_level()
    onnxruntime.set_default_logger_severity(_log_level())
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")  # for whoever checks placement
    options.enable_mem_pattern = False  # a pattern is kept for every shape, and a decoder's shapes never end
    if config.num_threads != "auto":
        options.intra_op_num_threads = config.num_threads
    chosen = LEVELS[level or config.graph_optimization]
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, chosen)
    _refuse_misspelt_entries(tuple(config.session_options))
    for key, value in config.session_options.items():
        options.add_session_config_entry(key, value)
    if folder is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    return options


@lru_cache(maxsize=16)  # one model takes several sessions, and one warning
def _refuse_misspelt_entries(names: tuple[str, ...]) -> None:
    """Raises `ConfigError` for a session configuration entry that is nearly one of ONNX Runtime's, and warns of entries
    that do not occur in its library: ONNX Runtime ignores what it does not know, and has no list. Names of plugins
    (`ep.`) are not in the library, nor are some that a compiler took apart, so that is no reason to refuse. Silent
    where the library is of another build, in which a name that must be known does not occur."""
    from onnxruntime.capi import onnxruntime_pybind11_state as library

    asked = [name for name in names if not name.startswith("ep.")]
    if not asked:
        return
    with Path(library.__file__).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if content.find(_KNOWN_ENTRY + b"\0") < 0:
            return
        unknown = [name for name in asked if content.find(name.encode() + b"\0") < 0]
        known = [match[1].decode() for match in _ENTRY.finditer(content)] if unknown else []
    for name in unknown:
        if near := difflib.get_close_matches(name, known, n=1, cutoff=0.9):
            problem = f"'engine.session_options' has '{name}', which ONNX Runtime ignores"
            raise ConfigError(f"{problem}: did you mean '{near[0]}'?", code="unknown_name")
    if unknown:
        logger.warning(
            "engine.session_options: this ONNX Runtime has no entry %s, as far as this package knows, and ignores such",
            ", ".join(map(repr, unknown)),
        )


def _open(
    model: bytes | Path, providers: Sequence[Provider], options: Any, name: str, custom_operators: Path | None
) -> Any:
    import onnxruntime

    content = model if isinstance(model, bytes) else str(model)
    arguments: dict[str, Any] = {}
    devices = plugin_devices()
    if any(provider.name in devices for provider in providers):
        # Named through `providers=` a plugin is dropped without a word, and with `providers=` given at all the
        # devices in the options are ignored: a session takes one road or the other.
        built_in = {device.ep_name: device for device in reversed(onnxruntime.get_ep_devices())}
        for provider in providers:
            device = devices.get(provider.name, built_in.get(provider.name))
            if device is None:
                problem = f"{provider.name} cannot be combined with a provider from a plugin library"
                raise ProviderError(f"{problem} ({', '.join(devices)})", code="contradiction")
            options.add_provider_for_devices([device], dict(provider.options))
    else:
        arguments["providers"] = [(provider.name, dict(provider.options)) for provider in providers]
    if any(provider.device == "cuda" for provider in providers):
        os.environ.setdefault(*_NO_CUDNN_ATTENTION)
        printed = io.StringIO()  # the loader does not find the libraries of the nvidia-* packages by itself
        with contextlib.redirect_stdout(printed):
            onnxruntime.preload_dlls()
        if printed.getvalue():
            logger.debug("%s", printed.getvalue().strip())
    try:
        if custom_operators is not None:
            options.register_custom_ops_library(str(custom_operators))
        session = onnxruntime.InferenceSession(content, options, enable_fallback=0, **arguments)
    except Exception as error:  # ONNX Runtime's exceptions have no common base, and plugins have their own
        raise _refusal(error, providers, name) from error
    used = session.get_providers()
    if dropped := [provider.name for provider in providers if provider.name not in used]:
        raise ProviderError(
            f"ONNX Runtime dropped {', '.join(dropped)} while opening {name} and would run on {', '.join(used)} only "
            f"(a library or a device is missing; OLIVE_EXT_DEBUG=1 shows its log, which says which)"
        )
    return session


def _refusal(error: Exception, providers: Sequence[Provider], name: str) -> OliveExtError:
    """Tells a provider's failure from the model's by the words of ONNX Runtime, which has no exception type for it."""
    reason = reason_of(error)
    others = ", ".join(provider.name for provider in providers if provider.name != CPU)
    says_provider = "provider" in reason.replace(name, "").lower()
    if others and (says_provider or type(error).__name__ in ("EPFail", "ValueError")):
        return ProviderError(f"{others} did not come up for {name}: {reason}")
    return ModelError(f"ONNX Runtime cannot open {name}: {reason}")

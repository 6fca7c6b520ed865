"""A package that is opened with onnxruntime-genai. The only module of the engine that imports it; knows no step."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from olive_ext.config import EngineConfig
from olive_ext.engine.runners.genai.generator_traits import (
    NUM_TOKENS,
    GenaiGenerator,
    GeneratorTraits,
    find_traits,
    input_window,
)
from olive_ext.errors import ModelError, OliveExtError, ProviderError, joined_lines
from olive_ext.model.files.content import load_graph
from olive_ext.model.providers.devices import Provider
from olive_ext.model.spec.attention import rotary_rows
from olive_ext.model.spec.checkpoint import least_limit, read_length
from olive_ext.model.types import ModelFiles

_SEARCH = {"batch_size": 1, "num_beams": 1, "num_return_sequences": 1, "do_sample": False}
"""Search options that make a generator run one sequence, whatever genai_config.json has for `search`."""

_NO_TOKEN = -1
"""Replaces the pad token where onnxruntime-genai pads: the library takes every pad id at the end of a prompt for
padding and returns the logits before it. A lookup of row -1 is lawful in ONNX, and what is padded is masked."""


class GenaiModel:
    """An open `onnxruntime_genai.Model`, and what its generators can do."""

    def __init__(
        self, files: ModelFiles, providers: tuple[Provider, ...], overlay: Mapping[str, Any], max_length: int | None
    ) -> None:
        self._og = _import()
        self._notes: list[str] = []
        decoder = _decoder_config(files)
        window = decoder.get("sliding_window") or {}
        self._least_capacity = int(window.get("window_size", 0)) + 1  # a smaller cache than the window is refused
        self.logits_name = str(decoder.get("outputs", {}).get("logits", "logits"))
        self.context_length = self._context_length(files, max_length)
        try:
            config = self._og.Config(str(files.directory))
            config.overlay(json.dumps(overlay))
            self._used = set_providers(config, providers)
            self._model: Any = self._og.Model(config)
            self.traits = self._find_traits(files)
        except (RuntimeError, MemoryError) as error:
            raise _refusal(error, files, providers) from error

    def new_generator(self, capacity: int) -> GenaiGenerator:
        """An empty one with memory for `capacity` positions; without max_length it would be the whole context's."""
        params = self._og.GeneratorParams(self._model)
        size = min(max(capacity, self._least_capacity), self.context_length)
        params.set_search_options(max_length=size, **_SEARCH)
        generator: GenaiGenerator = self._og.Generator(self._model, params)
        return generator

    def check_device(self, providers: tuple[Provider, ...]) -> None:
        """Raises `ProviderError` where the model runs on the CPU although a provider with its own memory was chosen."""
        wanted = providers[0]
        device = str(self._model.device_type)
        if wanted.device != "cpu" and device.upper() == "CPU":
            raise ProviderError(
                f"onnxruntime-genai runs on the CPU, and {wanted.origin} asks for {wanted.name}; "
                f"'allow_cpu_fallback' would allow that"
            )

    def describe(self) -> Mapping[str, Any]:
        """Facts of the open model."""
        return {
            "runtime_version": self._og.__version__,
            "providers": self._used,
            "device": str(self._model.device_type) if self._model is not None else "closed",
            "notes": list(self._notes),
        }

    def close(self) -> None:
        """Releases the model's memory."""
        self._model = None

    def _find_traits(self, files: ModelFiles) -> GeneratorTraits:
        window = input_window(files)
        size = max(NUM_TOKENS, window)
        vocab_size = int(files.genai_config["model"].get("vocab_size") or size + 1)
        tokens = [1 + number * 7919 % (vocab_size - 1) for number in range(size)]  # spread, and 0 is often the pad
        new_generator = partial(self.new_generator, size + 1)
        may_rewind = not _decoder_config(files).get("sliding_window")
        return find_traits(new_generator, tokens, self.logits_name, may_rewind=may_rewind, window_size=window)

    def _context_length(self, files: ModelFiles, max_length: int | None) -> int:
        graphs = [files.decoder, *(file for file in files.weights if file.suffix == ".onnx")]
        rows = [rotary_rows(load_graph(graph).graph) for graph in graphs]
        limits = {
            "genai_config.json": files.genai_config["model"].get("context_length"),
            "config.json": read_length(files.hf_config),
            "the rows of the rotary cache": min((number for number in rows if number), default=None),
            "max_length": max_length,
        }
        length, note = least_limit(limits)
        self._notes.append(note)
        return length


def _import() -> Any:
    try:
        import onnxruntime_genai
    except ImportError as error:
        raise ProviderError(
            f"this model needs onnxruntime-genai, which cannot be imported ({joined_lines(error)}): install "
            f"olive-ext[cpu] or olive-ext[gpu], which bring it, or set 'engine.runtime' to \"onnxruntime\""
        ) from error
    return onnxruntime_genai


def _decoder_config(files: ModelFiles) -> Mapping[str, Any]:
    decoder = (files.genai_config.get("model") or {}).get("decoder")
    if not isinstance(decoder, Mapping):
        raise ModelError(
            f"onnxruntime-genai needs a genai_config.json that describes a decoder, and '{files.directory}' has none; "
            f"set 'engine.runtime' to \"onnxruntime\""
        )
    return decoder


def overlay_of(files: ModelFiles, config: EngineConfig, profile_prefix: Path | None) -> Mapping[str, Any]:
    """What is put over genai_config.json: the user's session options, and the file where another one was chosen."""
    options: dict[str, Any] = dict(config.session_options)
    if config.num_threads != "auto":
        options["intra_op_num_threads"] = config.num_threads
    if profile_prefix is not None:
        options["enable_profiling"] = str(profile_prefix)
    decoder: dict[str, Any] = {"session_options": options} if options else {}
    named = files.directory / str(_decoder_config(files).get("filename") or "")
    if not files.pipeline and not (named.is_file() and named.samefile(files.decoder)):
        if _decoder_config(files).get("pipeline"):
            raise ModelError(f"'{files.decoder}' is none of the graphs of the pipeline in genai_config.json")
        decoder["filename"] = os.path.relpath(files.decoder, files.directory)
    overlay: dict[str, Any] = {"decoder": decoder}
    if input_window(files):
        overlay["pad_token_id"] = _NO_TOKEN
    return {"model": overlay}


def set_providers(config: Any, providers: tuple[Provider, ...]) -> list[str]:
    """Replaces genai_config.json's providers by those that the user chose; returns their names. Without a choice the
    package's own providers stay, with the options that only onnxruntime-genai reads."""
    asked = [provider for provider in providers if provider.origin not in ("genai_config.json", "default")]
    if any(provider.origin != "always last" for provider in asked):
        config.clear_providers()
        for provider in asked:
            name = provider.name.removesuffix("ExecutionProvider").lower()
            if name == "cpu":
                continue  # what remains without any
            config.append_provider(name)
            for key, value in provider.options.items():
                config.set_provider_option(name, key, value)
    return [provider.name for provider in providers]


def _refusal(error: Exception, files: ModelFiles, providers: tuple[Provider, ...]) -> OliveExtError:
    reason = joined_lines(error)
    names = [provider.name for provider in providers if provider.device != "cpu"]
    if names and "provider" in reason.replace(str(files.directory), "").lower():
        return ProviderError(
            f"{', '.join(names)} did not come up in onnxruntime-genai for '{files.directory}': {reason}"
        )
    return ModelError(f"onnxruntime-genai cannot run '{files.directory}': {reason}")

"""The package's runtimes, listed in `model.runtimes`. Each imports its library only when it opens a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import numpy as np
from typing_extensions import override

from olive_ext.engine.runners.runner import OpenedRunner
from olive_ext.errors import ConfigError, MissingError
from olive_ext.model import ResolvedModel, decisions
from olive_ext.model.decisions import Decision, State, choose_chunk_size
from olive_ext.model.files.content import checkpoint_floats
from olive_ext.model.files.package_config import input_window
from olive_ext.model.runtimes import Runtime
from olive_ext.model.types import ModelFiles

ONE_SLOT = "onnxruntime-genai runs one sequence at a time"

_KV_NOTES = ("past and present KV", "KV is returned grown")
"""The beginning of the spec's note on the form of the cache."""


class Genai(Runtime):
    """onnxruntime-genai, one sequence at a time: for decoders that are not a single graph which takes any length."""

    name = "genai"
    follows = frozenset({"num_slots", "chunk_size", "num_threads", "session_options"})
    nothing_to_verify = "there is nothing to verify: onnxruntime-genai runs the graphs as they are"

    @override
    def auto_reason(self, model: ResolvedModel) -> str:
        files = model.files
        if files.pipeline:
            graphs = ", ".join(files.pipeline)
            return f"auto: genai_config.json makes the decoder of a pipeline of graphs ({graphs})"
        if window := input_window(files):
            return f"auto: genai_config.json feeds the decoder windows of {window} tokens"
        return ""

    @override
    def alternative(self, files: ModelFiles) -> str:
        if not files.genai_config:
            return ""
        return "onnxruntime-genai may run it, more slowly: 'engine.runtime' = \"genai\""

    @override
    def refuse(self, model: ResolvedModel) -> None:
        config = model.settings.engine
        for name in ("adapters", "strict_shapes", "graph_capture"):
            if getattr(config, name) not in (False, [], "auto"):
                why = f'it is "genai" ({model.runtime_reason})'
                raise MissingError(f"'engine.{name}' needs 'engine.runtime' = \"onnxruntime\"; {why}", f"engine.{name}")
        if config.num_slots not in ("auto", 1):
            raise ConfigError(f"{ONE_SLOT}; give 1", "engine.num_slots", config.num_slots)

    @override
    def decisions(self, model: ResolvedModel) -> Iterator[Decision]:
        yield Decision("num_slots", 1, ONE_SLOT)
        yield Decision("chunk_size", *choose_chunk_size(model.settings.engine))

    @override
    def open(self, model: ResolvedModel) -> OpenedRunner:
        from olive_ext.engine.runners.genai_runner import open_genai_runner

        return open_genai_runner(model)


class OnnxRuntime(Runtime):
    """The decoder's graph in a session of ONNX Runtime, with caches, batches and scoring on the device."""

    name = "onnxruntime"
    runs_graph = True

    @override
    def auto_reason(self, model: ResolvedModel) -> str:
        return "auto: the decoder is one graph that takes inputs of any length"

    @override
    def decisions(self, model: ResolvedModel) -> Iterator[Decision]:
        from olive_ext.engine.forms.registry import choose  # imported here: it brings onnxruntime along

        settings, engine, spec = model.settings, model.settings.engine, model.spec
        names = [provider.name for provider in model.providers]
        yield Decision("providers", names, model.providers[0].origin, _tried(len(names) > 1))
        written = "".join(note for note in spec.notes if note.startswith("the context length"))
        yield Decision("context_length", spec.context_length, "max_length" if settings.max_length else written)
        kv_cache = "in_place" if spec.is_kv_in_place else "returned"
        reasons = (note for note in spec.notes if note.startswith(_KV_NOTES))
        yield Decision("kv_cache", kv_cache, next(reasons, ""))
        windows = sum(tensor.window is not None for tensor in spec.kv)
        if windows:
            yield Decision("full_length_kv", windows, f"of {len(spec.kv)} KV tensors drop old positions in the file")
        yield Decision("graph", engine.graph, "engine.graph")
        _, scoring = choose(model)
        slots = decisions.choose_num_slots(settings, spec, model.device, is_paged=scoring.value == "packed")
        yield Decision("num_slots", *slots, "predicted")
        size, why = model.chunk_size
        is_tried = not spec.is_kv_in_place and not spec.cross
        is_tried |= decisions.is_attention_at_risk(size, model.device, spec)
        yield Decision("chunk_size", size, why, _tried(is_tried))
        threads = "ONNX Runtime's default" if engine.num_threads == "auto" else engine.num_threads
        yield Decision("num_threads", threads, "engine.num_threads")
        buckets = model.buckets
        state = _tried(buckets.steps != "none")
        yield Decision("shapes", decisions.BUCKET_FORMS[buckets.steps], buckets.note or "engine.shapes", state)
        yield scoring
        yield Decision("overlaps_steps", *model.overlaps_steps)

    @override
    def open(self, model: ResolvedModel) -> OpenedRunner:
        from olive_ext.engine.runners.ort.opening import open_ort_runner

        return open_ort_runner(model)


def _tried(is_tried: bool) -> State:
    return "tried" if is_tried else "decided"


class Transformers(Runtime):
    """A Hugging Face checkpoint in its original form: transformers on torch, one sequence at a time or tree batches."""

    name = "transformers"
    kind = "hf"
    follows = frozenset({"scoring", "chunk_size", "num_threads"})
    nothing_to_verify = "there is nothing to verify: a Hugging Face model has no ONNX graph"

    @override
    def auto_reason(self, model: ResolvedModel) -> str:
        return f"kind: {model.kind_reason}"

    @override
    def is_on_host(self, model: ResolvedModel) -> bool:
        import torch

        device = model.settings.device
        return device == "cpu" or (device is None and not torch.cuda.is_available())

    @override
    def decisions(self, model: ResolvedModel) -> Iterator[Decision]:
        yield Decision("dtype", model.settings.dtype, stated_type(model.files))
        yield Decision("chunk_size", *choose_chunk_size(model.settings.engine))

    @override
    def open(self, model: ResolvedModel) -> OpenedRunner:
        from olive_ext.engine.runners.hf_runner import open_hf_runner

        return open_hf_runner(model)


def stated_type(files: ModelFiles) -> str:
    """The number type that a checkpoint's config.json names; if it is float16, also a weight that is infinite in it."""
    stated = files.hf_config.get("dtype", files.hf_config.get("torch_dtype"))
    overflow, largest = "", float(np.finfo(np.float16).max)
    with suppress(Exception):  # whoever loads a damaged file reports it
        tensors = checkpoint_floats(files.directory).items() if stated == "float16" else ()
        beyond = (name for name, one in tensors if one.dtype != np.float16 and max(one.max(), -one.min()) > largest)
        overflow = next((f", in which {name} overflows" for name in beyond), "")
    return f"config.json names {stated}{overflow}" if stated else "no file names one"

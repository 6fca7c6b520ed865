"""The runtime "onnxruntime": the decoder's graph in a session, with caches, batches and scoring on the device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from typing_extensions import override

from olive_ext.engine.runners.runner import OpenedRunner
from olive_ext.model import ResolvedModel, decisions
from olive_ext.model.decisions import Decision, State
from olive_ext.model.runtimes import Runtime

_KV_NOTES = ("past and present KV", "KV is returned grown")
"""What the spec's note on the form of the cache begins with."""


class OnnxRuntime(Runtime):
    """ONNX Runtime's sessions."""

    name = "onnxruntime"
    runs_graph = True

    @override
    def claim(self, model: ResolvedModel) -> str:
        return "auto: the decoder is one graph that takes inputs of any length"

    @override
    def decisions(self, model: ResolvedModel) -> Iterator[Decision]:
        from olive_ext.engine.forms.registry import scoring_decision  # imported here: it brings onnxruntime along

        settings, engine, spec = model.settings, model.settings.engine, model.spec
        names = [provider.name for provider in model.providers]
        yield Decision("providers", names, model.providers[0].origin, _tried(len(names) > 1))
        yield Decision("context_length", spec.context_length, "max_length" if settings.max_length else "")
        kv_cache = "in_place" if spec.is_kv_in_place else "returned"
        reasons = (note for note in spec.notes if note.startswith(_KV_NOTES))
        yield Decision("kv_cache", kv_cache, next(reasons, ""))
        windows = sum(tensor.window is not None for tensor in spec.kv)
        yield Decision("full_length_kv", windows, f"of {len(spec.kv)} KV tensors drop old positions in the file")
        yield Decision("graph", engine.graph, "engine.graph")
        scoring = scoring_decision(model)
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
        yield Decision("decode_ahead", *model.overlapped_steps)

    @override
    def open(self, model: ResolvedModel, profile_prefix: Path | None) -> OpenedRunner:
        from olive_ext.engine.runners.ort.opening import open_ort_runner

        return open_ort_runner(model, profile_prefix)


def _tried(is_tried: bool) -> State:
    return "tried" if is_tried else "decided"

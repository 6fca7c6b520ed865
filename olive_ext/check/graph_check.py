"""What a decoder's graph shows beforehand of decisions that opening it tries: packed steps, and where attention runs.

Knows no session.
"""

from __future__ import annotations

from collections.abc import Callable

from olive_ext.engine.runners.ort.packing import packed
from olive_ext.engine.runners.ort.placement import predict_misplaced
from olive_ext.errors import ProviderError
from olive_ext.graph.attention_rewrites import with_full_length_kv
from olive_ext.graph.onnx_file import load_graph
from olive_ext.graph.paged_attention import NotPagedError
from olive_ext.model import ResolvedModel
from olive_ext.model.decisions import Decision


def on_graph(model: ResolvedModel, decision: Decision) -> Decision:
    """`decision`, with what the graph has against packed steps."""
    if (decision.name, decision.value) != ("scoring", "packed") or model.spec.is_paged:
        return decision
    try:
        packed(model, with_full_length_kv(load_graph(model.files.decoder)), model.spec)
    except NotPagedError as error:
        return model.scored_one_by_one(str(error))
    return decision


def add_placement(model: ResolvedModel, add: Callable[[str, str, str], None]) -> None:
    """On a device other than the CPU adds where nodes with large values would run. Raises `ProviderError` where opening
    would be refused."""
    device = model.device.kind
    if device == "cpu" or model.runtime[0] != "onnxruntime":
        return
    problem = predict_misplaced(load_graph(model.files.decoder), device)
    if problem is None:
        add("placement", device, "predicted: by the types of attention; ONNX Runtime's record decides")
    elif model.settings.allow_cpu_fallback:
        add("placement", "cpu", f"predicted: allow_cpu_fallback, since {problem}")
    else:
        raise ProviderError(f"'{model.files.decoder}' cannot run on the {device} device alone: {problem}")

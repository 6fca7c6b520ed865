"""What a decoder's graph shows beforehand of decisions that opening it tries: packed steps, and where attention runs.
And a trial of the opened decoder at length.
"""

from __future__ import annotations

from collections.abc import Callable

from olive_ext.engine.opening import open_runner
from olive_ext.engine.runners.ort.opening import of_any_step
from olive_ext.engine.runners.ort.packing import packed
from olive_ext.engine.runners.ort.placement import predict_misplaced
from olive_ext.engine.runners.step_trial import check_steps
from olive_ext.errors import ModelError, ProviderError
from olive_ext.graph.onnx_file import load_graph
from olive_ext.graph.paged_attention import NotPagedError
from olive_ext.model import ResolvedModel
from olive_ext.model.decisions import Decision


def on_graph(model: ResolvedModel, decision: Decision) -> Decision:
    """`decision`, with what the graph has against packed steps."""
    if (decision.name, decision.value) != ("scoring", "packed") or model.spec.is_paged:
        return decision
    try:
        packed(model, *of_any_step(model, load_graph(model.files.decoder), model.spec))
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


def verify_steps(model: ResolvedModel, add: Callable[[str, str, str], None]) -> None:
    """Compares texts beyond every number of positions in the graph, fed in parts and in company, with texts fed whole.

    Raises `ModelError` where that changes a text's numbers, and opening the model did not see it.
    """
    engine = model.settings.engine.model_copy(update={"num_slots": 2})
    opened = open_runner(model.patched({"engine": engine}))
    numbers = model.spec.choices.numbers if model.spec.choices is not None else ()
    longest = model.spec.context_length if model.buckets.steps == "none" else opened.chunk_size
    try:
        problem = check_steps(opened.runner, model.spec.vocab_size, longest, numbers, longest)
    finally:
        opened.runner.close()
    if problem is not None:
        raise ModelError(
            f"{problem}: scores depend on the steps of this graph, which opening it does not see; report it"
        )
    is_whole = not opened.runner.traits.chunked_prefill
    beyond = f"beyond {max(numbers)} positions" if numbers else "the graph compares positions with no number"
    add("texts in parts and in company", "each is fed whole and alone" if is_whole else "as whole and alone", beyond)

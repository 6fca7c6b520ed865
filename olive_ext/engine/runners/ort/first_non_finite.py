"""Finds the node of a decoder whose output is the first with NaN or +inf, in a session that returns every node's
output. Knows no runner."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from olive_ext.engine.runners.ort.inputs import Layout
from olive_ext.engine.runners.ort.kv.kv_store import zeros
from olive_ext.engine.step import Row, Step
from olive_ext.errors import ModelError
from olive_ext.graph.onnx_file import (
    ModelProto,
    external_locations,
    load_graph,
    relocate,
    weights_of,
    with_every_output,
)
from olive_ext.model import ResolvedModel, external_data_plan, open_session
from olive_ext.model.role_inputs import input_array
from olive_ext.model.types import KvTensor


def first_non_finite(model: ResolvedModel, tokens: Sequence[int]) -> str | None:
    """A sentence on the first node, in the graph's order, whose output has NaN or +inf where the decoder is fed with
    `tokens` behind nothing, and on its weight where that has them already; None where there is no such node. Lawful is
    -inf, which masks have.

    Raises `ModelError` where the decoder takes more than tokens, or ONNX Runtime does not open the edited graph.
    """
    spec, file = model.spec, model.files.decoder
    if spec.embeddings or spec.cross or spec.is_paged:
        raise ModelError("which layer it is cannot be told: the decoder takes more than tokens")
    proto = with_every_output(load_graph(file))
    folder, renames = external_data_plan(file, external_locations(proto))
    proto = relocate(proto, renames)
    session = open_session(
        proto.SerializeToString(), model.providers, model.settings, external_data_folder=folder, label=str(file)
    )
    binding = session.io_binding()
    layout = Layout.of(Step((Row(0, 0, tuple(tokens)),)))
    for found in spec.inputs:
        binding.bind_cpu_input(found.tensor.name, input_array(found, layout))
    for cache in spec.caches:
        shape = cache.shape(1, cache.capacity or 0) if isinstance(cache, KvTensor) else [1, *cache.shape]
        binding.bind_ortvalue_input(cache.past, zeros(shape, cache.elem_type))
    names = [output.name for output in session.get_outputs()]
    for name in names:
        binding.bind_output(name)
    session.run_with_iobinding(binding)
    wrong = {name for name, value in zip(names, binding.get_outputs(), strict=True) if _is_wrong(value.numpy())}
    return _first(proto, wrong, folder)


def _first(proto: ModelProto, wrong: set[str], folder: Path) -> str | None:
    for node in proto.graph.node:
        if output := next((name for name in node.output if name in wrong), None):
            said = f"the first output that is not finite is '{output}' of the node '{node.name}' ({node.op_type})"
            weights = [name for name, values in weights_of(proto, node, folder) if _is_wrong(values)]
            return f"{said}, whose weight '{weights[0]}' is not finite" if weights else said
    return None


def _is_wrong(values: npt.NDArray[np.generic]) -> bool:
    return values.dtype.kind == "f" and not bool(np.less(values, np.inf).all())

"""Runs a decoder's graph once over a text, without a past, in a session that also returns values of its nodes, and
finds the first node whose output has NaN or +inf. Knows no runner."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from olive_ext.engine.runners.ort.inputs import Layout
from olive_ext.engine.step import Row, Step
from olive_ext.errors import ModelError, first_line
from olive_ext.graph.edits import with_full_length_kv
from olive_ext.graph.nodes import weights_of, with_outputs
from olive_ext.model import ResolvedModel
from olive_ext.model.files.constants import graph_nodes
from olive_ext.model.files.content import load_graph, relocated
from olive_ext.model.providers.bindings import run_graph, zeros
from olive_ext.model.providers.devices import Device
from olive_ext.model.providers.ort_session import open_session
from olive_ext.model.spec.role_inputs import input_array
from olive_ext.model.types import DecoderSpec


class PlainGraph:
    """The decoder's file with more outputs and KV caches of full length; products of 4 and 8 bits do not round their
    activations."""

    def __init__(self, model: ResolvedModel, values: Collection[str] | None = None) -> None:
        """`values` are returned beside the graph's own outputs; all nodes' outputs where it is None. Raises
        `ModelError` where the decoder takes more than tokens, or ONNX Runtime does not open the edited graph."""
        refuse_more_than_tokens(model, "which layer it is cannot be found")
        file = model.files.decoder
        proto = with_outputs(with_full_length_kv(load_graph(file)), values)
        for entry in (entry for node in graph_nodes(proto) for entry in node.attribute):
            if entry.name == "accuracy_level":
                entry.i = 0
        self.folder, self.proto = relocated(file, proto)
        self._spec = model.spec
        self._session = open_session(
            self.proto.SerializeToString(),
            model.providers,
            model.settings,
            external_data_folder=self.folder,
            label=str(file),
            level="basic",  # above, ONNX Runtime fuses DequantizeLinear with products, which round what they multiply
        )

    def run(self, tokens: Sequence[int]) -> Mapping[str, npt.NDArray[Any]]:
        """What the graph returns for `tokens`, by name, in the order of the nodes. Raises `ModelError` if it fails."""
        return run_plainly(self._session, plain_inputs(self._spec, tokens))

    def logprobs(self, tokens: Sequence[int], num_ids: int) -> npt.NDArray[np.float64]:
        """As `PlainPass.logprobs`."""
        logits_SV = self.run(tokens)[self._spec.logits.name][0, :-1, :num_ids]
        whole_S: npt.NDArray[np.float64] = np.logaddexp.reduce(logits_SV, 1, np.float64)
        return logits_SV[range(len(tokens) - 1), tokens[1:]] - whole_S


def refuse_more_than_tokens(model: ResolvedModel, finding: str) -> None:
    """Raises `ModelError`, which begins with `finding`, where the decoder is not one graph that takes tokens alone."""
    spec = model.spec
    if spec.embeddings or spec.cross or spec.is_paged or model.files.pipeline:
        raise ModelError(f"{finding}: the decoder takes more than tokens")


def plain_inputs(spec: DecoderSpec, tokens: Sequence[int]) -> dict[str, ort.OrtValue]:
    """All inputs of a decoder that takes `tokens` without a past, by name, in the host's memory."""
    layout = Layout.of(Step((Row(0, 0, tuple(tokens)),)))
    arrays = {entry.tensor.name: input_array(entry, layout) for entry in spec.inputs}
    values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in arrays.items()}
    for cache in spec.caches:
        values[cache.past] = zeros(cache.shape(1, 0), cache.elem_type)
    return values


def run_plainly(session: ort.InferenceSession, inputs: Mapping[str, ort.OrtValue]) -> Mapping[str, npt.NDArray[Any]]:
    """The tensors that a session returns for those of `inputs` that it has, by name. Raises `ModelError` if it fails.

    ONNX Runtime 1.27 makes no tensor for some outputs of nodes that it optimizes away, as in exports by mobius.
    """
    taken = {value.name: inputs[value.name] for value in session.get_inputs()}
    names = [output.name for output in session.get_outputs()]
    try:
        values = run_graph(session, taken, names, Device("cpu"))
    except RuntimeError as error:
        raise ModelError(f"the graph does not run over a whole text: {first_line(error)}") from error
    return {name: value.numpy() for name, value in values.items() if value.has_value() and value.is_tensor()}


def first_non_finite(model: ResolvedModel, tokens: Sequence[int]) -> str | None:
    """A sentence on the first node, in the graph's order, whose output has NaN or +inf where the decoder is fed
    `tokens` without a past, and on its weight if that has them already; None where there is no such node. -inf is
    valid, because masks have it. Raises `ModelError` where the decoder takes more than tokens, or ONNX Runtime does not
    open the edited graph."""
    graph = PlainGraph(model)
    wrong = {name for name, value in graph.run(tokens).items() if _is_wrong(value)}
    for node in graph.proto.graph.node:
        if output := next((name for name in node.output if name in wrong), None):
            finding = f"the first output that is not finite is '{output}' of the node '{node.name}' ({node.op_type})"
            weights = [name for name, values in weights_of(graph.proto, node, graph.folder) if _is_wrong(values)]
            return f"{finding}, whose weight '{weights[0]}' is not finite" if weights else finding
    return None


def _is_wrong(values: npt.NDArray[np.generic]) -> bool:
    return values.dtype.kind == "f" and not bool(np.less(values, np.inf).all())

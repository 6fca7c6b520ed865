"""A decoder in one place: any part of its graph run there over one document, in one step behind nothing."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from olive_ext.config import ModelSettings
from olive_ext.engine.runners.ort.plain_graph import plain_inputs, refuse_more_than_tokens, run_plainly
from olive_ext.errors import ModelError, RunError
from olive_ext.graph.edits import with_full_length_kv
from olive_ext.graph.nodes import attribute
from olive_ext.graph.onnx_file import external_locations, relocate
from olive_ext.model import resolve
from olive_ext.model.files.content import external_data_plan
from olive_ext.model.providers.ort_session import open_session
from olive_ext.model.types import ITEM_BYTES
from olive_ext.plugins.diagnose.places.probed_graph import Part, ProbedGraph, types_of
from olive_ext.plugins.diagnose.places.tolerance import INT8, Array, unit_of

MOST_RUNS = 12
"""Of the document over the whole graph; those over parts of it count by their share of the nodes."""

_COARSE = {
    **dict.fromkeys(("CUDAExecutionProvider", "TensorrtExecutionProvider", "NvTensorRTRTXExecutionProvider"), 2.0**-10),
    "QNNExecutionProvider": 2.0**-10,
}
"""Providers that multiply float32 numbers of so few bits (TF32, float16), and the unit of these."""

_TYPES = {"float": "float32", "double": "float64"}
"""Types of ONNX Runtime that numpy calls otherwise."""


class NotLocatedError(RunError):
    """No node is known that makes the difference; the message says why."""


class HeldError(NotLocatedError):
    """There is none: each node gives the same on equal inputs but for rounding."""


class Runs:
    """What has been spent of `MOST_RUNS`."""

    def __init__(self) -> None:
        self.spent = 0.0

    def take(self, share: float) -> None:
        """Counts one run over this share of the nodes. Raises `NotLocatedError` where it is one too many."""
        if self.spent + share > MOST_RUNS:
            raise NotLocatedError(f"no node was found within {MOST_RUNS} runs of the document")
        self.spent += share

    @property
    def whole(self) -> int:
        """Rounded up."""
        return math.ceil(self.spent)


class Place:
    """The decoder that some settings name, where and as they say."""

    def __init__(self, settings: ModelSettings, tokens: Sequence[int], runs: Runs) -> None:
        """Raises `ModelError` for a model that is not one ONNX graph which takes tokens alone."""
        self.model, self.runs = resolve(settings), runs
        finding = f"where '{settings.model}' goes wrong cannot be told"
        if self.model.kind != "onnx" or not self.model.runtime.runs_graph:
            raise ModelError(f"{finding}: it is run by {self.model.runtime.name}, which shows no nodes")
        refuse_more_than_tokens(self.model, finding)
        spec, file = self.model.spec, self.model.files.decoder
        if settings.engine.adapters:
            raise ModelError(f"{finding}: its adapters (engine.adapters) are no part of the graph")
        if not {spec.logits.elem_type, *(one.elem_type for one in spec.caches)} <= {1, 2, 3, 10, 11}:
            raise ModelError(f"{finding}: it computes in bfloat16 or float8, which cannot be read here")
        graph = with_full_length_kv(self.model.decoder_graph())
        self.folder, renames = external_data_plan(file, external_locations(graph))
        self.graph = ProbedGraph(relocate(graph, renames))
        self.inputs = plain_inputs(spec, tokens)
        exact = (one for one in self.model.providers if one.options.get("use_tf32") != "0")
        self.coarse = max((_COARSE.get(one.name, 0.0) for one in exact), default=0.0)
        self._types: dict[str, npt.DTypeLike] = {}

    @property
    def logits(self) -> str:
        """The output of this name."""
        return self.model.spec.logits.name

    def plain(self) -> tuple[Array, float]:
        """The last token's logits [V] of the graph as it is, and the unit of their type times the largest."""
        logits = self.run({}, self.graph.outputs)[self.logits]
        row = last_row(logits)
        return row, unit_of(logits) * float(np.abs(row).max())

    @property
    def provider(self) -> str:
        """The first provider's full name."""
        return self.model.providers[0].name

    def sizes(self) -> dict[str, int]:
        """Elements of the values between nodes."""
        return self.graph.sizes({name: value.shape() for name, value in self.inputs.items()})

    def run(self, given: Mapping[str, Array], wanted: Collection[str], level: str | None = None) -> dict[str, Array]:
        """`wanted` values, computed from `given` ones, at a level of optimizations. Raises `ModelError` where ONNX
        Runtime does not open or run that part, and `NotLocatedError` where it is one run too many."""
        part, arrays = self.part(given, wanted)
        self.runs.take(len(part.nodes) / len(self.graph.nodes))
        taken = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in arrays.items()}
        return dict(run_plainly(self._open(part, level), self.inputs | taken))

    def part(self, given: Mapping[str, Array], wanted: Collection[str]) -> tuple[Part, dict[str, Array]]:
        """The part that computes `wanted`, and by its inputs what it takes of `given`, in the graph's types."""
        part = self.graph.part(types_of(given), wanted)
        types = {value: self._types.get(value, given[value].dtype) for value in part.taken.values()}
        arrays = {name: np.asarray(given[value], types[value], order="C") for name, value in part.taken.items()}
        own = types_of({value: arrays[name] for name, value in part.taken.items()})
        return part._replace(types=own), arrays

    def learn_types(self, values: Collection[str]) -> None:
        """Opens the graph to learn the types of `values`: those of a graph that is another one may be others, too."""
        session = self._open(self.graph.part({}, values), "disable")
        for output in session.get_outputs():
            name = output.type.removeprefix("tensor(").removesuffix(")")
            self._types[output.name] = np.dtype(_TYPES.get(name, name))

    def _open(self, part: Part, level: str | None) -> Any:
        return open_session(
            self.graph.model_of(part).SerializeToString(),
            self.model.providers,
            self.model.settings,
            external_data_folder=self.folder,
            custom_operators=self.model.custom_operators,
            label=str(self.model.files.decoder),
            level=level,
        )

    def rounding(self, nodes: Iterable[int]) -> dict[str, float]:
        """The unit to which kernels of `nodes` round the values that they read, where it is coarser than the type's."""
        read = [self.graph.nodes[index] for index in nodes]
        return {node.input[0]: INT8 for node in read if attribute(node, "accuracy_level", 0) == 4}

    def bytes_of(self, sizes: Mapping[str, int], values: Iterable[str]) -> int:
        """What values take, in the type of the logits."""
        return sum(sizes[name] for name in values) * ITEM_BYTES[self.model.spec.logits.elem_type]


def last_row(logits: Array) -> Array:
    """Of the last token [V], wide enough for differences."""
    row: Array = logits.reshape(-1, logits.shape[-1])[-1].astype(np.float64)
    return row

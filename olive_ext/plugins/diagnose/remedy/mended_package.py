"""A quantized package with other precisions for some of its weights: nodes and initializers of its graphs, without
numbers in memory; a graph's file, into which weights are copied, cast and quantized tensor by tensor; and the whole
package, all of it or nothing.

Knows graphs and files; not which weights are changed, or why.
"""

from __future__ import annotations

import io
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import uses_external_data

from olive_ext.errors import ConfigError, ModelError, RunError
from olive_ext.graph.nodes import all_names, attribute, delete_at, external_locations, reads, remove_dead, tensors_of
from olive_ext.model import ResolvedModel
from olive_ext.model.files.constants import FLOATS, Constants
from olive_ext.model.files.content import load_graph, weight_files
from olive_ext.model.files.grids import Array
from olive_ext.model.files.package_config import OLIVE_RECORD, real_path
from olive_ext.plugins.diagnose.remedy.pairing import BIAS, DATA, TABLES, Sources, Target, bias_of
from olive_ext.plugins.diagnose.remedy.weights import GraphWeights, PackedWeight, Precision, WeightUse
from olive_ext.report.numbers import size
from olive_ext.report.report_files import refuse_filled, whole_folder

CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class NewTensor:
    """An initializer to be written: what it is called, and its numbers in parts."""

    name: str
    dims: tuple[int, ...]
    data_type: int
    pieces: Callable[[], Iterator[Array]]

    @property
    def num_bytes(self) -> int:
        """The bytes of its numbers. No type of a new tensor is smaller than a byte."""
        size = helper.tensor_dtype_to_np_dtype(self.data_type).itemsize
        return int(np.prod(self.dims, dtype=np.int64)) * size

    def write(self, file: BinaryIO) -> None:
        """Writes its numbers."""
        file.writelines(np.ascontiguousarray(piece).tobytes() for piece in self.pieces())


def as_new(constants: Constants, name: str, new_name: str, data_type: int) -> NewTensor:
    """An initializer under another name and, where they differ, in another type."""
    tensor = constants.initializers[name]
    dtype = helper.tensor_dtype_to_np_dtype(data_type)

    def pieces() -> Iterator[Array]:
        size = len(flat := constants.numbers(name).reshape(-1))
        step = CHUNK_BYTES // flat.itemsize
        for first in range(0, size, step):  # mapped anew, so that pages which were read can go
            yield constants.numbers(name).reshape(-1)[first : first + step].astype(dtype)

    return NewTensor(new_name, tuple(tensor.dims), data_type, pieces)


PAGE, LARGE = 4096, 1 << 20
"""Numbers of this many bytes begin at a multiple of a page, so that a runtime can map them."""

ALIGNMENT = 64
"""All others begin at a multiple of this."""

SMALL = 1024
"""Bytes up to which numbers stay in the graph's file."""

INLINE_BYTES = 16
"""The most bytes that a tensor inside of the graph's file takes there beside its numbers."""

_Writer: TypeAlias = Callable[[BinaryIO], None]


@dataclass(frozen=True)
class GraphFile:
    """A mended graph and its numbers in their order: what is written."""

    model: onnx.ModelProto
    constants: Constants
    """The constants of the quantized graph, whose kept numbers are copied."""

    new: Mapping[str, NewTensor]
    path: Path
    """The graph's file in the quantized package."""

    data: Path | None
    """The file for its weights, relative to the graph's folder; None where they are inside of the graph's."""

    @property
    def num_bytes(self) -> int:
        """The bytes of the graph and its weights, with the gaps between these; a few more than inside of the graph."""
        graph, parts = self._layout
        inside = sum(new.num_bytes + INLINE_BYTES for new in self.new.values() if self._is_inside(new))
        return graph.ByteSize() + inside + max((offset + length for offset, length, _ in parts), default=0)

    def _is_inside(self, new: NewTensor) -> bool:
        return self.data is None or new.num_bytes <= SMALL

    @cached_property
    def _layout(self) -> tuple[onnx.ModelProto, list[tuple[int, int, _Writer]]]:
        """The graph as it is written, but for numbers inside of it, and offset, bytes and writer of those outside."""
        graph = onnx.ModelProto()
        graph.CopyFrom(self.model)
        outside: list[tuple[TensorProto, int, _Writer]] = []
        for own, kept in list(zip(tensors_of(self.model), tensors_of(graph), strict=True)):
            if uses_external_data(own):
                outside.append((kept, self.constants.place(own)[2], partial(self._copy, own)))
        for new in self.new.values():
            declared = graph.graph.initializer.add()
            declared.name, declared.data_type = new.name, new.data_type
            declared.dims.extend(new.dims)
            if not self._is_inside(new):
                outside.append((declared, new.num_bytes, new.write))
        parts: list[tuple[int, int, _Writer]] = []
        end = 0
        for tensor, length, write in outside:
            assert self.data is not None
            end += -end % (PAGE if length >= LARGE else ALIGNMENT)
            del tensor.external_data[:]
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", self.data.as_posix()), ("offset", end), ("length", length)):
                tensor.external_data.add(key=key, value=str(value))
            parts.append((end, length, write))
            end += length
        return graph, parts

    def _copy(self, tensor: TensorProto, file: BinaryIO) -> None:
        path, offset, left = self.constants.place(tensor)
        with path.open("rb") as source:
            source.seek(offset)
            while left > 0:
                piece = source.read(min(left, CHUNK_BYTES))
                if not piece:
                    raise RunError(f"'{path}' ends before the numbers of '{tensor.name}' do")
                left -= file.write(piece)

    def write(self, path: Path) -> None:
        """Writes the graph's file, and that of its weights beside it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        graph, parts = self._layout
        if self.data is not None:
            data = path.parent / self.data
            data.parent.mkdir(parents=True, exist_ok=True)
            with data.open("xb") as file:
                for offset, _, write in parts:
                    file.write(bytes(offset - file.tell()))
                    write(file)
                file.flush()
                os.fsync(file.fileno())
        for tensor in graph.graph.initializer:
            new = self.new.get(tensor.name)
            if new is not None and self._is_inside(new):
                new.write(inside := io.BytesIO())
                tensor.raw_data = inside.getvalue()
        path.write_bytes(graph.SerializeToString())


MICROSOFT = "com.microsoft"

_BIASES = (4, 7, 10)
"""The inputs of QMoE that are biases; MoE has each after its weight."""

_FORM = ("expert_weight_bits", "block_size")


class Mending:
    """The edit of one graph."""

    def __init__(self, model: onnx.ModelProto, sources: Sources, choices: Mapping[Target, Precision]) -> None:
        """Replaces the nodes of the targets, and drops what only they used. Raises `ModelError` where a node cannot be
        given the precision."""
        self.model, self.sources, graph = model, sources, model.graph
        self.tensors: dict[str, NewTensor] = {}
        """New initializers by name, in the order in which nodes read them."""

        self._packed: dict[Target, list[str]] = {}
        self._floats: dict[tuple[str, int], str] = {}
        """New names of the float graph's constants, by their own names and types: tied weights are stored once."""

        for target in [target for target in choices if target.is_constant]:
            self._cure(target)
        choices = {target: precision for target, precision in choices.items() if not target.is_constant}
        owners = {tuple(use.node.output): (target, n) for target in choices for n, use in enumerate(target.quantized)}
        places = [tuple(node.output) for node in graph.node]  # the first one of a node may be left out
        replaced = [n for n, outputs in enumerate(places) if outputs in owners]
        uses = [use for target in choices for use in target.quantized]
        delete_at(graph.node, replaced)
        stored = {use.node.input[n] for use in uses for n in use.inputs if n < len(use.node.input)}
        for name in stored - {"", *reads(graph.node)}:
            remove_dead(graph, name)
        gone = {name for use in uses for name in use.roots} - {tensor.name for tensor in graph.initializer}
        delete_at(graph.input, [n for n, value in enumerate(graph.input) if value.name in gone])
        self._names = set(all_names(graph))
        kept = {tuple(node.output): node for node in graph.node}
        order: list[onnx.NodeProto] = []
        for outputs in places:
            if outputs in owners:
                target, number = owners[outputs]
                order += self._nodes(target, number, choices[target])
            elif outputs in kept:
                order.append(deepcopy(kept[outputs]))
        del graph.node[:]
        graph.node.extend(order)
        if not any(opset.domain == MICROSOFT for opset in model.opset_import):
            model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
        self.new_bytes = sum(new.num_bytes for new in self.tensors.values())

    def _cure(self, target: Target) -> None:
        """Puts the float graph's constant in the place of this one's, in its type."""
        initializers = self.model.graph.initializer
        for own, use in zip(target.floats, target.quantized, strict=True):
            if use.constant is not None:
                data_type = self.sources.quantized.initializers[use.value].data_type
                delete_at(initializers, [n for n, tensor in enumerate(initializers) if tensor.name == use.value])
                self.tensors[use.value] = as_new(self.sources.floats, own.value, use.value, data_type)
                self._floats[own.value, data_type] = use.value

    def _nodes(self, target: Target, number: int, precision: Precision) -> list[onnx.NodeProto]:
        if not self.sources.offers(target, precision):
            raise ModelError(f"'{target.name}' cannot be {precision.name} in this graph")
        use = target.quantized[number]
        if target.is_of_experts:
            return [self._packed_experts(target, precision)] if precision.bits else self._float_experts(target)
        if not precision.bits:
            return self._float_nodes(target.floats[number], use)
        if target not in self._packed:
            names = self._packed_names(target.floats[0], target.quantized[0], precision)
            self._packed[target] = list(filter(None, names))
        weight = self.sources.weight(target.floats[0])
        assert weight is not None  # `offers`
        num_inputs, num_outputs = weight.shape
        if use.node.op_type in TABLES:
            # The integers are stored as a product's: the lookup in a table [V, H] takes them after a Reshape.
            numbers, *others = self._packed[target]
            shape = numpy_helper.from_array(np.array([-1, num_inputs * precision.bits // 8], np.int64))
            made, sizes = self._fresh(f"{numbers}_table"), self._fresh(f"{numbers}_shape")
            lookup = helper.make_node(
                "GatherBlockQuantized",
                [made, use.node.input[1], *others],
                [use.node.output[0]],
                f"{use.name}_Q{precision.bits}",
                domain=MICROSOFT,
                bits=precision.bits,
                block_size=precision.block_size,
                gather_axis=0,
                quantize_axis=1,
            )
            return [
                helper.make_node("Constant", [], [sizes], self._fresh(f"{use.name}/shape"), value=shape),
                helper.make_node("Reshape", [numbers, sizes], [made], self._fresh(f"{use.name}/Reshape")),
                lookup,
            ]
        bias, level = bias_of(use.node), attribute(use.node, "accuracy_level", 0)
        inputs = [use.node.input[DATA[use.node.op_type]], *self._packed[target]]
        if bias:
            inputs += [""] * (BIAS["MatMulNBits"] - len(inputs)) + [bias]
        product = helper.make_node(
            "MatMulNBits",
            inputs,
            [use.node.output[0]],
            f"{use.name}_Q{precision.bits}",
            domain=MICROSOFT,
            K=num_inputs,
            N=num_outputs,
            bits=precision.bits,
            block_size=precision.block_size,
            **({"accuracy_level": level} if level else {}),
        )
        return [product]

    def _float_nodes(self, float_use: WeightUse, use: WeightUse) -> list[onnx.NodeProto]:
        """The float graph's node, in the quantized graph's types and with its inputs."""
        value, nodes = self._constant(float_use.value, self.sources.element_type(use))
        node, data = deepcopy(float_use.node), DATA[float_use.node.op_type]
        inputs = ["", ""]
        inputs[data], inputs[1 - data] = use.node.input[DATA[use.node.op_type]], value
        bias, output = bias_of(use.node), use.node.output[0]
        added = []
        if bias and float_use.node.op_type == "Gemm":
            inputs.append(bias)
        elif bias:
            product = self._fresh(f"{output}_without_bias")
            added = [helper.make_node("Add", [product, bias], [output], self._fresh(f"{float_use.name}/Add"))]
            output = product
        del node.input[:], node.output[:]
        node.input.extend(inputs)
        node.output.append(output)
        return [*nodes, node, *added]

    def _constant(self, value: str, data_type: int) -> tuple[str, list[onnx.NodeProto]]:
        """The name of a constant of the float graph in this one, and the nodes that make it unless they are here
        already."""
        if (value, data_type) in self._floats:
            return self._floats[value, data_type], []
        floats, nodes = self.sources.floats, []
        for maker in floats.makers(value):
            node = deepcopy(maker)
            node.input[:] = [self._initializer(name, data_type) for name in maker.input]
            if node.op_type == "Cast":
                node.attribute[0].i = data_type
            for n, name in enumerate(maker.output):
                node.output[n] = self._floats[name, data_type] = self._fresh(name)
            node.name = self._fresh(maker.name)
            nodes.append(node)
        return self._initializer(value, data_type), nodes

    def _initializer(self, name: str, data_type: int) -> str:
        """The name in this graph of a constant of the float graph that is an initializer, or was made before."""
        if not name or (name, data_type) in self._floats:
            return self._floats.get((name, data_type), "")
        floats, quantized = self.sources.floats, self.sources.quantized
        tensor, here = floats.initializers[name], quantized.initializers.get(name) if name in self._names else None
        wanted = data_type if tensor.data_type in FLOATS else tensor.data_type
        is_alike = here is not None and here.data_type == wanted == tensor.data_type
        if is_alike and np.array_equal(quantized.numbers(name), floats.numbers(name)):  # a table that is not quantized
            self._floats[name, data_type] = name
        else:
            new = as_new(self.sources.floats, name, self._fresh(name), wanted)
            self.tensors[new.name] = new
            self._floats[name, data_type] = new.name
        return self._floats[name, data_type]

    def _packed_names(self, float_use: WeightUse, use: WeightUse, precision: Precision) -> list[str]:
        """Names of the integers, the scales, and the zero points or "", of a product or of all experts, each of which
        has those of a product, its numbers by rows."""

        def view() -> Array:
            """The weight, mapped anew each time, so that pages which were read can go."""
            weight = self.sources.weight(float_use)
            assert weight is not None  # `offers`
            return weight

        data_type = self.sources.element_type(use)
        is_symmetric = precision.bits == 8 or self.sources.is_symmetric(use)
        dtype = helper.tensor_dtype_to_np_dtype(data_type)
        count = len(view()) if use.part else 0
        views = [lambda expert=expert: view()[expert].T for expert in range(count)] if use.part else [view]
        weights = [PackedWeight(one, dtype, precision, is_symmetric=is_symmetric) for one in views]
        stem = float_use.value if use.part or float_use.value in self.sources.floats.initializers else float_use.name

        def added(what: str, dims: tuple[int, ...], kind: int, part: Callable[[PackedWeight], Iterator[Array]]) -> str:
            shape = (count, dims[0], math.prod(dims[1:])) if use.part else dims
            tensor = NewTensor(
                self._fresh(f"{stem}{what}"), shape, kind, lambda: (one for each in weights for one in part(each))
            )
            self.tensors[tensor.name] = tensor
            return tensor.name

        first = weights[0]
        names = [
            added(f"_Q{precision.bits}", first.packed_shape, TensorProto.UINT8, PackedWeight.packed),
            added("_scales", first.scales_shape, data_type, PackedWeight.scales),
        ]
        zeros = "" if is_symmetric else added("_zero_points", first.zeros_shape, TensorProto.UINT8, PackedWeight.zeros)
        return [*names, zeros]

    def _float_experts(self, target: Target) -> list[onnx.NodeProto]:
        """The float graph's MoE, with the biases of the QMoE whose weights `target` are, all of them."""
        old, node, nodes = target.quantized[0].node, deepcopy(target.floats[0].node), []
        biases = [old.input[n] if n < len(old.input) else "" for n in _BIASES]
        node.input[:] = [*old.input[:2], *(name for bias in biases for name in ("", bias))]
        node.output[:] = old.output
        for use, packed in zip(target.floats, target.quantized, strict=True):
            node.input[use.inputs[0]], made = self._constant(use.value, self.sources.element_type(packed))
            nodes += made
        return [*nodes, node]

    def _packed_experts(self, target: Target, precision: Precision) -> onnx.NodeProto:
        node = deepcopy(target.quantized[0].node)
        numbers = [n for use in target.quantized for n in use.inputs]
        node.input.extend([""] * (max(numbers) + 1 - len(node.input)))
        for own, use in zip(target.floats, target.quantized, strict=True):
            for n, name in zip(use.inputs, self._packed_names(own, use, precision), strict=True):
                node.input[n] = name
        kept = [one for one in node.attribute if one.name not in _FORM]
        del node.attribute[:]
        form = zip(_FORM, (precision.bits, precision.block_size), strict=True)
        node.attribute.extend([*kept, *(helper.make_attribute(name, value) for name, value in form)])
        return node

    def _fresh(self, name: str) -> str:
        """`name`, or with a number after it where the graph has it already."""
        new, number = name, 1
        while new in self._names:
            number += 1
            new = f"{name}_{number}"
        self._names.add(new)
        return new


def alternative(target: Target, precision: Precision, sources: Sources) -> tuple[Target, GraphWeights]:
    """The weight in another precision as a target of its own, and the small graph that has its numbers."""
    mending = mended_alone(target, precision, sources)
    for new in mending.tensors.values():
        parts = [part.reshape(-1) for part in new.pieces()]
        array = np.concatenate(parts).reshape(new.dims)
        mending.model.graph.initializer.append(numpy_helper.from_array(array, new.name))
    weights = GraphWeights(mending.model, Path())
    uses = tuple(weights.uses[use.name] for use in target.quantized)
    name = f"{target.name} as {precision.name}"
    return replace(target, name=name, quantized=uses, bytes=mending.new_bytes), weights


def mended_alone(target: Target, precision: Precision, sources: Sources) -> Mending:
    """A graph of nothing but the nodes of a weight in another precision."""
    model = onnx.ModelProto(ir_version=10)
    model.opset_import.append(helper.make_opsetid("", 21))
    model.graph.node.extend({tuple(use.node.output): use.node for use in target.quantized}.values())
    return Mending(model, sources, {target: precision})


LARGEST_GRAPH = 1 << 30
"""Up to so many bytes, a package without external weights gets none: a protobuf holds twice as many."""

_RECORDS = re.compile(
    rf"{re.escape(OLIVE_RECORD)}|(input_model_)?metrics\.json|(output_)?footprint\.json|run_history\.txt|"
    r"(report|eval_results)(-\d+)?\.(json|md|html|yaml)|chain\.(json|md)"
)
"""What is written beside a model about that model alone, by Olive and by a pass that measures."""


@dataclass(frozen=True)
class Package:
    """Mended graphs and the other files of the quantized package: what is written."""

    graphs: tuple[GraphFile, ...]
    root: Path
    """The quantized package's folder, which the graphs are in."""

    kept: tuple[Path, ...]
    """The files of graphs in which nothing is changed, and their weights: they are copied."""

    others: tuple[Path, ...]

    @property
    def num_bytes(self) -> int:
        """The bytes of all files."""
        return self.graph_bytes + sum(path.stat().st_size for path in self.others)

    @property
    def graph_bytes(self) -> int:
        """The bytes of graphs and weights."""
        return sum(graph.num_bytes for graph in self.graphs) + sum(path.stat().st_size for path in self.kept)

    def write(self, output: Path) -> None:
        """Writes everything into a new folder. Raises `ConfigError` for one that has files, `RunError` where the disk
        has no room or fails; then nothing is left behind."""
        refuse_filled(output)
        output = output.absolute()
        free = shutil.disk_usage(next(folder for folder in (output, *output.parents) if folder.exists())).free
        if free < self.num_bytes:
            raise RunError(f"the mended model takes {size(self.num_bytes)}: '{output}' has {size(free)} left")
        try:
            with whole_folder(output) as folder:
                for path in (*self.others, *self.kept):
                    target = folder / path.relative_to(self.root)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, target)
                for graph in self.graphs:
                    graph.write(folder / graph.path.relative_to(self.root))
        except OSError as error:
            raise RunError(f"cannot write the mended model to '{output}': {error.strerror or error}") from error


def mended(model: ResolvedModel, sources: Mapping[str, Sources], choices: Mapping[Target, Precision]) -> Package:
    """The package of `model` with the targets in other precisions; `sources` by part of those that may change, of the
    decoder those of "". Raises `ModelError` where a precision cannot be had."""
    root, files = _root(model), model.files
    package = _package_files(model)
    paths = {"": files.decoder, **{part: one.graph for part, one in files.companions.items()}}
    loaded = {part: load_graph(path) for part, path in paths.items() if path.is_relative_to(root)}
    weights = {part: weight_files(paths[part], external_locations(graph)) for part, graph in loaded.items()}
    changed = {target.part for target in choices}
    changed |= {part for part, own in weights.items() if not all(path.is_relative_to(root) for path in own.values())}
    written = [part for part in loaded if part in changed]
    rewritten = {paths[part] for part in written}  # by name: a file that is a link to one of them stays what it is
    strangers = {path for path in package if path.suffix == ".onnx"} - rewritten
    taken = {path for other in strangers for path in _weights(other)}  # stays for those that are copied
    replaced, graphs = set(rewritten), []
    for part in written:
        own = {location: path for location, path in weights[part].items() if path not in taken}
        chosen = {target: precision for target, precision in choices.items() if target.part == part}
        constants = Constants(loaded[part], paths[part])
        new = Mending(loaded[part], sources[part], chosen).tensors if chosen else {}
        data = None  # the file for its weights, under the name of one that no other graph has
        num_bytes = loaded[part].ByteSize() + sum(tensor.num_bytes for tensor in new.values())
        if weights[part] or num_bytes > LARGEST_GRAPH:
            made_up = f"{paths[part].stem}.mended.data" if weights[part] else f"{paths[part].name}.data"
            data = Path(next(iter(own), made_up))
        graphs.append(GraphFile(loaded[part], constants, new, paths[part], data))
        replaced |= {*own.values()}
        taken |= replaced
    left = [path for path in package if path not in replaced]
    models = {path for part in loaded for path in (paths[part], *weights[part].values())}
    kept, others = (tuple(path for path in left if (path in models) is wanted) for wanted in (True, False))
    return Package(tuple(graphs), root, kept, others)


def _root(model: ResolvedModel) -> Path:
    """The folder that is copied as a whole; of a named file its folder, from which only its own files are copied."""
    return _named(model) if _named(model).is_dir() else model.files.decoder.parent


def copy_of(model: ResolvedModel, folder: Path) -> ResolvedModel:
    """The model in a copy of its package, found there by the settings that found the original."""
    place = folder if _named(model).is_dir() else folder / model.files.decoder.relative_to(_root(model))
    return model.patched({"model": str(place), "tokenizer": model.files.tokenizer})


def refuse_inside(model: ResolvedModel, output: Path, why: str = "which is copied as a whole") -> None:
    """Raises `ConfigError` for a place in the model's folder."""
    if _named(model).is_dir() and output.resolve().is_relative_to(_named(model).resolve()):
        raise ConfigError(f"lies in the model's folder, {why}", "output_dir", output)


def _named(model: ResolvedModel) -> Path:
    return real_path(str(model.settings.model))


def _package_files(model: ResolvedModel) -> list[Path]:
    """The files of a package: all of a named folder; for a named file the files beside it that belong to no other
    model, and the graphs that it works with."""
    root, files = _root(model), model.files
    if _named(model).is_dir():
        linked = (one for one in root.rglob("*") if one.is_symlink() and one.resolve().is_relative_to(root))
        below = {path for folder in (root, *linked) if folder.is_dir() for path in folder.rglob("*")}
        return [path for path in sorted(below) if path.is_file() and not _RECORDS.fullmatch(path.name)]
    companions = (path for part in files.companions.values() for path in (part.graph, *part.weights))
    paths = {path for path in (files.decoder, *files.weights, *companions) if path.is_relative_to(root)}
    graphs = {path for path in root.glob("*.onnx") if path not in paths}
    strangers = {path for graph in graphs for path in (graph, *_weights(graph))} - paths
    beside = {path for path in root.iterdir() if path.is_file() and not _RECORDS.fullmatch(path.name)}
    return sorted(paths | {path for path in beside if path not in strangers})


def _weights(graph: Path) -> set[Path]:
    return {*weight_files(graph, external_locations(load_graph(graph))).values()}

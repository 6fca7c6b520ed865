"""The first node whose output differs in two places on equal inputs, and the files of a bug report: the graph of these
nodes with its weights, their inputs, and a script that shows the difference in plain ONNX Runtime. Knows no verdict.

Both places run one text in one step. The graph is cut where few values cross. In one place, each piece gets the other
place's values at the cut: errors are not carried on, and each piece shows its own (docs/places.md).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import onnx
from onnx.external_data_helper import load_external_data_for_model

from olive_ext.config import ModelSettings
from olive_ext.errors import ModelError
from olive_ext.graph.nodes import layer_of
from olive_ext.model.providers.devices import memory_of
from olive_ext.model.providers.resolution import plugin_devices
from olive_ext.plugins.diagnose.places.place import (
    FACTOR,
    FACTOR_ALIKE,
    Array,
    Deviation,
    HeldError,
    NotLocatedError,
    PlacedDecoder,
    Runs,
    judge,
    last_row,
    moved,
    unit_of,
)
from olive_ext.report.numbers import nats
from olive_ext.report.report_files import refuse_filled, whole_folder

MOST_APART = 10
"""The most by which differences of logits in a plain pass and of a log-probability in another form may differ, as a
ratio."""


_FILES = (("model.onnx", "inputs.npz"), ("reference.onnx", "reference_inputs.npz"))
"""The candidate's graph and inputs, and the other place's."""

_SCRIPT = """# {what}
# Two results on the same inputs; exits with 1 where they are further apart than rounding brings them.
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort

HERE = Path(__file__).resolve().parent
{libraries}{first}
{second}
is_equal = (one == other) | (np.isnan(one) & np.isnan(other))
error = np.nan_to_num(np.abs(one[~is_equal] - other[~is_equal]), nan=np.inf).max(initial=0)
print(f"ONNX Runtime {{ort.__version__}}: {{error:.3g}} apart, {tolerance:.3g} is rounding")
sys.exit(bool(error > {tolerance!r}))
"""


@dataclass(frozen=True)
class FirstDifference:
    """A node whose output differs in two places on equal inputs."""

    node: str
    operator: str
    """The operator; of several nodes that differ only together, all in order: "Div, Erf, Add"."""

    output: str
    layer: int | None
    shapes: Mapping[str, tuple[int, ...]]
    """The shapes of the inputs that are no weights, and of the output."""

    largest_error: float
    tolerance: float
    """The error that rounding explains."""

    explained: float
    """The share of the logits' difference that remains with only this output as the candidate has it."""

    repro: Path | None = None

    def __str__(self) -> str:
        layer = "" if self.layer is None else f", layer {self.layer}"
        shapes = ", ".join(str(list(shape)) for shape in self.shapes.values())
        return "; ".join(
            [
                f"node '{self.node}' ({self.operator}{layer}) on equal inputs: '{self.output}' is "
                f"{self.largest_error:.2g} off where {self.tolerance:.2g} is rounding, shapes {shapes}",
                f"makes {self.explained:.0%} of the logits' difference",
                *([f"repro in '{self.repro}'"] if self.repro is not None else []),
            ]
        )


def first_difference(
    candidate: ModelSettings,
    other: ModelSettings,
    tokens: Sequence[int],
    *,
    repro: Path | None = None,
    distance: float | None = None,
) -> FirstDifference:
    """Where the two places part on `tokens`, after the last of which their logits differ.

    `repro` is a folder, which gets the node's graph, its inputs and a script that shows the difference. `distance` in
    nats is the measured difference of a log-probability: a plain pass must show about as much. Raises `HeldError` where
    only rounding makes the difference, `NotLocatedError` where a plain pass does not show it or no node is known that
    makes it, and `ModelError` for models of another kind, or without values of the same name.
    """
    if repro is not None:
        refuse_filled(repro, "repro")
    runs = Runs()
    own, theirs = (PlacedDecoder(settings, tokens, runs) for settings in (candidate, other))
    (mine, unit), (others, other_unit) = own.plain(), theirs.plain()
    apart, last_bit = float(np.abs(mine - others).max()), max(unit, other_unit)
    if apart <= last_bit and distance is not None and distance <= 2 * last_bit:
        raise HeldError(f"logits of their type differ by {nats(distance)} nats where their last bit does")
    if apart <= last_bit:
        raise NotLocatedError("a plain pass over the document, in one step, shows no difference in its logits")
    if distance is not None and not distance / MOST_APART < apart < distance * MOST_APART:
        raise NotLocatedError(
            f"a plain pass over the document, in one step, shows another difference: {nats(apart)} in its logits"
        )
    search = Search(own, theirs, mine, others)
    try:
        nodes = search.found()
    except VanishedError:  # then it can be read in the candidate, if it is the other's
        search = Search(theirs, own, others, mine)
        nodes = search.found()
    place, given = search.own, search.known_before(nodes.begin)
    part, arrays = place.part(given, [nodes.value])
    node = place.graph.nodes[place.graph.makers[nodes.value]]
    operators = [place.graph.nodes[index].op_type for index in part.nodes if index >= nodes.begin]
    result = FirstDifference(
        node=node.name or nodes.value,
        operator=", ".join(name for name in operators if name != "Constant"),
        output=nodes.value,
        layer=layer_of(node.name or nodes.value),
        shapes={**{name: array.shape for name, array in arrays.items()}, nodes.value: nodes.shape},
        largest_error=nodes.deviation.error,
        tolerance=nodes.deviation.tolerance,
        explained=nodes.explained,
    )
    if repro is None:
        return result
    _write_repro(repro, (own, theirs), given, result.output, result.tolerance, str(result))
    return replace(result, repro=repro)


def _write_repro(
    folder: Path, places: Sequence[PlacedDecoder], given: Mapping[str, Array], value: str, tolerance: float, what: str
) -> None:
    """Fills `folder`, all or nothing: the part of the graph after `given` values that makes `value`, in both places.
    Raises `OSError`."""
    with whole_folder(folder) as work:
        for place, (graph, taken) in zip(places, _FILES, strict=True):
            part, arrays = place.part(given, [value])
            model = place.graph.model_of(part, arrays)
            load_external_data_for_model(model, str(place.folder))
            onnx.save_model(model, work / graph, save_as_external_data=True, location=f"{graph}.data")
            names = [item.name for item in model.graph.input if item.name in place.inputs]
            np.savez(work / taken, **({name: place.inputs[name].numpy() for name in names} | arrays))
        first, second = (_result(*each) for each in zip(("one", "other"), _FILES, places, strict=True))
        libraries = [item for place in places for item in place.model.settings.provider_libraries.items()]
        paths = {
            name: repr(written) if Path(written).exists() else f"__import__({written!r}).get_library_path()"
            for name, written in libraries
        }
        lines = [f"ort.register_execution_provider_library({name!r}, {path})\n" for name, path in paths.items()]
        facts = {"what": what.replace("\n", " "), "libraries": "".join(lines), "tolerance": tolerance}
        script = _SCRIPT.format(**facts, first=first, second=second)
        (work / "repro.py").write_text(script, encoding="utf-8")


def _result(name: str, files: tuple[str, str], place: PlacedDecoder) -> str:
    (graph, inputs), engine, provider = files, place.model.settings.engine, place.model.providers[0]
    lines = ["options = ort.SessionOptions()"]
    lines += [f"options.add_session_config_entry({key!r}, {entry!r})" for key, entry in engine.session_options.items()]
    if engine.threads is not None:
        lines.append(f"options.intra_op_num_threads = {engine.threads}")
    how = f", providers=[({provider.name!r}, {dict(provider.options)!r})]"
    if provider.name in plugin_devices():
        devices = f"[device for device in ort.get_ep_devices() if device.ep_name == {provider.name!r}][:1]"
        lines.append(f"options.add_provider_for_devices({devices}, {dict(provider.options)!r})")
        how = ""
    lines.append(f"session = ort.InferenceSession(HERE / {graph!r}, options{how})")
    lines.append(f"{name} = session.run(None, dict(np.load(HERE / {inputs!r})))[0].astype(float)")
    return "\n".join(lines)


T = TypeVar("T")

CUTS = 32
"""The most places at which a graph, or a piece of it, is cut at once."""

LEAF = 32
"""Values of a piece that is split into nodes: smaller pieces would cut through what an optimizer fuses."""

MEMORY = 0.25
"""Share of the free memory that values may take; of each there are up to four arrays."""

EFFECT = 0.01
"""An output counts only where it changes the logits by at least this part of their difference, and at most by its
inverse: a mask hides the first kind, say, and an optimizer fuses the second kind away."""

GUESSES = 4
"""The number of pieces that are split into nodes where none exceeds its tolerance."""

_QUANTIZERS = frozenset({"QuantizeLinear", "DynamicQuantizeLinear"})


class DifferingNodes(NamedTuple):
    """The nodes from the number `begin` on that make `value`, which differs."""

    begin: int
    value: str
    deviation: Deviation
    shape: tuple[int, ...]
    explained: float
    """The share of the logits' difference that remains with only this output as the candidate has it."""


class VanishedError(NotLocatedError):
    """The difference disappears when the other place's values are read: it may be found with the places exchanged."""


class Search:
    """Compares `own`'s values with `other`'s, which `own` is given."""

    def __init__(self, own: PlacedDecoder, other: PlacedDecoder, mine: Array, theirs: Array, most: int = 0) -> None:
        """`mine`, `theirs`: the last token's logits [V] in plain passes; `most`: bytes that are read in one run,
        0 for a share of the free memory. Raises `ModelError` where the graphs have no values of one name."""
        self._most = most or int(MEMORY * memory_of("cpu").free / 4)
        self._mine, self._theirs, self._whole = mine, theirs, float(np.abs(mine - theirs).max())
        self.own, self.other = own, other
        shared = set(other.graph.values)
        self._values = [name for name in own.graph.values if name in shared]
        self._outputs = [name for name in own.graph.outputs if name in shared]
        if set(self._values) <= {*own.graph.outputs, *other.graph.outputs} or self.own.logits not in shared:
            raise ModelError("no values between the nodes have the same names", code="not_comparable")
        if own.graph.model != other.graph.model:
            own.learn_types(self._values)
        rounded = [place.rounding(range(len(place.graph.nodes))) for place in (own, other)]
        options = [place.model.settings.engine.session_options for place in (own, other)]
        self._is_one_provider = own.model.providers == other.model.providers
        self._are_alike = self._is_one_provider and rounded[0] == rounded[1] and options[0] == options[1]
        self._makers = own.graph.makers
        sizes = own.graph.sizes({name: value.shape() for name, value in own.inputs.items()})
        self._sizes = {name: sizes[name] for name in self._values}
        self._known: dict[str, Array] = {}

    def found(self) -> DifferingNodes:
        """Where the logits of the last token part. Raises `NotLocatedError`."""
        end = len(self.own.graph.nodes)
        count = min(CUTS, max(2, len(self._values) // LEAF))
        if (found := self._in_piece(0, end, count)) is not None:
            return found
        unoptimized = self.own.run({}, self.own.graph.outputs, "disable")[self.own.logits]
        if np.abs(last_row(unoptimized) - self._theirs).max() > self._whole / FACTOR:  # no value between is read
            raise HeldError("the roundings of many nodes add up: none that moves the logits leaves its tolerance")
        if (found := self._in_piece(0, end, count + 1)) is not None:
            return found
        raise NotLocatedError(
            "the difference is gone without optimizations, and where values between nodes are read, which changes what "
            "is fused"
        )

    def _in_piece(self, begin: int, end: int, count: int = 0) -> DifferingNodes | None:
        """The first difference between two nodes, where the other place's values for all that is read there are known.
        The nodes are cut at up to `count` places; with 0, they are split into single nodes if they are few enough."""
        inside = [name for name in self._values if begin <= self._makers[name] < end]
        own = self.own
        if not count and end - begin > 1:
            is_large = own.bytes_of(self._sizes, inside) > self._most
            count = min(CUTS, max(len(inside) // LEAF, is_large))
        borders = self._borders(begin, end, count) if count else []
        ends = [*(name for name in self._outputs if begin <= self._makers[name] < end), *own.graph.live(inside, end)]
        across = (name for border in borders for name in own.graph.live(inside, border))
        wanted = list(dict.fromkeys([*across, *ends] if borders else inside))
        if not wanted:
            return None
        self._known |= self.other.run(self.known_before(begin), wanted)
        if begin == 0 and end == len(own.graph.nodes):
            read = last_row(self._known[own.logits])
            if np.abs(read - self._mine).max() < self._whole / FACTOR:
                raise VanishedError("the difference is gone where values between nodes are read")
        values, deviations = self._judged(self._known, wanted, are_alike=self._are_alike and not borders)
        if not borders:
            return self._first_node(values, deviations)
        pieces = list(zip([begin, *borders], [*borders, end], strict=True))
        worst = [
            max(
                (one for name, one in deviations.items() if first <= self._makers[name] < last),
                key=lambda one: one.ratio,
                default=Deviation(0.0, 1.0),
            )
            for first, last in pieces
        ]
        beyond = [number for number, one in enumerate(worst) if one.ratio > 1]
        others = [number for number in range(len(pieces)) if number not in beyond]
        others.sort(key=lambda number: -worst[number].ratio)  # the nearest to their tolerance first
        for number in (*beyond, *others[:GUESSES]):
            piece = pieces[number]
            fault = self._in_piece(*piece)
            nodes = own.graph.nodes[slice(*piece)]
            # Where activations are rounded to 8 bits inside, the last bit of another kernel becomes a step.
            rounds = any(node.op_type in _QUANTIZERS for node in nodes) or own.rounding(range(*piece))
            if fault is None and number in beyond and (self._is_one_provider or not rounds):
                fault = self._fused(*piece, [name for name in deviations if deviations[name].ratio > 1])
            if fault is not None:
                return fault
        return None

    def _borders(self, begin: int, end: int, count: int) -> list[int]:
        """As many places as fit into memory."""
        while True:
            borders = self.own.graph.places(begin, end, count, self._sizes)
            read = {name for border in borders for name in self.own.graph.live(self._values, border)}
            if count == 1 or self.own.bytes_of(self._sizes, read) <= self._most:
                return sorted(set(borders))
            count //= 2

    def known_before(self, begin: int) -> dict[str, Array]:
        """The other place's values, as far as they are known, that are made before a node."""
        return {name: array for name, array in self._known.items() if self._makers[name] < begin}

    def _judged(
        self,
        given: dict[str, Array],
        wanted: Collection[str],
        expected: dict[str, Array] | None = None,
        *,
        are_alike: bool = False,
    ) -> tuple[dict[str, Array], dict[str, Deviation]]:
        """Own values on given inputs, and their comparison. `expected`: the other place's values, where they are not
        among the given ones. `are_alike`: the same kernel runs each node in both places."""
        own, other = self.own, self.other
        expected = given if expected is None else expected
        values = own.run(given, wanted)
        part, arrays = own.part(given, wanted)
        kernels, taken = {} if are_alike else own.rounding(part.nodes), part.taken.items()
        inner = max((unit for name, unit in kernels.items() if name not in part.taken.values()), default=0.0)
        coarse = max(own.coarse, other.coarse, inner)  # what is rounded within the part cannot be moved there
        units = {name: max(coarse, kernels.get(name, 0.0), unit_of(arrays[at], given[name])) for at, name in taken}
        response = other.run(given | moved({name: given[name] for name in units}, units), wanted)
        deviations, factor = {}, FACTOR_ALIKE if are_alike else FACTOR
        for name in wanted:
            unit = max(unit_of(values[name], expected[name]), coarse if values[name].dtype.kind == "f" else 0.0)
            steps = int(own.graph.nodes[self._makers[name]].op_type in _QUANTIZERS)
            deviations[name] = judge(values[name], expected[name], response[name], unit, steps=steps, factor=factor)
        return values, deviations

    def _first_node(self, values: dict[str, Array], deviations: dict[str, Deviation]) -> DifferingNodes | None:
        """The first single node that differs and changes the logits."""
        for name in sorted(deviations, key=lambda name: self._makers[name]):
            if deviations[name].ratio > 1:
                index = self._makers[name]
                outputs = {one: array for one, array in values.items() if self._makers[one] == index}
                if (explained := self._explained(index, outputs)) is not None:
                    worst = max(outputs, key=lambda one: deviations[one].ratio)
                    return DifferingNodes(index, worst, deviations[worst], values[worst].shape, explained)
        return None

    def _explained(self, index: int, outputs: dict[str, Array]) -> float | None:
        """The share of the logits' difference that remains with own `outputs` of a node in the other place; None where
        they do not change the logits."""
        theirs, mixed = last_row(self._known[self.own.logits]), self._mine
        if self.own.logits not in outputs:
            swapped = {name: array.astype(self._known[name].dtype) for name, array in outputs.items()}
            mixed = last_row(self.other.run(self.known_before(index) | swapped, [self.own.logits])[self.own.logits])
        moved_by = np.abs(mixed - theirs).max()
        if not EFFECT * self._whole <= moved_by <= self._whole / EFFECT:
            return None
        return float(1 - np.abs(self._mine - mixed).max() / np.abs(self._mine - theirs).max())

    def _fused(self, begin: int, end: int, wrong: Sequence[str]) -> DifferingNodes | None:
        """The fewest nodes that differ together, in a piece in which no single node does. `wrong` are its outputs that
        differ."""
        inside = [name for name in self._values if begin <= self._makers[name] < end]
        last = next((name for name in inside if name in wrong), None)
        if last is None or not self._differ(begin, last):
            return None
        last = _first(inside[: inside.index(last) + 1], lambda name: self._differ(begin, name))
        starts = list(range(self._makers[last], begin - 1, -1))
        start = _first(starts, lambda place: self._differ(place, last))
        values, deviation = self._region(start, last)
        explained = self._explained(self._makers[last], values)
        return None if explained is None else DifferingNodes(start, last, deviation, values[last].shape, explained)

    def _differ(self, begin: int, value: str) -> bool:
        return self._region(begin, value)[1].ratio > 1

    def _region(self, begin: int, value: str) -> tuple[dict[str, Array], Deviation]:
        known = self.known_before(begin)
        expected = self.other.run(known, [value])
        are_alike = self._are_alike and self._makers[value] == begin
        values, deviations = self._judged(known, [value], expected, are_alike=are_alike)
        return values, deviations[value]


def _first(items: Sequence[T], holds: Callable[[T], bool]) -> T:
    """The first item for which it holds after one for which it does not, by bisection; it is assumed to hold for the
    last."""
    return items[bisect_left(range(len(items) - 1), True, key=lambda place: holds(items[place]))]

"""The first node whose output differs in two places on equal inputs, and its files. Knows no verdict.

Both places run one text in one step. The graph is cut where little is read across, and each piece is given in one
place what the other one has at the cut: no error is carried on, and each piece shows its own
(docs/first_difference.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from olive_ext.config import ModelSettings
from olive_ext.errors import ConfigError
from olive_ext.graph.nodes import layer_of
from olive_ext.places.place import HeldError, NotLocatedError, Place, Runs
from olive_ext.places.repro import write_repro
from olive_ext.places.search import Found, Search, VanishedError
from olive_ext.report.numbers import nats

MOST_APART = 10
"""Times by which logits of a plain pass and a log-probability of another form may differ in what they are apart."""


@dataclass(frozen=True)
class FirstDifference:
    """A node that gives something else in two places on equal inputs."""

    node: str
    operator: str
    """Of several nodes that differ together, and none of them alone, all in order: "Div, Erf, Add"."""

    output: str
    layer: int | None
    shapes: Mapping[str, tuple[int, ...]]
    """Of the inputs that are no weights, and of the output."""

    largest_error: float
    tolerance: float
    """What rounding explains."""

    providers: tuple[str, str]
    runs: int
    """Over the whole document, in both places together; over a part of the graph they count by its share of nodes."""

    optimization_level: str | None
    """The lowest of ONNX Runtime's at which it shows: "disable" where it shows at all of them."""

    explained: float
    """Share of the difference of the logits that is there with this output alone as the candidate has it."""

    repro: Path | None = None

    def __str__(self) -> str:
        layer = "" if self.layer is None else f", layer {self.layer}"
        is_always = self.optimization_level == "disable"
        level = "at every" if is_always else f"from '{self.optimization_level}' on, not below, as"
        shapes = ", ".join(str(list(shape)) for shape in self.shapes.values())
        return "; ".join(
            [
                f"node '{self.node}' ({self.operator}{layer}) on equal inputs: '{self.output}' is "
                f"{self.largest_error:.2g} off where {self.tolerance:.2g} is rounding, shapes {shapes}",
                f"{' against '.join(self.providers)}, {level} optimization level",
                f"makes {self.explained:.0%} of the logits' difference",
                f"{self.runs} runs",
                *([f"repro in '{self.repro}'"] if self.repro is not None else []),
            ]
        )


def first_difference(
    candidate: ModelSettings,
    other: ModelSettings,
    tokens: Sequence[int],
    position: int,
    *,
    repro: Path | None = None,
    distance: float | None = None,
) -> FirstDifference:
    """Where the two part on `tokens`, whose logits differ at `position`, counted from 0.

    `repro` is a folder, which gets the node's graph, its inputs and a script that shows the difference. `distance` in
    nats is what a log-probability was seen to differ by: a plain pass has to show about that. Raises `HeldError` where
    nothing but rounding makes the difference, `NotLocatedError` where a plain pass does not show it or no node is
    known that makes it, and `ModelError` for models of another kind, or without values of the same name.
    """
    if not 0 <= position < len(tokens):
        raise ConfigError(f"'position' = {position}: the document has {len(tokens)} tokens")
    if repro is not None and repro.exists() and (not repro.is_dir() or any(repro.iterdir())):
        raise ConfigError(f"'repro' = '{repro}' exists already: give a new or an empty folder")
    runs = Runs()
    own, theirs = (Place(settings, tokens[: position + 1], runs) for settings in (candidate, other))
    (mine, unit), (other_one, other_unit) = own.plain(), theirs.plain()
    apart, last_bit = float(np.abs(mine - other_one).max()), max(unit, other_unit)
    if apart <= last_bit and distance is not None and distance <= 2 * last_bit:
        raise HeldError(f"logits of their type differ by {nats(distance)} nats where their last bit does")
    if apart <= last_bit:
        raise NotLocatedError("a plain pass over the document, in one step, shows no difference in its logits")
    if distance is not None and not distance / MOST_APART < apart < distance * MOST_APART:
        raise NotLocatedError(
            f"a plain pass over the document, in one step, shows another difference: {nats(apart)} in its logits"
        )
    search = Search(own, theirs, mine, other_one)
    try:
        found = search.found()
    except VanishedError:  # then it can be read in the candidate, if it is the other's
        search = Search(theirs, own, other_one, mine)
        found = search.found()
    result = _told(search, found, (own, theirs))
    if repro is None:
        return result
    given = search.known_before(found.begin)
    write_repro(repro, (own, theirs), given, result.output, result.tolerance, str(result))
    return replace(result, repro=repro)


def _told(search: Search, found: Found, places: tuple[Place, Place]) -> FirstDifference:
    place, level = search.own, search.level(found)
    part, arrays = place.part(search.known_before(found.begin), [found.value])
    node = place.graph.nodes[place.graph.makers[found.value]]
    operators = [place.graph.nodes[index].op_type for index in part.nodes if index >= found.begin]
    return FirstDifference(
        node=node.name or found.value,
        operator=", ".join(one for one in operators if one != "Constant"),
        output=found.value,
        layer=layer_of(node.name or found.value),
        shapes={**{name: array.shape for name, array in arrays.items()}, found.value: found.shape},
        largest_error=found.judged.error,
        tolerance=found.judged.tolerance,
        providers=(places[0].provider, places[1].provider),
        runs=place.runs.whole,
        optimization_level=level,
        explained=found.explained,
    )

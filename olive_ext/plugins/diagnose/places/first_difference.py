"""The first node whose output differs in two places on equal inputs, and the files of a bug report: the graph of the
nodes that differ with its weights, their inputs, and a script that shows it in plain ONNX Runtime. Knows no verdict.

Both places run one text in one step. The graph is cut where little is read across, and each piece is given in one
place what the other one has at the cut: no error is carried on, and each piece shows its own
(docs/first_difference.md).
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx.external_data_helper import load_external_data_for_model

from olive_ext.config import ModelSettings
from olive_ext.errors import ConfigError
from olive_ext.graph.nodes import layer_of
from olive_ext.model.providers.resolution import plugin_devices
from olive_ext.plugins.diagnose.places.place import HeldError, NotLocatedError, Place, Runs
from olive_ext.plugins.diagnose.places.search import Found, Search, VanishedError
from olive_ext.plugins.diagnose.places.tolerance import Array
from olive_ext.report.numbers import nats

MOST_APART = 10
"""Times by which logits of a plain pass and a log-probability of another form may differ in what they are apart."""


_GRAPHS, _INPUTS = ("model.onnx", "reference.onnx"), ("inputs.npz", "reference_inputs.npz")
"""The candidate's file and the other's, which is only there where it holds something else."""

INLINE_BYTES = 1 << 30
"""Weights beyond this size lie beside their graph: a protobuf holds 2 GB."""

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
        raise ConfigError(f"the document has {len(tokens)} tokens", "position", position)
    if repro is not None and repro.exists() and (not repro.is_dir() or any(repro.iterdir())):
        raise ConfigError(f"'repro' = '{repro}' exists already: give a new or an empty folder", "repro", code="exists")
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
    _write_repro(repro, (own, theirs), given, result.output, result.tolerance, str(result))
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


def _write_repro(
    folder: Path, places: tuple[Place, Place], given: Mapping[str, Array], value: str, tolerance: float, what: str
) -> None:
    """Fills `folder`, all or nothing: the part of the graph behind `given` values that makes `value`, in both places.
    Raises `OSError`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for place, graph, taken in zip(places, _GRAPHS, _INPUTS, strict=True):
            _write_part(work / graph, work / taken, place, given, value)
        graphs = _shared(work, _GRAPHS, lambda path: path.read_bytes())
        inputs = _shared(work, _INPUTS, _arrays)
        names = zip(("one", "other"), graphs, inputs, places, strict=True)
        first, second = (_result(*result) for result in names)
        told = {"what": what.replace("\n", " "), "libraries": _libraries(places), "tolerance": tolerance}
        script = _SCRIPT.format(**told, first=first, second=second)
        (work / "repro.py").write_text(script, encoding="utf-8")
        work.chmod(0o755)
        if folder.exists():
            folder.rmdir()
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write_part(graph: Path, inputs: Path, place: Place, given: Mapping[str, Array], value: str) -> None:
    part, arrays = place.part(given, [value])
    model = place.graph.model_of(part)
    load_external_data_for_model(model, str(place.folder))
    is_large = sum(len(tensor.raw_data) for tensor in model.graph.initializer) > INLINE_BYTES
    onnx.save_model(model, graph, save_as_external_data=is_large, location=f"{graph.name}.data")
    taken = {one.name: place.inputs[one.name].numpy() for one in model.graph.input if one.name in place.inputs}
    np.savez(inputs, **(taken | arrays))


def _shared(folder: Path, names: tuple[str, str], content: Callable[[Path], Any]) -> tuple[str, str]:
    """The names of both places' files, of which the second goes where both hold the same."""
    first, second = names
    if content(folder / first) != content(folder / second):
        return names
    for file in folder.glob(f"{second}*"):
        file.unlink()
    return first, first


def _arrays(path: Path) -> dict[str, tuple[Any, ...]]:
    with np.load(path) as file:
        return {name: (array.dtype, array.shape, array.tobytes()) for name, array in file.items()}


def _result(name: str, graph: str, inputs: str, place: Place) -> str:
    """The lines that compute it."""
    engine, provider = place.model.settings.engine, place.model.providers[0]
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


def _libraries(places: Sequence[Place]) -> str:
    """The lines that register plugin providers."""
    found = {name: written for place in places for name, written in place.model.settings.provider_libraries.items()}
    paths = {
        name: repr(written) if Path(written).exists() else f"__import__({written!r}).get_library_path()"
        for name, written in found.items()
    }
    return "".join(f"ort.register_execution_provider_library({name!r}, {path})\n" for name, path in paths.items())

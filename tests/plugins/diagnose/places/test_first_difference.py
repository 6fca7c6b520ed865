"""The node that differs in two places, on decoders with one node rewritten, and with what an optimizer makes wrong."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from olive_ext.config import ModelSettings
from olive_ext.errors import ConfigError, ModelError
from olive_ext.plugins.diagnose.places.first_difference import FirstDifference, Search, first_difference
from olive_ext.plugins.diagnose.places.place import (
    MOST_RUNS,
    HeldError,
    NotLocatedError,
    PlacedDecoder,
    ProbedGraph,
    Runs,
    judge,
)
from tests.exports.cache import once
from tests.plugins.diagnose.places.deep import VOCAB, deep_decoder
from tests.plugins.diagnose.places.planted import planted
from tests.refusals import refused

TOKENS = np.random.default_rng(0).integers(4, VOCAB, 20).tolist()
APPROXIMATE = {"engine": {"session_options": {"optimization.enable_gelu_approximation": "1"}}}
"""Has ONNX Runtime take FastGelu, up to 5e-4 off, for a Gelu that it has fused: wrong by an optimizer, on purpose."""


@cache
def deep(layers: int = 4, kind: str = "float32") -> Path:
    recipe = [layers, kind, Path(__file__).with_name("deep.py").read_text()]
    return once("deep", recipe, lambda folder: _fill(folder, layers, kind)) / "package"


def _fill(folder: Path, layers: int, kind: str) -> None:
    deep_decoder(folder / "package", layers, np.dtype(kind).type, external=kind == "float32")


def found(
    candidate: Path, other: Path, repro: Path | None = None, distance: float | None = None, **how: Any
) -> FirstDifference:
    settings = ModelSettings(model=str(candidate), **how), ModelSettings(model=str(other))
    return first_difference(*settings, TOKENS, repro=repro, distance=distance)


def number_of(package: Path, name: str) -> int:
    nodes = onnx.load(package / "model.onnx", load_external_data=False).graph.node
    return next(index for index, node in enumerate(nodes) if node.name == name)


def run_repro(folder: Path) -> subprocess.CompletedProcess[str]:
    """In another working directory, without this package."""
    command = [sys.executable, "-I", folder / "repro.py"]
    return subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=120)


def check_planted(tmp_path: Path, source: Path, other: Path, number: int, **how: Any) -> FirstDifference:
    node = planted(source, tmp_path / "planted", number, factor=2)
    result = found(tmp_path / "planted", other, **how)
    assert (result.output in node.output, result.node) == (True, node.name)
    assert result.operator == node.op_type
    assert result.explained > 0.8
    return result


@pytest.mark.parametrize("name", ["/embed/Gather", "/model/layers.2/attn/GroupQueryAttention"])
def test_exactly_the_rewritten_node_is_found(tmp_path: Path, name: str) -> None:
    """Of two graphs that differ in one node it is that one, with its layer, shapes and the error beyond tolerance."""
    result = check_planted(tmp_path, deep(), deep(), number_of(deep(), name))
    assert result.layer == (2 if "layers" in name else None)
    assert result.shapes[result.output] == (1, len(TOKENS), 32)
    assert result.largest_error > result.tolerance > 0


@pytest.mark.long
@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_every_rewritten_node_is_found_at_any_depth(tmp_path: Path, kind: str) -> None:
    """Twenty nodes of twelve layers in fp32, and fp16 against fp32; one that moves no logit is told as none."""
    source, hits = deep(12, kind), 0
    reasons: list[str] = []
    count = len(onnx.load(source / "model.onnx", load_external_data=False).graph.node)
    for number in np.random.default_rng(5).permutation(count)[:28].tolist():
        try:
            node = planted(source, tmp_path / str(number), number, factor=2)
        except (IndexError, ValueError):  # nothing to rewrite in it
            continue
        try:
            result = found(tmp_path / str(number), deep(12))
        except NotLocatedError as error:
            reasons.append(str(error))
            continue
        assert result.output in node.output
        hits += 1
    print(f"\n{kind}: {hits} nodes found")
    assert all("no difference" in reason for reason in reasons)
    assert hits >= 12


def test_difference_of_another_size_is_not_looked_for(tmp_path: Path) -> None:
    """What a log-probability was seen to differ by has to be about what a plain pass shows; last bits are held."""
    planted(deep(), tmp_path / "planted", number_of(deep(), "/model/layers.2/attn/GroupQueryAttention"))
    with pytest.raises(NotLocatedError, match="another difference"):
        found(tmp_path / "planted", deep(), distance=1e-5)
    with pytest.raises(HeldError, match="last bit"):
        found(deep(), deep(), distance=1e-7)
    for distance in (1e-3, None):
        with pytest.raises(NotLocatedError, match="no difference"):
            found(deep(), deep(), distance=distance)


NAMES = ["inputs.npz", "model.onnx", "reference.onnx", "reference_inputs.npz", "repro.py"]


def test_optimizers_fault_is_a_region_and_a_repro_that_shows_it(tmp_path: Path) -> None:
    """What only a fusion makes wrong is told as the nodes that are fused; its repro exits with 1."""
    result = found(deep(), deep(), tmp_path / "repro", **APPROXIMATE)
    assert result.operator == "Div, Erf, Add, Mul, Mul"
    assert (result.node, result.layer) == ("/model/layers.0/gelu/Mul_1", 0)
    assert "\n" not in str(result)
    assert sorted(path.name for path in (tmp_path / "repro").iterdir()) == NAMES
    shown = run_repro(tmp_path / "repro")
    assert (shown.returncode, shown.stderr) == (1, "")
    assert "apart" in shown.stdout
    script = tmp_path / "repro" / "repro.py"
    script.write_text(script.read_text().replace("enable_gelu_approximation', '1'", "enable_gelu_approximation', '0'"))
    assert run_repro(tmp_path / "repro").returncode == 0


@pytest.mark.long
def test_fault_in_the_other_place_is_found_too(tmp_path: Path) -> None:
    """Which of both is wrong is not asked: the same region."""
    settings = ModelSettings(model=str(deep())), ModelSettings(model=str(deep()), **APPROXIMATE)
    result = first_difference(*settings, TOKENS)
    assert result.operator == "Div, Erf, Add, Mul, Mul"


@pytest.mark.long
def test_repro_of_two_graphs_holds_both_and_their_weights(tmp_path: Path) -> None:
    """A rewritten node's repro has the other graph beside it, both with their weights, and exits with 1."""
    planted(deep(), tmp_path / "planted", number_of(deep(), "/model/layers.1/up/MatMul"), factor=2)
    result = found(tmp_path / "planted", deep(), tmp_path / "new" / "repro")
    assert result.repro == tmp_path / "new" / "repro"
    names = sorted(path.name for path in result.repro.iterdir())
    assert names == sorted([*NAMES, "model.onnx.data", "reference.onnx.data"])
    assert run_repro(result.repro).returncode == 1
    assert len(onnx.load(result.repro / "model.onnx").graph.node) == 1


def test_values_that_are_read_at_once_stay_within_the_memory(tmp_path: Path) -> None:
    """With room for few values a run reads no more, pieces are cut again, and the node is the same."""
    name, most = "/model/layers.1/q_proj/MatMul", 16000
    planted(deep(), tmp_path / "planted", number_of(deep(), name), factor=2)
    runs = Runs()
    places = [_Watched(ModelSettings(model=str(path)), TOKENS, runs) for path in (tmp_path / "planted", deep())]
    (mine, _), (theirs, _) = (place.plain() for place in places)
    for place in places:
        place.read.clear()
    hit = Search(*places, mine, theirs, most).found()
    assert hit.value == f"{name}/0"
    across = [sizes for place in places for names, sizes in place.read if "logits" not in names]
    assert max(across) <= most
    assert runs.spent <= MOST_RUNS


class _Watched(PlacedDecoder):
    """Notes what each run returns: names, and bytes but for the KV caches."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.read: list[tuple[list[str], int]] = []

    def run(self, *given: Any, **how: Any) -> dict[str, Any]:
        values = super().run(*given, **how)
        between = [array.nbytes for name, array in values.items() if not name.startswith("present")]
        self.read.append((list(values), sum(between)))
        return values


def test_cuts_lie_where_least_is_read_across() -> None:
    """Between layers one hidden state and the lengths are live, whatever the nodes' order in the file."""
    model = onnx.load(deep() / "model.onnx", load_external_data=False)
    nodes = list(reversed(model.graph.node))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    graph = ProbedGraph(model)
    assert all(
        graph.makers[name] < at for at, node in enumerate(graph.nodes) for name in node.input if name in graph.makers
    )
    sizes = graph.sizes({"input_ids": (1, 20), "attention_mask": (1, 20)})
    for place in graph.places(0, len(graph.nodes), 3, sizes):
        live = [name for name in graph.live(graph.values, place) if "/model/layers" in name]
        assert len(live) <= 2
        assert sum(sizes[name] for name in live) <= 2 * 20 * 32


@pytest.mark.parametrize(
    ("one", "other", "response", "is_beyond"),
    [
        ([1.0, 2.0], [1.0, 2.0], [1.0, 2.0], False),
        ([1.0, 2.0], [1.0, 2.0000005], [1.0, 2.0], False),
        ([1.0, 2.1], [1.0, 2.0], [1.0, 2.0], True),
        ([1.0, 2.1], [1.0, 2.0], [1.0, 2.05], False),
        ([np.nan, 2.0], [np.nan, 2.0], [np.nan, 2.0], False),
        ([np.nan, 2.0], [1.0, 2.0], [1.0, 2.0], True),
        ([-np.inf, 2.0], [-np.inf, 2.0], [-np.inf, 2.0], False),
        ([3, 4], [3, 5], [3, 5], True),
        ([3, 4], [3, 4], [3, 4], False),
        ([3], [3, 4], [3, 4], True),
    ],
)
def test_rounding_is_told_from_errors(
    one: list[float], other: list[float], response: list[float], is_beyond: bool
) -> None:
    """A difference counts against what moved inputs do; equal infinities and NaN are equal, one NaN is an error. No
    rounding explains an integer, or another shape."""
    kind, unit = (np.int64, 0.0) if isinstance(one[0], int) else (np.float32, 1.2e-7)
    assert (judge(*(np.array(values, kind) for values in (one, other, response)), unit).ratio > 1) is is_beyond


def test_bad_input_is_refused_by_name(tmp_path: Path) -> None:
    """A folder with files, and a graph without the same names: one line each."""
    settings = ModelSettings(model=str(deep()))
    (tmp_path / "file").touch()
    with refused(ConfigError, "exists", "repro"):
        first_difference(settings, settings, TOKENS[:4], repro=tmp_path)
    other = deep_decoder(tmp_path / "renamed", 1)
    model = onnx.load(other / "model.onnx")
    made = {name: f"other{name}" for node in model.graph.node for name in node.output if name.startswith("/")}
    for node in model.graph.node:
        node.input[:] = [made.get(name, name) for name in node.input]
        node.output[:] = [made.get(name, name) for name in node.output]
    onnx.save(model, other / "model.onnx")
    with refused(ModelError, "not_comparable"):
        found(other, deep())

"""LoRA adapters: their weights are the graph's inputs on every run, or the setting is refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import olive_ext
from olive_ext.errors import ModelError
from olive_ext.session import Session
from tests.check.tiny import HIDDEN, VOCABULARY, put_model
from tests.refusals import refused

RANK = 3
PARAMETERS = ("model.lora_A.weight", "model.lora_B.weight")
PAIRS = [([1, 2, 3], [4, 5]), ([1, 2, 9], [7]), ([6], [8, 2, 1])]


def _package(folder: Path, *, has_defaults: bool) -> Path:
    """A decoder whose logits are hidden @ head + hidden @ A @ B; A and B are inputs, by default of rank 0."""
    put_model(folder)
    model = onnx.load(folder / "model.onnx")
    graph = model.graph
    head = next(node for node in graph.node if node.output[0] == "logits")
    head.output[0] = "base"
    nodes = [("MatMul", ["hidden", PARAMETERS[0]], "down"), ("MatMul", ["down", PARAMETERS[1]], "up")]
    for op, inputs, output in [*nodes, ("Add", ["base", "up"], "logits")]:
        graph.node.append(helper.make_node(op, inputs, [output]))
    for name, shape in zip(PARAMETERS, ([HIDDEN, 0], [0, VOCABULARY]), strict=True):
        declared = [size or "rank" for size in shape]
        graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, declared))
        if has_defaults:
            graph.initializer.append(numpy_helper.from_array(np.zeros(shape, np.float32), name))
    onnx.save(model, folder / "model.onnx")
    return folder


def _weights(seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(np.float32) for shape in ((HIDDEN, RANK), (RANK, VOCABULARY))]


def _adapter(path: Path, values: dict[str, np.ndarray]) -> str:
    adapter = ort.AdapterFormat()
    adapter.set_adapter_version(1)
    adapter.set_model_version(1)
    adapter.set_parameters({name: ort.OrtValue.ortvalue_from_numpy(value) for name, value in values.items()})
    adapter.export_adapter(str(path))
    return str(path)


def _expected(folder: Path, weights: list[np.ndarray] | None) -> list[list[float]]:
    tensors = {entry.name: numpy_helper.to_array(entry) for entry in onnx.load(folder / "model.onnx").graph.initializer}
    head = tensors["head"] if weights is None else tensors["head"] + weights[0] @ weights[1]
    logits_VV = (tensors["embedding"] @ head).astype(np.float64)
    logprobs_VV = logits_VV - np.log(np.exp(logits_VV).sum(-1, keepdims=True))
    follows = ([*context, *target] for context, target in PAIRS)
    steps = ((tokens, len(target)) for tokens, (_, target) in zip(follows, PAIRS, strict=True))
    return [[float(logprobs_VV[a, b]) for a, b in zip(tokens[-n - 1 :], tokens[-n:])] for tokens, n in steps]  # noqa: B905


def _assert_scores(session: Session, expected: list[list[float]]) -> None:
    for output, row in zip(session.loglikelihood(PAIRS), expected, strict=True):
        assert output.token_logprobs == pytest.approx(row, abs=1e-5)


@pytest.mark.parametrize("graph", ["scoring_head", "untouched"])
@pytest.mark.parametrize("has_defaults", [True, False])
def test_adapter_of_the_config_counts_on_every_run(tmp_path: Path, has_defaults: bool, graph: str) -> None:
    package = _package(tmp_path / "model", has_defaults=has_defaults)
    weights = _weights()
    adapter = _adapter(tmp_path / "a.onnx_adapter", dict(zip(PARAMETERS, weights, strict=True)))
    with olive_ext.open(
        package, max_length=64, engine={"adapters": [adapter], "graph": graph, "chunk_size": 2}
    ) as session:
        _assert_scores(session, _expected(package, weights))
        _assert_scores(session, _expected(package, weights))
        assert list(session.describe_execution()["adapters"]) == [adapter]


def test_graph_with_defaults_runs_without_an_adapter(tmp_path: Path) -> None:
    package = _package(tmp_path / "model", has_defaults=True)
    with olive_ext.open(package, max_length=64) as session:
        _assert_scores(session, _expected(package, None))
        assert "adapters" not in session.describe_execution()


def test_parameters_may_come_in_two_files(tmp_path: Path) -> None:
    package = _package(tmp_path / "model", has_defaults=False)
    weights = _weights(1)
    files = [_adapter(tmp_path / f"{i}.onnx_adapter", {PARAMETERS[i]: weights[i]}) for i in range(2)]
    with olive_ext.open(package, max_length=64, engine={"adapters": files}) as session:
        _assert_scores(session, _expected(package, weights))


Values = dict[str, np.ndarray]
BOTH: Values = dict(zip(PARAMETERS, _weights(), strict=True))
FIRST, WIDE = {PARAMETERS[0]: BOTH[PARAMETERS[0]]}, {PARAMETERS[0]: np.zeros((HIDDEN + 1, RANK), np.float32)}
MISTAKES: dict[str, tuple[bool, list[Values | str | None], str, str, tuple[str, ...]]] = {
    "no file": (False, [None], "no_access", "engine.adapters", ("0.onnx_adapter",)),
    "no adapter": (False, ["no adapter"], "damaged", "", ("0.onnx_adapter", "engine.adapters")),
    "twice": (False, [BOTH, FIRST], "contradiction", "", (PARAMETERS[0], "both")),
    "other input": (False, [BOTH, {"other.lora_A": BOTH[PARAMETERS[0]]}], "contradiction", "", ("other.lora_A",)),
    "other shape": (True, [WIDE], "contradiction", "", ("0.onnx_adapter", PARAMETERS[0], "tensor(float)")),
    "none": (False, [], "unsupported", "", ("engine.adapters",)),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, name: str) -> None:
    has_defaults, given, code, field, holds = MISTAKES[name]
    package, files = _package(tmp_path / "model", has_defaults=has_defaults), []
    for number, content in enumerate(given):
        files.append(str(tmp_path / f"{number}.onnx_adapter"))
        if isinstance(content, dict):
            _adapter(Path(files[-1]), content)
        elif content is not None:
            Path(files[-1]).write_text(content)
    with refused(ModelError, code, field, holds=holds) as refusal:
        olive_ext.open(package, max_length=64, engine={"adapters": files})
    assert "\n" not in str(refusal.value)

"""A package that is not what it says, or that has no kernels here, is refused by name before anything runs. Packages
whose decoder has more inputs for pictures than embeddings: text runs as without them, or all is refused.
Phi-4-multimodal's decoder, as mobius 0.1.0 makes it, takes `vision_gate` and `speech_gate`, which its embedding graph
returns; Qwen3-VL's, by other exporters, the features of inner layers of the tower. LoRA adapters: their weights are
the graph's inputs on every run, or the setting is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import olive_ext
from olive_ext.config import ModelSettings
from olive_ext.errors import ModelError, OliveExtError
from olive_ext.model import resolve
from olive_ext.session import Session
from olive_ext.session.requests import ScoringRequest
from tests.check.tiny import HIDDEN, VOCABULARY, put_model
from tests.exports import export, genai_export
from tests.exports.media import MEDIA_FAMILIES, media_export
from tests.families.pictures import picture
from tests.refusals import refused


def test_head_size_that_contradicts_the_graph_is_refused_by_number(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(genai_export("llama", "0.18.0"), tmp_path / "model"))
    config = json.loads((folder / "genai_config.json").read_text())
    config["model"]["decoder"]["head_size"] = 32
    (folder / "genai_config.json").write_text(json.dumps(config))
    with refused(ModelError, "unsupported", holds=("head_size", "32", "16")):
        olive_ext.open(folder)


@pytest.mark.exporters
@pytest.mark.parametrize(
    ("name", "kernel"),
    [("qwen3-genai-0.18-bf16-cuda", "MatMul"), ("qwen3-genai-0.18-kvfp8-cuda", "GroupQueryAttention")],
)
def test_type_without_a_kernel_is_refused_by_one_line(name: str, kernel: str) -> None:
    with refused(ModelError, "unsupported", holds=kernel) as error:
        olive_ext.open(export(name).path, execution_provider="cpu")
    assert "\n" not in str(error.value)


FAMILY = "qwen2_5_vl"
TEXT = [("Ann sees the", " blue stone"), ("Bob carries the heavy", " wheel")]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return Path(shutil.copytree(media_export(FAMILY)[0], tmp_path / "package"))


def _edited(file: Path) -> onnx.ModelProto:
    return onnx.load(file, load_external_data=False)


def _give_gate(package: Path) -> None:
    """The embedding graph returns 1 where it finds a picture, as mobius makes it."""
    file = package / "embedding" / "model.onnx"
    model = _edited(file)
    media = resolve(ModelSettings(model=str(package))).media
    assert media is not None
    (encoder,) = media.encoders
    nodes = [
        helper.make_node("Constant", [], ["gated_id"], value_int=encoder.placeholder),
        helper.make_node("Equal", ["input_ids", "gated_id"], ["is_gated"]),
        helper.make_node("Cast", ["is_gated"], ["gated"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMax", ["gated"], ["vision_gate"], keepdims=0),
    ]
    model.graph.node.extend(nodes)
    model.graph.output.append(helper.make_tensor_value_info("vision_gate", TensorProto.FLOAT, []))
    onnx.save(model, file)


def _take(package: Path, name: str, shape: list[int | str]) -> None:
    """The decoder adds 100 times the input to its embeddings: 1 in it would show."""
    file = package / "decoder" / "model.onnx"
    model = _edited(file)
    for node in model.graph.node:
        node.input[:] = ["switched" if given == "inputs_embeds" else given for given in node.input]
    nodes = [
        helper.make_node("Constant", [], ["hundred"], value_float=100.0),
        helper.make_node("Mul", [name, "hundred"], ["large"]),
        helper.make_node("Add", ["inputs_embeds", "large"], ["switched"]),
    ]
    for node in reversed(nodes):
        model.graph.node.insert(0, node)
    model.graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    onnx.save(model, file)


def _scores(package: Path) -> list[float]:
    with olive_ext.open(package) as session:
        found = [output.logprob for output in session.loglikelihood(TEXT)]
        marked = ScoringRequest(MEDIA_FAMILIES[FAMILY].marker, " stone", images=[picture(0, 40, 40)])
        with refused(OliveExtError, "unsupported", holds="vision_gate"):
            session.loglikelihood([marked])
    return found


def test_text_of_a_decoder_with_gates_runs_and_pictures_are_refused_by_name(package: Path) -> None:
    with olive_ext.open(package) as session:
        expected = [output.logprob for output in session.loglikelihood(TEXT)]
    _give_gate(package)
    assert _scores(package) == pytest.approx(expected, abs=1e-6)
    media = resolve(ModelSettings(model=str(package))).media
    assert media is not None
    assert "the decoder takes no such input" in media.problem
    _take(package, "vision_gate", [])
    assert _scores(package) == pytest.approx(expected, abs=1e-6)
    media = resolve(ModelSettings(model=str(package))).media
    assert media is not None
    assert "'vision_gate' is set by the tokens of one step" in media.problem


@pytest.mark.parametrize("name", ["deepstack_visual_embeds", "vision_gate"])
def test_input_that_no_graph_makes_is_refused_before_anything_runs(package: Path, name: str) -> None:
    _take(package, name, ["batch", "sequence", 64] if "deep" in name else [])
    with refused(ModelError, "unsupported", holds=name):
        olive_ext.open(package)


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


def test_other_adapter_makes_another_model_of_the_same_graph(tmp_path: Path) -> None:
    """Its digest says what two evaluations are of: with different adapters they were one model's."""
    package, digests = str(_package(tmp_path / "model", has_defaults=True)), set()
    for number in range(2):
        adapter = _adapter(tmp_path / "a.onnx_adapter", dict(zip(PARAMETERS, _weights(number), strict=True)))
        digests.add(resolve(ModelSettings.of({"model": package, "engine": {"adapters": [adapter]}})).digest)
    assert len({*digests, resolve(ModelSettings.of({"model": package})).digest}) == 3


def test_graph_with_defaults_runs_without_an_adapter_and_parameters_may_come_in_two_files(tmp_path: Path) -> None:
    package = _package(tmp_path / "model", has_defaults=True)
    with olive_ext.open(package, max_length=64) as session:
        _assert_scores(session, _expected(package, None))
        assert "adapters" not in session.describe_execution()
    package = _package(tmp_path / "without", has_defaults=False)
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

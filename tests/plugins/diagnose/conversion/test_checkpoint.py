"""Exports held against their checkpoints: good ones are equal, edited ones are told, with length, layer and cause."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from safetensors.numpy import load_file, save_file

from olive_ext.check import check_model
from olive_ext.cli import main
from olive_ext.config import EvaluationConfig, ModelSettings
from olive_ext.engine.runners.hf_runner import PlainPass
from olive_ext.engine.runners.ort.ort_runner import PlainGraph
from olive_ext.errors import ConfigError, ModelError
from olive_ext.model import ResolvedModel, resolve
from olive_ext.plugins.diagnose import conversion
from olive_ext.plugins.diagnose.conversion import USUAL, Agreement, Hypothesis, hold_against, regroup
from olive_ext.report.comparison import GENERATED
from olive_ext.run.export import LARGEST_DIFFERENCE
from tests.exports import export, genai_export, hf_model
from tests.exports.edited import change, edited, weight
from tests.graph.quantized import to_nearest
from tests.refusals import refused, tells

WINDOW = 16


def held(path: Path, hf: Path, **settings: object) -> Agreement:
    model = ModelSettings.of({"model": path, "max_length": 128, "device": "cpu", **settings})
    return hold_against(resolve(model), resolve(ModelSettings(model=str(hf), device="cpu")))


def without_windows(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "local_window_size":
                attribute.i = -1


@pytest.mark.long
def test_a_whole_text_runs_over_caches_that_drop_positions(tmp_path: Path) -> None:
    """A quantized model of windows was "not decided": such a cache has no room for an empty past."""

    def drop(model: onnx.ModelProto) -> None:
        for node in model.graph.node:
            if any(each.name == "local_window_size" and each.i > 0 for each in node.attribute):
                node.attribute.append(onnx.helper.make_attribute("sliding_window_cache", 1))

    path = genai_export("gemma3_text")
    models = [resolve(ModelSettings(model=str(one))) for one in (path, edited(path, tmp_path / "dropping", drop))]
    assert any(tensor.window for tensor in models[1].spec.kv)
    expected, found = (PlainGraph(model, ()).logprobs(range(3, 43), 90) for model in models)
    np.testing.assert_array_equal(expected, found)


@pytest.mark.parametrize(
    ("family", "what"),
    [("llama", "biases none"), ("qwen3", "norms of Q and K"), ("gemma3_text", "windows, tied embeddings")],
)
def test_good_export_is_equal(family: str, what: str) -> None:
    found = held(genai_export(family), hf_model(family))
    assert (found.is_equal, found.state_difference, found.omission) == (True, None, None), what
    assert found.nats < 1e-4
    assert tells(found.sentence(), f"equal to the checkpoint no {GENERATED}")
    assert [text.num_tokens for text in found.texts][-1] == 128


@pytest.mark.parametrize(
    ("value", "is_equal"), [(-np.inf, True), (np.finfo(np.float32).min, True), (1.0, False), (-0.5, True)]
)
def test_ids_without_a_token_may_be_masked(value: float, is_equal: bool, tmp_path: Path) -> None:
    """What others get is theirs; what these get beyond the checkpoint's is not."""
    known = 1000

    def masked(model: onnx.ModelProto) -> None:
        next(node for node in model.graph.node if node.output[0] == "logits").output[0] = "whole"
        bias = np.where(np.arange(1024) < known, 0, value).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(bias, "suppressed"))
        model.graph.node.append(onnx.helper.make_node("Add", ["whole", "suppressed"], ["logits"]))

    path = edited(genai_export("llama"), tmp_path / "model", masked)
    tokenizer = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = {text: number for text, number in tokenizer["model"]["vocab"].items() if number < known}
    tokenizer["model"] |= {
        "vocab": vocab,
        "merges": [pair for pair in tokenizer["model"]["merges"] if "".join(pair) in vocab],
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    found = held(path, hf_model("llama"))
    assert found.is_equal == is_equal, found.sentence()


def with_window(model: onnx.ModelProto) -> None:
    """The sum after the last layer is fused into a norm: its own state is in no value of the graph."""
    for node in (node for node in model.graph.node if "layers.1/" in node.name):
        for attribute in (attribute for attribute in node.attribute if attribute.name == "local_window_size"):
            attribute.i = WINDOW


def attribute_set(name: str, value: float) -> Callable[[onnx.ModelProto], None]:
    def edit(model: onnx.ModelProto) -> None:
        for attribute in (attribute for node in model.graph.node for attribute in node.attribute):
            if attribute.name == name and attribute.type == onnx.AttributeProto.FLOAT:
                attribute.f = value
            elif attribute.name == name and attribute.i > 0:
                attribute.i = int(value)

    return edit


def larger(*parts: str) -> Callable[[onnx.ModelProto], None]:
    return lambda model: change(weight(model, *parts), lambda array: 1.3 * array)


def with_half_positions(model: onnx.ModelProto) -> None:
    cos, sin = weight(model, "cos_cache"), weight(model, "sin_cache")
    angles = np.arctan2(numpy_helper.to_array(sin)[1], numpy_helper.to_array(cos)[1])
    positions = np.arange(len(numpy_helper.to_array(cos)))[:, None] / 2
    change(cos, lambda _: np.cos(positions * angles))
    change(sin, lambda _: np.sin(positions * angles))


CASES: dict[str, tuple[str, Callable[[onnx.ModelProto], None], int, str, tuple[str, str, int] | tuple[()] | None]] = {
    "no windows": ("gemma3_text", without_windows, WINDOW + 1, f"a sliding window of {WINDOW} is missing",
                   ("layer 0", "self_attn", WINDOW + 1)),
    "a window of the last layer": ("llama", with_window, WINDOW + 1, "", ("layer 1", "self_attn", WINDOW + 1)),
    "a smaller window": ("gemma3_text", attribute_set("local_window_size", WINDOW - 1), WINDOW,
                         "a sliding window is 15 instead of 16", ()),
    "another epsilon": ("llama", attribute_set("epsilon", 1e-5), 0, "'rms_norm_eps' is 1e-05 instead of 1e-06", ()),
    "a norm": ("llama", larger("layers.1", "input_layernorm", "weight"), 0, "", ("layer 1", "input_layernorm", 1)),
    "an MLP": ("llama", larger("layers.0", "down_proj"), 0, "", ("layer 0", "mlp", 1)),
    "an attention": ("llama", larger("layers.1", "o_proj"), 0, "", ("layer 1", "self_attn", 1)),
    "the table": ("llama", larger("embed_tokens"), 0, "", ("the embeddings", "", 1)),
    "the last norm": ("llama", larger("layers.2.final_norm"), 0, "", ("the last norm", "", 1)),
    "the head": ("llama", larger("lm_head"), 0, "", None),
    # The first token's position is 0.
    "rotary positions": ("llama", with_half_positions, 0, "", ("layer 0", "self_attn", 2)),
}  # fmt: skip
"""Family, edit, tokens that are equal, what was left out, and place, part and token of the first other state, where
they are sure."""


@pytest.mark.parametrize(
    "case", [pytest.param(one, marks=[pytest.mark.long] * (at % 2)) for at, one in enumerate(CASES)]
)
def test_what_was_changed_is_found_with_its_length_cause_and_place(case: str, tmp_path: Path) -> None:
    family, edit, equal_up_to, cause, expected = CASES[case]
    found = held(edited(genai_export(family), tmp_path / "model", edit), hf_model(family))
    assert found.equal_up_to == equal_up_to, found.sentence()
    assert (found.omission.text if found.omission is not None else "") == cause
    assert found.omission is None or found.omission.nats < 1e-4
    difference = found.state_difference
    where = None if difference is None else (difference.place, difference.part, difference.token)
    assert expected in (where, ())
    assert (cause if expected is not None else "the LM head") in found.sentence()
    assert json.loads(json.dumps(asdict(found)))["equal_up_to"] == equal_up_to


def test_long_factors_that_are_missing_are_told_by_whole_texts(tmp_path: Path) -> None:
    """Everything but the short factors is as the checkpoint says: a checkpoint whose long factors are changed."""
    package = export("phi3_longrope-genai-0.14")
    hf = Path(shutil.copytree(package.hf, tmp_path / "hf"))
    config = json.loads((hf / "config.json").read_text())
    factors = config["rope_parameters"]["long_factor"]
    config["rope_parameters"]["long_factor"] = [2 * factor for factor in factors]
    (hf / "config.json").write_text(json.dumps(config))
    found = held(package.path, hf)
    original = config["original_max_position_embeddings"]
    assert found.is_by_text
    assert found.equal_up_to is not None
    assert found.equal_up_to <= original < found.equal_up_to + 64
    assert "longer ones" in found.sentence()


@pytest.mark.long
def test_half_precision_is_equal_within_its_own_rounding() -> None:
    package = export("llama-genai-0.18-fp16-cpu")
    found = held(package.path, package.hf)
    assert found.is_equal
    assert "transformers in float16" in found.bound_reason


def test_half_precision_that_overflows_in_transformers_excuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Overflowing(PlainPass):
        def __init__(self, model: ResolvedModel, dtype: str | None = None, changes: Any = None) -> None:
            super().__init__(model, dtype, changes)
            self.overflows = dtype == "float16"

        def logprobs(self, tokens: Sequence[int]) -> np.ndarray:
            return super().logprobs(tokens) * (np.nan if self.overflows else 1)

    monkeypatch.setattr(conversion, "PlainPass", Overflowing)
    package = export("llama-genai-0.18-fp16-cpu")
    found = held(package.path, package.hf)
    assert found.bound == LARGEST_DIFFERENCE
    assert not found.is_equal


def test_configuration_that_transformers_refuse_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = [
        Hypothesis("a kind that is not there", {"rope_parameters": {"rope_type": "none", "rope_theta": 1e4}}),
        Hypothesis("a head of another size", {"head_dim": 7}),
    ]
    monkeypatch.setattr(conversion, "hypotheses", lambda config: refused)
    damaged = edited(
        genai_export("llama"), tmp_path / "damaged", lambda model: change(weight(model, "down_proj"), np.negative)
    )
    found = held(damaged, hf_model("llama"))
    assert (found.is_equal, found.omission) == (False, None)
    assert found.state_difference is not None


@pytest.mark.parametrize(("name", "by"), [("llama-genai-0.14-int4", "MatMulNBits"), ("llama-genai-0.18-kv8", "INT8")])
def test_quantized_model_is_not_charged_to_the_conversion(name: str, by: str) -> None:
    package = export(name)
    found = held(package.path, package.hf)
    is_judged = by != "INT8"
    outcome = (found.quantized_by, not found.is_undecided, found.is_equal, found.omission)
    assert outcome == (by, is_judged, is_judged, None)
    command = ["check", str(package.path), "--against", str(package.hf), "--max-length", "16"]
    assert main(command) == (0 if is_judged else 3)
    assert f"{found.texts[-1].num_tokens} random tokens" in found.sentence()
    assert (USUAL in found.sentence()) != is_judged


def clipped(model: onnx.ModelProto) -> None:
    """What few tokens pass: no constant of the checkpoint's shows it."""
    node = next(node for node in model.graph.node if "layers.1/post_attention_layernorm" in node.name)
    model.graph.initializer.extend(numpy_helper.from_array(np.float32(bound), f"{bound}") for bound in (-2, 2))
    model.graph.node.insert(0, onnx.helper.make_node("Clip", [node.output[0], "-2", "2"], ["clipped"]))
    for other in model.graph.node[1:]:
        other.input[:] = ["clipped" if name == node.output[0] else name for name in other.input]


def quick_gelu(model: onnx.ModelProto) -> None:
    node = next(node for node in model.graph.node if node.op_type == "Sigmoid" and "layers.1" in node.name)
    model.graph.initializer.append(numpy_helper.from_array(np.float32(1.7), "alpha"))
    model.graph.node.append(onnx.helper.make_node("Mul", [node.input[0], "alpha"], ["scaled"]))
    node.input[0] = "scaled"


@pytest.mark.parametrize("edit", [clipped, quick_gelu])
def test_graph_of_a_quantized_model_that_computes_otherwise_than_its_weights(
    edit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are right: transformers with its weights, which are decoded once for all hypotheses, give other
    numbers."""
    package, decoded = export("llama-genai-0.14-int4"), Mock(wraps=conversion.reweight)
    monkeypatch.setattr(conversion, "reweight", decoded)
    found = held(edited(package.path, tmp_path / "model", edit), package.hf)
    assert (found.is_equal, found.is_undecided) == (False, False)
    assert "with the model's weights, up to" in found.sentence()
    assert "hidden states part in layer 1 (mlp)" in found.sentence()
    assert decoded.call_count == 1


@pytest.mark.parametrize(
    ("name", "is_decoded"),
    [("/model/layers.1/mlp/down_proj/MatMulNBits", True), ("/model/layers.1/lora_A/MatMul", False)],
)
def test_names_of_nodes_decide_whether_a_quantized_model_has_the_checkpoints_weights(
    name: str, is_decoded: bool, tmp_path: Path
) -> None:
    """A builder that is given a quantized checkpoint names nodes by packed operators, and nothing paired. Beside
    adapters the weights are not the merged checkpoint's, and were taken for them."""
    package = export("llama-genai-0.14-int4")

    def renamed(model: onnx.ModelProto) -> None:
        node = next(node for node in model.graph.node if "layers.1/mlp/down_proj" in node.name)
        if is_decoded:
            node.name = name
            return
        value = numpy_helper.from_array(np.zeros((node_inputs(node), 4), np.float32), "lora_a")
        model.graph.initializer.append(value)
        model.graph.node.append(onnx.helper.make_node("MatMul", [node.input[0], "lora_a"], ["unread"], name))

    assert held(edited(package.path, tmp_path / "model", renamed), package.hf).is_decoded is is_decoded


def node_inputs(node: onnx.NodeProto) -> int:
    """The inputs of a packed product."""
    return next(entry.i for entry in node.attribute if entry.name == "K")


def test_damaged_file_of_a_quantized_model_is_a_problem(tmp_path: Path) -> None:
    """Its distance says little: its files are held against the checkpoint's."""

    def another_epsilon(model: onnx.ModelProto) -> None:
        for node in model.graph.node:
            for entry in (entry for entry in node.attribute if entry.name == "epsilon"):
                entry.f = 0.1

    def another_scale(model: onnx.ModelProto) -> None:
        change(weight(model, "layers.1", "o_proj", "scale"), np.negative)

    def another_two(model: onnx.ModelProto) -> None:
        another_scale(model)
        change(weight(model, "layers.0", "down_proj", "scale"), np.negative)

    package, epsilon = export("llama-genai-0.14-int4"), "has 'epsilon' 0.1, config.json 1e-06"
    scales = ((another_scale, 1, "% of its numbers"), (another_two, 2, "% of its numbers"))
    for edit, expected, what in ((None, 0, ""), (another_epsilon, 5, epsilon), *scales):
        path = edited(package.path, tmp_path / f"{expected}", edit) if edit else package.path
        config = EvaluationConfig.parse({"tasks": ["a"], "model": {"path": str(path)}, "max_length": 16})
        problems = check_model(config, against=str(package.hf)).problems
        named = [problem for problem in problems if problem.startswith("damaged: ")]
        assert len(named) == expected
        assert all(what in problem for problem in named)
        others = [problem for problem in problems if problem not in named]
        assert ["differs from" in problem for problem in others] == [True] * (edit is another_epsilon)


@pytest.mark.parametrize(("moves", "codes"), [("neurons of a layer", []), ("inputs alone", ["damaged"] * 2)])
def test_neurons_in_another_order_are_no_damage(moves: str, codes: list[str], tmp_path: Path) -> None:
    """At 8 bits random texts are as near as without the move, and reach all products."""

    def move(model: onnx.ModelProto) -> None:
        for part in ("gate_proj", "up_proj") if moves == "neurons of a layer" else ():
            change(weight(model, "layers.1", part), lambda values: values[:, ::-1])
        change(weight(model, "layers.1", "down_proj"), lambda values: values[::-1])
        if moves == "inputs alone":
            change(weight(model, "layers.1", "o_proj"), lambda values: values[::-1])
        model.CopyFrom(to_nearest(copy.deepcopy(model), 8))

    path = edited(genai_export("llama"), tmp_path / "model", move)
    config = EvaluationConfig.parse({"tasks": ["a"], "model": {"path": str(path)}, "max_length": 64})
    found = check_model(config, against=str(hf_model("llama")))
    assert ([error.code for error in found.differences], found.is_undecided) == (codes, True)


def test_a_cache_that_whole_texts_do_not_show_is_a_problem(tmp_path: Path) -> None:
    def doubled(model: onnx.ModelProto) -> None:
        for node in [*model.graph.node]:
            for index, name in enumerate(node.output):
                if name.startswith("present."):
                    node.output[index] = f"{name}/right"
                    model.graph.node.append(onnx.helper.make_node("Add", [f"{name}/right"] * 2, [name]))

    path, hf = genai_export("llama"), hf_model("llama")
    found, good = held(edited(path, tmp_path / "model", doubled), hf), held(path, hf)
    assert (found.is_equal, good.is_equal, good.parts) == (True, True, "")
    assert found.parts
    config = EvaluationConfig.parse({"tasks": ["a"], "model": {"path": str(tmp_path / "model")}, "max_length": 64})
    checked = check_model(config, against=str(hf))
    assert (checked.status, [one.code for one in checked.differences], checked.errors) == ("loss", ["damaged"], [])


def test_other_vocabulary_is_refused_by_name(tmp_path: Path) -> None:
    hf = Path(shutil.copytree(hf_model("llama"), tmp_path / "hf"))
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps({**config, "vocab_size": 1000}))
    arrays = load_file(hf / "model.safetensors")
    cut = {name: array[:1000] if len(array) == 1024 else array for name, array in arrays.items()}
    save_file(cut, hf / "model.safetensors", metadata={"format": "pt"})
    with refused(ModelError, "not_comparable", holds=("1024 tokens", "hf' 1000")):
        held(genai_export("llama"), hf)


def test_what_is_no_checkpoint_or_no_plain_decoder_is_refused() -> None:
    with refused(ConfigError, "unsupported", holds=str(genai_export("llama"))):
        held(genai_export("llama"), genai_export("llama"))
    with refused(ConfigError, "unsupported", holds="'transformers'"):
        held(hf_model("llama"), hf_model("llama"))
    with refused(ConfigError, "unsupported", holds="'genai'"):
        held(genai_export("llama"), hf_model("llama"), engine={"runtime": "genai"})
    package = export("whisper-genai-0.18")
    with refused(ModelError, "unsupported", holds="decoder.onnx"):
        held(package.path, package.hf)


@pytest.mark.exporters
@pytest.mark.parametrize("name", ["qwen2_5_vl-mobius", "gemma4_vl-mobius"])
def test_multimodal_package_is_compared_in_its_text(name: str) -> None:
    """Without any token of pictures, sounds and videos: transformers take those of Gemma 4 for padding."""
    package = export(name)
    found = held(package.path, package.hf)
    assert found.is_equal
    assert found.nats < 1e-4


def test_window_that_is_missing_is_out_of_reach_of_short_texts_and_else_the_commands_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, hf = edited(genai_export("gemma3_text"), tmp_path / "model", without_windows), str(hf_model("gemma3_text"))
    found = held(path, hf_model("gemma3_text"), max_length=WINDOW + 1)
    assert found.is_equal
    assert found.unseen == {"sliding_window": WINDOW}
    assert f"'sliding_window' of {WINDOW}" in found.sentence()
    capsys.readouterr()
    assert main(["check", str(genai_export("gemma3_text")), "--against", hf, "--max-length", "64"]) == 0
    good = capsys.readouterr()
    assert "equal" in good.out
    assert good.err == ""
    assert main(["check", str(path), "--against", hf, "--max-length", "64"]) == 1
    lost = capsys.readouterr()
    assert tells(lost.out, "17 tokens sliding 16")
    assert lost.err == ""
    mistakes = [("recipe.json", hf), (str(path), str(tmp_path / "nothing")), (str(path), str(path))]
    assert [main(["check", model, "--against", other]) for model, other in mistakes] == [2] * 3


def test_checkpoint_without_a_tokenizer_is_held_against_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own files say where answers end; no text is encoded. In a folder, and by its name on the hub."""
    kept = tmp_path / "models--some--model"
    hf = shutil.copytree(hf_model("llama"), kept / "snapshots" / "abc")
    for file in hf.glob("*token*"):
        file.unlink()
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("abc", encoding="utf-8")
    for name, value in (("HF_HUB_CACHE", str(tmp_path)), ("HF_HUB_OFFLINE", True)):
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    config = EvaluationConfig.parse({"model": {"path": str(genai_export("llama"))}, "tasks": ["a"], "max_length": 16})
    for checkpoint in (str(hf), "some/model"):
        assert check_model(config, against=checkpoint).problems == []


@pytest.mark.parametrize(
    ("tokenizer", "template", "problem", "told"),
    [
        ({}, "{{ a }}", [], False),
        ({}, "{{ b }}", [], True),
        ({}, None, ["chat template"], False),
        ({"post_processor": None}, "{{ a }}", ["special tokens"], False),
        ({"normalizer": {"type": "Lowercase"}}, "{{ a }}", ["the tokenizer"], False),
    ],
)
def test_a_tokenizer_or_chat_template_that_was_lost_is_a_problem(
    tokenizer: Any, template: str | None, problem: Sequence[str], told: bool, tmp_path: Path
) -> None:
    hf, path = (shutil.copytree(made("llama"), tmp_path / made.__name__) for made in (hf_model, genai_export))
    (hf / "chat_template.jinja").write_text("{{ a }}")
    (path / "chat_template.jinja").unlink(missing_ok=True)
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    file = path / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **tokenizer}))
    config = EvaluationConfig.parse({"model": {"path": str(path)}, "tasks": ["a"], "max_length": 16})
    found = check_model(config, against=str(hf))
    assert [part in one for one, part in zip(found.problems, problem, strict=True)] == [True] * len(problem)
    assert ("another text" in found.text()) == told
    is_mistake = "normalizer" in tokenizer  # nothing can be compared
    assert (found.status, len(found.errors)) == ("loss" if problem and not is_mistake else "ok", is_mistake)


def test_a_lost_end_of_answers_is_a_problem(tmp_path: Path) -> None:
    hf, path = shutil.copytree(hf_model("llama"), tmp_path / "hf"), genai_export("llama")
    config = EvaluationConfig.parse({"model": {"path": str(path)}, "tasks": ["a"], "max_length": 16})
    for ends, codes in (([1], []), ([1, 77], ["not_comparable"])):
        (hf / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        errors = check_model(config, against=str(hf)).differences
        assert [error.code for error in errors] == codes
    assert "token 77" in str(errors[0])


def test_graph_without_states_names_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "states_of", lambda *_: {"layers.0": np.ones((4, 8), np.float32)})
    graph = SimpleNamespace(run=lambda tokens: {"logits": np.ones((4, 3), np.float32)})
    monkeypatch.setattr(conversion, "PlainGraph", lambda *_: graph)
    plain: Any = None
    model: Any = None
    with refused(ModelError, "unsupported", holds="hidden state"):
        conversion.first_state_difference(plain, model, [1, 2, 3, 4], 1e-3)


@pytest.mark.parametrize("family", ["qwen3", "phi"])
def test_regrouped_rotary_positions_are_those_of_the_other_kind(family: str) -> None:
    """There and back is nothing, also with norms of queries and keys and where a part of a head is turned."""
    plain = PlainPass(resolve(ModelSettings(model=str(hf_model(family)), device="cpu")))
    text = tuple(range(40, 60))
    before = plain.logprobs(text)
    regroup(plain, "halves")
    assert np.abs(plain.logprobs(text) - before).max() > 0.01
    regroup(plain, "neighbours")
    assert np.abs(plain.logprobs(text) - before).max() == 0

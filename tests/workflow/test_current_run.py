"""`"reference": "input_model"`, and what the caches know of a reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import onnx
import pytest
from olive.model import ModelConfig

from olive_ext.config import EvaluationSettings
from olive_ext.errors import ConfigError, MismatchError
from olive_ext.package_versions import versions
from olive_ext.workflow.current_run import Run, running, settled, with_reference
from olive_ext.workflow.passes import environment, has_own_tasks
from tests.model.tiny import packed, put_genai, put_graph, put_json, put_tokenizer
from tests.refusals import refused


def settings(reference: Any = "input_model", **more: Any) -> EvaluationSettings:
    return EvaluationSettings.parse({"tasks": ["t"], "reference": reference, **more})


@contextmanager
def run_of(kind: str, **config: Any) -> Iterator[None]:
    token = running.set(Run(ModelConfig(type=kind, config=config)))
    yield
    running.reset(token)


def found(written: EvaluationSettings) -> Any:
    assert written.reference is not None
    return settled(written.reference)


def test_hugging_face_model_is_found_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    with run_of("HfModel", model_path="model"):
        reference = found(settings())
    assert (reference.path, reference.kind) == (str(tmp_path / "model"), "hf")


def test_onnx_model_keeps_its_file_and_the_settings_beside_the_path_also_as_the_float_model(tmp_path: Path) -> None:
    with run_of("ONNXModel", model_path=str(tmp_path), onnx_file_name="m.onnx"):
        reference = found(settings({"path": "input_model", "mode": "recorded"}))
        other = with_reference(settings({"path": "owner/name", "float_model": "input_model"})).reference
    assert (reference.kind, reference.onnx_file_name, reference.mode) == ("onnx", "m.onnx", "recorded")
    assert (other.path, other.float_model) == ("owner/name", str(tmp_path / "m.onnx"))


@pytest.mark.parametrize(
    "reference", ["input_model", "input", "input/onnx/a[1].onnx", "other/onnx/a[1].onnx", {"path": "other"}, "float"]
)
@pytest.mark.parametrize("changed", ["a[1].onnx", "weights.data", "tokenizer.json"])
def test_reference_that_a_pass_has_written_over_is_refused_before_and_after_the_evaluation(
    reference: Any, changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model was compared with itself: no difference found. Nothing else in a reference's folder counts."""
    monkeypatch.chdir(tmp_path)
    for folder in ("input", "other"):
        put_graph(put_tokenizer(tmp_path / folder / "onnx") / "a[1].onnx", locations=["weights.data"])
    is_input = reference in ("input_model", "input", "input/onnx/a[1].onnx")
    folder = tmp_path / ("input" if is_input else "other") / "onnx"
    if reference == "float":
        reference = {"path": "owner/name", "float_model": str(folder / "a[1].onnx")}
    written = settings(reference).reference
    model = ModelConfig(
        type="ONNXModel", config={"model_path": str(tmp_path / "input"), "onnx_file_name": "onnx/a[1].onnx"}
    )
    (run := Run(model)).watch([written])
    (folder / "report.json").write_text("a report may lie here, too")
    put_graph(folder / "other.onnx")
    with run.unchanged(written):
        pass
    with refused(MismatchError, "contradiction", "reference", written.path, holds=changed), run.unchanged(written):
        (folder / changed).write_bytes(b"another model")
    with refused(MismatchError, "contradiction", "reference", written.path, holds=changed), run.unchanged(written):
        raise AssertionError
    with run.unchanged(None):
        pass


def graph(path: Path, operator: str) -> ModelConfig:
    node, output = onnx.helper.make_node(operator, ["x"], ["y"]), onnx.helper.make_empty_tensor_value_info("y")
    path.parent.mkdir()
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([node], "g", [], [output])), path)
    return ModelConfig(type="ONNXModel", config={"model_path": str(path.parent), "onnx_file_name": path.name})


def test_float_model_at_hand_is_the_last_that_is_not_quantized(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = ModelConfig(type="HfModel", config={"model_path": "owner/name"})
    converted, fused = (graph(tmp_path / name / "model.onnx", "Relu") for name in ("converted", "fused"))
    quantized = graph(tmp_path / "int4" / "model.onnx", "MatMulNBits")
    lineages: Any = {"fused": (checkpoint, converted, fused), "int4": (checkpoint, converted, fused, quantized)}
    run = Run(checkpoint, lineages={**lineages, "direct": (checkpoint, quantized)})
    written = settings({"path": "owner/name", "float_model": "auto"})
    expected = {"": None, "direct": None, "int4": str(tmp_path / "fused" / "model.onnx")}
    token = running.set(run)
    try:
        for run.model_id, path in {**expected, "fused": expected["int4"]}.items():
            with caplog.at_level("WARNING", "olive"):
                caplog.clear()
                reference = with_reference(written).reference
            assert reference.float_model == path
            assert ("'export'" in caplog.text) == (run.model_id == "direct")
    finally:
        running.reset(token)
    with refused(ConfigError, "contradiction", "reference.float_model", "auto"):
        with_reference(written)


def test_word_that_olive_took_for_a_folder_is_still_it_and_none_outside_of_a_workflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other references are left alone."""
    monkeypatch.chdir(tmp_path)
    reference = settings({"path": "owner/name", "float_model": str(tmp_path / "input_model")}).reference
    assert reference.float_model == "input_model"
    for written in (settings("owner/name"), EvaluationSettings.parse({"tasks": ["t"]})):
        assert with_reference(written) is written
    with refused(ConfigError, "contradiction", "reference", "input_model"):
        with_reference(settings())


@pytest.mark.parametrize(
    ("kind", "config", "holds"),
    [
        ("PyTorchModel", {"model_path": "m"}, ()),
        ("HfModel", {"model_path": "m", "adapter_path": "a"}, "input_model.adapter_path"),
        ("HfModel", {"model_path": "m", "load_kwargs": {"dtype": "bfloat16"}}, ()),
        ("HfModel", {"model_path": "azureml://x"}, "model_path"),
    ],
)
def test_input_model_that_a_path_does_not_say_is_refused(kind: str, config: dict[str, Any], holds: Any) -> None:
    with run_of(kind, **config), refused(ConfigError, "wrong_value", "reference", "input_model", holds=holds):
        with_reference(settings())


def test_caches_notice_a_changed_reference(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"one")
    with run_of("HfModel", model_path=str(tmp_path)):
        first = environment(settings())
        again = environment(settings({"path": str(tmp_path), "kind": "hf", "mode": "recorded"}))
        deeper = environment(settings({"path": "input_model", "mode": "resident"}))
    weights.write_bytes(b"two")
    with run_of("HfModel", model_path=str(tmp_path)):
        changed = environment(settings())
    assert first == again
    assert len({first, deeper, changed, environment(settings("owner/name"))}) == 4


def test_caches_notice_another_release_of_lm_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = environment(settings(None))
    (tmp_path / "lm_eval-99.dist-info").mkdir()
    (tmp_path / "lm_eval-99.dist-info" / "METADATA").write_text("Name: lm-eval\nVersion: 99\n")
    monkeypatch.syspath_prepend(tmp_path)
    versions.cache_clear()
    try:
        assert environment(settings(None)) != before
    finally:
        versions.cache_clear()


def test_caches_notice_a_changed_float_model(tmp_path: Path) -> None:
    put_graph(tmp_path / "model" / "model.onnx")
    put_genai(put_tokenizer(tmp_path / "model"))
    written = settings({"path": "owner/name", "float_model": str(tmp_path / "model")})
    before = environment(written)
    put_json(tmp_path / "model" / "generation_config.json", {})
    assert environment(written) != before


def test_caches_notice_a_change_of_any_variant_that_a_provider_may_choose(tmp_path: Path) -> None:
    root = packed(tmp_path / "package", gpu=put_variant(tmp_path / "one"), npu=put_variant(tmp_path / "two"))
    manifest = (root / "manifest.json").read_text(encoding="utf-8")
    (root / "manifest.json").write_text(manifest.replace("CPUEx", "CUDAEx", 1).replace("CPUEx", "QNNEx"))
    named = ({}, {"execution_provider": "cuda"}, {"variant": "gpu"}, {"variant": "npu"})
    before: list[str] = []
    after: list[str] = []
    for found in (before, after):
        found += [environment(settings({"path": str(root), **one})) for one in named]
        put_graph(root / "gpu" / "model.onnx", "other_logits")
    assert [one == other for one, other in zip(before, after, strict=True)] == [False, False, False, True]


def put_variant(folder: Path) -> Path:
    put_graph(folder / "model.onnx")
    put_genai(put_tokenizer(folder))
    return folder


def test_caches_notice_the_day_of_a_chat_template() -> None:
    day = date(2026, 1, 1)
    assert environment(settings(None)) == environment(settings(None), day)
    today = environment(settings(None, apply_chat_template=True))
    assert environment(settings(None, apply_chat_template=True), day) != today


@pytest.mark.parametrize(
    ("keys", "are_own"),
    [
        ({"tasks": ["arc_easy", "size_on_disk"], "include_path": None}, False),
        ({"tasks": ["arc_easy"], "include_path": "tasks"}, True),
        ({"tasks": ["arc_easy", "tasks/t.yaml"]}, True),
        ({"tasks": [{"task": "inline"}]}, True),
        ({}, False),
    ],
)
def test_tasks_whose_files_may_be_the_users_are_told(keys: dict[str, Any], are_own: bool) -> None:
    assert has_own_tasks(keys) == are_own

"""A model package's variants: by name, by the provider asked for, its components by what they do, its shared assets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from olive_ext.cli import main
from olive_ext.config import ModelSettings
from olive_ext.errors import DamagedError, MismatchError, ModelError, NotFoundError
from olive_ext.model import resolve
from olive_ext.model.files.locate import locate, model_kind
from tests.exports.quickstart import TASKS, exported, quantized
from tests.model.tiny import DIGEST, packed, put_genai, put_graph, put_json, put_tokenizer
from tests.refusals import refused

CPU, CUDA, QNN = "CPUExecutionProvider", "CUDAExecutionProvider", "QNNExecutionProvider"


def put_package(root: Path, variants: dict[str, Any], *, is_inline: bool = False, **manifest: Any) -> Path:
    """One component, as Olive writes it: a folder with component.json, or in the manifest itself."""
    component = root if is_inline else root / "models" / "model"
    for name, keys in variants.items():
        folder = component / keys.get("variant_directory", name)
        put_graph(folder / "model.onnx")
        put_genai(folder, tokenizer_dir=f"sha256:{DIGEST}")
    put_tokenizer(root / "shared_assets" / f"sha256-{DIGEST}")
    body = {"variants": variants}
    if not is_inline:
        put_json(component / "component.json", {"component_name": "model", **body})
    put_json(
        root / "manifest.json",
        {"schema_version": "1.0", "components": {"model": body if is_inline else "models/model"}, **manifest},
    )
    return root


BOTH = {"cpu": {"ep": CPU}, "gpu": {"ep": CUDA, "device": "gpu"}}


@pytest.mark.parametrize("is_inline", [False, True])
@pytest.mark.parametrize(
    ("variants", "asked", "found"),
    [
        (BOTH, {}, "cpu"),
        (BOTH, {"provider": CUDA}, "gpu"),
        (BOTH, {"variant": "gpu"}, "gpu"),
        (BOTH, {"variant": "gpu", "provider": CPU}, "gpu"),
        ({"only": {"ep": QNN}}, {}, "only"),
        ({"any": {}, "gpu": {"ep": CUDA}}, {"provider": QNN}, "any"),
        ({"a": {"ep": CPU, "variant_directory": "b"}}, {}, "b"),
    ],
)
def test_variant_is_found(variants: Any, asked: Any, found: str, is_inline: bool, tmp_path: Path) -> None:
    root = put_package(tmp_path / "m.ortpackage", variants, is_inline=is_inline)
    files = locate(root, **asked)
    assert (files.directory.name, files.decoder.name) == (found, "model.onnx")
    assert Path(files.tokenizer) == root / "shared_assets" / f"sha256-{DIGEST}"
    assert all(name in files.origins["variant"] for name in variants)
    assert model_kind(root) == "onnx"


@pytest.mark.parametrize(
    ("variants", "asked", "kind", "code", "holds"),
    [
        (BOTH, {"variant": "npu"}, NotFoundError, "not_found", f"cpu ({CPU}), gpu ({CUDA})"),
        (BOTH, {"provider": QNN}, NotFoundError, "not_found", QNN),
        ({"a": {"ep": CPU}, "b": {"ep": CPU}}, {}, ModelError, "missing", "a ("),
        ({"a": {"ep": CUDA}, "b": {"ep": QNN}}, {}, NotFoundError, "not_found", CPU),
    ],
)
def test_others_are_named(variants: Any, asked: Any, kind: Any, code: str, holds: str, tmp_path: Path) -> None:
    with refused(kind, code, "variant", holds=holds):
        locate(put_package(tmp_path, variants), **asked)


@pytest.mark.parametrize(
    ("change", "kind", "code"),
    [
        ({"schema_version": "2.0"}, ModelError, "unsupported"),
        ({"components": {}}, DamagedError, "damaged"),
        ({"components": {"model": "../model"}}, ModelError, "untrusted"),
        ({"components": {"model": {"variants": {"x": {"variant_directory": "/etc"}}}}}, ModelError, "untrusted"),
        ({"components": {"model": {"variants": {"gone": {}}}}}, NotFoundError, "not_found"),
        ({"components": {"model": {"variants": [1]}}}, DamagedError, "damaged"),
        ({"shared_assets": {f"sha256:{DIGEST}": "../elsewhere"}}, ModelError, "untrusted"),
        ({"shared_assets": {f"sha256:{DIGEST}": "elsewhere"}}, NotFoundError, "not_found"),
    ],
)
def test_package_that_is_none_is_refused(change: Any, kind: Any, code: str, tmp_path: Path) -> None:
    with refused(kind, code):
        locate(put_package(tmp_path, BOTH, **change))


def test_variant_of_what_is_no_package_is_refused(tmp_path: Path) -> None:
    put_graph(tmp_path / "model.onnx")
    put_genai(put_tokenizer(tmp_path))
    put_json(tmp_path / "manifest.json", {"unrelated": True})
    with refused(MismatchError, "contradiction", "variant", "cpu"):
        locate(tmp_path, variant="cpu")
    assert locate(tmp_path).directory == tmp_path


def test_components_are_graphs_by_what_they_do(tmp_path: Path) -> None:
    components = {}
    for component, output in {"decoder": "logits", "vision_encoder": "image_features"}.items():
        put_graph(tmp_path / component / "cpu" / "graph.onnx", output)
        components[component] = {
            "variants": {"cpu": {"variant_directory": f"{component}/cpu", "ep": CPU}},
        }
    components["decoder"]["variants"]["cpu"]["executor_info"] = {"ort": {"model_file": "graph.onnx"}}
    put_json(tmp_path / "manifest.json", {"schema_version": 1, "components": components})
    put_tokenizer(tmp_path)
    files = locate(tmp_path)
    assert files.decoder == tmp_path / "decoder" / "cpu" / "graph.onnx"
    assert files.companions["vision"].graph == tmp_path / "vision_encoder" / "cpu" / "graph.onnx"


def test_another_provider_is_another_variant_and_another_variant_another_provider(tmp_path: Path) -> None:
    root = put_package(tmp_path, BOTH)
    model = resolve(ModelSettings.of({"model": root, "execution_provider": "cpu"}))
    assert model.files.directory.name == "cpu"
    assert model.patched({"execution_provider": "cuda"}).files.directory.name == "gpu"
    there = model.settings.elsewhere({"variant": "gpu"})
    assert (there.variant, there.execution_provider) == ("gpu", None)
    assert resolve(there).files.directory.name == "gpu"


@pytest.mark.slow
def test_two_variants_are_two_places(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The quickstart's model twice, and quantized: the same to rounding, and different."""
    root = packed(tmp_path / "m.ortpackage", one=exported(), two=exported(), int4=quantized(4, 32))
    work = ["--tasks", "quickstart_choice", "--include-path", str(TASKS), "--limit", "4"]
    command = ["evaluate", str(root), *work, "--variant", "one", "--against"]
    assert main([*command, "variant=two"]) == 0
    assert "the same to rounding" in capsys.readouterr().out
    assert main([*command, "variant=int4"]) in (1, 3)
    assert "the same to rounding" not in capsys.readouterr().out
    assert main(["check", str(root)]) == 2
    assert f"int4 ({CPU})" in capsys.readouterr().err

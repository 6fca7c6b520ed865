"""Which files a path names: decoder, weights, configuration and tokenizer, each with the rule that found it. A model
package's variants: by name, by the provider asked for, its components by what they do, its shared assets."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from olive_ext.cli import main
from olive_ext.config import ModelSettings
from olive_ext.errors import DamagedError, MismatchError, ModelError, NotFoundError, ProviderError
from olive_ext.model import resolve
from olive_ext.model.files.content import model_digest
from olive_ext.model.files.locate import locate, model_kind
from olive_ext.model.files.model_package import choose, why_missing
from olive_ext.model.providers.resolution import available_providers, resolve_providers
from olive_ext.session.generation_bounds import read_stop_ids
from tests.exports.quickstart import TASKS, exported, quantized
from tests.model.tiny import (
    DIGEST,
    graph,
    in_hf_cache,
    olive_packed,
    packed,
    put_genai,
    put_graph,
    put_json,
    put_tokenizer,
    put_weight,
)
from tests.refusals import refused, tells

Files = Mapping[str, Any]
Row = tuple[Files, dict[str, Any], dict[str, Any]]
"""Files beyond those of `PACKAGE`, arguments of `locate` beyond the package's folder, and what is found or refused."""

LOGITS = "logits"
PACKAGE: Files = {"model.onnx": "logits model.onnx.data", "tokenizer.json": {}}
"""One decoder with external data, a tokenizer, and no configuration."""


def put(root: Path, files: Files) -> Path:
    """Writes graphs, each given as its output and the files of its external data, bytes, and JSON; leaves out what is
    None. ROOT stands for `root`."""
    for name, content in files.items():
        file = root / name
        if isinstance(content, str):
            output, *locations = content.split()
            put_graph(file, output, locations)
        elif content is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            text = content if isinstance(content, bytes) else json.dumps(content).encode()
            file.write_bytes(text.replace(b"ROOT", str(root).encode()))
    return root


def located(root: Path, row: Row) -> dict[str, Any]:
    """Arguments of `locate` for a row, whose files are written."""
    put(root, {**PACKAGE, **row[0]})
    arguments = json.loads(json.dumps({"path": "", **row[1]}).replace("ROOT", str(root)))
    return {**arguments, "path": root / arguments["path"]}


def genai(filename: str | None = "model.onnx", **model: Any) -> Files:
    return {"genai_config.json": {"model": {"decoder": {"filename": filename}, **model}}}


def olive(path: str = "ROOT", name: str | None = None, kind: str = "onnxmodel", **more: Any) -> Files:
    config = {"model_path": path, "onnx_file_name": name, "model_attributes": more}
    return {"model_config.json": {"type": kind, "config": config}}


def pipeline(*stages: dict[str, str]) -> Files:
    written = [{name: {"filename": file} for name, file in part.items()} for part in stages]
    return {"genai_config.json": {"model": {"decoder": {"pipeline": written}}}}


BARE, OTHER, DRAFT = {"tokenizer.json": None}, {"other/tokenizer.json": {}}, {"draft.onnx": LOGITS}
NO_DECODER = {"model.onnx": None, "encoder.onnx": "hidden_states"}
STAGES = {"embed": "embeddings.onnx", "prompt": "layers.onnx", "step": "layers.onnx", "head": "head.onnx"}
PARTS = {"embeddings.onnx": "embeds", "layers.onnx": "hidden layers.data", "head.onnx": LOGITS}
IS_PIPELINE = {"decoder": "embeddings.onnx", "weights": ["layers.onnx", "layers.data", "head.onnx"]} | {
    "pipeline": [*STAGES],
    "by decoder": "the first graph of genai_config.json's model.decoder.pipeline",
}
BELOW = ["decoder/model.onnx", "decoder/b/model.onnx", "decoder/b/c/model.onnx"]
TOKENIZERS = ["owner/name", "ROOT/none", "ROOT/other/tokenizer.json"]
MODEL = {"decoder": "model.onnx"}
FOUND: dict[str, Row] = {
    "a file": (
        {},
        {"path": "model.onnx"},
        MODEL
        | {"directory": ".", "weights": ["model.onnx.data"], "tokenizer": ".", "genai": False}
        | {"by decoder": "the model path", "by genai_config": "none found", "by tokenizer": "beside the model"},
    ),
    "a file with its name": ({}, {"path": "model.onnx", "onnx_file_name": "model.onnx"}, MODEL),
    "the only graph": ({}, {}, {**MODEL, "by decoder": "the only .onnx file"}),
    "one of several": ({"other.onnx": LOGITS}, {"onnx_file_name": "other.onnx"}, {"decoder": "other.onnx"}),
    "one in a folder": ({BELOW[0]: LOGITS}, {"onnx_file_name": BELOW[0]}, {"decoder": BELOW[0]}),
    "the only graph that returns logits": (
        {**NO_DECODER, "decoder.onnx": "logits_Q4", "broken.onnx": b"nonsense"},
        {},
        {"decoder": "decoder.onnx"}
        | {"by decoder": "the only one of broken.onnx, decoder.onnx, encoder.onnx that returns logits"},
    ),
    "graphs in folders": (
        {"model.onnx": None, BELOW[0]: LOGITS, "embedding/model.onnx": "inputs_embeds"},
        {},
        {"decoder": BELOW[0], "by tokenizer": "1 folder above the model"},
    ),
    "a name in genai_config.json": (
        genai("text.onnx", vocab_size=7) | {"text.onnx": LOGITS},
        {},
        {"decoder": "text.onnx", "by decoder": "genai_config.json's model.decoder.filename", "genai": True}
        | {"by genai_config": "in the folder asked for"},
    ),
    **{
        f"genai_config.json above {file}, by {how}": (
            genai(file) | {file: LOGITS},
            {"path": file} if how == "path" else {"path": "decoder", "onnx_file_name": file.removeprefix("decoder/")},
            {"directory": ".", "tokenizer": ".", "by genai_config": f"{level} above the model"},
        )
        for file, level in zip(BELOW, ("1 folder", "2 folders", "3 folders"), strict=True)
        for how in ("path", "name")
    },
    "another model's genai_config.json": (
        genai() | {"quantized/model.onnx": LOGITS},
        {"path": "quantized"},
        {"directory": "quantized", "genai": False},
    ),
    "a name where that of genai_config.json is missing": (
        genai("gone.onnx"),
        {"onnx_file_name": "model.onnx"},
        {**MODEL, "genai": True},
    ),
    "a pipeline in one object": (PARTS | pipeline(STAGES), {}, IS_PIPELINE),
    "a pipeline in several": (PARTS | pipeline(*({one: STAGES[one]} for one in STAGES)), {}, IS_PIPELINE),
    "a graph beside a pipeline": (
        {"a.onnx": "embeds"} | pipeline({"a": "a.onnx", "b": "gone.onnx"}),
        {"onnx_file_name": "model.onnx"},
        {"pipeline": []},
    ),
    "a pipeline in a folder": (
        {"parts/a.onnx": "embeds", "parts/b.onnx": LOGITS} | pipeline({"a": "parts/a.onnx", "b": "parts/b.onnx"}),
        {"path": "parts/a.onnx"},
        {"directory": ".", "pipeline": ["a", "b"]},
    ),
    "Olive's record": (
        DRAFT | olive(name="model.onnx"),
        {},
        {**MODEL, "by decoder": "Olive's model_config.json"},
    ),
    "Olive's record of a moved folder": (DRAFT | olive("/where/it/was", "model.onnx"), {}, MODEL),
    "Olive's record of a moved file": (DRAFT | olive("/where/it/was/draft.onnx"), {}, {"decoder": "draft.onnx"}),
    "Olive's record of another place": (
        {f"out/{name}": content for name, content in olive(name="model.onnx").items()},
        {"path": "out"},
        MODEL,
    ),
    "Olive's record and a missing decoder": (genai("gone.onnx") | olive(name="model.onnx"), {}, MODEL),
    "Olive's record of a composite": ({"encoder.onnx": "states"} | olive(kind="compositemodel"), {}, MODEL),
    "another program's record": ({"model_config.json": {"type": 3}}, {}, MODEL),
    **{
        f"a tokenizer with {mark}": (BARE | {mark: b""}, {}, {"tokenizer": "."})
        for mark in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    },
    "a folder by the user": (OTHER, {"tokenizer": "ROOT/other"}, {"tokenizer": "other"}),
    "a file by the user": (OTHER, {"tokenizer": "ROOT/other/tokenizer.json"}, {"tokenizer": "other"}),
    "a hub name by the user": ({}, {"tokenizer": "owner/name"}, {"tokenizer": "owner/name"}),
    "a short hub name by the user": (
        {},
        {"tokenizer": "gpt2"},
        {"tokenizer": "gpt2", "by tokenizer": "the setting 'tokenizer' (a hub name)"},
    ),
    "tokenizer_dir": (genai(tokenizer_dir="tok") | {"tok/tokenizer.json": {}}, {}, {"tokenizer": "tok"}),
    "a candidate after the model's own": (
        OTHER,
        {"extra_tokenizer_candidates": ["ROOT/other"]},
        {"tokenizer": "."},
    ),
    "a candidate that is a folder": (
        BARE | OTHER,
        {"extra_tokenizer_candidates": TOKENIZERS},
        {"tokenizer": "other", "by tokenizer": "an additional candidate"},
    ),
    "Olive's file": (BARE | OTHER | olive(additional_files=TOKENIZERS[2:]), {}, {"tokenizer": "other"}),
    "Olive's folder": (
        BARE | OTHER | olive(_name_or_path="ROOT/other"),
        {"path": "model.onnx"},
        {"tokenizer": "other"},
    ),
    "Olive's hub name": (
        BARE | olive(_name_or_path="owner/name"),
        {},
        {"tokenizer": "owner/name", "by tokenizer": "_name_or_path in Olive's model_config.json (a hub name)"},
    ),
}


@pytest.mark.parametrize("row", FOUND.values(), ids=FOUND)
def test_files_are_found_by_the_rule_that_is_reported(row: Row, tmp_path: Path) -> None:
    files = locate(**located(tmp_path, row))

    def relative(path: str | Path) -> str:
        return str(Path(path).relative_to(tmp_path)) if str(path).startswith(str(tmp_path)) else str(path)

    found = {f"by {name}": rule for name, rule in files.origins.items()} | {"genai": bool(files.genai_config)}
    found |= {name: relative(getattr(files, name)) for name in ("decoder", "directory", "tokenizer")}
    found |= {"weights": [*map(relative, files.weights)], "pipeline": [*files.pipeline]}
    assert {name: found[name] for name in row[2]} == row[2]


def refusal(code: str, field: str = "", value: Any = ..., holds: str = "") -> dict[str, Any]:
    return {"code": code, "field": field, "value": value, "holds": holds}


UNSET = refusal("missing", "onnx_file_name")
REFUSED: dict[str, Row] = {
    "several decoders": (
        {"model_q4.onnx": LOGITS, "encoder.onnx": "states"},
        {},
        {**UNSET, "field": "", "holds": "onnx_file_name model.onnx model_q4.onnx"},
    ),
    "no decoder": ({**NO_DECODER, "b.onnx": "embeds"}, {}, refusal("unsupported", holds="encoder.onnx b.onnx")),
    "a missing decoder": (genai("gone.onnx"), {}, {**UNSET, "holds": "gone.onnx"}),
    "a decoder without a file": (genai(None), {}, UNSET),
    "an embedder": (
        {"genai_config.json": {"model": {"type": "embedder"}}},
        {},
        refusal("unsupported", holds="embedder"),
    ),
    "a missing stage": (pipeline({"a": "a.onnx"}), {}, {**UNSET, "holds": "a.onnx"}),
    "a stage without a file": (
        {"genai_config.json": {"model": {"decoder": {"pipeline": [{"a": {"outputs": []}}]}}}},
        {},
        UNSET,
    ),
    "a stage beside a missing one": (
        {"a.onnx": "embeds"} | pipeline({"a": "a.onnx", "b": "gone.onnx"}),
        {"onnx_file_name": "a.onnx"},
        refusal("unsupported", holds="gone.onnx"),
    ),
    "half of a file": ({"genai_config.json": b"{"}, {}, refusal("damaged", holds="genai_config.json JSON")),
    "a list": ({"genai_config.json": []}, {}, refusal("damaged", holds="genai_config.json")),
    "no path": ({}, {"path": "gone"}, refusal("not_found", "model", holds="gone")),
    "an empty folder": ({}, {"path": "0"}, refusal("not_found")),
    "a folder of others": (
        {f"x/{name}": b"" for name in ("0/x", *"abcdefghij")},
        {"path": "x"},
        refusal("not_found", holds="0/ 3"),
    ),
    "another file": ({"w.safetensors": b""}, {"path": "w.safetensors"}, refusal("unsupported", holds="w.safetensors")),
    "a name against the path": (
        {},
        {"path": "model.onnx", "onnx_file_name": "other.onnx"},
        refusal("contradiction", "onnx_file_name", "other.onnx"),
    ),
    "a name that is not there": (
        {},
        {"onnx_file_name": "other.onnx"},
        refusal("not_found", "onnx_file_name", "other.onnx", "model.onnx"),
    ),
    "no graph": ({"model.onnx": b"nonsense"}, {}, refusal("damaged", holds="model.onnx")),
    "an empty graph": ({"model.onnx": b""}, {}, refusal("damaged", holds="model.onnx")),
    "an empty tokenizer": ({"0/x": b""}, {"tokenizer": "ROOT/0"}, refusal("not_found", "tokenizer")),
    "a missing tokenizer": ({}, {"tokenizer": "ROOT/gone"}, refusal("not_found", "tokenizer")),
    "no tokenizer": (
        BARE | {"x/model.onnx": LOGITS},
        {"path": "x", "extra_tokenizer_candidates": ["/not/there"]},
        refusal("not_found", "tokenizer", holds="ROOT/x' ROOT' '/not/there' set 'tokenizer'"),
    ),
}


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_found_is_refused(row: Row, tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    arguments = located(tmp_path, row)
    holds = tuple(row[2]["holds"].replace("ROOT", str(tmp_path)).split())
    with refused(ModelError, **{**row[2], "holds": holds}):
        locate(**arguments)


def test_relative_path_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(put(tmp_path, PACKAGE))
    assert locate("model.onnx").decoder == tmp_path / "model.onnx"
    assert locate(".").tokenizer == str(tmp_path)


def test_link_to_a_lone_file_finds_data_and_tokenizer_beside_that(tmp_path: Path) -> None:
    package, link = put(tmp_path / "pkg", PACKAGE), tmp_path / "links" / "mine.onnx"
    link.parent.mkdir()
    link.symlink_to(package / "model.onnx")
    files = locate(link)
    assert (files.decoder.name, files.tokenizer) == ("mine.onnx", str(package))
    assert files.weights == (package / "model.onnx.data",)
    assert "link" in files.origins["tokenizer"]
    put(link.parent, {"tokenizer.json": {}})
    assert locate(link).tokenizer == str(link.parent)
    (package / "model.onnx").unlink()
    with refused(ModelError, "not_found", "model"):
        locate(link)


def test_hub_cache_keeps_the_names_of_the_links(tmp_path: Path) -> None:
    weight = put_weight(tmp_path / "w").read_bytes()
    snapshot = in_hf_cache(
        tmp_path / "cache",
        {
            "decoder/model.onnx": graph(locations=["model.onnx.data"]).SerializeToString(),
            "decoder/model.onnx.data": weight,
            "genai_config.json": b'{"model": {"decoder": {"filename": "decoder/model.onnx"}}}',
            "tokenizer.json": b"{}",
        },
    )
    for path in (snapshot, snapshot / "decoder", snapshot / "decoder" / "model.onnx"):
        files = locate(path)
        assert files.decoder == snapshot / "decoder" / "model.onnx"
        assert files.weights == (snapshot / "decoder" / "model.onnx.data",)
        assert (files.directory, files.tokenizer) == (snapshot, str(snapshot))


HF = {"config.json": {}, "model.safetensors": b""}
KINDS: dict[str, tuple[Files, str, str]] = {
    "a package": (PACKAGE, "", "onnx"),
    "a graph": (PACKAGE, "model.onnx", "onnx"),
    "a graph in a folder": ({"onnx/model.onnx": LOGITS}, "", "onnx"),
    "genai_config.json": (genai("deep/er/model.onnx"), "", "onnx"),
    "Olive's record": (olive("/x", "model.onnx"), "", "onnx"),
    "weights": (HF, "", "hf"),
    "weights above a graph": (HF | {"onnx/model.onnx": LOGITS}, "", "hf"),
    "weights beside a graph": (HF | {"model.onnx": LOGITS}, "", "onnx"),
}


@pytest.mark.parametrize("name", KINDS)
def test_kind_is_that_of_the_files(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files, path, kind = KINDS[name]
    assert model_kind(put(tmp_path, files) / path) == kind
    is_told = any("onnx/model.onnx" in line for line in caplog.messages)
    assert is_told is (name == "weights above a graph")


def test_kind_of_a_hub_name_is_hf_and_of_neither_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert model_kind("owner/name-0.5B") == "hf"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    for mistyped in ("out/model", "gone", "./owner/name", "a/b/c", "owner/model.onnx", str(tmp_path / "gone")):
        with refused(ModelError, "not_found", "model", mistyped):
            model_kind(mistyped)
    put(tmp_path, {"config.json": {}})
    with refused(ModelError, "unsupported", holds=("ONNX", "config.json")):
        model_kind(tmp_path)
    put(tmp_path, olive("/out/model", kind="hfmodel"))
    with refused(ModelError, "unsupported", holds=("/out/model", "model_config.json")):
        model_kind(tmp_path)
    with refused(ModelError, "unsupported", holds=".onnx"):
        model_kind(tmp_path / "config.json")


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


def olive_package(root: Path, sections: Mapping[str, Any] | None = None, **eos: int) -> Path:
    """Variants by `olive generate-model-package` of the installed Olive, each with its own end token, and more
    `sections` of genai_config.json."""
    for name, token in eos.items():
        put_graph(root / name / "model.onnx", "logits", ["model.onnx.data"])
        put_genai(put_tokenizer(root / name), eos_token_id=token, vocab_size=8, **(sections or {}))
    return olive_packed(root, *(root / name for name in eos))


def test_package_of_olive_s_own_command_has_each_variant_s_configuration(tmp_path: Path) -> None:
    root = olive_package(tmp_path, one=3, two=5)
    with refused(ModelError, "missing", "variant", holds=("one", "two")):
        locate(root)
    found = {name: locate(root, variant=name) for name in ("one", "two")}
    assert {name: files.decoder.parent.name for name, files in found.items()} == {"one": "one", "two": "two"}
    models = [files.genai_config["model"] for files in found.values()]
    assert [(model["eos_token_id"], model["decoder"]["filename"]) for model in models] == [
        (3, "model.onnx"),
        (5, "model.onnx"),
    ]
    assert {Path(files.tokenizer) for files in found.values()} == {root / "configs"}
    assert read_stop_ids(found["two"], None).file == "genai_config_overlay.json", "which file to repair"
    before = model_digest(found["one"])
    digests = {before}
    for file in ("configs/genai_config.json", "models/decoder/one/genai_config_overlay.json"):
        put_json(root / file, {**json.loads((root / file).read_text()), "search": {"num_beams": 2}})
        digests.add(model_digest(locate(root, variant="one")))
    assert len(digests) == 3
    put_graph(root / "models/decoder/one/model_ctx.onnx")  # which the command copies, too
    assert locate(root, variant="one").decoder.name == "model.onnx"
    put_json(root / "models/decoder/one/genai_config_overlay.json", {"model": {"eos_token_id": "x"}})
    with refused(DamagedError, "damaged", holds=("genai_config_overlay.json", "eos_token_id", "'x'")):
        locate(root, variant="one")
    (root / "models/decoder/two/genai_config_overlay.json").unlink()
    assert locate(root, variant="two").genai_config["model"] == {"decoder": {"component": "decoder"}, "vocab_size": 8}
    put_json(root / "config.json", {})  # as the Hub counts, and a graph: still a package
    put_graph(root / "model.onnx")
    assert locate(root, variant="two").variant == "two"
    (root / "configs").rename(tmp_path / "elsewhere")
    (root / "configs").symlink_to(tmp_path / "elsewhere")
    with refused(ModelError, "untrusted", holds="configs"):
        locate(root, variant="two")
    put_json(root / "manifest.json", {"schema_version": 1, "components": [{}]})
    with refused(DamagedError, "damaged", holds=("manifest.json", "'components' = [{}]")):
        locate(root)
    (root / "manifest.json").write_text("null")
    with refused(DamagedError, "damaged", holds="null"):
        choose(root, None, None)


def test_encoder_of_olive_s_package_has_the_graph_and_the_provider_of_its_own_overlay(tmp_path: Path) -> None:
    options = {"session_options": {"provider_options": [{"cuda": {}}]}}
    put_graph(tmp_path / "x" / "see.onnx", "image_features")
    put_graph(tmp_path / "x" / "see_ctx.onnx", "image_features")  # which the command copies beside it
    root = olive_package(tmp_path, {"vision": {"filename": "see.onnx", **options}}, x=3)
    files = locate(root)
    assert files.companions["vision"].graph == root / "models" / "vision" / "x" / "see.onnx"
    assert files.genai_config["model"]["vision"]["session_options"] == options["session_options"]
    providers = resolve_providers(genai_config=files.genai_config, section="vision", available=[CUDA])
    assert [one.name for one in providers] == [CUDA, CPU]
    assert files.genai_config["model"]["decoder"]["filename"] == "model.onnx"


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
        ({"e\u0301": {"variant_directory": "x"}, "b": {}}, {"variant": "\u00e9"}, "x"),  # typed as on another system
        ({"e\u0301": {"variant_directory": "x"}, "\u00e9": {"variant_directory": "y"}}, {"variant": "\u00e9"}, "y"),
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
        (BOTH, {"provider": "FooExecutionProvider"}, NotFoundError, "not_found", "FooExecutionProvider"),
        (BOTH, {"variant": "npu"}, NotFoundError, "not_found", f"cpu ({CPU}), gpu ({CUDA})"),
        (BOTH, {"provider": QNN}, NotFoundError, "not_found", QNN),
        ({"a": {"ep": CPU}, "b": {"ep": CPU}}, {}, ModelError, "missing", "a ("),
        ({"a": {"ep": CUDA}, "b": {"ep": QNN}}, {}, NotFoundError, "not_found", CPU),
    ],
)
def test_others_are_named(variants: Any, asked: Any, kind: Any, code: str, holds: str, tmp_path: Path) -> None:
    with refused(kind, code, "variant", holds=holds):
        locate(put_package(tmp_path, variants), **asked)


def test_mistyped_provider_is_named_before_a_variant(tmp_path: Path) -> None:
    root = put_package(tmp_path, BOTH)
    for written in ("cuad", "CUADExecutionProvider"):
        with refused(ModelError, "unknown_name", "execution_provider", written, holds=("'cuda'", f"gpu ({CUDA})")):
            locate(root, provider=written)
    with refused(ModelError, "unknown_name", "reference.execution_provider", "cuad"):
        resolve(ModelSettings.of({"model": root, "execution_provider": "cuad"}), key="reference")
    assert locate(root, variant="gpu", provider="cuad").variant == "gpu"


def test_separators_of_windows_are_read(tmp_path: Path) -> None:
    root = put_package(
        tmp_path, {"x": {"variant_directory": "a\\b", "executor_info": {"ort": {"model_file": "c\\d.onnx"}}}}
    )
    folder = root / "models" / "model"
    (folder / "a\\b").rename(folder / "a")
    put_graph(folder / "a" / "b" / "c" / "d.onnx")
    put_genai(folder / "a" / "b", "c\\d.onnx", tokenizer_dir=f"sha256:{DIGEST}")
    put_json(root / "manifest.json", {"schema_version": 1, "components": {"model": "models\\model"}})
    assert locate(root).decoder == locate(folder / "a" / "b").decoder == folder / "a" / "b" / "c" / "d.onnx"
    with refused(ModelError, "untrusted"):
        locate(put_package(tmp_path / "other", {"x": {"variant_directory": "..\\x"}}))


GRAPH = {"variants": {"cpu": {"variant_directory": "model", "ep": CPU}}}


def named(file: Any) -> dict[str, Any]:
    """A package whose graph has this name."""
    ort = {"executor_info": {"ort": {"model_file": file}}}
    return {"components": {"model": {"variants": {"x": {"variant_directory": "shared_assets", **ort}}}}}


@pytest.mark.parametrize(
    ("change", "kind", "code"),
    [
        ({"schema_version": "2.0"}, ModelError, "unsupported"),
        ({"components": {}}, DamagedError, "damaged"),
        ({"components": {"model": "../model"}}, ModelError, "untrusted"),
        ({"components": {"model": "gone"}}, NotFoundError, "not_found"),
        ({"components": {"model": {"variants": {"x": {"variant_directory": "x" * 300}}}}}, DamagedError, "damaged"),
        ({"components": {"model": {"variants": {"x": {"variant_directory": "/etc"}}}}}, ModelError, "untrusted"),
        ({"components": {"model": {"variants": {"gone": {}}}}}, NotFoundError, "not_found"),
        ({"components": {"model": {"variants": [1]}}}, DamagedError, "damaged"),
        ({"components": {"model": {"variants": {"": {"variant_directory": "model"}}}}}, DamagedError, "damaged"),
        ({"components": {"model": {"variants": {"": {}}}}}, DamagedError, "damaged"),
        ({"components": {"model": {"variants": {"x": {"variant_directory": "."}}}}}, DamagedError, "damaged"),
        ({"components": {"model": {"variants": GRAPH["variants"] | {"y": None}}}}, DamagedError, "damaged"),
        ({"components": {"model": GRAPH | {"schema_version": "2.0"}}}, ModelError, "unsupported"),
        *(
            ({"components": {"model": {"variants": {"x": {"ep": ep}}}}}, DamagedError, "damaged")
            for ep in ("CUDA", "cpu")
        ),
        (named("../elsewhere/model.onnx"), ModelError, "untrusted"),
        (named("/etc/passwd"), ModelError, "untrusted"),
        (named(3), DamagedError, "damaged"),
        (named("gone.onnx"), NotFoundError, "not_found"),
        ({"components": dict.fromkeys(("decoder", "text"), GRAPH)}, ModelError, "unsupported"),
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
    assert locate(tmp_path).decoder == tmp_path / "model.onnx"
    (tmp_path / "manifest.json").write_text("{", encoding="utf-8")
    assert locate(tmp_path).decoder == tmp_path / "model.onnx"
    (tmp_path / "genai_config.json").unlink()
    assert locate(tmp_path).decoder == tmp_path / "model.onnx"
    with refused(MismatchError, "contradiction", "variant", "cpu"):
        locate(tmp_path, variant="cpu")
    assert locate(tmp_path).directory == tmp_path


def put_components(root: Path, **eps: dict[str, str]) -> Path:
    """A package of several graphs: of each component the providers by variant."""
    components: dict[str, Any] = {component: {"variants": {}} for component in eps}
    for component, name, ep in [(component, *one) for component, ones in eps.items() for one in ones.items()]:
        folder = f"{component}/{name}"
        put_graph(root / folder / "graph.onnx", "logits" if "decoder" in component else "image_features")
        components[component]["variants"][name] = {"variant_directory": folder, "ep": ep}
    put_json(put_tokenizer(root) / "manifest.json", {"schema_version": 1, "components": components})
    return root


def test_components_are_graphs_by_what_they_do(tmp_path: Path) -> None:
    files = locate(put_components(tmp_path, decoder={"cpu": CPU}, vision_encoder={"cpu": CPU}))
    assert files.decoder == tmp_path / "decoder" / "cpu" / "graph.onnx"
    assert files.companions["vision"].graph == tmp_path / "vision_encoder" / "cpu" / "graph.onnx"


@pytest.mark.parametrize(
    ("decoders", "encoders", "chosen"),
    [
        ({"any": ""}, {"cpu": CPU, "gpu": CUDA}, {CPU: "cpu", CUDA: "gpu", None: "cpu"}),
        ({"x": CUDA}, {"x": CPU, "y": CUDA}, {CUDA: "y"}),  # the same name is for another provider
        ({"x": CUDA}, {"x": CPU, "y": CPU}, {CUDA: "x"}),
        ({"x": CUDA}, {"x": CUDA, "y": CUDA}, {CUDA: "x"}),
    ],
)
def test_encoder_is_for_the_provider_that_was_asked_for(
    decoders: dict[str, str], encoders: dict[str, str], chosen: dict[str, str], tmp_path: Path
) -> None:
    root = put_components(tmp_path, decoder=decoders, vision=encoders)
    found = {provider: choose(root, None, provider) for provider in chosen}
    assert {provider: graphs["vision"].graph.parent.name for provider, (_, graphs, _) in found.items()} == chosen
    for decoder, graphs, rule in found.values():
        name = graphs["vision"].graph.parent.name
        assert tells(rule, f"'{name}' vision") == (name != decoder.name)


def test_decoder_without_a_past_beside_one_with_it_is_the_first_step(tmp_path: Path) -> None:
    root = put_components(tmp_path, decoder={"x": CPU}, decoder_with_past={"x": CPU})
    files = locate(root)
    assert files.decoder.parent == root / "decoder_with_past" / "x"
    assert files.companions["first_step"].graph.parent == root / "decoder" / "x"


def test_what_is_not_used_of_a_package_is_named(tmp_path: Path) -> None:
    options = {"provider_options": {"device_id": "1"}, "session_options": {}}
    root = put_package(tmp_path, {"one": {"ep": CPU, "executor_info": {"ort": options}}})
    rule = locate(root).origins["variant"]
    assert tells(rule, f"({CPU}) executor_info.ort.provider_options")


def test_graph_may_be_an_asset_that_variants_share(tmp_path: Path) -> None:
    """ONNX Runtime's schema has it, beside names in the variant's folder."""
    shared = {"executor_info": {"ort": {"model_file": f"sha256:{DIGEST}/g.onnx"}}}
    root = put_package(tmp_path, {"a": {"ep": CPU, **shared}, "b": {"ep": CUDA, **shared}, "gone": {"ep": QNN}})
    graph = put_graph(root / "shared_assets" / f"sha256-{DIGEST}" / "g.onnx")
    files = [locate(root, variant=name) for name in "ab"]
    assert [(one.decoder, one.directory.name) for one in files] == [(graph, "a"), (graph, "b")]
    assert {one.origins["decoder"] for one in files} == {"the package's model_file"}  # no setting of the user's
    graph.unlink()
    with refused(NotFoundError, "not_found", holds="g.onnx"):
        locate(root, variant="a")
    assert locate(root, variant="gone").variant == "gone"


def test_weights_of_another_folder_than_the_graphs_are_refused(tmp_path: Path) -> None:
    """A file of that name beside the graph would be read in their place."""
    options = {"session.model_external_initializers_file_folder_path": f"sha256:{DIGEST}"}
    written = {"ep": CPU, "executor_info": {"ort": {"model_file": "graph.onnx", "session_options": options}}}
    root = put_package(tmp_path, {"apart": written, "beside": {"ep": CUDA}})
    with refused(ModelError, "unsupported", holds=f"sha256:{DIGEST}"):
        locate(root, variant="apart")
    assert locate(root, variant="beside").variant == "beside"


def test_component_that_is_no_part_of_a_model_is_left_alone(tmp_path: Path) -> None:
    root = put_package(tmp_path, BOTH)
    manifest = json.loads((root / "manifest.json").read_text())
    manifest["components"]["tokenizer"] = {"variants": {"any": {"variant_directory": "shared_assets"}}}
    put_json(root / "manifest.json", manifest)
    files = locate(root)
    assert files.companions == {}
    assert "'tokenizer'" in files.origins["variant"]


def test_another_provider_is_another_variant_and_another_variant_another_provider(tmp_path: Path) -> None:
    root = put_package(tmp_path, BOTH)
    model = resolve(ModelSettings.of({"model": root, "execution_provider": "cpu"}))
    assert model.files.directory.name == "cpu"
    for request in ("cuda", ["cuda", "cpu"], [["cuda", {"device_id": 1}], "cpu"]):  # the first decides
        assert model.patched({"execution_provider": request}).files.directory.name == "gpu"
    there = model.settings.in_other_place({"variant": "gpu"})
    assert (there.variant, there.execution_provider) == ("gpu", None)
    assert resolve(there).files.directory.name == "gpu"


@pytest.mark.parametrize(("ep", "found"), [(CPU, "default"), (CUDA, CUDA), ("", "default")])
def test_variant_runs_on_the_provider_that_it_is_for(ep: str, found: str, tmp_path: Path) -> None:
    """Where neither a setting nor genai_config.json names one."""
    model = resolve(ModelSettings.of({"model": put_package(tmp_path, {"one": {"ep": ep}})}))
    if found == "default":
        assert [(one.name, one.origin) for one in model.providers] == [(CPU, found)]
    elif CUDA in available_providers():
        assert model.providers[0].name == CUDA
    else:
        with refused(ProviderError, "provider", holds=(CUDA, "variant")):
            _ = model.providers
    named = {"execution_provider": "cpu", "variant": "one"}
    assert resolve(model.settings.model_copy(update=named)).providers[0].name == CPU


def test_links_to_another_folder_of_the_package_are_its_own(tmp_path: Path) -> None:
    """A manifest.json that is no package's, or that is a link itself, makes no folder one."""
    root = put_package(tmp_path / "p", {"a": {"ep": CPU}, "b": {"ep": CUDA}})
    first, second = root / "models" / "model" / "a", root / "models" / "model" / "b"
    put_graph(first / "model.onnx", locations=["model.onnx.data"])
    (first / "model.onnx.data").rename(root / "shared_assets" / "w.data")
    (first / "model.onnx.data").symlink_to("../../../shared_assets/w.data")
    (second / "model.onnx").unlink()
    (second / "model.onnx").symlink_to("../models/model/a/model.onnx")
    second.rename(root / "elsewhere")
    second.symlink_to("../../elsewhere")
    (root / "elsewhere" / "model.onnx.data").symlink_to("../shared_assets/w.data")
    for variant in "ab":
        assert [file.resolve().name for file in locate(root, variant=variant).weights] == ["w.data"]
    assert locate(first, tokenizer=str(root / "shared_assets" / f"sha256-{DIGEST}")).decoder == first / "model.onnx"
    manifest = (root / "manifest.json").rename(tmp_path / "outside.json")
    for content in ("a link", "another program's"):
        if content == "a link":
            (root / "manifest.json").symlink_to(manifest)
        else:
            put_json(manifest, {"unrelated": True}).rename(root / "manifest.json")
        with refused(ModelError, "unsupported", holds="leads out"):
            locate(first)


def test_config_of_the_hub_beside_a_manifest_leaves_the_package_one(tmp_path: Path) -> None:
    root = put_json(put_package(tmp_path, BOTH) / "config.json", {"model_type": "llama"}).parent
    assert locate(root, variant="gpu").directory.name == "gpu"
    put_graph(root / "stray.onnx")
    assert locate(root, variant="gpu").directory.name == "gpu"
    put_json(root / "manifest.json", {"unrelated": True})
    with refused(MismatchError, "contradiction", "variant", "gpu"):
        locate(root, variant="gpu")


def test_doubled_key_of_a_package_is_refused(tmp_path: Path) -> None:
    other = put_package(tmp_path / "other", {"one": {"executor_info": {"ort": "own.json"}}})
    with refused(NotFoundError, "not_found", holds="own.json"):
        locate(other)
    (other / "models" / "model" / "one" / "own.json").write_text('{"model_file": "model.onnx", "model_file": "b.onnx"}')
    with refused(DamagedError, "damaged", holds="model_file"):
        locate(other)
    root = put_package(tmp_path, BOTH)
    file = root / "models" / "model" / "component.json"
    file.write_text(file.read_text().replace('"gpu"', '"cpu"', 1))
    with refused(DamagedError, "damaged", holds="cpu"):
        locate(root)


@pytest.mark.parametrize(
    ("named", "field", "code"),
    [
        ({}, "variant", "missing"),
        ({"variant": "variant"}, "variant", "not_found"),
        ({"variant": "a", "onnx_file_name": "gone.onnx"}, "onnx_file_name", "not_found"),
        ({"variant": "a", "components": {"vision": "gone.onnx"}}, "components.vision", "not_found"),
        ({"variant": "a", "tokenizer": "gone/gone/gone"}, "tokenizer", "not_found"),
        ({"model": "gone"}, "", "not_found"),
    ],
)
def test_mistake_about_a_reference_is_one_of_its_own_keys(named: Any, field: str, code: str, tmp_path: Path) -> None:
    root = put_package(tmp_path, {"a": {"ep": CPU}, "b": {"ep": CPU}})
    settings = ModelSettings.of({"model": root, **named})
    written = ".".join(filter(None, ("reference", field)))
    with refused(ModelError, code, written, holds=f"'{written}'" if field else "'gone'") as raised:
        resolve(settings, key="reference")
    assert raised.value.__cause__ is not None
    assert f"'{written}' = 'reference" not in str(raised.value)
    of_float = "" if field == "variant" else field
    with refused(ModelError, code, of_float or "reference.float_model") as raised:
        resolve(settings, key="reference.float_model")
    assert ("its folder" in str(raised.value)) == (code == "missing")
    assert not str(raised.value).startswith("'variant'"), "no key names one there"


def test_variant_is_asked_for_by_its_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = put_package(tmp_path, {"a": {"ep": CPU}, "b": {"ep": CPU}})
    assert main(["check", str(root)]) == 2
    assert "--variant" in capsys.readouterr().err


def test_package_is_no_recipes_input_model(tmp_path: Path) -> None:
    root = put_package(tmp_path, BOTH)
    assert all("model package" in why_missing(kind, str(root), None) for kind in ("onnxmodel", "hfmodel"))
    assert "is empty" in why_missing("hfmodel", "", None)  # Olive opens the working directory
    assert not why_missing("onnxmodel", str(root / "models" / "model" / "cpu" / "model.onnx"), None)


@pytest.mark.long
def test_two_variants_are_two_places(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The quickstart's model twice, and quantized: the same to rounding, and different."""
    root = packed(tmp_path / "m.ortpackage", one=exported(), two=exported(), int4=quantized(4, 32))
    work = ["--tasks", "quickstart_choice", "--include-path", str(TASKS), "--limit", "4"]
    command = ["evaluate", str(root), *work, "--variant", "one", "--against"]
    assert main([*command, "variant=two"]) == 0
    told = capsys.readouterr().out
    assert "the same to rounding" in told
    assert {"one", "two"} <= {*re.findall(r"m\.ortpackage \((\w+)\)", told)}
    assert main([*command, "variant=int4"]) in (1, 3)
    told = capsys.readouterr().out
    assert "the same to rounding" not in told
    assert f"variant one on {CPU}" in told
    assert main([*command, "variant=one"]) == 2
    assert main(["check", str(root)]) == 2
    assert f"int4 ({CPU})" in capsys.readouterr().err

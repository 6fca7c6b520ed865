from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from olive_ext.errors import ModelError
from olive_ext.model.files.content import load_graph, model_digest, size_on_disk
from olive_ext.model.files.locate import locate, locate_hf
from olive_ext.model.types import ModelFiles
from tests.model.tiny import graph, put_genai, put_graph, put_json, put_tokenizer
from tests.refusals import refused


@pytest.fixture
def files(tmp_path: Path) -> ModelFiles:
    put_graph(tmp_path / "pkg" / "model.onnx", locations=["a.data", "b.data"])
    put_genai(tmp_path / "pkg")
    (tmp_path / "pkg" / "chat_template.jinja").write_text("{{ messages }}")
    return locate(put_tokenizer(tmp_path / "pkg"))


def test_digest_does_not_depend_on_the_place_but_on_weights_files_and_the_name_of_a_hub_tokenizer(
    files: ModelFiles, tmp_path: Path
) -> None:
    shutil.copytree(files.directory, tmp_path / "copy")
    own = model_digest(files)
    assert model_digest(locate(tmp_path / "copy")) == own
    assert len(own) == 32
    hub = [model_digest(replace(files, tokenizer=name)) for name in ("owner/a", "owner/b")]
    assert len({own, *hub}) == 3
    a, b = files.weights
    a.write_bytes(b.read_bytes()[::-1])
    assert model_digest(replace(files, weights=(b, a))) != model_digest(files)


@pytest.mark.parametrize(
    "name",
    [
        *("model.onnx", "a.data", "b.data", "model_qnn.bin", "genai_config.json", "config.json", "named.json"),
        *("generation_config.json", "processor_config.json", "preprocessor_config.json", "tokenizer.json"),
        *("chat_template.jinja", "additional_chat_templates/tool.jinja", "special_tokens_map.json", "source.spm"),
    ],
)
def test_digest_changes_with_each_file_that_opening_reads(files: ModelFiles, name: str) -> None:
    files = replace(files, genai_config={**files.genai_config, "vision": {"config_filename": "named.json"}})
    before = model_digest(files)
    (files.directory / name).parent.mkdir(exist_ok=True)
    with (files.directory / name).open("ab") as file:
        file.write(b" ")
    assert model_digest(files) != before


def test_digest_does_not_change_with_what_opening_reads_not(files: ModelFiles) -> None:
    before = model_digest(files)
    for name in ("footprint.json", "report.json", "model_config.json", "README.md", "mine.py", "q4.onnx"):
        put_json(files.directory / name, {})
        assert model_digest(files) == before, name


@pytest.mark.parametrize("name", ["modeling.py", "own/layers.py", "data/scale.txt"])
def test_digest_changes_with_all_that_code_of_the_folder_may_read(files: ModelFiles, tmp_path: Path, name: str) -> None:
    put_json(tmp_path / "hf" / "config.json", {"auto_map": {"AutoModelForCausalLM": "modeling.Own"}})
    put_json(files.directory / "tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["modeling.Own", None]}})
    for located in (locate_hf(str(tmp_path / "hf")), files):
        digests, file = {model_digest(located)}, located.directory / name
        file.parent.mkdir(exist_ok=True)
        for text in ("a = 1", "a = 3"):
            file.write_text(text)
            digests.add(model_digest(located))
        assert len(digests) == 3
        for hidden in (".cache/a", "own/__pycache__/a.pyc", "q4.onnx", "q4.onnx.data"):
            put_json(located.directory / hidden, {})
        assert model_digest(located) in digests


def test_digest_changes_with_code_of_another_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    put_json(tmp_path / "hf" / "config.json", {"auto_map": {"AutoModelForCausalLM": "some/code--modeling.Own"}})
    kept, digests = tmp_path / "hub" / "models--some--code", {model_digest(locate_hf(str(tmp_path / "hf")))}
    for name, text in (("refs/main", "abc"), ("snapshots/abc/modeling.py", "1"), ("snapshots/abc/layers.py", "3")):
        (kept / name).parent.mkdir(parents=True, exist_ok=True)
        (kept / name).write_text(text)
        digests.add(model_digest(locate_hf(str(tmp_path / "hf"))))
    assert len(digests) == 3


def test_size_counts_graph_and_weights_once_and_external_data_are_not_read_with_the_graph(files: ModelFiles) -> None:
    expected = sum((files.directory / name).stat().st_size for name in ("model.onnx", "a.data", "b.data"))
    assert size_on_disk(files) == expected
    link = files.directory / "c.data"
    link.symlink_to("a.data")
    assert size_on_disk(replace(files, weights=(*files.weights, link))) == expected
    for weight in files.weights:
        weight.unlink()
    assert load_graph(files.decoder) == graph(locations=["a.data", "b.data"])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "broken"),
        (b"version https://git-lfs.github.com/spec/v1\nsize 9\n", "LFS"),
        (b"\x08\x0a" * 3, "broken"),
        (b"\xff" * 64, "parsing"),
        (graph().SerializeToString()[:-9], "parsing"),
        (None, ""),
    ],
    ids=["empty", "lfs", "other", "noise", "cut", "none"],
)
def test_file_that_holds_no_graph_is_named(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "broken.onnx"
    if content is not None:
        path.write_bytes(content)
    with refused(ModelError, "no_access" if content is None else "damaged", holds=(f"{path}", reason)) as error:
        load_graph(path)
    assert "\n" not in str(error.value)

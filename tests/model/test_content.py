from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from olive_ext.errors import ModelError
from olive_ext.model.files.content import content_hash, load_graph, size_on_disk
from olive_ext.model.files.locate import locate
from olive_ext.model.types import ModelFiles
from tests.model.tiny import graph, put_genai, put_graph, put_json, put_tokenizer


@pytest.fixture
def files(tmp_path: Path) -> ModelFiles:
    put_graph(tmp_path / "pkg" / "model.onnx", locations=["a.data", "b.data"])
    put_genai(tmp_path / "pkg")
    (tmp_path / "pkg" / "chat_template.jinja").write_text("{{ messages }}")
    return locate(put_tokenizer(tmp_path / "pkg"))


def test_hash_does_not_depend_on_the_place(files: ModelFiles, tmp_path: Path) -> None:
    shutil.copytree(files.directory, tmp_path / "copy")
    assert content_hash(files) == content_hash(files)
    assert content_hash(locate(tmp_path / "copy")) == content_hash(files)
    assert len(content_hash(files)) == 32


@pytest.mark.parametrize(
    "name", ["model.onnx", "a.data", "b.data", "tokenizer.json", "chat_template.jinja", "special_tokens_map.json"]
)
def test_hash_changes_with_each_file(files: ModelFiles, name: str) -> None:
    before = content_hash(files)
    with (files.directory / name).open("ab") as file:
        file.write(b" ")
    assert content_hash(files) != before


def test_hash_changes_with_genais_model_and_not_with_its_search_settings(files: ModelFiles) -> None:
    before = content_hash(files)
    config = dict(files.genai_config)
    assert content_hash(replace(files, genai_config={**config, "search": {"top_k": 3}})) == before
    assert content_hash(replace(files, genai_config={"model": {**config["model"], "vocab_size": 3}})) != before


def test_hash_does_not_change_with_unrelated_files(files: ModelFiles) -> None:
    before = content_hash(files)
    put_json(files.directory / "footprint.json", {})
    assert content_hash(files) == before


def test_hash_tells_weights_swapped_between_files(files: ModelFiles) -> None:
    a, b = files.weights
    a.write_bytes(b.read_bytes()[::-1])
    before = content_hash(files)
    assert content_hash(replace(files, weights=(b, a))) != before


def test_hash_takes_the_name_of_a_hub_tokenizer(files: ModelFiles) -> None:
    hub = [content_hash(replace(files, tokenizer=name)) for name in ("owner/a", "owner/b")]
    assert len({content_hash(files), *hub}) == 3


def test_size_counts_graph_and_weights_once(files: ModelFiles) -> None:
    expected = sum((files.directory / name).stat().st_size for name in ("model.onnx", "a.data", "b.data"))
    assert size_on_disk(files) == expected
    link = files.directory / "c.data"
    link.symlink_to("a.data")
    assert size_on_disk(replace(files, weights=(*files.weights, link))) == expected


def test_external_data_is_not_read_with_the_graph(tmp_path: Path) -> None:
    file = put_graph(tmp_path / "model.onnx", locations=["a.data"])
    (tmp_path / "a.data").unlink()
    assert load_graph(file) == graph(locations=["a.data"])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is a broken graph: it has no nodes, no outputs or no opset"),
        (b"version https://git-lfs.github.com/spec/v1\nsize 9\n", "is a pointer of Git LFS"),
        (b"\x08\x0a" * 3, "is a broken graph: it has no nodes, no outputs or no opset"),
        (b"\xff" * 64, "is a broken graph: Error parsing message"),
        (graph().SerializeToString()[:-9], "is a broken graph: Error parsing message"),
    ],
    ids=["empty", "lfs", "other", "noise", "cut"],
)
def test_file_that_holds_no_graph_is_named(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "broken.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=f"'{path}' {reason}") as error:
        load_graph(path)
    assert "\n" not in str(error.value)


def test_graph_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none\.onnx' cannot be read: No such file"):
        load_graph(tmp_path / "none.onnx")

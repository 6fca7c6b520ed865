"""Which files a model's folder may have opened: links, names in its configurations, pipes and devices."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from olive_ext.config import ModelSettings
from olive_ext.errors import ModelError
from olive_ext.media.processors import load_image_processor
from olive_ext.model.resolve import resolve
from tests.check.tiny import put_model
from tests.model.tiny import in_hf_cache, put_genai, put_graph, put_json
from tests.refusals import refused

LEADS_OUT = "leads out of the model's folder, to '.*elsewhere"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package with a file of every kind that is opened by its name, and external data in a sub-folder."""
    folder = put_model(tmp_path / "package")
    put_graph(folder / "model.onnx", locations=["model.onnx.data", "weights/b.data"])
    put_genai(folder)
    for name in ("config.json", "generation_config.json", "added_tokens.json", "preprocessor_config.json"):
        put_json(folder / name, {})
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    put_json(folder / "additional_chat_templates" / "tools.jinja", {})
    return folder


def opened(folder: Path, **settings: object) -> None:
    """All that is read of a model before a session is open."""
    model = resolve(ModelSettings.of({"model": str(folder), **settings}))
    assert model.digest


def moved_out(path: Path, elsewhere: Path) -> None:
    """`path` with a link of its name in its place."""
    elsewhere.mkdir(exist_ok=True)
    shutil.move(path, elsewhere / path.name)
    path.symlink_to(elsewhere / path.name)


def test_a_package_of_its_own_files_is_opened(package: Path, tmp_path: Path) -> None:
    moved_out(package / "chat_template.jinja", package / "below")
    moved_out(package / "model.onnx.data", package / "below")
    (package / "gone").symlink_to("/nowhere")
    (package / "loop").symlink_to("loop")
    (package / "cache").symlink_to(tmp_path, target_is_directory=True)
    opened(package)
    (tmp_path / "link").symlink_to(package, target_is_directory=True)
    opened(tmp_path / "link")


@pytest.mark.parametrize(
    "name",
    [
        *("model.onnx.data", "weights/b.data", "weights", "chat_template.jinja", "tokenizer.json", "config.json"),
        *("tokenizer_config.json", "added_tokens.json", "generation_config.json", "genai_config.json"),
        *("additional_chat_templates/tools.jinja", "additional_chat_templates", "preprocessor_config.json"),
    ],
)
def test_a_link_out_of_the_folder_is_refused(package: Path, tmp_path: Path, name: str) -> None:
    moved_out(package / name, tmp_path / "elsewhere")
    with pytest.raises(ModelError, match=LEADS_OUT):
        opened(package)


@pytest.mark.parametrize("name", ["model.onnx", "sub"])
def test_a_graph_that_nothing_names_is_no_link_out(tmp_path: Path, name: str) -> None:
    folder = put_model(tmp_path / "package")
    if name == "sub":
        (folder / "sub").mkdir()
        (folder / "model.onnx").rename(folder / "sub" / "model.onnx")
    moved_out(folder / name, tmp_path / "elsewhere")
    with pytest.raises(ModelError, match=LEADS_OUT):
        opened(folder)


def test_the_users_own_file_may_be_a_link_and_its_weights_lie_beside_either(package: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "other.txt").symlink_to("/etc/hostname")
    (tmp_path / "mine" / "mine.onnx").symlink_to(package / "model.onnx")
    opened(tmp_path / "mine" / "mine.onnx", tokenizer=str(package))


def test_a_package_below_a_snapshot_of_the_hubs_cache_is_opened(package: Path, tmp_path: Path) -> None:
    files = {str(Path("cpu", path.relative_to(package))): path.read_bytes() for path in package.rglob("*.*")}
    snapshot = in_hf_cache(tmp_path / "models--a--b", files)
    opened(snapshot / "cpu")
    (snapshot / "cpu" / "chat_template.jinja").unlink()
    (snapshot / "cpu" / "chat_template.jinja").symlink_to(put_json(tmp_path / "elsewhere.jinja", {}))
    with pytest.raises(ModelError, match=LEADS_OUT):
        opened(snapshot / "cpu")


@pytest.fixture
def checkpoint(package: Path) -> Path:
    for name in ("model.onnx", "genai_config.json"):
        (package / name).unlink()
    for name in ("model.safetensors", "merges.txt"):
        (package / name).touch()
    return package


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "chat_template.jinja", "merges.txt"])
def test_a_file_of_a_checkpoint_is_no_link_out(checkpoint: Path, tmp_path: Path, name: str) -> None:
    opened(checkpoint)
    moved_out(checkpoint / name, tmp_path / "elsewhere")
    with pytest.raises(ModelError, match=LEADS_OUT):
        opened(checkpoint)


@pytest.mark.parametrize(
    ("file", "content", "error"),
    [
        ("model.safetensors.index.json", {"weight_map": {"a": "../w.safetensors"}}, "index.json's weight_map"),
        ("tokenizer_config.json", {"fast_tokenizer_files": ["/x/tokenizer.4.0.json"]}, "fast_tokenizer_files"),
    ],
)
def test_a_file_that_a_checkpoint_names_is_inside(checkpoint: Path, file: str, content: object, error: str) -> None:
    put_json(checkpoint / file, content)
    with refused(ModelError, "untrusted", holds=error):
        opened(checkpoint)


@pytest.mark.parametrize(
    ("section", "place"),
    [
        ({"joiner": {"filename": "../x.onnx"}}, "model.joiner.filename"),
        ({"speech": {"adapter_filename": "/x.onnx_adapter"}}, "model.speech.adapter_filename"),
        ({"vision": {"pipeline": [{"a": {"filename": "../x.onnx"}}]}}, "model.vision.pipeline.0.a.filename"),
        ({"mtp": {"shared_initializers": [{"data_file": "../x"}]}}, "model.mtp.shared_initializers.0.data_file"),
    ],
)
def test_a_file_of_a_section_that_only_genai_reads_is_inside(
    package: Path, section: dict[str, object], place: str
) -> None:
    put_genai(package, **section)
    with refused(ModelError, "untrusted", holds=place):
        opened(package)


def test_a_key_that_is_twice_in_genai_config_is_refused(package: Path) -> None:
    text = (package / "genai_config.json").read_text()
    (package / "genai_config.json").write_text(text.replace('"filename"', '"filename": "../x", "filename"'))
    with refused(ModelError, "damaged", holds=("filename", "JSON")):
        opened(package)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def listener(path: Path) -> None:
    begun = Path.cwd()
    os.chdir(path.parent)  # a socket's address is short
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(begun)


@pytest.mark.parametrize(("put", "kind"), [(pipe, "a pipe"), (listener, "a socket")])
@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "model.safetensors", "merges.txt"])
def test_what_is_no_file_is_refused(package: Path, put: Callable[[Path], None], kind: str, name: str) -> None:
    (package / name).unlink(missing_ok=True)
    put(package / name)
    with refused(ModelError, "no_access", holds=(name, kind)):
        opened(package)


@pytest.mark.parametrize("name", ["/dev/null", "/dev/zero"])
def test_a_device_is_no_model(name: str) -> None:
    with refused(ModelError, "no_access", holds=name):
        resolve(ModelSettings(model=name))


def test_files_of_processors_are_no_links_out(tmp_path: Path) -> None:
    folder = tmp_path / "package"
    put_json(folder / "preprocessor_config.json", {"image_processor_type": "CLIPImageProcessor"})
    load_image_processor([folder], None)
    moved_out(put_json(folder / "chat_template.json", {}), tmp_path / "elsewhere")
    with pytest.raises(ModelError, match=LEADS_OUT):
        load_image_processor([folder], None)
    put_json(tmp_path / "other" / "processor_config.json", {"image_processor": {"image_processor_type": "x"}})
    moved_out(tmp_path / "other" / "processor_config.json", tmp_path / "elsewhere")
    with pytest.raises(ModelError, match=LEADS_OUT):
        load_image_processor([tmp_path / "other"], None)

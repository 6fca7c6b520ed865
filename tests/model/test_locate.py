from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from onnx import TensorProto, helper

from olive_ext.errors import ModelError
from olive_ext.model.files.content import read_outline
from olive_ext.model.files.locate import locate, model_kind
from tests.model.tiny import graph, in_hf_cache, put_genai, put_graph, put_json, put_tokenizer, put_weight
from tests.refusals import refused


def olive_record(folder: Path, model_path: object, name: str | None = None, kind: str = "onnxmodel", **more: object):
    config = {"model_path": str(model_path), "onnx_file_name": name, "model_attributes": more}
    return put_json(folder / "model_config.json", {"type": kind, "config": config})


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with one decoder with external data, a tokenizer, and no configuration."""
    put_graph(tmp_path / "pkg" / "model.onnx", locations=["model.onnx.data"])
    return put_tokenizer(tmp_path / "pkg")


# --- which graph -----------------------------------------------------------------------------------------------------


def test_file_is_taken_as_it_is(package: Path) -> None:
    files = locate(package / "model.onnx")
    assert files.decoder == package / "model.onnx"
    assert files.directory == package
    assert files.weights == (package / "model.onnx.data",)
    assert files.genai_config == {}
    assert files.tokenizer == str(package)
    assert files.origins == {
        "decoder": "the model path",
        "genai_config": "none found",
        "tokenizer": "beside the model",
    }


def test_link_to_a_lone_file_finds_the_tokenizer_beside_that(package: Path, tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "mine.onnx").symlink_to(package / "model.onnx")
    files = locate(tmp_path / "links" / "mine.onnx")
    assert (files.decoder.name, files.tokenizer) == ("mine.onnx", str(package))
    assert files.origins["tokenizer"] == "beside the file that the model's link leads to"
    put_tokenizer(tmp_path / "links")
    assert locate(tmp_path / "links" / "mine.onnx").tokenizer == str(tmp_path / "links")


def test_relative_path_becomes_absolute(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(package)
    assert locate("model.onnx").decoder == package / "model.onnx"
    assert locate(".").tokenizer == str(package)


def test_only_graph_of_a_folder_is_taken(package: Path) -> None:
    files = locate(package)
    assert files.decoder == package / "model.onnx"
    assert files.origins["decoder"] == "the only .onnx file"


def test_onnx_file_name_picks_one_of_several(package: Path) -> None:
    put_graph(package / "other.onnx")
    assert locate(package, "other.onnx").decoder == package / "other.onnx"


def test_nested_onnx_file_name_is_relative_to_the_folder(package: Path) -> None:
    put_graph(package / "decoder" / "model.onnx")
    assert locate(package, "decoder/model.onnx").decoder == package / "decoder" / "model.onnx"


def test_several_decoders_are_listed(package: Path) -> None:
    put_graph(package / "model_q4.onnx")
    put_graph(package / "encoder.onnx", "hidden_states")
    with refused(ModelError, "missing", holds=("onnx_file_name", "model.onnx", "model_q4.onnx")):
        locate(package)


def test_only_graph_that_returns_logits_is_taken(tmp_path: Path) -> None:
    put_graph(tmp_path / "encoder.onnx", "hidden_states")
    put_graph(tmp_path / "decoder.onnx", "logits_Q4")
    (tmp_path / "broken.onnx").write_bytes(b"nonsense")
    files = locate(put_tokenizer(tmp_path))
    assert files.decoder.name == "decoder.onnx"
    assert "returns logits" in files.origins["decoder"]


def test_components_in_subfolders_are_searched_for_the_decoder(tmp_path: Path) -> None:
    put_graph(tmp_path / "decoder" / "model.onnx")
    put_graph(tmp_path / "embedding" / "model.onnx", "inputs_embeds")
    files = locate(put_tokenizer(tmp_path))
    assert files.decoder == tmp_path / "decoder" / "model.onnx"
    assert files.origins["tokenizer"] == "1 folder above the model"


def test_package_without_text_decoder_is_refused(tmp_path: Path) -> None:
    put_graph(tmp_path / "a.onnx", "image_features")
    put_graph(tmp_path / "b.onnx", "inputs_embeds")
    with refused(ModelError, "unsupported", holds=("a.onnx", "b.onnx")):
        locate(tmp_path)


# --- genai_config.json -----------------------------------------------------------------------------------------------


def test_genai_config_picks_the_decoder(package: Path) -> None:
    put_graph(package / "text.onnx")
    put_genai(package, "text.onnx", vocab_size=7)
    files = locate(package)
    assert files.decoder == package / "text.onnx"
    assert files.genai_config["model"]["vocab_size"] == 7
    assert files.origins["decoder"] == "genai_config.json's model.decoder.filename"
    assert files.origins["genai_config"] == "in the folder asked for"


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_genai_config_is_found_above_a_nested_decoder(tmp_path: Path, depth: int) -> None:
    nested = "/".join(["decoder", "b", "c"][:depth]) + "/model.onnx"
    put_graph(tmp_path / nested)
    put_genai(put_tokenizer(tmp_path), nested)
    files = locate(tmp_path / nested)
    assert files.directory == tmp_path
    assert files.tokenizer == str(tmp_path)
    assert files.origins["genai_config"].startswith(f"{depth} folder")
    assert locate(tmp_path / "decoder", nested.removeprefix("decoder/")).directory == tmp_path


def test_genai_config_of_another_model_above_is_ignored(package: Path) -> None:
    put_graph(package / "quantized" / "model.onnx")
    put_genai(package)
    files = locate(package / "quantized")
    assert files.directory == package / "quantized"
    assert files.genai_config == {}


def test_genai_config_with_missing_decoder_is_named(package: Path) -> None:
    put_genai(package, "gone.onnx")
    with refused(ModelError, "missing", "onnx_file_name", holds="gone.onnx"):
        locate(package)
    assert locate(package, "model.onnx").genai_config["model"]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"type": "embedder"}, {"code": "unsupported", "holds": "embedder"}),
        (
            {"decoder": {"pipeline": [{"a": {"filename": "a.onnx"}}]}},
            {"code": "missing", "field": "onnx_file_name", "holds": "a.onnx"},
        ),
        ({"decoder": {"pipeline": [{"a": {"outputs": []}}]}}, {"code": "missing", "field": "onnx_file_name"}),
        ({"decoder": {}}, {"code": "missing", "field": "onnx_file_name"}),
    ],
)
def test_genai_config_without_one_decoder_is_refused(package: Path, model: object, message: dict[str, Any]) -> None:
    put_json(package / "genai_config.json", {"model": model})
    with refused(ModelError, **message):
        locate(package)


def put_pipeline(folder: Path, stages: dict[str, str], *, is_one_object: bool = True) -> None:
    written = [{name: {"filename": file}} for name, file in stages.items()]
    merged = {name: stage for part in written for name, stage in part.items()}
    put_json(folder / "genai_config.json", {"model": {"decoder": {"pipeline": [merged] if is_one_object else written}}})


@pytest.mark.parametrize("is_one_object", [True, False])
def test_pipeline_is_all_of_its_graphs(package: Path, is_one_object: bool) -> None:
    put_graph(package / "embeddings.onnx", "embeds")
    put_graph(package / "layers.onnx", "hidden", locations=["layers.data"])
    put_graph(package / "head.onnx")
    stages = {"embed": "embeddings.onnx", "prompt": "layers.onnx", "step": "layers.onnx", "head": "head.onnx"}
    put_pipeline(package, stages, is_one_object=is_one_object)
    files = locate(package)
    assert files.decoder == package / "embeddings.onnx"
    assert files.origins["decoder"] == "the first graph of genai_config.json's model.decoder.pipeline"
    assert files.pipeline == ("embed", "prompt", "step", "head")
    assert [file.name for file in files.weights] == ["layers.onnx", "layers.data", "head.onnx"]


def test_graph_beside_a_pipeline_is_a_model_of_its_own(package: Path) -> None:
    put_graph(package / "a.onnx", "embeds")
    put_pipeline(package, {"a": "a.onnx", "b": "gone.onnx"})
    assert locate(package, "model.onnx").pipeline == ()
    with refused(ModelError, "unsupported", holds="gone.onnx"):
        locate(package, "a.onnx")


def test_pipeline_of_nested_graphs_is_found_above_them(tmp_path: Path) -> None:
    put_graph(put_tokenizer(tmp_path) / "parts" / "a.onnx", "embeds")
    put_graph(tmp_path / "parts" / "b.onnx")
    put_pipeline(tmp_path, {"a": "parts/a.onnx", "b": "parts/b.onnx"})
    files = locate(tmp_path / "parts" / "a.onnx")
    assert (files.directory, files.pipeline) == (tmp_path, ("a", "b"))


@pytest.mark.parametrize(
    ("text", "message"), [("{", {"code": "damaged", "holds": "JSON"}), ("[]", {"code": "damaged"})]
)
def test_broken_genai_config_is_named(package: Path, text: str, message: dict[str, Any]) -> None:
    (package / "genai_config.json").write_text(text)
    with refused(ModelError, **message):
        locate(package)


# --- Olive's output folder -------------------------------------------------------------------------------------------


def test_olive_record_picks_the_decoder(package: Path) -> None:
    put_graph(package / "draft.onnx")
    olive_record(package, package, "model.onnx")
    files = locate(package)
    assert files.decoder == package / "model.onnx"
    assert files.origins["decoder"] == "Olive's model_config.json"


def test_olive_record_of_a_moved_folder_is_read_relative_to_itself(package: Path) -> None:
    put_graph(package / "draft.onnx")
    olive_record(package, "/where/it/was", "model.onnx")
    assert locate(package).decoder == package / "model.onnx"
    olive_record(package, "/where/it/was/draft.onnx")
    assert locate(package).decoder == package / "draft.onnx"


def test_olive_record_may_point_elsewhere(tmp_path: Path, package: Path) -> None:
    (tmp_path / "out").mkdir()
    olive_record(tmp_path / "out", package, "model.onnx")
    assert locate(tmp_path / "out").decoder == package / "model.onnx"


def test_olive_record_wins_over_genai_config_with_missing_decoder(package: Path) -> None:
    put_genai(package, "gone.onnx")
    olive_record(package, package, "model.onnx")
    assert locate(package).decoder == package / "model.onnx"


def test_composite_record_leaves_the_choice_to_the_graphs(tmp_path: Path) -> None:
    put_graph(tmp_path / "decoder.onnx")
    put_graph(tmp_path / "encoder.onnx", "hidden_states")
    olive_record(put_tokenizer(tmp_path), tmp_path, kind="compositemodel")
    assert locate(tmp_path).decoder == tmp_path / "decoder.onnx"


def test_foreign_model_config_is_ignored(package: Path) -> None:
    put_json(package / "model_config.json", {"type": 3})
    assert locate(package).decoder == package / "model.onnx"


# --- what is wrong ---------------------------------------------------------------------------------------------------


def test_missing_path_is_named(tmp_path: Path) -> None:
    with refused(ModelError, "not_found", holds="gone"):
        locate(tmp_path / "gone")


def test_broken_link_is_named(tmp_path: Path) -> None:
    (tmp_path / "link.onnx").symlink_to(tmp_path / "gone.onnx")
    with refused(ModelError, "not_found"):
        locate(tmp_path / "link.onnx")


def test_folder_without_graph_says_what_is_there(tmp_path: Path) -> None:
    with refused(ModelError, "not_found"):
        locate(tmp_path)
    for name in "abcdefghij":
        (tmp_path / name).touch()
    (tmp_path / "0").mkdir()
    with refused(ModelError, "not_found", holds=("0/", "3")):
        locate(tmp_path)


def test_other_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with refused(ModelError, "unsupported", holds="model.safetensors"):
        locate(tmp_path / "model.safetensors")


def test_onnx_file_name_that_contradicts_the_path_is_refused(package: Path) -> None:
    assert locate(package / "model.onnx", "model.onnx").decoder.name == "model.onnx"
    with refused(ModelError, "contradiction", "onnx_file_name", "other.onnx"):
        locate(package / "model.onnx", "other.onnx")
    with refused(ModelError, "not_found", "onnx_file_name", "other.onnx", holds="model.onnx"):
        locate(package, "other.onnx")


@pytest.mark.parametrize("content", [b"nonsense", b""])
def test_broken_graph_is_named(package: Path, content: bytes) -> None:
    (package / "model.onnx").write_bytes(content)
    with refused(ModelError, "damaged", holds="model.onnx"):
        locate(package)


def test_missing_external_data_is_named(package: Path) -> None:
    (package / "model.onnx.data").unlink()
    with refused(ModelError, "not_found", holds="/pkg/model.onnx.data"):
        locate(package)


def test_external_data_of_subgraphs_and_functions_is_seen(tmp_path: Path) -> None:
    inner = graph("y", ["inner.data"]).graph
    choice = helper.make_node("If", ["c"], ["logits"], then_branch=inner, else_branch=inner)
    model = graph()
    model.graph.node.append(choice)
    constant = helper.make_node("Constant", [], ["k"], value=graph("y", ["function.data"]).graph.initializer[0])
    model.functions.append(helper.make_function("own", "F", [], ["k"], [constant], [helper.make_opsetid("", 17)]))
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    assert read_outline(tmp_path / "m.onnx").locations.keys() == {"inner.data", "function.data"}
    assert model.functions[0].node[0].attribute[0].t.data_location == TensorProto.EXTERNAL


# --- symbolic links --------------------------------------------------------------------------------------------------


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
        assert files.directory == snapshot
        assert files.tokenizer == str(snapshot)


def test_data_beside_the_target_of_a_linked_graph_is_found(tmp_path: Path, package: Path) -> None:
    (tmp_path / "link.onnx").symlink_to(package / "model.onnx")
    assert locate(tmp_path / "link.onnx", tokenizer=str(package)).weights == (package / "model.onnx.data",)


# --- tokenizer -------------------------------------------------------------------------------------------------------


def bare(folder: Path) -> Path:
    return put_graph(folder / "x" / "model.onnx").parent


@pytest.mark.parametrize("mark", ["tokenizer.json", "tokenizer_config.json", "tokenizer.model"])
def test_tokenizer_is_known_by_one_of_its_files(tmp_path: Path, mark: str) -> None:
    folder = bare(tmp_path)
    (folder / mark).touch()
    assert locate(folder).tokenizer == str(folder)


def test_tokenizer_setting_wins(package: Path, tmp_path: Path) -> None:
    other = put_tokenizer(tmp_path / "other")
    assert locate(package, tokenizer=str(other)).tokenizer == str(other)
    assert locate(package, tokenizer=str(other / "tokenizer.json")).tokenizer == str(other)
    assert locate(package, tokenizer="owner/name").tokenizer == "owner/name"
    assert locate(package, tokenizer="gpt2").origins["tokenizer"] == "the setting 'tokenizer' (a hub name)"


def test_wrong_tokenizer_setting_is_refused(package: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with refused(ModelError, "not_found", "tokenizer"):
        locate(package, tokenizer=str(tmp_path / "empty"))
    with refused(ModelError, "not_found", "tokenizer"):
        locate(package, tokenizer=str(tmp_path / "gone"))


def test_tokenizer_dir_of_genai_config_wins_over_the_models_folder(package: Path) -> None:
    put_genai(package, tokenizer_dir="tok")
    put_tokenizer(package / "tok")
    assert locate(package).tokenizer == str(package / "tok")


def test_additional_candidates_come_after_the_models_folders(package: Path, tmp_path: Path) -> None:
    other = put_tokenizer(tmp_path / "other")
    assert locate(package, extra_tokenizer_candidates=[other]).tokenizer == str(package)
    (package / "tokenizer.json").unlink()
    files = locate(package, extra_tokenizer_candidates=["owner/name", tmp_path / "none", other / "tokenizer.json"])
    assert files.tokenizer == str(other)
    assert files.origins["tokenizer"] == "an additional candidate"


def test_olive_record_tells_where_the_tokenizer_is(tmp_path: Path) -> None:
    folder, other = bare(tmp_path / "a"), put_tokenizer(tmp_path / "b" / "other")
    olive_record(folder, folder, additional_files=[str(other / "tokenizer.json")])
    assert locate(folder).tokenizer == str(other)
    olive_record(folder, folder, _name_or_path=str(other))
    assert locate(folder / "model.onnx").tokenizer == str(other)
    olive_record(folder, folder, _name_or_path="owner/name")
    assert locate(folder).origins["tokenizer"] == "_name_or_path in Olive's model_config.json (a hub name)"


def test_missing_tokenizer_says_where_it_looked(tmp_path: Path) -> None:
    folder = bare(tmp_path)
    with refused(ModelError, "not_found", holds="tokenizer") as caught:
        locate(folder, extra_tokenizer_candidates=["/not/there"])
    for place in (folder, tmp_path, "/not/there"):
        assert f"'{place}'" in str(caught.value)
    assert "set 'tokenizer'" in str(caught.value)


# --- kind ------------------------------------------------------------------------------------------------------------


def put_hf(folder: Path) -> Path:
    put_json(folder / "config.json", {})
    (folder / "model.safetensors").touch()
    return folder


def test_kind_of_what_locate_takes_is_onnx(package: Path, tmp_path: Path) -> None:
    assert model_kind(package) == "onnx"
    assert model_kind(package / "model.onnx") == "onnx"
    put_graph(tmp_path / "nested" / "onnx" / "model.onnx")
    assert model_kind(tmp_path / "nested") == "onnx"
    put_genai(tmp_path / "genai", "deep/er/model.onnx")
    assert model_kind(tmp_path / "genai") == "onnx"
    (tmp_path / "out").mkdir()
    olive_record(tmp_path / "out", package, "model.onnx")
    assert model_kind(tmp_path / "out") == "onnx"


def test_kind_of_config_with_weights_is_hf(tmp_path: Path) -> None:
    assert model_kind(put_hf(tmp_path)) == "hf"
    put_graph(tmp_path / "onnx" / "model.onnx")
    assert model_kind(tmp_path) == "hf"
    put_graph(tmp_path / "model.onnx")
    assert model_kind(tmp_path) == "onnx"


def test_kind_of_a_hub_name_is_hf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert model_kind("owner/name-0.5B") == "hf"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    for mistyped in ("out/model", "gone", "./owner/name", "a/b/c", "owner/model.onnx", str(tmp_path / "gone")):
        with refused(ModelError, "not_found"):
            model_kind(mistyped)


def test_kind_of_neither_is_refused(tmp_path: Path) -> None:
    put_json(tmp_path / "config.json", {})
    with refused(ModelError, "unsupported", holds=("ONNX", "config.json")):
        model_kind(tmp_path)
    olive_record(tmp_path, "/out/model", kind="hfmodel")
    with refused(ModelError, "unsupported", holds=("/out/model", "model_config.json")):
        model_kind(tmp_path)
    with pytest.raises(ModelError, match=r"not an \.onnx file"):
        model_kind(tmp_path / "config.json")

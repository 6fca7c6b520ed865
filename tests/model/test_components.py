"""What each graph of a model does: by the graphs, by names, and where the two contradict each other."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from olive_ext.check.model_check import check_model
from olive_ext.config import EvaluationConfig, ModelSettings
from olive_ext.errors import ConfigError, ModelError, ProviderError
from olive_ext.model import resolve
from olive_ext.model.providers.devices import Provider
from olive_ext.model.spec.encoder_spec import find_parts, settle
from olive_ext.model.spec.tensor_names import Outline
from olive_ext.model.types import TensorSpec
from tests.exports.media import media_export
from tests.refusals import refused

CPU = "CPUExecutionProvider"
FOLDERS = {"decoder": "text", "embedding": "words", "vision_encoder": "eyes"}

IDS = TensorSpec("input_ids", 7, ("B", "S"))
FEATURES = (TensorSpec("image_features", 1, ("N", 64)), TensorSpec("audio_features", 1, ("M", 64)))


def outline(inputs: list[TensorSpec], *outputs: TensorSpec) -> Outline:
    return Outline({one.name: one for one in inputs}, {one.name: one for one in outputs}, {})


EMBEDS = TensorSpec("inputs_embeds", 1, ("B", "S", 64))
DECODER = outline([EMBEDS], TensorSpec("logits", 1, ("B", "S", 99)))
EMBEDDING = outline([IDS, *FEATURES], EMBEDS)


def encoder(given: str, returned: TensorSpec) -> Outline:
    return outline([TensorSpec(given, 1, ("B", 3, 32, 32))], returned)


@pytest.fixture
def by_hand(tmp_path: Path) -> Path:
    """A folder of graphs whose names say nothing."""
    source, _ = media_export("llava")
    for theirs, ours in FOLDERS.items():
        shutil.copytree(source / theirs, tmp_path / ours)
    for file in source.glob("*.json"):
        if file.name != "genai_config.json":
            shutil.copy(file, tmp_path)
    return tmp_path


def test_parts_are_told_by_what_graphs_make_of_each_other() -> None:
    unnamed = TensorSpec("output", 1, ("rows", 64))
    others = {
        Path("a"): EMBEDDING,
        Path("b"): encoder("pixel_values", unnamed),
        Path("c"): encoder("input_features", FEATURES[1]),
        Path("d"): encoder("pixel_values", TensorSpec("output", 1, ("rows", 65))),
        Path("e"): encoder("x", unnamed),  # for pictures or for sound
    }
    found = find_parts(DECODER, others)
    assert {str(file): part.name for file, part in found.items()} == {"a": "embedding", "b": "vision", "c": "audio"}


def test_encoder_of_an_encoder_decoder_is_told_by_its_states() -> None:
    states = TensorSpec("encoder_hidden_states", 1, ("B", "T", 64))
    decoder = outline([IDS, states], TensorSpec("logits", 1, ("B", "S", 99)))
    found = find_parts(decoder, {Path("a"): outline([IDS], TensorSpec("last_hidden_state", 1, ("B", "T", 64)))})
    assert [part.name for part in found.values()] == ["encoder"]


def test_name_that_contradicts_the_graphs_is_refused_with_both() -> None:
    found = find_parts(DECODER, {Path("a"): EMBEDDING, Path("b"): encoder("pixel_values", FEATURES[0])})
    error = (
        r"by genai_config.json's model.speech.filename 'b' is the part 'audio'; by the graphs it is 'vision': "
        "it returns what the embedding graph takes as 'image_features'"
    )
    with pytest.raises(ModelError, match=error):
        settle({"audio": (Path("b"), "genai_config.json's model.speech.filename")}, found)


def test_two_graphs_of_one_part_are_refused_unless_one_is_named() -> None:
    one, other = (encoder("pixel_values", FEATURES[0]) for _ in range(2))
    found = find_parts(DECODER, {Path("a"): EMBEDDING, Path("b"): one, Path("c"): other})
    with refused(ModelError, "contradiction", holds=("vision", "components")):
        settle({}, found)
    assert settle({"vision": (Path("c"), "here")}, found)["vision"] == (Path("c"), "here")


@pytest.mark.slow
def test_folder_of_graphs_whose_names_say_nothing_is_understood(by_hand: Path) -> None:
    model = resolve(ModelSettings(model=str(by_hand)))
    assert {part: files.graph.parent.name for part, files in model.files.companions.items()} == {
        "embedding": "words",
        "vision": "eyes",
    }
    assert model.files.origins["vision"] == "it returns what the embedding graph takes as 'image_features'"
    assert model.media is not None
    assert not model.media.problem
    package = resolve(ModelSettings(model=str(media_export("llava")[0])))
    assert package.media is not None
    assert model.media.encoders[0].placeholder == package.media.encoders[0].placeholder


@pytest.mark.slow
def test_components_are_named_by_hand(by_hand: Path) -> None:
    shutil.copytree(by_hand / "eyes", by_hand / "other")
    with refused(ModelError, "contradiction", holds=("eyes", "other", "vision")):
        resolve(ModelSettings(model=str(by_hand)))
    named = {"decoder": "text/model.onnx", "embedding": "words/model.onnx", "vision": "other/model.onnx"}
    files = resolve(ModelSettings(model=str(by_hand), components=named)).files
    assert files.companions["vision"].graph == by_hand / "other" / "model.onnx"
    assert (files.decoder, files.origins["vision"]) == (by_hand / "text" / "model.onnx", "the setting 'components'")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("components", "error"),
    [
        (
            {"vision": "words/model.onnx"},
            {"code": "unsupported", "holds": ("components", "words", "vision", "embedding")},
        ),
        ({"vision": "text/model.onnx"}, {"code": "contradiction", "field": "components.vision"}),
        (
            {"vision": "nose/model.onnx"},
            {"code": "not_found", "field": "components.vision", "value": "nose/model.onnx"},
        ),
        (
            {"decoder": "words/model.onnx"},
            {"code": "contradiction", "holds": "words"},
        ),
        (
            {"embedding": "text/model.onnx"},
            {"code": "contradiction", "holds": ("embedding", "inputs_e")},
        ),
        (
            {"audio": "eyes/model.onnx"},
            {"code": "unsupported", "holds": ("eyes", "audio", "vision")},
        ),
    ],
)
def test_components_that_are_wrong_are_refused_by_name(
    by_hand: Path, components: dict[str, str], error: dict[str, Any]
) -> None:
    with refused(ModelError, **error):
        resolve(ModelSettings.of({"model": by_hand, "components": components}))


def test_component_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with refused(ConfigError, "wrong_value", "components", {"visoin": "a.onnx"}):
        ModelSettings.of({"model": "x", "components": {"visoin": "a.onnx"}})


@pytest.mark.slow
def test_encoder_has_the_provider_of_the_setting_then_of_its_section_then_the_decoders(tmp_path: Path) -> None:
    shutil.copytree(media_export("llava")[0], tmp_path / "package")
    file = tmp_path / "package" / "genai_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["model"]["vision"]["session_options"]["provider_options"] = [{"nowhere": {}}]
    file.write_text(json.dumps(config), encoding="utf-8")

    def provider(**settings: object) -> Provider:
        model = resolve(ModelSettings.of({"model": tmp_path / "package", **settings}))
        assert model.media is not None
        assert model.providers[0].name == CPU
        return model.providers_of(model.media.encoders[0])[0]

    for settings in ({}, {"engine": {"encoder_provider": {"audio": "cpu"}}}):
        with refused(ProviderError, "unknown_name", holds=("nowhere", "genai_config.json")):
            provider(**settings)
    assert provider(execution_provider="cpu").origin == "execution_provider"
    assert provider(engine={"encoder_provider": "cpu"}).origin == "engine.encoder_provider"
    for named in ([["nothing", {"device_id": 1}]], {"vision": "nothing"}):
        with refused(ProviderError, "unknown_name", holds="engine.encoder_provider"):
            provider(engine={"encoder_provider": named})


@pytest.mark.slow
def test_encoder_without_a_section_of_its_own_runs_where_the_decoder_does(by_hand: Path) -> None:
    model = resolve(ModelSettings(model=str(by_hand)))
    assert model.media is not None
    assert model.providers_of(model.media.encoders[0]) == model.providers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "section", "value", "error"),
    [
        (
            "genai_config.json",
            "model.vision",
            {"filename": "embedding/model.onnx"},
            "'vision'; by the graphs it is 'embedd",
        ),
        (
            "genai_config.json",
            "model.embedding",
            {"filename": "vision_encoder/model.onnx"},
            "returns image_features",
        ),
        (
            "genai_config.json",
            "model",
            {"image_token_id": 5},
            r"genai_config.json 5, .*; the embedding graph compares ids wi",
        ),
        ("config.json", "", {"image_token_id": 5}, r"config.json 5, .*the embedding graph compares ids with \[1018\]"),
    ],
)
def test_package_whose_files_contradict_its_graphs_is_told_with_both(
    tmp_path: Path, file: str, section: str, value: dict[str, object], error: str
) -> None:
    package = Path(shutil.copytree(media_export("qwen2_5_vl")[0], tmp_path / "package"))
    config = json.loads((package / file).read_text(encoding="utf-8"))
    place = config
    for name in filter(None, section.split(".")):
        place = place[name]
    place.update(value)
    (package / file).write_text(json.dumps(config), encoding="utf-8")
    found = check_model(EvaluationConfig.parse({"model": {"path": str(package)}, "tasks": ["a"]}))
    assert re.search(error, "\n".join([*found.problems, found.text()]))


@pytest.mark.slow
def test_check_prints_the_text_of_a_placeholder() -> None:
    path = str(media_export("qwen2_5_vl")[0])
    found = check_model(EvaluationConfig.parse({"model": {"path": path}, "tasks": ["a"]}))
    assert re.search(r"image placeholder +1018 '<\|image_pad\|>'", found.text())

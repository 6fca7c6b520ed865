"""What a decoder takes of an encoder, and what each graph of a model does: by the graphs, by names, and where the two
contradict each other. Which tokens of an item see each other, by the masks' own nodes, and what an export computes
otherwise than its original."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from onnx import ModelProto, TensorProto, helper, parser

from olive_ext.check.model_check import check_model
from olive_ext.config import EvaluationConfig, ModelSettings
from olive_ext.errors import ModelError, ProviderError
from olive_ext.model import resolve
from olive_ext.model.files.locate import find_companions, pick_with_past
from olive_ext.model.providers.devices import Provider
from olive_ext.model.spec.attention import tensor_spec
from olive_ext.model.spec.encoder_spec import find_parts, read_cross_inputs, read_encoder, settle
from olive_ext.model.spec.media_spec import known_faults, read_item_masks
from olive_ext.model.spec.step_choices import PositionalNodes
from olive_ext.model.spec.tensor_names import Outline
from olive_ext.model.types import CrossInputs, InputSpec, ItemMasks, Role, SourceKind, TensorSpec
from tests.exports.media import media_export
from tests.refusals import refused

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
STATES = TensorSpec("encoder_hidden_states", FLOAT, ("B", "T", 8))
MASK = TensorSpec("encoder_attention_mask", INT64, ("B", "T"))
KEY = TensorSpec("past_key_values.0.encoder.key", FLOAT, ("B", 2, "T", 4))


def _graph(inputs: dict[str, tuple[int, tuple[object, ...]]], outputs: list[str]) -> ModelProto:
    values = [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()]
    returned = [helper.make_tensor_value_info(name, FLOAT, ["B", "T", 8]) for name in outputs]
    return helper.make_model(helper.make_graph([], "encoder", values, returned))


TEXT = {"input_ids": (INT64, ("B", "S")), "attention_mask": (INT64, ("B", "S"))}
SOUND = {"audio_features": (FLOAT, ("B", 80, 3000))}


def _cross(*tensors: TensorSpec, config: dict | None = None) -> CrossInputs:
    return read_cross_inputs({tensor.name: tensor for tensor in tensors}, config or {})


def test_cross_inputs_are_told_from_the_decoders_own() -> None:
    own = TensorSpec("past_key_values.0.decoder.key", FLOAT, ("B", 2, "P", 4))
    cross = _cross(own, STATES, MASK, KEY)
    assert cross == CrossInputs((STATES,), (MASK,), {"present.0.encoder.key": KEY})
    assert cross.names == {STATES.name, MASK.name, KEY.name}
    assert not _cross(own)


def test_genai_config_names_cross_inputs_as_it_likes() -> None:
    key = TensorSpec("their_3_key", FLOAT, ("B", 2, "T", 4))
    config = {
        "decoder": {"inputs": {"cross_past_key_names": "their_%d_key"}},
        "encoder": {"outputs": {"cross_present_key_names": "my_%d_key"}},
    }
    assert _cross(key, config=config).kv == {"my_3_key": key}


def test_encoder_or_first_step_that_returns_cross_kv_gives_it() -> None:
    key = TensorSpec("past_key_cross_0", FLOAT, ("B", 2, 1500, 4))
    spec = read_encoder(_graph(SOUND, ["hidden_states", "present_key_cross_0"]), _cross(key), {})
    assert (spec.kind, spec.mask, spec.first_step) == (SourceKind.FEATURES, None, None)
    assert spec.outputs == {"past_key_cross_0": "present_key_cross_0"}
    states = {"encoder_hidden_states": (FLOAT, ("B", "T", 8)), "input_ids": TEXT["input_ids"]}
    first = _graph(states, ["present.0.encoder.key"])
    spec = read_encoder(_graph(TEXT, ["last_hidden_state"]), _cross(KEY, MASK), {}, first)
    assert spec.kind is SourceKind.TOKENS
    assert spec.mask is not None
    assert spec.masks == (MASK,)
    assert spec.first_step is not None
    assert spec.first_step.outputs == {KEY.name: "present.0.encoder.key"}
    assert [tensor.name for tensor in spec.first_step.tokens] == ["input_ids"]


def test_cross_kv_that_nothing_computes_is_left_empty_where_the_decoder_has_the_states() -> None:
    encoder = _graph(TEXT, ["last_hidden_state"])
    assert read_encoder(encoder, _cross(KEY, STATES), {}).unused == (KEY,)
    with refused(ModelError, "unsupported", holds=("past_key_values", "0")):
        read_encoder(encoder, _cross(KEY), {})


@pytest.mark.parametrize(
    ("inputs", "outputs", "holds"),
    [
        ({"pixels": (FLOAT, ("B", 3))}, ["last_hidden_state"], "pixels"),
        (TEXT, ["logits"], "last_hidden_state"),
        ({**SOUND, "lengths": (INT64, ("B",))}, ["hidden_states"], "lengths"),
        ({"input_features": (INT64, ("B", 80, 30))}, ["hidden_states"], "input_features"),
    ],
)
def test_encoder_that_is_not_understood_is_refused_by_name(inputs, outputs, holds) -> None:
    with refused(ModelError, "unsupported", holds=holds):
        read_encoder(_graph(inputs, outputs), _cross(STATES), {})


def _put(folder: Path, *names: str) -> list[Path]:
    files = [folder / name for name in names]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return files


OPTIMUM = ["decoder_with_past_model.onnx", "decoder_model.onnx", "decoder_model_merged.onnx", "encoder_model.onnx"]
QUANTIZED = ["decoder_model_merged_quantized.onnx", "encoder_model_quantized.onnx", "encoder_model.onnx"]
CONFIG = {"model": {"encoder": {"filename": "own.onnx"}}}


@pytest.mark.parametrize(
    ("names", "config", "parts"),
    [
        (OPTIMUM, {}, {"encoder": "encoder_model.onnx", "first_step": "decoder_model.onnx"}),
        (OPTIMUM[2:], {}, {"encoder": "encoder_model.onnx"}),
        (QUANTIZED, {}, {"encoder": "encoder_model_quantized.onnx"}),
        (["decoder/model.onnx", "encoder/model.onnx"], {}, {"encoder": "encoder/model.onnx"}),
        (["decoder.onnx", "own.onnx"], CONFIG, {"encoder": "own.onnx"}),
    ],
)
def test_companions_are_known_by_the_names_beside_the_decoders(names, config, parts, tmp_path: Path) -> None:
    decoder, *others = _put(tmp_path, *names)
    found = find_companions(decoder, tmp_path, config)
    assert {part: str(file.relative_to(tmp_path)) for part, (file, _) in found.items()} == parts
    if config:
        assert found["encoder"][1] == "genai_config.json's model.encoder.filename"
        others[0].unlink()
        with refused(ModelError, "not_found"):
            find_companions(decoder, tmp_path, config)


def test_decoder_with_a_past_is_picked_where_there_is_an_encoder(tmp_path: Path) -> None:
    with_past, plain, merged, encoder = _put(tmp_path, *OPTIMUM)
    picked = pick_with_past([plain, merged, with_past])
    assert picked is not None
    assert picked[0] == with_past
    encoder.unlink()
    assert pick_with_past([plain, with_past]) is None


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


def test_names_that_contradict_the_graphs_and_two_graphs_of_one_part_are_refused() -> None:
    one, other = (encoder("pixel_values", FEATURES[0]) for _ in range(2))
    found = find_parts(DECODER, {Path("a"): EMBEDDING, Path("b"): one, Path("c"): other})
    with refused(ModelError, "unsupported", holds=("'b'", "'audio'", "'vision'", "'image_features'")):
        settle({"audio": (Path("b"), "a rule")}, found)
    with refused(ModelError, "contradiction", holds=("vision", "components")):
        settle({}, found)
    assert settle({"vision": (Path("c"), "here")}, found)["vision"] == (Path("c"), "here")


def test_components_are_named_by_hand(by_hand: Path) -> None:
    shutil.copytree(by_hand / "eyes", by_hand / "other")
    with refused(ModelError, "contradiction", holds=("eyes", "other", "vision")):
        resolve(ModelSettings(model=str(by_hand)))
    named = {"decoder": "text/model.onnx", "embedding": "words/model.onnx", "vision": "other/model.onnx"}
    files = resolve(ModelSettings(model=str(by_hand), components=named)).files
    assert files.companions["vision"].graph == by_hand / "other" / "model.onnx"
    assert (files.decoder, files.origins["vision"]) == (by_hand / "text" / "model.onnx", "the setting 'components'")


@pytest.mark.parametrize(
    ("part", "folder", "code", "field", "holds"),
    [
        ("vision", "words", "unsupported", "", ("components", "words", "vision", "embedding")),
        ("vision", "text", "contradiction", "components.vision", ()),
        ("vision", "nose", "not_found", "components.vision", "nose/model.onnx"),
        ("decoder", "words", "contradiction", "", "words"),
        ("embedding", "text", "contradiction", "", ("embedding", "inputs_e")),
        ("audio", "eyes", "unsupported", "", ("eyes", "audio", "vision")),
    ],
)
def test_components_that_are_wrong_are_refused_by_name(
    by_hand: Path, part: str, folder: str, code: str, field: str, holds: Any
) -> None:
    with refused(ModelError, code, field, f"{folder}/model.onnx" if code == "not_found" else ..., holds=holds):
        resolve(ModelSettings.of({"model": by_hand, "components": {part: f"{folder}/model.onnx"}}))


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


def test_encoder_of_a_package_runs_on_the_provider_that_its_variant_is_for(by_hand: Path) -> None:
    """Unless a setting names another."""
    parts = {"decoder": ("text", CPU), "embedding": ("words", CPU), "vision": ("eyes", "CUDAExecutionProvider")}
    variants = {part: {"x": {"variant_directory": folder, "ep": ep}} for part, (folder, ep) in parts.items()}
    components = {part: {"variants": one} for part, one in variants.items()}
    manifest = {"schema_version": "1.0", "components": components}
    (by_hand / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    for settings in ({"engine": {"encoder_provider": "cpu"}}, {"variant": "x", "execution_provider": "cpu"}, {}):
        model = resolve(ModelSettings.of({"model": by_hand, **settings}))
        assert model.media is not None
        assert model.providers[0].name == CPU
        if settings:
            assert model.providers_of(model.media.encoders[0])[0].name == CPU
        else:
            with refused(ProviderError, "provider", holds=("CUDAExecutionProvider", "variant")):
                model.providers_of(model.media.encoders[0])


@pytest.mark.parametrize(
    ("keys", "value", "error"),
    [
        ("model.vision.filename", "embedding/model.onnx", "'vision'.*'embedd"),
        ("model.embedding.filename", "vision_encoder/model.onnx", "returns image_features"),
        ("model.image_token_id", 5, r"genai_config.json 5, "),
        ("image_token_id", 5, r"config.json 5, .*\[1018\]"),
    ],
)
def test_package_whose_files_contradict_its_graphs_is_told_with_both(
    tmp_path: Path, keys: str, value: Any, error: str
) -> None:
    package = Path(shutil.copytree(media_export("qwen2_5_vl")[0], tmp_path / "package"))
    file = "genai_config.json" if keys.startswith("model") else "config.json"
    place = config = json.loads((package / file).read_text(encoding="utf-8"))
    *sections, key = keys.split(".")
    for name in sections:
        place = place[name]
    place[key] = value
    (package / file).write_text(json.dumps(config), encoding="utf-8")
    found = check_model(EvaluationConfig.parse({"model": {"path": str(package)}, "tasks": ["a"]}))
    assert re.search(error, "\n".join([*found.problems, found.text()]))


def test_check_prints_the_text_of_a_placeholder() -> None:
    path = str(media_export("qwen2_5_vl")[0])
    found = check_model(EvaluationConfig.parse({"model": {"path": path}, "tasks": ["a"]}))
    assert re.search(r"image placeholder +1018 '<\|image_pad\|>'", found.text())


WINDOW = 3
GRAPH = """
<ir_version: 10, opset_import: ["": 24]>
decoder (int64[B, S] input_ids, float[B, S, 8] x, float[B, 1, P, 8] past)
=> (float[B, S, 8] full, float[B, S, 8] near) {{
    placeholder = Constant <value_int = 9> ()
    window = Constant <value_int = {window}> ()
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    first = Constant <value_ints = [1]> ()
    last = Constant <value_ints = [2]> ()
    number = Shape <start = 1, end = 2> (input_ids)
    length = Squeeze (number)
    places = Range (zero, length, one)
    row = Unsqueeze (places, zero)
    column = Unsqueeze (places, one)
    distance = Sub (column, row)
    before = GreaterOrEqual (distance, zero)
    within = Less (distance, window)
    is_item = Equal (input_ids, placeholder)
    asks = Unsqueeze (is_item, last)
    answers = Unsqueeze (is_item, first)
    is_one = And (asks, answers)
    joined = Or (before, is_one)
    recent = And (before, within)
    {masks}
    full = Attention <q_num_heads = 1, kv_num_heads = 1> (x, x, x, full_mask)
    near = Attention <q_num_heads = 1, kv_num_heads = 1> (x, x, x, near_mask)
}}
"""


def masked_graph(masks: str) -> ModelProto:
    return parser.parse_model(GRAPH.format(window=WINDOW, masks=masks))


def positional(model: ModelProto) -> PositionalNodes:
    return PositionalNodes(model, [InputSpec(Role.INPUT_IDS, TensorSpec("input_ids", 7, ("B", "S")))], [])


OLDER = "full_mask = Identity (joined) near_mask = Or (recent, is_one)"
ADDED = """
    nothing = Constant <value_float = 0.0> () hidden = Constant <value_float = -65504.0> ()
    full_mask = Where (joined, nothing, hidden) near_mask = Where (recent, nothing, hidden)
"""


@pytest.mark.parametrize(
    ("masks", "num_tokens", "joined", "beyond_window"),
    [
        ("full_mask = Identity (before) near_mask = And (joined, within)", WINDOW + 2, (1,), ()),
        (OLDER, WINDOW + 2, (0, 1), (1,)),
        ("full_mask = Identity (joined) near_mask = Identity (recent)", WINDOW + 2, (0,), ()),
        ("full_mask = Identity (before) near_mask = Identity (recent)", WINDOW + 2, (), ()),
        (ADDED, WINDOW + 2, (0,), ()),
        (OLDER, 1 << 40, (0, 1), (1,)),
    ],
    ids=["5.23", "5.10", "neither", "none", "numbers that are added", "a window of any length"],
)
def test_layers_in_which_an_items_tokens_see_each_other(
    masks: str, num_tokens: int, joined: tuple[int, ...], beyond_window: tuple[int, ...]
) -> None:
    """Masks of Gemma 4 in two versions of transformers, and others."""
    found = read_item_masks(positional(masked_graph(masks)), {9}, num_tokens)
    assert found == ItemMasks(joined, beyond_window)


def test_a_mask_that_explodes_or_may_never_end_is_not_run() -> None:
    """An Expand to 8 GB, and a Loop."""
    huge = """
        many = Constant <value_ints = [1000000000]> () wide = Expand (number, many)
        most = ReduceMax <keepdims = 0> (wide) near = Less (distance, most)
        full_mask = And (joined, near) near_mask = Identity (full_mask)
    """
    with pytest.raises(ValueError, match="Expand of"):
        read_item_masks(positional(masked_graph(huge)), {9}, WINDOW + 2)
    graph = masked_graph(OLDER)
    body = helper.make_graph(
        [helper.make_node("Identity", ["on"], ["still"])],
        "body",
        [helper.make_tensor_value_info(name, kind, []) for name, kind in (("i", 7), ("on", 9))],
        [helper.make_tensor_value_info("still", 9, [])],
    )
    loop = next(node for node in graph.graph.node if node.output[0] == "joined")
    loop.CopyFrom(helper.make_node("If", ["before"], ["joined"], then_branch=body))
    loop.attribute[0].g.node.append(helper.make_node("Loop", ["", "on"], [], body=body))
    assert read_item_masks(positional(graph), {9}, WINDOW + 2) == ItemMasks((1,), (1,)), "the other one is read"


def graph(*outputs: str, producer: str = "mobius") -> ModelProto:
    made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", 64]) for name in outputs]
    return helper.make_model(helper.make_graph([], "encoder", [], made), producer_name=producer)


@pytest.mark.parametrize(
    ("part", "encoder", "config", "told"),
    [
        ("vision", graph("image"), {"deepstack_visual_indexes": [5, 11]}, r"layers \[5, 11\]"),
        ("vision", graph("image", "deep"), {"deepstack_visual_indexes": [5, 11]}, None),
        ("vision", graph("image"), {"deepstack_visual_indexes": []}, None),
        ("audio", graph("audio"), {"num_attention_heads": 4}, "num_attention_heads 4.* in 8"),
        ("audio", graph("audio"), {"num_attention_heads": 8}, None),
        ("audio", graph("audio", producer="pytorch"), {"num_attention_heads": 4}, None),
        ("text", graph("image"), {"use_bidirectional_attention": "vision"}, "see each other"),
    ],
)
def test_fault_is_told_where_graph_and_configuration_show_it(
    part: str, encoder: ModelProto, config: dict[str, Any], told: str | None
) -> None:
    taken = [tensor_spec(value) for value in encoder.graph.output]
    found = [*known_faults({part: (encoder, taken)}, ({}, {"model_type": "gemma4", f"{part}_config": config}))]
    assert len(found) == (told is not None)
    for sentence in found:
        assert re.search(str(told), sentence)


@pytest.mark.parametrize(
    ("masks", "told"),
    [
        (ItemMasks(), "token types"),
        (ItemMasks((0, 1, 2), (0, 2)), "1 layers .* 2 sliding .* 16"),
        (ItemMasks((0, 2), (2,)), "1 sliding layers .* 16"),
        (ItemMasks((0, 2)), None),
    ],
)
def test_masks_of_gemma_4_are_held_against_transformers(masks: ItemMasks, told: str | None) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    text = {"use_bidirectional_attention": "vision", "layer_types": kinds, "sliding_window": 16}
    found = [*known_faults({}, ({}, {"model_type": "gemma4", "text_config": text}), masks)]
    assert len(found) == (told is not None)
    for sentence in found:
        assert re.search(str(told), sentence)

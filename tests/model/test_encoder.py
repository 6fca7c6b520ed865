"""What a decoder takes of an encoder is read from both graphs, whoever exported them."""

from __future__ import annotations

from pathlib import Path

import pytest
from onnx import ModelProto, TensorProto, helper

from olive_ext.errors import ModelError
from olive_ext.model.files.folders import find_companions, pick_with_past
from olive_ext.model.spec.encoder_spec import read_cross_inputs, read_encoder
from olive_ext.model.types import CrossInputs, SourceKind, TensorSpec
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


def test_encoder_that_returns_cross_kv_gives_it() -> None:
    key = TensorSpec("past_key_cross_0", FLOAT, ("B", 2, 1500, 4))
    spec = read_encoder(_graph(SOUND, ["hidden_states", "present_key_cross_0"]), _cross(key), {})
    assert (spec.kind, spec.mask, spec.first_step) == (SourceKind.FEATURES, None, None)
    assert spec.outputs == {"past_key_cross_0": "present_key_cross_0"}


def test_first_step_computes_cross_kv_from_the_states() -> None:
    first = _graph(
        {"encoder_hidden_states": (FLOAT, ("B", "T", 8)), "input_ids": TEXT["input_ids"]}, ["present.0.encoder.key"]
    )
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
    ("inputs", "outputs", "message"),
    [
        ({"pixels": (FLOAT, ("B", 3))}, ["last_hidden_state"], {"code": "unsupported", "holds": "pixels"}),
        (TEXT, ["logits"], {"code": "unsupported", "holds": "last_hidden_state"}),
        ({**SOUND, "lengths": (INT64, ("B",))}, ["hidden_states"], {"code": "unsupported", "holds": "lengths"}),
        ({"input_features": (INT64, ("B", 80, 30))}, ["hidden_states"], {"code": "unsupported"}),
    ],
)
def test_encoder_that_is_not_understood_is_refused_by_name(inputs, outputs, message) -> None:
    with refused(ModelError, **message):
        read_encoder(_graph(inputs, outputs), _cross(STATES), {})


def _put(folder: Path, *names: str) -> list[Path]:
    files = [folder / name for name in names]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return files


def test_decoder_with_a_past_is_picked_and_the_others_work_beside_it(tmp_path: Path) -> None:
    names = ["decoder_model.onnx", "decoder_model_merged.onnx", "decoder_with_past_model.onnx", "encoder_model.onnx"]
    plain, merged, with_past, encoder = _put(tmp_path, *names)
    picked = pick_with_past([plain, merged, with_past])
    assert picked is not None
    assert picked[0] == with_past
    found = find_companions(with_past, tmp_path, {})
    assert {part: file for part, (file, _) in found.items()} == {"encoder": encoder, "first_step": plain}
    assert find_companions(merged, tmp_path, {}).keys() == {"encoder"}


def test_decoders_without_an_encoder_are_not_chosen_between(tmp_path: Path) -> None:
    assert pick_with_past(_put(tmp_path, "decoder_model.onnx", "decoder_with_past_model.onnx")) is None


def test_companions_have_the_decoders_suffix_or_its_folders_name(tmp_path: Path) -> None:
    decoder, encoder, _ = _put(
        tmp_path, "decoder_model_merged_quantized.onnx", "encoder_model_quantized.onnx", "encoder_model.onnx"
    )
    assert find_companions(decoder, tmp_path, {})["encoder"][0] == encoder
    decoder, encoder = _put(tmp_path / "package", "decoder/model.onnx", "encoder/model.onnx")
    assert find_companions(decoder, decoder.parent, {})["encoder"][0] == encoder


def test_genai_config_names_the_encoder(tmp_path: Path) -> None:
    decoder, encoder = _put(tmp_path, "decoder.onnx", "encoder.onnx")
    config = {"model": {"encoder": {"filename": "encoder.onnx"}}}
    assert find_companions(decoder, tmp_path, config)["encoder"] == (
        encoder,
        "genai_config.json's model.encoder.filename",
    )
    encoder.unlink()
    with refused(ModelError, "not_found"):
        find_companions(decoder, tmp_path, config)

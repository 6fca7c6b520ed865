"""Packages that take pictures: exports of random models, by mobius or in onnxruntime-genai's layout, with a tokenizer
that has the models' markers and the image processor that the original model would have, for small pictures."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.exports.cache import once, packages, run_python, source_of
from tests.exports.genai_layout import GENAI_LAYOUT, genai_layout
from tests.exports.hf import MEDIA, hf_model
from tests.exports.mobius import RELEASE, mobius_export
from tests.exports.text import CONTEXT, SPECIAL, TEXT, VOCAB

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type in ('image', 'audio') %}MARKER{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass(frozen=True)
class MediaFamily:
    """How a family's prompts hold pictures, and its image processor."""

    tokens: tuple[str, ...]
    """Texts of the last token ids, from `MEDIA` on."""

    marker: str
    """What a prompt holds for a picture."""

    processor: dict[str, Any]
    """What preprocessor_config.json holds for pictures, or processor_config.json for sounds."""

    names: dict[str, str]
    """The tokenizer's names of special tokens."""

    source: str = ""
    """The family in `hf.FAMILIES`, where it is not of the same name."""


def _siglip(side: int) -> dict[str, Any]:
    return {"image_processor_type": "SiglipImageProcessor", "size": {"height": side, "width": side}}


def _gemma3(side: int) -> dict[str, Any]:
    size = {"height": side, "width": side}
    return {"image_processor_type": "Gemma3ImageProcessor", "size": size, "do_pan_and_scan": False}


_QWEN = MediaFamily(
    ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    "<|vision_start|><|image_pad|><|vision_end|>",
    {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 8,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 16 * 16, "longest_edge": 64 * 64},
    },
    {},
)
MEDIA_FAMILIES = {
    "gemma4_vl": MediaFamily(
        ("<boi>", "<|image|>", "<eoi>", "<boa>", "<|audio|>", "<eoa>", "<|video|>"),
        "<|image|>",
        {
            "image_processor_type": "Gemma4ImageProcessor",
            "patch_size": 4,
            "max_soft_tokens": 70,
            "pooling_kernel_size": 3,
        },
        {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<|image|>"},
    ),
    "qwen2_5_vl": _QWEN,
    "llava": MediaFamily(
        ("<image>",),
        "<image>",
        _siglip(32),
        {},
    ),
    "llava_clip": MediaFamily(
        ("<image>",),
        "<image>",
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 32},
            "crop_size": {"height": 32, "width": 32},
        },
        {},
    ),
    "gemma3": MediaFamily(
        ("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
        "<start_of_image>",
        _gemma3(32),
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
    ),
    "qwen3_5": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen2_5_vl_genai": replace(_QWEN, source="qwen2_5_vl"),
}
MEDIA_FAMILIES["gemma4_seen"] = MEDIA_FAMILIES["gemma4_vl"]

SOUND_FAMILIES = {
    "qwen3_asr": MediaFamily(
        ("<|audio_start|>", "<|audio_pad|>", "<|audio_end|>"),
        "<|audio_start|><|audio_pad|><|audio_end|>",
        {
            "processor_class": "Qwen3ASRProcessor",
            "feature_extractor": {"feature_extractor_type": "Qwen3ASRFeatureExtractor", "feature_size": 16},
        },
        {"audio_token": "<|audio_pad|>", "audio_bos_token": "<|audio_start|>", "audio_eos_token": "<|audio_end|>"},
    ),
}
SOUND_FAMILIES["gemma4_any"] = replace(
    MEDIA_FAMILIES["gemma4_vl"],
    marker="<|audio|>",
    processor={
        "processor_class": "Gemma4Processor",
        "image_processor": MEDIA_FAMILIES["gemma4_vl"].processor,
        "feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor"},
    },
    names={
        **MEDIA_FAMILIES["gemma4_vl"].names,
        "boa_token": "<boa>",
        "eoa_token": "<eoa>",
        "audio_token": "<|audio|>",
        "video_token": "<|video|>",
    },
)

BENCHMARKED = {
    "llava_base": replace(MEDIA_FAMILIES["llava"], processor=_siglip(224)),
    "gemma3_256": replace(MEDIA_FAMILIES["gemma3"], processor=_gemma3(128)),
}
"""For docs/benchmarks only: of a real shape; with onnxruntime-genai's number of tokens."""

_TOWER = ("vision_tower.", "vision_tower.vision_model.")
RENAMED = {
    "gemma3": (_TOWER,),
    "llava": (
        ("language_model.model.embed_tokens.", "embedding.embed_tokens."),
        ("language_model.", "decoder."),
        ("vision_tower.", "vision_encoder.vision_tower.vision_model."),
        ("multi_modal_projector.", "vision_encoder.multi_modal_projector."),
        (".mlp.fc1.", ".mlp.up_proj."),
        (".mlp.fc2.", ".mlp.down_proj."),
    ),
}
"""Parts of the names of weights that transformers 5 writes otherwise than mobius 0.1.0 looks for."""

RENAMED["llava_base"] = RENAMED["llava"]
RENAMED["gemma3_256"] = RENAMED["gemma3"]
RENAMED["qwen3_asr"] = (
    ("model.multi_modal_projector.linear_1.", "audio_tower.proj1."),
    ("model.multi_modal_projector.linear_2.", "audio_tower.proj2."),
    ("model.audio_tower.", "audio_tower."),
    ("model.language_model.", "model."),
)
NESTED = {"qwen3_asr": ("thinker_config", {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]})}
"""Where mobius 0.1.0 looks for what transformers 5 has at the top of config.json, as in the original checkpoint, and
the rotary embedding there: of three positions, which are equal where all is sound and text."""


def _export(family: str, dtype: str, provider: str) -> Path:
    """The package; mobius makes it of a copy of the model that has its names of weights, where these differ."""
    if family in GENAI_LAYOUT:
        return genai_layout(family)
    if family not in RENAMED:
        return mobius_export(family, dtype, provider=provider)
    source = hf_model(family)
    recipe = [source.name, RENAMED[family], NESTED.get(family), RELEASE, dtype, provider]
    options = {"dtype": dtype, "static_cache": 0, "execution_provider": provider}
    name = f"mobius-{family}-renamed-{dtype}-{provider}"
    return once(name, recipe, lambda folder: _export_renamed(family, source, folder, options))


def _export_renamed(family: str, source: Path, folder: Path, options: dict[str, Any]) -> None:
    from safetensors.torch import load_file, save_file

    renamed = folder / "hf"
    shutil.copytree(source, renamed)
    weights = load_file(renamed / "model.safetensors")
    for theirs, ours in RENAMED[family]:
        weights = {key.replace(theirs, ours, 1): value for key, value in weights.items()}
    save_file(weights, renamed / "model.safetensors", metadata={"format": "pt"})
    if family in NESTED:
        config = json.loads((renamed / "config.json").read_text(encoding="utf-8"))
        name, rope = NESTED[family]
        nested = {**config, "text_config": {**config["text_config"], "rope_parameters": rope}}
        (renamed / "config.json").write_text(json.dumps({**config, name: nested}), encoding="utf-8")
    run_python(["-m", "tests.exports.mobius", renamed, folder, json.dumps(options)], path=[packages(*RELEASE)])
    shutil.rmtree(renamed)


def media_export(family: str, dtype: str = "f32", provider: str = "default") -> tuple[Path, Path]:
    """(the package, the Hugging Face folder of the same weights), both with tokenizer and image processor."""
    made = {**MEDIA_FAMILIES, **SOUND_FAMILIES, **BENCHMARKED}[family]
    sources = _export(family, dtype, provider), hf_model(made.source or family)
    recipe = [source.name for source in sources], source_of("media.py", "text.py")
    folder = once(f"media-{family}-{dtype}-{provider}", recipe, lambda folder: _make(made, sources, folder))
    return folder / "onnx", folder / "hf"


def _make(made: MediaFamily, sources: tuple[Path, Path], folder: Path) -> None:
    for source, place in zip(sources, (folder / "onnx", folder / "hf"), strict=True):
        shutil.copytree(source, place)
        shutil.copy(sources[1] / "config.json", place)
        _save_tokenizer(made, place)
        is_sound = "feature_extractor" in made.processor
        name, more = ("processor", {}) if is_sound else ("preprocessor", {"do_convert_rgb": True})
        text = json.dumps({**made.processor, **more}, indent=2)
        (place / f"{name}_config.json").write_text(text, encoding="utf-8")


def _save_tokenizer(family: MediaFamily, folder: Path) -> None:
    """The tokenizer of the other families, with fewer merges, so that the markers have the last ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MEDIA, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    bpe.train_from_iterator([TEXT], trainer)
    fillers = [f"<unused{number}>" for number in range(MEDIA - bpe.get_vocab_size())]
    bpe.add_special_tokens([AddedToken(text, special=True) for text in (*fillers, *family.tokens)])
    bpe.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", SPECIAL.index("<bos>"))])
    assert bpe.get_vocab_size() <= VOCAB
    assert bpe.token_to_id(family.tokens[0]) == MEDIA
    named = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        **named,
        extra_special_tokens=family.names,
        chat_template=CHAT_TEMPLATE.replace("MARKER", family.marker),
        model_max_length=CONTEXT,
    ).save_pretrained(folder)


def plain_encoder_export(dtype: str, provider: str) -> Path:
    """The LLaVA package with an encoder of products alone, for devices that lack operators of mobius's encoders: 16
    patches of 8 x 8 pixels, each with a weight."""
    return _plain("llava", dtype, provider)


def plain_items_export(family: str, dtype: str, provider: str) -> Path:
    """The package of Qwen2.5-VL or Gemma 4 with encoders of one product each: four patches or frames are a row of
    features, whatever the grid and the mask say."""
    return _plain(family, dtype, provider)


def _plain(family: str, dtype: str, provider: str) -> Path:
    source, _ = media_export(family, dtype, provider)

    def made(folder: Path) -> None:
        shutil.copytree(source, folder, dirs_exist_ok=True)
        for name, features in (("vision_encoder", "image_features"), ("audio_encoder", "audio_features")):
            if (file := folder / name / "model.onnx").exists():
                _make_plain(file, features, dtype, is_llava=family == "llava")

    name = f"media-plain-{family}-{dtype}-{provider}"
    return once(name, [source.parent.name, source_of("media.py")], made)


def _make_plain(file: Path, features: str, dtype: str, *, is_llava: bool) -> None:
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    elem_type = {"f32": TensorProto.FLOAT, "f16": TensorProto.FLOAT16}[dtype]
    inputs = list(onnx.load(file, load_external_data=False).graph.input)
    inputs[0].type.tensor_type.elem_type = elem_type
    name, width = inputs[0].name, 4 * inputs[0].type.tensor_type.shape.dim[-1].dim_value
    nodes, numbers, rows = [], {}, ["rows", 64]
    if is_llava:
        width, rows = 192, ["batch", 16, 64]
        inputs = [helper.make_tensor_value_info(name, elem_type, ["batch", 3, 32, 32])]
        numbers["patches"] = [-1, 3, 4, 8, 4, 8]
        nodes = [
            helper.make_node("Reshape", [name, "patches"], ["split"]),
            helper.make_node("Transpose", ["split"], ["sorted"], perm=[0, 2, 4, 1, 3, 5]),
        ]
        name = "sorted"
    numbers["rows"] = [-1, 16, width] if is_llava else [-1, width]
    nodes += [
        helper.make_node("Reshape", [name, "rows"], ["flat"]),
        helper.make_node("MatMul", ["flat", "weight"], [features], name="projector"),
    ]
    weight = np.random.default_rng(0).normal(scale=0.1, size=(width, 64))
    weights = [numpy_helper.from_array(weight.astype(helper.tensor_dtype_to_np_dtype(elem_type)), "weight")]
    weights += [numpy_helper.from_array(np.array(value), key) for key, value in numbers.items()]
    outputs = [helper.make_tensor_value_info(features, elem_type, rows)]
    graph = helper.make_graph(nodes, "encoder", inputs, outputs, weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), file)

"""Packages in onnxruntime-genai's layout: its builder's decoder without embeddings, and beside it `vision.onnx` and
`embedding.onnx`, which its examples make by hand, named by sections of genai_config.json.

Run as `python -m tests.exports.genai_layout HF FOLDER` it makes those of a LLaVA model from transformers' own modules,
and the model's text part as a Hugging Face folder for the builder.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from tests.exports.cache import once, run_python, source_of
from tests.exports.genai import BUILDER, genai_export
from tests.exports.hf import hf_model
from tests.exports.mobius import mobius_export

GENAI_LAYOUT = ("llava_clip", "qwen2_5_vl_genai")
"""Families of `media.MEDIA_FAMILIES` whose packages are made here."""

_SECTIONS = {
    "llava_clip": {"pixel_values": "pixel_values"},
    "qwen2_5_vl_genai": {"pixel_values": "pixel_values", "image_grid_thw": "image_grid_thw"},
}
"""Inputs of the vision encoder, as genai_config.json names them."""


def genai_layout(family: str) -> Path:
    """The package of a family; the builder is the installed release's."""
    make = {"llava_clip": _llava_clip, "qwen2_5_vl_genai": _qwen2_5_vl}[family]
    source = hf_model({"llava_clip": "llava_clip", "qwen2_5_vl_genai": "qwen2_5_vl"}[family])
    recipe = [source.name, source_of("genai_layout.py")]
    return once(f"genai-layout-{family}", recipe, lambda folder: _configure(family, make(source, folder)))


def _llava_clip(source: Path, folder: Path) -> Path:
    """mobius 0.1.0 has no class token in LLaVA's tower, and the builder knows no LLaVA."""
    run_python(["-m", __name__, source, folder])
    arguments = ["-i", folder / "text", "-o", folder, "-p", "fp32", "-e", "cpu", "-c", folder / "builder-cache"]
    run_python(["-m", BUILDER, *arguments, "--extra_options", "exclude_embeds=true"])
    for name in ("text", "builder-cache"):
        shutil.rmtree(folder / name, ignore_errors=True)
    return folder


def _qwen2_5_vl(_: Path, folder: Path) -> Path:
    """The encoder and the embedding graph are mobius's, of the same weights."""
    shutil.copytree(genai_export("qwen2_5_vl"), folder, dirs_exist_ok=True)
    for theirs, ours in (("vision_encoder", "vision"), ("embedding", "embedding")):
        _copy_graph(mobius_export("qwen2_5_vl") / theirs / "model.onnx", folder / f"{ours}.onnx")
    return folder


def _copy_graph(source: Path, place: Path) -> None:
    """A graph in one file, since names of external data would be those of the decoder's."""
    import onnx

    onnx.save(onnx.load(source), place)


def _configure(family: str, folder: Path) -> None:
    file = folder / "genai_config.json"
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    config["model"]["vision"] = {
        "filename": "vision.onnx",
        "inputs": _SECTIONS[family],
        "outputs": {"image_features": "image_features"},
    }
    config["model"]["embedding"] = {
        "filename": "embedding.onnx",
        "inputs": {"input_ids": "input_ids", "image_features": "image_features"},
        "outputs": {"inputs_embeds": "inputs_embeds"},
    }
    file.write_text(json.dumps(config, indent=2), encoding="utf-8")


def _make_llava(source: str, folder: Path) -> None:
    import torch
    import transformers

    load: Any = transformers.AutoModelForImageTextToText.from_pretrained
    whole = load(source, dtype=torch.float32, attn_implementation="eager").eval()
    text = transformers.LlamaForCausalLM(whole.config.text_config)
    text.model, text.lm_head = whole.model.language_model, whole.lm_head
    text.save_pretrained(folder / "text")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(source) / name, folder / "text")
    size = whole.config.vision_config.image_size
    embed, placeholder = text.model.embed_tokens, whole.config.image_token_id

    class Vision(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = whole.model

        def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
            return torch.cat(list(self.model.get_image_features(pixel_values=pixel_values).pooler_output))

    class Embedding(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = embed

        def forward(self, input_ids: torch.Tensor, image_features: torch.Tensor) -> torch.Tensor:
            is_image = input_ids == placeholder
            rows = (is_image.long().cumsum(1) - 1).clamp(min=0)
            padded = torch.cat([image_features, torch.zeros_like(self.embed.weight[:1])])
            return torch.where(is_image[..., None], padded[rows], self.embed(input_ids))

    ids, features = torch.tensor([[3, placeholder, 4]]), torch.zeros(1, embed.weight.shape[1])
    axes = {"input_ids": ["batch", "sequence"], "image_features": ["rows"], "inputs_embeds": ["batch", "sequence"]}
    _save(Vision(), {"pixel_values": torch.zeros(1, 3, size, size)}, "image_features", {}, folder / "vision.onnx")
    given = {"input_ids": ids, "image_features": features}
    _save(Embedding(), given, "inputs_embeds", axes, folder / "embedding.onnx")


def _save(module: Any, given: dict[str, Any], output: str, axes: dict[str, list[str]], file: Path) -> None:
    import torch

    dynamic = {name: dict(enumerate(names)) for name, names in axes.items()}
    torch.onnx.export(
        module,
        tuple(given.values()),
        str(file),
        input_names=list(given),
        output_names=[output],
        dynamic_axes=dynamic,
        opset_version=18,
        dynamo=False,
    )


if __name__ == "__main__":
    _make_llava(sys.argv[1], Path(sys.argv[2]))

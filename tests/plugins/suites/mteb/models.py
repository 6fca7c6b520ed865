"""Tiny random models of embeddings, each as sentence-transformers opens it and as an ONNX package of the same
fp32 weights."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    MPNetConfig,
    MPNetModel,
    PreTrainedModel,
    XLMRobertaConfig,
    XLMRobertaModel,
)

from tests.exports import genai_export, hf_model
from tests.exports.cache import once
from tests.exports.text import VOCAB, save_tokenizer

SIZES = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 128, "initializer_range": 0.3, "pad_token_id": 0}
NAMES = ("input_ids", "attention_mask", "token_type_ids")
ENCODERS: dict[str, tuple[Any, Any, str]] = {
    "bert": (BertConfig, BertModel, "mean"),
    "xlmr": (XLMRobertaConfig, XLMRobertaModel, "cls"),
    "mpnet": (MPNetConfig, MPNetModel, "mean"),
}
DECODERS = {"qwen3": "last", "llama": "last"}
PROMPTS = {"query": "Instruct: Ann sees the blue stone.\nQuery: ", "document": ""}


class _Plain(torch.nn.Module):
    def __init__(self, model: PreTrainedModel, output: str) -> None:
        super().__init__()
        self.model, self.output = model, output

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.model(**dict(zip(NAMES, inputs, strict=False)))[self.output]


def _export(model: PreTrainedModel, output: str, file: Path) -> None:
    names = NAMES if output == "logits" else NAMES[:2]
    axes = {name: {0: "batch", 1: "sequence"} for name in (*names, *([output] if output != "logits" else []))}
    given = (torch.full((2, 8), 5), *(torch.ones((2, 8), dtype=torch.int64) for _ in names[1:]))
    torch.onnx.export(
        _Plain(model.eval(), output),
        given,
        str(file),
        input_names=list(names),
        output_names=[output],
        dynamic_axes={**axes, **({output: {0: "batch"}} if output == "logits" else {})},
        opset_version=17,
        dynamo=False,
    )


@cache
def encoder_folders(name: str) -> tuple[Path, Path]:
    """The model of sentence-transformers, and its export."""
    config, kind, pooling = ENCODERS[name]

    def make(folder: Path) -> None:
        torch.manual_seed(7)
        model = kind(config(**SIZES, max_position_embeddings=130)).eval()
        for part in (folder / "hf", folder / "onnx"):
            part.mkdir()
            model.config.save_pretrained(part)
            save_tokenizer(part)
            put_sentence_files(part, pooling)
        model.save_pretrained(folder / "hf")
        _export(model, "last_hidden_state", folder / "onnx" / "model.onnx")

    folder = once(f"embeddings-{name}", [SIZES, pooling, Path(__file__).read_text(encoding="utf-8")], make)
    return folder / "hf", folder / "onnx"


@cache
def cross_encoder() -> tuple[Path, Path]:
    """A BERT with one label, and its export."""

    def make(folder: Path) -> None:
        torch.manual_seed(7)
        config = BertConfig(**SIZES, max_position_embeddings=130, num_labels=1)
        model = BertForSequenceClassification(config).eval()
        for part in (folder / "hf", folder / "onnx"):
            part.mkdir()
            config.save_pretrained(part)
            save_tokenizer(part)
            (part / "chat_template.jinja").unlink()  # sentence-transformers would put pairs into it
        model.save_pretrained(folder / "hf")
        _export(model, "logits", folder / "onnx" / "model.onnx")

    folder = once("cross-encoder", [SIZES, Path(__file__).read_text(encoding="utf-8")], make)
    return folder / "hf", folder / "onnx"


@cache
def decoder_folders(name: str) -> tuple[Path, Path]:
    """The Hugging Face model with sentence-transformers files, and onnxruntime-genai's package of it."""

    def make(folder: Path) -> None:
        shutil.copytree(hf_model(name), folder / "hf")
        shutil.copytree(genai_export(name, options=("include_hidden_states=1",)), folder / "onnx")
        for part in (folder / "hf", folder / "onnx"):
            put_sentence_files(part, DECODERS[name])

    folder = once(f"embeddings-{name}", [Path(__file__).read_text(encoding="utf-8")], make)
    return folder / "hf", folder / "onnx"


def folders(name: str) -> tuple[Path, Path]:
    return encoder_folders(name) if name in ENCODERS else decoder_folders(name)


def put_sentence_files(folder: Path, pooling: str) -> None:
    names = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token", "last": "pooling_mode_lasttoken"}
    modes = {name: key == pooling for key, name in names.items()}
    kinds = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate(kinds)
    ]
    (folder / "1_Pooling").mkdir()
    (folder / "2_Normalize").mkdir()
    files = {
        "modules.json": modules,
        "1_Pooling/config.json": {"word_embedding_dimension": 64, **modes},
        "sentence_bert_config.json": {"max_seq_length": 96, "do_lower_case": False},
        "config_sentence_transformers.json": {"prompts": PROMPTS, "default_prompt_name": None},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")

"""Packages whose decoder is a pipeline of graphs, cut from an export by onnxruntime-genai's builder.

They have the form in which Olive's SplitModel and StaticLLM leave a model for an NPU: embeddings, a graph for prompts,
a graph for single tokens, LM head.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.exports.cache import once, source_of
from tests.exports.genai import genai_export


def pipeline_package(family: str, window: int = 0) -> Path:
    """`genai_export(family)` as a pipeline; with a `window` its prompt graph takes exactly that many tokens and the
    other one a single one, and lengths take the place of the attention mask (StaticLLM)."""
    source = genai_export(family)
    recipe = [source.name, window, source_of("pipeline.py")]
    return once(f"pipeline-{window}-{family}", recipe, lambda folder: _split(source, folder, window))


def _split(source: Path, folder: Path, window: int) -> None:
    import onnx
    from onnx.utils import Extractor

    model = onnx.load(source / "model.onnx")
    if window:
        _take_lengths(model)
    inputs = [value.name for value in model.graph.input]
    outputs = [value.name for value in model.graph.output]
    embeds = next(node.output[0] for node in model.graph.node if "input_ids" in node.input)
    hidden = next(node.input[0] for node in model.graph.node if "logits" in node.output)
    layers = ([embeds, *inputs[1:]], [hidden, *(name for name in outputs if name != "logits")])
    stages: dict[str, dict[str, Any]] = {
        "embeddings": _stage(["input_ids"], [embeds]),
        "context_0": {**_stage(*layers), "run_on_token_gen": False},
        "iterator_0": {**_stage(*layers), "run_on_prompt": False},
        "lm_head": {**_stage([hidden], ["logits"]), "is_lm_head": True},
    }
    lengths = {"context_0": window, "iterator_0": 1} if window else {}
    extractor = Extractor(model)
    for name, stage in stages.items():
        part = extractor.extract_model(stage["inputs"], stage["outputs"])
        for value in (*part.graph.input, *part.graph.output) if name in lengths else ():
            if value.name in (embeds, hidden):
                _fix(value, (1, lengths[name]))
        del part.graph.value_info[:]
        stage["filename"] = f"{name}.onnx"
        onnx.save(part, folder / f"{name}.onnx")
    _write_config(source, folder, stages, window)
    for file in source.glob("token*"):
        shutil.copy(file, folder)


def _stage(inputs: Sequence[str], outputs: Sequence[str]) -> dict[str, Any]:
    return {"inputs": list(inputs), "outputs": list(outputs)}


def _take_lengths(model: Any) -> None:
    """What Olive's surgery AttentionMaskToSequenceLengths does."""
    from onnx import TensorProto, helper

    for node in model.graph.node:
        if node.op_type == "GroupQueryAttention":
            node.input[5], node.input[6] = "past_seq_len", "total_seq_len"
    kept = [value for value in model.graph.input if value.name != "attention_mask"]
    del model.graph.input[:]
    lengths = (("past_seq_len", [1, 1]), ("total_seq_len", [1]))
    kept += [helper.make_tensor_value_info(name, TensorProto.INT32, shape) for name, shape in lengths]
    model.graph.input.extend(kept)


def _fix(value: Any, shape: tuple[int, int]) -> None:
    for dim, size in zip(value.type.tensor_type.shape.dim, shape, strict=False):
        dim.dim_value = size


def _write_config(source: Path, folder: Path, stages: dict[str, Any], window: int) -> None:
    config = json.loads((source / "genai_config.json").read_text(encoding="utf-8"))
    search = config["search"]
    config["search"] = {key: value for key, value in search.items() if value is not None}  # 0.11.4 does not read nulls
    config["model"]["type"] = "decoder-pipeline"
    decoder = config["model"]["decoder"]
    del decoder["filename"]
    decoder["pipeline"] = [stages]
    if window:
        del decoder["inputs"]["attention_mask"]
        decoder["inputs"] |= {"past_sequence_length": "past_seq_len", "total_sequence_length": "total_seq_len"}
        decoder["sliding_window"] = {
            "window_size": window,
            "pad_value": 0,
            "alignment": "left",
            "slide_key_value_cache": False,
        }
    (folder / "genai_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")

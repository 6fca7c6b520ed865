"""Exports by optimum-onnx: plain MatMul and Softmax attention, KV returned grown, positions and masks as inputs.

Run as `python -m tests.exports.optimum HF FOLDER TASK` it makes one. TASK is optimum's, or "merged": a decoder-only
model of two branches and `use_cache_branch`, as optimum made them until 1.13 and as many published packages still are.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from tests.exports.cache import once, packages, run_python, source_of
from tests.exports.hf import hf_model

RELEASE = (
    "optimum-onnx==0.1.0",
    "optimum==2.1.0",
    "transformers==4.57.6",
    "huggingface_hub==0.36.2",
    "tokenizers==0.22.2",
)
"""optimum-onnx 0.1.0 needs transformers 4."""

TASKS = {
    "t5": "text2text-generation-with-past",
    "marian": "text2text-generation-with-past",
    "whisper": "automatic-speech-recognition-with-past",
}


def optimum_export(family: str, merged: bool = False) -> Path:
    """`hf_model(family)` as optimum exports it: `model.onnx`, or for encoder-decoders `encoder_model.onnx`,
    `decoder_model.onnx`, `decoder_with_past_model.onnx` and `decoder_model_merged.onnx`.

    `merged` gives a decoder-only family the last form: `decoder_model_merged.onnx` alone.
    """
    hf = hf_model(family)
    path = [packages(*RELEASE)]
    task = "merged" if merged else TASKS.get(family, "text-generation-with-past")
    recipe = [hf.name, RELEASE, task, source_of("optimum.py")]
    name = f"optimum-{family}{'-merged' if merged else ''}"
    return once(name, recipe, lambda folder: run_python(["-m", __name__, hf, folder, task], path=path))


def _make(hf: str, folder: Path, task: str) -> None:
    import numpy as np
    import torch
    from optimum.exporters.onnx import main_export

    # Optimum traces over random token ids, and a traced mixture of experts is right for the experts that they chose.
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    if task == "merged":
        main_export(hf, str(folder), task="text-generation-with-past", do_validation=False)
        (folder / "model.onnx").unlink()  # what is beside it stays: configuration and tokenizer
        _merge(hf, folder)
    else:
        main_export(hf, str(folder), task=task, do_validation=False)


def _merge(hf: str, folder: Path) -> None:
    from optimum.exporters.onnx import export
    from optimum.exporters.tasks import TasksManager
    from optimum.onnx import merge_decoders

    model = TasksManager.get_model_from_task("text-generation", hf, framework="pt")
    kinds = TasksManager._SUPPORTED_MODEL_TYPE[model.config.model_type]["onnx"]
    parts = {False: folder / "decoder_model.onnx", True: folder / "decoder_with_past_model.onnx"}
    for with_past, part in parts.items():
        make = kinds["text-generation-with-past"]
        config = make(model.config, task="text-generation", use_past=True, use_past_in_inputs=with_past)
        export(model, config, part, opset=18)
    merge_decoders(parts[False], parts[True], save_path=folder / "decoder_model_merged.onnx")
    for part in parts.values():
        part.unlink()


if __name__ == "__main__":
    _make(sys.argv[1], Path(sys.argv[2]), sys.argv[3])

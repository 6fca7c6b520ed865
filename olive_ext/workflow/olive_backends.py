"""Olive's own backends for ONNX models, opened for a comparison with ours. Knows no request and no clock."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from olive_ext.backends.peer_backends import Opening, fixed_threads
from olive_ext.config import ModelSettings
from olive_ext.model import resolve


def open_olive(name: str, opening: Opening, staging: Path) -> Any:
    """Opens Olive's `ort` or `ortgenai`; exceptions of the backend pass unchanged.

    `ort` requires a Hugging Face configuration in the graph's folder, which onnxruntime-genai's builder does not write:
    the model's files are linked into `staging`, and the configuration of `opening.hf` is put there.
    """
    from olive.evaluator.lmeval_ort import LMEvalORTEvaluator, LMEvalORTGenAIEvaluator

    batch_size, provider = opening.batch_size or 1, opening.execution_provider
    where = {"execution_provider": provider, "provider_options": dict(opening.provider_options) or None}
    model = resolve(ModelSettings.of({"model": opening.model, "kind": "onnx", **where}))
    files = model.files
    with fixed_threads(opening.num_threads):
        if name == "olive-ort":
            graph = files.decoder
            if not files.hf_config and opening.hf is not None:
                graph = _beside_config(files.decoder, Path(opening.hf), staging)
            first = model.providers[0]
            lm = LMEvalORTEvaluator(
                str(graph),
                batch_size=batch_size,
                max_length=opening.max_length,
                ep=first.name,
                ep_options=dict(first.options),
            )
            _ = lm.prefill.session  # opened here and not inside the clock
            return lm
        return LMEvalORTGenAIEvaluator(
            str(files.directory),
            batch_size=batch_size,
            max_length=opening.max_length,
            ep=provider or "follow_config",
            ep_options={key: str(value) for key, value in opening.provider_options.items()},
        )


def _beside_config(graph: Path, hf: Path, staging: Path) -> Path:
    """The graph in `staging`, together with its weights, its tokenizer and `hf`'s configuration."""
    staging.mkdir(parents=True, exist_ok=True)
    for file in (*graph.parent.iterdir(), hf / "config.json"):
        link = staging / file.name
        if not file.is_file() or link.exists():
            continue
        try:
            os.link(file.resolve(), link)  # ONNX Runtime refuses weights behind a symbolic link
        except OSError:  # another file system
            shutil.copyfile(file, link)
    return staging / graph.name

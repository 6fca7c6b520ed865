"""The runtime "transformers": a checkpoint of Hugging Face in its original form."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from typing_extensions import override

from olive_ext.engine.runners.runner import OpenedRunner
from olive_ext.model import ResolvedModel
from olive_ext.model.decisions import Decision, choose_chunk_size
from olive_ext.model.runtimes import Runtime


class Transformers(Runtime):
    """transformers, on torch, one sequence at a time or in tree batches."""

    name = "transformers"
    kind = "hf"
    follows = frozenset({"scoring", "chunk_size", "num_threads"})
    nothing_to_verify = "there is nothing to verify: a Hugging Face model has no ONNX graph"

    @override
    def claim(self, model: ResolvedModel) -> str:
        return f"kind: {model.kind_reason}"

    @override
    def is_on_host(self, model: ResolvedModel) -> bool:
        import torch

        device = model.settings.device
        return device == "cpu" or (device is None and not torch.cuda.is_available())

    @override
    def decisions(self, model: ResolvedModel) -> Iterator[Decision]:
        yield Decision("chunk_size", *choose_chunk_size(model.settings.engine))

    @override
    def open(self, model: ResolvedModel, profile_prefix: Path | None) -> OpenedRunner:
        from olive_ext.engine.runners.hf.hf_runner import open_hf_runner

        return open_hf_runner(model)

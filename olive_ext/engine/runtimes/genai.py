"""The runtime "genai": onnxruntime-genai, for packages whose decoder is no single graph that takes any length."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from typing_extensions import override

from olive_ext.engine.runners.genai.generator_traits import input_window
from olive_ext.engine.runners.runner import OpenedRunner
from olive_ext.errors import ConfigError
from olive_ext.model import ResolvedModel
from olive_ext.model.decisions import Decision, choose_chunk_size
from olive_ext.model.runtimes import Runtime
from olive_ext.model.types import ModelFiles

ONE_SLOT = "onnxruntime-genai runs one sequence at a time"


class Genai(Runtime):
    """onnxruntime-genai, one sequence at a time."""

    name = "genai"
    follows = frozenset({"num_slots", "chunk_size", "num_threads", "session_options"})
    nothing_to_verify = "there is nothing to verify: onnxruntime-genai runs the graphs as they are"

    @override
    def claim(self, model: ResolvedModel) -> str:
        files = model.files
        if files.pipeline:
            graphs = ", ".join(files.pipeline)
            return f"auto: genai_config.json makes the decoder of a pipeline of graphs ({graphs})"
        if window := input_window(files):
            return f"auto: genai_config.json feeds the decoder windows of {window} tokens"
        return ""

    @override
    def alternative(self, files: ModelFiles) -> str:
        if not files.genai_config:
            return ""
        return "onnxruntime-genai may run it, more slowly: 'engine.runtime' = \"genai\""

    @override
    def refuse(self, model: ResolvedModel) -> None:
        config = model.settings.engine
        for name in ("adapters", "strict_shapes", "graph_capture"):
            if getattr(config, name) not in (False, [], "auto"):
                why = f'it is "genai" ({model.runtime_reason})'
                raise ConfigError(f"'engine.{name}' needs 'engine.runtime' = \"onnxruntime\"; {why}")
        if config.num_slots not in ("auto", 1):
            raise ConfigError(f"'engine.num_slots' = {config.num_slots}: {ONE_SLOT}; give 1")

    @override
    def decisions(self, model: ResolvedModel) -> Iterator[Decision]:
        yield Decision("num_slots", 1, ONE_SLOT)
        yield Decision("chunk_size", *choose_chunk_size(model.settings.engine))

    @override
    def open(self, model: ResolvedModel, profile_prefix: Path | None) -> OpenedRunner:
        from olive_ext.engine.runners.genai.genai_runner import open_genai_runner

        return open_genai_runner(model, profile_prefix)

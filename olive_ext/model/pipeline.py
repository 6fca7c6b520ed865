"""A decoder that genai_config.json splits into a pipeline (`model.decoder.pipeline`): its stages and their files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from olive_ext.errors import ModelError
from olive_ext.model.folders import GENAI_CONFIG, contents


def pipeline_stages(folder: Path, genai_config: Mapping[str, Any]) -> dict[str, Path]:
    """Stage -> file in `folder`, in the order in which they run; empty where the decoder is no pipeline.

    The stages are written as one object or as one each; several may share a file. A stage without a filename gets the
    folder itself; nothing is looked up.
    """
    decoder = (genai_config.get("model") or {}).get("decoder")
    written = decoder.get("pipeline") if isinstance(decoder, Mapping) else None
    stages = [(name, stage) for part in written or () for name, stage in part.items()]
    return {name: folder / str(stage.get("filename") or "") for name, stage in stages}


def find_pipeline(folder: Path, genai_config: Mapping[str, Any], graph: Path) -> dict[str, Path]:
    """The stages, where `graph` is one of them; else none: another graph beside them is a model of its own.

    Raises `ModelError` that names a stage whose file is missing.
    """
    stages = pipeline_stages(folder, genai_config)
    if not any(file.is_file() and file.samefile(graph) for file in stages.values()):
        return {}
    if problem := missing_stage(folder, stages):
        raise ModelError(problem)
    return stages


def missing_stage(folder: Path, stages: Mapping[str, Path]) -> str:
    """What is wrong with the first stage that has no file; empty where all have one."""
    for name, file in stages.items():
        if not file.is_file():
            written = "no file" if file == folder else f"the file '{file.name}', which is not there: {contents(folder)}"
            return f"'{folder / GENAI_CONFIG}' names for the pipeline's stage '{name}' {written}"
    return ""

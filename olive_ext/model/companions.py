"""Which graphs work together with a decoder: the stages of a pipeline (genai_config.json's `model.decoder.pipeline`),
and companions that genai_config.json names, or exporters by the names of their files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from olive_ext.errors import ModelError
from olive_ext.model.folders import GENAI_CONFIG, contents

_SECTIONS = ("embedding", "encoder")
"""Sections of genai_config.json whose graph evaluation needs. Those for images are left alone: text has none."""

_WITH_PAST, _WITHOUT_PAST, _MERGED, _ENCODER = (
    "decoder_with_past_model",
    "decoder_model",
    "decoder_model_merged",
    "encoder_model",
)
"""optimum's names of an encoder-decoder's graphs; behind them may stand a suffix such as "_quantized"."""


def find_companions(decoder: Path, directory: Path, genai_config: Mapping[str, Any]) -> dict[str, tuple[Path, str]]:
    """The graphs beside `decoder` by what they do, each with the rule that found it; `directory` has genai_config.json.

    "embedding": takes ids where the decoder takes embeddings. "encoder": takes the source of an encoder-decoder.
    "first_step": a decoder without a past, which computes the cross-attention KV. Raises `ModelError` for a graph that
    genai_config.json names and that does not exist.
    """
    found = {}
    for part in _SECTIONS:
        name = genai_config.get("model", {}).get(part, {}).get("filename")
        if not name:
            continue
        if not (directory / name).is_file():
            raise ModelError(
                f"genai_config.json names '{name}' for model.{part}.filename; '{directory / name}' does not exist"
            )
        found[part] = (directory / name, f"genai_config.json's model.{part}.filename")
    return {**_by_name(decoder), **found}


def pick_with_past(graphs: Sequence[Path]) -> tuple[Path, str] | None:
    """The decoder to run of an encoder-decoder exported by optimum, and why; None for other `graphs`.

    The one with a past: it runs behind an empty past as well, and its head is not hidden in a branch.
    """
    by_name = {graph.stem: graph for graph in graphs if (graph.parent / f"{_ENCODER}.onnx").is_file()}
    if _WITH_PAST in by_name and _WITHOUT_PAST in by_name:
        return by_name[_WITH_PAST], "the decoder with a past; the one without computes the cross-attention KV"
    if _MERGED in by_name:
        return by_name[_MERGED], "the decoder with both branches"
    return None


def _by_name(decoder: Path) -> dict[str, tuple[Path, str]]:
    for stem in (_WITH_PAST, _MERGED, _WITHOUT_PAST):
        if not decoder.stem.startswith(stem):
            continue
        suffix = decoder.stem[len(stem) :]
        wanted = {"encoder": _ENCODER, **({"first_step": _WITHOUT_PAST} if stem == _WITH_PAST else {})}
        files = {part: decoder.parent / f"{name}{suffix}.onnx" for part, name in wanted.items()}
        return {
            part: (file, f"optimum's name, beside '{decoder.name}'") for part, file in files.items() if file.is_file()
        }
    sibling = decoder.parent.parent / "encoder" / decoder.name
    if decoder.parent.name == "decoder" and sibling.is_file():
        return {"encoder": (sibling, "the folder 'encoder' beside the decoder's")}
    return {}


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

"""What a Hugging Face checkpoint takes, by its config.json, in a folder or on the hub. Knows no graph."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from olive_ext.model.media_types import PLACEHOLDER_KEYS, MediaInput, MediaSpec, Modality
from olive_ext.model.package_config import HfConfig, read_json
from olive_ext.model.types import ModelFiles, SourceKind, TensorSpec

logger = logging.getLogger(__name__)

POSITIONS = (
    "max_target_positions",
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
)
"""Keys of config.json for the most positions of a decoder, in the order in which they are looked for."""

_TOWERS = {Modality.IMAGE: "vision_config", Modality.AUDIO: "audio_config"}
_FLOAT, _INT64 = 1, 7
"""ONNX's element types."""


def with_configs(files: ModelFiles, cache: Path | None = None) -> ModelFiles:
    """The files of a checkpoint with its configurations here; of one on the hub they are fetched, or taken from `cache`
    (the user's). Where the hub does not give them nothing changes: such a model cannot be opened either."""
    if files.directory.is_dir():
        return files
    from huggingface_hub import snapshot_download

    name = files.directory.as_posix()
    try:
        folder = Path(snapshot_download(name, cache_dir=cache, allow_patterns=["*.json"]))
        return replace(files, directory=folder, decoder=folder, hf_config=read_json(folder / "config.json", HfConfig))
    except (OSError, ValueError) as error:  # the hub's own errors are both
        logger.debug("no configurations of '%s': %s", name, error)
        return files


def read_media(config: Mapping[str, Any]) -> MediaSpec | None:
    """Pictures and sound, where there is a tower and a token for them; None where there is neither."""
    found = []
    for modality, tower in _TOWERS.items():
        tokens = [config[key] for key in PLACEHOLDER_KEYS[modality] if isinstance(config.get(key), int)]
        found += [MediaInput(modality, token) for token in tokens[:1] if tower in config]
    return MediaSpec(tuple(found)) if found else None


def read_source(config: Mapping[str, Any]) -> tuple[SourceKind, TensorSpec] | None:
    """What the encoder of an encoder-decoder takes, and its input: Whisper features of sound of its one length, others
    token ids. None for other models."""
    if not config.get("is_encoder_decoder"):
        return None
    mels, frames = config.get("num_mel_bins"), 2 * config.get("max_source_positions", 0)
    if config.get("model_type") == "whisper":
        return SourceKind.FEATURES, TensorSpec("input_features", _FLOAT, ("B", mels or "mels", frames or "frames"))
    return SourceKind.TOKENS, TensorSpec("input_ids", _INT64, ("B", "S"))


def read_rotary_lengths(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Where transformers computes the positions of a text by its whole length: the most positions of texts with the
    short factors (longrope), in ascending order; none where each length has its own (dynamic NTK); None where positions
    are alike in all texts."""
    found: set[int] = set()
    is_by_length = False
    own = config.get("original_max_position_embeddings")
    for entry in _entries(config):
        kind = entry.get("rope_type", entry.get("type"))
        is_by_length |= kind in ("longrope", "dynamic")
        last = entry.get("original_max_position_embeddings", own) if kind == "longrope" else None
        found |= {int(last)} if last else set()
    return tuple(sorted(found)) if is_by_length else None


def _entries(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The mappings in `config`, itself included."""
    yield config
    for value in config.values():
        if isinstance(value, Mapping):
            yield from _entries(value)


def read_length(config: Mapping[str, Any]) -> int | None:
    """The most positions of its decoder; None where none are named (a recurrent model)."""
    text = config.get("text_config", config)
    return next((text[key] for key in POSITIONS if text.get(key)), None)

"""What a Hugging Face checkpoint takes, by its config.json, in a folder or on the hub. Knows no graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from olive_ext.errors import ModelError
from olive_ext.model.types import PLACEHOLDER_KEYS, MediaInput, MediaSpec, Modality, SourceKind, TensorSpec

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
_FLOAT, _INT64 = 1, 7  # ONNX's element types


def read_media(config: Mapping[str, Any]) -> MediaSpec | None:
    """Pictures and sound, where there is a tower and a token for them; None where there is neither."""
    inputs = []
    for modality, tower in _TOWERS.items():
        tokens = [config[key] for key in PLACEHOLDER_KEYS[modality] if isinstance(config.get(key), int)]
        inputs += [MediaInput(modality, token) for token in tokens[:1] if tower in config]
    return MediaSpec(tuple(inputs)) if inputs else None


def read_source(config: Mapping[str, Any]) -> tuple[SourceKind, TensorSpec] | None:
    """What an encoder-decoder's encoder takes, features of one length (Whisper) or token ids, and its input."""
    if not config.get("is_encoder_decoder"):
        return None
    mels, frames = config.get("num_mel_bins"), 2 * config.get("max_source_positions", 0)
    if config.get("model_type") == "whisper":
        return SourceKind.FEATURES, TensorSpec("input_features", _FLOAT, ("B", mels or "mels", frames or "frames"))
    return SourceKind.TOKENS, TensorSpec("input_ids", _INT64, ("B", "S"))


def read_rotary_lengths(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Where transformers computes the positions of a text by its whole length: the most positions of texts with the
    short factors (longrope), ascending; empty where each length has its own (dynamic NTK); None where positions do not
    depend on the length."""
    outer = config.get("original_max_position_embeddings")
    ropes = [(entry.get("rope_type", entry.get("type")), entry) for entry in entries(config)]
    lasts = {rope.get("original_max_position_embeddings", outer) for kind, rope in ropes if kind == "longrope"}
    is_by_length = any(kind in ("longrope", "dynamic") for kind, _ in ropes)
    return tuple(sorted(int(last) for last in lasts if last)) if is_by_length else None


def context_limit(
    genai_model: Mapping[str, Any],
    hf_config: Mapping[str, Any],
    rotary_rows: int | None,
    max_length: int | None,
    num_cells: int | None = None,
) -> tuple[int, str]:
    """The context length, the least of genai_config.json's `model`, config.json, the rotary tables, the setting
    `max_length` and a static cache of `num_cells`; and a sentence on whose it is. Raises `ModelError` without any."""
    limits = {
        "genai_config.json": genai_model.get("context_length"),
        "config.json": read_length(hf_config),
        "the rows of the rotary cache": rotary_rows,
        "the static KV cache": num_cells,
        "max_length": max_length,
    }
    known = {origin: int(limit) for origin, limit in limits.items() if limit}
    if not known:
        raise ModelError("no config and no graph states the context length; give it", "max_length", code="missing")
    winner = min(known, key=known.__getitem__)
    others = ", ".join(f"{origin} {limit}" for origin, limit in known.items() if limit != known[winner])
    problem = f"the context length {known[winner]} is that of {winner}"
    return known[winner], f"{problem} (not {others})" if others else problem


def entries(config: Any) -> Iterator[Mapping[str, Any]]:
    """A configuration and all configurations inside it, also those in lists."""
    if isinstance(config, Mapping):
        yield config
    for value in config.values() if isinstance(config, Mapping) else config if isinstance(config, list) else ():
        yield from entries(value)


def read_length(config: Mapping[str, Any]) -> int | None:
    """The most positions of its decoder; None where none are named (a recurrent model)."""
    text = config.get("text_config", config)
    return next((text[key] for key in POSITIONS if text.get(key)), None)

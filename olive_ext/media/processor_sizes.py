"""Bounds of the numbers in a processor's file: each sizes an array that is made as it is loaded or first used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from olive_ext.errors import ModelError

LARGEST_SIZES: Mapping[str, int] = {
    **dict.fromkeys(("height", "width", "image_size"), 2**13),
    **dict.fromkeys(("shortest_edge", "longest_edge", "min_pixels", "max_pixels"), 2**28),
    **dict.fromkeys(("patch_size", "merge_size", "temporal_patch_size", "pooling_kernel_size"), 2**12),
    **dict.fromkeys(("feature_size", "num_mel_bins", "num_mel_filters"), 2**12),
    **dict.fromkeys(("n_fft", "fft_length", "frame_length", "hop_length", "win_length"), 2**16),
    **dict.fromkeys(("chunk_length", "max_length_s"), 3600),
    "sampling_rate": 2**20,
    **dict.fromkeys(("n_samples", "nb_max_frames"), 2**28),
    **dict.fromkeys(("image_seq_length", "audio_seq_length", "max_soft_tokens", "max_num_tiles", "num_crops"), 2**20),
}
"""The most of each: an edge in pixels, an area (which Qwen's processors call edges), mels, samples of a frame, seconds,
samples a second or a window, tokens. Published ones are far below."""


def refuse_sizes(content: Any, file: Path, name: str = "") -> None:
    """Raises `ModelError` for a number anywhere in a processor's `file` that is below 1 or above its bound."""
    inner = content.items() if isinstance(content, Mapping) else enumerate(content) if isinstance(content, list) else ()
    for key, value in inner:
        place = f"{name}.{key}" if name else str(key)
        refuse_sizes(value, file, place)
        most = LARGEST_SIZES.get(str(key))
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if most is not None and is_number and not 1 <= value <= most:
            raise ModelError(f"'{file}': '{place}' = {value}: give a number from 1 to {most} (LARGEST_SIZES)")

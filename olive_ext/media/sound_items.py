"""Sound for a model that takes it among its tokens: samples, and the arrays that transformers' processor of the
original model makes of them, with the number of placeholders.

Knows no prompt and no encoder. Axes: N samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from olive_ext.errors import MediaError, first_line
from olive_ext.media.processors import folders_of, load_sound_processor, torch_threads
from olive_ext.media.sound import Given, Samples, read_samples
from olive_ext.model.types import ModelFiles

NUM_TOKENS = "num_audio_tokens"
"""The name of the array that holds the number of placeholders, among the processor's."""

_TEXT = ("input_ids", "attention_mask")


class SoundItems:
    """Reads and prepares sounds for one model. Its processor is loaded when the first comes."""

    def __init__(self, files: ModelFiles, num_threads: int | None = None) -> None:
        """`num_threads`: torch's, while a sound is prepared."""
        self._files = files
        self._num_threads = num_threads

    @property
    def extractor(self) -> Any:
        """transformers' feature extractor. Raises `ModelError` where the package has none."""
        return self._loaded[0].feature_extractor

    @property
    def file(self) -> Path:
        """The processor's file."""
        return self._loaded[1]

    def read(self, given: Given) -> Samples:
        """The samples of a sound that a user gave. Raises `MediaError` for one that cannot be read, or that has
        another rate than the model takes."""
        return read_samples(given, int(self.extractor.sampling_rate))

    def silences(self) -> list[Given]:
        """Sounds of 1, 2, ... seconds, up to the longest that the extractor pads to."""
        rate, longest = int(self.extractor.sampling_rate), int(getattr(self.extractor, "chunk_length", 30))
        return [(np.zeros(rate * seconds, np.float32), rate) for seconds in range(1, longest + 1)]

    def prepare(self, samples_N: Samples) -> Mapping[str, npt.NDArray[Any]]:
        """The arrays for the encoder and the number of placeholders. Raises `MediaError` for a sound that the
        processor refuses, or of which it would drop the end."""
        processor, rate = self._loaded[0], int(self.extractor.sampling_rate)
        text = processor.audio_token
        try:
            with torch_threads(self._num_threads):
                found = processor(text=[text], audio=[samples_N], sampling_rate=rate, return_tensors="pt")
        except Exception as error:
            seconds = len(samples_N) / rate
            raise MediaError(f"a sound of {seconds:.1f} s is refused: {first_line(error)}") from error
        placeholder = processor.tokenizer.convert_tokens_to_ids(text)
        arrays = {name: np.asarray(value) for name, value in found.items() if name not in _TEXT}
        self._refuse_cut(samples_N, arrays, rate)
        return {**arrays, NUM_TOKENS: np.count_nonzero(np.asarray(found["input_ids"]) == placeholder, keepdims=True)}

    def _refuse_cut(self, samples_N: Samples, arrays: Mapping[str, npt.NDArray[Any]], rate: int) -> None:
        """Extractors cut what is longer than they take without a word: then their mask ends before the sound."""
        mask = next((array for name, array in arrays.items() if "mask" in name), None)
        hop = getattr(self.extractor, "hop_length", None)
        if mask is None or hop is None:
            return
        covered = int(np.count_nonzero(mask)) * hop
        if covered + rate // 10 < len(samples_N):
            raise MediaError(
                f"a sound of {len(samples_N) / rate:.1f} s is longer than the {covered / rate:.1f} s that this model "
                "takes: cut it"
            )

    @cached_property
    def _loaded(self) -> tuple[Any, Path]:
        return load_sound_processor(folders_of(self._files))

"""Hugging Face models that take sound among their tokens, as the reference of the same weights.

Prompts are built here, from transformers' feature extractors and the rows of features that its own encoders return:
nothing of the package is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
import transformers

from tests.agreement.references import RATE
from tests.exports.media import SOUND_FAMILIES
from tests.families.pictures import PictureReference

Sound = tuple[npt.NDArray[np.float32], int]


def sound(seed: int, num_samples: int) -> Sound:
    """A tone in noise: no two sound alike to an encoder."""
    rng = np.random.default_rng(seed)
    tone = np.sin(2 * np.pi * rng.uniform(200, 2000) * np.arange(num_samples) / RATE)
    return (tone + 0.1 * rng.standard_normal(num_samples)).astype(np.float32), RATE


class SoundReference(PictureReference):
    """One model: features, log-probabilities and greedy answers behind sounds in place of pictures."""

    around: ClassVar = {"gemma4_any": ("<boa>", "<eoa>"), "qwen3_asr": ("<|audio_start|>", "<|audio_end|>")}

    def __init__(self, family: str, folder: Path) -> None:
        self.family, self._is_as_exported = family, True
        self.marker = SOUND_FAMILIES[family].marker
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.extractor = transformers.AutoFeatureExtractor.from_pretrained(folder)
        load: Any = transformers.AutoModelForMultimodalLM.from_pretrained
        self.model = load(folder, dtype=torch.float32, attn_implementation="eager").eval()
        self.placeholder = self.model.config.audio_token_id

    def given(self, request: Any) -> Any:
        return request.audio

    def arrays(self, sounds: Sequence[Any]) -> dict[str, torch.Tensor]:
        if not sounds:
            return {}
        asked = {"sampling_rate": RATE, "padding": True, "return_attention_mask": True, "return_tensors": "pt"}
        found = self.extractor([samples for samples, _ in sounds], **asked)
        return {"input_features_mask" if "mask" in name else name: value for name, value in found.items()}

    def num_tokens(self, item: Any) -> int:
        return int(self.features([item]).shape[0])

    def features(self, sounds: Sequence[Any]) -> torch.Tensor:
        with torch.inference_mode():
            output = self.model.model.get_audio_features(**self.arrays(sounds))
        rows, mask = output.pooler_output, output.get("attention_mask")
        return rows.reshape(-1, rows.shape[-1]) if mask is None else rows[mask]

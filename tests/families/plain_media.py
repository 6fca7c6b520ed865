"""Models that take pictures and sounds, computed without the package under test: transformers' processors, each graph
of the export once in a plain session, one forward pass of the decoder over the whole sequence.

A prompt is a text with `IMAGE` and `AUDIO` in it, one for each item.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from tests.agreement.references import Reference, normal
from tests.exports.catalog import Export
from tests.exports.media import MEDIA_FAMILIES, SOUND_FAMILIES, MediaFamily, media_export
from tests.exports.plain import plain_features, plain_logits
from tests.families.pictures import AROUND
from tests.families.sounds import RATE, Sound, SoundReference

IMAGE, AUDIO = "\1", "\2"
Item = Image.Image | Sound
"""A picture, or (samples, rate)."""

BOTH = ("gemma4_any",)
"""Families that take pictures and sounds."""

_AROUND = {**AROUND, "gemma4_any": AROUND["gemma4_vl"]}


class PlainMedia(Reference):
    """One family's export."""

    def __init__(self, family: str) -> None:
        package, hf = media_export(family)
        self.export = Export(family, package, hf, family)
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(hf)
        self.config: Any = transformers.AutoConfig.from_pretrained(hf)
        takes = {IMAGE: family in MEDIA_FAMILIES or family in BOTH, AUDIO: family in SOUND_FAMILIES}
        self.kinds = tuple(kind for kind, taken in takes.items() if taken)
        self._made: MediaFamily = {**MEDIA_FAMILIES, **SOUND_FAMILIES}[family]
        self._features: dict[int, tuple[Item, np.ndarray]] = {}
        if IMAGE in self.kinds:
            self._processor: Any = transformers.AutoImageProcessor.from_pretrained(hf, backend="pil")
        if AUDIO in self.kinds:
            self._extractor: Any = transformers.AutoFeatureExtractor.from_pretrained(hf)

    def marker(self, kind: str) -> str:
        """What a prompt of the session holds for an item."""
        return "<|image|>" if kind == IMAGE and self.export.family in BOTH else self._made.marker

    def features(self, item: Item) -> np.ndarray:
        """[rows, size]."""
        if id(item) not in self._features:  # the item is kept, so that its id stays its own
            self._features[id(item)] = item, plain_features(self.export, _encoder(item), self._arrays(item))
        return self._features[id(item)][1]

    def ids(self, text: Any, items: Sequence[Item] = (), *, is_chat: bool = False) -> list[int]:
        """The tokens of a prompt, by the families' rules for what stands around placeholders."""
        if not isinstance(text, str):
            return list(text)
        waiting = iter(items)
        text = re.sub(f"[{IMAGE}{AUDIO}]", lambda _: self._placed(next(waiting)), text)
        text = f"<user>{text}<assistant>" if is_chat else text
        return list(self.tokenizer.encode(text, add_special_tokens=not is_chat))

    def logprobs(self, ids: Sequence[int], items: Sequence[Item]) -> Any:
        given = {}
        for name in ("vision", "audio"):
            if found := [self.features(item) for item in items if _encoder(item) == name]:
                given["image_features" if name == "vision" else "audio_features"] = np.concatenate(found)
        if IMAGE in self.kinds and hasattr(self._processor, "merge_size"):
            given["position_ids"] = self._positions(ids, items)
        return normal(plain_logits(self.export, list(ids), given))

    def _positions(self, ids: Sequence[int], items: Sequence[Item]) -> np.ndarray:
        """Time, height and width [3, 1, T], by transformers' own function."""
        tokens = torch.tensor([list(ids)])
        grids = [self._arrays(item)["image_grid_thw"] for item in items]
        grid = torch.tensor(np.concatenate(grids)) if grids else None
        types = (tokens == self.config.image_token_id).int()
        found, _ = _model(self.export.family).get_rope_index(tokens, types, grid)
        return np.asarray(found)

    def _placed(self, item: Item) -> str:
        is_sound = _encoder(item) == "audio"
        token = self.config.audio_token_id if is_sound else self.config.image_token_id
        around = SoundReference.around if is_sound else _AROUND
        begin, end = around.get(self.export.family, ("", ""))
        return f"{begin}{self.tokenizer.decode([token]) * len(self.features(item))}{end}"

    def _arrays(self, item: Item) -> dict[str, np.ndarray]:
        if isinstance(item, Image.Image):
            return {name: np.asarray(value) for name, value in self._processor([item], return_tensors="np").items()}
        asked = {"sampling_rate": RATE, "padding": True, "return_attention_mask": True, "return_tensors": "np"}
        found = self._extractor([item[0]], **asked)
        return {"input_features_mask" if "mask" in name else name: value for name, value in found.items()}


@cache
def plain_media(family: str) -> PlainMedia:
    return PlainMedia(family)


@cache
def _model(family: str) -> Any:
    """transformers' model, for the positions that it gives to pictures."""
    load: Any = transformers.AutoModelForImageTextToText.from_pretrained
    return load(media_export(family)[1], dtype=torch.float32).model


def _encoder(item: Item) -> str:
    return "vision" if isinstance(item, Image.Image) else "audio"

"""Models of transformers that see pictures or hear, as the reference of the same weights.

Prompts are built here, by the families' rules, from transformers' own processors and from the rows of features that its
own encoders return: nothing of the package is used.
"""

from __future__ import annotations

import io
import re
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from olive_ext.media.graphs import Pieces
from tests.agreement.references import RATE, Reference
from tests.exports.media import MEDIA_FAMILIES, SOUND_FAMILIES

if TYPE_CHECKING:  # an emulated processor takes a minute to import it
    import torch

Sound = tuple[npt.NDArray[np.float32], int]
Item = Image.Image | Sound
"""A picture, or samples and their rate."""


def picture(seed: int, width: int, height: int) -> Image.Image:
    """Noise: no two look alike to an encoder."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def sound(seed: int, num_samples: int) -> Sound:
    """A tone in noise: no two sound alike to an encoder."""
    rng = np.random.default_rng(seed)
    tone = np.sin(2 * np.pi * rng.uniform(200, 2000) * np.arange(num_samples) / RATE)
    return (tone + 0.1 * rng.standard_normal(num_samples)).astype(np.float32), RATE


def wav(samples: Any, width: int = 2, channels: int = 1, rate: int = RATE) -> bytes:
    """A file of integers of `width` bytes."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((channels, width, rate, 0, "NONE", ""))
        writer.writeframes(np.asarray(samples).tobytes())
    return file.getvalue()


def feature_rows(features: Sequence[Pieces]) -> list[npt.NDArray[np.float32]]:
    """The rows of an item that an encoder has kept, of each output."""
    return [np.concatenate([value.numpy() for value in one.values])[: one.num_rows] for one in features]


_GEMMA4, _QWEN = ("<boi>", "<eoi>"), ("<|vision_start|>", "<|vision_end|>")
AROUND = {
    "images": {
        **dict.fromkeys(("gemma4_vl", "gemma4_seen", "gemma4_any"), _GEMMA4),
        **dict.fromkeys(("qwen2_5_vl", "qwen2_5_vl_genai", "qwen3_5", "qwen3_vl"), _QWEN),
        "gemma3": ("\n\n<start_of_image>", "<end_of_image>\n\n"),
    },
    "audio": {"gemma4_any": ("<boa>", "<eoa>"), "qwen3_asr": ("<|audio_start|>", "<|audio_end|>")},
}
"""What stands around the placeholders of a picture or a sound."""


class MediaReference(Reference):
    """One model: features, log-probabilities and greedy answers."""

    def __init__(self, family: str, folder: Path, *, is_as_exported: bool = True) -> None:
        """With `is_as_exported` it computes what the export is known to leave out or add."""
        import torch
        import transformers

        self.family, self._is_as_exported = family, is_as_exported
        is_heard = family in SOUND_FAMILIES
        self.marker = {**MEDIA_FAMILIES, **SOUND_FAMILIES}[family].marker
        self.markers = {"audio" if is_heard else "images": self.marker}
        """By the fields of a request, what a prompt holds for an item."""

        if family == "gemma4_any":
            self.markers["images"] = MEDIA_FAMILIES["gemma4_vl"].marker
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        if "images" in self.markers:
            self.processor: Any = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
        if is_heard:
            self._extractor: Any = transformers.AutoFeatureExtractor.from_pretrained(folder)
        load: Any = transformers.AutoModelForMultimodalLM if is_heard else transformers.AutoModelForImageTextToText
        self.model = load.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        self._placeholders = {
            kind: getattr(self.model.config, "audio_token_id" if kind == "audio" else "image_token_id")
            for kind in self.markers
        }
        if family in ("llava", "qwen3_vl") and is_as_exported:
            self._as_exported()

    def given(self, request: Any) -> Any:
        return [*request.images, *request.audio]

    @property
    def pattern(self) -> str:
        """Finds the markers of a prompt."""
        return "|".join(map(re.escape, self.markers.values()))

    def ids(self, text: Any, items: Sequence[Item] = (), *, is_chat: bool = False) -> list[int]:
        """The prompt's tokens, each marker replaced by an item's placeholders as transformers' processors do it."""
        if not isinstance(text, str):
            return list(text)
        waiting = {
            marker: iter([self._placed(kind, one) for one in items if field_of(one) == kind])
            for kind, marker in self.markers.items()
        }
        text = re.sub(self.pattern, lambda found: next(waiting[found[0]]), text)
        text = f"<user>{text}<assistant>" if is_chat else text
        return list(self.tokenizer.encode(text, add_special_tokens=not is_chat))

    def _placed(self, kind: str, item: Item) -> str:
        begin, end = AROUND[kind].get(self.family, ("", ""))
        return f"{begin}{self.tokenizer.decode([self._placeholders[kind]]) * self.num_tokens(item)}{end}"

    def _as_exported(self) -> None:
        """mobius 0.1.0 ends LLaVA's tower with the norm that LLaVA leaves out, and leaves out what Qwen3-VL adds to the
        decoder's first layers; without that nothing would be equal. (Gemma 3's pictures, which it makes causal, need no
        more than the `token_type_ids` that are left out below, and those of Gemma 4 `_masks`.)"""
        model = self.model.model
        if self.family == "qwen3_vl":
            model.language_model._deepstack_process = lambda hidden, *_: hidden
            return
        norm = model.vision_tower.post_layernorm
        model.multi_modal_projector.register_forward_pre_hook(lambda _, inputs: (norm(inputs[0]),))

    def arrays(self, items: Sequence[Item]) -> dict[str, torch.Tensor]:
        """What the model takes of pictures and sounds."""
        import torch

        found: dict[str, Any] = {}
        if images := [one for one in items if field_of(one) == "images"]:
            found |= self.processor(images=images, return_tensors="np")
        if sounds := [one[0] for one in items if isinstance(one, tuple)]:
            asked = {"sampling_rate": RATE, "padding": True, "return_attention_mask": True, "return_tensors": "np"}
            heard = self._extractor(sounds, **asked)
            found |= {"input_features_mask" if "mask" in name else name: value for name, value in heard.items()}
        found.pop("num_soft_tokens_per_image", None)
        return {name: torch.tensor(np.asarray(value)) for name, value in found.items()}

    def num_tokens(self, item: Item) -> int:
        return len(self.features([item]))

    def features(self, items: Sequence[Item]) -> torch.Tensor:
        """[rows, size] of all items, which are of one kind."""
        import torch

        get = "get_audio_features" if field_of(items[0]) == "audio" else "get_image_features"
        with torch.inference_mode():
            output = getattr(self.model.model, get)(**self.arrays(items))
        features = getattr(output, "pooler_output", output)
        if get == "get_audio_features" and (mask := output.get("attention_mask")) is not None:
            return features[mask]
        parts = features if isinstance(features, (list, tuple)) else [features]
        return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])

    def logprobs(self, ids: Sequence[int], items: Sequence[Item]) -> Any:
        import torch

        tokens = torch.tensor([list(ids)])
        found: dict[str, Any] = {"input_ids": tokens, **self.arrays(items)}
        if self.family == "qwen3_asr" and items:  # its encoder gives others of a sound beside a longer one
            embeds = self.model.get_input_embeddings()(tokens).detach()
            embeds[tokens == self._placeholders["audio"]] = torch.cat([self.features([one]) for one in items])
            found = {"inputs_embeds": embeds}
        is_seen = tokens == self._placeholders.get("images", -1)
        if self.family.startswith(("qwen2_5_vl", "qwen3_5", "qwen3_vl", "gemma4")):
            found["mm_token_type_ids"] = is_seen.int()
        if self.family == "gemma3" and not self._is_as_exported:
            found["token_type_ids"] = is_seen.int()
        is_masked = self.family == "gemma4_seen" and self._is_as_exported
        mask = self._masks(is_seen[0]) if is_masked else torch.ones_like(tokens)
        with torch.inference_mode():
            logits = self.model(attention_mask=mask, **found).logits
        return logits[0].double().log_softmax(-1).numpy()

    def _masks(self, is_item_S: torch.Tensor) -> dict[str, torch.Tensor]:
        """mobius 0.1.0's for Gemma 4: a picture's tokens see each other in all layers, and beyond the windows, as in
        transformers 5.10. Added to scores [1, 1, S, S]."""
        import torch

        block_S = (is_item_S & ~is_item_S.roll(1)).cumsum(0) * is_item_S
        is_one_SS = (block_S[:, None] == block_S) & is_item_S
        before_SS = torch.ones_like(is_one_SS).tril()
        window_SS = before_SS.triu(1 - self.model.config.text_config.sliding_window)
        seen = {"full_attention": before_SS | is_one_SS, "sliding_attention": window_SS | is_one_SS}
        lowest = torch.finfo(torch.float32).min
        return {
            kind: torch.zeros(seen_SS.shape).masked_fill(~seen_SS, lowest)[None, None] for kind, seen_SS in seen.items()
        }


def field_of(item: Item) -> str:
    """The request's field for it."""
    return "audio" if isinstance(item, tuple) else "images"

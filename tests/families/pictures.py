"""Models of transformers that see pictures, as the reference of the same weights.

Prompts are built here, by the families' rules, from transformers' own processors: nothing of the package is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
import transformers
from PIL import Image

from olive_ext.media.graphs import Pieces
from tests.agreement.references import Reference
from tests.exports.media import MEDIA_FAMILIES


def picture(seed: int, width: int, height: int) -> Image.Image:
    """Noise: no two look alike to an encoder."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def feature_rows(features: Sequence[Pieces]) -> list[npt.NDArray[np.float32]]:
    """The rows of an item that an encoder has kept, of each output."""
    return [np.concatenate([value.numpy() for value in one.values])[: one.num_rows] for one in features]


AROUND = {
    "gemma4_vl": ("<boi>", "<eoi>"),
    "gemma4_seen": ("<boi>", "<eoi>"),
    "gemma3": ("\n\n<start_of_image>", "<end_of_image>\n\n"),
    "qwen2_5_vl": ("<|vision_start|>", "<|vision_end|>"),
    "qwen2_5_vl_genai": ("<|vision_start|>", "<|vision_end|>"),
    "qwen3_5": ("<|vision_start|>", "<|vision_end|>"),
    "qwen3_vl": ("<|vision_start|>", "<|vision_end|>"),
}
"""What stands around a picture's placeholders."""


class PictureReference(Reference):
    """One model: features, log-probabilities and greedy answers."""

    around: ClassVar = AROUND

    def __init__(self, family: str, folder: Path, *, is_as_exported: bool = True) -> None:
        """With `is_as_exported` it computes what the export is known to leave out or add."""
        self.family = family
        self._is_as_exported = is_as_exported
        self.marker = MEDIA_FAMILIES[family].marker
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
        load = transformers.AutoModelForImageTextToText.from_pretrained
        self.model = load(folder, dtype=torch.float32, attn_implementation="eager").eval()
        self.placeholder = self.model.config.image_token_id
        if family in ("llava", "qwen3_vl") and is_as_exported:
            self._as_exported()

    def given(self, request: Any) -> Any:
        return request.images

    def ids(self, text: str, images: Sequence[Image.Image] = ()) -> list[int]:
        """The prompt's tokens, each marker replaced by a picture's placeholders as transformers' processors do it."""
        for image in images:
            text = text.replace(self.marker, "\0" + "\1" * self.num_tokens(image), 1)
        placeholder = self.tokenizer.decode([self.placeholder])
        begin, end = self.around.get(self.family, ("", ""))
        parts = text.split("\0")
        whole = parts[0] + "".join(
            f"{begin}{placeholder * part.count(chr(1))}{end}{part.replace(chr(1), '')}" for part in parts[1:]
        )
        return list(self.tokenizer.encode(whole))

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

    def arrays(self, images: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
        found = self.processor(images=list(images), return_tensors="np") if images else {}
        return {name: torch.tensor(np.asarray(value)) for name, value in found.items()}

    def num_tokens(self, image: Image.Image) -> int:
        found = self.arrays([image])
        if "num_soft_tokens_per_image" in found:
            return int(found["num_soft_tokens_per_image"])
        if "image_grid_thw" in found:
            return int(found["image_grid_thw"].prod()) // self.processor.merge_size**2
        return int(self.features([image]).shape[0])

    def features(self, images: Sequence[Image.Image]) -> torch.Tensor:
        """[rows, size] of all pictures."""
        found = self.arrays(images)
        found.pop("num_soft_tokens_per_image", None)
        with torch.inference_mode():
            output = self.model.model.get_image_features(**found)
        features = getattr(output, "pooler_output", output)
        parts = features if isinstance(features, (list, tuple)) else [features]
        return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])

    def logprobs(self, ids: Sequence[int], images: Sequence[Image.Image]) -> Any:
        found: dict[str, Any] = dict(self.arrays(images))
        found.pop("num_soft_tokens_per_image", None)
        tokens = torch.tensor([list(ids)])
        if self.family.startswith(("qwen2_5_vl", "qwen3_5", "qwen3_vl", "gemma4")):
            found["mm_token_type_ids"] = (tokens == self.placeholder).int()
        if self.family == "gemma3" and not self._is_as_exported:
            found["token_type_ids"] = (tokens == self.placeholder).int()
        is_masked = self.family == "gemma4_seen" and self._is_as_exported
        mask = self._masks(tokens[0]) if is_masked else torch.ones_like(tokens)
        with torch.inference_mode():
            logits = self.model(input_ids=tokens, attention_mask=mask, **found).logits
        return logits[0].double().log_softmax(-1).numpy()

    def _masks(self, tokens_S: torch.Tensor) -> dict[str, torch.Tensor]:
        """mobius 0.1.0's for Gemma 4: a picture's tokens see each other in all layers, and beyond the windows, as in
        transformers 5.10. Added to scores [1, 1, S, S]."""
        is_item_S = tokens_S == self.placeholder
        block_S = (is_item_S & ~is_item_S.roll(1)).cumsum(0) * is_item_S
        is_one_SS = (block_S[:, None] == block_S) & is_item_S
        before_SS = torch.ones_like(is_one_SS).tril()
        window_SS = before_SS.triu(1 - self.model.config.text_config.sliding_window)
        seen = {"full_attention": before_SS | is_one_SS, "sliding_attention": window_SS | is_one_SS}
        lowest = torch.finfo(torch.float32).min
        return {
            kind: torch.zeros(seen_SS.shape).masked_fill(~seen_SS, lowest)[None, None] for kind, seen_SS in seen.items()
        }

"""One plain forward pass of transformers over one text, without cache, batches or trees: what others are checked by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from olive_ext.engine.runners.hf.hf_model import DEFAULT_LENGTH, context_length, load_model
from olive_ext.model import ResolvedModel


class PlainPass:
    """The Hugging Face model of `model`, in its own type of numbers. Raises `ModelError` where it cannot be loaded."""

    def __init__(self, model: ResolvedModel) -> None:
        settings = model.settings
        self._model: Any = load_model(settings.model, settings.dtype, settings.device)[0]
        self.context_length = context_length(self._model.config) or DEFAULT_LENGTH
        self.vocab_size = int(self._model.config.get_text_config(decoder=True).vocab_size)

    @staticmethod
    def has_gpu() -> bool:
        """Whether a model without a device of its own would run on a GPU."""
        import torch

        return torch.cuda.is_available()

    def logprobs(self, tokens: Sequence[int]) -> npt.NDArray[np.float64]:
        """Log-probabilities in nats of all `tokens` but the first."""
        import torch

        with torch.inference_mode():
            ids = torch.tensor([list(tokens)], device=self._model.device)
            logits_SV = self._model(input_ids=ids).logits[0, :-1].double()
            found: npt.NDArray[np.float64] = logits_SV.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].cpu().numpy()
        return found

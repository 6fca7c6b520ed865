"""Loads transformers' models and their caches, and runs forward passes over single texts, by which other runs are
checked. Knows no step and no ONNX graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from olive_ext.errors import ANY_FAILURE, ModelError, why_not_loaded
from olive_ext.model import ResolvedModel
from olive_ext.model.spec.checkpoint import POSITIONS, entries

DEFAULT_LENGTH = 2048
"""The context length where a configuration names none (a recurrent model), as in lm-eval's HFLM."""


def load_model(
    where: str,
    dtype: str,
    device: str | None,
    num_threads: int | None = None,
    *,
    trust_remote_code: bool = False,
    changes: Mapping[str, Any] | None = None,
) -> tuple[Any, dict[str, Any]]:
    """The model in folder (or under hub name) `where`, in eval mode, and facts about it. `dtype` is "auto" (the file's
    own), "float32", "float16" or "bfloat16". `num_threads` are torch's, for the whole process. `changes` overwrite keys
    of the decoder's configuration. Raises `ModelError` for what cannot be loaded as a model that writes text."""
    import torch
    from transformers import AutoConfig, __version__

    trust = {"trust_remote_code": trust_remote_code}
    try:
        config: Any = AutoConfig.from_pretrained(where, **trust)
        for name, value in (changes or {}).items():
            setattr(config.get_text_config(decoder=True), name, value)
        changed = {"config": config} if changes else {}
        number_type = dtype if dtype == "auto" else getattr(torch, dtype)
        model: Any = _class_for(config).from_pretrained(where, dtype=number_type, **changed, **trust)
    except ANY_FAILURE as error:
        raise ModelError(f"transformers cannot load '{where}' to write text: {why_not_loaded(error)}") from error
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    placed = model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()
    why = "a model in its original form runs one sequence at a time"
    facts = {"model": where, "revision": getattr(model.config, "_commit_hash", None), "num_slots_origin": why}
    dtype_name = str(placed.dtype).removeprefix("torch.")
    runtime = {"runtime": "transformers", "runtime_version": __version__}
    return placed, {**facts, **runtime, "dtype": dtype_name, "device": str(placed.device)}


@contextmanager
def without_bars() -> Iterator[None]:
    """Within it, no progress of loading weights is shown."""
    from transformers.utils import logging

    was_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            logging.enable_progress_bar()


def _class_for(config: Any) -> Any:
    """transformers' class for a configuration. `ModelError` for encoder-decoders except those of text and Whisper."""
    import transformers

    if getattr(config, "is_encoder_decoder", False):
        if config.model_type == "whisper":
            return transformers.AutoModelForSpeechSeq2Seq
        if type(config) in transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
            return transformers.AutoModelForSeq2SeqLM
        raise ModelError(f"encoder-decoders run here that take text, and Whisper; this is a '{config.model_type}'")
    if hasattr(config, "vision_config") and type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return transformers.AutoModelForImageTextToText
    is_hearing = hasattr(config, "audio_config") and type(config) in transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING
    return transformers.AutoModelForMultimodalLM if is_hearing else transformers.AutoModelForCausalLM


def context_length(config: Any) -> int | None:
    """The number of positions that the configuration names; None where it names none."""
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    lengths = (getattr(text, name, None) for name in POSITIONS)
    return next((int(value) for value in lengths if isinstance(value, int) and value > 0), None)


def forget_lengths(model: Any) -> None:
    """Makes rotary embeddings of dynamic scaling forget the longest text so far: transformers keep its frequencies for
    shorter texts that are longer than the original context."""
    for module in model.modules():
        for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
            prefix = name.removesuffix("max_seq_len_cached")
            if hasattr(module, f"{prefix}original_inv_freq"):
                original = getattr(module, f"{prefix}original_inv_freq")
                module.register_buffer(f"{prefix}inv_freq", original.clone().to(model.device), persistent=False)
                setattr(module, name, module.original_max_seq_len)


def new_cache(config: Any) -> Any:
    """An empty cache for a model of that configuration."""
    from transformers import DynamicCache, EncoderDecoderCache

    if getattr(config, "is_encoder_decoder", False):
        return EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
    return DynamicCache(config=config)


def is_croppable(cache: Any) -> bool:
    """Whether every layer keeps all positions, so that the cache can be cut back to any of them."""
    from transformers.cache_utils import DynamicLayer

    decoder_cache = getattr(cache, "self_attention_cache", cache)
    return all(type(layer) is DynamicLayer for layer in decoder_cache.layers)


_LENGTHS = ("sliding_window", "original_max_position_embeddings")


class PlainPass:
    """The Hugging Face model of `model`, in its own number type unless `dtype` names one; `changes` overwrite keys of
    the decoder's configuration. It runs without cache, batches and trees. Raises `ModelError`."""

    def __init__(
        self, model: ResolvedModel, dtype: str | None = None, changes: Mapping[str, Any] | None = None
    ) -> None:
        settings = model.settings
        trust = settings.trust_remote_code
        with without_bars():
            self.model: Any = load_model(
                settings.model, dtype or settings.dtype, settings.device, trust_remote_code=trust, changes=changes
            )[0]
        text: Any = self.model.config.get_text_config(decoder=True)
        self.context_length = context_length(self.model.config) or DEFAULT_LENGTH
        self.vocab_size = int(text.vocab_size)
        self.config: Mapping[str, Any] = text.to_dict()
        """The decoder's configuration."""
        keys = (f"{kind}_token_{form}" for kind in ("image", "video", "audio") for form in ("id", "index"))
        self.media_tokens = {getattr(self.model.config, key, None) for key in keys}

    @property
    def lengths(self) -> dict[str, int]:
        """The lengths at which the configuration treats texts or their parts otherwise, by their keys."""
        lengths: dict[str, int] = {}
        for entry in entries(self.config):
            for name in _LENGTHS:
                if isinstance(entry.get(name), int):
                    lengths.setdefault(name, int(entry[name]))
        return lengths

    @property
    def lengths_beyond(self) -> list[int]:
        """Lengths of texts, each several tokens beyond one of `lengths`."""
        return [number + 2 + number // 4 for number in self.lengths.values()]

    @staticmethod
    def has_gpu() -> bool:
        """Whether a model without a device of its own would run on a GPU."""
        import torch

        return torch.cuda.is_available()

    def untie_head(self) -> None:
        """Gives a head that is its table a weight of its own."""
        import torch

        head, table = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        if head is not None and head.weight is table.weight:
            head.weight = torch.nn.Parameter(head.weight.detach().clone())

    def take_weights(self, other: PlainPass) -> None:
        """Takes the weights of the `other` model, in this one's type of numbers, as far as it has them."""
        self.untie_head()
        self.model.load_state_dict(other.model.state_dict(), strict=False)

    def logprobs(self, tokens: Sequence[int], num_ids: int | None = None) -> npt.NDArray[np.float64]:
        """Log-probabilities in nats of all `tokens` but the first [S - 1], among the first `num_ids` ids."""
        import torch

        with torch.inference_mode():
            logits_SV = self.run(tokens).logits[0, :-1, :num_ids].double()
            targets_S1 = torch.tensor(list(tokens[1:]), device=logits_SV.device)[:, None]
            logprobs: npt.NDArray[np.float64] = logits_SV.log_softmax(-1).gather(1, targets_S1)[:, 0].cpu().numpy()
        return logprobs

    def run(self, tokens: Sequence[int]) -> Any:
        """What the model returns for `tokens`."""
        import torch

        forget_lengths(self.model)
        with torch.inference_mode():
            return self.model(input_ids=torch.tensor([list(tokens)], device=self.model.device))

"""Runs steps on a Hugging Face model in torch, one sequence at a time. Knows no tokenizer.

Axes: S tokens of a row, R head rows, V vocabulary, K sampled rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from olive_ext.engine.step import Batching, Step, StepOutput
from olive_ext.engine.types import Source, refuse_source
from olive_ext.errors import ModelError, RunError

if TYPE_CHECKING:
    import torch

_LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "max_sequence_length")
"""Names of the context's length in configurations, in the order in which they are looked for."""

_DEFAULT_LENGTH = 2048
"""Context where a configuration names none (a recurrent model), as in lm-eval's HFLM."""


class HfRunner:
    """One slot: the tokens that have been fed, and transformers' cache of them.

    A row goes on from the cache, cut back to the row's past where all its layers can be cut; where the cache cannot
    serve (a window, a recurrent state, none at all) the past is fed again. Its logits are exposed on the host.
    """

    batching = Batching.SINGLE
    num_slots = 1
    has_trunk = False
    trunk_capacity = 0
    source_kind = None

    def __init__(self, model: Any, facts: Mapping[str, Any], max_length: int | None = None) -> None:
        self.host_bytes = 0
        self.tokens_replayed = 0
        self._model = model
        self._facts = facts
        own = context_length(model.config)
        if max_length is not None and own is not None and max_length > own:
            raise ModelError(f"max_length = {max_length}: the model's context is {own} tokens")
        self._context_length = max_length or own or _DEFAULT_LENGTH
        parameters = inspect.signature(model.forward).parameters
        self._keeps_cache = "past_key_values" in parameters
        self._picks_rows = "logits_to_keep" in parameters
        self._is_croppable = self._keeps_cache and _is_croppable(self._new_cache())
        self._cache: Any = None
        self._tokens: list[int] = []

    @property
    def can_cut(self) -> bool:
        return self._is_croppable

    @property
    def can_split(self) -> bool:
        return self._is_croppable

    @property
    def capacity(self) -> int:
        return self._context_length

    @property
    def context_length(self) -> int:
        return self._context_length

    def check_source(self, source: Source | None) -> None:
        refuse_source(source)

    def reserve(self, positions: int) -> None:
        """Nothing: the cache grows as it is fed."""

    def reserve_trunk(self, cells: int) -> None:
        """Nothing: there is no trunk."""

    def run(self, step: Step) -> StepOutput:
        """Raises `RunError` with the step and torch's reason when the device fails."""
        (row,) = step.rows
        offsets = [head.offset for head in step.heads]
        try:
            logits_RV = self._feed(row.past, row.tokens, offsets)
        except (RuntimeError, MemoryError, IndexError) as error:
            self._forget()
            shape = f"{len(row.tokens)} tokens behind {row.past} positions"
            raise RunError(f"transformers failed on a step of {shape}: {_first_line(error)}") from error
        return self._score(logits_RV, step)

    def describe(self) -> Mapping[str, Any]:
        return {
            **self._facts,
            "capacity": self.capacity,
            "context_length": self.context_length,
            "batching": self.batching.value,
            "kv_cache": "transformers' DynamicCache" if self._keeps_cache else "none",
            "kv_binding": "cut back to the shared prefix" if self._is_croppable else "fed again",
            "tokens_replayed": self.tokens_replayed,
            "scoring_head": "torch",
            "scoring_head_reason": "log-probabilities of the picked rows in fp32",
        }

    def close(self) -> None:
        self._forget()
        self._model = None

    def _forget(self) -> None:
        self._cache = None
        self._tokens = []

    def _new_cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self._model.config)

    def _feed(self, past: int, tokens: Sequence[int], offsets: list[int]) -> torch.Tensor:
        """Feeds `tokens`; the logits [max(R, 1), V] behind those at `offsets`, in fp32."""
        import torch

        replayed = self._go_back(past)
        fed = [*replayed, *tokens]
        self._tokens = [*self._tokens[:past], *tokens]
        rows = torch.tensor([len(replayed) + offset for offset in offsets] or [len(fed) - 1])
        cache = {"past_key_values": self._cache, "use_cache": True} if self._keeps_cache else {}
        keep = {"logits_to_keep": rows} if self._picks_rows else {}
        with torch.inference_mode():
            ids = torch.tensor([fed], device=self._model.device)
            logits_RV = self._model(input_ids=ids, **cache, **keep).logits[0]
            picked: torch.Tensor = (logits_RV if self._picks_rows else logits_RV[rows]).float()
        return picked

    def _go_back(self, past: int) -> list[int]:
        """Makes the cache hold the first `past` tokens or none; what is missing of them and must be fed again."""
        held = len(self._tokens)
        if self._cache is not None and past <= held and (past == held or self._is_croppable):
            if past < held:
                self._cache.crop(past - held)  # a negative number takes that many away, in every version 5
            return []
        self._cache = self._new_cache() if self._keeps_cache else None
        self.tokens_replayed += past
        return self._tokens[:past]

    def _score(self, logits_RV: torch.Tensor, step: Step) -> StepOutput:
        import torch

        with torch.inference_mode():
            log_sums_R = logits_RV.logsumexp(-1)
            heads_T = torch.tensor([head for head, _ in step.targets], dtype=torch.long, device=logits_RV.device)
            ids_T = torch.tensor([token for _, token in step.targets], dtype=torch.long, device=logits_RV.device)
            logprobs_T = logits_RV[heads_T, ids_T] - log_sums_R[heads_T]
            greedy_R = logits_RV.argmax(-1)[: len(step.heads)]
            samples_KV = logits_RV[list(step.samples)]
        logprobs, greedy, samples = (self._to_host(tensor) for tensor in (logprobs_T, greedy_R, samples_KV))
        return StepOutput(logprobs, greedy, samples, logits_RV.cpu().numpy())

    def _to_host(self, tensor: torch.Tensor) -> npt.NDArray[Any]:
        array: npt.NDArray[Any] = tensor.cpu().numpy()
        self.host_bytes += array.nbytes
        return array


def load_model(where: str, dtype: str, device: str | None) -> tuple[Any, dict[str, Any]]:
    """The model in folder (or under hub name) `where`, in eval mode, and facts of it. `dtype` is "auto" (the file's
    own), "float32", "float16" or "bfloat16". Raises `ModelError` for what cannot be loaded as a causal language model.
    """
    import torch
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        model = load(where, dtype=dtype if dtype == "auto" else getattr(torch, dtype))
    except Exception as error:
        raise ModelError(f"transformers cannot load '{where}' as a causal model: {_first_line(error)}") from error
    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelError(f"'{where}' is an encoder-decoder, which is not run on transformers here")
    placed = model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()
    return placed, {"model": where, "runtime": "transformers", "dtype": str(placed.dtype), "device": str(placed.device)}


def context_length(config: Any) -> int | None:
    """Positions that the configuration names; None where it names none."""
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    found = (getattr(text, name, None) for name in _LENGTHS)
    return next((int(value) for value in found if isinstance(value, int) and value > 0), None)


def _is_croppable(cache: Any) -> bool:
    """Whether every layer keeps all positions, so that it can be cut back to any of them."""
    from transformers.cache_utils import DynamicLayer

    return all(type(layer) is DynamicLayer for layer in cache.layers)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)

"""Runs steps on a Hugging Face model in torch: one sequence at a time, or a tree batch, whose mask limits each token to
the cells that it sees. Knows no tokenizer.

Axes: S tokens of a row or of a tree batch, T cells, R logits rows, V vocabulary, K sampled rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from olive_ext.engine.requests import common_prefix
from olive_ext.engine.runners.runner import Capacity, OpenedRunner, Runner, Traits
from olive_ext.engine.runners.trials import check_tree_batches
from olive_ext.engine.step import FIRST_CELL, Row, Step, StepOutput, visible_cells
from olive_ext.errors import ModelError, RunError, first_line, why_not_loaded
from olive_ext.model import ResolvedModel
from olive_ext.model.decisions import choose_chunk_size

if TYPE_CHECKING:
    import torch

_LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "max_sequence_length")
"""Names of the context's length in configurations, in the order in which they are looked for."""

DEFAULT_LENGTH = 2048
"""Context where a configuration names none (a recurrent model), as in lm-eval's HFLM."""

_MASKED = ("sdpa", "eager")
"""Attention in transformers that takes a mask [1, 1, S, T] as it is."""


class HfRunner(Runner):
    """One slot, and transformers' cache of what was fed last.

    A row goes on from the cache, cut back to the row's past where all its layers can be cut; where the cache cannot
    serve (a window, a recurrent state, none at all) the past is fed again. Tree batches run in a cache of their
    own, where a trial finds that to be right. The logits rows are returned on the host.
    """

    capacity = Capacity(num_slots=1)
    host_bytes = 0

    def __init__(self, model: Any, facts: Mapping[str, Any], max_length: int | None = None) -> None:
        self.tokens_replayed = 0
        self._model = model
        self._facts = facts
        own = context_length(model.config)
        if max_length is not None and own is not None and max_length > own:
            raise ModelError(f"max_length = {max_length}: the model's context is {own} tokens")
        length = max_length or own or DEFAULT_LENGTH
        self.capacity = Capacity(1, length)
        parameters = inspect.signature(model.forward).parameters
        self._keeps_cache = "past_key_values" in parameters
        self._picks_rows = "logits_to_keep" in parameters
        self._is_croppable = self._keeps_cache and _is_croppable(self._new_cache())
        self._cache: Any = None
        self._cached: list[int] = []
        self._slot: list[int] = []
        takes_masks = "position_ids" in parameters and getattr(model.config, "_attn_implementation", None) in _MASKED
        has_tree_batches = self._is_croppable and self._picks_rows and takes_masks
        self._shared_prefix = HfSharedPrefix(model, self._new_cache) if has_tree_batches else None
        is_cut = self._is_croppable
        super().__init__(Traits(length, can_rewind=is_cut, chunked_prefill=is_cut, tree_batches=has_tree_batches))
        vocab_size = model.config.get_text_config(decoder=True).vocab_size if has_tree_batches else 0
        if has_tree_batches and (problem := check_tree_batches(self, vocab_size)):
            self._shared_prefix = None
            self.traits = replace(self.traits, tree_batches=False)
            self._facts = {**facts, "notes": [f"texts are scored one after the other: {problem}"]}
        self._forget()

    def reserve(self, positions: int, cells: int = 0) -> None:
        """Allocates nothing: the caches grow as they are fed."""
        self.capacity = self.capacity._replace(cells=max(self.capacity.cells, cells))

    def run(self, step: Step) -> StepOutput:
        """Raises `RunError` with the step and torch's reason when the device fails."""
        try:
            if step.first_cell is None or self._shared_prefix is None:
                logits_RV = self._run_row(step)
            else:
                logits_RV = self._shared_prefix.run(step)
        except (RuntimeError, MemoryError, IndexError, ValueError, TypeError) as error:
            self._forget()
            shape = f"{step.num_tokens} tokens behind {step.rows[0].past} positions"
            raise RunError(f"transformers failed on a step of {shape}: {first_line(error)}") from error
        return self._score(logits_RV, step)

    def release_memory(self) -> None:
        """Drops the caches, and has torch hand its spare blocks back to the device."""
        import torch

        self._forget()
        self._slot = []
        self.capacity = self.capacity._replace(cells=0)
        torch.cuda.empty_cache()

    def describe(self) -> Mapping[str, Any]:
        return {
            **self._facts,
            "capacity": self.capacity.positions,
            "context_length": self.traits.context_length,
            "batching": self.traits.batching.value,
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
        self._cached = []
        if self._shared_prefix is not None:
            self._shared_prefix.forget()

    def _new_cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self._model.config)

    def _run_row(self, step: Step) -> torch.Tensor:
        """The logits [max(R, 1), V] of the step's logits rows, in fp32."""
        import torch

        (row,) = step.rows
        past = self._slot[: row.past]
        replayed = past[self._go_back(past) :]
        fed = [*replayed, *row.tokens]
        self.tokens_replayed += len(replayed)
        rows = torch.tensor([len(replayed) + found.offset for found in step.logits_rows] or [len(fed) - 1])
        cache = {"past_key_values": self._cache, "use_cache": True} if self._keeps_cache else {}
        keep = {"logits_to_keep": rows} if self._picks_rows else {}
        with torch.inference_mode():
            ids = torch.tensor([fed], device=self._model.device)
            logits_RV = self._model(input_ids=ids, **cache, **keep).logits[0]
            picked: torch.Tensor = (logits_RV if self._picks_rows else logits_RV[rows]).float()
        self._cached = self._slot = [*past, *row.tokens]
        return picked

    def _go_back(self, past: Sequence[int]) -> int:
        """Cuts the cache back to what it shares with `past`: the number of tokens. Begins anew where it cannot be."""
        held = len(self._cached)
        shared = common_prefix(np.array(self._cached, np.int32), np.array(past, np.int32))
        if self._cache is not None and (shared == held or self._is_croppable):
            if shared < held:
                self._cache.crop(shared - held)  # a negative number takes that many away, in every version 5
            return shared
        self._cache = self._new_cache() if self._keeps_cache else None
        return 0

    def _score(self, logits_RV: torch.Tensor, step: Step) -> StepOutput:
        import torch

        with torch.inference_mode():
            log_sums_R = logits_RV.logsumexp(-1)
            rows_T = torch.tensor([row for row, _ in step.targets], dtype=torch.long, device=logits_RV.device)
            ids_T = torch.tensor([token for _, token in step.targets], dtype=torch.long, device=logits_RV.device)
            logprobs_T = logits_RV[rows_T, ids_T] - log_sums_R[rows_T]
            greedy_R = logits_RV.argmax(-1)[: len(step.logits_rows)]
            samples_KV = logits_RV[list(step.samples)]
        logprobs, greedy, samples = (self._to_host(tensor) for tensor in (logprobs_T, greedy_R, samples_KV))
        return StepOutput(logprobs, greedy, samples, logits_RV.cpu().numpy())

    def _to_host(self, tensor: torch.Tensor) -> npt.NDArray[Any]:
        array: npt.NDArray[Any] = tensor.cpu().numpy()
        self.host_bytes += array.nbytes
        return array


class HfSharedPrefix:
    """The shared-prefix cache: a cache of transformers whose places are cells, less cell 0, which no token sees."""

    def __init__(self, model: Any, new_cache: Callable[[], Any]) -> None:
        self._model = model
        self._new_cache = new_cache
        self._cache: Any = None

    def forget(self) -> None:
        """Gives the memory back; the next step must begin at the first cell."""
        self._cache = None

    def run(self, step: Step) -> torch.Tensor:
        """The logits [max(R, 1), V] of the step's logits rows, in fp32."""
        import torch

        assert step.first_cell is not None
        with torch.inference_mode():
            self._settle(step)
            ids = torch.tensor([[token for row in step.rows for token in row.tokens]], device=self._model.device)
            positions = [row.past + place for row in step.rows for place in range(len(row.tokens))]
            starts = np.cumsum([0, *(len(row.tokens) for row in step.rows)])
            rows = torch.tensor([int(starts[found.row]) + found.offset for found in step.logits_rows] or [0])
            logits_RV: torch.Tensor = self._model(
                input_ids=ids,
                attention_mask=self._mask(step.rows, step.first_cell),
                position_ids=torch.tensor([positions], device=self._model.device),
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=rows,
            ).logits[0]
        return logits_RV.float()

    def _settle(self, step: Step) -> None:
        """Makes the step's moves, and drops the cells that the step writes anew."""
        import torch

        assert step.first_cell is not None
        if self._cache is None:
            self._cache = self._new_cache()
        for move in step.moves:
            sources, target = move.source_N - FIRST_CELL, move.target - FIRST_CELL
            for layer in self._cache.layers:
                for cells in (layer.keys, layer.values):
                    cells[:, :, target : target + len(sources)] = cells[:, :, sources]
        stale = self._cache.get_seq_length() - (step.first_cell - FIRST_CELL)
        if stale > 0:
            self._cache.crop(-stale)  # a negative number takes that many away, in every version 5
        elif stale < 0:  # anything goes into cells that were never written: steps are tried and timed on any cache
            ids = torch.zeros((1, -stale), dtype=torch.long, device=self._model.device)
            self._model(input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)

    def _mask(self, rows: tuple[Row, ...], first_cell: int) -> torch.Tensor:
        """[1, 1, S, T], added to scores."""
        import torch

        visible_ST = visible_cells(rows, first_cell, None)[0, 0, :, FIRST_CELL:]
        fresh = first_cell - FIRST_CELL
        visible_ST[:, fresh:] &= np.tri(len(visible_ST), dtype=np.bool_)
        hidden_ST = torch.from_numpy(~visible_ST).to(self._model.device)
        bias_ST = torch.zeros(hidden_ST.shape, dtype=self._model.dtype, device=self._model.device)
        return bias_ST.masked_fill_(hidden_ST, torch.finfo(self._model.dtype).min)[None, None]


def open_hf_runner(model: ResolvedModel) -> OpenedRunner:
    """A model that runs on transformers. Raises `ModelError` for what cannot be loaded as a causal language model."""
    settings, threads = model.settings, model.settings.engine.num_threads
    num_threads = None if threads == "auto" else threads
    trusted = settings.trust_remote_code
    loaded, facts = load_model(settings.model, settings.dtype, settings.device, num_threads, trust_remote_code=trusted)
    return OpenedRunner(HfRunner(loaded, facts, settings.max_length), choose_chunk_size(settings.engine)[0])


def load_model(
    where: str, dtype: str, device: str | None, num_threads: int | None = None, *, trust_remote_code: bool = False
) -> tuple[Any, dict[str, Any]]:
    """The model in folder (or under hub name) `where`, in eval mode, and facts of it. `dtype` is "auto" (the file's
    own), "float32", "float16" or "bfloat16"; `num_threads` are torch's, for the whole process. Raises `ModelError` for
    what cannot be loaded as a causal language model.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    trust = {"trust_remote_code": trust_remote_code}
    try:
        is_encoder_decoder = getattr(AutoConfig.from_pretrained(where, **trust), "is_encoder_decoder", False)
        model = (
            None
            if is_encoder_decoder
            else load(where, dtype=dtype if dtype == "auto" else getattr(torch, dtype), **trust)
        )
    except Exception as error:
        raise ModelError(f"transformers cannot load '{where}' as a causal model: {why_not_loaded(error)}") from error
    if model is None:
        raise ModelError(f"'{where}' is an encoder-decoder, which is not run on transformers here: give an ONNX model")
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    placed = model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()
    why = "a model in its original form runs one sequence at a time"
    facts = {"model": where, "revision": getattr(model.config, "_commit_hash", None), "num_slots_origin": why}
    dtype_name = str(placed.dtype).removeprefix("torch.")
    return placed, {**facts, "runtime": "transformers", "dtype": dtype_name, "device": str(placed.device)}


def context_length(config: Any) -> int | None:
    """Positions that the configuration names; None where it names none."""
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    found = (getattr(text, name, None) for name in _LENGTHS)
    return next((int(value) for value in found if isinstance(value, int) and value > 0), None)


def _is_croppable(cache: Any) -> bool:
    """Whether every layer keeps all positions, so that it can be cut back to any of them."""
    from transformers.cache_utils import DynamicLayer

    return all(type(layer) is DynamicLayer for layer in cache.layers)

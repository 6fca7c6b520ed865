"""Runs steps on a Hugging Face model in torch: one sequence at a time, or a tree batch, whose mask limits each token to
the cells that it may see. Also loads such models, and runs plain passes over single texts, by which other runs are
checked. Knows no tokenizer.

Axes: S tokens of a row or of a tree batch, T cells, R logits rows, V vocabulary, K sampled rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from olive_ext.engine.forms.tree import check_tree_batches, visible_cells
from olive_ext.engine.requests import common_prefix
from olive_ext.engine.runners.runner import OpenedRunner, Runner, Traits
from olive_ext.engine.step import FIRST_CELL, Capacity, Step, StepOutput
from olive_ext.errors import ANY_FAILURE, ModelError, RunError, first_line, why_not_loaded
from olive_ext.media.items import Media, Source, filled_up, rotary_positions
from olive_ext.model import ResolvedModel
from olive_ext.model.decisions import choose_chunk_size
from olive_ext.model.files.package_config import Suppressed, read_suppressed
from olive_ext.model.spec.checkpoint import POSITIONS, entries, read_rotary_lengths, read_source
from olive_ext.model.types import MediaSpec, Modality, SourceKind, TensorSpec

if TYPE_CHECKING:
    import torch

_MASKED = ("sdpa", "eager")
"""Attention implementations of transformers that take a mask [1, 1, S, T] unchanged."""


class HfRunner(Runner):
    """One slot, and transformers' cache of what was fed last.

    A row continues from the cache, which is cut back to the row's past if all its layers can be cut. Where the cache
    cannot serve (a window, a recurrent state, no cache at all), the past is fed again. Tree batches run in a cache of
    their own, where a trial finds that to be right. The logits rows are returned on the host.
    """

    capacity = Capacity(num_slots=1)
    host_bytes = 0

    def __init__(
        self,
        model: Any,
        facts: Mapping[str, Any],
        max_length: int | None = None,
        media: MediaSpec | None = None,
        suppressed: Suppressed | None = None,
    ) -> None:
        """`media`: what the model takes besides text. `suppressed`: what an encoder-decoder never generates."""
        self.tokens_replayed = 0
        self._model = model
        self._media = media
        self._bans = suppressed.bans if suppressed is not None else ()
        self._facts = facts
        context = context_length(model.config)
        if max_length is not None and context is not None and max_length > context:
            raise ModelError(f"max_length = {max_length}: the model's context is {context} tokens", code="too_large")
        length = max_length or context or DEFAULT_LENGTH
        self.capacity = Capacity(1, length)
        self._parameters = parameters = inspect.signature(model.forward).parameters
        self._is_rotary_grid = hasattr(getattr(model, "model", None), "get_rope_index")
        self._keeps_cache = "past_key_values" in parameters
        self._picks_rows = "logits_to_keep" in parameters
        self._is_croppable = self._keeps_cache and is_croppable(new_cache(model.config))
        self._cache: Any = None
        self._cells: Any = None
        """The shared-prefix cache: a cache of transformers whose positions are cells. Cell 0, never seen, is left out.
        """

        self._slot: list[int] = []
        self._source: Source | None = None
        source = read_source(model.config.to_dict())
        self.encoder = SourceStates(model, *source) if source is not None else None
        lengths = read_rotary_lengths(model.config.to_dict())
        takes_masks = "position_ids" in parameters and getattr(model.config, "_attn_implementation", None) in _MASKED
        has_tree_batches = self._is_croppable and self._picks_rows and takes_masks and media is None and lengths is None
        traits = Traits(length, tree_batches=has_tree_batches, can_rewind=self._is_croppable, lengths=lengths or ())
        super().__init__(replace(traits, chunked_prefill=self._is_croppable and lengths is None))
        if has_tree_batches and (problem := check_tree_batches(self, self.vocab_size)):
            self.traits = replace(self.traits, tree_batches=False)
            self._facts = {**facts, "notes": [f"texts are scored one after the other: {problem}"]}
        self._forget()

    def reserve(self, positions: int, cells: int = 0) -> None:
        """Allocates nothing: the caches grow as they are fed."""
        self.capacity = self.capacity._replace(cells=max(self.capacity.cells, cells))

    @property
    def vocab_size(self) -> int:
        """The number of tokens that the configuration names."""
        return int(self._model.config.get_text_config(decoder=True).vocab_size)

    @override
    def check_media(self, media: Media) -> None:
        taken = () if self._media is None else self._media.modalities
        if any(run.item.modality not in taken for run in media):
            super().check_media(media)

    def run(self, step: Step) -> StepOutput:
        """Raises `RunError` with the step and torch's reason when the device fails."""
        try:
            logits_RV = self._run_row(step) if step.first_cell is None else self._run_tree(step)
        except (RuntimeError, MemoryError, IndexError, ValueError, TypeError) as error:
            self._forget()
            shape = f"{step.num_tokens} tokens after {step.rows[0].past} positions"
            raise RunError(f"transformers failed on a step of {shape}: {first_line(error)}") from error
        return self._score(logits_RV, step)

    def release_memory(self) -> None:
        """Drops the caches, and makes torch return its spare blocks to the device."""
        import torch

        self._forget()
        self._slot = []
        if self.encoder is not None:
            self.encoder.states.cache_clear()
        self.capacity = self.capacity._replace(cells=0)
        torch.cuda.empty_cache()

    @override
    def describe(self) -> Mapping[str, Any]:
        return {
            **self._facts,
            **super().describe(),
            "kv_cache": "transformers' DynamicCache" if self._keeps_cache else "none",
            "kv_binding": "cut back to the shared prefix" if self._is_croppable else "fed again",
            "tokens_replayed": self.tokens_replayed,
            **({} if self.encoder is None else {"encoder_runs": self.encoder.num_runs}),
            "scoring_head": "torch",
            "scoring_head_reason": "log-probabilities of the picked rows in fp32",
        }

    @override
    def close(self) -> None:
        self._forget()
        self._model = self.encoder = None

    def _forget(self) -> None:
        """Releases the memory of the caches; the next steps begin at the first position and the first cell."""
        self._cache = self._cells = None

    def _run_row(self, step: Step) -> torch.Tensor:
        """The logits [max(R, 1), V] of the step's logits rows, in fp32."""
        import torch

        (row,) = step.rows
        tokens = [*self._slot[: row.past], *row.tokens]
        if row.source != self._source:
            self._forget()
            self._source = row.source
        begin = self._go_back(tokens[: row.past])
        begun = tuple(run for run in row.media if run.start < len(tokens))
        items = begun if begun and begun[-1].stop > begin else ()
        if items:
            # All tokens are fed in one pass: features get into the embeddings by counting placeholders from its
            # beginning, and some models let a picture's tokens see each other, which does not work after a cache.
            self._begin_anew()
            begin = 0
        ids = tokens[begin:]
        for run in items:
            ids[run.start : run.stop] = [run.item.placeholder] * run.item.num_tokens
        self.tokens_replayed += row.past - begin
        rows = torch.tensor([row.past - begin + read.offset for read in step.logits_rows] or [len(ids) - 1])
        taken, self._cache = self._cache, None  # an interruption leaves it with any content
        cache = {"past_key_values": taken, "use_cache": True} if self._keeps_cache else {}
        keep = {"logits_to_keep": rows} if self._picks_rows else {}
        device = self._model.device
        inputs: dict[str, Any] = item_inputs(items, len(ids), self._parameters, device)
        inputs |= {} if self.encoder is None else {"encoder_outputs": (self.encoder.states(row.source),)}
        if self._is_rotary_grid and not items:
            # Such models compute the positions of a pass with pictures themselves, and remember where text goes on: for
            # another sequence, if that was fed last.
            positions_3S = rotary_positions(row.media, range(begin, len(tokens)))
            inputs["position_ids"] = torch.from_numpy(positions_3S)[:, None].to(device)
        with torch.inference_mode():
            name = "input_ids" if self.encoder is None else "decoder_input_ids"
            inputs[name] = torch.tensor([ids], device=device)
            logits_RV = self._model(**inputs, **cache, **keep).logits[0]
            picked: torch.Tensor = (logits_RV if self._picks_rows else logits_RV[rows]).float()
        self._cache, self._slot = taken, tokens
        return picked

    def _go_back(self, past: Sequence[int]) -> int:
        """Cuts the cache back to what it shares with `past`, or makes a new one; returns the number of tokens."""
        held = len(self._slot)
        shared = common_prefix(np.array(self._slot, np.int32), np.array(past, np.int32))
        cache, self._cache = self._cache, None  # as in `_run_row`
        if cache is None or not (shared == held or self._is_croppable):
            self._begin_anew()
            return 0
        if shared < held:
            cache.crop(shared - held)  # a negative number takes that many away, in every version 5
            self._slot = self._slot[:shared]
        self._cache = cache
        return shared

    def _begin_anew(self) -> None:
        self._cache = new_cache(self._model.config) if self._keeps_cache else None
        forget_lengths(self._model)

    def _run_tree(self, step: Step) -> torch.Tensor:
        """The logits [max(R, 1), V] of the step's logits rows, in fp32."""
        import torch

        assert step.first_cell is not None
        with torch.inference_mode():
            cache = self._settled_cells(step)
            ids = torch.tensor([[token for row in step.rows for token in row.tokens]], device=self._model.device)
            positions = [row.past + place for row in step.rows for place in range(len(row.tokens))]
            starts = step.columns.starts_B.tolist()
            rows = torch.tensor([starts[read.row] + read.offset for read in step.logits_rows] or [0])
            visible_ST = visible_cells(step, None)[0, 0, :, FIRST_CELL:]
            fresh = step.first_cell - FIRST_CELL
            visible_ST[:, fresh:] &= np.tri(len(visible_ST), dtype=np.bool_)
            hidden_ST = torch.from_numpy(~visible_ST).to(self._model.device)
            bias_ST = torch.zeros(hidden_ST.shape, dtype=self._model.dtype, device=self._model.device)
            logits_RV: torch.Tensor = self._model(
                input_ids=ids,
                attention_mask=bias_ST.masked_fill_(hidden_ST, torch.finfo(self._model.dtype).min)[None, None],
                position_ids=torch.tensor([positions], device=self._model.device),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=rows,
            ).logits[0]
        self._cells = cache
        return logits_RV.float()

    def _settled_cells(self, step: Step) -> Any:
        """Takes the cache out, for an interruption leaves it with any content. Makes the step's moves there, and drops
        the cells that the step will write."""
        assert step.first_cell is not None
        cache, self._cells = self._cells, None
        if cache is None:
            cache = new_cache(self._model.config)
        for move in step.moves:
            sources, target = move.source_N - FIRST_CELL, move.target - FIRST_CELL
            for layer in cache.layers:
                for cells in (layer.keys, layer.values):
                    cells[:, :, target : target + len(sources)] = cells[:, :, sources]
        stale = cache.get_seq_length() - (step.first_cell - FIRST_CELL)
        if stale > 0:
            cache.crop(-stale)  # a negative number takes that many away, in every version 5
        return cache

    def _score(self, logits_RV: torch.Tensor, step: Step) -> StepOutput:
        import torch

        with torch.inference_mode():
            allowed_RV = logits_RV.clone() if self._bans else logits_RV
            for number, logits_row in enumerate(step.logits_rows if self._bans else ()):
                allowed_RV[number, list(self._bans[logits_row.ban])] = -torch.inf
            log_sums_R = logits_RV.logsumexp(-1)
            rows_T = torch.tensor([row for row, _ in step.targets], dtype=torch.long, device=logits_RV.device)
            ids_T = torch.tensor([token for _, token in step.targets], dtype=torch.long, device=logits_RV.device)
            logprobs_T = logits_RV[rows_T, ids_T] - log_sums_R[rows_T]
            greedy_R = allowed_RV.argmax(-1)[: len(step.logits_rows)]
            samples_KV = allowed_RV[list(step.samples)]
        logprobs, greedy, samples = (tensor.cpu().numpy() for tensor in (logprobs_T, greedy_R, samples_KV))
        self.host_bytes += logprobs.nbytes + greedy.nbytes + samples.nbytes
        return StepOutput(logprobs, greedy, samples, logits_RV.cpu().numpy())


def open_hf_runner(model: ResolvedModel) -> OpenedRunner:
    """A model that runs on transformers. Raises `ModelError` for what cannot be loaded as a causal language model."""
    settings, threads = model.settings, model.settings.engine.num_threads
    num_threads = None if threads == "auto" else threads
    trusted = settings.trust_remote_code
    loaded, facts = load_model(settings.model, settings.dtype, settings.device, num_threads, trust_remote_code=trusted)
    suppressed = read_suppressed(model.processor_files) if model.source is not None else None
    runner = HfRunner(loaded, facts, settings.max_length, model.media, suppressed)
    return OpenedRunner(runner, choose_chunk_size(settings.engine)[0])


KEPT_SOURCES = 8
"""The number of sources whose states are kept: those of the requests in progress."""

_TYPES = ("token_type_ids", "mm_token_type_ids")
"""Names of the input that marks the tokens of pictures and sounds among text (0), in the models that take it."""

_TYPE_IDS = {Modality.IMAGE: 1, Modality.AUDIO: 3}


def item_inputs(items: Media, length: int, accepted: Mapping[str, Any], device: Any) -> dict[str, torch.Tensor]:
    """The items' arrays that the model takes (`accepted`), joined, and the types of the `length` tokens."""
    import torch

    if not items:
        return {}
    loaded: dict[str, list[npt.NDArray[Any]]] = {}
    for name, array in chain.from_iterable(run.item.arrays().items() for run in items):
        loaded.setdefault(name, []).append(array)
    tensors = {name: torch.from_numpy(filled_up(loaded[name])).to(device) for name in loaded.keys() & accepted.keys()}
    types_S = torch.zeros((1, length), dtype=torch.long, device=device)
    for run in items:
        types_S[:, run.start : run.stop] = _TYPE_IDS[run.item.modality]
    return {**tensors, **{name: types_S for name in _TYPES if name in accepted}}


class SourceStates:
    """The encoder of an encoder-decoder. The states of a source are computed once while they are kept."""

    def __init__(self, model: Any, kind: SourceKind, source: TensorSpec) -> None:
        """`source`: the encoder's input."""
        self.kind = kind
        self.source = source
        self.num_runs = 0
        self._model = model
        self.states = lru_cache(maxsize=KEPT_SOURCES)(self._encode)

    def _encode(self, source: Source) -> torch.Tensor:
        """[1, positions, hidden size]."""
        import torch

        self.num_runs += 1
        tensor = torch.from_numpy(source.array[None]).to(self._model.device)
        tensor = tensor.to(self._model.dtype) if self.kind is SourceKind.FEATURES else tensor
        with torch.inference_mode():
            states: torch.Tensor = self._model.get_encoder()(tensor)[0]
        return states


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
    of the decoder's configuration. Raises `ModelError` for what cannot be loaded whole as a model that writes text."""
    import torch
    from transformers import AutoConfig, __version__

    trust = {"trust_remote_code": trust_remote_code}
    try:
        config: Any = AutoConfig.from_pretrained(where, **trust)
        for name, value in (changes or {}).items():
            setattr(config.get_text_config(decoder=True), name, value)
        changed = {"config": config} if changes else {}
        number_type = dtype if dtype == "auto" else getattr(torch, dtype)
        options = {"dtype": number_type, "output_loading_info": True, **changed, **trust}
        model, loading = _class_for(config).from_pretrained(where, **options)
    except ANY_FAILURE as error:
        raise ModelError(f"transformers cannot load '{where}' to write text: {why_not_loaded(error)}") from error
    if made_up := [name for name, _ in model.named_parameters() if name in loading["missing_keys"]]:
        quantized = (getattr(config, "quantization_config", None) or {}).get("quant_method")
        method = f", which are quantized by '{quantized}'" if quantized else ""
        unread = f"{len(made_up)} of the weights of '{where}' ('{made_up[0]}'){method}"
        raise ModelError(f"transformers do not read {unread}: they would be random numbers", code="damaged")
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    placed = model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()
    why = "a model in its original form runs one sequence at a time"
    facts = {"model": where, "revision": getattr(model.config, "_commit_hash", None), "num_slots_origin": why}
    dtype_name = str(placed.dtype).removeprefix("torch.")
    runtime = {"runtime": "transformers", "runtime_version": __version__}
    return placed, {**facts, **runtime, "dtype": dtype_name, "device": str(placed.device)}


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
        from transformers.utils import logging

        settings, shows_bars = model.settings, logging.is_progress_bar_enabled()
        trust = settings.trust_remote_code
        logging.disable_progress_bar()
        try:
            self.model: Any = load_model(
                settings.model, dtype or settings.dtype, settings.device, trust_remote_code=trust, changes=changes
            )[0]
        finally:
            if shows_bars:
                logging.enable_progress_bar()
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

"""The two kinds of encoders. Plain ONNX encoders (BERT-like, feature extraction): texts of like length share a run, and
its outputs are pooled. Decoders, on the engine, which computes a shared instruction once and shares steps between
texts: the graph's hidden states take the place of its logits, whose head is dropped, and a tap keeps the rows that are
read.

Axes: N texts, B rows of a run, S positions, T positions read of a text, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from olive_ext.engine.opening import engine_on, open_runner
from olive_ext.engine.reference.kernels import to_host
from olive_ext.engine.reference.tap import Tap, target_arrays
from olive_ext.engine.requests import Notes, Request
from olive_ext.engine.step import Step, StepOutput
from olive_ext.errors import ModelError, RunError, listed
from olive_ext.graph.nodes import remove_dead
from olive_ext.model import ResolvedModel
from olive_ext.model.decisions import wants_few_shapes
from olive_ext.model.providers.ort_session import open_session, reason_of

Array = npt.NDArray[np.float32]

RUN_TOKENS = 2048
"""Positions of one run at most, padding included."""

_MOST_PADDING = 256
"""Positions of padding of one run at most; texts that would need more begin another one."""

_MOST_ROWS = 64
_POOLED = ("sentence_embedding", "text_embeds")
_STATES = ("last_hidden_state", "token_embeddings")
_TYPES = {"tensor(int64)": np.int64, "tensor(int32)": np.int32}


class FeatureGraph:
    """An open encoder: `input_ids` and what follows from them in, hidden states or embeddings of whole texts out."""

    def __init__(self, model: ResolvedModel) -> None:
        """Raises `ModelError` for inputs or outputs of other kinds, and `ProviderError`."""
        settings, files = model.settings, model.files
        self._session = open_session(files.decoder, model.providers, settings, custom_operators=model.custom_operators)
        self._rows = settings.batch_size if isinstance(settings.batch_size, int) else _MOST_ROWS
        self._inputs = {one.name: _TYPES.get(one.type) for one in self._session.get_inputs()}
        has_mask = "attention_mask" in self._inputs
        self._most_padding = _MOST_PADDING if has_mask else 0  # padding that nothing masks would change the texts
        self._has_buckets = has_mask and wants_few_shapes(settings.engine, model.providers)
        known = {"input_ids", "attention_mask", "token_type_ids", "position_ids"}
        if "input_ids" not in self._inputs or (strange := sorted(self._inputs.keys() - known)):
            told = listed(strange) if "input_ids" in self._inputs else "no 'input_ids'"
            raise ModelError(f"'{files.decoder}' is no encoder of texts: its inputs have {told}")
        outputs = {one.name: len(one.shape) for one in self._session.get_outputs()}
        self.pooled_output = next((name for name in _POOLED if outputs.get(name) == 2), None)
        """The output of embeddings of whole texts, where the graph has one."""

        states = [name for name, rank in outputs.items() if rank == 3 and name != "logits"]
        states = [name for name in _STATES if name in states] or states
        if len(states) > 1 and states[0] not in _STATES:
            raise ModelError(
                f"'{files.decoder}' returns {listed(states)}: which are last is not told, name one 'last_hidden_state'"
            )
        scores = [name for name, rank in outputs.items() if name == "logits" and rank == 2]
        if not (states or scores or self.pooled_output):
            raise ModelError(f"'{files.decoder}' returns {listed(outputs)}: give a graph with 'last_hidden_state'")
        self._states = states[0] if states else None
        self.scores_output = scores[0] if scores else None
        """The output of a cross-encoder's scores, where the graph has one."""

        self.padding_offset = _first_position(model.files.hf_config)
        length = model.files.hf_config.get("max_position_embeddings")
        self.max_length = length - self.padding_offset if isinstance(length, int) else 1 << 30
        self.counters = {"texts": 0, "runs": 0, "tokens": 0, "tokens_fed": 0}

    def pooled(self, texts: Sequence[Sequence[int]], pooling: str) -> Array:
        """[N, H]: the `pooling` of each text's hidden states; "graph" takes the graph's own embeddings."""
        output = self.pooled_output if pooling == "graph" else self._states
        if output is None:
            raise ModelError(f"the graph returns no hidden states, only '{self.pooled_output}'", "pooling", pooling)
        return self._each(texts, output, pooling)

    def scores(self, texts: Sequence[Sequence[int]], types: Sequence[Sequence[int]]) -> Array:
        """[N, labels]: a cross-encoder's logits of each pair, encoded together; `types` as the tokenizer gives them."""
        assert self.scores_output is not None
        return self._each(texts, self.scores_output, "graph", types)

    def _each(
        self, texts: Sequence[Sequence[int]], output: str, pooling: str, types: Sequence[Sequence[int]] | None = None
    ) -> Array:
        found: dict[int, Array] = {}
        for places in self._batches(texts):
            ids_BS, mask_BS = self._padded([texts[place] for place in places])
            type_BS = None if types is None else self._padded([types[place] for place in places])[0]
            values = self._run(output, ids_BS, mask_BS, type_BS)
            lengths_B = mask_BS.sum(1)
            for row, place in enumerate(places):
                found[place] = values[row] if values.ndim == 2 else _pool(values[row, : lengths_B[row]], pooling)
        return np.stack([found[place] for place in range(len(texts))]).astype(np.float32)

    def _batches(self, texts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Places of texts that share a run, the longest first."""
        batch: list[int] = []
        padding = 0
        for place in sorted(range(len(texts)), key=lambda place: -len(texts[place])):
            longest = len(texts[batch[0]]) if batch else 0
            padding += max(0, longest - len(texts[place]))
            is_full = len(batch) == self._rows or (len(batch) + 1) * longest > RUN_TOKENS
            if batch and (is_full or padding > self._most_padding):
                yield batch
                batch, padding = [], 0
            batch.append(place)
        if batch:
            yield batch

    def _padded(self, texts: Sequence[Sequence[int]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        width, rows = max(map(len, texts)), len(texts)
        if self._has_buckets:
            width, rows = min(max(16, 1 << (width - 1).bit_length()), self.max_length), 1 << (rows - 1).bit_length()
        ids_BS = np.zeros((rows, width), np.int64)
        mask_BS = np.zeros((rows, width), np.int64)
        mask_BS[len(texts) :, 0] = 1  # rows of padding attend to something
        for row, tokens in enumerate(texts):
            ids_BS[row, : len(tokens)] = tokens
            mask_BS[row, : len(tokens)] = 1
        return ids_BS, mask_BS

    def _run(
        self, output: str, ids: npt.NDArray[np.int64], mask: npt.NDArray[np.int64], types: npt.NDArray[np.int64] | None
    ) -> Array:
        positions = np.maximum(mask.cumsum(1) - 1, 0) + self.padding_offset
        made = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        made["token_type_ids"] = np.zeros_like(ids) if types is None else types
        feeds = {name: made[name].astype(kind or np.int64) for name, kind in self._inputs.items()}
        self.counters["texts"] += len(ids)
        self.counters["runs"] += 1
        self.counters["tokens"] += int(mask.sum())
        self.counters["tokens_fed"] += ids.size
        try:
            values = np.asarray(self._session.run([output], feeds)[0], np.float32)
        except Exception as error:  # ONNX Runtime's exceptions have no common base
            raise RunError(
                f"the encoder failed on {ids.shape[0]} texts of {ids.shape[1]}: {reason_of(error)}"
            ) from error
        return values

    def describe(self) -> dict[str, Any]:
        """Facts of the execution."""
        return {"runtime": "onnxruntime", "providers": self._session.get_providers(), "counters": dict(self.counters)}

    def close(self) -> None:
        """Releases the model."""
        del self._session


def _pool(states_SH: Array, pooling: str) -> Array:
    if pooling == "mean":
        return np.asarray(states_SH.mean(0), np.float32)
    return np.asarray(states_SH[-1 if pooling == "last" else 0], np.float32)


def _first_position(config: Any) -> int:
    """Positions of RoBERTa's kind begin behind the padding's."""
    is_robertas = any(name in str(config.get("model_type", "")) for name in ("roberta", "camembert", "mpnet"))
    return int(config.get("pad_token_id", 1)) + 1 if is_robertas else 0


OUTPUTS = ("hidden_states", "last_hidden_state")
"""Names of the hidden states behind a decoder's last norm: onnxruntime-genai's builder, optimum."""

_TEXTS_AT_ONCE = 4096
_POSITIONS_AT_ONCE = 1 << 16
"""Texts, and positions that are read, of one run of the engine: it keeps each position's hidden state until it ends."""


def put_in_place_of_logits(graph: Any, logits: str) -> None:
    """Changes a decoder (onnx.ModelProto) so that its output `logits` [B, S, ...] is its hidden states. Raises
    `ModelError` where it returns none."""
    outputs = {output.name: output for output in graph.graph.output}
    name = next((name for name in OUTPUTS if name in outputs), None)
    if name is None:
        raise ModelError(
            f"the decoder returns no hidden states, only {listed(outputs)}: build it with include_hidden_states"
        )
    if logits in outputs:
        graph.graph.output.remove(outputs[logits])
        remove_dead(graph.graph, logits)
    graph.graph.node.add(op_type="Identity", name="olive_ext/hidden_states", input=[name], output=[logits])
    next(output for output in graph.graph.output if output.name == name).name = logits


class HiddenStatesTap(Tap):
    """Notes for each target the hidden state that it is scored with."""

    @override
    def note(self, step: Step, output: StepOutput) -> Notes:
        rows_RH = to_host(output.logits_RV)
        notes_T = np.zeros(len(step.targets), [("hidden", np.float32, (rows_RH.shape[-1],))])
        if step.targets:
            notes_T["hidden"] = rows_RH[target_arrays(step)[0]]
        return notes_T


class DecoderStates:
    """An open decoder that returns hidden states; closed by `close`."""

    def __init__(self, model: ResolvedModel) -> None:
        """Raises `ModelError`, `ProviderError` or `ConfigError`."""
        section = model.files.genai_config.get("model", {}).get("decoder", {})
        logits = section.get("outputs", {}).get("logits", "logits")
        edited = replace(model, edit_graph=partial(put_in_place_of_logits, logits=logits), is_compared=True)
        self._engine = engine_on(open_runner(edited), edited, HiddenStatesTap())
        self.max_length = self._engine.context_length

    def pooled(self, texts: Sequence[Sequence[int]], pooling: str) -> Array:
        """[N, H], the `pooling` ("last", "mean" or "cls") of each text's tokens."""
        found: list[Array] = []
        begin = positions = 0
        for place, tokens in enumerate(texts):
            count = len(tokens) if pooling == "mean" else 1
            if place > begin and (positions + count > _POSITIONS_AT_ONCE or place - begin == _TEXTS_AT_ONCE):
                found.append(self._pooled(texts[begin:place], pooling))
                begin, positions = place, 0
            positions += count
        found.append(self._pooled(texts[begin:], pooling))
        return np.concatenate(found)

    def _pooled(self, texts: Sequence[Sequence[int]], pooling: str) -> Array:
        # A request for each position: what requests have in common is computed once. The token behind the last is never
        # fed; as a target it has to be one of H.
        ends = [_ends(len(tokens), pooling) for tokens in texts]
        requests = [Request((*tokens[:end], 0), 1) for tokens, stops in zip(texts, ends, strict=True) for end in stops]
        notes = [result.notes for result in self._engine.run(requests)]
        states = np.stack([one["hidden"][0] for one in notes if one is not None])
        starts = np.cumsum([0, *map(len, ends[:-1])])
        sums: Array = np.add.reduceat(states, starts, axis=0)
        return sums / np.array([len(stops) for stops in ends], np.float32)[:, None]

    def describe(self) -> dict[str, Any]:
        """Facts of the execution."""
        return self._engine.describe()

    def reset(self) -> None:
        """Drops what could be reused."""
        self._engine.reset()

    def close(self) -> None:
        """Releases the model."""
        self._engine.close()


def _ends(length: int, pooling: str) -> range:
    """How many tokens lie up to each position that is read, itself included."""
    return {"mean": range(1, length + 1), "cls": range(1, 2), "last": range(length, length + 1)}[pooling]

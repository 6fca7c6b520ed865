"""Texts to vectors on one ONNX model (tokens, hidden states, pooling, length), and pairs to scores by cross-encoders.
The sentence-transformers files give pooling, prompts and length. Knows no task.

Axes: N texts or pairs, H dimensions, B rows of a run, S positions, T positions read of a text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from olive_ext.config.embeddings import EmbeddingSettings
from olive_ext.engine.engine import open_engine
from olive_ext.engine.reference import Tap, target_arrays, to_host
from olive_ext.engine.requests import Ids, Notes, Request
from olive_ext.engine.step import Step, StepOutput
from olive_ext.errors import ConfigError, DamagedError, ModelError, RunError, listed
from olive_ext.graph.nodes import remove_dead
from olive_ext.model import ResolvedModel
from olive_ext.model.decisions import wants_few_shapes
from olive_ext.model.files.content import load_graph
from olive_ext.model.files.package_config import read_json
from olive_ext.model.providers.ort_session import open_session, reason_of
from olive_ext.model.types import ModelFiles
from olive_ext.session.tokenizer import load_tokenizer

_POOLINGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_lasttoken": "last"}
_NAMES = {"mean": "mean", "cls": "cls", "lasttoken": "last"}


@dataclass(frozen=True)
class SentenceFiles:
    """None where the files do not name it."""

    pooling: str | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    """The prompt of texts that are neither queries nor documents, where a task has none of its own."""

    max_length: int | None = None


def read_sentence_files(files: ModelFiles) -> SentenceFiles:
    """The files of the first of a model's folders that has modules.json. Raises `ModelError` for layers besides
    pooling and normalization, and for poolings of other kinds."""
    folders = files.directory, files.decoder.parent, Path(files.tokenizer)
    folder = next((folder for folder in folders if (folder / "modules.json").is_file()), None)
    if folder is None:
        return SentenceFiles()
    file, pooling = folder / "modules.json", None
    try:
        modules = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"'{file}' cannot be read: {error}", code="no_access") from error
    if not isinstance(modules, list) or not all(isinstance(module, Mapping) for module in modules):
        raise DamagedError(f"'{file}' is no list of modules")
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        of_module = folder / str(module.get("path", "")) / "config.json"
        if kind == "Pooling":
            pooling = _pooling(read_json(of_module), of_module)
        elif kind not in ("Transformer", "Normalize"):
            raise ModelError(f"'{file}' has a layer '{kind}', which is not run here")
    names = "config_sentence_transformers.json", "sentence_bert_config.json"
    config, bert = (read_json(folder / name) if (folder / name).is_file() else {} for name in names)
    prompts = {str(name): text for name, text in (config.get("prompts") or {}).items() if text}
    if bert.get("do_lower_case") is True:
        raise ModelError(f"'{folder / names[1]}' lowers texts ('do_lower_case' = true), which is not run here")
    default = config.get("default_prompt_name")
    if default is not None and default not in (config.get("prompts") or {}):
        raise ModelError(f"'{folder / names[0]}' has no prompt of its 'default_prompt_name' = {default!r}")
    length = bert.get("max_seq_length")
    return SentenceFiles(pooling, prompts, default, length if isinstance(length, int) else None)


def _pooling(config: Mapping[str, Any], file: Path) -> str:
    named = config.get("pooling_mode")
    modes = [named] if isinstance(named, str) else list(named or ())
    modes = [_NAMES.get(mode, mode) for mode in modes]
    modes += [_POOLINGS.get(key, key) for key, on in config.items() if key.startswith("pooling_mode_") and on is True]
    if len(modes) != 1 or modes[0] not in _NAMES.values():
        raise ModelError(
            f"'{file}' asks for the pooling {' and '.join(modes) or 'none'}: mean, cls or last token is run"
        )
    if config.get("include_prompt") is False and modes[0] == "mean":
        raise ModelError(f"'{file}' leaves prompts out of the mean ('include_prompt' = false), which is not run here")
    return modes[0]


Array = npt.NDArray[np.float32]

RUN_TOKENS = 2048
"""The most positions of one run, padding included."""

_MOST_PADDING = 256
"""The most positions of padding of one run; texts that would need more begin another one."""

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
        self._inputs = {tensor.name: _TYPES.get(tensor.type) for tensor in self._session.get_inputs()}
        has_mask = "attention_mask" in self._inputs
        self._most_padding = _MOST_PADDING if has_mask else 0  # padding that nothing masks would change the texts
        self._has_buckets = has_mask and wants_few_shapes(settings.engine, model.providers)
        known = {"input_ids", "attention_mask", "token_type_ids", "position_ids"}
        if "input_ids" not in self._inputs or (strange := sorted(self._inputs.keys() - known)):
            problem = listed(strange) if "input_ids" in self._inputs else "no 'input_ids'"
            raise ModelError(f"'{files.decoder}' is no encoder of texts: its inputs have {problem}")
        outputs = {tensor.name: len(tensor.shape) for tensor in self._session.get_outputs()}
        self.pooled_output = next((name for name in _POOLED if outputs.get(name) == 2), None)
        """The output of embeddings of whole texts, where the graph has one."""

        states = [name for name, rank in outputs.items() if rank == 3 and name != "logits"]
        states = [name for name in _STATES if name in states] or states
        if len(states) > 1 and states[0] not in _STATES:
            raise ModelError(
                f"'{files.decoder}' returns {listed(states)}: which are last is unclear, name one 'last_hidden_state'"
            )
        scores = [name for name, rank in outputs.items() if name == "logits" and rank == 2]
        if not (states or scores or self.pooled_output):
            raise ModelError(f"'{files.decoder}' returns {listed(outputs)}: give a graph with 'last_hidden_state'")
        self._states = states[0] if states else None
        self.scores_output = scores[0] if scores else None
        """The output of a cross-encoder's scores, where the graph has one."""

        config = model.files.hf_config
        is_robertas = any(name in str(config.get("model_type", "")) for name in ("roberta", "camembert", "mpnet"))
        self._first = int(config.get("pad_token_id", 1)) + 1 if is_robertas else 0  # after the padding's positions
        length = config.get("max_position_embeddings")
        self.max_length = length - self._first if isinstance(length, int) else 1 << 30
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
        vectors: dict[int, Array] = {}
        for places in self._batches(texts):
            ids_BS, mask_BS = self._padded([texts[place] for place in places])
            type_BS = None if types is None else self._padded([types[place] for place in places])[0]
            values = self._run(output, ids_BS, mask_BS, type_BS)
            lengths_B = mask_BS.sum(1)
            for row, place in enumerate(places):
                vectors[place] = values[row]
                if values.ndim == 3:
                    states_SH = values[row, : lengths_B[row]]
                    at = -1 if pooling == "last" else 0
                    vectors[place] = states_SH.mean(0) if pooling == "mean" else states_SH[at]
        return np.stack([vectors[place] for place in range(len(texts))]).astype(np.float32)

    def _batches(self, texts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """The places of texts that share a run, the longest first."""
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
        positions = np.maximum(mask.cumsum(1) - 1, 0) + self._first
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


OUTPUTS = ("hidden_states", "last_hidden_state")
"""Names of the hidden states after a decoder's last norm: onnxruntime-genai's builder, optimum."""

_TEXTS_AT_ONCE = 4096
_POSITIONS_AT_ONCE = 1 << 16
"""The texts, and the positions to read, of one run of the engine, which keeps each position's hidden state until it
ends."""


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
    """Notes, for each target, the hidden state that scores it."""

    @override
    def note(self, step: Step, output: StepOutput) -> Notes:
        rows_RH = to_host(output.logits_RV)
        notes_T = np.zeros(len(step.targets), [("hidden", np.float32, (rows_RH.shape[-1],))])
        if step.targets:
            notes_T["hidden"] = rows_RH[target_arrays(step)[0]]
        return notes_T


class DecoderStates:
    """An open decoder that returns hidden states; closed by `close`. On the engine, which computes a shared instruction
    once and shares steps between texts: the states take the place of the graph's logits, whose head is dropped, and a
    tap keeps the rows that are read."""

    pooled_output = scores_output = None

    def __init__(self, model: ResolvedModel) -> None:
        """Raises `ModelError`, `ProviderError` or `ConfigError`."""
        section = model.files.genai_config.get("model", {}).get("decoder", {})
        logits = section.get("outputs", {}).get("logits", "logits")
        edited = replace(model, edit_graph=partial(put_in_place_of_logits, logits=logits), is_compared=True)
        self._engine = open_engine(edited, HiddenStatesTap())
        self.max_length = self._engine.context_length

    def pooled(self, texts: Sequence[Sequence[int]], pooling: str) -> Array:
        """[N, H], the `pooling` ("last", "mean" or "cls") of each text's tokens."""
        vectors: list[Array] = []
        begin = positions = 0
        for place, tokens in enumerate(texts):
            count = len(tokens) if pooling == "mean" else 1
            if place > begin and (positions + count > _POSITIONS_AT_ONCE or place - begin == _TEXTS_AT_ONCE):
                vectors.append(self._pooled(texts[begin:place], pooling))
                begin, positions = place, 0
            positions += count
        vectors.append(self._pooled(texts[begin:], pooling))
        return np.concatenate(vectors)

    def _pooled(self, texts: Sequence[Sequence[int]], pooling: str) -> Array:
        # A request for each position: what requests have in common is computed once. The token after the last is never
        # fed; as a target it has to be one of H.
        read = {"mean": lambda n: range(1, n + 1), "cls": lambda n: range(1, 2), "last": lambda n: range(n, n + 1)}
        ends = [read[pooling](len(tokens)) for tokens in texts]
        asked = [(*tokens[:end], 0) for tokens, stops in zip(texts, ends, strict=True) for end in stops]
        requests = [Request(Ids(tokens), 1) for tokens in asked]
        notes = [result.notes for result in self._engine.run(requests)]
        states = np.stack([note["hidden"][0] for note in notes if note is not None])
        starts = np.cumsum([0, *map(len, ends[:-1])])
        sums: Array = np.add.reduceat(states, starts, axis=0)
        return sums / np.array([len(stops) for stops in ends], np.float32)[:, None]

    def describe(self) -> dict[str, Any]:
        """Facts of the execution."""
        return self._engine.describe()

    def close(self) -> None:
        """Releases the model."""
        self._engine.close()


_NO_LIMIT = 1_000_000
"""Tokenizers that know no length give a larger one than this."""

_TOKENIZED_AT_ONCE = 8192


def unit(vectors: Array) -> Array:
    """[N, H] of length 1, as in Olive's evaluator."""
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9), np.float32)


class TextEncoder:
    """An open model of embeddings; closed by `close`."""

    def __init__(self, model: ResolvedModel, settings: EmbeddingSettings | None = None) -> None:
        """Raises `ModelError` for what is no ONNX encoder, and `ProviderError` or `ConfigError` as opening does."""
        self.settings = settings or EmbeddingSettings()
        if model.kind != "onnx":
            raise ModelError(f"'{model.name}' is no ONNX model: embeddings are made by ONNX packages")
        files = model.files
        self._hf = load_tokenizer(files.tokenizer, trust_remote_code=model.settings.trust_remote_code).hf
        sentence_files = read_sentence_files(files)
        prompts = self.settings.prompts
        self.prompts = dict(sentence_files.prompts if prompts is None else prompts)
        self.default_prompt_name = sentence_files.default_prompt_name if prompts is None else None
        inputs = [one.name for one in load_graph(files.decoder).graph.input]
        self.states: DecoderStates | FeatureGraph
        self.states = DecoderStates(model) if any("past" in name for name in inputs) else FeatureGraph(model)
        own = "graph" if self.states.pooled_output else sentence_files.pooling
        usual = own or ("mean" if isinstance(self.states, FeatureGraph) else "last")
        self.pooling = usual if self.settings.pooling == "auto" else self.settings.pooling
        most = self._hf.model_max_length if self._hf.model_max_length < _NO_LIMIT else self.states.max_length
        wanted = model.settings.max_length or sentence_files.max_length or most
        self.max_length = min(wanted, self.states.max_length)
        """Tokens of a text; what is after them is cut off."""

    def encode(self, texts: Iterable[str], prompt: str = "") -> Array:
        """[N, H] embeddings of the texts, each after `prompt`; equal texts are computed once. Raises `RunError`."""
        listed = list(texts)
        distinct = list(dict.fromkeys(listed))
        if not distinct:
            raise ConfigError("no texts were given: give one at least")
        vectors = self.states.pooled(self.tokens([prompt + text for text in distinct]), self.pooling)
        if self.settings.normalize:
            vectors = unit(vectors)
        place = {text: number for number, text in enumerate(distinct)}
        return vectors[[place[text] for text in listed]]

    def score_pairs(self, queries: Sequence[str], documents: Sequence[str]) -> Array:
        """[N] a cross-encoder's score of each pair: its logit, or with two labels the second one's less the first's.
        Raises `ModelError` where the graph is none."""
        if not isinstance(self.states, FeatureGraph) or self.states.scores_output is None:
            raise ModelError("the model is no cross-encoder: its graph has no output 'logits' [texts, labels]")
        encoded = self._hf(list(queries), list(documents), truncation=True, max_length=self.max_length)
        ids = encoded["input_ids"]
        types = encoded.get("token_type_ids") or [[0] * len(one) for one in ids]
        scores = self.states.scores(ids, types)
        return np.asarray(scores[:, 0] if scores.shape[1] == 1 else scores[:, 1] - scores[:, 0], np.float32)

    def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, special tokens included, as transformers' tokenizer cuts them."""
        encoded: list[list[int]] = []
        for begin in range(0, len(texts), _TOKENIZED_AT_ONCE):
            part = list(texts[begin : begin + _TOKENIZED_AT_ONCE])
            encoded += self._hf(part, truncation=True, max_length=self.max_length)["input_ids"]
        if empty := [text for text, ids in zip(texts, encoded, strict=True) if not ids]:
            raise ConfigError(f"the text {empty[0]!r} has no tokens: it has no embedding")
        return encoded

    def describe(self) -> dict[str, Any]:
        """JSON-ready facts of the execution."""
        facts = {"pooling": self.pooling, "max_length": self.max_length, "prompts": self.prompts}
        return {**facts, **self.states.describe()}

    def close(self) -> None:
        """Releases the model."""
        self.states.close()

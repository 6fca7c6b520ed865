"""Texts to vectors on one ONNX model: tokens, hidden states, pooling, length. Knows no task.

Axes: N texts, H dimensions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from olive_ext.config.embeddings import EmbeddingSettings
from olive_ext.errors import ConfigError, ModelError
from olive_ext.model import ResolvedModel
from olive_ext.model.files.content import load_graph
from olive_ext.plugins.suites.mteb.encoders import DecoderStates, FeatureGraph
from olive_ext.plugins.suites.mteb.sentence_files import read_sentence_files
from olive_ext.session.tokenizer import load_tokenizer

Array = npt.NDArray[np.float32]

_NO_LIMIT = 1_000_000
"""Tokenizers that know no length say a larger one."""

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
        found = read_sentence_files((files.directory, files.decoder.parent, Path(files.tokenizer)))
        if found.answers is not None:
            raise ModelError(f'\'{model.name}\' is a reranker of two answers: give "reranker": "yes_no"')
        given = self.settings.prompts
        self.prompts = dict(found.prompts if given is None else given)
        self.default_prompt_name = found.default_prompt_name if given is None else None
        inputs = [one.name for one in load_graph(files.decoder).graph.input]
        self.states: DecoderStates | FeatureGraph
        self.states = DecoderStates(model) if any("past" in name for name in inputs) else FeatureGraph(model)
        self.pooling = self._pooling(found.pooling)
        own = self._hf.model_max_length if self._hf.model_max_length < _NO_LIMIT else self.states.max_length
        wanted = model.settings.max_length or found.max_length or own
        self.max_length = min(wanted, self.states.max_length)
        """Tokens of a text; what is behind them is cut off."""

        self._ranges: tuple[Array, Array] | None = None

    def _pooling(self, of_files: str | None) -> str:
        if self.settings.pooling != "auto":
            return self.settings.pooling
        if isinstance(self.states, FeatureGraph):
            return "graph" if self.states.pooled_output else of_files or "mean"
        return of_files or "last"

    def encode(self, texts: Iterable[str], prompt: str = "") -> Array:
        """[N, H] embeddings of the texts, each behind `prompt`; equal texts are computed once. Raises `RunError`."""
        given = list(texts)
        distinct = list(dict.fromkeys(given))
        if not distinct:
            raise ConfigError("no texts were given: give one at least")
        vectors = self.states.pooled(self.tokens([prompt + text for text in distinct]), self.pooling)
        size = self.settings.truncate_dim
        if size is not None and size > vectors.shape[1]:
            raise ConfigError(f"the model's embeddings have {vectors.shape[1]} dimensions", "truncate_dim", size)
        vectors = vectors[:, :size]
        if self.settings.normalize:
            vectors = unit(vectors)
        place = {text: number for number, text in enumerate(distinct)}
        return self._rounded(vectors)[[place[text] for text in given]]

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
        found: list[list[int]] = []
        for begin in range(0, len(texts), _TOKENIZED_AT_ONCE):
            part = list(texts[begin : begin + _TOKENIZED_AT_ONCE])
            found += self._hf(part, truncation=True, max_length=self.max_length)["input_ids"]
        if empty := [text for text, ids in zip(texts, found, strict=True) if not ids]:
            raise ConfigError(f"the text {empty[0]!r} has no tokens: it has no embedding")
        return found

    def _rounded(self, vectors: Array) -> Array:
        if self.settings.embedding_precision == "float32":
            return vectors
        if self.settings.embedding_precision == "binary":
            return np.where(vectors > 0, 1, -1).astype(np.float32)
        if self._ranges is None:
            low, high = vectors.min(0), vectors.max(0)
            self._ranges = low, np.maximum(high - low, 1e-9) / 255
        low, steps = self._ranges
        return np.asarray(np.clip(np.floor((vectors - low) / steps) - 128, -128, 127), np.float32)

    def describe(self) -> dict[str, Any]:
        """JSON-ready facts of the execution."""
        facts = {"pooling": self.pooling, "max_length": self.max_length, "prompts": self.prompts}
        return {**facts, **self.states.describe()}

    def gc(self) -> None:
        """Drops what could be reused (resident prefixes); the model stays open."""
        if isinstance(self.states, DecoderStates):
            self.states.reset()

    def close(self) -> None:
        """Releases the model."""
        self.states.close()

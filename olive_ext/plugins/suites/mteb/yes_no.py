"""Rerankers that answer "yes" or "no": a decoder's log-probabilities of both words after Qwen3-Reranker's template.

The engine computes what pairs have in common (the system's message, an instruction, a query) once.
Source of the template: https://huggingface.co/Qwen/Qwen3-Reranker-0.6B. Axes: N pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from olive_ext.config.embeddings import EmbeddingSettings
from olive_ext.errors import ConfigError, ModelError
from olive_ext.model import ResolvedModel
from olive_ext.plugins.suites.mteb.sentence_files import read_sentence_files
from olive_ext.session.opening import open_model

Array = npt.NDArray[np.float32]

_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_INSTRUCTION = "Given the user query, retrieval the relevant passages"
"""mteb's own for these models, word for word."""

_MOST_TOKENS = 8192
"""Tokens of a pair with its template, as in the model's card and in mteb, where `max_length` is not given."""


class YesNoReranker:
    """An open reranker; closed by `close`."""

    def __init__(self, model: ResolvedModel, settings: EmbeddingSettings) -> None:
        """Raises `ModelError` for a tokenizer without the tokens "yes" and "no", and errors as opening does."""
        files = model.files
        found = read_sentence_files((files.directory, files.decoder.parent, Path(files.tokenizer)))
        prompts = found.prompts if settings.prompts is None else settings.prompts
        self.instruction = prompts.get("query") or _INSTRUCTION
        """Of the pairs that come without one of their own."""

        self._session = open_model(model)
        self._hf = self._session.tokenizer.hf
        self.max_length = min(self._session.max_length, model.settings.max_length or _MOST_TOKENS)
        self._before, self._behind = (self._hf.encode(text, add_special_tokens=False) for text in (_BEFORE, _BEHIND))
        try:
            self._answers = found.answers or self._yes_no(files.tokenizer)
            if (room := self.max_length - len(self._before) - len(self._behind)) < 1:
                raise ConfigError(f"the template alone has {self.max_length - room}", "max_length", self.max_length)
        except (ModelError, ConfigError):
            self.close()
            raise
        self._room = room

    def _yes_no(self, where: Any) -> tuple[int, int]:
        known = self._hf.get_vocab()
        if "yes" not in known or "no" not in known:
            raise ModelError(f"'reranker' = 'yes_no': the tokenizer in '{where}' has no tokens 'yes' and 'no'")
        return known["yes"], known["no"]

    def score_pairs(
        self, queries: Sequence[str], documents: Sequence[str], instructions: Sequence[str] | None = None
    ) -> Array:
        """[N] probabilities of "yes" where the answer is "yes" or "no". Raises `RunError`."""
        own = instructions or [self.instruction] * len(queries)
        texts = [
            f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
            for instruction, query, document in zip(own, queries, documents, strict=True)
        ]
        pairs = self._hf(texts, truncation=True, max_length=self._room)["input_ids"]
        prompts = [(*self._before, *pair, *self._behind) for pair in pairs]
        asked = [(prompt, (answer,)) for prompt in prompts for answer in self._answers]
        yes_no_N2 = np.array([one.logprob for one in self._session.loglikelihood(asked)]).reshape(-1, 2)
        return np.asarray(1 / (1 + np.exp(yes_no_N2[:, 1] - yes_no_N2[:, 0])), np.float32)

    def describe(self) -> dict[str, Any]:
        """JSON-ready facts of the execution."""
        facts = {"reranker": "yes_no", "instruction": self.instruction}
        return {**self._session.describe_execution(), **facts, "max_length": self.max_length}

    def close(self) -> None:
        """Releases the model."""
        self._session.close()

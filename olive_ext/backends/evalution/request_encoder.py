"""Evalution's requests to token ids, by the rules of its own transformers engine. Knows no model and no session.

These rules are not lm-eval's: a continuation is encoded apart from its context, a prompt to generate from gets no
special tokens, and a rolling text is scored with the BOS that its tokenizer adds.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from evalution.engines import base

from olive_ext.errors import ConfigError, TaskError
from olive_ext.text.requests import RollingRequest, ScoringRequest
from olive_ext.text.tokenizer import Tokenizer


class RequestEncoder:
    """Encodes with a copy of `tokenizer`, one thread at a time: what suites do to that copy (padding, truncation) never
    reaches the tokenizer that a running generation looks for stops with."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = copy.deepcopy(tokenizer)
        self._lock = threading.Lock()
        self._template_defaults = _template_defaults(Path(tokenizer.where))
        self._prefix_id = _prefix_id(tokenizer)
        self._prefix_text = tokenizer.decode([self._prefix_id], skip_special_tokens=False)

    def prepare(self, requests: Sequence[base.GenerationRequest]) -> list[base.GenerationRequest]:
        """The requests with `rendered_prompt` and `input_ids`; those that have both come back as they are.

        Raises `ConfigError`, a ValueError, for a request with neither a prompt nor messages nor ids.
        """
        with self._lock:
            texts = [self._render(request) for request in requests]
            missing = [index for index, request in enumerate(requests) if request.input_ids is None]
            encoded = self._encode([texts[index] for index in missing])
        ids = dict(zip(missing, encoded, strict=True))
        return [
            replace(request, rendered_prompt=text, input_ids=ids.get(index, request.input_ids) or [self._prefix_id])
            for index, (request, text) in enumerate(zip(requests, texts, strict=True))
        ]

    def scoring(self, requests: Sequence[base.LoglikelihoodRequest]) -> list[ScoringRequest]:
        """Context and continuation as ids; an empty context becomes the prefix token (BOS, else EOS, else PAD)."""
        with self._lock:
            contexts = self._contexts({r.context for r in requests if r.context and r.context_input_ids is None})
            texts = list(dict.fromkeys(r.continuation for r in requests if r.continuation_input_ids is None))
            continuations = dict(zip(texts, self._encode(texts), strict=True))
        return [
            ScoringRequest(
                _given(request.context_input_ids, {"": [], **contexts}, request.context) or [self._prefix_id],
                _given(request.continuation_input_ids, continuations, request.continuation),
            )
            for request in requests
        ]

    def rolling(self, requests: Sequence[base.RollingLoglikelihoodRequest]) -> list[RollingRequest]:
        """Every token is scored, behind the prefix token: a BOS that the tokenizer adds is one of them."""
        with self._lock:
            texts = self._contexts({request.text for request in requests if request.input_ids is None})
        return [RollingRequest(_given(r.input_ids, texts, r.text), self._prefix_id) for r in requests]

    def _render(self, request: base.GenerationRequest) -> str:
        if request.rendered_prompt is not None:
            return str(request.rendered_prompt)
        if request.messages is not None:
            # Older releases have neither tools nor chat_template_kwargs.
            own = {"tokenize": False, "add_generation_prompt": request.add_generation_prompt}
            tools = {"tools": functions} if (functions := getattr(request, "tools", None)) else {}
            asked = getattr(request, "chat_template_kwargs", None) or {}
            options = {**self._template_defaults, **own, **asked, **tools}
            return str(self.tokenizer.hf.apply_chat_template(request.messages, **options))
        if request.prompt is not None:
            return str(request.prompt)
        if request.input_ids:
            return self.tokenizer.decode(request.input_ids, skip_special_tokens=False)
        raise ConfigError("a generation request needs a 'prompt', 'messages' or 'input_ids'")

    def _contexts(self, texts: Collection[str]) -> dict[str, list[int]]:
        """Ids by text, with the tokenizer's special tokens where the text does not begin with the prefix token."""
        begun = {text for text in texts if self._prefix_text and text.startswith(self._prefix_text)}
        ids = {text: self.tokenizer.encode(text, add_special_tokens=False) for text in begun}
        return {**ids, **self.tokenizer.encode_many({*texts} - begun)}

    def _encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text without special tokens."""
        return list(self.tokenizer.hf(texts, add_special_tokens=False, verbose=False)["input_ids"]) if texts else []


def _given(ids: Sequence[int] | None, encoded: dict[str, list[int]], text: str) -> list[int]:
    return encoded[text] if ids is None else list(ids)


def _prefix_id(tokenizer: Tokenizer) -> int:
    try:
        return tokenizer.prefix_token_id
    except TaskError:
        if tokenizer.pad_token_id is None:
            raise
        return tokenizer.pad_token_id


def _template_defaults(folder: Path) -> dict[str, Any]:
    """Variables of the chat template that the model's generation_config.json gives ("default_chat_template_kwargs")."""
    file = folder / "generation_config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return dict(config.get("default_chat_template_kwargs") or {})

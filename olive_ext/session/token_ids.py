"""Bounds of token ids: in a tokenizer's files, before the library makes arrays of so many; and how many tokens a model
has rows for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from olive_ext.errors import DamagedError, ModelError, special_kind
from olive_ext.model import ResolvedModel
from olive_ext.model.files.content import load_graph

LARGEST_ID = 2**22 - 1
"""Of a token in a tokenizer's files; the largest vocabulary that is published has a million."""

LARGEST_FILE = 2**28
"""Bytes of a file of a tokenizer; the largest that are published have 35 million."""

_FILES = (".json", ".jinja", ".model", ".txt")
_LARGE = re.compile(rb'[:,\[][ \t\r\n]*[0-9]{7,}|"(-[0-9]+|[0-9]{7,})"[ \t\r\n]*:[ \t\r\n]*\{')
"""What a number beyond the bound may be."""

_WHOLE = re.compile(r"-?[0-9]+")
_MOST_DIGITS = 20
"""More than the largest id has; Python reads no numbers of thousands."""


def refuse_large_ids(folder: Path) -> None:
    """Raises `ModelError` for a file of a tokenizer in `folder` that is a pipe or a device, or too large, or that gives
    a token an id that no embedding has."""
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        if file.suffix not in _FILES or file.is_dir():
            continue
        if kind := special_kind(file):
            raise ModelError(f"'{file}' is {kind}: a tokenizer consists of files", code="no_access")
        if file.is_file() and file.stat().st_size > LARGEST_FILE:
            raise ModelError(f"'{file}' has more than {LARGEST_FILE:,} bytes (LARGEST_FILE)", code="too_large")
    for name in ("tokenizer.json", "tokenizer_config.json", "added_tokens.json", "vocab.json"):
        file = folder / name
        if file.is_file() and _LARGE.search(content := file.read_bytes()):
            for entry, number in _ids(_parsed(content)):
                if isinstance(number, int) and not 0 <= number <= LARGEST_ID:
                    bounds = f"from 0 to {LARGEST_ID} (LARGEST_ID)"
                    raise DamagedError(f"'{file}': {entry} has the id {number}: give one {bounds}")


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):  # which the library refuses
        return {}


def _ids(content: Any) -> Iterator[tuple[str, Any]]:
    """The ids that a tokenizer's file gives, each with what it is given to."""
    if not isinstance(content, Mapping):
        return
    if all(isinstance(number, int) for number in content.values()):  # a vocabulary
        yield from ((f"the token {text!r}", number) for text, number in content.items())
    for token in _list(content.get("added_tokens")):
        if isinstance(token, Mapping):
            yield f"the added token {token.get('content')!r}", token.get("id")
    vocabulary = _mapping(content.get("model")).get("vocab")
    yield from ((f"the token {text!r}", number) for text, number in _mapping(vocabulary).items())
    for text, token in _mapping(_mapping(content.get("post_processor")).get("special_tokens")).items():
        yield from ((f"the special token {text!r}", number) for number in _list(_mapping(token).get("ids")))
    for number, token in _mapping(content.get("added_tokens_decoder")).items():
        whole = _WHOLE.fullmatch(number)
        yield f"the added token {_mapping(token).get('content')!r}", int(whole[0][:_MOST_DIGITS]) if whole else number


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


class Rows(NamedTuple):
    """How many tokens a model has a row for, where that is known."""

    embedding: int | None = None
    vocabulary: int | None = None
    """Of its logits."""

    @classmethod
    def of(cls, model: ResolvedModel) -> Rows:
        """As the graphs show it; of a model that another library runs, as its configuration says."""
        if not model.runtime.runs_graph:
            config = model.files.genai_config.get("model", {}) if model.kind == "onnx" else model.files.hf_config
            size = config.get("text_config", config).get("vocab_size")
            return cls(size, size)
        spec, companions = model.spec, model.files.companions
        rows = spec.embedding_rows
        if spec.embeddings and "embedding" in companions:
            from olive_ext.model.spec.attention import embedding_rows
            from olive_ext.model.spec.decoder_spec import read_embedding

            graph = load_graph(companions["embedding"].graph)
            tokens = read_embedding(graph, spec.embeddings).inputs[0]
            rows = embedding_rows(graph.graph, tokens.tensor.name)
        return cls(rows or spec.vocab_size, spec.vocab_size)


def refuse_named(ids: Iterable[int], rows: int | None, key: str) -> None:
    """Raises `ModelError` for an id under `key` of a configuration that is none of the model's `rows`."""
    last = LARGEST_ID if rows is None else rows - 1
    for number in ids:
        if not 0 <= number <= last:
            raise DamagedError(f"'{key}' names the token {number}: give one from 0 to {last}")

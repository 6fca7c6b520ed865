"""Traits of a tokenizer that decide its ids, and the refusal of a reference whose tokenizer has others. Knows no model.

The special tokens that begin or end a text are not compared, since both models get the ids of one tokenizer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from olive_ext.errors import ConfigError
from olive_ext.text.tokenizer import Tokenizer

Traits = Mapping[str, Any]

_PROBES = (
    "The quick brown fox jumps over the lazy dog.",
    "  leading, double  and trailing spaces  ",
    "tabs\tand\n\nlines\r\n",
    "don't we'll I'VE",
    "3.14159 1,234,567 0x7f 2024-06-30",
    "Ünïcödé naïve café e\u0301 ﬁ Å ½ Ⅷ",
    "漢字かな交じり文 한국어 русский العربية हिन्दी",
    "🙂👩‍👩‍👧 ∑∞≠ €",
    "def f(x):\n    return x**2  # comment\n",
    "https://example.com/a?b=c&d=%20 user@example.com",
    "<|endoftext|></s>[INST]<unk>",
)
"""Texts on which normalizers and pre-tokenizers show."""


def tokenizer_traits(tokenizer: Tokenizer) -> dict[str, Any]:
    """Everything that decides a tokenizer's ids, as JSON-ready digests by name."""
    vocabulary = sorted(tokenizer.hf.get_vocab().items())
    added = sorted((number, str(token)) for number, token in tokenizer.hf.added_tokens_decoder.items())
    return {
        "num_tokens": len(vocabulary),
        "vocabulary": _digest(vocabulary),
        "merges": _digest(_merges(tokenizer)),
        "added tokens": _digest(added),
        "encoding": _digest([tokenizer.encode(text, add_special_tokens=False) for text in _PROBES]),
    }


def refuse_other_tokenizer(reference: Traits, own: Traits, reference_name: str, own_name: str) -> None:
    """Raises `ConfigError` that names what differs between the traits of two tokenizers."""
    differing = [name for name in own if name != "num_tokens" and reference.get(name) != own[name]]
    if not differing:
        return
    sizes = ""
    if reference.get("num_tokens") != own["num_tokens"]:
        sizes = f" ({reference.get('num_tokens')} and {own['num_tokens']} tokens)"
    raise ConfigError(
        f"the tokenizer of the reference '{reference_name}' differs from that of '{own_name}' in its "
        f"{', '.join(differing)}{sizes}: their distributions are over different tokens and cannot be compared"
    )


def _merges(tokenizer: Tokenizer) -> Any:
    """The merges of byte pair encoding, in order; None where a tokenizer has none or does not expose them."""
    backend = getattr(tokenizer.hf, "backend_tokenizer", None)
    return json.loads(backend.to_str())["model"].get("merges") if backend is not None else None


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]

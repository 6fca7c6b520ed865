"""How much of a distribution a record keeps. Knows no files.

Axes: V vocabulary, N tokens of a record.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from olive_ext.errors import ConfigError

WHOLE_VOCABULARY = 2048
"""Up to this many tokens a record holds all of them, and what is computed from it is exact."""

TOP, DRAWN, LEAST = 64, 32, 16
"""Numbers of most probable and of drawn tokens in a large vocabulary, and the least of each, unless they are given."""

SHARE = 0.02
"""Part of a row's fp32 logits that a record may take, where `LEAST` allows it."""

_TOKEN_BYTES = 8
"""An id and a log-probability, four bytes each."""


@dataclass(frozen=True)
class Form:
    """Content of a record: all `vocab_size` logits where `top` is 0; else the `top` most probable tokens and `drawn`
    tokens drawn from the others, with their log-probabilities, and the probability of all others together.

    From the whole row KL is exact up to float32 (2e-6 nats). From a short record it is estimated without bias, with a
    standard error that is computed for every position; over many positions the errors average out.
    """

    vocab_size: int
    top: int
    drawn: int
    seed: int = 0

    @classmethod
    def choose(cls, vocab_size: int, top: int | None = None, drawn: int | None = None, seed: int = 0) -> Form:
        """The form for a vocabulary. By default 64 + 32 tokens, fewer where these would take more than 2 % of the
        logits (below 10,000 tokens), never fewer than 16 + 16. A vocabulary of at most 2048 tokens is
        kept whole, and so is one of which more than half would be kept."""
        for name, value, least in (("top", top, 1), ("drawn", drawn, 2)):
            if value is not None and value < least:
                raise ConfigError(f"'{name}' = {value}: a number of at least {least}")
        fitting = int((SHARE * 4 * vocab_size - 4) / _TOKEN_BYTES)
        top = top or min(TOP, max(LEAST, fitting * TOP // (TOP + DRAWN)))
        drawn = drawn or min(DRAWN, max(LEAST, fitting * DRAWN // (TOP + DRAWN)))
        if vocab_size <= WHOLE_VOCABULARY or top + drawn > vocab_size / 2:
            return cls(vocab_size, 0, 0, seed)
        return cls(vocab_size, top, drawn, seed)

    @property
    def is_whole(self) -> bool:
        return self.top == 0

    @property
    def num_tokens(self) -> int:
        return self.top + self.drawn

    @property
    def dtype(self) -> np.dtype[np.void]:
        """One record: `ids`[N], the most probable first, `logprobs`[N] in nats, and `tail`, the probability of all but
        the most probable; or `logits`[V], less their largest."""
        if self.is_whole:
            return np.dtype([("logits", "<f4", (self.vocab_size,))])
        size = (self.num_tokens,)
        return np.dtype([("ids", "<i4", size), ("logprobs", "<f4", size), ("tail", "<f4")])

    def describe(self) -> dict[str, object]:
        """JSON-ready facts with stable names."""
        return {
            "vocab_size": self.vocab_size,
            "top": self.top,
            "drawn": self.drawn,
            "is_exact": self.is_whole,
            "bytes_per_position": self.dtype.itemsize,
            "share_of_logits": round(self.dtype.itemsize / (4 * self.vocab_size), 5),
        }

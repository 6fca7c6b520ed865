"""The text of an answer while it grows: what no later token changes, and no stop takes away. Knows no engine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from olive_ext.text.generation_bounds import INCOMPLETE
from olive_ext.text.tokenizer import Tokenizer

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""A token that is one byte: the decoder takes a run of these for characters only where the whole run is valid."""


class TextStream:
    """Gives the pieces of one growing list of tokens; all of them are the beginning of `StopChecker.text`.

    tokens    ... [context][fresh][held]     decoded: context and fresh together, for what fresh alone would lose
                                  held: may begin a stop, or is a part of a character
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._begin = 0  # of the context
        self._read = 0  # tokens whose text was given

    def piece(self, tokens: Sequence[int]) -> str:
        """What is certain of the text of `tokens` and was not given before. To be called after each token."""
        count = self._num_free(tokens) if self._tokenizer.has_stable_text else 0
        text = self._fresh(tokens[:count], skips=True) if count > self._read else ""
        if count <= self._read or text.endswith(INCOMPLETE) or self._ends_in_bytes(tokens[:count]):
            return ""
        if text:  # a context without text would change what is decoded behind it
            self._begin = self._read
        self._read = count
        return text

    def _fresh(self, tokens: Sequence[int], *, skips: bool) -> str:
        decode = partial(self._tokenizer.decode, skip_special_tokens=skips)
        return decode(tokens[self._begin :])[len(decode(tokens[self._begin : self._read])) :]

    def _num_free(self, tokens: Sequence[int]) -> int:
        """The tokens in front of which no stop begins, nor may begin, with special tokens or without."""
        count = len(tokens)
        for skips in (True, False) if self._stops else ():
            text = self._fresh(tokens, skips=skips)
            free = min((at for at in range(len(text)) if self._may_stop(text[at:])), default=len(text))
            while count > self._read and len(self._fresh(tokens[:count], skips=skips)) > free:
                count -= 1
        return count

    def _may_stop(self, text: str) -> bool:
        return any(text.startswith(stop) or stop.startswith(text) for stop in self._stops)

    def _ends_in_bytes(self, tokens: Sequence[int]) -> bool:
        tokenizer = self._tokenizer
        last = next((token for token in reversed(tokens) if token not in tokenizer.special_ids), None)
        return last is not None and _BYTE.fullmatch(str(tokenizer.hf.convert_ids_to_tokens(last))) is not None

"""Classes of tokens by their text. Knows no tokenizer: a function gives the text of an id."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import numpy.typing as npt

CLASSES = ("word start", "inside of a word", "number", "punctuation", "white space", "special")
"""Names of the classes; a class is its index."""

WORD_START, INSIDE, NUMBER, PUNCTUATION, WHITE_SPACE, SPECIAL = range(len(CLASSES))
UNKNOWN = -1

IntArray = npt.NDArray[np.int64]


def token_class(text: str, is_special: bool = False) -> int:
    """The class of a token by itself: its text with the white space in front of it.

    A word's piece without white space in front counts as the inside of a word; `TokenClasses.of` knows the token
    before it. Letters win over digits ("3rd" is a word), digits over signs ("3.5" and "50%" are numbers). What is no
    text by itself (a part of a UTF-8 sequence) is the inside of a word.
    """
    if is_special:
        return SPECIAL
    inner = text.strip()
    if not inner:
        return WHITE_SPACE
    if any(letter.isalpha() or letter == "\ufffd" for letter in inner):
        return WORD_START if text[0].isspace() else INSIDE
    return NUMBER if any(letter.isnumeric() for letter in inner) else PUNCTUATION


class TokenClasses:
    """Classes of token ids. `text_of` gives an id's text with the white space in front; it is called once for each."""

    def __init__(self, text_of: Callable[[int], str], special_ids: Collection[int] = ()) -> None:
        self._text_of = text_of
        self._special_ids = frozenset(special_ids)
        self._classes = np.full(0, UNKNOWN, np.int8)
        self._joins = np.zeros(0, bool)

    def of(self, ids: npt.ArrayLike, previous: int | None = None) -> npt.NDArray[np.int8]:
        """Classes [T] of consecutive `ids` [T] behind the token `previous`.

        A piece of a word behind anything but a piece of a word begins a word: "(" + "the".
        """
        targets: IntArray = np.asarray(ids, np.int64)
        if not targets.size:
            return np.zeros(0, np.int8)
        before = np.concatenate([[targets[0] if previous is None else previous], targets[:-1]])
        self._learn(np.union1d(targets, before))
        classes = self._classes[targets]
        joins = self._joins[before]
        joins[0] &= previous is not None
        return np.where((classes == INSIDE) & ~joins, WORD_START, classes).astype(np.int8)

    def _learn(self, ids: IntArray) -> None:
        missing = int(ids[-1]) + 1 - len(self._classes)
        if missing > 0:
            self._classes = np.concatenate([self._classes, np.full(missing, UNKNOWN, np.int8)])
            self._joins = np.concatenate([self._joins, np.zeros(missing, bool)])
        for number in ids[self._classes[ids] == UNKNOWN].tolist():
            is_special = number in self._special_ids
            text = "" if is_special else self._text_of(number)
            self._classes[number] = token_class(text, is_special)
            self._joins[number] = bool(text) and (text[-1].isalnum() or text[-1] == "\ufffd")

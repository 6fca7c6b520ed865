"""The fields that compare two models at one target token, declared once: `ComparedFields`; and classes of tokens.

The engine's notes (`COMPARED`), a session's answer (`Compared`) and the stored positions (`POSITION`) derive from it.
The outputs of `graph.row_comparison` are fields by their names; the taps of `engine.reference` fill in the others.
Knows no model and no tokenizer: a function gives the text of a token. Axes: T targets of a request.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, TypeAlias, get_type_hints

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.float64]

Floats: TypeAlias = Annotated[npt.NDArray[np.float32], "<f4"]
Flags: TypeAlias = Annotated[npt.NDArray[np.bool_], "?"]


@dataclass(frozen=True, eq=False)
class ComparedFields:
    """A reference and a candidate at the same T targets after the same tokens; arrays [T], natural logarithms.

    Where the reference's whole distribution is at hand every field is exact up to float32. Where only a short record
    of it is (`olive_ext.records.Form`), `kl` is an estimate with a variance and a lower bound; the rest is exact.
    """

    kl: Floats
    """KL(reference || candidate) of the next token, in nats. An estimate has no bias, so it may be negative."""

    kl_variance: Floats
    """Sampling variance of `kl`, in nats squared; 0 where `kl` is exact."""

    kl_lower: Floats
    """Lower bound of the true KL whichever tokens were drawn, in nats; `kl` itself where that is exact."""

    kl_reverse: Floats
    """KL(candidate || reference) in nats. NaN of a short record: what the candidate alone finds likely is not in it."""

    tail_mass: Floats
    """Reference's probability of all tokens beyond its kept most probable ones; 0 where `kl` is exact."""

    reference_logprobs: Floats
    """Log-probability of the target under the reference."""

    reference_is_greedy: Flags
    """Whether the target is the reference's argmax."""

    same_top: Flags
    """Whether both models' argmax is the same token."""

    reference_top_logprobs: Floats
    """Log-probability of the reference's argmax under the reference."""

    top_logprobs: Floats
    """Log-probability of the reference's argmax under the candidate."""


@dataclass(frozen=True, eq=False)
class Compared(ComparedFields):
    """The compared fields of a request, with the T targets they belong to."""

    targets: npt.NDArray[np.int64]
    """Token ids that were scored."""

    positions: npt.NDArray[np.int64]
    """Number of tokens before each target that the models attended to."""

    def __len__(self) -> int:
        return len(self.kl)


_HINTS = get_type_hints(ComparedFields, include_extras=True)

COMPARED = np.dtype([(name, hint.__metadata__[0]) for name, hint in _HINTS.items()])
"""One target's `ComparedFields`, in their order."""

STORED = tuple(name for name in _HINTS if name not in ("tail_mass", "reference_is_greedy"))
"""The compared fields that statistics read."""

CLASSES = ("word start", "inside of a word", "number", "punctuation", "white space", "special")
"""Names of the classes; a class is its index."""

WORD_START, INSIDE, NUMBER, PUNCTUATION, WHITE_SPACE, SPECIAL = range(len(CLASSES))
UNKNOWN = -1

POSITION = np.dtype(
    [
        ("document", "<i4"),
        ("position", "<i4"),
        ("token_class", "i1"),
        ("logprobs", "<f4"),
        *((name, COMPARED[name]) for name in STORED),
    ]
)
"""One stored target, 42 bytes: `document`, its number within the task; `position`, the number of tokens before it;
`token_class`, an index into `CLASSES` or -1; `logprobs`, the candidate's, in nats; and the compared fields."""


class Positions:
    """Compared targets of one task, added request by request: one growing buffer, no object for each."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def __len__(self) -> int:
        return len(self._buffer) // POSITION.itemsize

    @property
    def rows(self) -> npt.NDArray[Any]:
        """A view [T] of all targets so far, of type `POSITION`; none can be added while the view is in use."""
        return np.frombuffer(self._buffer, POSITION)

    def add(
        self,
        document: int,
        logprobs: npt.ArrayLike,
        compared: Compared,
        *,
        first_position: int = 0,
        token_classes: npt.ArrayLike | None = None,
    ) -> None:
        """Adds the T consecutive targets of a request of `document`; `logprobs` [T] are the candidate's.

        `first_position` counts the tokens before the first target.
        """
        logprobs_T = np.asarray(logprobs, np.float32)
        rows = np.empty(len(logprobs_T), POSITION)
        rows["document"] = document
        rows["position"] = first_position + np.arange(len(rows))
        rows["token_class"] = UNKNOWN if token_classes is None else token_classes
        rows["logprobs"] = logprobs_T
        for name in STORED:
            rows[name] = getattr(compared, name)
        self._buffer += rows.tobytes()

    @classmethod
    def joined(cls, parts: Iterable[Positions]) -> Positions:
        """All positions of several tasks, their documents renumbered in the order of the tasks."""
        whole, first_document = cls(), 0
        for part in parts:
            rows = part.rows.copy()
            rows["document"] += first_document
            first_document = int(rows["document"].max(initial=first_document - 1)) + 1
            whole._buffer += rows.tobytes()
        return whole


def token_class(text: str) -> int:
    """The class of a token by itself: its text with the white space in front of it.

    A word's piece without white space in front counts as the inside of a word; `TokenClasses.of` knows the token
    before it. Letters win over digits ("3rd" is a word), digits over signs ("3.5" and "50%" are numbers). What is no
    text by itself (a part of a UTF-8 sequence) is the inside of a word.
    """
    inner = text.strip()
    if not inner:
        return WHITE_SPACE
    if any(letter.isalpha() or letter == "\ufffd" for letter in inner):
        return WORD_START if text[0].isspace() else INSIDE
    return NUMBER if any(letter.isnumeric() for letter in inner) else PUNCTUATION


class TokenClasses:
    """Classes of token ids. `text_of` gives an id's text with the white space in front; it is called once for each."""

    def __init__(self, text_of: Callable[[int], str], special_ids: Collection[int] = ()) -> None:
        special = frozenset(special_ids)

        @cache
        def learn(number: int) -> tuple[int, bool]:
            """The class of a token by itself, and whether a piece of a word after it goes on with a word."""
            if number in special:
                return SPECIAL, False
            text = text_of(number)
            return token_class(text), text[-1:].isalnum() or text[-1:] == "\ufffd"

        self._learn = learn

    def of(self, ids: npt.ArrayLike, previous: int | None = None) -> npt.NDArray[np.int8]:
        """Classes [T] of consecutive `ids` [T] after the token `previous`.

        A piece of a word after anything but a piece of a word begins a word: "(" + "the".
        """
        classes, goes_on = [], previous is not None and self._learn(previous)[1]
        for number in np.asarray(ids, np.int64).tolist():
            kind, joins = self._learn(number)
            classes.append(WORD_START if kind == INSIDE and not goes_on else kind)
            goes_on = joins
        return np.array(classes, np.int8)

"""Flipped documents as data inside a page: JSON in chunks that a browser reads when they are asked for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from olive_ext.report.comparison import Flip
from olive_ext.report.page import Contrast

CHUNK = 500
"""Flips in one piece of JSON."""

MAX_CHARACTERS = 4000
"""Of one text; what is longer is in the sample logs as a whole."""


@dataclass(frozen=True)
class FlipData:
    """`chunks` are JSON arrays that are safe inside a `<script>` element; a flip's fields come in the order that
    page.js.j2 reads."""

    total: int
    head: str
    """JSON: names of tasks and candidates, numbers of flips."""

    chunks: tuple[str, ...]


def flip_data(contrasts: Sequence[Contrast]) -> FlipData:
    """All flips, those of one comparison together."""
    found = [(place, flip) for place, contrast in enumerate(contrasts) for flip in contrast.comparison.flips]
    names = dict.fromkeys((flip.task, flip.metric, flip.filter) for _, flip in found)
    numbers = {name: number for number, name in enumerate(names)}
    rows = [_row(place, numbers[flip.task, flip.metric, flip.filter], flip) for place, flip in found]
    head = {
        "tasks": [_title(*name) for name in names],
        "pairs": [[contrast.reference, contrast.candidate] for contrast in contrasts],
        "total": len(rows),
        "losses": sum(flip.direction == "right_to_wrong" for _, flip in found),
        "chunk": CHUNK,
    }
    chunks = tuple(script_json(rows[begin : begin + CHUNK]) for begin in range(0, len(rows), CHUNK))
    return FlipData(len(rows), script_json(head), chunks)


def _row(pair: int, task: int, flip: Flip) -> list[Any]:
    texts = (flip.question, flip.target, flip.reference_answer, flip.candidate_answer)
    return [pair, task, flip.doc_id, int(flip.direction == "wrong_to_right"), *map(_cut, texts)]


def _title(task: str, metric: str, filter_name: str) -> str:
    return " · ".join(part for part in (task, metric, filter_name) if part not in ("", "none"))


def _cut(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[:MAX_CHARACTERS]}… [{len(text) - MAX_CHARACTERS} more characters]"


def script_json(value: Iterable[Any]) -> str:
    """JSON in which nothing can end the `<script>` element or begin a comment, whatever the texts say.

    Lone halves of surrogate pairs, which UTF-8 cannot hold, stay escaped.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text.encode("utf-8", "backslashreplace").decode("utf-8")

"""Each document's answer as report.json and a gate's baseline keep it: numbers packed to a few bytes, and no text."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from olive_ext.report import PackedAnswers
from olive_ext.run.reference.answers import NATS, UNITS, Answers, DocumentAnswer

_KEY_BYTES = 4
"""Bytes of a digest. With 32 bits, one of 4,000 changed documents passes for an earlier one in a millionth of cases."""

_MOST_BYTES = 1 << 26
"""The most bytes of packed numbers, 8 million documents: a larger file is not ours."""


def packed(answers: Iterable[Answers]) -> tuple[PackedAnswers, ...]:
    """The answers of tasks by which two models can be compared."""
    return tuple(_packed(keyed(item)) for item in answers if any(one.values for one in item.by_document.values()))


def unpacked(kept: Sequence[PackedAnswers]) -> list[Answers]:
    """The answers, under short digests. Raises `ValueError` where packed numbers are not `num_documents`, and where a
    task's filter occurs twice."""
    names = [(item.task, item.filter) for item in kept]
    if twice := [item for item in names if names.count(item) > 1]:
        raise ValueError(f"documents: '{twice[0][0]}' by filter '{twice[0][1]}' is there twice")
    return [_unpacked(item) for item in kept]


def keyed(answers: Answers) -> Answers:
    """The answers under short digests."""
    short = {}
    for number, item in answers.by_document.items():
        digests = (hashlib.sha256(item.digest.split(" ", 1)[part].encode()).hexdigest() for part in (0, -1))
        short[number] = replace(item, digest=" ".join(digest[: 2 * _KEY_BYTES] for digest in digests))
    return replace(answers, by_document=short)


def _packed(answers: Answers) -> PackedAnswers:
    documents = answers.by_document
    margins = [item.margin for item in documents.values()]
    known = sorted({name for item in documents.values() for name in item.values})
    values = {
        metric: _text(np.array([item.values.get(metric, np.nan) for item in documents.values()], "<f8"))
        for metric in dict.fromkeys([*answers.metrics, *_beside(answers.text_metric), *known])
    }
    with np.errstate(over="ignore"):
        narrow = None if None in margins else _text(np.array(margins, "<f8").astype("<f2"))
    return PackedAnswers(
        task=answers.task,
        filter=answers.filter,
        higher_is_better=answers.metrics,
        num_documents=len(documents),
        numbers=_text(np.array(list(documents), "<u4")),
        keys=_text(np.frombuffer(bytes.fromhex("".join(item.digest for item in documents.values())), "u1")),
        values=values,
        text_metric=answers.text_metric,
        margins=narrow,
    )


def _unpacked(kept: PackedAnswers) -> Answers:
    name, count = f"documents of '{kept.task}'", kept.num_documents
    if not {*kept.higher_is_better, *_beside(kept.text_metric)} <= {*kept.values}:
        raise ValueError(f"{name}: 'values' lacks metrics of 'higher_is_better'")
    numbers = _array(kept.numbers, "<u4", count, f"{name}: 'numbers'").tolist()
    keys = _array(kept.keys, "u1", 2 * count * _KEY_BYTES, f"{name}: 'keys'").reshape(-1, 2, _KEY_BYTES)
    values = {
        metric: _array(text, "<f8", count, f"{name}: 'values.{metric}'").tolist()
        for metric, text in kept.values.items()
    }
    margins: list[Any] = [None] * count
    if kept.margins is not None:
        margins = _array(kept.margins, "<f2", count, f"{name}: 'margins'").tolist()
    answers = {
        number: DocumentAnswer(
            digest=" ".join(key.tobytes().hex() for key in keys[place]),
            values={metric: column[place] for metric, column in values.items() if column[place] == column[place]},
            text="",
            margin=margins[place],
        )
        for place, number in enumerate(numbers)
    }
    if len(answers) != count:
        raise ValueError(f"{name}: 'numbers' has a document twice")
    return Answers(kept.task, kept.filter, kept.higher_is_better, answers, kept.text_metric)


def _beside(text_metric: str) -> tuple[str, ...]:
    """What a document's values hold beside those of its metrics."""
    return (NATS, UNITS) if text_metric else ()


def _text(array: npt.NDArray[Any]) -> str:
    return base64.b64encode(zlib.compress(array.tobytes(), 9)).decode()


def _array(text: str, dtype: str, count: int, what: str) -> npt.NDArray[Any]:
    try:
        unfolded = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), _MOST_BYTES)
    except (ValueError, zlib.error) as error:
        raise ValueError(f"{what} cannot be unpacked ({error})") from error
    if len(unfolded) != count * np.dtype(dtype).itemsize:
        raise ValueError(f"{what} is not of {count} documents")
    return np.frombuffer(unfolded, dtype)

"""The answers of a reference from its records, through a session without a model. Knows no file but by its names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from olive_ext.engine.reference.tap import key_of, known_result
from olive_ext.engine.requests import Counters, KeyedRequest, KeyedResult, Request, Result
from olive_ext.errors import RecordsError
from olive_ext.records import Records
from olive_ext.records.journal import Journal
from olive_ext.session.executor import ChunkResults
from olive_ext.session.session import Session


class RecordedAnswers:
    """An executor that knows what is in `records`, and computes nothing: `RecordsError` for all else."""

    num_slots, at_work = 1, ""

    def __init__(self, records: Records, context_length: int) -> None:
        self._records = records
        self.context_length = context_length
        self.counters = Counters()

    def run_slices(self, slices: Iterable[Sequence[KeyedRequest]]) -> Iterator[KeyedResult]:
        """Answers each request as it is read."""
        return self.run_continuous(item for items in slices for item in items)

    def run_chunks(self, chunks: Iterable[Sequence[Request]]) -> Iterator[ChunkResults]:
        """Answers each chunk as it is read."""
        yield from ((number, list(map(self._answer, chunk))) for number, chunk in enumerate(chunks))

    def run_continuous(self, items: Iterable[KeyedRequest | None]) -> Iterator[KeyedResult]:
        """Answers each item as it is read."""
        yield from ((item[0], self._answer(item[1])) for item in items if item is not None)

    def reset(self) -> None:
        """Nothing is resident."""

    release_memory = close = reset

    def describe(self) -> dict[str, Any]:
        """The records' facts."""
        return {"records": self._records.describe()}

    def _answer(self, request: Request) -> Result:
        result = known_result(self._records, key_of(request)) if request.generation is None else None
        if result is None:
            what = "scores" if request.generation is None else "generated answer"
            raise RecordsError(
                f"the records in '{self._records.folder}' hold no {what} of a request: record the reference on the "
                "same tasks, with the same limit, template, gen_kwargs, seed and max_length"
            )
        return result


def replayed(
    own: Session, records: Records, context_length: int, answers: Mapping[str, Any], stop_ids: Iterable[int]
) -> Session:
    """A session that answers as the recorded model did, beside the session `own` of a model with the same tokenizer.
    `answers`: by the name of a journal in the records' folder, its facts; `stop_ids`: where that model ended them."""
    session = Session(
        RecordedAnswers(records, context_length),
        own.tokenizer,
        stop_ids=stop_ids,
        encoding=own.encoding,
        media=own.media,
        beside=own,
    )
    for name, facts in answers.items():
        session.journal = Journal(Path(records.folder, name), facts)
    return session

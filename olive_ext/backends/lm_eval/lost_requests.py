"""Requests of lm-eval that have no answer, and lm-eval's metrics without their documents. Knows no session."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from olive_ext.errors import LostRequestsError, OliveExtError

_WRAPPED = ("doc_iterator", "process_results")
"""Of lm-eval's tasks."""


@dataclass(frozen=True)
class LostRequest:
    """A request without an answer, because every worker that ran it was lost, and how."""

    task: str
    doc_id: int
    reason: str


class LostRequests(list[LostRequest]):
    """Those of one model."""

    is_read = False
    """Whether who evaluates leaves their documents out. lm-eval itself would take for an answer what stands there."""


@contextmanager
def noting(lost: LostRequests, owners: Callable[[int], Iterable[Any]]) -> Iterator[None]:
    """Adds to `lost` what a call of a session could not answer; `owners` gives lm-eval's requests that the session's
    request at a place stands for. Where it has none, or nobody reads them, the error of the session passes. One about
    a request that is wrong names the document."""
    try:
        yield
    except LostRequestsError as error:
        if not lost.is_read:
            raise
        for place, reason in error.lost.items():
            found = [LostRequest(str(own.task_name), int(own.doc_id), reason) for own in owners(place)]
            if not found:
                raise
            lost += found
    except OliveExtError as error:
        whose = [] if error.request is None else list(owners(error.request))
        if not whose:
            raise
        raise type(error)(f"task '{whose[0].task_name}', document {whose[0].doc_id}: {error.__cause__}") from error


@contextmanager
def answered_documents(tasks: Mapping[str, Any], lost: Sequence[LostRequest]) -> Iterator[None]:
    """Leaves documents of which a request is in `lost`, which may grow meanwhile, out of all metrics of lm-eval's
    `tasks` by name: lm-eval adds up what a task makes of a document's answers, and of these it makes nothing. It reads
    the answers document by document from the task's `doc_iterator`, which is where the document's number is known:
    documents themselves may be alike, or hold arrays, which have no `==`."""
    if isinstance(lost, LostRequests):
        lost.is_read = True
    own = {name: {key: vars(task)[key] for key in _WRAPPED if key in vars(task)} for name, task in tasks.items()}
    for name, task in tasks.items():
        _leave_out(name, task, lost)
    try:
        yield
    finally:
        for name, task in tasks.items():
            for key in _WRAPPED:
                delattr(task, key)
            vars(task).update(own[name])


def _leave_out(name: str, task: Any, lost: Sequence[LostRequest]) -> None:
    documents, process = task.doc_iterator, task.process_results
    at: int | None = None

    def numbered(*args: Any, **options: Any) -> Iterator[tuple[int, Any]]:
        nonlocal at
        for number, document in documents(*args, **options):
            at = int(number)
            yield number, document

    def process_answered(document: Any, results: Any) -> Any:
        is_lost = any((item.task, item.doc_id) == (name, at) for item in lost)
        return {} if is_lost else process(document, results)

    task.doc_iterator, task.process_results = numbered, process_answered

"""Requests of lm-eval that have no answer, and lm-eval's metrics without their documents. Knows no session."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from olive_ext.errors import LostRequestsError, OliveExtError


@dataclass(frozen=True)
class LostRequest:
    """A request without an answer, because every worker that ran it was lost, and how."""

    task: str
    doc_id: int
    reason: str
    doc: Any
    """lm-eval's document, which counts in no metric."""


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
            found = [LostRequest(str(own.task_name), int(own.doc_id), reason, own.doc) for own in owners(place)]
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
    `tasks` by name: lm-eval adds up what a task makes of a document's answers, and of these it makes nothing."""
    if isinstance(lost, LostRequests):
        lost.is_read = True
    originals = {name: task.process_results for name, task in tasks.items()}
    own = {name for name, task in tasks.items() if "process_results" in vars(task)}

    def process(name: str, doc: Any, results: Any) -> Any:
        is_lost = any(item.task == name and item.doc == doc for item in lost)
        return {} if is_lost else originals[name](doc, results)

    for name, task in tasks.items():
        task.process_results = partial(process, name)
    try:
        yield
    finally:
        for name, task in tasks.items():
            del task.process_results
            if name in own:
                task.process_results = originals[name]

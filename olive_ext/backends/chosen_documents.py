"""lm-eval over some documents of its tasks, with the prompts that they have in a run over all; and over answers that
are known, for its own aggregation. Knows no kind of model and no reason for the choice."""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any

from lm_eval.api.model import LM

from olive_ext.backends.task_loading import LoadedTasks

Documents = Mapping[str, Collection[int]]
"""Numbers of documents by task."""


class ChosenDocuments:
    """`of(documents)` gives the tasks with these documents alone, in ascending order, under their own numbers.

    lm-eval draws the examples of its prompts from one generator, document after document, so that a run over some
    would have other prompts than the run over all. Requests of all documents are therefore built once, at the first
    use of a task; they hold for one model's chat template.
    """

    def __init__(self, tasks: LoadedTasks) -> None:
        self._tasks = tasks
        self._requests: dict[str, dict[int, list[Any]]] = {}
        self._documents: dict[str, Any] = {}

    def of(self, documents: Documents) -> LoadedTasks:
        """The tasks that have some of `documents`; those of the others are left out."""
        chosen = {name: sorted(numbers) for name, numbers in documents.items() if numbers}
        return self._tasks.replaced({name: self._limited(name, numbers) for name, numbers in chosen.items()})

    def _limited(self, name: str, numbers: Sequence[int]) -> Any:
        task = copy.copy(self._tasks.tasks[name])
        if name not in self._documents:
            self._documents[name] = task.eval_docs  # processed anew at every access
        documents = self._documents[name]

        def build(**options: Any) -> None:
            if name not in self._requests:
                self._requests[name] = _all_requests(task, options)
            requests = (request for number in numbers for request in self._requests[name][number])
            task._instances = [_unanswered(request) for request in requests]

        task.build_all_requests = build
        task.doc_iterator = lambda **_: ((number, documents[number]) for number in numbers)
        return task


class AnsweredRequests(LM):  # type: ignore[misc]
    """Stands in for `lm`: answers the requests that lm-eval's `samples` hold as they were answered there."""

    tokenizer_name = property(attrgetter("_lm.tokenizer_name"))  # lm-eval's own class refuses chat templates
    apply_chat_template = property(attrgetter("_lm.apply_chat_template"))
    chat_template = property(attrgetter("_lm.chat_template"))

    def __init__(self, lm: Any, samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        super().__init__()
        self._lm = lm
        self._answers: defaultdict[tuple[str, int, str], deque[Any]] = defaultdict(deque)
        for task, lines in samples.items():
            for line in lines:
                for arguments, answers in zip(line["arguments"], line["resps"], strict=True):
                    self._answers[task, int(line["doc_id"]), repr(arguments)].extend(answers)

    def __getattr__(self, name: str) -> Any:
        """What lm-eval reports of a model besides its answers."""
        return getattr(self._lm, name)

    def loglikelihood(self, requests: list[Any], **_: Any) -> list[Any]:
        """The answers of the samples, whatever the requests are for."""
        return [self._answers[item.task_name, item.doc_id, repr(item.args)].popleft() for item in requests]

    loglikelihood_rolling = loglikelihood
    generate_until = loglikelihood


def _all_requests(task: Any, options: Mapping[str, Any]) -> dict[int, list[Any]]:
    """Requests of all documents by number, built by the task's own code."""
    everything = copy.copy(task)
    for name in ("build_all_requests", "doc_iterator"):
        vars(everything).pop(name, None)
    everything.build_all_requests(**{**options, "limit": None, "samples": None})
    by_document = defaultdict(list)
    for request in everything.instances:
        by_document[int(request.doc_id)].append(request)
    return by_document


def _unanswered(request: Any) -> Any:
    fresh = copy.copy(request)
    fresh.resps, fresh.filtered_resps = [], {}
    return fresh

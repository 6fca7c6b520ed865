"""lm-eval's tasks as they are evaluated, each of a class of its own: what goes wrong with a document is raised with its
number; a document with a lost request counts in no metric; chosen documents have the prompts of a run over all; and
pictures and sounds of examples ("shots"), of which lm-eval keeps the texts and a marker for each, reach the model.

Knows no model.
"""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from lm_eval.api.task import ConfigurableTask

from olive_ext.backends.lm_eval_patches import replaced
from olive_ext.backends.samples import means_of
from olive_ext.backends.task_checks import listed_choices
from olive_ext.errors import TaskError, counted, named_failures
from olive_ext.media.pictures import media_digest
from olive_ext.report.metrics import as_number
from olive_ext.session.tokenizer import refuse_odd

logger = logging.getLogger(__name__)

_FIELDS = {"visual": "doc_to_image", "audio": "doc_to_audio"}
"""The pictures and sounds of a request, and the task's function for them."""


class _Document(dict[str, Any]):
    """A document that is compared by what its pictures and sounds hold: arrays have no `==`, and that of a picture that
    cannot be read raises."""

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        try:
            return dict.__eq__(self, other)
        except Exception:  # noqa: BLE001 - of whatever a data set holds
            return media_digest([dict(self)]) == media_digest([other])

    def __ne__(self, other: object) -> bool:
        return not self == other


@dataclass(frozen=True)
class Chosen:
    """The documents that are evaluated alone, in ascending order, under their own numbers."""

    numbers: Sequence[int]
    documents: Any
    """All documents of the task, which are processed anew at every access."""

    requests: dict[int, list[Any]]
    """The requests of all documents, by number, which hold for one model's chat template: filled at the first use."""


def evaluated(name: str, kind: Any) -> Any:
    """The class of tasks `kind` as the task `name` is evaluated."""
    made = _scored(name, kind)
    made = _prompted(name, made) if issubclass(kind, ConfigurableTask) else made
    made.__name__ = kind.__name__
    return made


def _scored(name: str, kind: Any) -> Any:
    class Scored(kind):  # type: ignore[misc]
        lost: Sequence[Any] = ()
        """The `LostRequest`s of the model that is asked; more may be added meanwhile."""

        chosen: Chosen | None = None
        _at: int | None = None
        """The document whose answers lm-eval reads; two documents may be alike."""

        _unasked: deque[int] | None = None
        """The documents whose prompts are to be made."""

        _num_prompts = _num_own = 0
        """The number of prompts with examples so far, and of those with the document itself, with its answer, as one.
        """

        def doc_iterator(self, *args: Any, **options: Any) -> Iterator[tuple[int, Any]]:
            if self.chosen is None:
                documents = super().doc_iterator(*args, **options)
            else:
                documents = ((number, self.chosen.documents[number]) for number in self.chosen.numbers)
            self._unasked, self._num_prompts, self._num_own = deque(), 0, 0
            for number, document in documents:
                self._at = int(number)
                self._unasked.append(self._at)
                yield number, document
            self._at = None  # requests are built after it

        def build_all_requests(self, **options: Any) -> None:
            """lm-eval draws the examples of its prompts from one generator, document after document, so that a run over
            chosen documents would have other prompts than the run over all: the requests of all are built."""
            if self.chosen is None:
                with named_failures(f"task '{name}'"):
                    super().build_all_requests(**options)
                if self._num_own:  # lm-eval leaves it out only where 'fewshot_split' names its split
                    own = f"{self._num_own} of {self._num_prompts} prompts have the document itself among the examples"
                    split = self.config.test_split or self.config.validation_split
                    logger.warning(
                        "task '%s': %s: 'fewshot_split: %s' in the task's file leaves it out", name, own, split
                    )
                return
            if not self.chosen.requests:
                whole = copy.copy(self)
                whole.chosen = None
                whole.build_all_requests(**{**options, "limit": None, "samples": None})
                for request in whole.instances:
                    self.chosen.requests.setdefault(int(request.doc_id), []).append(request)
            built = (self.chosen.requests.get(number, ()) for number in self.chosen.numbers)
            self._instances = [_unanswered(request) for requests in built for request in requests]

        def process_results(self, doc: Any, results: Any) -> Any:
            document = f"task '{name}', document {self._at}"
            is_lost = any((item.task, item.doc_id) == (name, self._at) for item in self.lost)
            with named_failures(document):
                values = {} if is_lost else super().process_results(doc, results)
            if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
                problem = f"'process_results' gives {str(values)[:80]}: names of metrics with values are expected"
                raise TaskError(f"{document}: {problem}")
            means = means_of(self.aggregation())
            return {key: as_number(value) if key in means else value for key, value in values.items()}

        def doc_to_target(self, *args: Any, **options: Any) -> Any:
            with nullcontext() if self._at is None else named_failures(f"task '{name}', document {self._at}"):
                return super().doc_to_target(*args, **options)

    return Scored


def _prompted(name: str, kind: Any) -> Any:
    class Prompted(kind):  # type: ignore[misc]
        _shots: Sequence[Any] = ()
        """The examples of the prompt that was made last."""

        def fewshot_context(self, doc: Any, *args: Any, **options: Any) -> Any:
            number, self._shots = self._unasked.popleft() if self._unasked else "?", ()
            sampler: Any = getattr(self, "sampler", None)

            def sample(*given: Any, **more: Any) -> Any:
                if isinstance(document := more.get("eval_doc"), dict):
                    more["eval_doc"] = _Document(document)
                self._shots = list(type(sampler).sample(sampler, *given, **more))
                document = _Document(doc) if isinstance(doc, dict) else doc
                self._num_prompts += 1
                self._num_own += any(document == shot for shot in self._shots)
                return self._shots

            sampled = nullcontext() if sampler is None else replaced(sampler, "sample", sample)
            with sampled, named_failures(f"task '{name}', document {number}"):
                return super().fewshot_context(doc, *args, **options)

        def construct_requests(self, doc: Any, ctx: Any, **options: Any) -> Any:
            document = f"task '{name}', document {(options.get('metadata') or ('?', '?'))[1]}"
            with named_failures(document):
                if problem := _problem(self, doc):
                    raise TaskError(f"{document}: {problem}")
                made = super().construct_requests(doc, ctx, **options)
                for request in as_list(made):
                    for text in filter(lambda item: isinstance(item, str), request.args):
                        refuse_odd(text)
                    if self._shots:
                        request.arguments = tuple(_with_shots(self, part, self._shots) for part in request.arguments)
            return made

        doc_to_choice = listed_choices(kind.doc_to_choice)

    return Prompted


def _unanswered(request: Any) -> Any:
    fresh = copy.copy(request)
    fresh.resps, fresh.filtered_resps = [], {}
    return fresh


def _with_shots(task: Any, part: Any, shots: Sequence[Any]) -> Any:
    """A request's arguments besides text, with those of the examples before it, in the order of the prompt."""
    if not isinstance(part, Mapping):
        return part
    functions = {name: getattr(task, function) for name, function in _FIELDS.items() if name in part}
    media = {name: [*map(of, shots), part[name]] for name, of in functions.items()}
    return {**part, **{name: [item for each in media[name] for item in as_list(each)] for name in media}}


def as_list(value: Any) -> list[Any]:
    """The items that a task's function gives: none, one or several."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _problem(task: Any, doc: Any) -> str | None:
    config = task.config
    choices = None
    if config.output_type == "multiple_choice" and config.doc_to_choice is not None:
        choices = task.doc_to_choice(doc)
    if choices is not None and not choices:
        return "it has no choices"
    if config.doc_to_target is None or callable(config.process_results):
        return None
    target = task.doc_to_target(doc)
    if target is None or (choices is not None and target in ("", "None")):
        return f"its target is {target!r}"
    items = target if isinstance(target, list) else [target]
    if choices is not None and not task.multiple_input and not all(_is_choice(item, choices) for item in items):
        return f"its target is {target!r}, which is none of its {counted(len(choices), 'choice')}"
    return None


def _is_choice(target: Any, choices: Sequence[Any]) -> bool:
    """Whether a target, the number of a choice or its text, is one of them; other kinds are left to lm-eval."""
    if isinstance(target, int):
        return 0 <= target < len(choices)
    return not isinstance(target, str) or target in choices

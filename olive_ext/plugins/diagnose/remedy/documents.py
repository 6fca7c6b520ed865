"""The documents of tasks as the requests for each of them, collected while lm-eval runs a model on them.

Prompts, templates, windows and examples are those of an evaluation. Generated answers of the model that is asked become
targets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeAlias

from olive_ext.config import EvaluationConfig
from olive_ext.engine.requests import Ids
from olive_ext.errors import TaskError
from olive_ext.media.pictures import media_digest
from olive_ext.run.reference.observer import Observer, Scoring, score_generated
from olive_ext.session import Session
from olive_ext.session.requests import RollingOutput, RollingRequest, ScoringOutput, ScoringRequest

if TYPE_CHECKING:
    from olive_ext.backends.task_loading import LoadedTasks

Document: TypeAlias = Sequence[Scoring]
"""The requests of one document: what is scored of it."""


def document_key(document: Document) -> bytes:
    """Digest of all that is asked of a document, pictures, sounds and features by their content."""
    parts = [[type(one).__name__, *(getattr(one, part.name) for part in fields(one))] for one in document]
    asked = [[(*value,) if isinstance(value, Ids) else value for value in request] for request in parts]
    if all(_is_text(value) for request in asked for value in request):
        return hashlib.blake2b(repr(document).encode(), digest_size=8).digest()
    return media_digest(asked).encode()


def _is_text(value: object) -> bool:
    """Whether `repr` distinguishes it from all others."""
    is_ids = isinstance(value, tuple) and all(isinstance(one, int) for one in value)
    return is_ids or value is None or isinstance(value, str | int)


class _Collector(Observer):
    """Keeps the scoring requests by document."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[tuple[str, int], list[tuple[int, Scoring]]] = {}

    def __call__(self, instance: Any, request: Any, output: Any) -> None:
        super().__call__(instance, request, output)
        if hasattr(output, "token_logprobs"):
            document = str(instance.task_name), int(instance.doc_id)
            self.requests.setdefault(document, []).append((instance.idx, request))

    def documents(self) -> Mapping[tuple[str, int], Document]:
        """By task and number, in the order of lm-eval's requests, whichever was answered first; then the generated
        answers as targets."""
        ordered = {key: sorted(asked, key=itemgetter(0)) for key, asked in self.requests.items()}
        documents = {key: [request for _, request in asked] for key, asked in ordered.items()}
        for item in sorted(self.generated, key=lambda item: tuple(item.target.target)):
            documents.setdefault((item.task_name, item.doc_id), []).append(item.target)
        return dict(sorted(documents.items()))


def answered(
    session: Session, config: EvaluationConfig, tasks: LoadedTasks, *, progress: bool
) -> Mapping[tuple[str, int], Document]:
    """The documents of `tasks`, which the model of `session` has answered and scored. Raises `TaskError` where nothing
    is asked of it."""
    from olive_ext.backends.lm_eval import OrtLM
    from olive_ext.backends.lm_eval_run import run_tasks

    collector = _Collector()
    lm = OrtLM(session=session, observer=collector, seed=config.seed or 0)
    quick = config.model_copy(update={"bootstrap_iters": 0})
    run_tasks(lm, tasks, quick, progress=progress)
    score_generated(lm, collector.generated)
    documents = collector.documents()
    if not documents:
        raise TaskError(f"tasks {list(tasks.tasks)} ask nothing of a model")
    return documents


def asked(session: Session, documents: Sequence[Document]) -> list[list[ScoringOutput | RollingOutput]]:
    """The outputs of each document's requests."""
    requests = [request for document in documents for request in document]
    scoring = [request for request in requests if isinstance(request, ScoringRequest)]
    rolling = [request for request in requests if isinstance(request, RollingRequest)]
    scored = iter(session.loglikelihood(scoring) if scoring else ())
    rolled = iter(session.loglikelihood_rolling(rolling) if rolling else ())
    return [
        [next(scored) if isinstance(request, ScoringRequest) else next(rolled) for request in document]
        for document in documents
    ]

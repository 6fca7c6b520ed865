"""The requests that lm-eval makes of a model, recorded by a stand-in, so that several backends get the same ones.

Knows no backend.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from olive_ext.backends.lm_eval_run import run_tasks
from olive_ext.backends.task_loading import Seeds, load_tasks
from olive_ext.config import EvaluationSettings
from olive_ext.errors import TaskError

Kind = Literal["loglikelihood", "loglikelihood_rolling", "generate_until"]


@dataclass(frozen=True)
class RecordedRequest:
    """One request: lm-eval's arguments, and the task and document to which it belongs."""

    kind: Kind
    args: tuple[Any, ...]
    task: str
    document: int


class _Recorder(LM):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.requests: list[RecordedRequest] = []

    def _keep(self, kind: Kind, requests: Sequence[Instance]) -> None:
        for one in requests:
            if len(one.args) > 2:
                raise TaskError(f"task '{one.task_name}' asks with images or sound, which is not compared")
            args = copy.deepcopy(tuple(one.args))
            self.requests.append(RecordedRequest(kind, args, str(one.task_name), int(one.doc_id)))

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        self._keep("loglikelihood", requests)
        return [(-1.0, False)] * len(requests)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        self._keep("loglikelihood_rolling", requests)
        return [-1.0] * len(requests)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        self._keep("generate_until", requests)
        return [""] * len(requests)


def record(
    tasks: Sequence[str],
    include_path: str | Sequence[str] | None,
    *,
    limit: float | None,
    num_fewshot: int | None,
    gen_kwargs: dict[str, Any],
    seed: int | None,
) -> list[RecordedRequest]:
    """The requests of the tasks, in lm-eval's order. Raises `TaskError`."""
    seeds = Seeds.of(seed)
    own = {"limit": limit, "num_fewshot": num_fewshot, "gen_kwargs": gen_kwargs, "bootstrap_iters": 0}
    settings = EvaluationSettings.parse({"tasks": list(tasks), **own})
    recorder = _Recorder()
    run_tasks(recorder, load_tasks(tasks, include_path, seeds), settings, seeds=seeds)
    if not recorder.requests:
        raise TaskError(f"tasks {list(tasks)} ask nothing of a model")
    return recorder.requests


def instances(requests: Sequence[RecordedRequest]) -> list[Instance]:
    """Requests of one kind as lm-eval passes them to a model: copies, since the model may change them."""
    return [
        Instance(one.kind, {}, copy.deepcopy(one.args), index, metadata=(one.task, one.document, 1))
        for index, one in enumerate(requests)
    ]

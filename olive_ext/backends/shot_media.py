"""Pictures and sounds of examples ("shots"): lm-eval puts the examples' texts into a prompt, with a marker for each
picture, and gives the model those of the document alone. Knows no model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lm_eval.api.task import ConfigurableTask

from olive_ext.media.pictures import media_digest

_SHOTS = "_olive_ext_shots"
"""The attribute of a task that holds the examples of the prompt that it made last."""

_FIELDS = {"visual": "doc_to_image", "audio": "doc_to_audio"}
"""What a request gives besides texts, and the task's function for it."""


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


@contextmanager
def media_of_shots() -> Iterator[None]:
    """While it lasts, requests of tasks with examples hold the pictures and sounds of these before the document's own,
    in the order of the prompt."""
    task: Any = ConfigurableTask
    own = task.fewshot_context, task.construct_requests
    task.fewshot_context, task.construct_requests = noting_shots(own[0]), _adding(own[1])
    try:
        yield
    finally:
        task.fewshot_context, task.construct_requests = own


def noting_shots(make_context: Any) -> Any:
    """`ConfigurableTask.fewshot_context` that notes which examples the task's sampler has drawn."""

    def noted(task: Any, *args: Any, **options: Any) -> Any:
        vars(task)[_SHOTS] = []
        sampler = getattr(task, "sampler", None)
        if sampler is None:
            return make_context(task, *args, **options)

        def sample(*given: Any, **more: Any) -> Any:
            if isinstance(document := more.get("eval_doc"), dict):
                more["eval_doc"] = _Document(document)
            vars(task)[_SHOTS] = list(type(sampler).sample(sampler, *given, **more))
            return vars(task)[_SHOTS]

        sampler.sample = sample
        try:
            return make_context(task, *args, **options)
        finally:
            del sampler.sample

    return noted


def _adding(construct: Any) -> Any:
    """`ConfigurableTask.construct_requests` with what the noted examples hold besides text."""

    def added(task: Any, *args: Any, **options: Any) -> Any:
        made = construct(task, *args, **options)
        shots = vars(task).pop(_SHOTS, [])
        for request in (made if isinstance(made, list) else [made]) if shots else ():
            request.arguments = tuple(
                _with_shots(task, part, shots) if isinstance(part, Mapping) and part.keys() & _FIELDS.keys() else part
                for part in request.arguments
            )
        return made

    return added


def _with_shots(task: Any, given: Mapping[str, Any], shots: list[Any]) -> dict[str, Any]:
    found = dict(given)
    for name in found.keys() & _FIELDS.keys():
        parts = [getattr(task, _FIELDS[name])(shot) for shot in shots]
        found[name] = [item for part in (*parts, found[name]) for item in as_list(part)]
    return found


def as_list(given: Any) -> list[Any]:
    """What a task's function gives: nothing, one item or several."""
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]

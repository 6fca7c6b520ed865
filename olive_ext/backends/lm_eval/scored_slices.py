"""lm-eval's pairs of context and continuation, slice by slice, as requests of a session that are under way together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from olive_ext.backends.lm_eval.instances import CERTAIN, Answer, TokenRequest
from olive_ext.backends.lm_eval.lost_requests import noting
from olive_ext.text.requests import ScoringOutput, ScoringRequest

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from olive_ext.backends.lm_eval.ort_lm import OrtLM


def score_slices(
    lm: OrtLM,
    slices: Iterable[tuple[Sequence[int], Sequence[TokenRequest]]],
    keep: Callable[[int, Answer], None],
    instances: Sequence[Instance] = (),
) -> None:
    """Calls `keep(place, answer)` for the requests of all slices, which come with their places; `instances` are
    lm-eval's requests by place, for the observer."""
    scored: list[int] = []  # the place of the session's request of each number
    waiting: dict[int, tuple[Any, ScoringRequest]] = {}

    def answer(place: int, key: Any, answer: Answer) -> None:
        if key is not None:
            lm.cache_hook.add_partial("loglikelihood", key, answer)
        keep(place, answer)

    def asked(places: Sequence[int], requests: Sequence[TokenRequest]) -> list[ScoringRequest]:
        first = len(scored)
        for place, (key, *given) in zip(places, requests, strict=True):
            if given[1]:
                waiting[len(scored)] = key, lm.scoring_request(*given)
                scored.append(place)
            else:
                answer(place, key, CERTAIN)
        return [waiting[at][1] for at in range(first, len(scored))]

    def take(at: int, output: ScoringOutput) -> None:
        key, request = waiting.pop(at)
        answer(scored[at], key, (output.logprob, output.is_greedy))
        if instances:
            lm.observer(instances[scored[at]], request, output)

    def whose(at: int) -> str:
        return str(instances[scored[at]].task_name)

    with noting(lm.lost, lambda at: instances[scored[at] :][:1]):
        made = (asked(*part) for part in slices)
        lm.session.loglikelihood_slices(made, take, whose=whose if instances else None)

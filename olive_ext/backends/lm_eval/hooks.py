"""What an evaluation attaches to an `OrtLM`: an observer, and a source of answers that are known. Knows no session."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar, cast

Observer = Callable[[Any, Any, Any], None]
"""Called with lm-eval's request, the session's request for it (of `olive_ext.text.requests`), and its output."""

KnownAnswers = Callable[[list[Any], Callable[[list[Any]], list[Any]]], list[Any]]
"""Answers lm-eval's requests, all of one method; those it does not know it passes on to its second argument."""

Method = TypeVar("Method", bound=Callable[..., list[Any]])


def ignore_output(instance: Any, request: Any, output: Any) -> None:
    """The observer of a model that has none."""


def known_answers_first(method: Method) -> Method:
    """A request method of `OrtLM` that lets the model's `known_answers`, where there are any, answer before it."""

    @wraps(method)
    def answer(lm: Any, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
        ask = partial(method, lm, disable_tqdm=disable_tqdm)
        return ask(requests) if lm.known_answers is None else lm.known_answers(requests, ask)

    return cast(Method, answer)

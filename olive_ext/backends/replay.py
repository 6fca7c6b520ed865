"""Answers lm-eval a second time from what was heard of a model, without the model. Knows no session."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lm_eval.api.model import LM

from olive_ext.errors import RunError

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance


@dataclass
class Heard:
    """One model's answers by lm-eval's arguments of the request."""

    scored: dict[tuple[str, str], tuple[float, bool]] = field(default_factory=dict)
    """(context, continuation) to log-probability in nats, and whether every token was the most likely one."""

    rolled: dict[str, float] = field(default_factory=dict)
    generated: dict[Hashable, list[str]] = field(default_factory=dict)
    """`generation_key` to the texts, in the order of the repeats."""


def generation_key(args: Sequence[Any]) -> Hashable:
    """Tells apart what lm-eval asks to generate: context and settings."""
    return args[0], repr(args[1:])


class ReplayLM(LM):  # type: ignore[misc]
    """Stands in for the model that was heard. `spoken` is the lm-eval model of the run in which it was heard: prompts
    are built with its tokenizer and chat template, so that the same questions come."""

    def __init__(self, heard: Heard, spoken: LM) -> None:
        super().__init__()
        self._heard = heard
        self._spoken = spoken
        self._repeats: dict[Hashable, int] = {}
        self.tokenizer = getattr(spoken, "tokenizer", None)

    @property
    def tokenizer_name(self) -> str:
        return str(self._spoken.tokenizer_name)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return str(self._spoken.apply_chat_template(chat_history, add_generation_prompt))

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        template: str | None = self._spoken.chat_template(chat_template)
        return template

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-probability in nats, is greedy); an empty continuation is certain."""
        return [
            _find(self._heard.scored, (str(request.args[0]), str(request.args[1]))) if request.args[1] else (0.0, True)
            for request in requests
        ]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probability in nats of each whole text."""
        return [_find(self._heard.rolled, str(request.args[0])) for request in requests]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Repeats of a request get its answers in turn; of a greedy one, which has a single answer, the same."""
        return [self._next(generation_key(request.args)) for request in requests]

    def _next(self, key: Hashable) -> str:
        texts: list[str] = _find(self._heard.generated, key)
        turn = self._repeats.get(key, 0)
        self._repeats[key] = turn + 1
        return texts[turn % len(texts)]


def _find(answers: Mapping[Any, Any], key: Any) -> Any:
    if key not in answers:
        raise RunError("lm-eval asks something else the second time: a task's prompts change from run to run")
    return answers[key]

"""Answers lm-eval a second time from what was heard of a model, without the model. Knows no session."""

from __future__ import annotations

from collections.abc import Mapping
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
    """Text to log-probability in nats."""


class ReplayLM(LM):  # type: ignore[misc]
    """Stands in for the model that was heard, whose generations come from `generator`.

    `spoken` is the lm-eval model of the run in which it was heard: prompts are built with its tokenizer and chat
    template, so that the same questions come.
    """

    def __init__(self, heard: Heard, spoken: LM, generator: LM) -> None:
        super().__init__()
        self._heard = heard
        self._spoken = spoken
        self._generator = generator
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
        """The generator's."""
        answers: list[str] = self._generator.generate_until(requests, disable_tqdm=disable_tqdm)
        return answers


def _find(answers: Mapping[Any, Any], key: Any) -> Any:
    if key not in answers:
        raise RunError("lm-eval asks something else the second time: a task's prompts change from run to run")
    return answers[key]

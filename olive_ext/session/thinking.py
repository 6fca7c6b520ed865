"""Where a model's reasoning ends and its answer begins, and the budget of the reasoning. Knows no engine run."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import partial

from olive_ext.engine.requests import ThinkingBudget
from olive_ext.errors import ConfigError
from olive_ext.session.generation_bounds import StopChecker
from olive_ext.session.requests import GenerationRequest, Reasoning
from olive_ext.session.tokenizer import Tokenizer

_BEHIND_END = 8
"""Tokens of white space, at most, that a template puts behind the end of reasoning that it writes itself."""


@dataclass(frozen=True)
class ThinkingEnd:
    """The end of reasoning, as lm-eval's `think_end_token`: a text or a token id."""

    end: str | int
    tokenizer: Tokenizer

    @classmethod
    def of(cls, end: str | int, tokenizer: Tokenizer, stop_ids: Container[int] = ()) -> ThinkingEnd:
        """A text that is one special token becomes its id, because decoding leaves special tokens out. Raises
        `ConfigError` where it has a token that ends the generation, as those of `stop_ids` do, or that the model has no
        row for.
        """
        special = None if isinstance(end, int) else cls(end, tokenizer)._special_id(end)
        found = end if special is None else special
        if any(token in stop_ids for token in cls(found, tokenizer)._marker):
            raise ConfigError(f"'think_end_token' = {end!r} ends this model's answers: give what ends its reasoning")
        size = tokenizer.rows.embedding
        if isinstance(found, int) and size is not None and found >= size:
            raise ConfigError(f"'think_end_token' = {end!r} is beyond the model's vocabulary of {size} tokens")
        return cls(found, tokenizer)

    def stops(self, stops: Sequence[str]) -> tuple[str, ...]:
        """The texts that may end the generation. Plain text may occur in the reasoning, so that the answer is only cut
        there afterwards."""
        return tuple(stop for stop in stops if self._special_id(stop) is not None)

    def has_ended(self, prompt: Sequence[int]) -> bool:
        """Whether the reasoning has ended in the prompt, as templates write it for answers without any."""
        tail = self.tokenizer.decode(prompt[-len(self._marker) - _BEHIND_END :], skip_special_tokens=False)
        text = self._written if isinstance(self.end, int) else self.end.strip()
        return bool(text) and tail.rstrip().endswith(text)

    def budget(self, request: GenerationRequest) -> ThinkingBudget | None:
        """The request's budget. Raises `ConfigError` where it leaves no room for an answer, or the tokenizer has no
        tokens for the end."""
        number, end, marker = request.thinking_budget, self.end, self._marker
        if number is None:
            return None
        if isinstance(end, str) and not (marker and end.strip() in self._written):
            raise ConfigError(
                f"'think_end_token' = {end!r}: the tokenizer writes it as {self._written!r}: give a token's id"
            )
        if number + len(marker) >= request.max_new_tokens:
            raise ConfigError(
                f"'thinking_budget' = {number} leaves no room for an answer: with the {len(marker)} of the end marker "
                f"it must be below the {request.max_new_tokens} new tokens"
            )
        if isinstance(end, int):
            return ThinkingBudget(number, marker)
        return ThinkingBudget(number, marker, end, StopChecker(self.tokenizer, (end,)))

    def read(
        self,
        tokens: Sequence[int],
        stops: Sequence[str],
        budget: ThinkingBudget | None = None,
        *,
        has_ended: bool = False,
    ) -> tuple[str, Reasoning]:
        """The text behind the last end of reasoning, without white space in front and cut before the first of `stops`,
        and what stands before it. Without an end all is the answer; it is known whether the prompt `has_ended` it."""
        number, thoughts, answer = self._split(tokens)
        most = len(tokens) if budget is None else budget.num_tokens
        is_forced = len(tokens) > most and self._split(tokens[:most])[0] is None
        if number is None and is_forced and budget is not None:  # its bytes are none beside those of a cut character
            number = min(most + len(budget.marker), len(tokens))
            thoughts, answer = map(self.tokenizer.decode, (tokens[:most], tokens[number:]))
        answer = answer.lstrip()
        cut = min((at for at in map(answer.find, stops) if at >= 0), default=len(answer))
        known = number if number is not None else 0 if has_ended else len(tokens)
        return answer[:cut], Reasoning(thoughts, known, has_ended or number is not None, is_forced)

    @property
    def _marker(self) -> tuple[int, ...]:
        end = self.end
        return (end,) if isinstance(end, int) else tuple(self.tokenizer.encode(end, add_special_tokens=False))

    @property
    def _written(self) -> str:
        return self.tokenizer.decode(self._marker, skip_special_tokens=False).strip()

    def _split(self, tokens: Sequence[int]) -> tuple[int | None, str, str]:
        """The number of tokens up to the last end, the texts in front of it and behind; None without an end."""
        if isinstance(self.end, int):
            if self.end not in tokens:
                return None, "", self.tokenizer.decode(tokens)
            number = len(tokens) - list(reversed(tokens)).index(self.end)
            return number, self.tokenizer.decode(tokens[: number - 1]), self.tokenizer.decode(tokens[number:])
        for skips in (True, False):  # an end may hold special tokens beside others
            decode = partial(self.tokenizer.decode, skip_special_tokens=skips)
            text = decode(tokens)
            if (at := text.rfind(self.end)) >= 0:
                ends = at + len(self.end)
                number = bisect_left(range(len(tokens)), ends, key=lambda count: len(decode(tokens[:count])))
                return number, text[:at], text[ends:] if skips else self.tokenizer.decode(tokens[number:])
        return None, "", self.tokenizer.decode(tokens)

    def _special_id(self, text: str) -> int | None:
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        is_special = len(ids) == 1 and ids[0] in self.tokenizer.special_ids
        is_unknown = is_special and self.tokenizer.decode(ids, skip_special_tokens=False).strip() != text.strip()
        return ids[0] if is_special and not is_unknown else None

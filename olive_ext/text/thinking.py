"""Where a model's reasoning ends and its answer begins, and the budget of the reasoning. Knows no engine run."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from olive_ext.engine.requests import ThinkingBudget
from olive_ext.errors import ConfigError
from olive_ext.text.generation_bounds import StopChecker
from olive_ext.text.requests import GenerationRequest, Reasoning
from olive_ext.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ThinkingEnd:
    """The end of reasoning, as lm-eval's `think_end_token`: a text or a token id."""

    end: str | int
    tokenizer: Tokenizer

    @classmethod
    def of(cls, end: str | int, tokenizer: Tokenizer) -> ThinkingEnd:
        """A text that is one special token becomes its id, because decoding leaves special tokens out."""
        special = None if isinstance(end, int) else cls(end, tokenizer)._special_id(end)
        return cls(end if special is None else special, tokenizer)

    def stops(self, stops: Sequence[str]) -> tuple[str, ...]:
        """The texts that may end the generation. Plain text may occur in the reasoning, so that the answer is only cut
        there afterwards."""
        return tuple(stop for stop in stops if self._special_id(stop) is not None)

    def budget(self, request: GenerationRequest) -> ThinkingBudget | None:
        """The request's budget. Raises `ConfigError` where it leaves no room for an answer."""
        number, end, encode = request.thinking_budget, self.end, self.tokenizer.encode
        if number is None:
            return None
        marker = (end,) if isinstance(end, int) else tuple(encode(end, add_special_tokens=False))
        if number + len(marker) >= request.max_new_tokens:
            raise ConfigError(
                f"'thinking_budget' = {number} leaves no room for an answer: with the {len(marker)} of the end marker "
                f"it must be below the {request.max_new_tokens} new tokens"
            )
        if isinstance(end, int):
            return ThinkingBudget(number, marker)
        return ThinkingBudget(number, marker, end, StopChecker(self.tokenizer, (end,)))

    def read(self, tokens: Sequence[int], request: GenerationRequest) -> tuple[str, Reasoning]:
        """The text behind the last end of reasoning, without white space in front and cut before the first stop, and
        what stands before it. Without an end all is the answer."""
        number, thoughts, answer = self._split(tokens)
        answer = answer.lstrip()
        cut = min((at for at in map(answer.find, request.stop) if at >= 0), default=len(answer))
        budget = request.thinking_budget
        is_forced = budget is not None and len(tokens) > budget and self._split(tokens[:budget])[0] is None
        known = len(tokens) if number is None else number
        return answer[:cut], Reasoning(thoughts, known, number is not None, is_forced)

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
        return ids[0] if len(ids) == 1 and ids[0] in self.tokenizer.special_ids else None

"""Keeps what a model generated in a file, so that a later run need not generate it again. Knows no session's inside."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval.api.model import LM

from olive_ext.engine.requests import FinishReason
from olive_ext.text.requests import GenerationOutput, GenerationRequest

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

Observer = Callable[[Any, Any, Any], None]

_CHUNK = 512
"""Requests after which what was generated is written."""


class Generations:
    """Greedy answers of one model in `file`, a JSON line for each; `facts` are what decides them besides the request.

    A line that an interruption cut short is left out.
    """

    def __init__(self, file: Path, facts: Mapping[str, Any]) -> None:
        self._file = file
        self._facts = json.dumps(facts, sort_keys=True, default=str)
        self._rows: dict[str, dict[str, Any]] = {}
        self._fresh: dict[str, dict[str, Any]] = {}
        for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
            if (row := _read(line)) is not None:
                self._rows[row["key"]] = row

    def find(self, args: Sequence[Any]) -> dict[str, Any] | None:
        """What is kept of a request with lm-eval's arguments `args`."""
        return self._rows.get(self._key(args))

    def keep(self, args: Sequence[Any], text: str, request: GenerationRequest, output: GenerationOutput) -> None:
        """Takes lm-eval's text and what the session was asked and gave; not of a sampled request."""
        key = self._key(args)
        if request.temperature == 0 and key not in self._rows:
            row = {"key": key, "text": text, "prompt": request.prompt, "source": request.source}
            self._rows[key] = self._fresh[key] = {**row, "tokens": output.tokens}

    def flush(self) -> None:
        """Writes what is new."""
        if self._fresh:
            with self._file.open("a", encoding="utf-8") as file:
                file.write("".join(f"\n{json.dumps(row)}" for row in self._fresh.values()))
            self._fresh = {}

    def _key(self, args: Sequence[Any]) -> str:
        content = json.dumps([self._facts, *args], sort_keys=True, default=str)
        return hashlib.sha256(content.encode()).hexdigest()[:32]


def _read(line: str) -> dict[str, Any] | None:
    try:
        row: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError:
        return None
    return row


class Overheard:
    """An observer that passes on what it is told, and holds what was generated last for each request of lm-eval."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._said: dict[Hashable, tuple[GenerationRequest, GenerationOutput]] = {}

    def __call__(self, asked: Any, request: Any, output: Any) -> None:
        self._observer(asked, request, output)
        if isinstance(output, GenerationOutput):
            self._said[_arguments(asked)] = request, output

    def take(self, asked: Any) -> tuple[GenerationRequest, GenerationOutput] | None:
        return self._said.pop(_arguments(asked), None)


class RememberingLM(LM):  # type: ignore[misc]
    """Answers for `spoken`, an OrtLM that `overheard` observes; what it generated in an earlier run comes from
    `generations`, and `observer` is told of it as if it had just been generated."""

    def __init__(self, spoken: Any, overheard: Overheard, generations: Generations, observer: Observer) -> None:
        super().__init__()
        self._spoken = spoken
        self._overheard = overheard
        self._generations = generations
        self._observer = observer
        self.tokenizer = spoken.tokenizer

    @property
    def session(self) -> Any:
        return self._spoken.session

    @property
    def tokenizer_name(self) -> str:
        return str(self._spoken.tokenizer_name)

    def close(self) -> None:
        self._spoken.close()

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return str(self._spoken.apply_chat_template(chat_history, add_generation_prompt))

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        template: str | None = self._spoken.chat_template(chat_template)
        return template

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        answers: list[tuple[float, bool]] = self._spoken.loglikelihood(requests, disable_tqdm=disable_tqdm)
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        answers: list[float] = self._spoken.loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)
        return answers

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The continuation of each context. New answers are written after every few hundred requests."""
        texts: dict[int, str] = {}
        missing: dict[Hashable, list[int]] = {}
        for place, asked in enumerate(requests):
            row = self._generations.find(asked.args)
            if row is None:
                missing.setdefault(_arguments(asked), []).append(place)
            else:
                texts[place] = self._again(asked, row)
        for places in _chunks(list(missing.values())):
            texts |= self._new(places, requests, disable_tqdm)
        return [texts[place] for place in range(len(requests))]

    def _again(self, asked: Instance, row: Mapping[str, Any]) -> str:
        request = GenerationRequest(row["prompt"], source=row["source"])
        self._observer(asked, request, GenerationOutput(row["text"], tuple(row["tokens"]), FinishReason.STOPPED))
        return str(row["text"])

    def _new(self, places: Sequence[int], requests: list[Instance], disable_tqdm: bool) -> dict[int, str]:
        asked = [requests[place] for place in places]
        texts: list[str] = self._spoken.generate_until(asked, disable_tqdm=disable_tqdm)
        for one, text in zip(asked, texts, strict=True):
            said = self._overheard.take(one)
            if said is not None:
                self._generations.keep(one.args, text, *said)
        self._generations.flush()
        return dict(zip(places, texts, strict=True))


def _arguments(asked: Any) -> Hashable:
    return asked.args[0], repr(asked.args[1:])


def _chunks(groups: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Groups, which stay whole, put together to some hundreds: repeats of a sampled request are numbered."""
    chunk: list[int] = []
    for group in groups:
        chunk += group
        if len(chunk) >= _CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk

"""The public session: texts or token ids in, texts and log-probabilities out, on one open model.

Knows no evaluation framework. Results come back in the order of the requests.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeAlias, overload

from olive_ext.engine.requests import Result
from olive_ext.errors import ConfigError, LostRequestsError
from olive_ext.model import ResolvedModel
from olive_ext.records import Records
from olive_ext.records.journal import Journal
from olive_ext.session import calls
from olive_ext.session.answer_journal import journal_of, run_in_chunks
from olive_ext.session.executor import Executor, OpenModel, RecordsElsewhere
from olive_ext.text.conversion import Converted
from olive_ext.text.encoder_decoder import Encoding
from olive_ext.text.generation_bounds import TextStream
from olive_ext.text.placeholders import MediaText
from olive_ext.text.requests import GenerationOutput, RollingOutput, ScoringOutput
from olive_ext.text.tokenizer import Tokenizer

Names: TypeAlias = Sequence[str]
_OnGenerated: TypeAlias = Callable[[int, GenerationOutput], None] | None


class Session(AbstractContextManager["Session"]):
    """One open model. Safe to use from several threads: calls take turns.

    `stop_ids` end every generation (by default the tokenizer's EOS). `facts` are added to `describe_execution()`.
    With `encoding` the model is an encoder-decoder, and every request has a `source`. `records` are those that the
    engine writes. With `media` requests may give pictures. `beside` is the session that owns the model of this one, as
    for the session of a resident reference: the two take turns, and closing `beside` closes both.
    Every method but `close` raises `SessionError` once the session is closed.
    """

    def __init__(
        self,
        engine: Executor,
        tokenizer: Tokenizer,
        *,
        stop_ids: Iterable[int] | None = None,
        facts: Mapping[str, Any] | None = None,
        encoding: Encoding | None = None,
        records: Records | RecordsElsewhere | None = None,
        model: ResolvedModel | None = None,
        media: MediaText | None = None,
        beside: Session | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.encoding = encoding
        self.records = records
        self.media = media
        self.model = model
        """The opened model, resolved; None for a session around an engine that a caller made."""

        self.reference: Session | None = None
        """The resident reference, as a session of its own: it scores and generates alone."""

        self.journal: Journal | None = None
        """Where answers are kept; see `keep_answers`."""

        eos = tokenizer.eos_token_id
        self.stop_ids = frozenset(stop_ids if stop_ids is not None else () if eos is None else (eos,))
        self.executor: Executor = engine  # an engine in this process, or workers
        self._facts = dict(facts or {})
        self._beside = beside
        self._turns: calls.Turns = beside._turns if beside is not None else calls.Turns()
        # Held while the engine works, not between the results of an iterator: `close` never waits for a consumer.
        self._working: AbstractContextManager[Any] = beside._working if beside is not None else threading.RLock()
        self._results: Iterator[tuple[Hashable, Result]] | None = None

    @property
    def max_length(self) -> int:
        """Most tokens the model sees at once: prompt and answer together, or what is fed to score."""
        return self.executor.context_length

    @property
    def counters(self) -> Any:
        """The engine's counters since the session was opened, a dataclass."""
        self._turns.check_open()
        return self.executor.counters

    @overload
    def generate(self, requests: calls.ToGenerate, **settings: Any) -> GenerationOutput: ...

    @overload
    def generate(
        self,
        requests: Sequence[calls.ToGenerate],
        on_result: _OnGenerated = None,
        *,
        names: Names = (),
        **settings: Any,
    ) -> list[GenerationOutput]: ...

    def generate(
        self, requests: Any, on_result: _OnGenerated = None, *, names: Names = (), **settings: Any
    ) -> GenerationOutput | list[GenerationOutput]:
        """Continues each prompt: a text, chat messages or token ids, with `settings`, the other fields of a
        `GenerationRequest` (`generate(["Hello"], max_new_tokens=5)`); or a `GenerationRequest`, which has its own. One
        that is in no list (`generate("Hello", max_new_tokens=5)`) has one output.

        A prompt too long to leave room for `max_new_tokens` loses its beginning. `on_result(index, output)` is called
        as each becomes complete, in any order. `names`, one for each request, say in warnings whose it is.
        """
        calls.refuse_unknown_settings(settings)
        convert = partial(calls.to_generation, settings=settings)
        if calls.is_one(requests):
            return self._run("generate", [requests], convert, on_result, names)[0]
        return self._run("generate", requests, convert, on_result, names)

    def stream(self, prompt: calls.ToGenerate, **settings: Any) -> Iterator[str]:
        """The pieces of the text that `generate` gives for `prompt` and `settings`, as they become certain; together
        they are that text. The engine works ahead of who reads, and stops where reading ends. On workers the text is
        one piece."""
        calls.refuse_unknown_settings(settings)
        self._turns.check_open()
        converted = streamable(prompt, calls.to_generation(self, prompt, settings), settings)
        run = partial(self._run, "generate", [prompt])
        return streamed(self.tokenizer, converted, run, partial(self._turns.refuse_inside, "stream"))

    def generate_continuous(
        self, items: Iterable[tuple[Hashable, calls.ToGenerate] | None]
    ) -> Iterator[tuple[Hashable, GenerationOutput]]:
        """`(key, output)` in the order of completion for `(key, request)` items, which are read as they are needed.

        An item may be None: no request is there for now, so those that are run on before `items` is read again.
        The session is taken from the first `next` until the iterator ends or is closed.
        """
        self._turns.check_open()
        return self._generate_continuous(items)

    def loglikelihood(
        self,
        requests: Sequence[calls.ToScore],
        on_result: Callable[[int, ScoringOutput], None] | None = None,
        *,
        names: Names = (),
    ) -> list[ScoringOutput]:
        """Scores each target behind its context: `(context, target)` pairs of texts or token ids.

        A context that does not fit loses its beginning. A target longer than `max_length` is scored in windows.
        """
        return self._run("loglikelihood", requests, calls.to_scoring, on_result, names)

    def loglikelihood_slices(
        self,
        slices: Iterable[Sequence[calls.ToScore]],
        on_result: Callable[[int, ScoringOutput], None],
        *,
        whose: Callable[[int], str] | None = None,
    ) -> None:
        """As `loglikelihood` of each slice, for more requests than should be in memory together: a slice is read when
        there is room to run it. Requests are counted on from slice to slice; `whose(index)` names them in warnings."""
        self._run_slices("loglikelihood", slices, calls.to_scoring, on_result, whose)

    def loglikelihood_rolling(
        self, requests: Sequence[calls.ToRoll], on_result: Callable[[int, RollingOutput], None] | None = None
    ) -> list[RollingOutput]:
        """Scores every token of each text, behind the prefix token, in windows of `max_length`."""
        return self._run("loglikelihood_rolling", requests, calls.to_rolling, on_result)

    def keep_answers(
        self, stem: str | Path | None, *, resume: bool = True, facts: Mapping[str, Any] | None = None
    ) -> None:
        """From now on every answer is kept in a journal, and one that is in it is not computed again. With None for
        `stem` this ends. Scores of a session that writes `records` are kept in those.

        The file is `<stem>_<digest>.jsonl`; the digest is of all that decides an answer besides its request: the
        model's content, how it runs, a reference, and `facts`. Without `resume` it begins anew. Requests then run in
        chunks, so that a session opened with `deterministic` gives the same bits however often it was interrupted.
        Raises `RecordsError`.
        """
        if self.journal is not None:
            self.journal.close()
        self.journal = None if stem is None else journal_of(self, stem, facts or {}, resume=resume)

    def gc(self) -> None:
        """Drops what could be reused (resident prefixes); the model stays open."""
        with self._turns.turn("gc"), self._work():
            self.executor.reset()

    def release_memory(self) -> None:
        """`gc`, and frees the memory that has grown with use: KV caches, captured steps, what the encoder returned, the
        allocators' spare regions. The weights stay; the next call allocates the rest anew."""
        with self._turns.turn("release_memory"), self._work():
            self.executor.release_memory()

    def close(self) -> None:
        """Releases the model, behind the engine's present call; does nothing again, nor with `beside`."""
        if self._beside is None and self._turns.close():
            with self._working:
                self._drop_results()
                if self.reference is not None:
                    self.reference._drop_results()
                self.executor.close()
                for kept in (self.records, self.journal, self.reference and self.reference.journal):
                    if kept is not None:
                        kept.close()

    def describe_execution(self) -> dict[str, Any]:
        """JSON-ready facts with stable names: model file, providers, KV layout, slots, scoring head, counters."""
        self._turns.check_open()
        facts = self.executor.describe()
        counters = {**dataclasses.asdict(self.executor.counters), **facts.get("counters", {})}
        journal = {"journal": self.journal.describe()} if self.journal is not None else {}
        return {**self._facts, "max_length": self.max_length, **facts, **journal, "counters": counters}

    def __repr__(self) -> str:
        facts = {} if self._turns.is_closed else {**self._facts, **self.executor.describe()}
        device = facts.get("device") or ", ".join(map(str, facts.get("providers", ())))
        runs = " on ".join(filter(None, (facts.get("runtime"), device))) if facts else "closed"
        return f"<Session of '{self._facts.get('model', 'a model')}'{f': {runs}' if runs else ''}>"

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self,
        call: str,
        requests: Sequence[calls.Asked],
        convert: Callable[[Session, calls.Asked], Converted[calls.Output]],
        on_result: Callable[[int, calls.Output], None] | None,
        names: Names = (),
    ) -> list[calls.Output]:
        if isinstance(requests, str | bytes | Mapping) or not isinstance(requests, Iterable):
            kind = "text" if isinstance(requests, str) else type(requests).__name__
            raise ConfigError(f"{call} takes a list of requests, not one {kind}")
        requests = list(requests)
        outputs: dict[int, calls.Output] = {}

        def keep(index: int, output: calls.Output) -> None:
            outputs[index] = output
            if on_result is not None:
                on_result(index, output)

        self._run_slices(call, [requests], convert, keep, names.__getitem__ if names else None)
        return [outputs[index] for index in range(len(requests))]

    def _run_slices(
        self,
        call: str,
        slices: Iterable[Sequence[calls.Asked]],
        convert: Callable[[Session, calls.Asked], Converted[calls.Output]],
        on_output: Callable[[int, calls.Output], None],
        whose: Callable[[int], str] | None,
    ) -> None:
        lost: dict[int, str] = {}
        warn = partial(calls.warn_of_cuts, self.max_length, whose)
        with self._turns.turn(call), self._work():
            made = calls.batches(slices, partial(convert, self), on_output, lost.__setitem__, warn)
            if self.journal is None and not self.executor.needs_chunks:
                for batch in made:
                    batch.run(self.executor)
            else:
                is_kept = self.records is None or call == "generate"
                asked = ((batch.requests, batch.take) for batch in made)
                run_in_chunks(self.executor, asked, self.journal if is_kept else None)
        if lost:
            raise LostRequestsError(lost)

    def _generate_continuous(
        self, items: Iterable[tuple[Hashable, calls.ToGenerate] | None]
    ) -> Iterator[tuple[Hashable, GenerationOutput]]:
        asked = calls.ContinuousRequests(self)
        with self._turns.turn("generate_continuous"):
            try:
                with self._work():
                    self._results = self.executor.run_continuous(asked.feed(items))
                while (answer := self._next_result()) is not None:
                    yield asked.take(*answer)
            finally:
                with self._working:
                    self._drop_results()

    def _next_result(self) -> tuple[Hashable, Result] | None:
        self._turns.advance()
        with self._work():
            return None if self._results is None else next(self._results, None)

    def _drop_results(self) -> None:
        results, self._results = self._results, None
        if (close := getattr(results, "close", None)) is not None:
            close()

    @contextmanager
    def _work(self) -> Iterator[None]:
        with self._working:
            self._turns.check_open()
            yield


class _LeftError(Exception):
    """Nobody reads on."""


def streamable(
    request: object, converted: Converted[GenerationOutput], settings: Mapping[str, Any]
) -> Converted[GenerationOutput]:
    """`converted`, from `request` and `settings`. Raises `ConfigError` where its answer is not known before the last
    token."""
    end = getattr(request, "think_end_token", settings.get("think_end_token"))
    if end is not None:
        text = "the answer is what follows the last end of the reasoning: `generate` tells them apart"
        raise ConfigError(f"stream: 'think_end_token' = {end!r}: {text}")
    if len(converted.requests) > 1:
        raise ConfigError(f"stream: the sound has {len(converted.requests)} windows: use `generate`")
    if converted.requests[0].generation is not None and converted.requests[0].generation.beams is not None:
        raise ConfigError("stream: a beam search has no answer before its end: give 1 beam, or use `generate`")
    return converted


Run = Callable[[Callable[[OpenModel, Any], Converted[GenerationOutput]], None], Sequence[GenerationOutput]]
"""A session's run of one request, which is converted as the first argument says."""


def streamed(
    tokenizer: Tokenizer, converted: Converted[GenerationOutput], run: Run, begin: Callable[[], None]
) -> Iterator[str]:
    """The pieces of the answer to `converted`, which `run` has the engine make in a thread, ahead of the reader. Where
    reading ends before, the engine stops at the next token, and the answer is kept nowhere. `begin` is called first.

    On workers, and where the answer is known, the tokens are not seen: the whole text is one piece.
    """
    begin()
    made = _Made(converted)
    thread = threading.Thread(target=made.work, args=(run,), name="olive_ext-stream", daemon=True)
    thread.start()
    stream, tokens, length = TextStream(tokenizer, made.generation.stops), list[int](), 0
    try:
        while isinstance(item := made.found.get(), int):
            tokens.append(item)
            if piece := stream.piece(tokens):
                length += len(piece)
                yield piece
        if isinstance(item, BaseException):
            raise item
        if rest := item.text[length:]:
            yield rest
    finally:
        made.is_left.set()
        thread.join()


class _Made:
    """An answer while it is made: in `found` are its tokens, then all of it, or the error that there was instead."""

    def __init__(self, converted: Converted[GenerationOutput]) -> None:
        (self._request,) = converted.requests
        assert self._request.generation is not None
        self.generation = self._request.generation
        self._converted = converted
        self.found: SimpleQueue[int | BaseException | GenerationOutput] = SimpleQueue()
        self.is_left = threading.Event()

    def work(self, run: Run) -> None:
        try:
            self.found.put(run(self._convert, None)[0])
        except BaseException as error:  # noqa: BLE001 - raised where the pieces are read
            self.found.put(error)

    def _convert(self, session: OpenModel, item: object) -> Converted[GenerationOutput]:
        self._check()
        generation = replace(self.generation, is_finished=self._watch)
        return replace(self._converted, requests=(replace(self._request, generation=generation),))

    def _watch(self, tokens: Sequence[int]) -> bool:
        self._check()
        self.found.put(tokens[-1])
        is_finished = self.generation.is_finished
        return is_finished is not None and is_finished(tokens)

    def _check(self) -> None:
        if self.is_left.is_set():
            raise _LeftError

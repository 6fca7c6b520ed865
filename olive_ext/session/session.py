"""The public session: texts or token ids in, texts and log-probabilities out, on one open model.

A call from another thread waits; a call from the thread whose own call is still open could wait forever, so it is
refused. Knows no evaluation framework.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, TypeAlias, overload

from olive_ext.engine.reference import key_of
from olive_ext.engine.requests import KeyedRequest, KeyedResult
from olive_ext.errors import ConfigError, RecordsError, SessionError, UnfitTaskError, UnsupportedError, listed
from olive_ext.model import ResolvedModel
from olive_ext.records import Records
from olive_ext.records.journal import Journal
from olive_ext.session.answer_journal import Executor, RecordsElsewhere, in_chunks, journal_of, request_digest
from olive_ext.session.conversion import Call, convert, naming
from olive_ext.session.generation_bounds import TextStream
from olive_ext.session.placeholders import Encoding, MediaText
from olive_ext.session.requests import (
    GenerationOutput,
    GenerationRequest,
    RollingOutput,
    ScoringOutput,
    ToGenerate,
    ToRoll,
    ToScore,
    is_one,
    refuse_unknown_settings,
    to_generation,
    to_rolling,
    to_scoring,
)
from olive_ext.session.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Outputs: TypeAlias = Generator[tuple[Any, Any], None, None]
Whose: TypeAlias = Callable[[Any], str] | None

_REQUEST_OF: Mapping[str, Callable[[Any], Any]] = {
    "generate": to_generation,
    "loglikelihood": to_scoring,
    "loglikelihood_rolling": to_rolling,
}
"""For each method, the function that makes a request of a caller's arguments."""


class Turns:
    """Hands out turns until closed; the sessions of one open model share them."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._owner: int | None = None
        self._call = ""
        self.is_closed = False
        self._outputs: Outputs | None = None
        self._working = threading.RLock()
        """Held while the engine works, not between the results of an iterator: `close` never waits for a consumer."""

    @contextmanager
    def turn(self, call: str) -> Iterator[None]:
        """Waits for the turn of `call`. Raises `SessionError` on a closed session, or inside another call."""
        me = threading.get_ident()
        with self._condition:
            self.refuse_inside(call)
            self._condition.wait_for(lambda: self._owner is None or self.is_closed)
            self.check_open()
            self._owner, self._call = me, call
        try:
            yield
        finally:
            with self._condition:
                self._owner = None
                self._condition.notify_all()

    def refuse_inside(self, call: str) -> None:
        """Raises `SessionError` inside another call of this thread, for which `call` would wait forever."""
        if self._owner == threading.get_ident() and not self.is_closed:
            raise SessionError(f"{call} inside {self._call}: let that finish, or close its iterator, first")

    @contextmanager
    def work(self, call: str) -> Iterator[None]:
        """Takes a turn for `call`; `close` waits for its end."""
        with self.turn(call), self._working:
            self.check_open()
            yield

    def outputs_of(self, call: str, outputs: Outputs, *, is_whole: bool = False) -> Iterator[tuple[Any, Any]]:
        """Yields `outputs` within the turn of `call`, while the session is open; with `is_whole`, `close` waits for
        all."""
        if is_whole:
            with self.work(call):
                yield from outputs
            return
        with self.turn(call):
            self._outputs = outputs
            try:
                while (item := self._next_output()) is not None:
                    yield item
            finally:
                self._drop_outputs()

    def _next_output(self) -> tuple[Any, Any] | None:
        """Ends the turn of an iterator, perhaps in another thread than the one that began it."""
        with self._working:
            self.check_open()
            self._owner = threading.get_ident()
            return None if self._outputs is None else next(self._outputs, None)

    def _drop_outputs(self) -> None:
        with self._working:
            outputs, self._outputs = self._outputs, None
            if outputs is not None:
                outputs.close()

    def check_open(self) -> None:
        """Raises `SessionError` where the session is closed."""
        if self.is_closed:
            raise SessionError("the session is closed: open the model again")

    def close(self, release: Callable[[], None]) -> None:
        """Ends all turns: callers that wait for one get the error. After the engine's current call, it ends an open
        iterator and releases the model, unless that was done before."""
        with self._condition:
            was_open, self.is_closed = not self.is_closed, True
            self._condition.notify_all()
        if was_open:
            with self._working:
                self._drop_outputs()
                release()


class Session(AbstractContextManager["Session"]):
    """One open model. Safe to use from several threads: calls take turns.

    `stop_ids` end every generation (by default the tokenizer's EOS). `facts` are added to `describe_execution()`.
    With `encoding` the model is an encoder-decoder, and every request has a `source`. With `media` requests may give
    pictures. `beside` is the session that owns the model of this one, as for the session of a resident reference: the
    two take turns, and closing `beside` closes both.
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
        model: ResolvedModel | None = None,
        media: MediaText | None = None,
        beside: Session | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.encoding = encoding
        self.media = media
        self.model = model
        """The opened model, resolved; None for a session around an engine that a caller made."""

        self.records: Records | RecordsElsewhere | None = None
        """The records that the engine writes."""

        self.reference: Session | None = None
        """The resident reference, as a session of its own: it scores and generates alone."""

        self.journal: Journal | None = None
        """Where answers are kept; see `keep_answers`."""

        eos = tokenizer.eos_token_id
        self.stop_ids = frozenset(stop_ids if stop_ids is not None else () if eos is None else (eos,))
        self.executor: Executor = engine  # an engine in this process, or workers
        self.max_length = engine.context_length
        """The most tokens that the model sees at once: prompt and answer together, or what is fed to score."""

        self._is_deterministic = bool(engine.describe().get("deterministic"))
        self._facts = dict(facts or {})
        self._beside = beside
        self._turns: Turns = beside._turns if beside is not None else Turns()

    @property
    def counters(self) -> Any:
        """The engine's counters since the session was opened, a dataclass."""
        self._turns.check_open()
        return self.executor.counters

    @overload
    def generate(self, requests: ToGenerate, **settings: Any) -> GenerationOutput: ...

    @overload
    def generate(self, requests: Sequence[ToGenerate], **settings: Any) -> list[GenerationOutput]: ...

    def generate(self, requests: Any, **settings: Any) -> GenerationOutput | list[GenerationOutput]:
        """Continues each prompt: a text, chat messages or token ids, with `settings`, the other fields of a
        `GenerationRequest` (`generate(["Hello"], max_new_tokens=5)`); or a whole `GenerationRequest`. A prompt that is
        not in a list (`generate("Hello", max_new_tokens=5)`) gets a single output.

        A prompt too long to leave room for `max_new_tokens` loses its beginning.
        """
        refuse_unknown_settings(settings)
        to_request = partial(to_generation, settings=settings)
        is_alone = is_one(requests)
        outputs = self._run("generate", [requests] if is_alone else requests, to_request)
        return outputs[0] if is_alone else outputs

    def stream(self, prompt: ToGenerate, **settings: Any) -> Iterator[str]:
        """Yields the text that `generate` gives for `prompt` and `settings` in pieces, as they become certain. The
        engine works ahead of the reader, and stops where reading stops. On workers the text is one piece."""
        refuse_unknown_settings(settings)
        self._turns.check_open()
        return self._stream(_Streamed(self, to_generation(prompt, settings)))

    def generate_continuous(
        self, items: Iterable[tuple[Hashable, ToGenerate] | None]
    ) -> Iterator[tuple[Hashable, GenerationOutput]]:
        """`(key, output)` in the order of completion for `(key, request)` items, which are read as they are needed.

        An item may be None: no request is there for now, and the earlier requests run on before `items` is read again.
        The session is taken from the first `next` until the iterator ends or is closed.
        """
        self._turns.check_open()
        return self._turns.outputs_of("generate_continuous", self._continuous(items))

    @overload
    def as_completed(
        self, call: Literal["generate"], slices: Iterable[Sequence[ToGenerate]]
    ) -> Iterator[tuple[int, GenerationOutput]]: ...

    @overload
    def as_completed(
        self, call: Literal["loglikelihood"], slices: Iterable[Sequence[ToScore]]
    ) -> Iterator[tuple[int, ScoringOutput]]: ...

    @overload
    def as_completed(
        self, call: Literal["loglikelihood_rolling"], slices: Iterable[Sequence[ToRoll]]
    ) -> Iterator[tuple[int, RollingOutput]]: ...

    def as_completed(self, call: str, slices: Iterable[Sequence[Any]]) -> Iterator[tuple[int, Any]]:
        """`(index, output)` of every request in the order of completion, as the method named `call` gives them in a
        list. Indices run through all slices. A slice is read when there is room to run it, so that not all slices need
        to be in memory together.

        The session is taken from the first `next` until the iterator ends or is closed. Raises `LostRequestsError` at
        the end where requests have no answer.
        """
        if call not in _REQUEST_OF:
            raise ConfigError(f"give one of {listed(_REQUEST_OF)}", "call", call)
        return self.run_slices(call, _numbered(call, slices))

    def run_slices(
        self, call: str, slices: Iterable[Sequence[tuple[Any, Any]]], whose: Whose = None
    ) -> Iterator[tuple[Any, Any]]:
        """As `as_completed`, by keys: `(key, output)` for the `(key, request)` pairs of each slice, all under different
        keys. Errors name a request by its key, and warnings its task, `whose(key)`."""
        self._turns.check_open()
        asked = Call(self, _REQUEST_OF[call])
        return self._turns.outputs_of(call, asked.outputs(self._results(call, asked.put_all(slices, whose))))

    def loglikelihood(self, requests: Sequence[ToScore]) -> list[ScoringOutput]:
        """Scores each target after its context: `(context, target)` pairs of texts or token ids.

        A context that does not fit loses its beginning. A target longer than `max_length` is scored in windows.
        """
        return self._run("loglikelihood", requests, to_scoring)

    def loglikelihood_rolling(self, requests: Sequence[ToRoll]) -> list[RollingOutput]:
        """Scores every token of each text, after the prefix token, in windows of `max_length`."""
        return self._run("loglikelihood_rolling", requests, to_rolling)

    def keep_answers(
        self, stem: str | Path | None, *, resume: bool = True, facts: Mapping[str, Any] | None = None
    ) -> None:
        """Keeps every answer in a journal from now on; an answer that is in it is not computed again. None for `stem`
        ends this. Scores of a session that writes `records` are kept in those.

        The file is `<stem>_<digest>.jsonl`; the digest is of all that decides an answer besides its request: the
        model's content, how it runs, the libraries' versions, a reference, and `facts`. Without `resume` it begins
        anew. Requests then run in chunks, as in a session opened with `deterministic`: the bits are the same however
        often it is interrupted. Raises `RecordsError`.
        """
        if self.journal is not None:
            self.journal.close()
        self.journal = None if stem is None else journal_of(self, stem, facts or {}, resume=resume)

    def kept(self, call: str) -> Callable[[Any], bool] | None:
        """Whether the answer to a request of the method named `call` is kept; None where none are kept."""
        to_request = _REQUEST_OF[call]
        if call != "generate" and self.records is not None:
            with suppress(RecordsError):
                find = Records.read(self.records.folder).find
                return lambda item: all(find(key_of(part)) is not None for part in convert(self, to_request(item))[0])
        elif (journal := self.journal) is not None and journal.num_known:
            return lambda item: all(request_digest(part) in journal for part in convert(self, to_request(item))[0])
        return None

    def gc(self) -> None:
        """Drops what could be reused (resident prefixes); the model stays open."""
        with self._turns.work("gc"):
            self.executor.reset()

    def release_memory(self) -> None:
        """As `gc`, and frees the memory that has grown with use: KV caches, captured steps, kept encoder outputs, the
        allocators' spare regions. The weights stay; the next call allocates the rest anew."""
        with self._turns.work("release_memory"):
            self.executor.release_memory()

    def close(self) -> None:
        """Releases the model after the engine's current call. Does nothing the second time, and nothing for a session
        that was made with `beside`."""
        if self._beside is None:
            self._turns.close(self._release)

    def _release(self) -> None:
        self.executor.close()
        for kept in (self.records, self.journal, self.reference and self.reference.journal):
            if kept is not None:
                kept.close()

    def describe_execution(self) -> dict[str, Any]:
        """JSON-ready facts with stable names: model file, providers, KV layout, slots, scoring head, counters."""
        self._turns.check_open()
        facts = self.executor.describe()
        counters = {**asdict(self.executor.counters), **facts.get("counters", {})}
        journal = {"journal": self.journal.describe()} if self.journal is not None else {}
        return {**self._facts, "max_length": self.max_length, **facts, **journal, "counters": counters}

    def __repr__(self) -> str:
        facts = {} if self._turns.is_closed else {**self._facts, **self.executor.describe()}
        device = facts.get("device") or ", ".join(map(str, facts.get("providers", ())))
        runs = " on ".join(filter(None, (facts.get("runtime"), device))) if facts else "closed"
        return f"<Session of '{self._facts.get('model', 'a model')}'{f': {runs}' if runs else ''}>"

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, call: str, requests: Sequence[Any], to_request: Callable[[Any], Any]) -> list[Any]:
        asked = Call(self, to_request)
        completed = asked.outputs(self._results(call, asked.put_all(_numbered(call, [requests]), None)))
        outputs = dict(self._turns.outputs_of(call, completed, is_whole=True))
        return [outputs[index] for index in range(len(outputs))]

    def _results(self, call: str, slices: Iterable[Sequence[KeyedRequest]]) -> Iterator[KeyedResult]:
        journal = self.journal if call == "generate" or self.records is None else None
        if journal is not None or self._is_deterministic:
            return in_chunks(self.executor, slices, journal)
        return self.executor.run_slices(slices)

    def _continuous(self, items: Iterable[tuple[Hashable, ToGenerate] | None]) -> Outputs:
        call, keys = Call(self, to_generation), dict[int, Hashable]()

        def requests() -> Iterator[KeyedRequest | None]:
            for number, item in enumerate(items):
                if item is None:
                    yield None
                    continue
                keys[number], request = item
                with naming(item[0]):
                    (window, *others), is_cut = call.put(number, request)
                    if others:
                        raise UnfitTaskError(f"its sound has {len(others) + 1} windows: use `generate`")
                if is_cut:
                    logger.warning("request %r was cut on the left to fit", item[0])
                yield window

        for number, output in call.outputs(self.executor.run_continuous(requests())):
            yield keys.pop(number), output

    def _stream(self, streamed: _Streamed) -> Iterator[str]:
        """The pieces of the answer, which the engine makes in a thread, ahead of the reader. If reading stops before
        the end, the engine stops at the next token, and the answer is not kept.

        On workers, and where the answer is known, tokens are not seen one by one: the whole text is one piece.
        """
        self._turns.refuse_inside("stream")
        results = self._results("generate", [[streamed.item]])
        outputs = self._turns.outputs_of("generate", streamed.call.outputs(results), is_whole=True)
        thread = threading.Thread(target=streamed.work, args=(outputs,), name="olive_ext-stream", daemon=True)
        thread.start()
        stream, tokens, length = TextStream(self.tokenizer, streamed.generation.stops), list[int](), 0
        try:
            while isinstance(item := streamed.produced.get(), int):
                tokens.append(item)
                if piece := stream.piece(tokens):
                    length += len(piece)
                    yield piece
            if isinstance(item, BaseException):
                raise item
            if rest := item.text[length:]:
                yield rest
        finally:
            streamed.is_abandoned.set()
            thread.join()


class _AbandonedError(Exception):
    """The reader has stopped."""


class _Streamed:
    """Runs the one request of a `stream`, and puts into `produced` its tokens, then its output or the error in its
    place. Raises `ConfigError` where the answer is known only after the last token."""

    def __init__(self, session: Session, request: GenerationRequest) -> None:
        if request.think_end_token is not None:
            text = "the answer is what follows the last end of the reasoning: `generate` separates them"
            raise ConfigError(text, "think_end_token", request.think_end_token)
        self.call = Call(session, to_generation)
        windows, _ = self.call.put(0, request)
        if len(windows) > 1:
            raise UnsupportedError(f"stream: the sound has {len(windows)} windows: use `generate`")
        ((key, converted),) = windows
        assert converted.generation is not None
        self.generation = converted.generation
        if (beams := self.generation.beams) is not None:
            raise UnsupportedError("a search has its answer at the end: use `generate`", "num_beams", beams.num_beams)
        self.item: KeyedRequest = key, replace(converted, generation=replace(self.generation, is_finished=self._watch))
        self.produced: SimpleQueue[int | BaseException | GenerationOutput] = SimpleQueue()
        self.is_abandoned = threading.Event()

    def work(self, outputs: Iterable[tuple[int, GenerationOutput]]) -> None:
        try:
            for _, output in outputs:
                self.produced.put(output)
        except BaseException as error:  # noqa: BLE001 - raised where the pieces are read
            self.produced.put(error)

    def _watch(self, tokens: Sequence[int]) -> bool:
        if self.is_abandoned.is_set():
            raise _AbandonedError
        self.produced.put(tokens[-1])
        is_finished = self.generation.is_finished
        return is_finished is not None and is_finished(tokens)


def _numbered(call: str, slices: Iterable[Iterable[Any]]) -> Iterator[list[tuple[int, Any]]]:
    """The requests of each slice, numbered through all. Raises `ConfigError` for a slice that is no list of these."""
    numbers = itertools.count()
    for items in slices:
        if isinstance(items, str | bytes | Mapping) or not isinstance(items, Iterable):
            kind = "text" if isinstance(items, str) else type(items).__name__
            raise ConfigError(f"{call} takes a list of requests, not one {kind}")
        yield [(number, item) for item, number in zip(items, numbers, strict=False)]

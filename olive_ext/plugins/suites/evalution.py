"""Evalution's engine interface over our sessions: `OrtEngine` for its Python interface, `run_spec` for its YAML.

To be imported inside functions only: it imports Evalution, which is an extra, takes seconds and prints a banner on
stderr. It knows the public session, and nothing below it.
"""

from __future__ import annotations

import copy
import json
import sys
import threading
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import evalution
import evalution.yaml
from evalution.config import Model
from evalution.engines import base
from evalution.engines.continuous import RequestQueue, stream_request_results

from olive_ext.config.yaml_files import WRONG_TAGS, yaml_bytes
from olive_ext.errors import ConfigError, MissingError, TaskError, UnsupportedError
from olive_ext.session import Session
from olive_ext.session import open as open_session
from olive_ext.session.requests import (
    GenerationOutput,
    GenerationRequest,
    RollingRequest,
    ScoringOutput,
    ScoringRequest,
)
from olive_ext.session.tokenizer import Tokenizer

_STABLE = ("runtime", "providers", "batching", "kv_cache", "scoring_head")
"""Facts of `Session.describe_execution` that depend on the model and the machine only."""

_SEEDS = 2**32


class OrtInferenceSession(base.BaseInferenceSession):  # type: ignore[misc] # Evalution has no types
    """One open model. Thread-safe: calls take turns, and preparing requests waits for none of them.

    `batch_size` of a call is not obeyed: the engine fills its slots from all requests that it has. Outputs carry a copy
    of their request's metadata and nothing else. Closing it closes `session`.
    """

    def __init__(self, session: Session, *, max_new_tokens: int = 256, seed: int = 0, fallback: str = "none") -> None:
        """`max_new_tokens` is for requests that name no number; `fallback` is what `describe_execution` calls so."""
        facts = session.describe_execution()
        self._session = session
        self._tokenizer, self._lock = copy.deepcopy(session.tokenizer), threading.Lock()
        """A copy, which encodes in one thread at a time: suites change it (padding, truncation), and a running
        generation must not look for stops with the changed one."""

        file = Path(session.tokenizer.where, "generation_config.json")
        config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        self._template_defaults = dict(config.get("default_chat_template_kwargs") or {})
        self._prefix_id = _prefix_id(session.tokenizer)
        self._prefix_text = session.tokenizer.decode([self._prefix_id], skip_special_tokens=False)
        self._max_new_tokens = max_new_tokens
        self._seed = seed
        self._num_sampled = count()
        self._execution = {
            "generation_backend": "olive_ext",
            "attention_backend": f"{facts['runtime']}, as the model's graph has it",
            "device": facts.get("device", next(iter(facts.get("providers", ())), None)),
            "fallback": fallback,
            "tensor_parallel_size": 1,
            **{name: facts[name] for name in _STABLE if name in facts},
        }
        """What Evalution's guide requires, without counters, seconds and capacities."""

        self.batch_size: int = facts.get("num_slots", 1)
        """Sequences that are decoded together: what suites read to size their own queues."""

        self.tokenizer = self._tokenizer.hf
        """The tokenizer for suites, as transformers made it."""

    @property
    def max_input_length(self) -> int:
        """Most tokens the model sees at once. Suites look for it under one of these names."""
        return self._session.max_length

    context_window = max_model_length = max_sequence_length = max_seq_len = max_input_length

    def resolve_batch_size(self, requests: Sequence[base.GenerationRequest]) -> int:
        """`batch_size`, whatever the requests."""
        return self.batch_size

    def prepare_requests(self, requests: Sequence[base.GenerationRequest]) -> list[base.GenerationRequest]:
        """The requests with `rendered_prompt` and `input_ids`; those that have both come back as they are. From any
        thread, also while others generate.

        Raises `ConfigError`, a ValueError, for a request with neither a prompt nor messages nor ids.
        """
        with self._lock:
            texts = [self._render(request) for request in requests]
            missing = [index for index, request in enumerate(requests) if request.input_ids is None]
            encoded = self._encode([texts[index] for index in missing])
        ids = dict(zip(missing, encoded, strict=True))
        return [
            replace(request, rendered_prompt=text, input_ids=ids.get(index, request.input_ids) or [self._prefix_id])
            for index, (request, text) in enumerate(zip(requests, texts, strict=True))
        ]

    def generate(
        self, requests: Sequence[base.GenerationRequest], *, batch_size: int | None = None
    ) -> list[base.GenerationOutput]:
        """Raises `ConfigError`, a ValueError, for sampled beams and for a request without a prompt."""
        prepared = self.prepare_requests(requests)
        outputs = self._session.generate([self._generation(request) for request in prepared])
        return [self._generated(*pair) for pair in zip(prepared, outputs, strict=True)]

    def generate_continuous(self, requests: Iterable[Item], *, batch_size: int | None = None) -> Iterator[Item]:
        """`(key, output)` in the order of completion. A request that arrives while others run takes the next free
        slot."""
        return stream("generation", requests, self._generate_arrivals)

    def loglikelihood(
        self, requests: Sequence[base.LoglikelihoodRequest], *, batch_size: int | None = None
    ) -> list[base.LoglikelihoodOutput]:
        """Raises `ConfigError`, a ValueError, for an empty continuation."""
        outputs = self._session.loglikelihood(self._scoring(requests))
        return [_scored(*pair) for pair in zip(requests, outputs, strict=True)]

    def loglikelihood_continuous(self, requests: Iterable[Item], *, batch_size: int | None = None) -> Iterator[Item]:
        """`(key, output)` in the order of completion."""
        return stream("scoring", requests, self._score_arrivals)

    def loglikelihood_rolling(
        self, requests: Sequence[base.RollingLoglikelihoodRequest], *, batch_size: int | None = None
    ) -> list[base.RollingLoglikelihoodOutput]:
        """Log-probability in nats of each whole text."""
        with self._lock:
            texts = self._contexts({request.text for request in requests if request.input_ids is None})
        # Every token is scored, after the prefix token: a BOS that the tokenizer adds is one of them.
        asked = [RollingRequest(_given(r.input_ids, texts, r.text), self._prefix_id) for r in requests]
        outputs = self._session.loglikelihood_rolling(asked)
        return [
            base.RollingLoglikelihoodOutput(output.logprob, output.token_count, dict(request.metadata))
            for request, output in zip(requests, outputs, strict=True)
        ]

    def gc(self) -> None:
        """Frees KV caches, captured steps, encoder outputs and spare memory; the weights stay."""
        self._session.release_memory()

    def close(self) -> None:
        """Releases the model. Calling it again does nothing."""
        self._session.close()

    def describe_execution(self) -> dict[str, Any]:
        """JSON-ready, and the same for every use of one model on one machine, after `close` too."""
        return dict(self._execution)

    def _generate_arrivals(self, arrivals: Arrivals) -> Iterator[Item]:
        running: dict[Hashable, Item] = {}

        def feed() -> Iterator[tuple[Hashable, GenerationRequest] | None]:
            for number, item in enumerate(arrivals.one_by_one(running)):
                if item is None:
                    yield None
                    continue
                key, request = item
                (prepared,) = self.prepare_requests([request])
                running[number] = key, prepared
                yield number, self._generation(prepared)

        for number, output in self._session.generate_continuous(feed()):
            key, request = running.pop(number)
            yield key, self._generated(request, output)

    def _score_arrivals(self, arrivals: Arrivals) -> Iterator[Item]:
        for batch in arrivals.batches():
            asked = self._scoring([request for _, request in batch])
            for index, output in self._session.as_completed("loglikelihood", [asked]):
                key, request = batch[index]
                yield key, _scored(request, output)

    def _generation(self, prepared: base.GenerationRequest) -> GenerationRequest:
        if prepared.do_sample and not prepared.temperature:
            raise ConfigError("'do_sample' = True with 'temperature' = 0: give a temperature above 0, or do not sample")
        wanted = prepared.max_new_tokens
        return GenerationRequest(
            prompt=prepared.input_ids,
            max_new_tokens=self._max_new_tokens if wanted is None else wanted,
            stop=_stops(prepared),
            temperature=prepared.temperature if prepared.do_sample else 0.0,
            num_beams=prepared.num_beams,
            # A stream of its own for each: suites repeat a prompt to get different answers.
            seed=(self._seed + next(self._num_sampled)) % _SEEDS if prepared.do_sample else 0,
        )

    def _generated(self, request: base.GenerationRequest, output: GenerationOutput) -> base.GenerationOutput:
        """The text with its special tokens, that which ended it too, cut at the first stop and stripped."""
        end = () if output.stop_id is None else (output.stop_id,)
        text = self._session.tokenizer.decode((*output.tokens, *end), skip_special_tokens=False)
        cut = min((at for stop in _stops(request) if (at := text.find(stop)) >= 0), default=len(text))
        return base.GenerationOutput(request.rendered_prompt, text[:cut].strip(), dict(request.metadata))

    def _scoring(self, requests: Sequence[base.LoglikelihoodRequest]) -> list[ScoringRequest]:
        """Context and continuation as ids; an empty context becomes the prefix token (BOS, else EOS, else PAD)."""
        with self._lock:
            contexts = self._contexts({r.context for r in requests if r.context and r.context_input_ids is None})
            texts = list(dict.fromkeys(r.continuation for r in requests if r.continuation_input_ids is None))
            continuations = dict(zip(texts, self._encode(texts), strict=True))
        return [
            ScoringRequest(
                _given(request.context_input_ids, {"": [], **contexts}, request.context) or [self._prefix_id],
                _given(request.continuation_input_ids, continuations, request.continuation),
            )
            for request in requests
        ]

    def _render(self, request: base.GenerationRequest) -> str:
        if request.rendered_prompt is not None:
            return str(request.rendered_prompt)
        if request.messages is not None:
            own = {"tokenize": False, "add_generation_prompt": request.add_generation_prompt}
            tools = {"tools": request.tools} if request.tools else {}
            options = {**self._template_defaults, **own, **(request.chat_template_kwargs or {}), **tools}
            return str(self._tokenizer.hf.apply_chat_template(request.messages, **options))
        if request.prompt is not None:
            return str(request.prompt)
        if request.input_ids:
            return self._tokenizer.decode(request.input_ids, skip_special_tokens=False)
        raise MissingError("a generation request needs a 'prompt', 'messages' or 'input_ids'")

    def _contexts(self, texts: Collection[str]) -> dict[str, Sequence[int]]:
        """Ids by text, with the tokenizer's special tokens where the text does not begin with the prefix token."""
        begun = {text for text in texts if self._prefix_text and text.startswith(self._prefix_text)}
        ids = {text: self._tokenizer.encode(text, add_special_tokens=False) for text in begun}
        return {**ids, **self._tokenizer.encode_many({*texts} - begun)}

    def _encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text without special tokens."""
        return list(self._tokenizer.hf(texts, add_special_tokens=False, verbose=False)["input_ids"]) if texts else []


def _stops(request: base.GenerationRequest) -> tuple[str, ...]:
    return tuple(stop for stop in request.stop if stop)


def _scored(request: base.LoglikelihoodRequest, output: ScoringOutput) -> base.LoglikelihoodOutput:
    return base.LoglikelihoodOutput(output.logprob, output.is_greedy, output.token_count, dict(request.metadata))


@dataclass(slots=True)  # as its base: without slots a field of that one has no default
class OrtEngine(base.BaseEngineDeviceConfig, base.SharedEngineConfig):  # type: ignore[misc] # Evalution has no types
    """Runs ONNX models on ONNX Runtime (and Hugging Face models on transformers, as `olive_ext.open` does).

    `dtype` is for Hugging Face models (a graph has its own), `padding_side` has no meaning (nothing is padded), and
    `device` ("cpu", "cuda:1") stands for a provider of that name. The other fields are as in a recipe.
    """

    execution_provider: str | list[str] | None = None
    provider_options: dict[str, Any] | list[dict[str, Any]] | None = None
    engine: dict[str, Any] | None = None

    def build(self, model: Model) -> OrtInferenceSession:
        """A session on `model.path`. `model.model_kwargs` are further arguments of `olive_ext.open`.

        Raises `ConfigError`, a ValueError, for what cannot be followed: a revision, code from the model's repository,
        arguments of the tokenizer, and a tokenizer that is an object.
        """
        refused = {
            "'revision': download it, and give its folder as 'path'": model.revision is not None,
            "'trust_remote_code': code from a model's repository is never run": self.trust_remote_code
            or model.trust_remote_code,
            "'tokenizer_kwargs': save the tokenizer with them": model.tokenizer_kwargs,
            "'tokenizer' is an object: save it, and give its folder as 'tokenizer_path'": not isinstance(
                model.tokenizer, str | Path | None
            ),
        }
        if problems := [text for text, is_given in refused.items() if is_given]:
            raise UnsupportedError("; ".join(problems))
        arguments = {
            "batch_size": self.batch_size,
            "dtype": self.dtype or "auto",
            "engine": self.engine,
            "tokenizer": model.tokenizer_path or model.tokenizer,
            "execution_provider": self.execution_provider,
            "provider_options": self.provider_options,
        }
        if self.device is not None:
            if self.execution_provider or self.provider_options:
                raise ConfigError("'device' and 'execution_provider' both say where the model runs: give one of them")
            name, _, index = self.device.partition(":")
            options = {"device_id": index} if index else None
            arguments |= {"device": self.device, "execution_provider": name, "provider_options": options}
        arguments |= model.model_kwargs
        session = open_session(model.path, **arguments)
        self.resolved_engine = type(self).__name__  # type: ignore[misc] # a slot of the base, which has no types
        return OrtInferenceSession(
            session,
            max_new_tokens=self.max_new_tokens,
            seed=self.seed or 0,
            fallback="cpu" if arguments.get("allow_cpu_fallback") else "none",
        )


def register() -> None:
    """Makes `type: OrtEngine` known to Evalution's YAML in this process, and `engines.OrtEngine` to what it emits.

    Evalution has no public way for engines of other packages: this writes into its private registry. Raises
    `ConfigError` where a release keeps none by that name; its Python interface takes `OrtEngine` all the same.
    """
    registry = getattr(evalution.yaml, "_ENGINE_REGISTRY", None)
    if not isinstance(registry, dict):
        raise ConfigError(
            f"evalution {evalution.__version__} hides its engines: use evalution.run(engine=OrtEngine(...))"
        )
    name = OrtEngine.__name__
    registry[name.lower()] = evalution.yaml._EngineSpec(factory=OrtEngine, emit_alias=name)
    setattr(evalution.engines, name, OrtEngine)


def run_spec(spec: Path) -> dict[str, Any]:
    """Runs the YAML file and returns Evalution's result, JSON-ready. Its messages and bars go to stderr.

    Raises `ConfigError` for a specification that Evalution refuses.
    """
    with redirect_stdout(sys.stderr):
        register()
        try:
            yaml_bytes(spec)
            evalution.python_from_yaml(spec)  # checks engine, model and the form of the tests; opens nothing
        except (*WRONG_TAGS, TypeError) as error:
            raise ConfigError(f"'{spec}': {error.args[0] if error.args else error}") from error
        result: dict[str, Any] = evalution.run_yaml(spec).to_dict()
    return result


def _given(ids: Sequence[int] | None, encoded: Mapping[str, Sequence[int]], text: str) -> Sequence[int]:
    return encoded[text] if ids is None else list(ids)


def _prefix_id(tokenizer: Tokenizer) -> int:
    try:
        return tokenizer.prefix_token_id
    except TaskError:
        if tokenizer.pad_token_id is None:
            raise
        return tokenizer.pad_token_id


Item = tuple[Any, Any]
"""The caller's key, and a request of Evalution."""

LINGER_S = 0.05
"""Seconds for which an idle model waits for one more request: neighbours in one batch share prefixes."""

BATCH = 2048
"""The most requests that are scored together, and that are read ahead of the model."""


class Arrivals:
    """The requests of one stream, as they come in. When the caller has closed the stream, there are no more."""

    def __init__(self, queue: RequestQueue, stop: threading.Event) -> None:
        self._queue, self._stop = queue, stop

    def batches(self) -> Iterator[list[Item]]:
        """Up to `BATCH` requests each; fewer where no other came for `LINGER_S`."""
        batch: list[Item] = []
        while not self._stop.is_set() and (batch or not self._queue.closed):
            item = self._queue.get(timeout_s=LINGER_S) if not self._queue.closed else None
            if item is not None:
                batch.append(item)
            if batch and (item is None or len(batch) == BATCH):
                yield batch
                batch = []

    def one_by_one(self, running: Sized) -> Iterator[Item | None]:
        """Every request as soon as it is there, and None where there is none while others are `running`. Ends when all
        have been answered. An idle model waits for requests that come within `LINGER_S` of each other."""
        gathers = True
        while not self._stop.is_set() and (running or not self._queue.closed):
            gathers = (gathers or not running) and not self._queue.closed
            item = self._queue.get(timeout_s=LINGER_S) if gathers else self._queue.get_nowait()
            if item is not None:
                yield item
            elif running:
                gathers = False
                yield None


def stream(name: str, requests: Iterable[Item], process: Callable[[Arrivals], Iterator[Item]]) -> Iterator[Item]:
    """`(key, output)` in the order in which `process` yields them. Nothing runs before the caller takes the first; what
    the iterable or `process` raises is raised to the caller. Closing the iterator waits for the model's next result."""

    def consume(stop: threading.Event, queue: RequestQueue, put: Callable[[Any, Any], None]) -> None:
        for key, output in process(Arrivals(queue, stop)):
            if stop.is_set():
                return  # ends the session's call, too
            put(key, output)

    yield from stream_request_results(
        requests,
        producer_name=f"olive_ext {name} requests",
        consumer_name=f"olive_ext {name}",
        process_requests=consume,
        request_queue_max_size=BATCH,
    )

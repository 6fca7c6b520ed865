"""`OrtInferenceSession`: Evalution's session contract on top of the public session. Knows no engine and no provider."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any

from evalution.engines import base

from olive_ext.backends.evalution.request_encoder import RequestEncoder
from olive_ext.backends.evalution.streaming import Arrivals, Item, Put, stream
from olive_ext.errors import ConfigError
from olive_ext.session import Session
from olive_ext.text.requests import GenerationOutput, GenerationRequest, ScoringOutput

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
        self._encoder = RequestEncoder(session.tokenizer)
        self._max_new_tokens = max_new_tokens
        self._seed = seed
        self._num_sampled = count()
        self._execution = _execution(facts, fallback)
        self.batch_size: int = facts.get("num_slots", 1)
        """Sequences that are decoded together: what suites read to size their own queues."""

        self.tokenizer = self._encoder.tokenizer.hf
        """A copy of the tokenizer for suites, as transformers made it."""

    @property
    def max_input_length(self) -> int:
        """Most tokens the model sees at once. Suites look for it under one of these names."""
        return self._session.max_length

    context_window = max_model_length = max_sequence_length = max_seq_len = max_input_length

    def resolve_batch_size(self, requests: Sequence[base.GenerationRequest]) -> int:
        """`batch_size`, whatever the requests."""
        return self.batch_size

    def prepare_requests(self, requests: Sequence[base.GenerationRequest]) -> list[base.GenerationRequest]:
        """The requests rendered and encoded; from any thread, also while others generate."""
        return self._encoder.prepare(requests)

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
        outputs = self._session.loglikelihood(self._encoder.scoring(requests))
        return [_scored(*pair) for pair in zip(requests, outputs, strict=True)]

    def loglikelihood_continuous(self, requests: Iterable[Item], *, batch_size: int | None = None) -> Iterator[Item]:
        """`(key, output)` in the order of completion."""
        return stream("scoring", requests, self._score_arrivals)

    def loglikelihood_rolling(
        self, requests: Sequence[base.RollingLoglikelihoodRequest], *, batch_size: int | None = None
    ) -> list[base.RollingLoglikelihoodOutput]:
        outputs = self._session.loglikelihood_rolling(self._encoder.rolling(requests))
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

    def _generate_arrivals(self, arrivals: Arrivals, put: Put) -> None:
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
            arrivals.check()
            key, request = running.pop(number)
            put(key, self._generated(request, output))

    def _score_arrivals(self, arrivals: Arrivals, put: Put) -> None:
        for batch in arrivals.batches():
            self._score_batch(batch, arrivals, put)

    def _score_batch(self, batch: Sequence[Item], arrivals: Arrivals, put: Put) -> None:
        def take(place: int, output: ScoringOutput) -> None:
            arrivals.check()
            key, request = batch[place]
            put(key, _scored(request, output))

        self._session.loglikelihood(self._encoder.scoring([request for _, request in batch]), on_result=take)

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


def _stops(request: base.GenerationRequest) -> tuple[str, ...]:
    return tuple(stop for stop in request.stop if stop)


def _scored(request: base.LoglikelihoodRequest, output: ScoringOutput) -> base.LoglikelihoodOutput:
    return base.LoglikelihoodOutput(output.logprob, output.is_greedy, output.token_count, dict(request.metadata))


def _execution(facts: dict[str, Any], fallback: str) -> dict[str, Any]:
    """The facts of an execution that Evalution's guide requires, without counters, seconds and capacities."""
    return {
        "generation_backend": "olive_ext",
        "attention_backend": f"{facts['runtime']}, as the model's graph has it",
        "device": facts.get("device", next(iter(facts.get("providers", ())), None)),
        "fallback": fallback,
        "tensor_parallel_size": 1,
        **{name: facts[name] for name in _STABLE if name in facts},
    }

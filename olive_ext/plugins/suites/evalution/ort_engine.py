"""`OrtEngine`: how Evalution opens a model of ours, from Python and from its YAML. Knows no request and no suite."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import evalution
import evalution.yaml
from evalution.config import Model
from evalution.engines import base

from olive_ext.config.yaml_files import yaml_bytes
from olive_ext.errors import ConfigError, UnsupportedError
from olive_ext.plugins.suites.evalution.requests import Arrivals, Item, Put, RequestEncoder, stream
from olive_ext.session import Session
from olive_ext.session import open as open_session
from olive_ext.session.requests import GenerationOutput, GenerationRequest, ScoringOutput

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
        """Log-probability in nats of each whole text."""
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
            asked = self._encoder.scoring([request for _, request in batch])
            for index, output in self._session.as_completed("loglikelihood", [asked]):
                arrivals.check()
                key, request = batch[index]
                put(key, _scored(request, output))

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
        _refuse(model, trusts_code=bool(self.trust_remote_code or model.trust_remote_code))
        arguments = {
            "batch_size": self.batch_size,
            "dtype": self.dtype or "auto",
            "engine": self.engine,
            "tokenizer": model.tokenizer_path or model.tokenizer,
            **self._placement(),
            **model.model_kwargs,
        }
        session = open_session(model.path, **arguments)
        self.resolved_engine = type(self).__name__  # type: ignore[misc] # a slot of the base, which has no types
        return OrtInferenceSession(
            session,
            max_new_tokens=self.max_new_tokens,
            seed=self.seed or 0,
            fallback="cpu" if arguments.get("allow_cpu_fallback") else "none",
        )

    def _placement(self) -> dict[str, Any]:
        """Arguments of `open` that determine where the model runs."""
        provider = {"execution_provider": self.execution_provider, "provider_options": self.provider_options}
        if self.device is None:
            return provider
        if any(provider.values()):
            raise ConfigError("'device' and 'execution_provider' both say where the model runs: give one of them")
        name, _, index = self.device.partition(":")
        options = {"device_id": index} if index else None
        return {"device": self.device, "execution_provider": name, "provider_options": options}


def _refuse(model: Model, *, trusts_code: bool) -> None:
    """Raises for what `olive_ext.open` has no argument for."""
    refused = {
        "'revision': download it, and give its folder as 'path'": model.revision is not None,
        "'trust_remote_code': code from a model's repository is never run": trusts_code,
        "'tokenizer_kwargs': save the tokenizer with them": bool(model.tokenizer_kwargs),
        "'tokenizer' is an object: save it, and give its folder as 'tokenizer_path'": not isinstance(
            model.tokenizer, str | Path | None
        ),
    }
    if problems := [text for text, is_given in refused.items() if is_given]:
        raise UnsupportedError("; ".join(problems))


def register() -> None:
    """Makes `type: OrtEngine` known to Evalution's YAML in this process, and `engines.OrtEngine` to what it emits.

    Evalution has no public way for engines of other packages: this writes into its private registry. Raises
    `ConfigError` where a release keeps none by that name; its Python interface takes `OrtEngine` all the same.
    """
    registry = getattr(evalution.yaml, "_ENGINE_REGISTRY", None)
    if not isinstance(registry, dict):
        raise ConfigError(
            f"evalution {evalution.__version__} keeps its engines where olive_ext does not find them: "
            "use evalution.run(engine=OrtEngine(...))"
        )
    spec = getattr(evalution.yaml, "_EngineSpec", None)
    name = OrtEngine.__name__
    registry[name.lower()] = OrtEngine if spec is None else spec(factory=OrtEngine, emit_alias=name)
    setattr(evalution.engines, name, OrtEngine)


def run_spec(spec: Path) -> dict[str, Any]:
    """Runs the YAML file and returns Evalution's result, JSON-ready. Its messages and bars go to stderr.

    Raises `ConfigError` for a specification that Evalution refuses.
    """
    if not spec.is_file():
        raise ConfigError(f"there is no file '{spec}'", code="not_found")
    with redirect_stdout(sys.stderr):
        register()
        try:
            yaml_bytes(spec)
            evalution.python_from_yaml(spec)  # checks engine, model and the form of the tests; opens nothing
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"'{spec}': {error.args[0] if error.args else error}") from error
        result: dict[str, Any] = evalution.run_yaml(spec).to_dict()
    return result

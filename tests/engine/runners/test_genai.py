"""The engine over generators that do less and less of what onnxruntime-genai's do, against an oracle.

What of the user's settings reaches onnxruntime-genai's configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from olive_ext.config import EngineConfig
from olive_ext.engine.engine import Engine
from olive_ext.engine.requests import FinishReason, Generation, Request, Sampling
from olive_ext.engine.runners.genai_runner import (
    Continues,
    GenaiRunner,
    GeneratorTraits,
    find_traits,
    overlay_of,
    set_providers,
)
from olive_ext.errors import ModelError, NonFiniteError, RunError
from olive_ext.model.providers.devices import Provider
from olive_ext.model.types import ModelFiles
from tests.engine.fake_runner import VOCAB, logits_of, oracle
from tests.refusals import refused

CONTEXT = 96
ALL = GeneratorTraits(Continues.BY_MANY, returns_all_rows=True, rewinds=True)
KINDS = {
    "all": ALL,
    "last row only": GeneratorTraits(Continues.BY_MANY, returns_all_rows=False, rewinds=True),
    "no rewind": GeneratorTraits(Continues.BY_MANY, returns_all_rows=True, rewinds=False),
    "one by one": GeneratorTraits(Continues.BY_ONE, returns_all_rows=True, rewinds=False),
    "one by one, rewinds": GeneratorTraits(Continues.BY_ONE, returns_all_rows=True, rewinds=True),
    "once": GeneratorTraits(Continues.NOT, returns_all_rows=False, rewinds=False),
}


class FakeGenerator:
    """Holds tokens; refuses what the traits say it cannot do, or, where `is_silent`, goes wrong without a word."""

    def __init__(self, traits: GeneratorTraits, capacity: int, *, is_silent: bool = False, window: int = 0) -> None:
        self._traits = traits
        self._capacity = capacity
        self._is_silent = is_silent
        self._window = window
        self._tokens: list[int] = []
        self._num_last = 0

    def append_tokens(self, tokens: Sequence[int]) -> None:
        assert np.asarray(tokens).dtype == np.int32
        continues = self._traits.continues
        if self._tokens and (continues is Continues.NOT or (continues is Continues.BY_ONE and len(tokens) > 1)):
            self._refuse("Continuous decoding is not supported")
        self._tokens += [int(token) for token in tokens]
        self._num_last = len(tokens)
        if len(self._tokens) > self._capacity:
            raise RuntimeError("exceeds max length")

    def get_logits(self) -> np.ndarray:
        return logits_of(self._tokens)[None, None]

    def get_output(self, name: str) -> np.ndarray:
        if name != "logits":
            raise RuntimeError(f"no output {name}")
        fits = self._traits.returns_all_rows or self._num_last == self._window
        start = len(self._tokens) - (self._num_last if fits else 1)
        return np.stack([logits_of(self._tokens[: end + 1]) for end in range(start, len(self._tokens))])[None]

    def rewind_to(self, length: int) -> None:
        if not self._traits.rewinds:
            self._refuse("RewindTo is not supported")
            return
        self._tokens = self._tokens[:length]

    def _refuse(self, message: str) -> None:
        if not self._is_silent:
            raise RuntimeError(message)
        self._tokens.append(0)


class FakeModel:
    def __init__(self, traits: GeneratorTraits, *, is_silent: bool = False, window: int = 0) -> None:
        self.context_length = CONTEXT
        self.logits_name = "logits"
        self.traits = traits
        self.capacities: list[int] = []
        self.is_broken = False
        self.is_closed = False
        self._is_silent = is_silent
        self._window = window

    def new_generator(self, capacity: int) -> FakeGenerator:
        if self.is_broken:
            raise RuntimeError("out of\nmemory")
        self.capacities.append(capacity)
        return FakeGenerator(self.traits, capacity, is_silent=self._is_silent, window=self._window)

    def find(self, tokens: int = 4, **more: object) -> GeneratorTraits:
        return find_traits(lambda: self.new_generator(CONTEXT), range(1, 1 + tokens), "logits", **more)  # type: ignore[arg-type]

    def describe(self) -> dict[str, object]:
        return {"device": "fake"}

    def close(self) -> None:
        self.is_closed = True


def requests() -> list[Request]:
    rng = np.random.default_rng(2)
    stems = [rng.integers(0, VOCAB, 12).tolist() for _ in range(3)]
    found = []
    for number in range(40):
        stem = stems[number % 3][: rng.integers(1, 13)]
        tokens = (*stem, *rng.integers(0, VOCAB, rng.integers(1, 9)).tolist())
        generation = Generation(5, frozenset({3})) if number % 4 == 0 else None
        targets = int(rng.integers(0 if generation else 1, len(tokens)))
        found.append(Request(tokens, targets, generation))
    return found


@pytest.mark.parametrize("chunk_size", [3, *(pytest.param(size, marks=pytest.mark.long) for size in (1, 64))])
@pytest.mark.parametrize("kind", KINDS)
def test_results_equal_the_oracle_whatever_generators_can_do(kind: str, chunk_size: int) -> None:
    engine = Engine(GenaiRunner(FakeModel(KINDS[kind]), {}), chunk_size)
    expected = [oracle(request) for request in requests()]
    for found in (engine.run(requests()), engine.run(requests())):
        assert [result.tokens for result in found] == [result.tokens for result in expected]
        assert [result.finish_reason for result in found] == [result.finish_reason for result in expected]
        assert [result.is_greedy for result in found] == [result.is_greedy for result in expected]
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)


class _Interrupted(FakeModel):
    """Its first generator is interrupted when it has taken tokens for the first time."""

    def new_generator(self, capacity: int) -> FakeGenerator:
        generator = super().new_generator(capacity)
        append, is_first = generator.append_tokens, len(self.capacities) == 1

        def append_tokens(tokens: Sequence[int]) -> None:
            nonlocal is_first
            append(tokens)
            if is_first:
                is_first = False
                raise KeyboardInterrupt

        generator.append_tokens = append_tokens  # type: ignore[method-assign]
        return generator


@pytest.mark.parametrize("kind", KINDS)
def test_a_generator_that_was_interrupted_does_not_count_as_an_empty_one(kind: str) -> None:
    engine, request = Engine(GenaiRunner(_Interrupted(KINDS[kind]), {}), 64), Request((1, 2, 3, 4), 2)
    with pytest.raises(KeyboardInterrupt):
        engine.run([request])
    assert engine.run([request])[0].logprobs == pytest.approx(oracle(request).logprobs, abs=1e-5)


@pytest.mark.parametrize("is_silent", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_traits_are_found_by_trying(kind: str, is_silent: bool) -> None:
    """A refusal to go on is believed, and a wrong continuation is refused."""
    model = FakeModel(KINDS[kind], is_silent=is_silent)
    if is_silent and kind == "once":
        with pytest.raises(ModelError, match="different logits for the same tokens"):
            model.find()
    else:
        assert model.find() == KINDS[kind]


def test_inputs_of_fixed_length_are_never_continued_and_are_checked_on_a_full_window() -> None:
    """A rewind that is known to go wrong later is not used either."""
    model = FakeModel(KINDS["once"], is_silent=True, window=8)
    assert model.find(8, window_size=8) == KINDS["once"]
    assert len(model.capacities) == 2
    with pytest.raises(ModelError, match="different logits for the same tokens"):
        FakeModel(KINDS["once"], is_silent=True, window=7).find(8, window_size=8)
    assert not FakeModel(ALL).find(may_rewind=False).rewinds


def test_logits_that_are_no_numbers_show_nothing_and_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeGenerator, "get_logits", lambda _: np.full((1, 1, VOCAB), np.nan, np.float32))
    with refused(NonFiniteError, "not_finite", holds="4 tokens"):
        FakeModel(ALL).find()


def test_sampling_draws_from_the_same_rows() -> None:
    request = Request((1, 2, 3), 0, Generation(6, sampling=Sampling(temperature=0.8, seed=4)))
    results = [Engine(GenaiRunner(FakeModel(traits), {}), 64).run([request])[0] for traits in KINDS.values()]
    assert {result.tokens for result in results} == {results[0].tokens}
    assert results[0].finish_reason is FinishReason.LENGTH


def test_failure_names_the_step_and_leaves_the_engine_usable_until_it_is_closed() -> None:
    model = FakeModel(ALL)
    engine = Engine(GenaiRunner(model, {}), 64)
    model.is_broken = True
    with refused(RunError, "failed", holds=("9", "0")):
        engine.run([Request(tuple(range(10)), 1)])
    model.is_broken = False
    assert engine.run(requests()[:3])[1].is_greedy == oracle(requests()[1]).is_greedy
    engine.close()
    assert model.is_closed


CPU_LAST = Provider("CPUExecutionProvider", "cpu", {}, "always last")


class FakeConfig:
    """Notes what is called, as `onnxruntime_genai.Config` would be."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []

    def clear_providers(self) -> None:
        self.calls.append(("clear",))

    def append_provider(self, name: str) -> None:
        self.calls.append(("append", name))

    def set_provider_option(self, name: str, key: str, value: str) -> None:
        self.calls.append(("option", name, key, value))


def package(folder: Path, decoder: str = "model.onnx", **config: Any) -> ModelFiles:
    (folder / "model.onnx").touch()
    (folder / decoder).touch()
    return ModelFiles(folder / decoder, folder, {"model": {"decoder": {"filename": "model.onnx", **config}}}, {}, ".")


CUDA = [("clear",), ("append", "cuda"), ("option", "cuda", "a", "1")]


@pytest.mark.parametrize(
    ("name", "origin", "calls"),
    [
        ("CUDA", "genai_config.json", []),
        ("CUDA", "default", []),
        ("CUDA", "asked", CUDA),
        ("CPU", "asked", [("clear",)]),
    ],
)
def test_package_keeps_its_own_providers_unless_others_are_asked_for(
    name: str, origin: str, calls: list[tuple[str, ...]]
) -> None:
    config, options = FakeConfig(), {} if name == "CPU" else {"a": "1"}
    asked = Provider(f"{name}ExecutionProvider", name.lower(), options, origin)
    assert set_providers(config, (asked, CPU_LAST)) == [asked.name, CPU_LAST.name]
    assert config.calls == calls


OPTIONS = {"session.intra_op.allow_spinning": "0"}


@pytest.mark.parametrize(
    ("graph", "decoder", "settings", "expected"),
    [
        ("model.onnx", {}, {}, {"decoder": {}}),
        (
            *("model.onnx", {}, {"num_threads": 3, "session_options": OPTIONS}),
            {"decoder": {"session_options": {**OPTIONS, "intra_op_num_threads": 3}}},
        ),
        ("other.onnx", {}, {}, {"decoder": {"filename": "other.onnx"}}),
        ("model.onnx", {"sliding_window": {"window_size": 8}}, {}, {"decoder": {}, "pad_token_id": -1}),
    ],
    ids=["nothing", "options", "another graph", "padding of fixed inputs is no token"],
)
def test_what_is_asked_for_is_overlaid(
    tmp_path: Path, graph: str, decoder: dict[str, Any], settings: dict[str, Any], expected: Any
) -> None:
    assert overlay_of(package(tmp_path, graph, **decoder), EngineConfig(**settings)) == {"model": expected}


def test_graph_beside_a_pipeline_cannot_run_on_genai(tmp_path: Path) -> None:
    files = package(tmp_path, "other.onnx", filename="", pipeline=[{"a": {"filename": "model.onnx"}}])
    with pytest.raises(ModelError, match="none of the graphs of the pipeline"):
        overlay_of(files, EngineConfig())

"""Beam searches over the fake runner equal a plain search over all continuations, and that equals transformers'."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from olive_ext.engine.engine import Engine
from olive_ext.engine.forms.returned import AlikeRows
from olive_ext.engine.requests import Beams, FinishReason, Generation, Hypothesis, Request
from olive_ext.engine.runners.runner import StepForm
from tests.engine.fake_runner import (
    ALIKE,
    FORMS,
    PACKED,
    RANGE,
    SINGLE,
    VOCAB,
    FakeRunner,
    logits_of,
    logprobs_of,
    oracle,
)
from tests.engine.strategies import SOURCES, TOKENS, assert_equal, texts

STOPPING = [True, False, "never"]


def plain_search(request: Request) -> list[Hypothesis]:
    """All continuations of all sequences at every step, by the rules of docs/design/engine.md."""
    generation = request.generation
    assert generation is not None
    assert generation.beams is not None
    beams, stops = generation.beams, generation.stop_ids
    running: list[tuple[float, list[int]]] = [(0.0, [])]
    done: list[Hypothesis] = []
    for length in range(1, generation.max_new_tokens + 1):
        every = [
            (np.float32(np.float32(score) + np.float32(logprob)), [*tokens, token])
            for score, tokens in running
            for token, logprob in enumerate(logprobs_of([*request.tokens, *tokens], request.source))
        ]
        every.sort(key=lambda one: -one[0])
        running = []
        for rank, (score, tokens) in enumerate(every[: max(2, 1 + len(stops)) * beams.num_beams]):
            reason = None
            if tokens[-1] in stops:
                reason = FinishReason.STOP_ID
            elif generation.is_finished is not None and generation.is_finished(tokens):
                reason = FinishReason.STOPPED
            elif length == generation.max_new_tokens:
                reason = FinishReason.LENGTH
            if reason is None:
                running.append((score, tokens))
            elif rank < beams.num_beams:
                ends = reason is FinishReason.STOP_ID
                kept, stop_id = tuple(tokens[:-1] if ends else tokens), tokens[-1] if ends else None
                done.append(Hypothesis(kept, float(score / length**beams.length_penalty), reason, stop_id))
        done = sorted(done, key=lambda one: -one.score)[: beams.num_beams]
        running = running[: beams.num_beams]
        if not running:
            break
        if len(done) == beams.num_beams:
            is_longest = beams.early_stopping == "never" and beams.length_penalty > 0
            reach = generation.max_new_tokens if is_longest else length
            if beams.early_stopping is True or running[0][0] / reach**beams.length_penalty <= done[-1].score:
                break
    return done[: beams.num_return_sequences]


def assert_found(engine: Engine, requests: Sequence[Request]) -> None:
    """Beams as the plain search, others as the oracle."""
    for found, request in zip(engine.run(requests), requests, strict=True):
        if request.generation is None or request.generation.beams is None:
            assert_equal(found, oracle(request))
            continue
        expected = plain_search(request)
        assert [one.score for one in found.hypotheses] == pytest.approx([one.score for one in expected], abs=1e-4)
        ended = [(one.tokens, one.finish_reason, one.stop_id) for one in expected]
        assert [(one.tokens, one.finish_reason, one.stop_id) for one in found.hypotheses] == ended
        assert (found.tokens, found.finish_reason, found.stop_id) == ended[0]


@st.composite
def searches(draw: st.DrawFn, most_beams: int) -> Request:
    tokens = tuple(draw(texts(1, 30)))
    num_beams = draw(st.integers(2, most_beams))
    stop_ids = frozenset(draw(st.lists(st.integers(0, VOCAB - 1), max_size=3)))
    penalty, stopping = draw(st.sampled_from([-1.0, 0.0, 0.6, 1.0, 2.5])), draw(st.sampled_from(STOPPING))
    beams = Beams(num_beams, penalty, stopping, draw(st.integers(1, num_beams)))
    number = draw(st.integers(3, VOCAB))
    is_finished = (lambda tokens: sum(tokens) % number == 0) if draw(st.booleans()) else None
    generation = Generation(draw(st.integers(1, 8)), stop_ids, is_finished=is_finished, beams=beams)
    return Request(tokens, draw(st.integers(0, len(tokens) - 1)), generation, draw(st.sampled_from(SOURCES)))


RUNNERS = [
    *[(batching, {}) for batching in FORMS if batching is not ALIKE],
    (PACKED, {"overlaps_steps": True}),
    (RANGE, {"overlaps_steps": True}),
    *[(ALIKE, {"row_mix": AlikeRows(mixes_pasts=pasts, prompts=True), "can_rewind": False}) for pasts in (False, True)],
    (SINGLE, {"chunked_prefill": False}),
    (SINGLE, {"can_rewind": False}),
]


@given(data=st.data(), num_slots=st.integers(2, 8), chunk_size=st.integers(1, 40), runner=st.sampled_from(RUNNERS))
def test_any_searches_equal_the_plain_one_beside_other_requests(
    data: st.DataObject, num_slots: int, chunk_size: int, runner: tuple[StepForm, dict[str, Any]]
) -> None:
    greedy = st.builds(Request, st.tuples(TOKENS, TOKENS), st.just(0), st.just(Generation(7)))
    scored = st.builds(Request, st.tuples(TOKENS, TOKENS, TOKENS), st.just(2))
    one = st.one_of(searches(min(num_slots, 5)), greedy, scored)
    engine = Engine(FakeRunner(num_slots, runner[0], **runner[1]), chunk_size)
    for _ in range(2):
        assert_found(engine, data.draw(st.lists(one, max_size=6)))
    engine.close()


class FakeModel(transformers.PreTrainedModel, transformers.GenerationMixin):
    """The fake runner's distributions for transformers."""

    config_class = transformers.GPT2Config
    all_tied_weights_keys: ClassVar[dict[str, str]] = {}

    def __init__(self) -> None:
        super().__init__(transformers.GPT2Config(vocab_size=VOCAB, n_layer=1, n_embd=8, n_head=1))
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        rows = np.array([logits_of(row) for row in input_ids.tolist()])
        return transformers.modeling_outputs.CausalLMOutput(logits=torch.from_numpy(rows)[:, None])


@pytest.mark.parametrize("stopping", STOPPING)
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 2.5])
def test_plain_search_is_that_of_transformers(stopping: bool | str, penalty: float) -> None:
    rng, model = random.Random(5), FakeModel()
    for _ in range(8):
        tokens = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 9)))
        num_beams, stops = rng.choice([2, 4, 5]), rng.sample(range(VOCAB), rng.randint(1, 3))
        beams = Beams(num_beams, penalty, stopping, num_beams)  # type: ignore[arg-type]
        request = Request(tokens, 0, Generation(rng.randint(1, 9), frozenset(stops), beams=beams))
        settings = transformers.GenerationConfig(
            num_beams=num_beams,
            length_penalty=penalty,
            early_stopping=stopping,
            num_return_sequences=num_beams,
            eos_token_id=stops,
            pad_token_id=stops[0],
            max_new_tokens=request.generation.max_new_tokens,  # type: ignore[union-attr]
            use_cache=False,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
        found = model.generate(torch.tensor([tokens]), generation_config=settings)
        expected = plain_search(request)
        scores = found.sequences_scores.tolist()
        assert scores == pytest.approx([one.score for one in expected], abs=1e-4)
        answers = [_until(row[len(tokens) :], stops) for row in found.sequences.tolist()]
        assert answers == [one.tokens for one in expected]


def _until(tokens: Sequence[int], stops: Sequence[int]) -> tuple[int, ...]:
    ends = [place for place, token in enumerate(tokens) if token in stops]
    return tuple(tokens[: ends[0]] if ends else tokens)


SEARCH = Generation(6, frozenset({3}), beams=Beams(4))


def test_search_that_never_stops_early_reaches_to_the_last_length_for_any_positive_penalty() -> None:
    """Random searches hardly ever end otherwise by that."""
    stops = frozenset({0, 3, 7, 8, 10, 18})
    searches = [Generation(12, stops, beams=Beams(2, penalty, "never", 2)) for penalty in (0.0, 0.6, 1.0)]
    assert_found(Engine(FakeRunner(2, PACKED), 64), [Request((at, 0), 0, one) for at in range(12) for one in searches])


def test_step_of_beams_for_which_memory_is_short_is_halved() -> None:
    engine = Engine(FakeRunner(4, PACKED, most_tokens=3), 64)
    assert_found(engine, [Request((1, 2, 3), 0, SEARCH)])
    assert engine.counters.steps_halved

"""A device whose memory the host cannot address, beside the table of agreement: what a session keeps there from one
call to the next, and what crosses."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from olive_ext.session import Session
from olive_ext.session.requests import GenerationRequest, ScoringRequest
from tests.agreement.asked import short_answers
from tests.agreement.packages import package
from tests.agreement.table import largest
from tests.device.open import open_on
from tests.exports import VOCAB, genai_export

pytestmark = [pytest.mark.webgpu, pytest.mark.slow]


@dataclass(frozen=True)
class Pair:
    """The same model on both devices."""

    device: Session
    cpu: Session

    def difference(self, requests: list[ScoringRequest], *, has_flags: bool = True) -> float:
        """The largest one between the two, in nats; greedy flags are equal."""
        pairs = list(zip(self.device.loglikelihood(requests), self.cpu.loglikelihood(requests), strict=True))
        assert not has_flags or all(one.is_greedy == other.is_greedy for one, other in pairs)
        return max(largest(one.token_logprobs, other.token_logprobs) for one, other in pairs)

    def generate(self, requests: list[GenerationRequest]) -> list[tuple[int, ...]]:
        """The tokens, which are the same on both."""
        found = [output.tokens for output in self.device.generate(requests)]
        assert found == [output.tokens for output in self.cpu.generate(requests)]
        return found


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    folder = genai_export(request.param)
    with open_on("webgpu", folder) as device, open_on("cpu", folder) as cpu:
        yield Pair(device, cpu)


def _draw(seed: int, *lengths: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(4, VOCAB) for _ in range(length)] for length in lengths]


def test_greedy_answers_of_several_rows_are_equal(pair: Pair) -> None:
    stem, *tails = _draw(2, 40, 1, 5, 9, 30, 44, 2, 3)
    requests = [GenerationRequest(stem[:20] + tail, max_new_tokens=8 + 4 * i) for i, tail in enumerate(tails)]
    before = pair.device.counters.steps
    found = pair.generate(requests)
    assert pair.device.counters.steps - before < sum(map(len, found)), "rows were not decoded together"


def test_beam_searches_are_equal_and_rows_of_the_vocabulary_stay_on_the_device(pair: Pair) -> None:
    prompts = _draw(7, 30, 4, 12)
    asked = [GenerationRequest(prompt, max_new_tokens=8, num_beams=2 + i % 2) for i, prompt in enumerate(prompts)]
    before, steps = pair.device.describe_execution()["counters"]["host_bytes"], pair.device.counters.steps
    pair.generate(asked)
    crossed = pair.device.describe_execution()["counters"]["host_bytes"] - before
    assert crossed <= (pair.device.counters.steps - steps) * 3 * (4 + 8 + 6 * (4 + 8))


def test_sampled_answers_with_equal_seeds_are_equal(pair: Pair) -> None:
    (prompt,) = _draw(3, 35)
    requests = [
        GenerationRequest(prompt, max_new_tokens=16, temperature=0.9, top_p=0.95, top_k=50, seed=seed)
        for seed in range(4)
    ]
    assert len(set(pair.generate(requests))) > 1


def test_a_rewound_slot_goes_on_from_a_shorter_prefix(pair: Pair) -> None:
    """One after the other, each request cuts what the previous one left in the slot and continues elsewhere."""
    text, *turns = _draw(4, 90, 6, 6, 6, 6)
    before = pair.device.counters.tokens_reused
    for length, turn in zip((90, 61, 30, 59), turns, strict=True):
        assert pair.difference([ScoringRequest(text[:length], turn)]) < 1e-4
    assert pair.device.counters.tokens_reused - before >= 60 + 29 + 29
    assert pair.generate([GenerationRequest(text[:45], max_new_tokens=12)])
    assert pair.difference([ScoringRequest(text, turns[0])]) < 1e-4


def test_a_fork_copies_a_busy_row_and_leaves_it_whole(pair: Pair) -> None:
    (stem, *tails) = _draw(5, 50, 1, 2, 3, 4, 5)
    before = pair.device.counters.copies
    pair.generate([GenerationRequest(stem + tail, max_new_tokens=10 + len(tail)) for tail in tails])
    assert pair.device.counters.copies - before >= 2
    assert pair.difference([ScoringRequest(stem + tail, stem[:4]) for tail in tails]) < 1e-4


def test_gc_forgets_and_the_model_goes_on(pair: Pair) -> None:
    (text,) = _draw(6, 40)
    requests = [ScoringRequest(text, [7, 8])]
    assert pair.difference(requests) < 1e-4
    pair.device.gc()
    before = pair.device.counters.tokens_reused
    assert pair.difference(requests) < 1e-4
    assert pair.device.counters.tokens_reused == before


def test_half_precision_stays_near_the_fp32_graph_on_the_cpu() -> None:
    """The CUDA target gives the same graph."""
    folder = genai_export("llama", precision="fp16", provider="webgpu")
    stem, *tails = _draw(8, 60, 3, 8, 1, 20)
    requests = [ScoringRequest(stem[: 20 + 13 * i], tail) for i, tail in enumerate(tails)]
    with open_on("webgpu", folder) as device, open_on("cpu", genai_export("llama")) as cpu:
        assert Pair(device, cpu).difference(requests, has_flags=False) < 0.1
        answers = device.generate([GenerationRequest(stem + tail, max_new_tokens=9) for tail in tails])
    assert all(1 <= len(output.tokens) <= 9 for output in answers)


def test_slots_that_were_halved_to_one_still_run() -> None:
    with open_on("webgpu", genai_export("llama"), num_slots=2) as device, open_on("cpu", genai_export("llama")) as cpu:
        device.executor.runner._kv.num_slots = 1  # type: ignore[attr-defined]
        assert all(Pair(device, cpu).generate([GenerationRequest(text, max_new_tokens=5) for text in _draw(3, 4, 9)]))


def test_short_answers_share_steps_by_rule() -> None:
    (asked,) = short_answers(package("llama-installed"))
    with open_on("webgpu", genai_export("llama"), num_slots=8) as session:
        session.loglikelihood(asked)
        facts = session.describe_execution()
    assert facts["scoring"] == "answers"
    assert facts["scoring_reason"].startswith("by rule: ")

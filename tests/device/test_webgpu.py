"""A device whose memory the host cannot address gives the CPU's numbers and tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import pytest

from olive_ext.session import Session
from olive_ext.session.requests import GenerationRequest, ScoringRequest
from tests.device.open import open_on
from tests.exports import TEXT, VOCAB, genai_export

pytestmark = [pytest.mark.webgpu, pytest.mark.slow]

WORDS = TEXT.split()


@dataclass(frozen=True)
class Pair:
    """The same model on both devices."""

    device: Session
    cpu: Session

    def score(self, requests: list[ScoringRequest]) -> float:
        """The largest difference between the two, in nats; greedy flags are equal."""
        on_device, on_cpu = self.device.loglikelihood(requests), self.cpu.loglikelihood(requests)
        assert [output.is_greedy for output in on_device] == [output.is_greedy for output in on_cpu]
        pairs = zip(on_device, on_cpu, strict=True)
        return max(float(np.abs(np.subtract(a.token_logprobs, b.token_logprobs)).max()) for a, b in pairs)

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


def test_the_model_runs_on_the_device_with_kv_in_place(pair: Pair) -> None:
    facts = pair.device.describe_execution()
    assert facts["providers"][0] == "WebGpuExecutionProvider"
    assert facts["kv_cache"] == "in_place"
    assert facts["kv_binding"].startswith("device values without address")
    assert facts["scoring_head"] == "hidden"
    assert len(facts["scored_row_products"]) == 4


def test_scores_agree_within_1e_4_nats(pair: Pair) -> None:
    stem, *tails = _draw(1, 70, *range(1, 13))
    requests = [ScoringRequest(stem[: 10 * (i % 7) + 1], tail) for i, tail in enumerate(tails)]
    requests += [ScoringRequest(stem, [token]) for token in range(4, 10)]
    assert pair.score(requests) < 1e-4


def test_rolling_agrees_within_1e_4_relative(pair: Pair) -> None:
    texts = [" ".join(WORDS[:50]), " ".join(WORDS[300:900]), "one", ""]  # the second is longer than the context
    for found, expected in zip(
        pair.device.loglikelihood_rolling(texts), pair.cpu.loglikelihood_rolling(texts), strict=True
    ):
        assert found.token_count == expected.token_count
        assert found.logprob == pytest.approx(expected.logprob, rel=1e-4)


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
        assert pair.score([ScoringRequest(text[:length], turn)]) < 1e-4
    assert pair.device.counters.tokens_reused - before >= 60 + 29 + 29
    assert pair.generate([GenerationRequest(text[:45], max_new_tokens=12)])
    assert pair.score([ScoringRequest(text, turns[0])]) < 1e-4


def test_a_fork_copies_a_busy_row_and_leaves_it_whole(pair: Pair) -> None:
    (stem, *tails) = _draw(5, 50, 1, 2, 3, 4, 5)
    before = pair.device.counters.copies
    pair.generate([GenerationRequest(stem + tail, max_new_tokens=10 + len(tail)) for tail in tails])
    assert pair.device.counters.copies - before >= 2
    assert pair.score([ScoringRequest(stem + tail, stem[:4]) for tail in tails]) < 1e-4


def test_gc_forgets_and_the_model_goes_on(pair: Pair) -> None:
    (text,) = _draw(6, 40)
    requests = [ScoringRequest(text, [7, 8])]
    assert pair.score(requests) < 1e-4
    pair.device.gc()
    before = pair.device.counters.tokens_reused
    assert pair.score(requests) < 1e-4
    assert pair.device.counters.tokens_reused == before


@pytest.mark.parametrize(
    "engine",
    [
        {"chunk_size": 1},
        {"chunk_size": 7},
        {"chunk_size": 256},
        {"num_slots": 1},
        {"num_slots": 5},
        {"graph": "untouched"},
    ],
    ids=lambda engine: "-".join(f"{key}={value}" for key, value in engine.items()),
)
def test_chunks_slots_and_the_untouched_graph_change_nothing(engine: dict[str, object]) -> None:
    stem, *tails = _draw(7, 60, 3, 8, 1, 20)
    folder = genai_export("llama")
    with open_on("webgpu", folder, **engine) as device, open_on("cpu", folder) as cpu:
        pair = Pair(device, cpu)
        assert pair.score([ScoringRequest(stem[: 20 + 13 * i], tail) for i, tail in enumerate(tails)]) < 1e-4
        pair.generate([GenerationRequest(stem + tail, max_new_tokens=9) for tail in tails])


@pytest.mark.parametrize(
    ("precision", "provider", "options", "bound"),
    [
        ("int4", "cpu", ("int4_accuracy_level=0",), 1e-4),
        ("int4", "cpu", ("int4_accuracy_level=4",), 0.5),  # activations in int8, blocked differently on each device
        ("fp16", "webgpu", (), 0.1),  # the CUDA target gives the same graph
    ],
)
def test_quantized_and_half_precision_stay_within_a_stated_bound(
    precision: str, provider: str, options: tuple[str, ...], bound: float
) -> None:
    """int4 against the same graph on the CPU; fp16 against the fp32 graph there."""
    folder = genai_export("llama", precision=precision, provider=provider, options=options)
    with ExitStack() as stack:
        device = stack.enter_context(open_on("webgpu", folder))
        cpu = stack.enter_context(open_on("cpu", folder if precision == "int4" else genai_export("llama")))
        stem, *tails = _draw(8, 60, 3, 8, 1, 20)
        requests = [ScoringRequest(stem[: 20 + 13 * i], tail) for i, tail in enumerate(tails)]
        found, expected = device.loglikelihood(requests), cpu.loglikelihood(requests)
        difference = max(
            float(np.abs(np.subtract(a.token_logprobs, b.token_logprobs)).max())
            for a, b in zip(found, expected, strict=True)
        )
        print(f"\n{precision} for {provider} {options}: {difference:.2e} nats")
        assert difference < bound
        requests_to_go_on = [GenerationRequest(stem + tail, max_new_tokens=9) for tail in tails]
        assert all(1 <= len(output.tokens) <= 9 for output in device.generate(requests_to_go_on))


def test_steps_of_few_shapes_score_and_generate_the_same() -> None:
    stem, *tails = _draw(9, 70, *range(1, 13))
    scored = [ScoringRequest(stem[: 10 * (i % 7) + 1], tail) for i, tail in enumerate(tails)]
    asked = [GenerationRequest(tail, max_new_tokens=7) for tail in tails[:7]]
    folder = genai_export("llama")
    with open_on("webgpu", folder, strict_shapes=True) as device, open_on("cpu", folder) as cpu:
        pair = Pair(device, cpu)
        assert pair.score(scored) < 1e-4
        assert all(pair.generate(asked))
        facts = device.describe_execution()
        assert (facts["shapes"], facts["shapes_late"]) == ("bucketed", 0)


def test_tree_batches_are_refused_where_the_host_cannot_move_their_cells() -> None:
    with open_on("webgpu", genai_export("llama"), scoring="tree") as session:
        facts = session.describe_execution()
    assert facts["scoring"] == "rows"
    assert any("moved in the host's memory" in note for note in facts["notes"])


def test_slots_that_were_halved_to_one_still_run() -> None:
    with open_on("webgpu", genai_export("llama"), num_slots=2) as device, open_on("cpu", genai_export("llama")) as cpu:
        device.executor.runner._kv.num_slots = 1  # type: ignore[attr-defined]
        assert all(Pair(device, cpu).generate([GenerationRequest(text, max_new_tokens=5) for text in _draw(3, 4, 9)]))

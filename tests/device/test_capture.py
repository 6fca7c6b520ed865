"""Decoding steps that the provider records and replays say what plain ones say."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from olive_ext.config import ModelSettings
from olive_ext.engine.engine import Engine, open_engine
from olive_ext.engine.requests import Generation, Request, Sampling
from olive_ext.errors import ProviderError
from olive_ext.model import resolve
from olive_ext.session.requests import GenerationRequest, ScoringRequest
from tests.device.open import LIBRARY, STEP, open_on
from tests.exports import VOCAB, export, genai_export
from tests.refusals import refused


def _export() -> Path:
    """For graph capture: its mask is computed on the device."""
    return genai_export("llama", None, "fp32", "webgpu", ("use_webgpu_fp32=true", "enable_webgpu_graph=true"))


def _prompts() -> list[GenerationRequest]:
    rng = random.Random(0)
    texts = [[rng.randrange(4, VOCAB) for _ in range(rng.randint(1, 50))] for _ in range(9)]
    sampled = [GenerationRequest(text, max_new_tokens=6, temperature=0.8, seed=3) for text in texts[:3]]
    return [*(GenerationRequest(text, max_new_tokens=rng.randint(2, 14)) for text in texts), *sampled]


@pytest.mark.webgpu
@pytest.mark.parametrize("strict_shapes", [False, True])
@pytest.mark.parametrize("num_slots", [1, 4])
def test_captured_steps_find_the_same_tokens_and_scores(num_slots: int, strict_shapes: bool) -> None:
    path = _export()
    with (
        open_on("webgpu", path, num_slots=num_slots) as plain,
        open_on("webgpu", path, num_slots=num_slots, graph_capture=True, strict_shapes=strict_shapes) as captured,
    ):
        for _ in range(2):
            assert captured.generate(_prompts()) == plain.generate(_prompts())
        asked = [ScoringRequest(prompt.prompt, [7, 8, 9]) for prompt in _prompts()]
        pairs = zip(captured.loglikelihood(asked), plain.loglikelihood(asked), strict=True)
        assert max(float(np.abs(np.subtract(a.token_logprobs, b.token_logprobs)).max()) for a, b in pairs) < 1e-5
        facts = captured.describe_execution()
        assert facts["steps_captured"] > 0
        assert facts["shapes_late"] == 0
        assert facts["shapes"] == ("bucketed" if strict_shapes else "bucketed where rows decode")


@pytest.mark.webgpu
def test_longer_requests_move_the_slots_and_are_captured_anew() -> None:
    path = _export()
    rng = random.Random(1)
    long = [
        GenerationRequest([rng.randrange(4, VOCAB) for _ in range(length)], max_new_tokens=5) for length in (9, 90, 300)
    ]
    with open_on("webgpu", path) as plain, open_on("webgpu", path, graph_capture=True) as captured:
        for prompt in long:
            asked = [prompt, GenerationRequest(list(prompt.prompt)[1:], max_new_tokens=5)]
            assert captured.generate(asked) == plain.generate(asked)


PACKED = "llama-genai-0.18-fp16-webgpu"


def _engine(**engine: object) -> Engine:
    settings = {"num_slots": 12, "chunk_size": STEP, **engine}
    given = {"model": str(export(PACKED).path), "provider_libraries": LIBRARY, "engine": settings}
    return open_engine(resolve(ModelSettings.of({**given, "execution_provider": "webgpu"})))


def _requests() -> list[Request]:
    """Thirty prompts of 129 to 264 tokens that share beginnings: their answers end at different steps, and some are
    drawn, from the rows' own logits and not from those of idle rows."""
    rng = random.Random(5)
    draw = lambda count: tuple(rng.randrange(4, VOCAB) for _ in range(count))  # noqa: E731
    stem = draw(245)
    texts = [(*stem[: rng.randrange(1, 12) ** 2 + 125], *draw(rng.randrange(3, 20))) for _ in range(30)]
    drawn = [Sampling(0.9, seed=4) if number % 5 == 4 else Sampling() for number in range(30)]
    return [
        Request(text, 0, Generation(rng.randrange(5, 40), sampling=how)) for text, how in zip(texts, drawn, strict=True)
    ]


@pytest.mark.webgpu
@pytest.mark.parametrize("how", [{}, {"overlaps_steps": False}, {"blocks": 6}])
def test_captured_packed_steps_find_what_plain_ones_find(how: dict[str, int]) -> None:
    """To the bit: with idle rows, beside prompts that come in between, overlapped and serial, and where sequences give
    up their blocks for want of memory."""
    engine = {name: value for name, value in how.items() if name != "blocks"}
    plain, captured = _engine(**engine), _engine(graph_capture=True, **engine)
    for one in (plain, captured) if "blocks" in how else ():
        one.release_memory()
        one.runner._kv._most_blocks = how["blocks"]  # type: ignore[attr-defined]
    expected, given = plain.run(_requests()), captured.run(_requests())
    facts = captured.describe()
    pairs = zip(_requests(), expected, strict=True)
    texts = [Request((*one.tokens, *answer.tokens), len(answer.tokens)) for one, answer in pairs]
    scores = [[one.logprobs for one in engine.run(texts[:6])] for engine in (plain, captured)]
    preemptions = captured.counters.preemptions
    plain.close()
    captured.close()
    assert [one.tokens for one in given] == [one.tokens for one in expected]
    assert [list(one) for one in scores[0]] == [list(one) for one in scores[1]]
    assert facts["batching"] == "packed"
    assert facts["steps_captured"] > 1
    assert facts["steps_replayed"] > 20
    assert (preemptions > 0) == ("blocks" in how)


@pytest.mark.webgpu
def test_a_graph_that_needs_the_host_is_refused() -> None:
    with refused(ProviderError, "provider", holds="graph capture"):
        open_on("webgpu", genai_export("llama"), graph_capture=True)

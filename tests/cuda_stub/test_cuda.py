"""The CUDA provider as far as it shows without a GPU: where nodes run, what crosses, how often kernels are launched.

Numbers mean nothing here: kernels do nothing, and a token that is drawn is whatever lay in memory. See
.ci/cuda_stub/make.py.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

import olive_ext
from olive_ext.errors import ProviderError
from olive_ext.session import Session
from olive_ext.text.requests import GenerationRequest
from tests.cuda_stub.counts import counts
from tests.exports import VOCAB, export, genai_export

pytestmark = [pytest.mark.cuda_stub, pytest.mark.slow]

MODELS = {
    "llama-genai-0.18-fp16-cuda": 36,
    "qwen3-genai-0.14-fp16-cuda": 38,
    "qwen3-genai-0.18-fp16-cuda": 38,
    "qwen3-genai-0.18-bf16-cuda": 38,
    "llama-mobius-fp16-cuda": 36,
    "llama-genai-0.18-int4-cuda": 47,
    "qwen3-genai-0.18-kvfp8-cuda": 41,
    "llama-genai-0.18-paged-cuda": 38,
}
"""Export -> most launches of a step, of its two layers and the scoring head together (counted, ONNX Runtime 1.31.1)."""

SLOTS, CHUNK = 4, 64
STEPS_OF_ONE_TEXT = 2
"""A text of up to 100 tokens behind nothing, in chunks of 64."""


@pytest.fixture(scope="module", params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def session(name: str) -> Iterator[Session]:
    engine = {"num_slots": SLOTS, "chunk_size": CHUNK}
    with olive_ext.open(export(name).path, execution_provider="cuda", engine=engine) as session:
        yield session


def _texts(count: int, length: int, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(4, VOCAB) for _ in range(length)] for _ in range(count)]


def test_caches_are_written_in_place_on_the_device(session: Session) -> None:
    facts = session.describe_execution()
    assert facts["providers"][0] == "CUDAExecutionProvider"
    assert facts["kv_cache"] == "in_place"
    assert facts["num_slots"] == SLOTS


def test_scoring_sends_a_few_numbers_a_target_to_the_host(name: str, session: Session) -> None:
    texts = _texts(6, 80)
    session.loglikelihood([(text[:60], text[60:]) for text in texts])  # what is allocated is allocated now
    session.gc()
    counts()
    before = session.describe_execution()["counters"]["steps"]
    session.loglikelihood([(text[:60], text[60:]) for text in texts])
    num_steps = session.describe_execution()["counters"]["steps"] - before
    found = counts()
    num_targets = 20 * len(texts)
    assert found.wrong_copies == 0
    assert num_steps == STEPS_OF_ONE_TEXT * len(texts)
    assert found.launches <= MODELS[name] * num_steps
    assert found.bytes_to_host <= num_targets * (4 + 8)  # a log-probability in fp32 and a greedy token in int64
    assert found.largest_to_host <= 20 * 8
    assert found.copies_to_host <= 3 * num_steps
    assert found.copies_to_device <= 8 * num_steps
    assert found.bytes_to_device <= 1_200 * num_steps  # token ids, masks, indices; nothing of KV's size


def test_greedy_decoding_sends_a_token_a_row_to_the_host(session: Session) -> None:
    prompts = _texts(SLOTS, 12, seed=2)
    asked = [GenerationRequest(prompt, max_new_tokens=6) for prompt in prompts]
    counts()
    _generate(session, asked)
    found = counts()
    assert found.wrong_copies == 0
    assert found.largest_to_host <= SLOTS * 8


def test_shared_prefixes_are_copied_on_the_device(session: Session) -> None:
    (stem,) = _texts(1, 70, seed=3)
    asked = [GenerationRequest([*stem, *tail], max_new_tokens=4) for tail in _texts(4, 5, seed=4)]
    before = session.describe_execution()["counters"]["copies"]
    counts()
    _generate(session, asked)
    found = counts()
    assert session.describe_execution()["counters"]["copies"] > before
    assert found.wrong_copies == 0
    assert found.largest_to_host <= SLOTS * 8


def _generate(session: Session, asked: list[GenerationRequest]) -> None:
    """Tokens are whatever lay in memory: one that is no token at all ends the call, which then shows too little."""
    try:
        session.generate(asked)
    except OverflowError:
        pytest.skip("the memory that a token was read from held something else")


@pytest.mark.parametrize("export_name", ["llama-genai-0.18", "lfm2-genai-0.18", "gpt_oss-genai-0.18"])
def test_attention_that_would_fall_to_the_cpu_is_refused_by_name(export_name: str) -> None:
    with pytest.raises(ProviderError) as caught:
        olive_ext.open(export(export_name).path, execution_provider="cuda")
    message = str(caught.value)
    for words in ("GroupQueryAttention '", "of float32", "past_key_values.", "takes float16 and bfloat16"):
        assert words in message


def test_allowed_fallback_runs_the_whole_model_on_the_cpu_with_its_numbers() -> None:
    path = genai_export("llama", "0.18.0")
    pairs = [(text[:60], text[60:]) for text in _texts(4, 80)]
    engine = {"scoring": "rows", "chunk_size": CHUNK}
    with olive_ext.open(path, execution_provider="cpu", engine=engine) as session:
        expected = session.loglikelihood(pairs)
    with olive_ext.open(path, execution_provider="cuda", allow_cpu_fallback=True, engine=engine) as session:
        assert session.describe_execution()["providers"] == ["CPUExecutionProvider"]
        assert session.loglikelihood(pairs) == expected


def test_comparison_with_a_reference_keeps_rows_of_logits_on_the_device(name: str) -> None:
    path, text = export(name).path, _texts(4, 60, seed=5)
    with olive_ext.open(path, execution_provider="cuda", engine={"num_slots": 1}, reference=path) as session:
        session.loglikelihood([(one[:50], one[50:]) for one in text])
        counts()
        session.gc()
        session.loglikelihood([(one[:50], one[50:]) for one in text])
        found = counts()
    assert found.wrong_copies == 0
    assert found.largest_to_host < VOCAB * 4, "no row of logits"

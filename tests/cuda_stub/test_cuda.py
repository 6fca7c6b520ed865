"""The CUDA provider as far as it shows without a GPU: where nodes run, what crosses, how often kernels are launched.

Numbers mean nothing here: kernels do nothing, and a token that is drawn is whatever lay in memory. See
.ci/cuda_stub/make.py.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import EPFail, InvalidGraph, NotImplemented

import olive_ext
from olive_ext.check.model_check import check_model
from olive_ext.config import EvaluationConfig, ModelSettings
from olive_ext.engine.engine import open_runner
from olive_ext.engine.forms import packed
from olive_ext.engine.forms.attention_trial import attends_otherwise
from olive_ext.engine.forms.kv_store import COPIED_BYTES
from olive_ext.engine.reference import DivergenceKernels
from olive_ext.engine.step import Copy, LogitsRow, Row, Step
from olive_ext.errors import ConfigError, ProviderError
from olive_ext.model import ResolvedModel, resolve
from olive_ext.records import Form
from olive_ext.session import Session
from tests.cuda_stub.counts import Counts, counts
from tests.engine.runners.ort.test_block_tables import POOLS, Paged
from tests.exports import VOCAB, export, genai_export
from tests.graph.index_bytes import index_bytes
from tests.refusals import assert_says, refused

pytestmark = pytest.mark.cuda_stub

LLAMA = "llama-genai-0.18-fp16-cuda"
MODELS = {
    "llama-genai-0.18-fp16-cuda": {"rows": 36, "packed": 38},
    "qwen3-genai-0.14-fp16-cuda": {"rows": 38, "packed": 44},
    "qwen3-genai-0.18-fp16-cuda": {"rows": 38, "packed": 40},
    "qwen3-genai-0.18-bf16-cuda": {"rows": 38, "packed": 40},
    "llama-mobius-fp16-cuda": {"rows": 36, "packed": 38},
    "llama-genai-0.18-int4-cuda": {"rows": 47, "packed": 49},
    "qwen3-genai-0.18-kvfp8-cuda": {"rows": 41, "packed": 42},
    "llama-genai-0.18-paged-cuda": {"packed": 38},
}
"""Export -> most launches of a step, of its two layers and the scoring head together (counted, ONNX Runtime 1.31.1)."""

SLOTS, CHUNK, TEXT = 4, 64, 80
STEPS = {"rows": lambda count: 2 * count, "packed": lambda count: -(-count * (TEXT - 1) // CHUNK)}
"""Steps for texts behind nothing: each in steps of its own, or all of them in full steps."""


@pytest.fixture(scope="module", params=[(name, form) for name, forms in MODELS.items() for form in forms], ids="-".join)
def opened(request: pytest.FixtureRequest) -> tuple[str, str]:
    name, form = request.param
    return name, form


@pytest.fixture(scope="module")
def name(opened: tuple[str, str]) -> str:
    return opened[0]


@pytest.fixture(scope="module")
def form(opened: tuple[str, str]) -> str:
    return opened[1]


@pytest.fixture(scope="module")
def session(name: str, form: str) -> Iterator[Session]:
    engine = {"num_slots": SLOTS, "chunk_size": CHUNK, "scoring": "rows" if form == "rows" else "auto"}
    with olive_ext.open(export(name).path, execution_provider="cuda", engine=engine) as session:
        yield session


def _model(name: str, form: str = "packed") -> ResolvedModel:
    engine = {"num_slots": SLOTS, "scoring": "rows" if form == "rows" else "auto"}
    return resolve(ModelSettings(model=str(export(name).path), execution_provider="cuda", engine=engine))


def _texts(count: int, length: int, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(4, VOCAB) for _ in range(length)] for _ in range(count)]


def scored(session: Session, pairs: Sequence[Any]) -> tuple[dict[str, Any], int, Counts]:
    """What is said of a session that scores pairs, once for what is allocated then; its steps of the second time, and
    what they launch and send."""
    session.loglikelihood(pairs)
    session.gc()
    counts()
    before = session.describe_execution()["counters"]["steps"]
    session.loglikelihood(pairs)
    facts, found = session.describe_execution(), counts()
    assert found.wrong_copies == 0
    return facts, facts["counters"]["steps"] - before, found


def _pairs(count: int, context: int, length: int) -> list[tuple[list[int], list[int]]]:
    return [(text[:context], text[context:]) for text in _texts(count, length)]


def test_scoring_in_the_form_that_was_chosen_sends_a_few_numbers_a_target_to_the_host(
    name: str, form: str, session: Session
) -> None:
    """Its caches are written in place."""
    facts, num_steps, found = scored(session, _pairs(6, 60, TEXT))
    assert facts["scoring"] == form, facts["notes"]
    assert facts["providers"][0] == "CUDAExecutionProvider"
    assert (facts["kv_cache"], facts["num_slots"]) == ("in_place", SLOTS)
    assert num_steps == STEPS[form](6)
    assert found.launches <= MODELS[name][form] * num_steps
    assert found.bytes_to_host <= 20 * 6 * (4 + 8)  # a log-probability in fp32 and a greedy token in int64
    assert found.largest_to_host <= 20 * 8
    assert found.copies_to_host <= 3 * num_steps
    assert found.copies_to_device <= 8 * num_steps
    assert found.bytes_to_device <= 1_200 * num_steps  # token ids, masks, indices; nothing of KV's size


def test_caches_are_zeroed_on_the_device(form: str, name: str) -> None:
    """Nothing of their size lies in the host's memory or crosses."""
    runner, _ = open_runner(_model(name, form))
    runner.reserve(64)
    counts()
    runner.reserve(256)
    found = counts()
    runner.close()
    assert found.bytes_to_device < 1_000
    assert found.launches > 0


def test_decoding_step_fed_with_the_last_ones_tokens_sends_a_token_a_row_to_the_host(name: str, form: str) -> None:
    runner, _ = open_runner(_model(name, form))
    runner.reserve(16)
    prompts = [Row(slot, 0, (4, 5, 6)) for slot in range(SLOTS)]
    for rows in [prompts] if form == "packed" else [[row] for row in prompts]:
        runner.run(Step(tuple(rows)))
    reads = tuple(LogitsRow(slot, 0) for slot in range(SLOTS))
    steps = [Step(tuple(Row(slot, past, (7,)) for slot in range(SLOTS)), reads) for past in (3, 4)]
    runner.run(steps[0])
    counts()
    runner.run(replace(steps[1], follows=tuple(range(SLOTS))))
    found = counts()
    runner.close()
    assert found.wrong_copies == 0
    assert found.launches <= MODELS[name][form]
    assert found.bytes_to_host == SLOTS * 8
    assert found.copies_to_device <= 5
    assert found.bytes_to_device <= 700


CANDIDATE_LAUNCHES, FORK_LAUNCHES = 11, {"rows": 0, "packed": 8}
"""Launches that find a step's candidates, and those that make all its forks in place: slots are copied without a
kernel, half filled blocks of four tensors by one run."""


def test_step_of_beams_sends_candidates_to_the_host_and_forks_on_the_device(name: str, form: str) -> None:
    """Four sequences, three of which were forked from the first before it."""
    runner, _ = open_runner(_model(name, form))
    runner.reserve(16)
    reads = tuple(LogitsRow(slot, 0) for slot in range(SLOTS))

    def search(past: int, copies: tuple[Copy, ...]) -> Step:
        rows = tuple(Row(slot, past, (7,)) for slot in range(SLOTS))
        probes = tuple((slot, 7) for slot in range(SLOTS))
        return Step(rows, reads, probes, beams=tuple(range(SLOTS)), num_candidates=2 * SLOTS, copies=copies)

    forks = tuple(Copy(0, slot, 3) for slot in range(1, SLOTS))
    runner.run(Step((Row(0, 0, (4, 5, 6)),), (LogitsRow(0, 2),), ((0, 7),), beams=(0,), num_candidates=2 * SLOTS))
    runner.run(search(3, forks))
    runner.run(search(4, ()))
    counts()
    runner.run(search(4, ()))
    plain = counts()
    runner.run(search(3, forks))
    forked = counts()
    runner.close()
    for found in (plain, forked):
        assert found.wrong_copies == 0
        assert found.bytes_to_host == SLOTS * (4 + 8 + 2 * SLOTS * (4 + 8))  # probe, greedy token; candidates
        assert found.bytes_to_device <= 400
    assert plain.launches <= MODELS[name][form] + CANDIDATE_LAUNCHES
    assert forked.launches - plain.launches == FORK_LAUNCHES[form]


def test_blocks_of_every_type_are_copied_in_short_rows_by_indices_made_on_the_device(tmp_path: Path) -> None:
    """A Gather and a ScatterND for each pool, and a Mul and an Add for each end and number of rows of a position; the
    host sends 64 positions twice, and CUDA has kernels for all of it."""
    paged = Paged(tmp_path, "cuda")
    num_opened = len(paged.opened)
    paged.kv.bind(paged.share())
    rows = paged.share()
    counts()
    paged.kv.bind(rows)
    found = counts()
    num_parts = len({pool.words[1] for pool in paged.kv._pools})
    assert found.wrong_copies == 0
    assert found.launches == 2 * len(POOLS) + 4 * num_parts
    assert found.bytes_to_device == 2 * 8 * (18 + 2 + 44)
    (session,) = paged.opened[num_opened:]
    assert index_bytes(session) == {"Gather": COPIED_BYTES, "ScatterND": COPIED_BYTES}


def test_recording_sends_records_and_no_rows_of_logits_to_the_host() -> None:
    """Of a vocabulary that is worth a record: the tiny one is kept whole."""
    rows, form = 6, Form(4096, 64, 32, 0)
    runner, _ = open_runner(_model(LLAMA))
    divergence = DivergenceKernels.at(runner)
    logits = ort.OrtValue.ortvalue_from_numpy(np.zeros((rows, form.vocab_size), np.float32), "cuda", 0)
    divergence.record(logits, form, np.random.default_rng(0))
    counts()
    divergence.record(logits, form, np.random.default_rng(1))  # other draws: the same ones would not be sent again
    found = counts()
    runner.close()
    assert found.wrong_copies == 0
    assert found.bytes_to_host == rows * ((64 + 32) * (8 + 4) + 4)  # ids in int64, log-probabilities, the tail
    assert found.bytes_to_device == rows * 32 * 4


def test_rows_of_the_vocabulary_that_nobody_samples_from_stay_on_the_device_in_few_shapes() -> None:
    engine = {"num_slots": SLOTS, "chunk_size": CHUNK, "shapes": "bucketed"}
    with olive_ext.open(export(LLAMA).path, execution_provider="cuda", engine=engine) as session:
        assert scored(session, _pairs(4, 50, 60))[2].largest_to_host < VOCAB * 4


def test_cudnn_makes_no_plan_for_every_length_of_a_prompt() -> None:
    """The variable is read when the provider comes up: without the session's setting it would be absent."""
    with olive_ext.open(export(LLAMA).path, execution_provider="cuda"):
        assert os.environ["ORT_ENABLE_CUDNN_FLASH_ATTENTION"] == "0"


@pytest.mark.parametrize("export_name", ["llama-genai-0.18", "lfm2-genai-0.18", "gpt_oss-genai-0.18"])
def test_attention_that_would_fall_to_the_cpu_is_refused_by_name(export_name: str) -> None:
    facts = ("GroupQueryAttention '", "of float32", "past_key_values.", "float16 and bfloat16")
    with refused(ProviderError, "provider", holds=facts):
        olive_ext.open(export(export_name).path, execution_provider="cuda")


def test_allowed_fallback_runs_the_whole_model_on_the_cpu_with_its_numbers() -> None:
    path = genai_export("llama", "0.18.0")
    pairs = _pairs(4, 60, 80)
    engine = {"scoring": "rows", "chunk_size": CHUNK}
    with olive_ext.open(path, execution_provider="cpu", engine=engine) as session:
        expected = session.loglikelihood(pairs)
    with olive_ext.open(path, execution_provider="cuda", allow_cpu_fallback=True, engine=engine) as session:
        assert session.describe_execution()["providers"] == ["CPUExecutionProvider"]
        assert session.loglikelihood(pairs) == expected


def test_comparison_with_a_reference_keeps_rows_of_logits_on_the_device(name: str) -> None:
    path = export(name).path
    with olive_ext.open(path, execution_provider="cuda", engine={"num_slots": 1}, reference=path) as session:
        assert scored(session, _pairs(4, 50, 60))[2].largest_to_host < VOCAB * 4, "no row of logits"


@pytest.mark.parametrize(
    ("export_name", "words"),
    [
        (
            LLAMA,
            ("placement", "predicted: by the types of attention", "tried: auto: if attention"),
        ),
        ("llama-genai-0.18", ("cannot run on the cuda device alone", "takes float16 and bfloat16")),
    ],
)
def test_check_says_where_attention_would_run(export_name: str, words: tuple[str, ...]) -> None:
    path = str(export(export_name).path)
    config = EvaluationConfig.parse({"tasks": ["a"], "model": {"path": path}, "execution_provider": "cuda"})
    findings = check_model(config)
    said = "\n".join([findings.text(), *findings.problems])
    assert all(word in said for word in words), said


def test_verification_refuses_kernels_that_do_nothing() -> None:
    """Both graphs compute nothing, and are equal."""
    given = {"tasks": ["a"], "model": {"path": str(export(LLAMA).path)}, "execution_provider": "cuda"}
    (error,) = check_model(EvaluationConfig.parse(given), verify=True).errors
    assert_says(error, "provider", holds=("cuda", "computes nothing"))


@pytest.mark.parametrize("name", MODELS)
def test_trials_refuse_kernels_that_do_nothing(name: str, verdicts: list[str | None]) -> None:
    """Attention by itself differs from numpy's; scores that are equal for all texts are no agreement."""
    verdicts.clear()
    with olive_ext.open(export(name).path, execution_provider="cuda", engine={"num_slots": SLOTS}):
        pass
    assert all(verdicts)
    said = "\n".join(filter(None, verdicts))
    assert "attention over a paged cache is " in said
    assert "as if this device computed nothing" in said


def test_refused_trials_leave_single_rows_and_their_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a trial finds becomes the note on the form, where its verdict is heard."""
    monkeypatch.setattr(packed, "attends_otherwise", attends_otherwise)
    with olive_ext.open(export(LLAMA).path, execution_provider="cuda", engine={"num_slots": SLOTS}) as session:
        facts = session.describe_execution()
    assert facts["batching"] != "packed"
    assert any("attention over a paged cache is" in note for note in facts["notes"]), facts["notes"]


def test_refused_trials_close_a_graph_that_has_no_other_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """A paged export is held against numpy as a rewritten graph is, and refused by name."""
    monkeypatch.setattr(packed, "attends_otherwise", attends_otherwise)
    with refused(ProviderError, "provider", holds=("attention over a paged cache is", "no other attention")):
        olive_ext.open(export("llama-genai-0.18-paged-cuda").path, execution_provider="cuda")


MOST_TRIAL_LAUNCHES = 56
"""Of the trial of one kind of attention by itself: six runs, and two caches that are zeroed (counted, ONNX Runtime
1.31.1)."""


def test_trial_of_attention_takes_few_launches() -> None:
    """Counted around the trial alone, on an opened model."""
    model, found = _model(LLAMA), list[Counts]()

    def counted(*given: Any) -> None:
        counts()
        attends_otherwise(*given)
        found.append(counts())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "attends_otherwise", counted)
        runner, _ = open_runner(model)
    runner.close()
    assert found[0].wrong_copies == 0
    assert found[0].launches <= MOST_TRIAL_LAUNCHES


def _refusing(monkeypatch: pytest.MonkeyPatch, error: Exception, *, is_trial: bool) -> None:
    """Has ONNX Runtime refuse graphs with paged attention, as releases do that lack its kernel: the model's, or that
    of attention by itself."""

    class Refusing(ort.InferenceSession):  # type: ignore[misc]
        def __init__(self, content: bytes, *given: Any, **more: Any) -> None:
            if b"PagedAttention" in content and (b"input_ids" in content) != is_trial:
                raise error
            super().__init__(content, *given, **more)

    monkeypatch.setattr(ort, "InferenceSession", Refusing)


REFUSALS = {
    "inputs": InvalidGraph("Node has input size 17 not in range [min=8, max=10]"),
    "provider": NotImplemented("Failed to find kernel for PagedAttention in CUDAExecutionProvider"),
    "device": EPFail("no such attention"),
}


@pytest.mark.parametrize("is_trial", [False, True], ids=["model", "trial"])
@pytest.mark.parametrize("error", REFUSALS.values(), ids=REFUSALS)
def test_refused_graph_leaves_rows_and_its_reason_once(
    error: Exception, is_trial: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever ONNX Runtime calls it, also where steps were to be captured; asked for by name it is an error."""
    monkeypatch.setattr(packed, "attends_otherwise", attends_otherwise)
    _refusing(monkeypatch, error, is_trial=is_trial)
    path = export(LLAMA).path
    with olive_ext.open(path, execution_provider="cuda") as session:
        facts = session.describe_execution()
    assert facts["providers"][0] == "CUDAExecutionProvider"
    assert facts["batching"] != "packed"
    assert len([note for note in facts["notes"] if str(error) in note]) == 1, facts["notes"]
    with refused(ConfigError, "wrong_value", "engine.scoring", holds=('"packed"', str(error))):
        olive_ext.open(path, execution_provider="cuda", engine={"scoring": "packed"})

"""Packed steps on a device whose kernel computes them (WebGPU): within what single rows differ from the CPU in fp16."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from olive_ext.config import ModelSettings
from olive_ext.engine.engine import open_runner
from olive_ext.engine.forms.attention_trial import attends_otherwise
from olive_ext.engine.forms.paged_attention import KERNELS
from olive_ext.errors import ProviderError
from olive_ext.model import resolve
from olive_ext.session import Session
from olive_ext.session.requests import GenerationRequest
from tests.device.open import LIBRARY, STEP, open_on
from tests.engine.forms.test_attention_trial import FLOAT16, trial_of
from tests.exports import VOCAB, export
from tests.refusals import refused

pytestmark = pytest.mark.webgpu

NAME = "llama-genai-0.18-fp16-webgpu"


def _pairs() -> list[tuple[list[int], list[int]]]:
    """Six questions behind a stem longer than a step, each with three answers of one to five tokens."""
    rng = random.Random(3)
    words = lambda count: [rng.randrange(4, VOCAB) for _ in range(count)]  # noqa: E731
    stem = words(40)
    contexts = [stem + words(rng.randrange(5, 20)) for _ in range(6)]
    return [(context, words(rng.randrange(1, 6))) for context in contexts for _ in range(3)]


def _prompts() -> list[GenerationRequest]:
    return [GenerationRequest(context, max_new_tokens=6) for context, _ in _pairs()[::3]]


def _scores(session: Session) -> np.ndarray:
    return np.array([x for output in session.loglikelihood(_pairs()) for x in output.token_logprobs])


def _open(device: str, **engine: Any) -> Session:
    return open_on(device, export(NAME).path, num_slots=6, **engine)


def test_packed_fp16_scores_are_as_near_to_the_cpu_as_single_rows() -> None:
    with _open("cpu", scoring="rows") as session:
        cpu = _scores(session)
    with _open("webgpu", scoring="rows") as session:
        rows, by_rows = _scores(session), session.describe_execution()
    with _open("webgpu") as session:
        packed, facts = _scores(session), session.describe_execution()
        generated = session.generate(_prompts())
    assert (by_rows["scoring"], facts["scoring"]) == ("rows", "packed")
    assert facts["counters"]["steps"] < by_rows["counters"]["steps"] / 2
    assert facts["counters"]["copies"] > 0
    assert np.abs(packed - rows).max() < 0.01
    assert np.abs(packed - cpu).max() <= 1.2 * np.abs(rows - cpu).max()
    with _open("webgpu", scoring="rows") as session:
        expected = session.generate(_prompts())
    same = sum(one.tokens == other.tokens for one, other in zip(generated, expected, strict=True))
    assert same >= 5, "fp16 may part at a near tie"


def test_beams_over_blocks_are_those_over_slots_but_for_near_ties_of_fp16() -> None:
    """Three sequences each, of which all name the stem's blocks; the rest of a half filled one is copied at every fork.
    Scores are compared, too: of the best sequences, where they are the same."""
    asked = [replace(request, num_beams=3) for request in _prompts()]
    found = []
    for scoring in ("packed", "rows"):
        with _open("webgpu", scoring=scoring) as session:
            found.append([output.sequences[0] for output in session.generate(asked)])
            assert session.counters.copies > 6
    same = [pair for pair in zip(*found, strict=True) if pair[0].tokens == pair[1].tokens]
    assert len(same) >= 5
    assert max(abs(one.score - other.score) for one, other in same) < 0.01


def test_attention_over_blocks_is_numpys_and_a_missing_window_is_seen() -> None:
    """Three blocks out of order and 80 rows, in steps of the size that this device takes; its kernel has no window."""
    engine = {"num_slots": 3, "chunk_size": STEP, "scoring": "rows"}
    settings = {"model": export(NAME).path, "execution_provider": "webgpu", "provider_libraries": LIBRARY}
    runner, _ = open_runner(resolve(ModelSettings.of({**settings, "engine": engine})))
    kernel = KERNELS["webgpu"]
    for how in ({}, {"rotated": 16}, {"sinks": True}):
        assert attends_otherwise(runner, [trial_of(elem_type=FLOAT16, kernel=kernel, **how)], STEP) is None
    windowed = attends_otherwise(runner, [trial_of(elem_type=FLOAT16, kernel=kernel, local_window_size=128)], STEP)
    runner.close()
    assert windowed is not None
    assert "attention over a paged cache is 0." in windowed


def test_a_paged_export_whose_window_the_kernel_ignores_is_refused(tmp_path: Path) -> None:
    """The export's own node is held against numpy: one that this kernel computes opens, one with a window does not."""
    folder = shutil.copytree(export("llama-genai-0.18-paged-webgpu").path, tmp_path / "model")
    model = onnx.load(folder / "model.onnx")
    for node in model.graph.node:
        for entry in node.attribute:
            if entry.name == "local_window_size":
                entry.i = 100
    onnx.save(model, folder / "model.onnx")
    with refused(ProviderError, "provider", holds=("attention over a paged cache is", "no other attention")):
        open_on("webgpu", folder)
    open_on("webgpu", export("llama-genai-0.18-paged-webgpu").path).close()

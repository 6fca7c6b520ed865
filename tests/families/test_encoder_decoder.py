"""Encoder-decoders beside the table of agreement: mistakes, requests of lm-eval, and comparison with a reference."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

import olive_ext
from olive_ext.backends.lm_eval import OrtLM
from olive_ext.errors import ModelError, OliveExtError, TaskError
from olive_ext.session import Session
from olive_ext.session.requests import GenerationRequest, ScoringRequest, SourceInput
from tests.agreement.asked import sources as sources_of
from tests.exports import VOCAB, hf_model
from tests.exports.genai import genai_export
from tests.exports.optimum import optimum_export
from tests.refusals import refused

FRAMES = np.zeros((80, 3000), np.float32)
SHORT = GenerationRequest(source=FRAMES[:, :100], max_new_tokens=4)
GIVEN: list[tuple[str, Any, str, str, Any]] = [
    ("t5", "a prompt", "unsupported", "", "source"),
    ("t5", GenerationRequest(source=FRAMES), "wrong_value", "source", "array"),
    ("whisper", GenerationRequest(source="a text"), "wrong_value", "source", "array of floats"),
    ("whisper", SHORT, "unsupported", "", ("[80, 100]", "[80, 3000]")),
]


@pytest.mark.exporters
@pytest.mark.parametrize(("family", "request_", "code", "field", "holds"), GIVEN)
def test_request_that_does_not_fit_the_encoder_is_refused(
    family: str, request_: Any, code: str, field: str, holds: Any
) -> None:
    with olive_ext.open(optimum_export(family)) as session, refused(OliveExtError, code, field, holds=holds):
        session.generate([request_])


@pytest.mark.exporters
def test_text_alone_has_no_likelihood() -> None:
    with olive_ext.open(optimum_export("t5")) as session, refused(TaskError, "unsupported"):
        session.loglikelihood_rolling(["a text"])


@pytest.mark.exporters
def test_decoder_without_its_encoder_is_refused(tmp_path: Path) -> None:
    without = shutil.ignore_patterns("encoder_model.onnx", "decoder_model.onnx", "decoder_model_merged.onnx")
    shutil.copytree(optimum_export("t5"), tmp_path / "model", ignore=without)
    with refused(ModelError, "unsupported", holds="'encoder_attention_mask'"):
        olive_ext.open(tmp_path / "model")


@pytest.mark.exporters
def test_lm_eval_gets_the_answers_that_its_own_backend_gives() -> None:
    pairs = [("Ann sees the blue", " stone"), ("Bob carries a heavy wheel", " number 3"), ("", " garden")]
    asked = [Instance("loglikelihood", {}, pair, index, ("t", index, 1)) for index, pair in enumerate(pairs)]
    stops = {"until": ["\n\n"], "max_gen_toks": 6}
    texts = [
        Instance("generate_until", {}, (pair[0], stops), index, ("t", index, 1)) for index, pair in enumerate(pairs[:2])
    ]
    reference = HFLM(pretrained=str(hf_model("marian")), device="cpu", dtype="float32", batch_size=1)
    with OrtLM(str(optimum_export("marian"))) as lm:
        found = lm.loglikelihood(asked, disable_tqdm=True)
        said = lm.generate_until(texts, disable_tqdm=True)
    for ours, theirs in zip(found, reference.loglikelihood(asked, disable_tqdm=True), strict=True):
        assert ours == (pytest.approx(theirs[0], abs=1e-4), theirs[1])
    for ours, theirs in zip(said, reference.generate_until(texts, disable_tqdm=True), strict=True):
        assert ours
        assert theirs.startswith(ours)  # max_gen_toks counts the source's tokens as well in HFLM


def _rounded(source: Path, folder: Path) -> Path:
    """A copy of a package with the graphs' matrices rounded to 81 values."""
    shutil.copytree(source, folder)
    for file in folder.glob("*.onnx"):
        proto = onnx.load(str(file))
        for tensor in proto.graph.initializer:
            values = onnx.numpy_helper.to_array(tensor)
            if values.dtype == np.float32 and values.ndim == 2:
                step = np.abs(values).max() / 40
                tensor.CopyFrom(onnx.numpy_helper.from_array(np.round(values / step) * step, tensor.name))
        onnx.save(proto, str(file))
    return folder


def _all_logprobs(session: Session, source: SourceInput) -> np.ndarray:
    """Of every token of the vocabulary as the first of an answer."""
    asked = [ScoringRequest("", [token], source=source) for token in range(VOCAB)]
    return np.array([output.logprob for output in session.loglikelihood(asked)])


@pytest.mark.exporters
def test_divergence_from_a_reference_is_that_of_every_token_scored_by_both(tmp_path: Path) -> None:
    reference, candidate = optimum_export("t5"), _rounded(optimum_export("t5"), tmp_path / "rounded")
    sources = sources_of(False)
    with olive_ext.open(reference) as one, olive_ext.open(candidate) as other:
        pairs = [(_all_logprobs(one, source), _all_logprobs(other, source)) for source in sources]
    expected = [float((np.exp(p) * (p - q)).sum()) for p, q in pairs]
    with olive_ext.open(candidate, reference=reference) as both:
        outputs = both.loglikelihood([ScoringRequest("", [5], source=source) for source in sources])
    found = [float(output.compared.kl[0]) for output in outputs if output.compared is not None]
    assert found == pytest.approx(expected, rel=1e-3)
    assert min(expected) > 1e-4


def test_lm_eval_hears_that_a_model_of_sound_takes_no_text() -> None:
    request = Instance("loglikelihood", {}, ("a text", " stone"), 0)
    with (
        OrtLM(str(genai_export("whisper", "0.18.0"))) as lm,
        refused(TaskError, "unsupported", holds="sound"),
    ):
        lm.loglikelihood([request], disable_tqdm=True)

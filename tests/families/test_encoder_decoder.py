"""Encoder-decoders of three exporters give the numbers of Hugging Face transformers, whatever is shared.

What each passes its decoder differs: cross-attention KV by the encoder (onnxruntime-genai's builder), by a decoder
without a past or the branch of a merged one (optimum), or the encoder's states alone (mobius).
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

import olive_ext
from olive_ext.backends.lm_eval import OrtLM
from olive_ext.config import EvaluationConfig
from olive_ext.errors import ConfigError, ModelError, OliveExtError, TaskError
from olive_ext.run import evaluate
from olive_ext.session import Session
from olive_ext.session.requests import GenerationRequest, ScoringRequest, SourceInput
from tests.agreement.reference import EOS, largest_difference
from tests.backends.local_tasks import write_tasks
from tests.exports import VOCAB, hf_model
from tests.exports.genai import genai_export
from tests.exports.mobius import mobius_export
from tests.exports.optimum import optimum_export

EXPORTS = {
    "whisper-genai": (lambda: genai_export("whisper", "0.18.0"), None),
    "whisper-optimum": (lambda: optimum_export("whisper"), None),
    "whisper-optimum-merged": (lambda: optimum_export("whisper"), "decoder_model_merged.onnx"),
    "whisper-mobius": (lambda: mobius_export("whisper"), None),
    "t5-optimum": (lambda: optimum_export("t5"), None),
    "t5-optimum-merged": (lambda: optimum_export("t5"), "decoder_model_merged.onnx"),
    "t5-mobius": (lambda: mobius_export("t5"), None),
    "marian-optimum": (lambda: optimum_export("marian"), None),
}


IN_DEFAULT_RUN = {"whisper-genai"}
"""The others need exporters that are fetched and large: `python -m pytest -m exporters`."""


def _marked(name: str) -> object:
    return pytest.param(name, marks=pytest.mark.slow if name in IN_DEFAULT_RUN else pytest.mark.exporters)


@pytest.fixture(scope="module", params=map(_marked, EXPORTS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _open(name: str, **engine: object) -> Session:
    make, file = EXPORTS[name]
    return olive_ext.open(make(), onnx_file_name=file, engine=engine)


@cache
def _sources(takes_features: bool) -> list[SourceInput]:
    rng = np.random.default_rng(1)
    if takes_features:
        return [rng.normal(size=(80, 3000)).astype(np.float32) for _ in range(3)]
    return [rng.integers(4, VOCAB, length).tolist() for length in (5, 9, 40)]


def _family(name: str) -> str:
    return name.split("-")[0]


class Reference:
    """The Hugging Face model, one whole forward pass for each request."""

    def __init__(self, folder: Path) -> None:
        config = transformers.AutoConfig.from_pretrained(folder)
        self.takes_features = config.model_type == "whisper"
        self.start = config.decoder_start_token_id
        load = transformers.AutoModelForSpeechSeq2Seq if self.takes_features else transformers.AutoModelForSeq2SeqLM
        self._model = load.from_pretrained(folder, dtype=torch.float32).eval()
        self._encoded: dict[bytes, object] = {}

    def _logprobs(self, source: SourceInput, tokens: Sequence[int]) -> torch.Tensor:
        key = np.array(source).tobytes()
        with torch.inference_mode():
            if key not in self._encoded:
                self._encoded[key] = self._model.get_encoder()(torch.tensor(source)[None])
            given = torch.tensor([list(tokens)])
            logits = self._model(encoder_outputs=self._encoded[key], decoder_input_ids=given).logits
        return logits[0].double().log_softmax(-1)

    def score(self, source: SourceInput, context: Sequence[int], target: Sequence[int]) -> list[float]:
        logprobs_TV = self._logprobs(source, [*context, *target])
        return [logprobs_TV[len(context) - 1 + index, token].item() for index, token in enumerate(target)]

    def greedy(
        self, source: SourceInput, prompt: Sequence[int], num_tokens: int, processors: Sequence[Any] = ()
    ) -> list[int]:
        """The greedy answer, each token behind transformers' logits `processors`."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + num_tokens and tokens[-1] != EOS:
            scores = self._logprobs(source, tokens)[-1:]
            for processor in processors:
                scores = processor(torch.tensor([tokens]), scores)
            tokens.append(int(scores.argmax()))
        return [token for token in tokens[len(prompt) :] if token != EOS]

    def continues(self, source: SourceInput, prompt: Sequence[int], tokens: Sequence[int], num_tokens: int) -> bool:
        """Whether `tokens` are what greedy decoding of at most `num_tokens` gives: each is the argmax behind those
        before it, and a shorter answer is followed by the end-of-sequence token."""
        best = self._logprobs(source, [*prompt, *tokens]).argmax(-1).tolist()[len(prompt) - 1 :]
        return best[:-1] == list(tokens) and (len(tokens) == num_tokens or best[-1] == EOS)


@cache
def _expected_scores(family: str) -> list[list[float]]:
    reference = _reference(family)
    return [reference.score(request.source, request.context, request.target) for request in _requests(reference)]


def _to_generate(reference: Reference) -> list[tuple[SourceInput, list[int]]]:
    prompts = [[reference.start], [reference.start, 30], [reference.start, 30, 40, 50]]
    return [(source, prompt) for prompt in prompts for source in _sources(reference.takes_features)]


@cache
def _reference(family: str) -> Reference:
    return Reference(hf_model(family))


def _requests(reference: Reference) -> list[ScoringRequest]:
    """Contexts that begin alike behind sources that alternate: 30 targets, three sources."""
    rng = random.Random(2)
    draw = lambda count: [rng.randrange(4, VOCAB) for _ in range(count)]  # noqa: E731
    stem = [reference.start, *draw(12)]
    sources = _sources(reference.takes_features)
    return [
        ScoringRequest(stem[: rng.randint(1, 13)] + draw(rng.randint(0, 4)), draw(rng.randint(1, 9)), sources[i % 3])
        for i in range(30)
    ]


@pytest.mark.parametrize(("num_slots", "chunk_size", "graph"), [(1, 5, "scoring_head"), (3, 64, "untouched")])
def test_targets_behind_interleaved_sources_within_1e_4_nats(
    name: str, num_slots: int, chunk_size: int, graph: str
) -> None:
    requests = _requests(_reference(_family(name)))
    with _open(name, num_slots=num_slots, chunk_size=chunk_size, graph=graph) as session:
        found = session.loglikelihood(requests)
        counters = session.counters
        execution = session.describe_execution()
    assert largest_difference(found, _expected_scores(_family(name))) < 1e-4
    assert counters.tokens_fed == counters.tokens_distinct < counters.tokens_naive
    assert execution["encoder_runs"] == 3
    assert execution["batching"] == ("alike" if num_slots > 1 else "single")


@pytest.mark.parametrize("num_slots", [1, 3])
def test_greedy_generations_of_20_tokens_are_equal(name: str, num_slots: int) -> None:
    reference = _reference(_family(name))
    asked = _to_generate(reference)
    with _open(name, num_slots=num_slots) as session:
        found = session.generate([GenerationRequest(p, max_new_tokens=20, source=s) for s, p in asked])
        assert num_slots > 1 or session.counters.prefix_hits == 6  # of several slots one may be empty
    assert all(reference.continues(*pair, output.tokens, 20) for pair, output in zip(asked, found, strict=True))


def test_source_of_an_earlier_call_is_not_encoded_again(name: str) -> None:
    request = _requests(_reference(_family(name)))[0]
    with _open(name, num_slots=2) as session:
        first = session.loglikelihood([request])
        assert session.loglikelihood([request]) == first
        assert session.describe_execution()["encoder_runs"] == 1


@pytest.mark.exporters
def test_text_is_encoded_for_the_encoder_and_the_decoder_begins_as_configured() -> None:
    reference = _reference("marian")
    with _open("marian-optimum", num_slots=1) as session:
        ids = session.tokenizer.encode("Ann sees the blue stone")
        target = session.tokenizer.encode("the old cat", add_special_tokens=False)
        (found,) = session.loglikelihood([ScoringRequest("", "the old cat", "Ann sees the blue stone")])
        (generated,) = session.generate([GenerationRequest(source="Ann sees the blue stone", max_new_tokens=8)])
    assert found.token_logprobs == pytest.approx(reference.score(ids, [reference.start], target), abs=1e-4)
    assert reference.continues(ids, [reference.start], generated.tokens, 8)


@pytest.mark.exporters
def test_request_that_does_not_fit_the_encoder_is_refused_by_name() -> None:
    with _open("t5-optimum") as session:
        with pytest.raises(ConfigError, match="encoder-decoder: 'source' must be a text or token ids"):
            session.generate(["a prompt"])
        with pytest.raises(ConfigError, match="an array was given; the encoder of this model takes a text"):
            session.generate([GenerationRequest(source=np.zeros((80, 3000), np.float32))])
        with pytest.raises(TaskError, match="no likelihood of a text alone"):
            session.loglikelihood_rolling(["a text"])
    with _open("whisper-optimum") as session:
        with pytest.raises(ConfigError, match="takes an array of floats"):
            session.generate([GenerationRequest(source="a text")])
        with pytest.raises(OliveExtError, match=r"\[80, 100\].* features \[80, 3000\]"):
            session.generate([GenerationRequest(source=np.zeros((80, 100), np.float32), max_new_tokens=4)])


@pytest.mark.exporters
def test_decoder_without_its_encoder_is_refused(tmp_path: Path) -> None:
    for file in optimum_export("t5").iterdir():
        if file.name not in ("encoder_model.onnx", "decoder_model.onnx", "decoder_model_merged.onnx"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ModelError, match=r"takes 'encoder_attention_mask' of an encoder, and none was found"):
        olive_ext.open(tmp_path)


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
    sources = _sources(False)
    with olive_ext.open(reference) as one, olive_ext.open(candidate) as other:
        pairs = [(_all_logprobs(one, source), _all_logprobs(other, source)) for source in sources]
    expected = [float((np.exp(p) * (p - q)).sum()) for p, q in pairs]
    with olive_ext.open(candidate, reference=reference) as both:
        outputs = both.loglikelihood([ScoringRequest("", [5], source=source) for source in sources])
    found = [float(output.compared.kl[0]) for output in outputs if output.compared is not None]
    assert found == pytest.approx(expected, rel=1e-3)
    assert min(expected) > 1e-4


@pytest.mark.exporters
def test_evaluation_beside_a_reference_says_the_same_in_both_modes(tmp_path: Path) -> None:
    reference, candidate = optimum_export("t5"), _rounded(optimum_export("t5"), tmp_path / "rounded")
    given = {
        "include_path": str(write_tasks(tmp_path / "tasks")),
        "bootstrap_iters": 0,
        "model": {"path": str(candidate)},
    }

    def told(mode: str, *tasks: str) -> dict[tuple[str, str, str], float]:
        against = {"path": str(reference), "mode": mode, "records_dir": str(tmp_path / "records")}
        report = evaluate(EvaluationConfig.parse({**given, "tasks": list(tasks), "reference": against}))
        return {(metric.task, metric.metric, metric.filter): metric.value for metric in report.metrics}

    resident, recorded = (told(mode, "tiny_choice", "tiny_generate") for mode in ("resident", "recorded"))
    assert resident == pytest.approx(recorded, rel=1e-3, abs=1e-6)
    for task in ("tiny_choice", "tiny_generate", "all"):
        assert resident[task, "kl_mean", "none"] > 1e-4
    with pytest.raises(TaskError, match="scores whole texts; an encoder-decoder cannot"):
        told("recorded", "tiny_rolling")


@pytest.mark.slow
def test_lm_eval_is_told_that_a_model_of_sound_takes_no_text() -> None:
    request = Instance("loglikelihood", {}, ("a text", " stone"), 0)
    with (
        OrtLM(str(genai_export("whisper", "0.18.0"))) as lm,
        pytest.raises(TaskError, match="the task gives text only; the encoder of this model takes sound"),
    ):
        lm.loglikelihood([request], disable_tqdm=True)

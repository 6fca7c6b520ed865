"""Sessions beside a reference on real exports, against float64 numpy over the full logits of both models."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import psutil
import pytest

import olive_ext
from olive_ext.config import ModelSettings
from olive_ext.engine.requests import NUMBERS
from olive_ext.errors import ConfigError, RecordsError
from olive_ext.records import Records
from olive_ext.session import Session
from tests.exports import TEXT, VOCAB, genai_export, hf_model
from tests.refusals import refused

WORDS = TEXT.split()
FORMS = ["onnx", "hf"]


def reference_path(form: str) -> Path:
    return hf_model("llama") if form == "hf" else genai_export("llama")


def candidate_path() -> Path:
    return genai_export("llama", precision="int4")


def pairs(count: int = 60) -> list[tuple[list[int], list[int]]]:
    """Shared stems, short and long targets."""
    rng = random.Random(4)
    stem = [rng.randrange(4, VOCAB) for _ in range(60)]
    draw = lambda most: [rng.randrange(4, VOCAB) for _ in range(rng.randint(1, most))]  # noqa: E731
    return [(stem[: rng.randint(1, 60)] + draw(9), draw(12)) for _ in range(count)]


@functools.cache
def full_logits(path: Path) -> Any:
    """A function from tokens to log-probabilities [S, V] in float64: the file as it is, one pass, nothing shared."""
    session = ort.InferenceSession(str(path / "model.onnx"), providers=["CPUExecutionProvider"])
    graph = onnx.load(str(path / "model.onnx"), load_external_data=False).graph
    shapes = {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim] for i in graph.input}

    def run(tokens: Sequence[int]) -> np.ndarray:
        feeds = {}
        for name, shape in shapes.items():
            if name == "input_ids":
                feeds[name] = np.array([tokens], np.int64)
            elif name == "attention_mask":
                feeds[name] = np.ones((1, len(tokens)), np.int64)
            elif name == "position_ids":
                feeds[name] = np.arange(len(tokens))[None]
            else:
                feeds[name] = np.zeros((1, shape[1], 0, shape[3]), np.float32)
        logits = session.run(["logits"], feeds)[0][0].astype(np.float64)
        below = logits - logits.max(-1, keepdims=True)
        return below - np.log(np.exp(below).sum(-1, keepdims=True))

    return run


def expected(context: Sequence[int], target: Sequence[int], reference: Path, candidate: Path) -> dict[str, np.ndarray]:
    tokens = [*context, *target]
    rows = slice(len(context) - 1, len(tokens) - 1)
    p, q = full_logits(reference)(tokens)[rows], full_logits(candidate)(tokens)[rows]
    places = np.arange(len(target))
    return {
        "kl": (np.exp(p) * (p - q)).sum(-1),
        "kl_reverse": (np.exp(q) * (q - p)).sum(-1),
        "reference_logprobs": p[places, target],
        "reference_top_logprobs": p.max(-1),
        "top_logprobs": q[places, p.argmax(-1)],
        "same_top": p.argmax(-1) == q.argmax(-1),
        "reference_is_greedy": p.argmax(-1) == target,
        "targets": np.array(target),
        "positions": len(context) + places,
    }


INT4_ATOL = 0.06
"""int4 kernels round activations, by steps' shapes: a candidate's numbers in another step differ by this much."""


@pytest.fixture(scope="module", params=FORMS)
def beside(request: pytest.FixtureRequest) -> Iterator[Session]:
    with olive_ext.open(candidate_path(), reference=reference_path(request.param)) as session:
        yield session


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("family", "precision", "atol"),
    [pytest.param("qwen3", "fp32", 2e-4, marks=pytest.mark.long), ("llama", "int4", INT4_ATOL)],
)
def test_pair_equals_numpy_over_both_models_full_logits(form: str, family: str, precision: str, atol: float) -> None:
    candidate = genai_export(family, precision=precision)
    with olive_ext.open(candidate, reference=reference_path(form)) as session:
        outputs = session.loglikelihood(pairs())
    num_equal = num_flags = 0
    for (context, target), output in zip(pairs(), outputs, strict=True):
        for name, values in expected(context, target, genai_export("llama"), candidate).items():
            found = getattr(output.compared, name)
            if values.dtype == np.bool_:
                num_equal, num_flags = num_equal + int((found == values).sum()), num_flags + len(values)
            else:
                is_exact = name.startswith("reference")
                np.testing.assert_allclose(found, values, atol=1e-4 if is_exact else atol, err_msg=name)
        np.testing.assert_array_equal(output.compared.kl, output.compared.kl_lower)
    assert num_equal >= num_flags * (1 if precision == "fp32" else 0.98)


def test_scores_and_answers_are_what_they_are_without_a_reference(beside: Session) -> None:
    with olive_ext.open(candidate_path()) as alone:
        wanted, answers = alone.loglikelihood(pairs()), alone.generate([WORDS[0], " ".join(WORDS[:30])])
    assert [output.token_logprobs for output in beside.loglikelihood(pairs())] == [o.token_logprobs for o in wanted]
    assert [o.tokens for o in beside.generate([WORDS[0], " ".join(WORDS[:30])])] == [o.tokens for o in answers]


def test_reference_beside_answers_as_it_does_alone(beside: Session) -> None:
    with olive_ext.open(genai_export("llama")) as alone:
        for found, wanted in zip(beside.reference.loglikelihood(pairs(9)), alone.loglikelihood(pairs(9)), strict=True):
            assert found.logprob == pytest.approx(wanted.logprob, abs=1e-4)
        assert beside.reference.generate([WORDS[0]])[0].tokens == alone.generate([WORDS[0]])[0].tokens
    compared = beside.loglikelihood(pairs(9))
    for found, output in zip(beside.reference.loglikelihood(pairs(9)), compared, strict=True):
        np.testing.assert_allclose(found.token_logprobs, output.compared.reference_logprobs, atol=1e-4)
    beside.reference.close()
    assert beside.loglikelihood(pairs(2))


def test_the_graph_as_it_is_and_onnxruntime_genai_are_compared_too() -> None:
    kl = []
    for engine in ({}, {"graph": "untouched"}, {"runtime": "genai"}):
        with olive_ext.open(candidate_path(), engine=engine, reference=genai_export("llama")) as session:
            outputs = [output.compared for output in session.loglikelihood(pairs(20))]
            kl.append(np.concatenate([compared.kl for compared in outputs if compared is not None]))
    for other in kl[1:]:
        np.testing.assert_allclose(other, kl[0], atol=INT4_ATOL)


def test_records_that_another_process_wrote_are_a_reference(tmp_path: Path) -> None:
    with olive_ext.open(genai_export("llama"), isolation="process", record_to=tmp_path) as session:
        recorded = session.loglikelihood(pairs(2))
        records = session.records
        loaded = psutil.Process(session.executor._crew.workers[0].pid).memory_maps()
        assert not [one for one in loaded if "torch" in Path(one.path).name]  # 3 s of the processor
    with olive_ext.open(genai_export("llama"), reference=records) as session:
        outputs = session.loglikelihood(pairs(2))
    for output, said in zip(outputs, recorded, strict=True):
        assert output.compared is not None
        np.testing.assert_allclose(output.compared.reference_logprobs, said.token_logprobs, atol=1e-6)


def test_short_records_are_unbiased_and_later_runs_reuse_them(tmp_path: Path) -> None:
    asked = {"folder": tmp_path, "top": 12, "drawn": 12}
    with olive_ext.open(genai_export("llama"), record_to=asked) as session:
        session.loglikelihood(pairs())
    with olive_ext.open(genai_export("llama"), record_to=asked) as session:
        # The vocabulary of 1024 is kept whole, however little is asked for.
        assert session.records.form.is_whole
        session.loglikelihood(pairs())
        assert session.counters.tokens_fed == 0
        records = Records.read(session.records.folder)
    with olive_ext.open(candidate_path(), reference=records) as session, refused(RecordsError, "records", holds="1"):
        session.loglikelihood([([5, 6, 7], [8])])


def test_records_of_numbers_that_were_mended_since_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed = []
    for numbers in (NUMBERS - 1, NUMBERS):
        monkeypatch.setattr("olive_ext.session.local.NUMBERS", numbers)
        with olive_ext.open(genai_export("llama"), record_to=tmp_path) as session:
            session.loglikelihood(pairs())
            fed.append(session.counters.tokens_fed)
    assert fed[0] == fed[1] > 0


def test_other_tokenizers_are_refused_by_name_before_anything_runs(tmp_path: Path) -> None:
    from tests.session.tiny import byte_level

    byte_level().hf.save_pretrained(tmp_path)
    with refused(ConfigError, "not_comparable"):
        olive_ext.open(candidate_path(), reference={"model": genai_export("llama"), "tokenizer": str(tmp_path)})
    with olive_ext.open(genai_export("llama"), tokenizer=tmp_path, record_to=tmp_path / "records") as session:
        session.loglikelihood(pairs(1))
        folder = session.records.folder
    with refused(ConfigError, "not_comparable"):
        olive_ext.open(candidate_path(), reference=Records.read(folder))


def test_a_reference_is_run_as_the_model_is_where_it_does_not_say_otherwise() -> None:
    provider = {"execution_provider": "cpu", "provider_options": {"a": "1"}}
    own = ModelSettings.of({"model": "a", **provider, "max_length": 9, "engine": {"num_threads": 2, "num_slots": 3}})
    taken = own.of_reference("b")
    assert taken.provider_options == {"a": "1"}
    assert not taken.trust_remote_code
    assert own.model_copy(update={"trust_remote_code": True}).of_reference("b").trust_remote_code
    assert (taken.model, taken.kind, taken.execution_provider, taken.max_length) == ("b", "auto", "cpu", 9)
    assert (taken.engine.num_threads, taken.engine.num_slots) == (2, "auto")
    other = own.of_reference({"model": "b", "execution_provider": "cuda", "max_length": 5, "dtype": None})
    assert (other.execution_provider, other.provider_options, other.max_length) == ("cuda", None, 5)

"""The quickstart's model against its quantized forms: distances, flips and intervals as plain passes over both give
them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from olive_ext.report import Report

QUICKSTART = Path(__file__).resolve().parents[2] / "recipes" / "quickstart"
FLOAT = QUICKSTART / "model"
TASK = "quickstart_choice"
NUM_DOCUMENTS = 60
QUANTIZED = {"int8": (8, 32), "int4 of 32": (4, 32), "int4 of 128": (4, 128)}

pytestmark = pytest.mark.slow

Logprobs = Callable[[list[int]], np.ndarray]
"""Token ids to log-probabilities of the next token, [positions, vocabulary]."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The float model as a graph, and that quantized."""
    from olive.model import HfModelHandler
    from olive.passes.olive_pass import create_pass_from_dict
    from olive.passes.onnx.kquant_quantization import OnnxKQuantQuantization
    from olive.passes.onnx.model_builder import ModelBuilder

    folder = tmp_path_factory.mktemp("quantized")
    build = create_pass_from_dict(ModelBuilder, {"precision": "fp32"}, disable_search=True)
    built = build.run(HfModelHandler(str(FLOAT)), str(folder / "float"))
    paths = {"float": Path(built.model_path).parent}
    for name, (bits, size) in QUANTIZED.items():
        config = {"bits": bits, "block_size": size}
        quantize = create_pass_from_dict(OnnxKQuantQuantization, config, disable_search=True)
        paths[name] = Path(quantize.run(built, str(folder / name)).model_path).parent
    return paths


def evaluated(model: Path, **reference: Any) -> Report:
    from olive_ext.config import EvaluationConfig
    from olive_ext.run import evaluate

    values = {
        "model": {"path": str(model)},
        "tasks": [TASK],
        "include_path": str(QUICKSTART / "tasks"),
        "limit": NUM_DOCUMENTS,
        "bootstrap_iters": 0,
        "reference": {"path": str(FLOAT), "mode": "resident", **reference},
        "engine": {"num_threads": 1},
    }
    return evaluate(EvaluationConfig.parse(values))


@pytest.fixture(scope="module")
def reports(models: dict[str, Path]) -> dict[str, Report]:
    return {name: evaluated(path) for name, path in models.items()}


@dataclass(frozen=True)
class Plain:
    """What plain passes over two models say of the task."""

    kl: np.ndarray
    """In nats, of every position of every ending."""

    right: np.ndarray
    """[documents, 2]: whether the reference and the candidate choose the right ending."""


def normal(logits: np.ndarray) -> np.ndarray:
    rows = logits.astype(np.float64)
    rows -= rows.max(-1, keepdims=True)
    return rows - np.log(np.exp(rows).sum(-1, keepdims=True))


def of_graph(folder: Path) -> Logprobs:
    import onnxruntime as ort

    session = ort.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    pasts = [value.name for value in session.get_inputs() if value.name.startswith("past_key_values")]

    def run(tokens: list[int]) -> np.ndarray:
        ids = np.array([tokens], np.int64)
        empty = {name: np.zeros((1, 2, 0, 32), np.float32) for name in pasts}
        (logits,) = session.run(["logits"], {"input_ids": ids, "attention_mask": np.ones_like(ids), **empty})
        return normal(logits[0])

    return run


def of_float() -> Logprobs:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(FLOAT, dtype=torch.float32).eval()

    @torch.no_grad()
    def run(tokens: list[int]) -> np.ndarray:
        return normal(model(torch.tensor([tokens])).logits[0].numpy())

    return run


def plain(reference: Logprobs, candidate: Logprobs) -> Plain:
    """Every ending behind its story, one pass for each, with nothing shared."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(FLOAT)
    lines = (QUICKSTART / "tasks" / "choice.jsonl").read_text(encoding="utf-8").splitlines()[:NUM_DOCUMENTS]
    positions, right = [], []
    for document in map(json.loads, lines):
        context = tokenizer.encode(document["context"])
        distances, scores = [], []
        for ending in document["endings"]:
            tokens = tokenizer.encode(document["context"] + ending)
            targets = tokens[len(context) :]
            rows = [logprobs(tokens[:-1])[-len(targets) :] for logprobs in (reference, candidate)]
            distances.append((np.exp(rows[0]) * (rows[0] - rows[1])).sum(-1))
            scores.append([float(each[np.arange(len(targets)), targets].sum()) for each in rows])
        positions += distances
        right.append(np.argmax(scores, 0) == document["answer"])
    return Plain(np.concatenate(positions), np.array(right))


@pytest.fixture(scope="module")
def brute(models: dict[str, Path]) -> dict[str, Plain]:
    by_tokens = of_float()
    kept = lru_cache(maxsize=None)(lambda tokens: by_tokens(list(tokens)))

    def reference(tokens: list[int]) -> np.ndarray:
        return kept(tuple(tokens))

    return {name: plain(reference, of_graph(path)) for name, path in models.items()}


def metric(report: Report, name: str, task: str = TASK) -> float:
    (value,) = (item.value for item in report.metrics if (item.task, item.metric) == (task, name))
    return value


NAMES = ["float", *QUANTIZED]


def test_distance_orders_the_models(reports: dict[str, Report]) -> None:
    distances = [metric(reports[name], "kl_mean", "all") for name in NAMES]
    assert distances == sorted(distances)
    assert abs(distances[0]) < 1e-6
    assert all(later > 1.3 * earlier for earlier, later in pairwise(distances))


@pytest.mark.parametrize("name", NAMES)
def test_distance_is_that_of_plain_passes(name: str, reports: dict[str, Report], brute: dict[str, Plain]) -> None:
    kl, report = brute[name].kl, reports[name]
    assert metric(report, "kl_mean") == pytest.approx(kl.mean(), rel=1e-3, abs=1e-6)
    assert metric(report, "kl_median") == pytest.approx(np.median(kl), rel=1e-2, abs=1e-6)
    assert metric(report, "kl_p99") == pytest.approx(np.quantile(kl, 0.99), rel=1e-2, abs=1e-6)
    assert metric(report, "kl_max") == pytest.approx(kl.max(), rel=1e-2, abs=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_flips_and_p_value_are_those_of_plain_passes(
    name: str, reports: dict[str, Report], brute: dict[str, Plain]
) -> None:
    from scipy.stats import binomtest

    report, (before, after) = reports[name], brute[name].right.T
    lost, won = int((before & ~after).sum()), int((~before & after).sum())
    assert metric(report, "flips_right_to_wrong") == lost
    assert metric(report, "flips_wrong_to_right") == won
    assert metric(report, "acc") == after.mean()
    assert metric(report, "accuracy_difference") == pytest.approx(after.mean() - before.mean())
    expected = binomtest(lost, lost + won).pvalue if lost + won else 1.0
    assert metric(report, "mcnemar_p") == pytest.approx(expected)
    assert report.comparison is not None
    flips = [flip for flip in report.comparison.flips if flip.metric == "acc"]
    assert {flip.doc_id for flip in flips} == set(np.flatnonzero(before != after).tolist())


@pytest.mark.parametrize("name", NAMES)
def test_interval_is_that_of_resampled_documents(
    name: str, reports: dict[str, Report], brute: dict[str, Plain]
) -> None:
    """And where no document flipped in a direction, at least that of the exact bounds of both directions' shares."""
    from scipy.stats import binomtest

    before, after = brute[name].right.T
    differences = after.astype(float) - before
    rng = np.random.default_rng(0)
    means = differences[rng.integers(0, len(differences), (20_000, len(differences)))].mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    shares = [
        binomtest(int((differences == sign).sum()), NUM_DOCUMENTS).proportion_ci(method="exact") for sign in (-1, 1)
    ]
    if not (differences < 0).any():
        low = min(low, shares[1].low - shares[0].high)
    if not (differences > 0).any():
        high = max(high, shares[1].high - shares[0].low)
    step = 1.01 / NUM_DOCUMENTS  # a document more or less: quantiles of so few values jump by it
    assert metric(reports[name], "accuracy_difference_low") == pytest.approx(low, abs=step)
    assert metric(reports[name], "accuracy_difference_high") == pytest.approx(high, abs=step)


def test_recorded_reference_says_the_same_within_its_own_error(
    models: dict[str, Path], reports: dict[str, Report], tmp_path: Path
) -> None:
    report = evaluated(models["int4 of 128"], mode="recorded", records_dir=str(tmp_path))
    assert report.comparison is not None
    whole = report.comparison.divergences[0]
    exact = metric(reports["int4 of 128"], "kl_mean")
    assert abs(whole.kl.mean - exact) <= 4 * whole.kl_sampling_error + 1e-6
    assert whole.kl_lower <= exact + 1e-6

"""What quantization costs the quickstart model: int8 and int4 at two block sizes against float, checked by brute force
on the answers of two runs that know nothing of each other."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from olive_ext.config import EvaluationConfig
from olive_ext.report import Report
from olive_ext.report.comparison import ALL
from olive_ext.report.verdict import verdict
from olive_ext.run import evaluate
from tests.exports.cache import ROOT, once, run_python
from tests.exports.genai import BUILDER

pytestmark = pytest.mark.slow

MODEL, TASKS = ROOT / "recipes" / "quickstart" / "model", ROOT / "recipes" / "quickstart" / "tasks"
FIRST = {"quickstart_choice": "acc", "quickstart_letters": "acc", "quickstart_generate": "exact_match"}
NAMES = [*FIRST, "quickstart_perplexity"]
FORMS = {"int8": (8, 32), "int4_b32": (4, 32), "int4_b128": (4, 128)}
LIMIT = 40


def exported() -> Path:
    weights = hashlib.sha256((MODEL / "model.safetensors").read_bytes()).hexdigest()

    def build(folder: Path) -> None:
        run_python(["-m", BUILDER, "-i", MODEL, "-o", folder, "-p", "fp32", "-e", "cpu", "-c", folder / "cache"])

    return once("quickstart-fp32", [version("onnxruntime-genai"), weights], build)


def quantized(bits: int, block_size: int) -> Path:
    """Round to nearest, symmetric, by ONNX Runtime's own tool."""
    source = exported()

    def build(folder: Path) -> None:
        import onnx
        from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer

        config = DefaultWeightOnlyQuantConfig(block_size=block_size, is_symmetric=True, bits=bits)
        quantizer = MatMulNBitsQuantizer(onnx.load(source / "model.onnx"), algo_config=config)
        quantizer.process()
        quantizer.model.save_model_to_file(str(folder / "model.onnx"), True)
        for file in source.iterdir():
            if not file.name.startswith(("model.onnx", "cache")):
                (folder / file.name).write_bytes(file.read_bytes())

    return once(f"quickstart-int{bits}-b{block_size}", [source.name, version("onnxruntime")], build)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("out")


def run(model: Path, out: Path, **settings: Any) -> Report:
    given = {
        "tasks": NAMES,
        "include_path": str(TASKS),
        "bootstrap_iters": 0,
        "limit": LIMIT,
        "sample_log_num": LIMIT,
        "output_dir": str(out / model.name),
    }
    return evaluate(EvaluationConfig.parse({"model": {"path": str(model)}, **given, **settings}))


@pytest.fixture(scope="module")
def reports(out: Path) -> dict[str, Report]:
    reference = {"path": str(exported()), "mode": "recorded", "records_dir": str(out / "records")}
    found = {name: run(quantized(*form), out, reference=reference) for name, form in FORMS.items()}
    run(exported(), out)
    return found


def values(out: Path, model: Path, task: str) -> np.ndarray:
    """A task's first metric by document, from the log of the run."""
    lines = (out / model.name / f"samples_{task}.jsonl").read_text().splitlines()
    by_document = {line["doc_id"]: line[FIRST[task]] for line in map(json.loads, lines)}
    return np.array([by_document[number] for number in range(LIMIT)])


def test_divergence_orders_the_forms_where_accuracy_cannot(reports: dict[str, Report]) -> None:
    kl = {}
    for name, report in reports.items():
        assert report.comparison is not None
        kl[name] = next(item.kl for item in report.comparison.divergences if item.task == ALL)
    assert kl["int8"].mean * 100 < kl["int4_b32"].mean < kl["int4_b128"].mean
    for lower, higher in (("int8", "int4_b32"), ("int4_b32", "int4_b128")):
        first, second = kl[lower], kl[higher]
        assert first.stderr is not None
        assert second.stderr is not None
        assert second.mean - first.mean > 2 * (first.stderr**2 + second.stderr**2) ** 0.5


@pytest.mark.parametrize("name", FORMS)
def test_flips_and_intervals_are_those_of_two_separate_runs(name: str, reports: dict[str, Report], out: Path) -> None:
    comparison = reports[name].comparison
    assert comparison is not None
    pooled = []
    for task, metric in FIRST.items():
        before, after = values(out, exported(), task), values(out, quantized(*FORMS[name]), task)
        found = next(item for item in comparison.outcomes if (item.task, item.metric) == (task, metric))
        lost, won = (set(np.flatnonzero(sign * (after - before) > 0).tolist()) for sign in (-1, 1))
        assert (found.right_to_wrong, found.wrong_to_right) == (len(lost), len(won))
        flips = {(flip.doc_id, flip.direction) for flip in comparison.flips if flip.task == task}
        assert flips == {(item, "right_to_wrong") for item in lost} | {(item, "wrong_to_right") for item in won}
        assert found.difference == pytest.approx(after.mean() - before.mean())
        pooled.append(after - before)
    differences = np.concatenate(pooled)
    whole = next(item for item in comparison.outcomes if item.task == ALL)
    down, up = int((differences < 0).sum()), int((differences > 0).sum())
    assert (whole.num_documents, whole.right_to_wrong, whole.wrong_to_right) == (3 * LIMIT, down, up)
    assert whole.mcnemar_p == pytest.approx(stats.binomtest(down, down + up).pvalue if down + up else 1)
    if down and up:
        random = np.random.default_rng(9)
        theirs = stats.bootstrap((differences,), np.mean, n_resamples=10_000, method="BCa", random_state=random)
        assert (whole.low, whole.high) == pytest.approx(tuple(theirs.confidence_interval), abs=1.01 / len(differences))


def test_verdict_says_loss_only_where_numbers_show_it(reports: dict[str, Report]) -> None:
    assert reports["int8"].comparison is not None
    assert verdict(reports["int8"].comparison).kind == "no_loss_found"

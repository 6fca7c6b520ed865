"""What docs/porting.md says of BOS: Olive's own `ort` backend and ours on one float32 export of the quickstart."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from olive_ext.backends.lm_eval import OrtLM
from tests.exports.quickstart import MODEL, TASKS, exported

PAGE = Path(__file__).resolve().parents[2] / "docs" / "porting.md"


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], np.ndarray]]:
    """Metrics of all 160 documents, and log-likelihoods in nats [documents, 4 choices], by what encoded the texts."""
    from olive.evaluator.lmeval_ort import LMEvalORTEvaluator

    package = tmp_path_factory.mktemp("package")
    for file in [*exported().glob("*.*"), MODEL / "config.json"]:  # Olive's backend reads a configuration there
        (package / file.name).write_bytes(file.read_bytes())
    olive = LMEvalORTEvaluator(str(package / "model.onnx"), ep="CPUExecutionProvider", batch_size=8, max_length=512)
    found = {"Olive `ort`": _answers(olive)}
    for name, add_bos_token in (("ours, `add_bos_token` false", False), ("ours", None)):
        with OrtLM(str(package), add_bos_token=add_bos_token) as lm:
            found[name] = _answers(lm)
    return found


def _answers(lm: Any) -> tuple[dict[str, Any], np.ndarray]:
    results = simple_evaluate(
        lm, tasks=["quickstart_choice"], task_manager=TaskManager(include_path=str(TASKS)), bootstrap_iters=0
    )
    samples = sorted(results["samples"]["quickstart_choice"], key=lambda sample: sample["doc_id"])
    logprobs = [[answer[0] for answer in sample["filtered_resps"]] for sample in samples]
    return results["results"]["quickstart_choice"], np.array(logprobs, dtype=np.float64)


@pytest.mark.long
def test_olives_ort_scores_what_ours_scores_without_bos(answers: dict[str, Any]) -> None:
    np.testing.assert_allclose(answers["Olive `ort`"][1], answers["ours, `add_bos_token` false"][1], atol=1e-4)


@pytest.mark.long
def test_page_has_the_numbers(answers: dict[str, Any]) -> None:
    ours = answers["ours"][1]
    rows = []
    for name, (metrics, logprobs) in answers.items():
        changed = int((logprobs.argmax(axis=1) != ours.argmax(axis=1)).sum())
        apart = np.abs(logprobs - ours).mean()
        numbers = f"{metrics['acc,none']:.3f} | {metrics['acc_norm,none']:.3f} | {changed} | {apart:.2f}"
        rows.append(f"| {name} | {numbers} |")
    page = re.sub(r" +", " ", PAGE.read_text(encoding="utf-8"))
    assert [row for row in rows if row not in page] == []

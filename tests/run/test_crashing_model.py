"""A model that crashes ONNX Runtime on one request: the evaluation, started as on the command line, names the document
of that request, evaluates the rest and keeps it."""

from __future__ import annotations

import platform
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from olive_ext.cli import main
from olive_ext.report import Report, from_json
from olive_ext.report.metrics import MISSING
from olive_ext.report.verdict import verdict
from tests.backends.local_tasks import write_tasks
from tests.check.tiny import put_model
from tests.session.tiny import byte_level

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="this division traps on x86 only"),
]
LEAST = -(2**63)
DOCUMENTS, CRASHING = 300, 200
"""Of some 15,000 tokens, which are several chunks; and the document with a choice that crashes."""


def crash_on(token: int, path: Path) -> None:
    """Adds a division to the graph at `path` whose quotient, for `token` alone, is too large for an int64: x86 ends the
    process by SIGFPE then. For other tokens it changes nothing."""
    proto = onnx.load(path)
    graph = proto.graph
    (embed,) = (node for node in graph.node if node.op_type == "Gather" and node.input[1] == "input_ids")
    embed.input[1] = "ids"
    tensors = {"token": token, "minus_one": -1, "one": 1, "least": LEAST}
    graph.initializer.extend(numpy_helper.from_array(np.array(value), name) for name, value in tensors.items())
    nodes = [
        helper.make_node("Equal", ["input_ids", "token"], ["is_token"]),
        helper.make_node("Where", ["is_token", "minus_one", "one"], ["divisor"]),
        helper.make_node("Div", ["least", "divisor"], ["quotient"]),
        helper.make_node("Sub", ["quotient", "quotient"], ["zero"]),
        helper.make_node("Add", ["input_ids", "zero"], ["ids"]),
    ]
    for place, node in enumerate(nodes):
        graph.node.insert(place, node)
    onnx.save(proto, path)


def test_the_request_is_named_and_the_rest_is_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OLIVE_EXT_ISOLATION", raising=False)
    tasks = write_tasks(tmp_path / "tasks")
    loader = tasks / "local.py"
    rows = (
        loader.read_text().replace("range(1, 7)", f"range({DOCUMENTS})").replace('" ".join(WORDS[:n])', 'f"{n} " * 12')
    )
    choices = f'["a", "b", "c" if n != {CRASHING} else "ø"]'
    loader.write_text(rows.replace('[f" {w}" for w in WORDS[n:n + 3]]', choices), encoding="utf-8")
    whole, crashing = put_model(tmp_path / "whole"), put_model(tmp_path / "crashing")
    crash_on(byte_level().encode("ø", add_special_tokens=False)[0], crashing / "model.onnx")
    out = tmp_path / "out"

    def run(model: Path, *more: str) -> int:
        asked = f"--tasks tiny_choice --include-path {tasks} --max-length 64 --set bootstrap_iters=0".split()
        return main(["evaluate", str(model), *asked, *more])

    def report() -> Report:
        return from_json((out / "report.json").read_text(encoding="utf-8"))

    compared = ["--output", str(out), "--reference", str(whole), "--reference-mode", "resident"]
    assert run(crashing, *compared) == 1
    said = capsys.readouterr().err
    first = report()
    assert run(crashing, *compared, "--on-error", "report") == 3, "a document without an answer may be lost"
    second = report()
    for found in (first, second):
        assert [line["doc_id"] for line in found.missing] == [CRASHING]
        assert {line["reason"] for line in found.missing} == {"each worker that ran it ended by SIGFPE"}
        assert "1 request" in said
        assert [metric.value for metric in found.metrics if metric.task == MISSING] == [1]
        assert {metric.n for metric in found.metrics if metric.metric == "acc"} == {DOCUMENTS - 1}
        assert found.comparison.missing == 1
        assert "1 request" in verdict(found.comparison).finding
    assert second.model["journal"]["answers_written"] == 0, "all others were kept"

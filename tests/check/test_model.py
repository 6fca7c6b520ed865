"""What a model resolves to is what opening it does: every decision against `describe_execution`, and in `check`. The
problems that are named."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import onnx
import pytest

import olive_ext
from olive_ext.check import Findings, check_model
from olive_ext.check.model_check import Section, verify_graphs
from olive_ext.cli import main
from olive_ext.config import EvaluationConfig, ModelSettings
from olive_ext.errors import ModelError, OliveExtError, ProviderError
from olive_ext.model import ResolvedModel, resolve
from olive_ext.model.decisions import Decision
from olive_ext.model.providers.devices import Provider
from olive_ext.session.opening import open_model
from olive_ext.session.requests import ScoringOutput
from tests.backends.local_tasks import NAMES, write_tasks
from tests.check.tiny import put_model
from tests.exports import export, genai_export, hf_model
from tests.exports.pipeline import pipeline_package
from tests.refusals import assert_says, refused, tells


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return put_model(tmp_path_factory.mktemp("model"))


def config(path: Path, **values: Any) -> EvaluationConfig:
    return EvaluationConfig.parse({"tasks": ["a"], "model": {"path": str(path)}, "max_length": 64, **values})


def facts(findings: Findings) -> dict[tuple[str, str], str]:
    return {(section.title, fact.name): fact.value for section in findings.sections for fact in section.facts}


def test_package_has_its_functions_and_nothing_else() -> None:
    assert dir(olive_ext) == ["__version__", "check", "evaluate", "locate", "mend", "open"]
    assert all(callable(getattr(olive_ext, name)) for name in dir(olive_ext)[1:])


def test_check_from_python_is_the_commands(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(folder), "--max-length", "64", "--kind", "onnx"]) == 0
    found = olive_ext.check(folder, max_length=64, model={"kind": "onnx"})
    assert capsys.readouterr().out == str(found)


SHOWS = "import sys; from olive_ext.run.models import Models; print(Models(None).progress, Models(None, True).progress)"


@pytest.mark.long
def test_progress_is_shown_on_a_terminal_where_nobody_says_otherwise() -> None:
    ours, theirs = os.openpty()
    for stderr, shown in ((theirs, "True True\n"), (subprocess.DEVNULL, "False True\n")):
        done = subprocess.run(
            [sys.executable, "-c", SHOWS], stdout=subprocess.PIPE, stderr=stderr, text=True, check=True
        )
        assert done.stdout == shown
    os.close(ours)
    os.close(theirs)


def test_work_of_tasks_is_counted_and_a_step_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tasks = write_tasks(tmp_path / "tasks")
    asked = ("--tasks", ",".join(NAMES), "--include-path", str(tasks), "--limit", "3", "--verify")
    assert main(["check", str(genai_export("llama")), *asked]) == 0
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    found = {words[1]: " ".join(words[2:]).strip() for words in lines if len(words) > 2}
    assert found["asked"].startswith("9 documents, ")
    assert re.search(r"\d tokens .*\d", found["asked"])
    assert "with AVX-512, and some 6 s" in found["takes"]
    assert "tokens/s" in found["a step was timed"]
    main(["check", str(genai_export("llama")), *asked[:-1], "--provider", "cuda"])
    assert "on an H200, and some 6 s" in capsys.readouterr().out, "whether this machine has one or not"


def test_every_problem_is_named_on_one_line_with_status_2(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for mistake in (("--provider", "nosuch"), ("--tasks", "nosuch")):
        assert main(["check", str(folder), "--max-length", "64", *mistake]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert "nosuch" in err
        assert err.count("\n") == 1
    broken = Path(shutil.copytree(folder, tmp_path / "broken"))
    (broken / "tokenizer.json").write_text("{")
    provider, tokenizer, *_ = check_model(config(broken, execution_provider="nosuch")).problems
    assert "nosuch" in provider
    assert "tokenizer" in tokenizer


def test_hugging_face_model_is_exported_unless_settings_say_otherwise_and_not_verified() -> None:
    path = Path(__file__).parents[2] / "recipes" / "quickstart" / "model"
    never = {"reference": {"path": str(path), "export": "never"}}
    found = [facts(check_model(config(path, **more))) for more in ({}, never)]
    assert [fact["Decisions", "export"] for fact in found] == ["yes", "no"]
    findings = check_model(config(path, model={"path": str(path), "kind": "hf"}), verify=True)
    assert [error.code for error in findings.errors] == ["unsupported"]


def test_name_that_is_neither_here_nor_on_a_hub_that_answers_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (error,) = check_model(config(Path("owner/name"))).errors
    assert_says(error, "needs_network", holds="'owner/name'")


def test_verification_runs_both_graphs_and_names_the_node_and_the_weight_where_nan_begins(
    folder: Path, tmp_path: Path
) -> None:
    findings = check_model(config(folder), verify=True)
    assert findings.problems == []
    found = facts(findings)
    assert int(found["Verification", "tokens compared"]) > 20
    assert float(found["Verification", "largest difference"].split()[0]) < 1e-4
    broken = Path(shutil.copytree(folder, tmp_path / "broken"))
    graph = onnx.load(broken / "model.onnx")
    head = next(tensor for tensor in graph.graph.initializer if tensor.name == "head")
    values = onnx.numpy_helper.to_array(head).copy()
    values[3, 7] = np.nan
    head.CopyFrom(onnx.numpy_helper.from_array(values, "head"))
    onnx.save(graph, broken / "model.onnx")
    (problem,) = check_model(config(broken), verify=True).problems
    assert "request" in problem
    assert tells(problem, "'logits' (MatMul) 'head'")


class FakeSession:
    """Answers each pair with one token."""

    encoding = None

    def __init__(self, logprob: float, step: float = 0.0) -> None:
        self.logprob, self.step = logprob, step

    def loglikelihood(self, pairs: Any) -> list[ScoringOutput]:
        scores = [self.logprob - self.step * number for number in range(len(pairs))]
        return [ScoringOutput(score, False, 1, (score,)) for score in scores]

    def __enter__(self) -> FakeSession:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        pass


@pytest.mark.parametrize("untouched", [-1.5, math.nan, -math.inf])
def test_graphs_that_differ_are_a_model_error(untouched: float) -> None:
    answers = {"scoring_head": -1.0, "untouched": untouched}

    def open_session(model: ResolvedModel) -> Any:
        return FakeSession(answers[model.settings.engine.graph])

    with refused(ModelError, "unsupported", holds="untouched"):
        verify_graphs(resolve(ModelSettings(model="m", kind="hf")), Section("Verification").add, open_session)


ON_CPU = {"step": 0.3, "logprob": -1.0}


@pytest.mark.parametrize(
    ("there", "here", "found"),
    [
        ({"step": 0.3, "logprob": -1.05}, ON_CPU, "0.05 nats"),
        ({"step": 0.3, "logprob": -1.05}, None, "unknown"),
        ({"step": 0.3, "logprob": -1.2}, ON_CPU, ""),
        ({"step": 0.0, "logprob": -1.0}, None, ""),
        ({"step": 0.0, "logprob": 0.0}, ON_CPU, ""),
    ],
    ids=["rounds", "alone", "wrong", "does nothing", "finds everything certain"],
)
def test_device_is_held_to_the_cpu(
    folder: Path, there: dict[str, float], here: dict[str, float] | None, found: str
) -> None:
    """Both graphs are wrong alike on a device whose kernels are."""

    def open_session(model: ResolvedModel) -> Any:
        if model.settings.execution_provider != "cpu":
            return FakeSession(**there)
        if here is None:
            raise ModelError("no kernel")
        return FakeSession(**here)

    model = replace(resolve(ModelSettings(model=str(folder))), session_providers=(Provider("NoneProvider", "npu"),))
    section = Section("Verification")
    with nullcontext() if found else refused(ProviderError, "provider", holds="npu"):
        verify_graphs(model, section.add, open_session)
    if found:
        assert {fact.name: fact.value for fact in section.facts}["from the CPU"].startswith(found)


def test_model_that_onnxruntime_genai_runs_is_not_read_as_one_graph(tmp_path: Path) -> None:
    folder = put_model(tmp_path)
    stages = {"all": {"filename": next(folder.glob("*.onnx")).name}}
    (folder / "genai_config.json").write_text(json.dumps({"model": {"decoder": {"pipeline": [stages]}}}))
    findings = check_model(config(folder))
    assert findings.problems == []
    assert facts(findings)["Decisions", "runtime"] == "genai"
    assert ("Decisions", "context_length") not in facts(findings)
    assert [error.code for error in check_model(config(folder), verify=True).errors] == ["unsupported"]


EXPORTS = (
    *(f"{family}-genai-0.14" for family in ("llama", "gemma3_text")),
    *(f"{family}-genai-0.18" for family in ("llama", "phi3", "gpt_oss", "lfm2", "whisper")),
    *(f"llama-genai-0.18-{what}" for what in ("int4", "fp16-cpu", "kv4")),
    *(f"{family}-mobius" for family in ("llama", "gpt2", "qwen3_5_text")),
    *("llama-mobius-fp16", "llama-olive-lengths"),
    *("qwen3-genai-0.18-bf16-cuda", "qwen3-genai-0.18-kvfp8-cuda"),
)
"""One of each form: caches in place and returned, windows, states, an encoder, quantized weights and
caches, and two that this machine's providers refuse."""

ENGINES: tuple[dict[str, Any], ...] = (
    {"graph": "untouched"},
    {"scoring": "rows", "chunk_size": 32, "num_slots": 3},
    {"shapes": "bucketed"},
    {"strict_shapes": True, "overlaps_steps": False},
    {"overlaps_steps": True, "num_threads": 1},
    {"scoring": "tree"},
)


def settings(path: object, **given: Any) -> ModelSettings:
    return ModelSettings.of({"model": path, "execution_provider": "cpu", **given})


def compare(model: ResolvedModel, **arguments: Any) -> None:
    """Every decision of `model` against what is described once it is open."""
    with open_model(model, **arguments) as session:
        facts = session.describe_execution()
    for decision in replace(model, is_compared=bool(arguments)).decisions:
        found = described(facts, decision)
        notes = " ".join(map(str, (*facts.get("notes", ()), *facts.values())))
        explains = any(words in notes for words in EXPLAINED[decision.name]) if decision.name in EXPLAINED else False
        is_explained = decision.state == "tried" and explains
        is_reduced = decision.state == "predicted" and found is not None
        assert found == decision.value or is_explained or is_reduced, (decision, found)


EXPLAINED = {
    "scoring": ("texts are scored one after the other", "by rule: none so far"),
    "chunk_size": ("steps are cut to",),
    "shapes": ("steps have any shape",),
}
"""Words of the reason that an open model gives where a trial changed a decision."""


def described(facts: Mapping[str, Any], decision: Decision) -> Any:
    """What `describe_execution` has for a decision; the few without a key of their own by what they show in."""
    if decision.name == "kind":
        return "hf" if facts["runtime"] == "transformers" else "onnx"
    if decision.name == "graph":
        return "untouched" if facts["scoring_head"] == "untouched" else "scoring_head"
    if decision.name == "full_length_kv":
        notes = [note for note in facts["notes"] if "(sliding_window_cache)" in note]
        return int(notes[0].split()[0]) if notes else 0
    if decision.name == "shapes":
        return facts.get("shapes", "any")
    return decision.value if decision.name == "num_threads" else facts[decision.name]


@pytest.mark.parametrize(
    "name",
    [*EXPORTS, *(pytest.param(name, marks=pytest.mark.exporters) for name in ("llama-optimum", "gemma4_text-mobius"))],
)
def test_decisions_are_those_that_opening_takes(name: str) -> None:
    made = export(name)
    model = resolve(settings(made.path))
    if made.not_on_cpu:
        with pytest.raises(OliveExtError):
            open_model(model)
    else:
        compare(model)


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_decisions_follow_the_settings(engine: dict[str, Any]) -> None:
    compare(resolve(settings(genai_export("llama"), batch_size=2, max_length=64, engine=engine)))


def test_decisions_beside_a_reference_and_of_other_runtimes_are_those_that_opening_takes() -> None:
    path = genai_export("llama")
    compare(resolve(settings(path, engine={"shapes": "bucketed"})), reference=path)
    compare(resolve(settings(pipeline_package("llama"))))
    compare(resolve(settings(hf_model("llama"), device="cpu")))


def test_predictions_are_marked_and_take_no_more_than_the_cap() -> None:
    model = resolve(settings(genai_export("llama"), max_batch_size=4))
    (slots,) = (decision for decision in model.decisions if decision.name == "num_slots")
    assert (slots.state, slots.value) == ("predicted", 4)


@pytest.mark.parametrize("name", ["llama-genai-0.18", "gemma3_text-genai-0.14", "llama-mobius"])
def test_check_prints_the_decisions(name: str) -> None:
    path = str(export(name).path)
    config = EvaluationConfig.parse({"tasks": ["a"], "model": {"path": path}, "execution_provider": "cpu"})
    findings = check_model(config)
    assert findings.problems == []
    (section,) = (section for section in findings.sections if section.title == "Decisions")
    notes = resolve(config.opening()).spec.notes
    said = [words for fact in section.facts for words in (fact.reason, fact.value) if words in notes]
    assert sorted(said) == sorted(notes), "each once"
    printed = {fact.name: (fact.value, fact.reason) for fact in section.facts if fact.name != "note"}
    by_name = {decision.name: decision for decision in resolve(config.opening()).decisions}
    assert printed.keys() == by_name.keys()
    for fact, (value, reason) in printed.items():
        assert value == str(by_name[fact].value)
        assert fact == "num_slots" or by_name[fact].reason in reason
        assert by_name[fact].state == "decided" or reason.startswith(by_name[fact].state)

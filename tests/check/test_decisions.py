"""What is resolved of a model is what opening it does: every decision against `describe_execution`, and in `check`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from olive_ext.check import check_model
from olive_ext.config import EvaluationConfig, ModelSettings
from olive_ext.errors import OliveExtError
from olive_ext.model import ResolvedModel, resolve
from olive_ext.model.decisions import Decision
from olive_ext.session.opening import open_model
from tests.exports import export, genai_export, hf_model
from tests.exports.pipeline import pipeline_package

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

"""An evaluation of models that think, on real tiny models: lengths against sessions asked by hand, the paired
difference, KL along the reference's answers, reasoning in the logs, and what is told before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import olive_ext
from olive_ext.backends.lm_eval import OrtLM
from olive_ext.backends.lm_eval.arguments import GenerationSettings
from olive_ext.config import EvaluationConfig
from olive_ext.errors import OliveExtError
from olive_ext.report import Report, from_json, to_json
from olive_ext.report.metrics import LENGTHS
from olive_ext.report.plain_text import to_markdown
from olive_ext.run import evaluate
from olive_ext.session.requests import GenerationOutput
from tests.backends.local_tasks import write_tasks
from tests.exports import genai_export
from tests.refusals import refused

END, BUDGET, MOST = "t", 6, 20
WORDS = "the cat sat on the mat and the dog ran off with the hat".split()  # noqa: SIM905
PROMPTS = [" ".join(WORDS[:n]) for n in range(1, 7)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


def _config(folder: Path, **settings: Any) -> EvaluationConfig:
    given: dict[str, Any] = {
        "model": {"path": str(genai_export("qwen3"))},
        "tasks": ["tiny_generate"],
        "include_path": str(folder),
        "gen_kwargs": {"max_gen_toks": MOST},
        "model_args": {"think_end_token": END, "thinking_budget": BUDGET},
    }
    return EvaluationConfig.parse({**given, **settings})


def _outputs(family: str, **settings: Any) -> list[GenerationOutput]:
    asked: dict[str, Any] = {"max_new_tokens": MOST, "think_end_token": END, "thinking_budget": BUDGET, **settings}
    with olive_ext.open(genai_export(family)) as session:
        return session.generate(PROMPTS, stop=["\n"], **asked)


def _lengths(outputs: list[GenerationOutput]) -> dict[str, list[float]]:
    known = [(one, one.reasoning) for one in outputs if one.reasoning is not None]
    return {
        "generated_tokens": [len(one.tokens) for one, _ in known],
        "thinking_tokens": [reasoning.num_tokens for _, reasoning in known],
        "thinking_forced": [reasoning.is_forced for _, reasoning in known],
        "cut_off": [one.finish_reason == "length" for one, _ in known],
        "stopped": [one.finish_reason == "stopped" for one, _ in known],
    }


@pytest.fixture(scope="module")
def report(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    out = str(tmp_path_factory.mktemp("out"))
    reference = {"path": str(genai_export("llama")), "mode": "resident"}
    return evaluate(_config(folder, reference=reference, output_dir=out, sample_log_num=4))


def test_lengths_of_a_model_that_is_given_are_no_gains(folder: Path) -> None:
    """Whether a model tells answers from reasoning is its own setting there, not the configuration's; null is none."""
    config = _config(folder, model_args={"think_end_token": None})
    assert not config.thinks
    with OrtLM(str(genai_export("qwen3")), think_end_token=END) as lm:
        report = evaluate(config, lm=lm)
    directions = {metric.metric: metric.higher_is_better for metric in report.metrics if metric.metric in LENGTHS}
    assert directions == dict.fromkeys(LENGTHS, False)


def test_lengths_are_those_of_the_answers_with_paired_differences(report: Report) -> None:
    own, others = _lengths(_outputs("qwen3")), _lengths(_outputs("llama"))
    found = {metric.metric: metric for metric in report.metrics if metric.filter == "strict"}
    outcomes = {item.metric: item for item in report.comparison.lengths}
    assert list(outcomes) == list(LENGTHS)
    for name in LENGTHS:
        assert found[name].value == pytest.approx(np.mean(own[name]))
        assert found[name].stderr == pytest.approx(np.std(own[name], ddof=1) / len(PROMPTS) ** 0.5)
        item, difference = outcomes[name], np.mean(own[name]) - np.mean(others[name])
        assert (item.candidate, item.difference) == pytest.approx((np.mean(own[name]), difference))
        assert item.low <= item.difference <= item.high
        assert (item.is_binary, item.documents_needed) == (False, {})
    assert own["thinking_tokens"] != others["thinking_tokens"]
    assert 0 < np.mean(own["thinking_forced"]) <= 1
    assert not {item.metric for item in report.comparison.outcomes} & {*LENGTHS}
    assert from_json(to_json(report)).comparison == report.comparison


def test_kl_runs_along_the_answers_of_the_reference(report: Report) -> None:
    others = _lengths(_outputs("llama"))["generated_tokens"]
    (divergence,) = report.comparison.divergences
    counts = {item.label: item.count for item in divergence.along_answer}
    expected = np.bincount([int(place) // 16 for length in others for place in range(int(length))], minlength=2)
    assert [counts["0-15"], counts.get("16-31", 0)] == expected.tolist()
    assert sum(counts.values()) == divergence.num_positions
    means = [item.count * (item.mean or 0) for item in divergence.along_answer]
    assert sum(means) / divergence.num_positions == pytest.approx(divergence.kl.mean)


def test_logs_keep_the_reasoning_and_reports_of_logs_the_lengths(report: Report) -> None:
    folder = Path(str(report.config["output_dir"]))
    lines = [json.loads(line) for line in (folder / "samples_tiny_generate.jsonl").read_text().splitlines()]
    outputs = _outputs("qwen3")
    for line in lines:
        output = outputs[line["doc_id"]]
        assert line["olive_ext"]["reasoning"] == [[output.reasoning.text]]
        assert line["resps"] == [[output.text]]
    assert "generated_tokens" in to_markdown(report)


def test_several_answers_have_mean_lengths(folder: Path) -> None:
    drawn = {"max_gen_toks": MOST, "do_sample": True, "temperature": 1.5}
    found = {item.metric: item for item in evaluate(_config(folder, gen_kwargs=drawn, repeats=3)).metrics}
    settings = GenerationSettings.read({**drawn, "until": ["\n"]}, 256, None, 0)
    with olive_ext.open(genai_export("qwen3")) as session:
        thinking = {"think_end_token": END, "thinking_budget": BUDGET}
        prompts = [session.tokenizer.encode(prompt) for prompt in PROMPTS]
        asked = [settings.request(prompt, 512, n, thinking, "t") for prompt in prompts for n in range(3)]
        lengths = _lengths(session.generate(asked))
    for name in LENGTHS:
        assert found[name].value == pytest.approx(np.mean(lengths[name]))
    assert {"avg@3", "pass@2", "pass@3"} <= found.keys()


@pytest.mark.parametrize(
    ("number", "code", "field", "value"),
    [
        (512, "task", "max_gen_toks", 512),
        (6, "task", "thinking_budget", 6),
        (7, "contradiction", "thinking_budget", 6),
    ],
)
def test_what_has_no_room_is_told_with_its_task(folder: Path, number: int, code: str, field: str, value: int) -> None:
    with refused(OliveExtError, code, field, value, holds="'tiny_generate'"):
        evaluate(_config(folder, gen_kwargs={"max_gen_toks": number}))


def test_more_answers_are_drawn_beside_those_that_are_kept(folder: Path, tmp_path: Path) -> None:
    """As fresh ones would be; another budget keeps none."""
    drawn = {"max_gen_toks": MOST, "do_sample": True, "temperature": 1.5}

    def run(out: str, repeats: int, **thinking: int) -> Report:
        args = {"think_end_token": "q", "thinking_budget": BUDGET, **thinking}  # which no prompt ends with
        settings = {"gen_kwargs": drawn, "model_args": args, "output_dir": str(tmp_path / out)}
        return evaluate(_config(folder, repeats=repeats, **settings))

    few, more, fresh = run("kept", 2), run("kept", 4), run("fresh", 4)
    assert [metric.value for metric in more.metrics] == [metric.value for metric in fresh.metrics]
    counts = [report.engine["tokens_generated"] for report in (few, more, fresh)]
    assert counts[1] == counts[2] - counts[0]
    other, alone = run("kept", 4, thinking_budget=3), run("alone", 4, thinking_budget=3)
    assert [metric.value for metric in other.metrics] == [metric.value for metric in alone.metrics]
    assert other.engine["tokens_generated"] == alone.engine["tokens_generated"] > 0

"""The command line on a page says what the configuration said."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from olive_ext.cli.options import written_values
from olive_ext.cli.parser import build_parser
from olive_ext.config import EvaluationConfig
from olive_ext.report import Report
from olive_ext.report.html.render import command

MODEL = {"path": "models/my model"}


@pytest.mark.parametrize(
    "values",
    [
        {"tasks": ["arc_easy", "gsm8k"], "limit": 400, "num_fewshot": 0, "seed": 7},
        {"tasks": [{"task": "inline", "doc_to_text": "{{q}}, 'quoted'"}, "a"], "limit": 0.5},
        {"tasks": ["a"], "gen_kwargs": {"until": ["\n"], "max_gen_toks": 8}, "engine": {"num_slots": 4}},
        {
            "tasks": ["a"],
            "apply_chat_template": True,
            "fewshot_as_multiturn": True,
            "system_instruction": "Be $HOME's.",
        },
        {"tasks": ["a"], "execution_provider": ["CUDA", ["CPU", {"threads": 2}]], "allow_cpu_fallback": True},
        {"tasks": ["a"], "include_path": "tasks", "tokenizer": "t", "batch_size": "auto", "output_dir": "-odd"},
        {"tasks": ["a"], "system_instruction": "-1", "device": "null", "reference": "models/float"},
        {"tasks": ["a"], "reference": {"path": "models/float", "kind": "hf"}, "model": {**MODEL, "kind": "onnx"}},
    ],
)
def test_command_parses_to_the_same_configuration(values: dict[str, Any]) -> None:
    config = EvaluationConfig.parse({"model": MODEL, **values})
    written = command(Report((), config=config.model_dump(mode="json", exclude_unset=True)))
    program, *arguments = shlex.split(written)
    parsed = build_parser().parse_args(arguments)
    assert program == "olive-ext"
    assert EvaluationConfig.parse(written_values(parsed, parsed.model)) == config


def test_plain_options_have_their_flags() -> None:
    config = EvaluationConfig.parse({"model": {"path": "m"}, "tasks": ["a", "b"], "limit": 4, "reference": "r"})
    written = command(Report((), config=config.model_dump(mode="json", exclude_unset=True)))
    assert sorted(written.split(" --")) == ["limit 4", "olive-ext evaluate m", "reference r", "tasks a,b"]


def test_configuration_without_a_model_has_no_command() -> None:
    assert command(Report((), config={"tasks": ["a"]})) == ""

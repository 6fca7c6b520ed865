"""One table of wrong settings, each tried through four doors: a call in Python, a command line, and a recipe's
evaluator and pass. The error has the same code, field and value, with the door's own place in front."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from olive_ext.check import mistakes, refuse
from olive_ext.cli.exit_status import command
from olive_ext.config import EVALUATOR_TYPE, PASS_TYPE, EvaluationConfig, EvaluationSettings
from olive_ext.errors import ConfigError, OliveExtError
from tests.refusals import assert_says, refused, value_at

UNKNOWN, WRONG, MISSING, AGAINST = "unknown_key", "wrong_value", "missing", "contradiction"
ENOUGH = {"reference": "r", "documents": "enough"}
PROVIDERS = [["cuda", {"a": [1]}], 3]

Row = tuple[dict[str, Any], str, str, str]
"""The settings; the error's code and field, and what else its sentence holds, word by word."""

ACC = {"metric": "acc"}
KL, ACCURACY = {"metric": "kl_mean", "max": 0.05}, {"metric": "accuracy_difference", "min": -0.01}
SETTINGS: list[Row] = [
    ({"batch_size": "foo"}, WRONG, "batch_size", "1 65536 auto"),
    ({"batch_size": True}, WRONG, "batch_size", "65536"),
    ({"batch_size": 0}, WRONG, "batch_size", "65536"),
    ({"limit": -1}, WRONG, "limit", "positive 0 1"),
    ({"limit": True}, WRONG, "limit", ""),
    ({"limit": "x"}, WRONG, "limit", ""),
    ({"num_fewshot": -1}, WRONG, "num_fewshot", "0"),
    ({"seed": "x"}, WRONG, "seed", "0 4294967295"),
    ({"seed": -1}, WRONG, "seed", "0 4294967295"),
    ({"seed": 2**40}, WRONG, "seed", "4294967295"),
    ({"tasks": []}, WRONG, "tasks", "non-empty"),
    ({"tasks": "a"}, WRONG, "tasks", "list"),
    ({"apply_chat_template": []}, WRONG, "apply_chat_template", "true false string"),
    ({"model_class": "x"}, WRONG, "model_class", "hf ort ortgenai ort-multimodal"),
    ({"model_args": 3}, WRONG, "model_args", "mapping"),
    ({"include_path": 3}, WRONG, "include_path", "string list"),
    ({"provider_libraries": {"a": 3}}, WRONG, "provider_libraries", "mapping string"),
    ({"execution_provider": PROVIDERS}, WRONG, "execution_provider", "string list pair options"),
    ({"repeats": 0}, WRONG, "repeats", "1 10000"),
    ({"repeats": 10_001}, WRONG, "repeats", "10000"),
    ({"repeats": True}, WRONG, "repeats", "10000"),
    ({"repeats": "many"}, WRONG, "repeats", "10000"),
    ({"engine": 3}, WRONG, "engine", "mapping"),
    ({"engine": {"num_slots": "x"}}, WRONG, "engine.num_slots", "1 65536 auto"),
    ({"engine": {"num_slots": 10**8}}, WRONG, "engine.num_slots", "65536"),
    ({"engine": {"overlaps_steps": 3}}, WRONG, "engine.overlaps_steps", "3"),
    ({"engine": {"chunksize": 1}}, UNKNOWN, "engine.chunksize", "'chunk_size'"),
    ({"engine": {"zzz": 1}}, UNKNOWN, "engine.zzz", "adapters chunk_size compiled_dir"),
    ({"engine": {"strict_shapes": True, "scoring": "tree"}}, AGAINST, "engine", "strict_shapes scoring tree"),
    ({"engine": {"strict_shapes": True, "shapes": "any"}}, AGAINST, "engine.strict_shapes", "'shapes' any"),
    ({"engine": {"shapes": "bucketed", "scoring": "tree"}}, AGAINST, "engine", "shapes scoring"),
    ({"engine": {"overlaps_steps": True, "strict_shapes": True}}, AGAINST, "engine", "strict_shapes overlaps_steps"),
    ({"engine": {"graph": "untouched", "graph_capture": True}}, AGAINST, "engine.graph_capture", "graph"),
    ({"engine": {"scoring": "tree", "graph_capture": True}}, AGAINST, "engine.graph_capture", "scoring"),
    ({"tassks": 1}, UNKNOWN, "tassks", "'tasks'"),
    ({"num_slots": 1}, UNKNOWN, "num_slots", "'engine.num_slots'"),
    ({"batch_size": "foo", "taskss": 1}, WRONG, "batch_size", "65536 taskss 'tasks'"),
    ({"fewshot_as_multiturn": True}, MISSING, "fewshot_as_multiturn", "apply_chat_template"),
    # names that no file can have
    ({"output_dir": "a" * 300}, WRONG, "output_dir", ""),
    ({"tokenizer": "a\x00"}, WRONG, "tokenizer", ""),
    ({"engine": {"adapters": ["\ud800"]}}, WRONG, "engine.adapters", ""),
    ({"reference": {"path": "a/" * 2500}}, WRONG, "reference.path", ""),
    # a reference
    ({"reference": 5}, WRONG, "reference", "path mapping"),
    ({"reference": {}}, MISSING, "reference.path", ""),
    ({"reference": {"path": "m", "modes": "resident"}}, UNKNOWN, "reference.modes", "'mode'"),
    ({"reference": {"path": "m", "mode": "disk"}}, WRONG, "reference.mode", "auto resident recorded"),
    ({"reference": {"model": "m"}}, MISSING, "reference.path", "reference.model 'path'"),
    ({"reference": {"path": "m", "top": 0}}, WRONG, "reference.top", "positive"),
    ({"reference": {"path": "m.records", "top": 3}}, AGAINST, "reference.top", "m.records"),
    ({"reference": {"path": "m.records", "mode": "resident"}}, AGAINST, "reference.mode", "m.records resident"),
    ({"reference": "input_mode"}, WRONG, "reference.path", "'input_model'"),
    # a claim
    ({**ENOUGH, "documents": "some"}, WRONG, "documents", ""),
    ({**ENOUGH, "reference": None}, MISSING, "documents", "enough reference"),
    ({**ENOUGH, "reference": "same_model"}, AGAINST, "documents", "enough"),
    ({**ENOUGH, "limit": 10}, AGAINST, "limit", "10 documents enough"),
    ({**ENOUGH, "documents": "all", "certain": {"within": 0.01}}, MISSING, "certain", "documents enough"),
    ({**ENOUGH, "certain": {}}, AGAINST, "certain", "within above below"),
    ({**ENOUGH, "certain": {"within": 0.01, "below": 1}}, AGAINST, "certain", "within below"),
    ({**ENOUGH, "certain": {"metric": "kl_mean", "below": 0}}, AGAINST, "certain.below", "0"),
    ({**ENOUGH, "certain": {"metric": "acc", "within": 0.01}}, WRONG, "certain.metric", "accuracy_difference"),
    ({**ENOUGH, "certain": {"within": 5}}, AGAINST, "certain.within", "0.01"),
    ({**ENOUGH, "certain": {"metric": "top1_agreement", "above": -1}}, AGAINST, "certain.above", ""),
    ({**ENOUGH, "certain": {"within": -0.01}}, WRONG, "certain.within", ""),
    ({**ENOUGH, "certain": {"within": 0.01, "confidence": 95}}, WRONG, "certain.confidence", "0.5 1"),
    ({"fail_on_loss": 1}, MISSING, "fail_on_loss", "reference"),
    ({"fail_on_loss": 100, "reference": "r"}, WRONG, "fail_on_loss", "100"),
    ({"fail_on_loss": 0, "reference": "r"}, WRONG, "fail_on_loss", "above 0, below 100"),
    ({"fail_on_loss": "x", "reference": "r"}, WRONG, "fail_on_loss", "x"),
    ({"require": ["kl_mean<0.01"]}, WRONG, "require.0", "kl_mean<0.01 METRIC<=NUMBER"),
    ({"require": ["kl_mean<=a"]}, WRONG, "require.0.max", "a"),
    ({"require": [ACC]}, AGAINST, "require.0", "max min acc"),
    ({"require": [{**ACC, "min": 2, "max": 1}]}, AGAINST, "require.0.min", "2 max 1 acc"),
    ({"require": [{"metrik": "acc", "max": 1}]}, MISSING, "require.0.metric", "require.0.metrik 'metric'"),
    ({"require": [{"max": 1}]}, MISSING, "require.0.metric", ""),
    ({"require": [{**ACC, "max": True}]}, WRONG, "require.0.max", "number"),
    ({"require": [{**ACC, "max": math.nan}]}, WRONG, "require.0.max", "nan"),
    ({"require": ["accuracy_difference>=-1"]}, AGAINST, "require.0.min", "from -1 to 1 0.01 point"),
    ({"require": ["all/top1_agreement>=99"]}, AGAINST, "require.0.min", "99 from 0 to 1"),
    ({"require": ["kl_mean<=-1"]}, AGAINST, "require.0.max", "-1 from 0 to inf"),
    ({"require": ["a/acc>=80"]}, AGAINST, "require.0.min", "80 from 0 to 1 0.01"),
    ({"require": [{"metric": "exact_match,strict", "max": -1}]}, AGAINST, "require.0.max", "from 0 to 1"),
    ({"require": [3]}, WRONG, "require.0", "mapping"),
    ({**ENOUGH, "require": [KL, ACCURACY]}, AGAINST, "certain", "enough kl_mean"),
    ({**ENOUGH, "require": [KL], "fail_on_loss": 1}, AGAINST, "certain", "enough kl_mean"),
]


def in_python(values: Mapping[str, Any]) -> object:
    return EvaluationConfig.of("m", {"tasks": ["a"], **values})


def on_command_line(values: Mapping[str, Any]) -> object:
    given = {"tasks": ["a"], **values}.items()
    return evaluate("m", *(word for name, value in given for word in ("--set", f"{name}={json.dumps(value)}")))


def evaluate(*argv: str) -> object:
    return command(["evaluate", *argv], None)


def in_evaluator(values: Mapping[str, Any]) -> object:
    evaluators = {"e": {"type": EVALUATOR_TYPE, "tasks": ["a"], **values}}
    return refuse(mistakes({"evaluators": evaluators, "evaluator": "e"}, has_model=False))


def in_pass(values: Mapping[str, Any]) -> object:
    passes = {"p": {"type": PASS_TYPE, "config": {"tasks": ["a"], **values}}}
    return refuse(mistakes({"passes": passes}, has_model=False))


Door = Callable[[Mapping[str, Any]], object]
DOORS: list[tuple[Door, str]] = [(in_python, ""), (on_command_line, "")]
RECIPES: list[tuple[Door, str]] = [(in_evaluator, "evaluators.e."), (in_pass, "passes.p.")]


@pytest.mark.parametrize(("door", "where"), [*DOORS, *RECIPES], ids=lambda one: getattr(one, "__name__", ""))
@pytest.mark.parametrize("row", SETTINGS, ids=lambda row: f"{row[2]}-{str(row[0])[-25:]!a}")
def test_setting_is_refused_alike_through_every_door(row: Row, door: Door, where: str) -> None:
    told = is_refused(row, door, where)
    assert "\n" not in told
    assert len(told) < 500 or "known keys" in told


def is_refused(row: Row, door: Door, where: str) -> str:
    values, code, field, words = row
    with pytest.raises(OliveExtError) as raised:
        door(values)
    named = f"{where}{field}" if code in (WRONG, UNKNOWN) else where.rstrip(".")
    assert_says(raised.value, code, f"{where}{field}", holds=(*words.split(), named))
    if code in (WRONG, UNKNOWN) and (value := value_at(values, field)) is not ...:
        assert raised.value.value == value or str(raised.value.value) == str(value) == "nan"
    return str(raised.value)


COMMANDS: list[tuple[str, str, str, str | None, str]] = [
    ("", WRONG, "", None, "COMMAND: evaluate, compare,"),
    ("evaluate m --tasks a b", WRONG, "", None, "b: --tasks commas A,B"),
    ("evaluate", WRONG, "", None, "MODEL"),
    ("evalute m", WRONG, "", None, "'evalute' 'evaluate'"),
    ("evaluate m --tasks a --limit -1", WRONG, "limit", "'-1'", "--limit"),
    ("evaluate m --tasks a --fail-on-loss 1", MISSING, "fail_on_loss", None, "--fail-on-loss --reference"),
    ("evaluate m --tasks a --require kl_mean<1", WRONG, "require.0", None, "--require: METRIC<=NUMBER"),
    ("evaluate m --lim 3", WRONG, "", None, "--lim --limit?"),
    ("check m n -o", WRONG, "", None, "n -o"),
    ("--odd check m", WRONG, "", None, "--odd"),
    ("schema foo", WRONG, "", None, "foo evaluator pass recipe"),
    ("check no/such/recipe.json", "no_access", "", None, "no/such/recipe.json"),
    ("evaluate m", MISSING, "tasks", None, "--tasks"),
    ("mend m --tasks a --reference r --at-most 1GB", MISSING, "output_dir", None, "--output"),
    ("evaluate m --tasks ,", WRONG, "tasks", "[]", ""),
    ("evaluate m --set x", WRONG, "--set", "'x'", "NAME=VALUE"),
    ("evaluate m --set limit", WRONG, "--set", "'limit'", "NAME=VALUE"),
    ("evaluate m --set reference=", WRONG, "--set", "'reference='", "null"),
    ("evaluate m --set =3", WRONG, "--set", "'=3'", "NAME=VALUE"),
    ("evaluate m --set limit=3 --set limit.x=3", UNKNOWN, "--set", "'limit.x'", "limit"),
    ("evaluate m --provider-option a", WRONG, "--provider-option", "'a'", "K=V"),
    ("evaluate m --gen-kwargs a=1,b", WRONG, "--gen-kwargs", "'a=1,b'", "NAME=VALUE"),
    ("evaluate m --gen-kwargs {", "damaged", "--gen-kwargs", "'{'", "JSON"),
    # numbers of more digits than Python reads
    (f"evaluate m --tasks a --set limit={'9' * 5000}", WRONG, "limit", None, ""),
    (f"evaluate m --tasks a --limit {'9' * 5000}", WRONG, "limit", None, ""),
    (f'evaluate m --tasks a --gen-kwargs {{"max_gen_toks":{"9" * 5000}}}', "damaged", "--gen-kwargs", None, "JSON"),
]


@pytest.mark.parametrize(("line", "code", "field", "value", "words"), COMMANDS, ids=lambda one: str(one)[:40])
def test_command_line_is_refused(line: str, code: str, field: str, value: str | None, words: str) -> None:
    with refused(OliveExtError, code, field, holds=tuple(words.split())) as raised:
        command(line.split(), None)
    assert value is None or repr(raised.value.value) == value


def test_missing_path_and_tasks_are_both_named() -> None:
    with refused(ConfigError, MISSING, "tasks", holds="model.path"):
        EvaluationConfig.parse({"model": {}})


@pytest.mark.parametrize("word", ["auto", "export"])
def test_folder_with_the_name_of_a_word_is_never_taken_for_the_word(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Olive makes the word an absolute path where such a folder is in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / word).mkdir()
    own = str(tmp_path / word)
    is_refused(({"reference": {"path": "hf", "float_model": own}}, WRONG, "reference.float_model", word), in_python, "")
    for inside in (f"./{word}", str(tmp_path / word / "model.onnx"), word):
        settings = EvaluationSettings.parse({"tasks": ["a"], "reference": {"path": "hf", "float_model": inside}})
        assert settings.reference is not None
        assert settings.reference.float_model == inside

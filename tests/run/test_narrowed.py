"""Answers are drawn until intervals are narrow: as a plain evaluation with the number that is found, nothing twice."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from olive_ext.config import EvaluationConfig, Narrow
from olive_ext.errors import ConfigError, TaskError
from olive_ext.report import Report, from_json, to_html, to_json
from olive_ext.report.plain_text import to_markdown
from olive_ext.run import evaluate
from olive_ext.stats.answer_spread import drawn_interval
from tests.backends.known_answers import Knows
from tests.backends.local_tasks import GENERATE, write_tasks
from tests.exports import genai_export

SAMPLED = {"do_sample": True, "temperature": 0.9, "max_gen_toks": 4}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tasks(tmp_path)
    (tmp_path / "local.py").write_text((tmp_path / "local.py").read_text() + LENGTH, encoding="utf-8")
    text = GENERATE.replace("tiny_generate", "lengths").replace("exact_match", "odd\n    aggregation: mean")
    text = text.replace("metadata:", "process_results: !function local.odd\nmetadata:")
    (tmp_path / "lengths.yaml").write_text(text, encoding="utf-8")
    return tmp_path


LENGTH = """

def odd(doc, results):
    return {"odd": float(sum(map(ord, results[0])) % 2)}
"""


def run(folder: Path, **settings: Any) -> Report:
    given = {"model": {"path": str(genai_export("llama", None))}, "tasks": ["lengths", "tiny_choice"]}
    shared = {"include_path": str(folder), "gen_kwargs": SAMPLED, "seed": 3}
    return evaluate(EvaluationConfig.parse({**given, **shared, **settings}))


def journaled(folder: Path) -> list[str]:
    lines = [line for path in folder.glob("answers_*.jsonl") for line in path.read_text().splitlines()]
    return [key for line in lines for key in json.loads(line.partition(" ")[2]).get("answers", ())]


@pytest.mark.long
def test_last_look_is_a_plain_evaluation_and_no_answer_is_drawn_twice(folder: Path) -> None:
    """Also where the output folder holds answers of a run before, and where there is no folder for them."""
    narrow = {"within": 0.3, "least": 2, "most": 64}
    found = run(folder, repeats="enough", narrow=narrow, output_dir=str(folder / "out"))
    told = found.narrowed
    assert told is not None
    assert told.is_reached
    assert len(told.looks) > 2
    assert told.looks[-1] < told.most
    plain = run(folder, repeats=told.looks[-1], output_dir=str(folder / "plain"))
    assert found.metrics == plain.metrics
    assert found.engine["tokens_generated"] == plain.engine["tokens_generated"]
    own = journaled(folder / "out" / "journal")
    assert sorted(own) == sorted(set(own)) == sorted(journaled(folder / "plain" / "journal"))
    assert found.config["repeats"] == "enough"
    assert (found.model["journal"]["answers_known"], plain.model["journal"]["answers_known"]) == (0, 0)
    again = run(folder, repeats="enough", narrow=narrow, output_dir=str(folder / "out"))
    assert (again.metrics, again.narrowed) == (found.metrics, told)
    assert again.engine["tokens_generated"] == 0
    homeless = run(folder, repeats="enough", narrow=narrow)
    assert (homeless.metrics, homeless.narrowed) == (found.metrics, told)
    assert homeless.engine["tokens_generated"] == plain.engine["tokens_generated"]
    begun = run(folder, repeats=3, output_dir=str(folder / "begun"))
    rest = run(folder, repeats="enough", narrow=narrow, output_dir=str(folder / "begun"))
    assert (rest.metrics, rest.narrowed) == (found.metrics, told)
    tokens = [report.engine["tokens_generated"] for report in (begun, rest, plain)]
    assert tokens[0] + tokens[1] == tokens[2]
    assert from_json(to_json(found)) == from_json(to_json(from_json(to_json(found))))
    for text in (to_markdown(found), to_html(found)):
        assert f"looks at {', '.join(map(str, told.looks))}" in text


@pytest.mark.long
@pytest.mark.parametrize("mode", ["resident", "recorded"])
def test_with_a_reference_the_paired_difference_becomes_narrow(folder: Path, mode: str) -> None:
    """An equal reference draws the same answers: a difference of nothing, as narrow as answers all alike make it."""
    for family, is_equal in (("llama", True), ("qwen3", False)):
        path = str(genai_export(family, None) if is_equal else genai_export(family))
        reference = {"path": path, "mode": mode, "records_dir": str(folder / "records" / family)}
        narrow = {"within": 0.3, "least": 4, "most": 32}
        found = run(folder, repeats="enough", narrow=narrow, reference=reference, tasks=["lengths"])
        told, comparison = found.narrowed, found.comparison
        assert told is not None
        assert comparison is not None
        assert told.is_difference
        z = 2.497705474412374  # four looks: 1.25 % to both sides together
        for mean in told.means:
            (item,) = (one for one in comparison.outcomes if (one.metric[:4], one.filter) == ("avg@", mean.filter))
            assert mean.value == pytest.approx(item.difference, abs=1e-12)
            if is_equal:
                assert mean.width == pytest.approx(z**2 / (told.looks[-1] * 6))
            else:
                assert mean.width > z**2 / (told.looks[-1] * 6)
        alone = run(folder, repeats=told.looks[-1], reference=reference, tasks=["lengths"])
        for one, other in zip(alone.metrics, found.metrics, strict=True):
            assert other == one or one.filter == "none"
            assert other.value == pytest.approx(
                one.value, rel=1e-5, abs=1e-5
            )  # distances are of the steps that computed them


def test_interval_is_that_of_the_formula_by_hand() -> None:
    """z of 95 % is 1.96; 3 documents of 4 answers, one of them of 1 wrong one: s^2 = 1/4; least step 1/12."""
    mean, width = drawn_interval([[1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 0, 0]], 0.95, 1)
    z = 1.959963984540054
    assert mean == pytest.approx(1.75 / 3)
    assert width == pytest.approx(z * math.sqrt(0.25 / 4 / 9 + (z / 24) ** 2) + z * z / 24)
    assert drawn_interval([[1, 1, 1, 1]] * 3, 0.95, 1)[1] == pytest.approx(z * z / 12)
    assert drawn_interval([[1, math.nan], [math.nan, math.nan]], 0.95, 1)[0] == 1
    assert drawn_interval([[math.nan]], 0.95, 1)[1] == math.inf


@pytest.mark.parametrize("chances", ["U-shaped", "near 1", "rare"])
@pytest.mark.parametrize("agree", [None, 0.5])
def test_intervals_hold_at_the_look_where_the_drawing_stops(chances: str, agree: float | None) -> None:
    from docs.benchmarks.answer_spread import simulated

    rng, narrow = np.random.default_rng(5), Narrow(within=0.05, most=32)
    holds = [simulated(chances, 30, narrow, rng, agree)[0] for _ in range(150)]
    assert np.mean(holds) >= 0.95


def test_looks_are_fixed_beforehand_and_end_with_the_most() -> None:
    assert Narrow(within=0.1).looks == (4, 8, 16, 32, 64)
    assert Narrow(within=0.1, least=3, most=20).looks == (3, 6, 12, 20)
    assert Narrow(within=0.1, least=8, most=8).looks == (8,)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"repeats": "many"}, "'repeats' = 'many': give an integer from 1 to 10000 or \"enough\""),
        ({"repeats": 4, "narrow": {"within": 0.1}}, "'narrow' needs 'repeats' = 'enough'"),
        ({"repeats": "enough", "narrow": {"within": 0}}, "'narrow.within' = 0: give a number above 0"),
        ({"repeats": "enough", "narrow": {"within": 0.1, "least": 1}}, "'narrow.least' = 1: give an integer from 2"),
        ({"repeats": "enough", "narrow": {"within": 0.1, "most": 3}}, "narrow: 'least' = 4 is above 'most' = 3"),
        ({"repeats": "enough", "narrow": {}}, "missing key 'narrow.within'"),
        ({"repeats": "enough", "tasks": ["lengths", "peak_memory"]}, "measure 'peak_memory' with a number of answers"),
        ({"repeats": "enough", "tasks": ["tiny_choice"]}, "none of the tasks tiny_choice generates answers"),
        (
            {"repeats": "enough", "documents": "enough", "reference": "none"},
            "'repeats' = 'enough' asks all documents: it cannot go with 'documents' = 'enough'",
        ),
    ],
)
def test_what_cannot_become_narrow_is_refused_by_name(folder: Path, settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        run(folder, **settings)
    assert told in str(refused.value)


def test_greedy_answers_and_models_without_a_journal_are_refused(folder: Path) -> None:
    with pytest.raises(TaskError, match="'repeats' = 4 of a greedy generation is one answer"):
        run(folder, repeats="enough", gen_kwargs={"do_sample": False})
    config = {"model": {"path": "nowhere"}, "tasks": ["lengths"], "include_path": str(folder), "repeats": "enough"}
    with pytest.raises(ConfigError, match="lm-eval's own models draw every answer anew: give an integer"):
        evaluate(EvaluationConfig.parse(config), lm=Knows({}))

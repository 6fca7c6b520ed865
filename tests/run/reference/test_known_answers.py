"""Scores and generations that are known are not computed again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from olive_ext.backends.lm_eval import OrtLM
from olive_ext.errors import RunError
from olive_ext.run.reference.known_answers import KeptGenerations, ReferenceScores
from tests.backends.reference import instances, model
from tests.run.duo import NetSession

GREEDY = {"until": ["\n"], "max_gen_toks": 5}
SAMPLED = {**GREEDY, "do_sample": True, "temperature": 1.0}


class Asked:
    """A model over a file, what its observer was told, and how much it had to generate."""

    def __init__(self, file: Path, **facts: Any) -> None:
        self.told: list[tuple[Any, Any, Any]] = []
        kept = KeptGenerations(file, facts, lambda *told: self.told.append(told))
        self.lm = OrtLM(session=NetSession(model()), observer=kept.observe)
        self.lm.known_answers = kept
        self.engine = self.lm.session._engine

    @property
    def prompts(self) -> set[tuple[int, ...]]:
        return {request.tokens for request in self.engine.generated}


def test_second_run_generates_nothing_and_tells_the_same(tmp_path: Path) -> None:
    requests = instances("generate_until", [("the cat", GREEDY), ("the dog", GREEDY), ("the cat", GREEDY)])
    first = Asked(tmp_path / "g")
    texts = first.lm.generate_until(requests)
    second = Asked(tmp_path / "g")
    assert second.lm.generate_until(requests) == texts
    assert len(first.prompts) == 2
    assert second.prompts == set()
    for one, two in zip(sorted(first.told, key=_place), sorted(second.told, key=_place), strict=True):
        assert one[0] is two[0]
        assert one[1].prompt == two[1].prompt
        assert one[2].tokens == two[2].tokens


def _place(told: tuple[Any, Any, Any]) -> int:
    return int(told[0].idx)


def test_other_settings_and_other_facts_are_other_answers(tmp_path: Path) -> None:
    Asked(tmp_path / "g", model=1).lm.generate_until(instances("generate_until", [("the cat", GREEDY)]))
    longer = Asked(tmp_path / "g", model=1)
    longer.lm.generate_until(instances("generate_until", [("the cat", {**GREEDY, "max_gen_toks": 6})]))
    assert longer.prompts
    other = Asked(tmp_path / "g", model=2)
    other.lm.generate_until(instances("generate_until", [("the cat", GREEDY)]))
    assert other.prompts


def test_sampled_answers_are_generated_again(tmp_path: Path) -> None:
    requests = instances("generate_until", [("the cat", SAMPLED)], repeats=3)
    Asked(tmp_path / "g").lm.generate_until(requests)
    again = Asked(tmp_path / "g")
    again.lm.generate_until(requests)
    assert again.prompts


def test_a_line_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "g"
    requests = instances("generate_until", [("the cat", GREEDY), ("the dog", GREEDY)])
    texts = Asked(file).lm.generate_until(requests)
    file.write_text(file.read_text()[:-20])
    again = Asked(file)
    assert again.lm.generate_until(requests) == texts
    assert len(again.prompts) == 1
    last = Asked(file)
    last.lm.generate_until(requests)
    assert last.prompts == set()


def test_files_of_earlier_releases_are_read(tmp_path: Path) -> None:
    """Key and names are fixed: the digest is of the facts as JSON, and lm-eval's arguments."""
    content = json.dumps(['{"model": "abc"}', "the cat", GREEDY], sort_keys=True)
    key = hashlib.sha256(content.encode()).hexdigest()[:32]
    row = {"key": key, "text": "kept", "prompt": [5, 6], "source": None, "tokens": [7, 8]}
    (tmp_path / "g").write_text(f"\n{json.dumps(row)}")
    again = Asked(tmp_path / "g", model="abc")
    assert again.lm.generate_until(instances("generate_until", [("the cat", GREEDY)])) == ["kept"]
    assert again.prompts == set()
    ((_, request, output),) = again.told
    assert (request.prompt, output.tokens) == ((5, 6), (7, 8))


@pytest.mark.parametrize("kind", ["loglikelihood", "loglikelihood_rolling"])
def test_scores_are_the_models_own(tmp_path: Path, kind: str) -> None:
    asked = instances(kind, [("the cat", " sat")] if kind == "loglikelihood" else [("the cat sat",)])
    repeating = Asked(tmp_path / "g").lm
    assert getattr(repeating, kind)(asked) == getattr(OrtLM(session=NetSession(model())), kind)(asked)


def scores(*args: str) -> ReferenceScores:
    known = ReferenceScores()
    compared: Any = SimpleNamespace(reference_logprobs=[-0.5, -0.25], reference_is_greedy=[True, True])
    known.note(args, compared)
    return known


def test_scores_of_the_reference_answer_the_second_run() -> None:
    ask = lambda requests: pytest.fail("the model was asked")  # noqa: E731
    assert scores("the cat", " sat")(instances("loglikelihood", [("the cat", " sat")]), ask) == [(-0.75, True)]
    assert scores("the cat sat")(instances("loglikelihood_rolling", [("the cat sat",)]), ask) == [-0.75]
    assert scores("a", "b")(instances("loglikelihood", [("the cat", "")]), ask) == [(0.0, True)]


def test_generations_are_the_models_own_in_the_second_run() -> None:
    requests = instances("generate_until", [("the cat", GREEDY)])
    assert scores("a", "b")(requests, lambda passed: [len(passed)]) == [1]


def test_prompts_that_change_from_run_to_run_are_refused() -> None:
    with pytest.raises(RunError, match="lm-eval asks something else the second time"):
        scores("the cat", " sat")(instances("loglikelihood", [("the dog", " sat")]), list)

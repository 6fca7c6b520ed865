"""The quickstart recipe's data, tasks and model: reproducible, held out, small, and really learned."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "quickstart"
TASKS = RECIPE / "tasks"
TASK_NAMES = ["quickstart_choice", "quickstart_letters", "quickstart_perplexity", "quickstart_generate"]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """What the committed script writes now: `tasks/` and `text.jsonl`."""
    folder = tmp_path_factory.mktemp("quickstart")
    script = RECIPE / "make" / "make_data.py"
    command = [sys.executable, str(script), "--tasks", str(folder / "tasks"), "--text", str(folder / "text.jsonl")]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONDONTWRITEBYTECODE": "1"})
    return folder


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (TASKS / name).read_text(encoding="utf-8").splitlines()]


@pytest.mark.long
def test_task_files_when_made_again_are_the_committed_bytes(written):
    made = sorted((written / "tasks").iterdir())

    assert [path.name for path in made] == sorted(path.name for path in TASKS.glob("*.jsonl"))
    for path in made:
        assert path.read_bytes() == (TASKS / path.name).read_bytes(), path.name


@pytest.mark.long
def test_training_text_holds_no_evaluation_document(written):
    text = "\n\n".join(json.loads(line) for line in (written / "text.jsonl").read_text(encoding="utf-8").splitlines())
    pages = [part for row in rows("perplexity.jsonl") for part in row["page"].split("\n\n")]
    documents = [row["context"] for row in rows("choice.jsonl")] + [row["question"] for row in rows("generate.jsonl")]

    assert not [document for document in documents + pages if document in text]


@pytest.mark.long
def test_training_quizzes_ask_no_evaluation_question(written):
    """Who saw what, and four words to choose from: no pair or set of the evaluation is in the training text."""
    text = "\n".join(json.loads(line) for line in (written / "text.jsonl").read_text(encoding="utf-8").splitlines())
    lines = text.splitlines()
    starts = [index for index, line in enumerate(lines) if line.startswith("A. ")]
    fixed = frozenset(("an animal", "a food", "a thing", "a place"))
    words = {frozenset(line[3:] for line in lines[index : index + 4]) for index in starts} - {fixed}
    sights = set(re.findall(r"\w+ saw the \w+", text))
    questions = rows("letters.jsonl")
    asked_words = {frozenset(row["choices"]) for row in questions} - {fixed}
    asked_sights = {sight for row in questions for sight in re.findall(r"\w+ saw the \w+", row["question"])}

    assert words
    assert sights
    assert asked_words
    assert asked_sights
    assert not words & asked_words
    assert not sights & asked_sights


def test_letters_are_asked_for_evenly():
    answers = Counter(row["answer"] for row in rows("letters.jsonl"))

    assert sorted(answers) == [0, 1, 2, 3]
    assert min(answers.values()) >= 0.15 * sum(answers.values())


def test_tasks_load_from_any_directory(tmp_path, monkeypatch):
    tasks = pytest.importorskip("lm_eval.tasks")
    monkeypatch.chdir(tmp_path)

    loaded = tasks.TaskManager(include_defaults=False, include_path=str(TASKS)).load(TASK_NAMES)["tasks"]

    assert sorted(loaded) == sorted(TASK_NAMES)
    assert {name: len(task.eval_docs) for name, task in loaded.items()} == {
        "quickstart_choice": 160,
        "quickstart_letters": 160,
        "quickstart_perplexity": 40,
        "quickstart_generate": 120,
    }


@pytest.fixture(scope="module")
def scores() -> dict[str, dict]:
    """lm-eval's own scores of the float model on the first documents of every task."""
    lm_eval = pytest.importorskip("lm_eval")
    torch = pytest.importorskip("torch")
    from lm_eval.tasks import TaskManager

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model gains nothing from more, and on a busy machine waits for them
    results = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(RECIPE / "model")},
        tasks=TASK_NAMES,
        task_manager=TaskManager(include_defaults=False, include_path=str(TASKS)),
        limit=16,
        batch_size=16,
        device="cpu",
        bootstrap_iters=0,
    )
    torch.set_num_threads(threads)
    return results["results"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("task", "metric", "at_least"),
    [
        ("quickstart_choice", "acc,none", 0.6),
        ("quickstart_choice", "acc_norm,none", 0.6),
        ("quickstart_letters", "acc,none", 0.5),
        ("quickstart_generate", "exact_match,answer", 0.5),
    ],
)
def test_model_scores_above_chance(scores, task, metric, at_least):
    assert scores[task][metric] >= at_least


@pytest.mark.long
def test_model_finds_held_out_pages_likely(scores):
    assert scores["quickstart_perplexity"]["bits_per_byte,none"] <= 0.4

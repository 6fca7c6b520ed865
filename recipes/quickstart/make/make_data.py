"""Writes the four evaluation task files and (asked with --text) the training text, the same bytes every time.

    python recipes/quickstart/make/make_data.py [--tasks DIR] [--text FILE]

Knows no tokenizer and no model: a training document is a string, special tokens are spelled out by `train`.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from documents import LETTERS, QUIZ_TITLE, note, problem, quiz, quiz_text, story

HERE = Path(__file__).resolve().parent
NUM_TRAINING_DOCUMENTS = 40_000
NUM_SHOTS = 4
CHOICE_MIX = (1, 2, 4)
EVALUATION_SEED = 1


def chat(user: str, assistant: str) -> str:
    """One exchange in the words of the chat template, so that a templated prompt is no surprise to the model."""
    return f"<|user|>{user}</s><|assistant|>{assistant}"


def training_document(rng: Random) -> str:
    kind = rng.choices(("note", "story", "quiz", "problem"), (12, 28, 42, 18))[0]
    is_chat = rng.random() < 0.1
    if kind == "note":
        return note(rng)
    if kind == "story":
        told = [story(rng, held_out=False) for _ in range(rng.randint(1, 3))]
        return "\n\n".join(one.context + one.right for one in told)
    if kind == "quiz":
        asked = [quiz(rng, held_out=False) for _ in range(1 if is_chat else rng.randint(1, NUM_SHOTS + 1))]
        pairs = [(quiz_text(one), f" {LETTERS[one.answer]}") for one in asked]
        title = QUIZ_TITLE if rng.random() < 0.7 else ""
    else:
        posed = [problem(rng, held_out=False) for _ in range(1 if is_chat else rng.randint(1, 3))]
        pairs = [(one.question, one.solution) for one in posed]
        title = ""
    if is_chat:
        return chat(title + pairs[0][0], pairs[0][1].strip())
    return title + "\n\n".join(question + answer for question, answer in pairs)


def training_text(count: int = NUM_TRAINING_DOCUMENTS, seed: int = 0) -> Iterator[str]:
    rng = Random(seed)
    return (training_document(rng) for _ in range(count))


def distinct(draw, count: int) -> list:
    """Draw until there are `count` different documents, in the order of drawing."""
    seen: dict[str, object] = {}
    while len(seen) < count:
        drawn = draw()
        seen.setdefault(repr(drawn), drawn)
    return list(seen.values())


def choice_rows(rng: Random) -> list[dict]:
    told = distinct(lambda: story(rng, held_out=True, mix=CHOICE_MIX), 160)
    return [{"context": one.context, "endings": one.options, "answer": one.answer} for one in told]


def letters_rows(rng: Random, held_out: bool, count: int) -> list[dict]:
    asked = distinct(lambda: quiz(rng, held_out), count)
    return [{"question": one.context, "choices": one.options, "answer": one.answer} for one in asked]


def perplexity_rows(rng: Random) -> list[dict]:
    """Pages of stories and problems: up to about as long as the model's context."""
    return [{"page": "\n\n".join(page(rng))} for _ in range(40)]


def page(rng: Random) -> Iterator[str]:
    for _ in range(rng.randint(1, 8)):
        told = story(rng, held_out=True)
        yield told.context + told.right
    posed = problem(rng, held_out=True)
    yield posed.question + posed.solution


def generate_rows(rng: Random) -> list[dict]:
    posed = distinct(lambda: problem(rng, held_out=True), 120)
    return [{"question": one.question, "answer": str(one.answer)} for one in posed]


def task_files() -> dict[str, str]:
    """File name -> JSON lines of every evaluation file."""
    rng = Random(EVALUATION_SEED)
    rows = {
        "choice.jsonl": choice_rows(rng),
        "letters.jsonl": letters_rows(rng, held_out=True, count=160),
        "letters_shots.jsonl": letters_rows(rng, held_out=False, count=NUM_SHOTS),
        "perplexity.jsonl": perplexity_rows(rng),
        "generate.jsonl": generate_rows(rng),
    }
    return {name: "".join(json.dumps(row) + "\n" for row in listed) for name, listed in rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", type=Path, default=HERE.parent / "tasks")
    parser.add_argument("--text", type=Path)
    args = parser.parse_args()
    args.tasks.mkdir(parents=True, exist_ok=True)
    for name, text in task_files().items():
        (args.tasks / name).write_text(text, encoding="utf-8", newline="\n")
    if args.text:
        args.text.parent.mkdir(parents=True, exist_ok=True)
        with args.text.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(json.dumps(document) + "\n" for document in training_text())


if __name__ == "__main__":
    main()

"""Records by how much a model prefers the right answer, and where its quantized forms answer otherwise.

    python docs/benchmarks/record_margins.py [--documents 10000] [--output docs/benchmarks/data/quickstart_margins.npz]

The documents have the shape of the quickstart's two tasks of choices, half of each, drawn by the quickstart's own
generators from what its training text holds out; the models are the quickstart's, in float32 and quantized. Ten minutes
on two cores. `enough.py` reads the file. Knows nothing about sampling.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from common import ROOT

CANDIDATES = {"int8": (8, 32), "int4_b32": (4, 32), "int4_b128": (4, 128)}
NUM_CHOICES = 4
SEED = 2026


def questions(count: int) -> list[tuple[str, list[str], int]]:
    """(context, four targets, index of the right one): as many endings of stories as quizzes answered by a letter."""
    sys.path.insert(0, str(ROOT / "recipes" / "quickstart" / "make"))
    from documents import LETTERS, QUIZ_TITLE, quiz, quiz_text, story
    from make_data import CHOICE_MIX, NUM_SHOTS, distinct

    random = Random(SEED)
    stories = distinct(lambda: story(random, held_out=True, mix=CHOICE_MIX), count // 2)
    quizzes = distinct(lambda: quiz(random, True), count - count // 2)
    shots = distinct(lambda: quiz(random, False), NUM_SHOTS)
    head = QUIZ_TITLE + "".join(f"{quiz_text(shot)} {LETTERS[shot.answer]}\n\n" for shot in shots)
    letters = [f" {letter}" for letter in LETTERS]
    endings = [(one.context, list(one.options), one.answer) for one in stories]
    return endings + [(head + quiz_text(one), letters, one.answer) for one in quizzes]


def signed_margins(model: Path, documents: list[tuple[str, list[str], int]]) -> np.ndarray[Any, Any]:
    """Nats by which the right choice is above the best wrong one, [D]; below zero the model answers wrongly."""
    import olive_ext

    with olive_ext.open(model) as session:
        outputs = session.loglikelihood([(context, target) for context, targets, _ in documents for target in targets])
    scores = np.array([output.logprob for output in outputs]).reshape(-1, NUM_CHOICES)
    rows, right = np.arange(len(documents)), np.array([answer for _, _, answer in documents])
    own = scores[rows, right]
    scores[rows, right] = -np.inf
    return own - scores.max(axis=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=10_000)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "data" / "quickstart_margins.npz")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from tests.exports import quickstart

    documents = questions(args.documents)
    reference = signed_margins(quickstart.exported(), documents)
    found = {"margins": reference.astype(np.float16)}
    for name, form in CANDIDATES.items():
        right = signed_margins(quickstart.quantized(*form), documents) > 0
        found[name] = np.packbits(right)
        lost, gained = int(np.sum(~right & (reference > 0))), int(np.sum(right & (reference <= 0)))
        print(f"{name}: reference {np.mean(reference > 0):.4f}, {lost} answers lost, {gained} gained", flush=True)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(args.output, num_documents=len(documents), **found)


if __name__ == "__main__":
    main()

"""Evalution's MMLU, HellaSwag and GSM8K on rows that are written here: the shapes of the real ones, offline."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from datasets import Dataset
from evalution.benchmarks.gsm8k import GSM8K
from evalution.benchmarks.hellaswag import HellaSwag
from evalution.benchmarks.mmlu import MMLU

from tests.exports import TEXT

SENTENCES = [f"{sentence}." for sentence in TEXT.split(". ")]
SUBJECTS = ("anatomy", "astronomy")


def mmlu_rows(split: str) -> list[dict[str, Any]]:
    rng = random.Random(split)
    return [
        {
            "question": f"{' '.join(rng.choices(SENTENCES, k=2))} Which?",
            "choices": rng.sample(SENTENCES, 4),
            "answer": rng.randrange(4),
            "subject": SUBJECTS[number % 2],
        }
        for number in range(10 if split == "dev" else 24)
    ]


def hellaswag_rows(split: str) -> list[dict[str, Any]]:
    rng = random.Random(split)
    return [
        {
            "ctx_a": rng.choice(SENTENCES),
            "ctx_b": "he",
            "activity_label": "Painting",
            "endings": rng.sample(SENTENCES, 4),
            "label": str(rng.randrange(4)),
            "source_id": f"local~{number}",
            "split_type": "indomain",
        }
        for number in range(24)
    ]


def gsm8k_rows(split: str) -> list[dict[str, Any]]:
    rng = random.Random(split)
    return [
        {"question": f"{rng.choice(SENTENCES)} How many?", "answer": f"So many.\n#### {rng.randrange(100)}"}
        for _ in range(16)
    ]


def loader(rows: Callable[[str], list[dict[str, Any]]]) -> Callable[..., Dataset]:
    """In the place of `datasets.load_dataset`."""
    return lambda *_, split, **__: Dataset.from_list(rows(split))


class LocalMMLU(MMLU):  # type: ignore[misc] # Evalution has no types
    def dataset_loader(self) -> Any:
        return loader(mmlu_rows)


class LocalHellaSwag(HellaSwag):  # type: ignore[misc]
    def dataset_loader(self) -> Any:
        return loader(hellaswag_rows)


class LocalGSM8K(GSM8K):  # type: ignore[misc]
    def dataset_loader(self) -> Any:
        return loader(gsm8k_rows)


def all_suites() -> list[Any]:
    """Scores in a stream, scores in lists, and generations."""
    return [
        LocalMMLU(num_fewshot=1, stream=False),
        LocalHellaSwag(stream=False),
        LocalGSM8K(variant="base", stream=False, max_new_tokens=12),
    ]

"""Sounds of one to three tones and the words for them, made when a task is loaded: nothing to download."""

from __future__ import annotations

import random
from typing import Any

import datasets
import numpy as np

from olive_ext.backends.word_errors import normalized, word_error_rate

RATE = 16000
TONES = {"low": 220.0, "middle": 660.0, "high": 1760.0}
SECONDS = 0.4
NUM_DOCUMENTS = 24


def load(**_: Any) -> dict[str, datasets.Dataset]:
    """lm-eval's `custom_dataset`: each document has samples and the words for its tones."""
    rng = random.Random(0)
    rows = []
    for _number in range(NUM_DOCUMENTS):
        words = rng.choices(list(TONES), k=rng.randint(1, 3))
        rows.append({"samples": sound(words).tolist(), "text": " ".join(words)})
    return {"test": datasets.Dataset.from_list(rows)}


def sound(words: list[str]) -> np.ndarray:
    """One tone behind the other."""
    seconds_N = np.arange(int(RATE * SECONDS)) / RATE
    return np.concatenate([np.sin(2 * np.pi * TONES[word] * seconds_N) for word in words]).astype(np.float32)


def audio(doc: dict[str, Any]) -> list[dict[str, Any]]:
    """`doc_to_audio`."""
    return [{"array": np.asarray(doc["samples"], np.float32), "sampling_rate": RATE}]


def process(doc: dict[str, Any], results: list[str]) -> dict[str, tuple[str, str]]:
    """`process_results`."""
    return {"wer": normalized(doc["text"], results[0])}


def aggregate(items: list[tuple[str, str]]) -> float:
    """`aggregation`."""
    return word_error_rate(items)

"""Sounds of up to six tones, glides and hisses and the words for them, made when a task is loaded: the same on every
machine, and nothing to download. `recipes/speech/make/train.py` makes its own from other seeds."""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np

from olive_ext.backends.word_errors import normalized, word_error_rate

RATE = 16000
TONES = {
    "low": (220.0, 220.0),
    "middle": (660.0, 660.0),
    "high": (1760.0, 1760.0),
    "rising": (300.0, 1400.0),
    "falling": (1400.0, 300.0),
}
"""Hertz at a tone's beginning and at its end."""

WORDS = (*TONES, "hiss")
LOUDNESS_OF_NOISE = 0.1
NUM_DOCUMENTS = 60


def load(**_: Any) -> dict[str, datasets.Dataset]:
    """lm-eval's `custom_dataset`: each document has samples and the words for its sounds."""
    rng = np.random.default_rng(0)
    rows = []
    for _number in range(NUM_DOCUMENTS):
        words = some_words(rng, 6)
        rows.append({"samples": sound(words, rng).tolist(), "text": " ".join(words)})
    return {"test": datasets.Dataset.from_list(rows)}


def some_words(rng: np.random.Generator, most: int) -> list[str]:
    """One to `most` of `WORDS`."""
    return [str(word) for word in rng.choice(WORDS, rng.integers(1, most + 1))]


def sound(words: list[str], rng: np.random.Generator) -> np.ndarray:
    """A sound for each word, of a length, height and loudness of its own, behind a pause, in noise; 4 s at most."""
    parts = []
    for word in words:
        parts.append(np.zeros(int(RATE * rng.uniform(0.05, 0.2))))
        count, loudness = int(RATE * rng.uniform(0.2, 0.4)), rng.uniform(0.2, 1)
        if word == "hiss":
            parts.append(loudness * rng.normal(scale=0.5, size=count))
            continue
        first, last = np.array(TONES[word]) * rng.uniform(0.9, 1.1)
        parts.append(loudness * np.sin(2 * np.pi * np.cumsum(np.linspace(first, last, count)) / RATE))
    samples = np.concatenate(parts)
    samples += rng.normal(scale=LOUDNESS_OF_NOISE * rng.uniform(), size=len(samples))
    return np.clip(samples, -1, 1).astype(np.float32)


def audio(doc: dict[str, Any]) -> list[dict[str, Any]]:
    """`doc_to_audio`."""
    return [{"array": np.asarray(doc["samples"], np.float32), "sampling_rate": RATE}]


def process(doc: dict[str, Any], results: list[str]) -> dict[str, tuple[str, str]]:
    """`process_results`."""
    return {"wer": normalized(doc["text"], results[0])}


def aggregate(items: list[tuple[str, str]]) -> float:
    """`aggregation`."""
    return word_error_rate(items)

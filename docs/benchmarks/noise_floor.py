"""How far two equally valid ways of computing one quantized model are apart, beside what quantization cost.

    python docs/benchmarks/noise_floor.py [--texts 64]

A pass over the whole text, and token by token as in decoding, on the quickstart's pages and stories, in plain ONNX
Runtime without this package's engine. The KL from the float model is of the same positions.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT

FORMS = (
    ("int4, blocks of 32", {"bits": 4, "block_size": 32}),
    ("int4, blocks of 128", {"bits": 4, "block_size": 128}),
    ("int4, blocks of 64, zero points", {"bits": 4, "block_size": 64, "symmetric": False}),
    ("int8, blocks of 32", {"bits": 8, "block_size": 32}),
    ("int8, blocks of 128", {"bits": 8, "block_size": 128}),
)
LONGEST = 192


class Decoder:
    """A graph in plain ONNX Runtime."""

    def __init__(self, folder: Path) -> None:
        import onnxruntime as ort

        self._session = ort.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
        self._pasts = [item for item in self._session.get_inputs() if item.name.startswith("past")]

    def run(self, tokens: list[int], size: int) -> np.ndarray[Any, Any]:
        """Log-probabilities [S, V] of `tokens` fed in chunks of `size`."""
        caches = [np.zeros((1, item.shape[1], 0, item.shape[3]), np.float32) for item in self._pasts]
        found = []
        for start in range(0, len(tokens), size):
            chunk = tokens[start : start + size]
            feed = {"input_ids": np.array([chunk]), "attention_mask": np.ones((1, start + len(chunk)), np.int64)}
            feed |= {item.name: cache for item, cache in zip(self._pasts, caches, strict=True)}
            logits, *caches = self._session.run(None, feed)
            found.append(logits[0].astype(np.float64))
        logits_SV = np.concatenate(found)
        logits_SV -= logits_SV.max(-1, keepdims=True)
        logprobs: np.ndarray[Any, Any] = logits_SV - np.log(np.exp(logits_SV).sum(-1, keepdims=True))
        return logprobs


def kl(first_SV: np.ndarray[Any, Any], second_SV: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """KL(first || second) at each position, in nats."""
    divergence: np.ndarray[Any, Any] = (np.exp(first_SV) * (first_SV - second_SV)).sum(-1)
    return divergence


def texts(count: int) -> Iterator[str]:
    tasks = ROOT / "recipes" / "quickstart" / "tasks"
    for name, field in ("perplexity.jsonl", "page"), ("choice.jsonl", "context"):
        lines = (tasks / name).read_text(encoding="utf-8").splitlines()
        yield from (json.loads(line)[field] for line in lines[: count // 2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=64)
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from transformers import AutoTokenizer

    from tests.exports import quickstart

    tokenizer = AutoTokenizer.from_pretrained(quickstart.exported())
    tokens = [ids for text in texts(args.texts) if len(ids := tokenizer(text)["input_ids"][:LONGEST]) > 1]
    reference = Decoder(quickstart.exported())
    expected = [reference.run(ids, LONGEST) for ids in tokens]
    print("| model | KL from float | KL whole pass, token by token | same top token | largest difference, nats |")
    print("|---|--:|--:|--:|--:|")
    for name, form in FORMS:
        decoder = Decoder(quickstart.quantized(**form, accuracy_level=4))
        whole, single = ([decoder.run(ids, size) for ids in tokens] for size in (LONGEST, 1))
        cost = np.concatenate([kl(one, other) for one, other in zip(expected, whole, strict=True)])
        floor = np.concatenate([kl(one, other) for one, other in zip(whole, single, strict=True)])
        pairs = list(zip(whole, single, strict=True))
        same = np.concatenate([one.argmax(-1) == other.argmax(-1) for one, other in pairs])
        ids = [np.array(one[1:]) for one in tokens]
        scored = [np.abs((a - b)[np.arange(len(t)), t]).max() for (a, b), t in zip(pairs, ids, strict=True) if len(t)]
        print(
            f"| {name} | {cost.mean():.2e} | {floor.mean():.2e} | {same.mean():.2%} | {max(scored):.3f} |", flush=True
        )


if __name__ == "__main__":
    main()

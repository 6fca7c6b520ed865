"""What the planned steps take at least: bytes and operations of each, against a device's rates.

    python docs/benchmarks/roofline.py PACKAGE --questions 300 --answer 1 --steps packed
    python docs/benchmarks/roofline.py config.json        of a dense decoder as Llama's, weights in half precision

Plans the steps of requests in MMLU-Pro's shape (ten answers a question) as the engine would, runs none of them, and
counts for each: the decoder's weights, read once; keys and values, read once for each position that is resident before
the step (a shared block is read once) and written for each token; 2 operations for each weight and token, 4 for each
attended position, head and size; the LM head for rows that are read. A step takes the longer of bytes / bandwidth and
operations / rate. The rates are an H200's: 4.8 TB/s, and 790 TFLOP/s that products reach in half precision.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gpu_engine_parts import LETTERS, OWN, SHOTS, questions

from olive_ext.bench.work import Work, read_work
from olive_ext.config import ModelSettings
from olive_ext.engine.engine import Engine
from olive_ext.engine.runners.runner import Capacity, Runner, Traits
from olive_ext.engine.step import Batching, Step, StepOutput
from olive_ext.model import resolve

BYTES_PER_SECOND, OPERATIONS_PER_SECOND = 4.8e12, 790e12
FORMS = {"packed": (Batching.PACKED, 1024), "rows": (Batching.RANGE, 1024)}
"""Batching and the most tokens of a step."""

NUM_SLOTS = 64


class PlanningRunner(Runner):
    """Runs nothing, and keeps the steps that it was given."""

    host_bytes = 0
    capacity = Capacity(0)

    def __init__(self, context_length: int, batching: Batching, num_slots: int, vocab_size: int) -> None:
        super().__init__(Traits(context_length, batching))
        self.capacity = Capacity(num_slots)
        self.steps: list[Step] = []
        self._vocab_size = vocab_size

    def reserve(self, positions: int, cells: int = 0) -> None:
        self.capacity = self.capacity._replace(positions=max(positions, self.capacity.positions))

    def run(self, step: Step) -> StepOutput:
        self.steps.append(step)
        num_rows = len(step.logits_rows)
        logprobs_T, greedy_R = np.zeros(len(step.targets), np.float32), np.zeros(num_rows, np.int64)
        return StepOutput(logprobs_T, greedy_R, np.zeros((len(step.samples), self._vocab_size), np.float32))

    def release_memory(self) -> None:
        """Nothing is held."""

    def describe(self) -> Mapping[str, Any]:
        return {}

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True)
class Sizes:
    """Of a decoder: bytes of its weights and of one position's keys and values, and its operations."""

    weight_bytes: float
    position_bytes: float
    work: Work

    def of(self, step: Step) -> dict[str, float]:
        """A step's tokens, bytes, operations, and the seconds that these take at least."""
        tokens = step.num_tokens
        attended = sum(sum(range(row.past + 1, row.past + len(row.tokens) + 1)) for row in step.rows)
        read = max(row.past for row in step.rows)  # rows of one step share their prefix here
        moved = self.weight_bytes + self.position_bytes * (read + tokens)
        operations = tokens * self.work.layers + attended * self.work.attention + len(step.logits_rows) * self.work.head
        seconds = max(moved / BYTES_PER_SECOND, operations / OPERATIONS_PER_SECOND)
        return {"tokens": tokens, "bytes": moved, "operations": operations, "seconds": seconds}


def read_sizes(path: Path) -> tuple[Sizes, int]:
    """The sizes of a package, or of a dense decoder with gated layers by its config.json; and the vocabulary's."""
    if path.suffix == ".json":
        config = json.loads(path.read_text(encoding="utf-8"))
        hidden, layers, vocab_size = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
        size = config.get("head_dim") or hidden // config["num_attention_heads"]
        queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
        weights = layers * (2 * hidden * queries + 2 * hidden * keys + 3 * hidden * config["intermediate_size"])
        work = Work(2.0 * weights, 4.0 * layers * queries, 2.0 * hidden * vocab_size, ())
        return Sizes(2.0 * (weights + hidden * vocab_size), 2.0 * 2 * layers * keys, work), vocab_size
    model = resolve(ModelSettings(model=str(path), execution_provider="cpu"))
    work_found = read_work(model.files.decoder, model.files.genai_config or model.files.hf_config)
    if work_found is None:
        raise SystemExit(f"'{path}': the graph or its configuration lacks the sizes")
    return Sizes(float(model.size or 0), float(model.spec.bytes_per_position), work_found), model.spec.vocab_size


def plan(path: Path, number: int, answer: int, form: str) -> dict[str, Any]:
    """The planned steps of `number` questions, and how many requests a second they allow."""
    sizes, vocab_size = read_sizes(path)
    batching, chunk_size = FORMS[form]
    runner = PlanningRunner(SHOTS + 2 * OWN + answer, batching, NUM_SLOTS, vocab_size)
    Engine(runner, chunk_size).run(questions(number, min(1000, vocab_size), answer=answer))
    steps = [sizes.of(step) for step in runner.steps]
    seconds = sum(step["seconds"] for step in steps)
    bound = sum(step["seconds"] for step in steps if step["bytes"] / BYTES_PER_SECOND >= step["seconds"])
    return {
        "steps": len(steps),
        "tokens": sum(step["tokens"] for step in steps),
        "gigabytes": sum(step["bytes"] for step in steps) / 1e9,
        "teraoperations": sum(step["operations"] for step in steps) / 1e12,
        "seconds": seconds,
        "bound_by_bytes": bound / seconds,
        "requests_per_second": number * LETTERS / seconds,
        "each": steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("path", metavar="PACKAGE|CONFIG", type=Path)
    parser.add_argument("--questions", metavar="N", type=int, default=300)
    parser.add_argument("--answer", metavar="TOKENS", type=int, default=1, help="tokens of each of ten answers")
    parser.add_argument("--steps", choices=FORMS, default="packed")
    parser.add_argument("--each", action="store_true", help="a line for each step")
    given = parser.parse_args()
    found = plan(given.path, given.questions, given.answer, given.steps)
    each = found.pop("each")
    shape = f"{given.questions} questions of {OWN} tokens behind {SHOTS}, {LETTERS} answers of {given.answer}"
    print(json.dumps({"steps are": given.steps, "shape": shape, **found}, indent=1))
    for step in each if given.each else []:
        print(" ".join(f"{name} {value:.3g}" for name, value in step.items()))


if __name__ == "__main__":
    main()

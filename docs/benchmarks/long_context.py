"""Needles in haystacks of 4k, 16k and 64k tokens: memory beside its plan, speed by length, KL by the answer's position.

    python docs/benchmarks/make_models.py MODELS --shape long-llama --precision fp32,int4
    python -m docs.benchmarks long_context MODELS --output long_context.json

Each length runs in a process of its own: the candidate (int4) alone, the reference (fp32) alone, then both in one
comparison. Seconds are of the processor, on two threads. A document hides one sentence at a tenth, at a half or at nine
tenths of its length; its answer is scored there, and once more at the end. `a slot` is the KV cache of one text as the
engine plans it, `memory` the most that the process grew by while it scored: texts that begin alike are fed once, so one
slot is touched, with the copies of what begins alike.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from harness import measured, parser_of, table, timed, write

DEPTHS = (0.1, 0.5, 0.9)
HAY = "the river runs past the old mill and the road turns north beyond the field . "
NEEDLE = "the number is"
ANSWER = " seven and four"
HEADS = (
    "tokens",
    "fed",
    "longest step",
    "steps",
    "seconds",
    "tokens/s",
    "comparison over both",
    "a slot, MB",
    "memory, MB",
)
POSITION_BYTES = 4 * 2 * 2 * 64 * 4
"""Of one position in the cache of the shape long-llama: layers, keys and values, heads, head size, float32."""


def documents(count: Callable[[str], int], length: int) -> list[tuple[str, str]]:
    """Contexts of nearly `length` tokens with their answers: after the needle at each depth, and at the end."""
    sentences = (length - 64) / (count(HAY * 9) / 9)
    pairs = []
    for depth in DEPTHS:
        before, after = HAY * int(sentences * depth), HAY * int(sentences * (1 - depth))
        pairs += [(before + NEEDLE, ANSWER), (before + NEEDLE + ANSWER + " . " + after + NEEDLE, ANSWER)]
    return pairs


def measure(models: Path, length: int, chunk_size: int) -> dict[str, Any]:
    """Seconds, tokens and bytes of one length, and the mean KL of each answer's tokens by where it stands."""
    from transformers import AutoTokenizer

    import olive_ext
    from olive_ext.run.machine import PeakMemory

    tokenizer = AutoTokenizer.from_pretrained(models / "hf")
    pairs, warmup = (documents(lambda text: len(tokenizer.encode(text)), size) for size in (length, 256))
    engine = {"num_threads": 2, "chunk_size": chunk_size}
    with olive_ext.open(models / "int4", engine=engine) as session:
        session.loglikelihood(warmup)
        session.release_memory()
        opened, counters = psutil.Process().memory_info().rss, session.counters
        steps, fed = counters.steps, counters.tokens_fed
        with PeakMemory() as memory:
            alone, _, seconds = timed(lambda: session.loglikelihood(pairs))
        steps, fed = counters.steps - steps, counters.tokens_fed - fed
        slot = session.describe_execution()["capacity"] * POSITION_BYTES
    with olive_ext.open(models / "fp32", engine=engine) as session:
        session.loglikelihood(warmup)
        _, _, reference = timed(lambda: session.loglikelihood(pairs))
    with olive_ext.open(models / "int4", engine=engine, reference=models / "fp32") as session:
        session.loglikelihood(warmup)
        outputs, _, comparison = timed(lambda: session.loglikelihood(pairs))
    if any(one.token_logprobs != two.token_logprobs for one, two in zip(alone, outputs, strict=True)):
        raise AssertionError("the numbers differ with a reference")
    kl = sorted((int(found.compared.positions[0]), float(found.compared.kl.mean())) for found in outputs)
    return {
        "tokens": kl[-1][0],
        "fed": fed,
        "chunk_size": chunk_size,
        "steps": steps,
        "seconds": seconds,
        "reference": reference,
        "comparison": comparison,
        "slot": slot,
        "memory": memory.bytes - opened,
        "kl": kl,
    }


def row(one: dict[str, Any]) -> tuple[str, ...]:
    """The table's line of one length."""
    counts = [f"{one[name]:,}" for name in ("tokens", "fed", "chunk_size", "steps")]
    ratio = one["comparison"] / (one["seconds"] + one["reference"])
    times = f"{one['seconds']:.1f}", f"{one['fed'] / one['seconds']:,.0f}", f"{ratio:.2f}"
    return *counts, *times, *(f"{one[name] / 1e6:.0f}" for name in ("slot", "memory"))


def main() -> None:
    """Prints a line for each length, then the KL of each answer by its position."""
    parser = parser_of(__doc__, "models")
    parser.add_argument("--lengths", metavar="N", type=int, nargs="+", default=(4096, 16384, 65536))
    parser.add_argument("--chunk-size", metavar="N", type=int, default=512)
    parser.add_argument("--length", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.length:
        print(json.dumps(measure(given.models, given.length, given.chunk_size)))
        return
    words = (given.models, "--chunk-size", given.chunk_size, "--length")
    results = [measured(__file__, [*words, length]) for length in given.lengths]
    print(table(HEADS, map(row, results)))
    print(table(("0 tokens before", "KL, nats"), [(f"{at:,}", f"{kl:.2e}") for one in results for at, kl in one["kl"]]))
    write(given.output, given, lengths=results)


if __name__ == "__main__":
    main()

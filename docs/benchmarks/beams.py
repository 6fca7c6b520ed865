"""Beam search here and in transformers, on the same weights: processor seconds, tokens a second, equal sequences.

    python docs/benchmarks/beams.py PACKAGE HF_FOLDER --beams 4 --prompts 6 --tokens 32

Prompts are random ids of 10 to 60 tokens. transformers searches one prompt after the other, and all of them in one
batch filled up in front. Each form runs twice, in turns; the better run counts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Sequences = list[tuple[int, ...]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("hf", type=Path)
    for name, default in (("beams", 4), ("prompts", 6), ("tokens", 32), ("threads", 1), ("slots", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    draw = random.Random(0)
    prompts = [[draw.randrange(4, 900) for _ in range(draw.randint(10, 60))] for _ in range(options.prompts)]
    forms = {"ours": ours(options, prompts), **transformers_forms(options, prompts)}
    runs: dict[str, list[float]] = {name: [] for name in forms}
    found: dict[str, Sequences] = {}
    for _ in range(2):
        for name, run in forms.items():
            begin = time.process_time()
            found[name] = run()
            runs[name].append(time.process_time() - begin)
    expected = found["transformers, one by one"]
    for name, seconds in runs.items():
        num_tokens, best = sum(map(len, found[name])), min(seconds)
        equal = sum(one == other for one, other in zip(found[name], expected, strict=True))
        row = {"processor_s": round(best, 2), "tokens_per_s": round(num_tokens / best, 1), "equal": equal}
        print(json.dumps({"form": name, **row, "of": len(prompts)}))


def ours(options: argparse.Namespace, prompts: Sequence[list[int]]) -> Callable[[], Sequences]:
    """The session, with slots for all searches at once."""
    import olive_ext
    from olive_ext.text.requests import GenerationRequest

    slots = options.slots or options.beams * len(prompts)
    engine = {"num_slots": slots, "num_threads": options.threads}
    session = olive_ext.open(options.package, execution_provider="cpu", engine=engine)
    session.stop_ids = frozenset()
    asked = [GenerationRequest(prompt, max_new_tokens=options.tokens, num_beams=options.beams) for prompt in prompts]

    def run() -> Sequences:
        session.gc()
        return [output.tokens for output in session.generate(asked)]

    return run


def transformers_forms(options: argparse.Namespace, prompts: Sequence[list[int]]) -> dict[str, Callable[[], Sequences]]:
    """`generate` with a batch of one, and with all prompts."""
    import torch
    import transformers

    torch.set_num_threads(options.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(options.hf, dtype=torch.float32).eval()
    settings: dict[str, Any] = {"num_beams": options.beams, "max_new_tokens": options.tokens, "do_sample": False}
    config = transformers.GenerationConfig(**settings, pad_token_id=0)

    def search(batch: Sequence[list[int]]) -> Sequences:
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in batch])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
        with torch.inference_mode():
            rows = model.generate(ids, attention_mask=mask, generation_config=config)
        return [tuple(row[width:]) for row in rows.tolist()]

    return {
        "transformers, one by one": lambda: [search([prompt])[0] for prompt in prompts],
        "transformers, one batch": lambda: search(prompts),
    }


if __name__ == "__main__":
    main()

"""How many passes over the documents it takes until the ten products that lose most are certain.

    python -m docs.benchmarks race_passes WORK [--shape tiny-30-layers] [--spread 0.6] [--documents N] [--tokens N]

Makes the shape with random weights, float and int4, and short documents of English text. Random weights of one scale
lose alike, which no trained model's do: the quickstart's 21 lose 7e-6 to 1.3e-3 nats. So the scale of each product is
drawn from a log-normal distribution. Run again after an interruption, it goes on where it was.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

from harness import parser_of, run_script, write
from make_models import SHAPES, corpus

from olive_ext.plugins.diagnose.remedy import locate as location
from olive_ext.plugins.diagnose.remedy.race import Race

TASK = """task: short_texts
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: byte_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]
metadata: {version: 1.0}
"""


class _Told(Race):
    """Keeps the passes after each look, how many were certain then, and how many quantities stayed open."""

    looks: list[dict[str, float]] = []  # noqa: RUF012
    _start = time.perf_counter()

    def _standing(self, num_largest: int, num_looks: int) -> tuple[frozenset[int], list[int]]:
        certain, contested = super()._standing(num_largest, num_looks)
        seconds = time.perf_counter() - self._start
        look = {"passes": self.num_passes, "certain": len(certain), "open": len(contested), "seconds": seconds}
        self.looks.append(look)
        print(look, flush=True)
        return certain, contested


def main() -> None:
    """Makes what is missing, and runs the race."""
    parser = parser_of(__doc__, "work")
    parser.add_argument("--shape", choices=SHAPES, default="tiny-30-layers")
    parser.add_argument("--spread", type=float, default=0.6)
    parser.add_argument("--documents", metavar="N", type=int, default=400)
    parser.add_argument("--tokens", metavar="N", type=int, default=16)
    parser.add_argument("--top", metavar="N", type=int, default=10)
    given = parser.parse_args()
    words = [given.work, "--shape", given.shape, "--spread", given.spread, "--extra", "disable_qkv_fusion=true"]
    if run_script("make_models.py", words):
        sys.exit(1)
    tasks = documents(given)
    location.Race = _Told  # type: ignore[attr-defined]
    start = time.process_time()
    loss_map = location.locate(
        str(given.work / "int4"),
        reference=str(given.work / "fp32"),
        tasks=["short_texts"],
        include_path=str(tasks),
        top=given.top,
        output_dir=str(given.work / "map"),
        progress=True,
    )
    facts: dict[str, Any] = {
        "products": len(loss_map.entries),
        "documents": loss_map.num_documents,
        "positions": loss_map.num_positions,
        "passes": loss_map.passes,
        "certain": loss_map.num_certain,
        "processor_seconds": time.process_time() - start,
        "looks": _Told.looks,
        "losses": [entry.kl for entry in loss_map.entries],
    }
    print(json.dumps({name: value for name, value in facts.items() if name != "losses"}))
    write(given.output, given, **facts)


def documents(given: argparse.Namespace) -> Path:
    """A folder with the task: that many texts of so many tokens, one of each file of the corpus by turns."""
    import transformers

    folder: Path = given.work / f"tasks-{given.documents}-{given.tokens}"
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.work / "hf")
    texts = (text for text in corpus(()) if len(text) > 2000)
    pieces = (tokenizer.decode(tokenizer.encode(text[1000:2000])[: given.tokens]) for text in texts)
    rows = [json.dumps({"text": piece}) for piece in itertools.islice(dict.fromkeys(pieces), given.documents)]
    (folder / "texts.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    (folder / "short_texts.yaml").write_text(TASK.replace("FILE", str((folder / "texts.jsonl").resolve())))
    return folder


if __name__ == "__main__":
    main()

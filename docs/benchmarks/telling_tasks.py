"""Which task tells two models apart with the fewest tokens, from the sample logs of evaluations with a reference.

    olive-ext evaluate INT4 --reference FLOAT --tasks A,B --set sample_log_num=1000000 --output OUT
    python docs/benchmarks/telling_tasks.py OUT [OUT ...] --tokenizer INT4

A row for each task and measure: its metrics; `margin`, by how much the log-probability of the reference's choice lies
over the best other one's; of whole texts the logarithm of the perplexity's ratio. `z of 1,000 tokens` is the paired
difference over its standard deviation between documents, times the root of the documents that 1,000 tokens ask: the
tasks' order. Documents and tokens are those on which a two-sided test at 5 % finds the observed difference with a
power of 80 % (`stats.paired_answers`); where the logged documents do not find it the row says so, because the
observed difference may be none. Tokens are those of every document's distinct prompts and of all that is scored or
written after them.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from harness import parser_of, table, write

from olive_ext.report import from_json
from olive_ext.report.comparison import Divergence
from olive_ext.session.tokenizer import Tokenizer, load_tokenizer
from olive_ext.stats.paired_answers import documents_needed

HEADS = ("task", "measure", "n", "tokens each", "difference", "z", "z of 1,000 tokens", "needed", "tokens needed")
Z95 = 1.959964
BOTH = Z95 + 0.841621
"""Standard errors that a difference lies from 0 where a test at 5 % finds it with a power of 80 %."""


class Telling(NamedTuple):
    """How well one measure of one task tells candidate and reference apart; `needed` is None where it does not."""

    task: str
    measure: str
    num_documents: int
    tokens: float
    difference: float
    z: float
    needed: int | None

    @property
    def z_of_tokens(self) -> float:
        """On 1,000 tokens."""
        return self.z * math.sqrt(1000 / (self.tokens * self.num_documents))

    def row(self) -> tuple[object, ...]:
        """As in `HEADS`."""
        needed = ("not found", "") if self.needed is None else (f"{self.needed:,}", f"{self.needed * self.tokens:,.0f}")
        numbers = f"{self.tokens:.0f}", f"{self.difference:+.4f}", f"{self.z:+.2f}", f"{self.z_of_tokens:+.3f}"
        return (self.task, self.measure, self.num_documents, *numbers, *needed)


def main() -> None:
    """Prints the table, the most telling measure first."""
    parser = parser_of(__doc__)
    parser.add_argument("folders", metavar="OUT", type=Path, nargs="+")
    parser.add_argument("--tokenizer", required=True, help="a folder with the models' tokenizer")
    given = parser.parse_args()
    tokenizer = load_tokenizer(given.tokenizer)
    found = [item for folder in given.folders for item in of_folder(folder, tokenizer)]
    if not found:
        parser.error(f"{given.folders[0]}: no sample logs of an evaluation with a reference (sample_log_num)")
    found.sort(key=lambda item: (item.needed is None, -abs(item.z_of_tokens)))
    print(table(HEADS, [item.row() for item in found]))
    write(given.output, given, telling=[item._asdict() for item in found])


def of_folder(folder: Path, tokenizer: Tokenizer) -> Iterator[Telling]:
    """The measures of all tasks of one evaluation."""
    report = folder / "report.json"
    comparison = from_json(report.read_text(encoding="utf-8")).comparison if report.is_file() else None
    texts = {item.task: item for item in comparison.divergences if item.is_text} if comparison else {}
    for file in sorted(folder.glob("samples_*.jsonl")):
        yield from of_task(file, texts.get(file.stem.removeprefix("samples_")), tokenizer)


def of_task(file: Path, text: Divergence | None, tokenizer: Tokenizer) -> Iterator[Telling]:
    """The measures of one task's log; `text` has those of whole texts."""
    differences: dict[str, dict[int, float]] = defaultdict(dict)
    tokens: dict[int, int] = {}
    for line in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
        number = line["doc_id"]
        tokens.setdefault(number, tokens_of(line, tokenizer))
        for name, value in measures(line):
            differences[name].setdefault(number, value)
    task = file.stem.removeprefix("samples_")
    for name, by_document in differences.items():
        values = np.array([*by_document.values()])
        mean, deviation = float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else 0.0
        z = mean / deviation * math.sqrt(len(values)) if deviation else 0.0
        is_binary = bool(np.isin(values, (-1, 0, 1)).all())
        needed = documents_needed(values, abs(mean), is_binary) if abs(z) > Z95 else None
        each = float(np.mean([tokens[number] for number in by_document]))
        yield Telling(task, name, len(values), each, mean, z, needed)
    if text is not None and text.perplexity_ratio_stderr:
        change, count = math.log(text.perplexity_ratio), text.num_documents
        z = change / (text.perplexity_ratio_stderr / text.perplexity_ratio)
        needed = math.ceil(count * (BOTH / z) ** 2) if abs(z) > Z95 else None
        yield Telling(task, "log perplexity", count, float(np.mean([*tokens.values()])), change, z, needed)


def measures(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Candidate minus reference of one document: its metrics that are numbers, and the margin."""
    own = line.get("olive_ext", {})
    several = "" if line["filter"] == "none" else f", {line['filter']}"
    for name, reference in own.get("reference_values", {}).items():
        if all(isinstance(value, int | float) and math.isfinite(value) for value in (line.get(name), reference)):
            yield name + several, float(line[name]) - float(reference)
    if (margins := own.get("margins")) is not None:
        yield "margin", margins["candidate"] - margins["reference"]


def tokens_of(line: Mapping[str, Any], tokenizer: Tokenizer) -> int:
    """Tokens that one document asks: shared prompts once, and every continuation."""
    prompts, after = set[str](), list[str]()
    for asked, said in zip(line["arguments"].values(), line["resps"], strict=True):
        prompts.add(str(asked["arg_0"]))
        more = asked.get("arg_1")
        after += [more] if isinstance(more, str) else [text for text in said if isinstance(text, str) and more]
    return sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in (*prompts, *after) if text)


if __name__ == "__main__":
    main()

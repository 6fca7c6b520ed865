"""The cost of a comparison with a reference: time, disk and memory, over paragraphs of WikiText-2.

    python docs/benchmarks/make_models.py MODELS --shape smollm2-135m --precision fp32,int4
    python docs/benchmarks/comparison_cost.py MODELS --output DIR

MODELS holds fp32, the reference, and int4, the candidate. Both are scored alone, then the candidate with a resident
reference, then the reference while it is recorded, and the candidate against the record; each in a process of its own,
which times the scoring alone, after a warm-up. The two comparisons run once more on a quarter of the documents, for
memory. At 200 documents (46,000 tokens) that takes ten minutes on two cores; --documents 8 tries it out.
The task is lm-eval's own, which needs the network once; --task and --include-path take another that scores whole texts.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from harness import measured, parser_of, timed, write
from harness import table as markdown

PARTS = ("reference", "candidate", "resident", "recording", "recorded")
SMALL = ("resident/4", "recording/4", "recorded/4")
SHORTEST = 30
"""Words of a paragraph at least; shorter ones are headings and remains of lists."""


def paragraphs(task: str, include_path: str | None, count: int) -> list[str]:
    """The first `count` paragraphs of the task's texts, and two more to warm up with."""
    from docs.benchmarks.speed.peers import record
    from olive_ext.config import EvaluationSettings

    requests = record(EvaluationSettings(tasks=[task], include_path=include_path))
    lines = [line.strip() for one in requests for line in str(one.args[0]).split("\n")]
    long_lines = [line for line in lines if len(line.split()) >= SHORTEST and not line.startswith("=")]
    if len(long_lines) < count + 2:
        raise SystemExit(f"'{task}' has {len(long_lines)} paragraphs, {count + 2} are needed")
    return long_lines[: count + 2]


def measure(part: str, models: Path, folder: Path, num_threads: int) -> dict[str, Any]:
    """Runs one part in this process: seconds, memory in bytes, and the numbers of the comparison."""
    import olive_ext
    from olive_ext.records import Records
    from olive_ext.run.machine import PeakMemory

    name, _, is_small = part.partition("/")
    texts = json.loads((folder / "documents.json").read_text(encoding="utf-8"))
    documents, warmup = texts[:-2], texts[-2:]
    documents = documents[: len(documents) // 4] if is_small else documents
    records = folder / ("records-small" if is_small else "records")
    options: dict[str, Any] = {"engine": {"num_threads": num_threads}}
    if name == "resident":
        options["reference"] = models / "fp32"
    if name == "recording":
        shutil.rmtree(records, ignore_errors=True)  # what an earlier round has recorded would be taken from there
        options["record_to"] = records
    if name == "recorded":
        (kept,) = (path for path in records.iterdir() if path.is_dir())
        options["reference"] = Records.read(kept)
    with olive_ext.open(models / ("fp32" if name in ("reference", "recording") else "int4"), **options) as session:
        session.loglikelihood_rolling(warmup)
        session.gc()
        opened = psutil.Process().memory_info().rss
        with PeakMemory() as memory:
            outputs, seconds, cpu = timed(lambda: session.loglikelihood_rolling(documents))
        results = {"seconds": seconds, "cpu_seconds": cpu, "peak": memory.bytes, "above_open": memory.bytes - opened}
        results |= {"documents": len(documents), "tokens": sum(output.token_count for output in outputs)}
        results |= _distance(outputs) if outputs[0].compared is not None and name != "recording" else {}
        if session.records is not None:
            session.records.flush()
            results |= {"records": session.records.num_records, "vocabulary": session.records.form.vocab_size}
            results["disk"] = sum(file.stat().st_size for file in session.records.folder.iterdir())
    return results


def _distance(outputs: list[Any]) -> dict[str, float]:
    from olive_ext.stats.compared_fields import Positions
    from olive_ext.stats.distances import measure_divergence

    positions = Positions()
    for number, output in enumerate(outputs):
        positions.add(number, output.token_logprobs, output.compared)
    divergence = measure_divergence("texts", positions)
    assert divergence is not None
    error, low = divergence.kl_sampling_error, divergence.kl_lower
    return {"kl_mean": divergence.kl.mean, "kl_sampling_error": error, "kl_lower": low}


def summarise(parts: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians over rounds, and ratios within a round."""
    rounds = [{name: parts[name][number] for name in PARTS} for number in range(len(parts["resident"]))]
    ratios = {}
    for clock in ("seconds", "cpu_seconds"):
        alone = [one["reference"][clock] + one["candidate"][clock] for one in rounds]
        ratios[f"resident_{clock}"] = median(
            one["resident"][clock] / both for one, both in zip(rounds, alone, strict=True)
        )
        ratios[f"recorded_{clock}"] = median(
            (one["recording"][clock] + one["recorded"][clock]) / both for one, both in zip(rounds, alone, strict=True)
        )
    recording, resident, recorded = (parts[name][0] for name in ("recording", "resident", "recorded"))
    logits = recording["records"] * recording["vocabulary"] * 4
    return {
        "over_both_alone": ratios,
        "disk_over_logits": recording["disk"] / logits,
        "kl_mean": {"resident": resident["kl_mean"], "recorded": recorded["kl_mean"]},
        "kl_sampling_error": recorded["kl_sampling_error"],
        "kl_lower": recorded["kl_lower"],
        "growth_of_peak": {
            name: parts[name][0]["peak"] / parts[f"{name}/4"][0]["peak"]
            for name in ("resident", "recording", "recorded")
        },
    }


def table(parts: dict[str, list[dict[str, Any]]], summary: dict[str, Any]) -> str:
    """A line for each part, and below it what it comes to."""
    heads = ("part", "documents", "tokens", "seconds", "CPU seconds", "MB peak", "MB above open")
    rows = []
    for name, runs in parts.items():
        clocks = [f"{median(one[clock] for one in runs):.1f}" for clock in ("seconds", "cpu_seconds")]
        memory = [f"{runs[0][key] / 1e6:.0f}" for key in ("peak", "above_open")]
        rows.append((name, runs[0]["documents"], runs[0]["tokens"], *clocks, *memory))
    ratios, kl = summary["over_both_alone"], summary["kl_mean"]
    grown = ", ".join(f"{name} {value:.3f}" for name, value in summary["growth_of_peak"].items())
    recording = parts["recording"][0]
    return "\n".join(
        [
            markdown(heads, rows),
            f"- resident over both alone: {ratios['resident_seconds']:.3f} (CPU {ratios['resident_cpu_seconds']:.3f})",
            f"- recorded over both alone: {ratios['recorded_seconds']:.3f} (CPU {ratios['recorded_cpu_seconds']:.3f})",
            f"- on disk {recording['disk'] / 1e6:.2f} MB, {summary['disk_over_logits']:.2%} of the float32 logits",
            f"- mean KL {kl['resident']:.5f} resident; {kl['recorded']:.5f} recorded, its sampling error "
            f"{summary['kl_sampling_error']:.5f}, at least {summary['kl_lower']:.5f}",
            f"- peak memory of all documents over a quarter: {grown}",
            "",
        ]
    )


def main() -> None:
    """Runs all parts and writes DIR/comparison.json and DIR/comparison.md; with --part runs one and prints it."""
    parser = parser_of(__doc__, "models", rounds=1)
    parser.add_argument("--task", default="wikitext")
    parser.add_argument("--include-path", metavar="DIR")
    parser.add_argument("--documents", metavar="N", type=int, default=200)
    parser.add_argument("--num-threads", metavar="N", type=int, default=len(psutil.Process().cpu_affinity()))
    parser.add_argument("--part", choices=(*PARTS, *SMALL), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        print(json.dumps(measure(given.part, given.models, given.output, given.num_threads)))
        return
    given.output.mkdir(parents=True, exist_ok=False)
    documents = paragraphs(given.task, given.include_path, given.documents)
    (given.output / "documents.json").write_text(json.dumps(documents), encoding="utf-8")
    parts: dict[str, list[dict[str, Any]]] = {}
    for number in range(given.rounds):
        for part in PARTS if number else (*PARTS, *SMALL):
            words = [given.models, "--output", given.output, "--part", part, "--num-threads", given.num_threads]
            parts.setdefault(part, []).append(measured(__file__, words))
            print(f"{part}: {parts[part][-1]['seconds']:.1f} s", flush=True)
    summary = summarise(parts)
    text = table(parts, summary)
    write(given.output / "comparison.json", given, parts=parts, summary=summary)
    (given.output / "comparison.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()

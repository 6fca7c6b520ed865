"""The parts of a page that repeat what was recorded: set-up, command line, flipped documents. Knows no template.

The command line is made from the options' names alone, without the parser.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from olive_ext.report import numbers
from olive_ext.report.comparison import NAME
from olive_ext.report.numbers import NO_VALUE
from olive_ext.report.page import PASSES, Contrast
from olive_ext.report.report import Report

CHUNK = 500
"""Flips in one piece of JSON."""

MAX_CHARACTERS = 4000
"""The most characters of one text of a flip; the sample logs have longer texts as a whole."""

_FLAGS = {
    **{key: f"--{key.replace('_', '-')}" for key in ("limit", "num_fewshot", "batch_size", "max_length", "tokenizer")},
    **{key: f"--{key.replace('_', '-')}" for key in ("system_instruction", "reference", "use_cache", "sample_log_num")},
    "seed": "--seed",
    "output_dir": "--output",
}
_SWITCHES = {"allow_cpu_fallback": "--allow-cpu-fallback", "fewshot_as_multiturn": "--fewshot-as-multiturn"}

_PICTURE = "data:image/jpeg;base64,"
"""How a thumbnail begins: the page shows nothing that is not in itself."""

FactRow = tuple[str, tuple[str, ...], bool]
"""Name of a fact, its value in each report, and whether the values differ."""


def fact_tables(reports: Sequence[Report]) -> dict[str, list[FactRow]]:
    """Tables by title: model, hardware, providers, versions, configuration, counters, where any report has them."""
    facts: dict[str, list[Mapping[str, Any]]] = {
        "Model": [report.model for report in reports],
        "Hardware": [_hardware(report.hardware) for report in reports],
        "Providers": [{str(item.get("name", "")): _provider(item) for item in report.providers} for report in reports],
        "Versions": [report.versions for report in reports],
        "Configuration": [report.config for report in reports],
        "Engine": [report.engine for report in reports],
    }
    return {title: rows for title, values in facts.items() if (rows := list(_fact_rows(values)))}


def _fact_rows(facts: Sequence[Mapping[str, Any]]) -> Iterator[FactRow]:
    flat = [numbers.flat(item) for item in facts]
    for name in dict.fromkeys(name for item in flat for name in item):
        values = tuple(item.get(name, NO_VALUE) for item in flat)
        yield name, values, len(set(values)) > 1


def _hardware(facts: Mapping[str, Any]) -> dict[str, Any]:
    shown = dict(facts)
    if isinstance(shown.get("memory_bytes"), int | float):
        shown["memory"] = numbers.size(shown.pop("memory_bytes"))
    return shown


def _provider(provider: Mapping[str, Any]) -> str:
    parts = [numbers.fact(provider[key]) for key in ("device", "options") if provider.get(key)]
    origin = provider.get("origin")
    return "; ".join([*parts, *([f"from {origin}"] if origin else [])]) or "in use"


def task_rows(reports: Sequence[Report]) -> list[tuple[str, ...]]:
    """Name, kind, version, shots and documents of each task, from the first report that ran it."""
    rows: dict[str, tuple[str, ...]] = {}
    for results in (report.results for report in reports):
        for task, counted in results.get("n-samples", {}).items():
            rows.setdefault(task, _task(task, counted, results))
    return list(rows.values())


def _task(task: str, counted: Mapping[str, Any], results: Mapping[str, Any]) -> tuple[str, ...]:
    effective, original = counted.get("effective"), counted.get("original")
    documents = numbers.count(effective) if effective is not None else NO_VALUE
    if original not in (None, effective):
        documents = f"{documents} of {numbers.count(original)}"
    kind = str((results.get("configs", {}).get(task) or {}).get("output_type", NO_VALUE)).replace("_", " ")
    version, shots = (numbers.fact(results.get(key, {}).get(task)) for key in ("versions", "n-shot"))
    return task, kind, version, shots, documents


def command(report: Report) -> str:
    """The `olive-ext evaluate ...` that repeats an evaluation, from its configuration as written, quoted for a POSIX
    shell; empty without a model, and for one that a workflow made, which lies in a cache."""
    config = report.config
    model = config.get("model")
    if is_of_workflow(report) or not isinstance(model, Mapping) or not model.get("path"):
        return ""
    return shlex.join(["olive-ext", "evaluate", str(model["path"]), *_options(config, model)])


def is_of_workflow(report: Report) -> bool:
    """Whether a workflow of Olive ran the evaluation, whose recipe repeats it."""
    return NAME in report.model or PASSES in report.model


def _options(config: Mapping[str, Any], model: Mapping[str, Any]) -> Iterator[str]:
    for key, value in config.items():
        if key == "reference" and isinstance(value, Mapping) and set(value) == {"path"}:
            value = value["path"]
        if key == "model":
            continue
        if key == "tasks" and all(isinstance(task, str) and task == task.strip() and "," not in task for task in value):
            yield from ("--tasks", ",".join(value))
        elif key in _SWITCHES and value is True:
            yield _SWITCHES[key]
        elif key in _FLAGS and isinstance(value, str | int | float) and not str(value).startswith("-"):
            yield from (_FLAGS[key], str(value))
        elif value is not None:
            yield from _set(key, value)
    for key, value in model.items():
        if key != "path" and value is not None:
            yield from _set(f"model.{key}", value)


def _set(key: str, value: Any) -> tuple[str, str]:
    return ("--set", f"{key}={value if _is_plain_text(value) else json.dumps(value, ensure_ascii=False)}")


def _is_plain_text(value: Any) -> bool:
    """Whether `--set` reads the text as that text, and not as the JSON that it happens to be."""
    if not isinstance(value, str):
        return False
    try:
        json.loads(value)
    except json.JSONDecodeError:
        return True
    return False


@dataclass(frozen=True)
class FlipData:
    """Flipped documents as JSON that is safe inside a `<script>` element, in chunks that a browser reads when needed.

    A flip's fields come in the order that page.js.j2 reads.
    """

    total: int
    head: str
    """Names of tasks and candidates, numbers of flips."""

    chunks: tuple[str, ...]


def flip_data(contrasts: Sequence[Contrast]) -> FlipData:
    """Every flip of the contrasts, those of one comparison together."""
    flips = [(pair, flip) for pair, contrast in enumerate(contrasts) for flip in contrast.comparison.flips]
    names = list(dict.fromkeys((flip.task, flip.metric, flip.filter) for _, flip in flips))
    indexes = {name: index for index, name in enumerate(names)}
    rows = [
        [
            *(pair, indexes[flip.task, flip.metric, flip.filter]),
            *(flip.doc_id, int(flip.direction == "wrong_to_right")),
            *map(_cut, (flip.question, flip.target, flip.reference_answer, flip.candidate_answer)),
            [picture for picture in flip.pictures if picture.startswith(_PICTURE)],
        ]
        for pair, flip in flips
    ]
    head = {
        "tasks": [" · ".join(part for part in name if part not in ("", "none")) for name in names],
        "pairs": [[contrast.reference, contrast.candidate] for contrast in contrasts],
        "total": len(rows),
        "losses": sum(flip.direction == "right_to_wrong" for _, flip in flips),
        "chunk": CHUNK,
    }
    chunks = tuple(_script_json(rows[begin : begin + CHUNK]) for begin in range(0, len(rows), CHUNK))
    return FlipData(len(rows), _script_json(head), chunks)


def _cut(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[:MAX_CHARACTERS]}… [{len(text) - MAX_CHARACTERS} more characters]"


def _script_json(value: Any) -> str:
    """JSON in which nothing can end the `<script>` element or begin a comment, whatever the texts contain.

    Lone halves of surrogate pairs, which UTF-8 cannot hold, stay escaped.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text.encode("utf-8", "backslashreplace").decode("utf-8")

"""The results of an evaluation: plain data, and its form as strict JSON. Knows neither lm-eval nor Olive."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from io import StringIO
from typing import Any, ClassVar, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from olive_ext.report.comparison import TRIALS, Comparison
from olive_ext.report.metrics import Metric
from olive_ext.report.verdict import Reason, Verdict, verdict

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class PackedAnswers:
    """One task's answers by one filter, [D] each, as base64 of zlib's form of little-endian numbers."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    task: str
    filter: str
    higher_is_better: Mapping[str, bool | None]
    """By metric, in the task's order; None where nothing says it."""

    num_documents: int
    numbers: str
    """The documents' numbers in the task, as 32 bits each."""

    keys: str
    """The first 4 bytes of SHA-256 of lm-eval's digest of the document, and of those of what is asked and target."""

    values: Mapping[str, str]
    """By metric, as 64 bits; NaN where a request had no answer."""

    text_metric: str = ""
    """The perplexity of a task of whole texts; `values` then have log-likelihoods and lengths."""

    margins: str | None = None
    """How far each answer is from being another one, as 16 bits, because only ranks are read. None for generations."""


@dataclass(frozen=True)
class Report:
    """A whole evaluation. Everything but `metrics` is JSON-like data for the reader of report.json."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    metrics: tuple[Metric, ...]
    results: Mapping[str, Any] = field(default_factory=dict)
    """lm-eval's own results, as its `simple_evaluate` returns them, without the samples."""

    model: Mapping[str, Any] = field(default_factory=dict)
    """Path, kind, graph hash, KV layout, tokenizer."""

    providers: tuple[Mapping[str, Any], ...] = ()
    """Execution providers in use, in order: name, device, options, origin. Empty for a Hugging Face baseline."""

    versions: Mapping[str, str] = field(default_factory=dict)
    """Distribution name to version."""

    hardware: Mapping[str, Any] = field(default_factory=dict)
    """The machine: processor, cores, memory, GPUs, operating system."""

    engine: Mapping[str, Any] = field(default_factory=dict)
    """The engine's counters, and `seconds`."""

    config: Mapping[str, Any] = field(default_factory=dict)
    """The configuration as written, in a workflow without `require`."""

    missing: tuple[Mapping[str, Any], ...] = ()
    """Requests without an answer: task, document and reason. Their documents count in no metric."""

    created: str = ""
    """ISO 8601 time with time zone."""

    comparison: Comparison | None = None
    """The comparison with a reference; None where there was none."""

    answers: tuple[PackedAnswers, ...] = ()
    """The value of each document's answer by each metric that is a mean over documents: which are right and wrong."""

    broken: tuple[Reason, ...] = ()
    """The bounds of the evaluation that are broken."""

    @property
    def verdict(self) -> Verdict | None:
        """The verdict on the comparison; None without one. report.json has its `_JUDGED`."""
        return None if self.comparison is None else verdict(self.comparison, self.broken)

    @property
    def unjudged_damage(self) -> tuple[str, ...]:
        """What trials found damaged in a model that no verdict is on, in sentences."""
        facts = self.model if self.comparison is None else {}
        return tuple(f"damaged: '{name}' {facts[fact]}" for fact, name in TRIALS.items() if facts.get(fact))

    def __str__(self) -> str:
        """The terminal's table and verdict."""
        from olive_ext.report.plain_text import print_table

        print_table(self, file=(text := StringIO()))
        return text.getvalue().rstrip("\n")


def has_several_filters(report: Report, task: str) -> bool:
    """Whether some metric of `task` comes once for each of several filters."""
    seen = [metric.metric for metric in report.metrics if metric.task == task]
    return len(seen) > len(set(seen))


_JUDGED = ("status", "headline", "reasons", "next_step")


def to_json(value: Any) -> str:
    """Strict JSON, which has no NaN: NaN becomes null, infinities the strings "Infinity" and "-Infinity"."""
    values = plain(value)
    if isinstance(value, Report) and (judged := value.verdict) is not None:
        values["verdict"] = {name: plain(getattr(judged, name)) for name in _JUDGED}
    return json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def from_json(text: str) -> Report:
    """The report that `to_json` wrote, with its verdict anew. Numbers are as they were, NaN in JSON-like data None.

    Raises `ValueError` that names the first wrong key for any other text.
    """
    try:
        content = json.loads(text)
        if isinstance(content, dict):
            content.pop("verdict", None)
        return validated(_reader(), content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def validated(reader: TypeAdapter[Kind], content: Any) -> Kind:
    """JSON's data as a dataclass. Raises `ValueError` that names the first wrong key."""
    try:
        return reader.validate_python(content)
    except ValidationError as error:
        problem = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, problem['loc'])) or 'as a whole'}: {problem['msg']}") from error


_reader = cache(lambda: TypeAdapter(Report))
"""Made once: that takes longer than to read a report."""


def plain(value: Any) -> Any:
    """`value` as JSON types only: numpy's scalars and arrays, paths, enums, sets, dataclasses, functions included."""
    if isinstance(value, Enum):
        return plain(value.value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None if math.isnan(value) else f"{'-' * (value < 0)}Infinity"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Set):
        return sorted((plain(item) for item in value), key=str)
    if hasattr(value, "tolist"):  # numpy scalars and arrays, torch tensors
        return plain(value.tolist())
    if hasattr(value, "model_dump"):  # pydantic
        return plain(value.model_dump())
    if callable(value):
        return f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else type(value).__name__
    return str(value)

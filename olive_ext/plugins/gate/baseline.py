"""The baseline that a repository keeps: metrics with errors, and every document's values under a key of its content.

One small JSON file: 11 kB a thousand documents. Knows no model; answers come from sample logs.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, TypeAdapter, ValidationError

from olive_ext.errors import ConfigError, MissingError, NotComparableError, first_line, keys_once, special_kind
from olive_ext.report import Metric, Report
from olive_ext.run.earlier_reports import Named
from olive_ext.run.models import STOP_FACTS
from olive_ext.run.reference.answers import NATS, UNITS, Answers, DocumentAnswer

FORMAT = 1
_KEY_BYTES = 6
"""Of a document's digest: 48 bits are for one document beside its earlier self, not for a search among all."""

_MOST_BYTES = 1 << 26
"""What packed numbers may unfold to: 8 million documents; a file of more is no baseline of ours."""

_DEFINITION = (
    "output_type",
    "doc_to_text",
    "doc_to_target",
    "doc_to_choice",
    "process_docs",
    "process_results",
    "generation_kwargs",
    "repeats",
    "filter_list",
    "metric_list",
)
"""Keys of a task in lm-eval's results that say how it is asked and scored."""

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""In the name of a function whose source lm-eval cannot read."""


@dataclass(frozen=True)
class Packed:
    """One task's answers by one filter, [D] each, as base64 of zlib's form of little-endian numbers."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    task: str
    filter: str
    higher_is_better: Mapping[str, bool]
    """By metric, in the task's order."""

    num_documents: int
    numbers: str
    """The documents' numbers in the task, as 32 bits each."""

    keys: str
    """The first 6 bytes of SHA-256 of lm-eval's digests of document, prompt and target."""

    values: Mapping[str, str]
    """By metric, as 64 bits; NaN where a request had no answer."""

    text_metric: str = ""
    """As in `Answers`; `values` then have log-likelihoods and lengths."""

    margins: str | None = None
    """How sure the model was (`DocumentAnswer.margin`), as 16 bits: ranks alone are read. None of generations."""


@dataclass(frozen=True)
class Baseline:
    """Where the numbers are from, and the numbers."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    format: int
    created: str
    model: Mapping[str, Any]
    """Path, kind and content digest of the model."""

    reference: Mapping[str, Any]
    """As `model`, with the key of its records; empty where the evaluation had none."""

    versions: Mapping[str, str]
    metrics: tuple[Metric, ...]
    documents: tuple[Packed, ...]
    definitions: Mapping[str, str]
    """By task, what `definitions` gives."""

    def answers(self) -> list[Answers]:
        """The answers, under short digests. Raises `ValueError` where packed numbers are not `num_documents`, and where
        a task's filter is there twice."""
        names = [(item.task, item.filter) for item in self.documents]
        if twice := [item for item in names if names.count(item) > 1]:
            raise ValueError(f"documents: '{twice[0][0]}' by filter '{twice[0][1]}' is there twice")
        return [_unpacked(item) for item in self.documents]


def baseline_of(report: Report, answers: Sequence[Answers]) -> Baseline:
    """The baseline of a report and the answers in its logs. Raises `ConfigError` where there are none."""
    packed = tuple(_packed(item) for item in answers if item.judged)
    if not packed:
        raise MissingError("a baseline needs each document's values: evaluate with 'sample_log_num' of all documents")
    facts = ("path", "kind", "content_hash", "mode", *STOP_FACTS)
    reference = {} if report.comparison is None else report.comparison.reference
    return Baseline(
        format=FORMAT,
        created=report.created,
        model={key: report.model[key] for key in facts if key in report.model},
        reference={key: reference[key] for key in facts if key in reference} | _records(reference),
        versions=report.versions,
        metrics=tuple(item for item in report.metrics if item.n is not None),
        documents=packed,
        definitions=definitions(report.results),
    )


def definitions(results: Mapping[str, Any]) -> dict[str, str]:
    """A digest of how each task is asked and scored: its version and what lm-eval tells of its definition. The shots
    and the template are in the prompts, which documents are paired by."""
    configs, versions = results.get("configs", {}), results.get("versions", {})
    asked = {task: [versions.get(task), *map(config.get, _DEFINITION)] for task, config in configs.items()}
    told = {task: _ADDRESS.sub("", json.dumps(item, sort_keys=True, default=str)) for task, item in asked.items()}
    return {task: hashlib.sha256(text.encode()).hexdigest()[:12] for task, text in told.items()}


def refuse_other_definitions(baseline: Baseline, results: Mapping[str, Any]) -> None:
    """Raises `ConfigError` where a task is no longer asked and scored as the baseline's."""
    now, known = definitions(results), baseline.definitions
    if other := [item.task for item in baseline.documents if now.get(item.task) != known.get(item.task)]:
        raise NotComparableError(
            f"task '{other[0]}' is asked or scored otherwise than the baseline's (version, choices, targets, "
            "generation settings, filters, metrics): write the baseline anew with --update-baseline"
        )


def _records(reference: Mapping[str, Any]) -> dict[str, str]:
    """The key of a recorded reference's records: the name of their folder in the cache."""
    return {"records": Path(str(reference["folder"])).name} if "folder" in reference else {}


def read_baseline(file: Path) -> Baseline:
    """The baseline in `file`. Raises `ConfigError` for anything else."""
    if kind := special_kind(file):
        raise ConfigError(f"'--baseline' = '{file}' is {kind}: give a file", "--baseline", file, code="no_access")
    try:
        content = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=keys_once)
        read = TypeAdapter(Baseline).validate_python(content)
        if read.format != FORMAT:
            raise ValueError(f"'format' = {read.format}, and this version reads {FORMAT}")
        read.answers()
    except OSError as error:
        hint = ": --update-baseline writes it" if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(
            f"cannot read '{file}': {error.strerror or error}{hint}", "--baseline", code="no_access"
        ) from error
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"])) or "as a whole"
        raise ConfigError(
            f"'{file}' is no baseline: {where}: {problem['msg']}", "--baseline", code="damaged"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"'{file}' is no baseline: {first_line(error)}", "--baseline", code="damaged") from error
    return read


def complete_answers(run: Named) -> list[Answers]:
    """The answers in the logs. Raises `ConfigError` where these have fewer documents than the report: the others may
    all be lost."""
    answers = run.logs.answers()
    known = {(item.task, item.metric, item.filter): item.n or 0 for item in run.report.metrics}
    for item in answers:
        logged = len(item.by_document)
        most = max((known.get((item.task, name, item.filter), 0) for name in item.judged), default=0)
        if logged < most:
            raise MissingError(
                f"'{run.folder}' logs {logged:,} of {most:,} documents of '{item.task}': evaluate with "
                "'sample_log_num' of all documents"
            )
    return answers


def keyed(answers: Answers) -> Answers:
    """The answers under the digests of baselines."""
    short = {
        number: replace(item, digest=hashlib.sha256(item.digest.encode()).hexdigest()[: 2 * _KEY_BYTES])
        for number, item in answers.by_document.items()
    }
    return replace(answers, by_document=short)


def _packed(answers: Answers) -> Packed:
    documents = keyed(answers).by_document
    margins = [item.margin for item in documents.values()]
    values = {
        metric: _text(np.array([item.values.get(metric, np.nan) for item in documents.values()], "<f8"))
        for metric in [*answers.metrics, *((NATS, UNITS) if answers.text_metric else ())]
    }
    with np.errstate(over="ignore"):
        narrow = None if None in margins else _text(np.array(margins, "<f8").astype("<f2"))
    return Packed(
        task=answers.task,
        filter=answers.filter,
        higher_is_better=answers.metrics,
        num_documents=len(documents),
        numbers=_text(np.array(list(documents), "<u4")),
        keys=_text(np.frombuffer(bytes.fromhex("".join(item.digest for item in documents.values())), "u1")),
        values=values,
        text_metric=answers.text_metric,
        margins=narrow,
    )


def _unpacked(packed: Packed) -> Answers:
    name, count = f"documents of '{packed.task}'", packed.num_documents
    if {*packed.values} != {*packed.higher_is_better, *((NATS, UNITS) if packed.text_metric else ())}:
        raise ValueError(f"{name}: 'values' and 'higher_is_better' name other metrics")
    numbers = _array(packed.numbers, "<u4", count, f"{name}: 'numbers'").tolist()
    keys = _array(packed.keys, "u1", count * _KEY_BYTES, f"{name}: 'keys'").tobytes().hex()
    values = {
        metric: _array(text, "<f8", count, f"{name}: 'values.{metric}'").tolist()
        for metric, text in packed.values.items()
    }
    margins: list[Any] = [None] * count
    if packed.margins is not None:
        margins = _array(packed.margins, "<f2", count, f"{name}: 'margins'").tolist()
    answers = {
        number: DocumentAnswer(
            digest=keys[2 * _KEY_BYTES * place : 2 * _KEY_BYTES * (place + 1)],
            values={metric: column[place] for metric, column in values.items() if column[place] == column[place]},
            text="",
            margin=margins[place],
        )
        for place, number in enumerate(numbers)
    }
    if len(answers) != count:
        raise ValueError(f"{name}: 'numbers' has a document twice")
    return Answers(packed.task, packed.filter, packed.higher_is_better, answers, packed.text_metric)


def _text(array: npt.NDArray[Any]) -> str:
    return base64.b64encode(zlib.compress(array.tobytes(), 9)).decode()


def _array(text: str, dtype: str, count: int, what: str) -> npt.NDArray[Any]:
    try:
        unfolded = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), _MOST_BYTES)
    except (ValueError, zlib.error) as error:
        raise ValueError(f"{what} cannot be unpacked ({error})") from error
    if len(unfolded) != count * np.dtype(dtype).itemsize:
        raise ValueError(f"{what} is not of {count} documents")
    return np.frombuffer(unfolded, dtype)

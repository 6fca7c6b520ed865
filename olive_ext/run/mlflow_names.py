"""A report as MLflow takes it: params, metrics and tags under names it accepts. Pure; knows no server."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from olive_ext.errors import printable
from olive_ext.report import Report, has_several_filters
from olive_ext.report.numbers import flat
from olive_ext.report.verdict import verdict

_MAX_NAME = 250
_MAX_VALUE = 500
"""MLflow's own limits: characters of a name, and of a value (servers before 2.10)."""

KEY, STEP = "olive_ext.key", "olive_ext.step"
"""Tags by which a run is found again, and which of its parent's runs it is."""

_TAGGED = ("olive-ext", "olive-ai", "onnxruntime", "onnxruntime-gpu", "onnxruntime-genai")


def tags_of(report: Report) -> dict[str, str]:
    """What runs are looked up by: the digest of the model's content, versions, and the verdict where there is one."""
    found = {f"olive_ext.version.{name}": report.versions[name] for name in _TAGGED if name in report.versions}
    if digest := report.model.get("content_hash"):
        found["olive_ext.model_digest"] = str(digest)
    if report.comparison is not None:
        judged = verdict(report.comparison)
        found |= {"olive_ext.verdict": judged.finding, "olive_ext.verdict_kind": str(judged.kind)}
    return {name: printable(text)[:_MAX_VALUE] for name, text in found.items()}


def metrics_of(report: Report) -> dict[str, float]:
    """`<task>/<metric>`, with the filter where there are several, error bars as `..._stderr`; finite numbers only."""
    found: dict[str, float] = {}
    for metric in report.metrics:
        parts = [metric.task, metric.metric]
        if has_several_filters(report, metric.task):
            parts.append(metric.filter)
        found["\0".join(parts)] = metric.value
        if metric.stderr is not None:
            found["\0".join([*parts[:-1], f"{parts[-1]}_stderr"])] = metric.stderr
    return {name: value for name, value in _named(found).items() if math.isfinite(value)}


def params_of(report: Report) -> dict[str, str]:
    """Configuration, model, providers, versions and hardware, as flat names and short texts."""
    facts = {
        "config": report.config,
        "model": report.model,
        "providers": [provider.get("name") for provider in report.providers],
        "versions": report.versions,
        "hardware": report.hardware,
    }
    known = {name: values for name, values in facts.items() if values}
    named = ((name, printable(text)) for name, text in _named(flat(known)).items())
    return {name: text if len(text) <= _MAX_VALUE else f"{text[: _MAX_VALUE - 1]}…" for name, text in named}


def _named(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` under names that MLflow accepts, each different: one that is cut or taken ends in a digest of itself."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        legal = legal_name(name)
        if len(legal) > _MAX_NAME or legal in found:
            legal = f"{legal[: _MAX_NAME - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
        found[legal] = value
    return found


def legal_name(name: str) -> str:
    """Replaces everything but letters, digits, `_`, `-`, `.` and spaces by `_`, and NUL, which joins parts, by `/`."""
    parts = [re.sub(r"[^A-Za-z0-9_\-. ]", "_", part) for part in name.split("\0")]
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)


def chunks(values: Mapping[str, Any], size: int) -> Iterator[dict[str, Any]]:
    """`values` in parts of at most `size` items, which is what one request holds."""
    items = iter(values.items())
    while chunk := dict(islice(items, size)):
        yield chunk

"""What a page of reports shows, before it has a form: models, and comparisons of pairs of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath

from olive_ext.report.comparison import Comparison
from olive_ext.report.lm_eval_results import read_metrics
from olive_ext.report.report import Metric, Report

_PASSES = "passes"
"""`chain.PASSES`, which cannot be imported here without a circle."""


@dataclass(frozen=True)
class Column:
    """One model."""

    name: str
    metrics: tuple[Metric, ...]
    report: Report | None = None
    """None for a reference of which nothing but its metrics is known."""


@dataclass(frozen=True)
class Contrast:
    """A candidate against a reference."""

    candidate: str
    reference: str
    comparison: Comparison
    note: str = ""
    """What a reader must know to read it rightly; empty where nothing."""


@dataclass(frozen=True)
class Page:
    """Columns in reading order, the baseline first, and what was found between them."""

    title: str
    columns: tuple[Column, ...]
    contrasts: tuple[Contrast, ...] = ()
    created: str = ""
    kind: str = "Evaluation"


def page_of(report: Report) -> Page:
    """The page of one evaluation: its model, and its reference in front where it has one."""
    candidate = Column(model_name(report), report.metrics, report)
    comparison = report.comparison
    if comparison is None:
        return Page(candidate.name, (candidate,), created=report.created)
    name = short_path(str(comparison.reference.get("path", "reference")))
    if name == candidate.name:
        name = f"{name} (reference)"
    metrics = read_metrics(comparison.metrics) if "results" in comparison.metrics else ()
    contrast = Contrast(candidate.name, name, comparison)
    title = f"{candidate.name} against {name}"
    return Page(title, (Column(name, metrics), candidate), (contrast,), report.created)


def model_name(report: Report) -> str:
    """The passes that made the model where a report knows them, else the part of its path that says something."""
    passes = report.model.get(_PASSES)
    if isinstance(passes, list | tuple):
        return " → ".join(str(name) for name in passes) or "input model"
    return short_path(str(report.model.get("path", "model")))


def short_path(path: str) -> str:
    """The last two parts of a path where the last alone is a file's or folder's usual name, else the last."""
    parts = PurePath(path.replace("\\", "/")).parts
    if len(parts) > 1 and parts[-1] in ("model", "model.onnx", "output_model", "models", "onnx"):
        return "/".join(parts[-2:])
    return parts[-1] if parts else path

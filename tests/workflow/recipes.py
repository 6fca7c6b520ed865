"""Recipes with tiny models and tasks, and fakes of what Olive hands over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from olive_ext.report import Metric, Report

SYSTEMS = {
    "local": {
        "type": "LocalSystem",
        "accelerators": [{"device": "cpu", "execution_providers": ["CPUExecutionProvider"]}],
    }
}
ACC = Metric("tiny_choice", "acc", "none", 0.5, 0.1, True, 6)
NORM = Metric("tiny_choice", "acc_norm", "none", 0.25, 0.1, True, 6)
PERPLEXITY = Metric("tiny_rolling", "word_perplexity", "none", 12.0, None, False, 6)
STRICT = Metric("tiny_generate", "exact_match", "strict-match", 0.125, None, True, 6)
LOOSE = Metric("tiny_generate", "exact_match", "loose", 0.75, None, True, 6)
SIZE = Metric("size_on_disk", "bytes", "none", 1024.0, higher_is_better=False)
REPORT = Report(metrics=(ACC, NORM, PERPLEXITY, STRICT, LOOSE, SIZE))


def recipe(folder: Path, model: dict[str, Any], **blocks: Any) -> dict[str, Any]:
    """A recipe that writes below `folder`."""
    return {
        "input_model": model,
        "systems": SYSTEMS,
        "host": "local",
        "target": "local",
        "output_dir": str(folder / "out"),
        "cache_dir": str(folder / "cache"),
        **blocks,
    }


TWO_SIZES = {"q": [{"type": "OnnxKQuantQuantization", "block_size": size} for size in (16, 32)]}
"""Two quantizations to search among."""


def search_blocks(evaluator: dict[str, Any], passes: dict[str, Any] = TWO_SIZES) -> dict[str, Any]:
    """The blocks of a recipe that tries each choice of `passes` in order, and only these."""
    return {
        "passes": passes,
        "evaluators": {"e": evaluator},
        "evaluator": "e",
        "evaluate_input_model": False,
        "search_strategy": {"execution_order": "joint", "sampler": "sequential"},
    }


def saved(folder: Path, recipe: dict[str, Any], name: str = "recipe.json") -> str:
    path = folder / name
    path.write_text(json.dumps(recipe))
    return str(path)


class Measure:
    """Stands in for the road from a handler to a report: keeps what it was called with, answers `report`."""

    def __init__(self, report: Report = REPORT) -> None:
        self.report = report
        self.calls: list[dict[str, Any]] = []

    def __call__(self, model: Any, settings: Any, **others: Any) -> Report:
        self.calls.append({"model": model, "settings": settings, **others})
        return self.report


class Evaluate:
    """Stands in for `olive_ext.run.evaluate`."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.configs: list[Any] = []
        self.lms: list[Any] = []

    def __call__(self, config: Any, *, lm: Any = None, progress: bool = False, names: Any = None) -> Report:
        self.names = names
        self.configs.append(config)
        self.lms.append(lm)
        if self.error is not None:
            raise self.error
        return REPORT

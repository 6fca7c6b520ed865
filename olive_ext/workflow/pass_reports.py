"""Reports that travel with a model through a chain of passes: the table and the bounds behind each measuring pass, and
the files put next to the output model.

Olive takes a pass that it ran before from its cache, without calling it; so this hooks the engine, not the pass, and
reads the reports from the model's additional files. Knows no evaluator.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from olive_ext.errors import RequirementError
from olive_ext.report import Report, chain_steps, chain_table, from_json, print_cells, write_chain
from olive_ext.run.bounds import broken_bounds
from olive_ext.workflow.current_run import Run, logger, recorded_failures, running
from olive_ext.workflow.evaluator import surfaced
from olive_ext.workflow.preflight import is_our_pass, parse

_REPORT = re.compile(r"report(?:-(\d+))?\.(json|md|html)")


def run_pass(engine: Any, given: dict[str, Any], proceed: Callable[..., Any]) -> Any:
    """The hook of `Engine._run_pass`: behind a pass of ours come the table and the bounds."""
    run = running.get()
    if run is None:
        return proceed()
    name, run.current = given["pass_name"], run.made_by.get(given["input_model_id"], ())
    config = engine.computed_passes_configs[name]
    is_ours = is_our_pass(config.type)
    with recorded_failures():
        model_config, model_id = proceed()
        run.made_by[model_id] = run.current if is_ours else (*run.current, name)
        if is_ours and not isinstance(model_config, str):  # a text is the reason why the pass was left out
            _finish(engine, run, f"passes.{name}", parse(_values(config.config)).require, (model_config, model_id))
    return model_config, model_id


def _values(config: Any) -> dict[str, Any]:
    values = config if isinstance(config, Mapping) else config.model_dump()
    return {name: value for name, value in values.items() if value is not None}


def _finish(engine: Any, run: Run, where: str, bounds: Any, model: tuple[Any, str]) -> None:
    model_config, model_id = model
    with surfaced("the chain cannot be written"):
        reports = carried_reports(model_config.config)
        found = chain_steps(reports)
        if not run.is_search:
            write_chain(found, run.artifacts)
        print_cells(chain_table(found))
    lines = broken_bounds(bounds, reports[-1].metrics)
    if lines:
        if not run.is_search:
            engine.cache.save_model(model_id=model_id, output_dir=run.output_dir, overwrite=True)
            refresh_reports(model_config.config, run.artifacts)
        raise requirement_error(where, lines)


def requirement_error(where: str, lines: list[str]) -> RequirementError:
    """The error for broken bounds, each of which is logged in Olive's log, too."""
    for line in lines:
        logger.error("'%s.require' is broken: %s", where, line)
    return RequirementError(f"'{where}.require' is broken: {'; '.join(lines)}")


def publish(engine: Any, run: Run, output: Any) -> None:
    """Puts the output model's reports and its chain next to it, in place of those of an earlier run: Olive never
    overwrites a file with one that travels with a model."""
    best = output.get_best_candidate()
    saved = engine.cache.load_model(best.model_id) if best is not None else None
    if not saved:
        return
    with surfaced("the reports cannot be put beside the output model"):
        reports = carried_reports(saved["config"])
        if reports:
            refresh_reports(saved["config"], run.artifacts)
            write_chain(chain_steps(reports), run.artifacts)


def carried_reports(model_config: Mapping[str, Any]) -> list[Report]:
    """The reports that travel with a model, in the order in which they were made."""
    files = {_number(path): path for path in _report_files(model_config) if path.suffix == ".json"}
    return [from_json(files[number].read_text(encoding="utf-8")) for number in sorted(files)]


def refresh_reports(model_config: Mapping[str, Any], folder: Path) -> None:
    """Copies the reports that travel with a model into `folder`, over those of an earlier run."""
    for path in _report_files(model_config):
        if path.parent.resolve() != folder.resolve():
            shutil.copy2(path, folder / path.name)


def _report_files(model_config: Mapping[str, Any]) -> list[Path]:
    attributes = model_config.get("model_attributes") or {}
    paths = (Path(file) for file in attributes.get("additional_files") or [])
    return [path for path in paths if _REPORT.fullmatch(path.name)]


def _number(path: Path) -> int:
    found = _REPORT.fullmatch(path.name)
    return int(found[1] or 1) if found else 0

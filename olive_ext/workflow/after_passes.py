"""What comes behind each measuring pass in a run of Olive's engine: the chain's table, and the bounds.

Olive takes a pass that it ran before from its cache, without calling it; so this hangs on the engine, and reads the
reports that travel with the model.
"""

from __future__ import annotations

import inspect
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from olive_ext.errors import OliveExtError, RequirementError
from olive_ext.report import Report, chain_steps, from_json, print_chain, write_chain
from olive_ext.run.gate import broken_bounds
from olive_ext.workflow.log import logger
from olive_ext.workflow.measure import surfaced
from olive_ext.workflow.passes import parse
from olive_ext.workflow.preflight import is_our_pass
from olive_ext.workflow.running import Run, running

_REPORT = re.compile(r"report(?:-(\d+))?\.(json|md|html)")


def run_pass(original: Callable[..., Any]) -> Callable[..., Any]:
    """Olive's `Engine._run_pass`, followed by the table and the bounds where the pass is ours."""
    signature = inspect.signature(original)

    def _run_pass(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = running.get()
        if run is None:
            return original(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs).arguments
        name, run.current = given["pass_name"], run.made_by.get(given["input_model_id"], ())
        config = self.computed_passes_configs[name]
        is_ours = is_our_pass(config.type)
        try:
            model_config, model_id = original(self, *args, **kwargs)
            run.made_by[model_id] = run.current if is_ours else (*run.current, name)
            if is_ours and not isinstance(model_config, str):  # a text says why the pass was left out
                _finish(self, run, f"passes.{name}", parse(_values(config.config)).require, (model_config, model_id))
        except OliveExtError as error:
            run.failures.append(error)
            raise
        return model_config, model_id

    return _run_pass


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
        print_chain(found)
    lines = broken_bounds(bounds, reports[-1].metrics)
    if lines:
        if not run.is_search:
            engine.cache.save_model(model_id=model_id, output_dir=run.output_dir, overwrite=True)
            refresh_reports(model_config.config, run.artifacts)
        raise requirement_error(where, lines)


def requirement_error(where: str, lines: list[str]) -> RequirementError:
    """The error for broken bounds; each is said in Olive's log, too."""
    for line in lines:
        logger.error("'%s.require' is broken: %s", where, line)
    return RequirementError(f"'{where}.require' is broken: {'; '.join(lines)}")


def publish(engine: Any, run: Run, output: Any) -> None:
    """Puts the output model's reports and its chain beside it, in the place of those of an earlier run: Olive copies
    no file that travels with a model over one that is there."""
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

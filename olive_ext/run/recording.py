"""Records a model's answers to tasks into one file, for comparisons elsewhere: `olive-ext record`."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from olive_ext.backends.progress import say
from olive_ext.config import RECORDS_SUFFIX, SAME_MODEL, EvaluationConfig, ReferenceConfig
from olive_ext.errors import ConfigError, ContradictionError, RunError, counted
from olive_ext.records.files import read_index
from olive_ext.records.journal import read_facts
from olive_ext.records.store import REQUEST, TARGET
from olive_ext.records.travelling import pack
from olive_ext.registry import hooks
from olive_ext.report import Report, check_writable
from olive_ext.report.numbers import size
from olive_ext.report.page import SIZE
from olive_ext.report.report import plain
from olive_ext.run.bounds import requested_tasks
from olive_ext.run.evaluation import evaluate_models
from olive_ext.run.model_facts import STOP_FACTS
from olive_ext.run.models import PICTURES, Models, pictures_of

logger = logging.getLogger("olive.olive_ext")

_ANSWER_BYTES = 16
"""About the bytes of a generated token in the journal."""


def record(config: EvaluationConfig, file: str | Path, *, progress: bool = False) -> tuple[Report, int]:
    """Evaluates the model that `config` names, and writes its answers to `file` at the end, as a whole. Returns its
    report and the bytes written. The file's size is predicted before the model is asked. Raises as `evaluate`."""
    file = Path(file)
    if file.suffix != RECORDS_SUFFIX or file.is_dir():
        raise ConfigError(f"a file whose name ends with {RECORDS_SUFFIX}", "--output", file)
    if config.reference is not None:
        raise ContradictionError("a model that is recorded is a reference itself", "reference")
    if config.bounds:
        raise ContradictionError("a model that is recorded is held to no bounds", "require")
    if not requested_tasks(config):
        raise ConfigError("'tasks' ask nothing of a model: there is nothing to record", "tasks")
    check_writable(file.parent, "--output")
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".olive-ext-") as root:
        reference = ReferenceConfig(path=SAME_MODEL, mode="recorded", records_dir=root)
        changed = {"reference": reference, "output_dir": None, "sample_log_num": 0, "documents": "all"}
        models = Models(config.model_copy(update=changed), progress)
        models.recorder = partial(_announced, file, say if progress else logger.info)
        report = evaluate_models(models)
        (folder,) = (path.parent for path in Path(root).glob("*/index.json"))
        return report, pack(folder, file, _manifest(folder, report, models))


def _manifest(folder: Path, report: Report, models: Models) -> dict[str, Any]:
    """The facts of a recording: model, versions, machine, tasks, and how the model was asked."""
    facts = (read_index(folder) or {})["facts"]
    shared = {name: plain(getattr(report, name)) for name in ("versions", "providers", "hardware", "created", "config")}
    shared["config"].pop("reference", None)
    names = ("path", "kind", "content_hash", SIZE, "max_length", *STOP_FACTS)
    return {
        "facts": facts,
        **{name: report.model[name] for name in names if name in report.model},
        **shared,
        "tasks": plain(report.results.get("n-samples", {})),
        **{name: value for made in hooks("recorded_facts").values() for name, value in made(models.candidate).items()},
        PICTURES: pictures_of(models.candidate)[0],
        "asking": asdict(models.prompt_format(models.given_candidate, reads_all=True)),
        "answers": {path.name: read_facts(path) for path in folder.glob("answers_*.jsonl")},
    }


def _announced(
    file: Path, tell: Callable[[str], None], lm: Any, requests: list[Any], ask: Callable[[list[Any]], list[Any]]
) -> list[Any]:
    """As `OrtLM.known_answers` of `lm`: says what the requests' records will take, then has them asked. Raises
    `RunError` where the disk has no room."""
    form, kind = lm.session.describe_execution()["records"], requests[0].request_type if requests else ""
    if kind == "loglikelihood":
        positions = sum(len(pending.request.target) for pending in lm.scoring_requests(enumerate(requests)))
    elif kind == "loglikelihood_rolling":
        positions = sum(len(lm.tok_encode(request.args[0])) for request in requests)
    else:
        positions = sum(int(request.args[1].get("max_gen_toks", lm.max_gen_toks)) for request in requests)
    each = form["bytes_per_position"] + TARGET.itemsize
    bytes_ = positions * each + len(requests) * REQUEST.itemsize
    if kind == "generate_until":
        bytes_ += positions * _ANSWER_BYTES
    share = 100 * form["share_of_logits"]
    what = f"{counted(positions, 'position')} of {counted(len(requests), 'request')} ({kind})"
    tell(f"{file}: at most {size(bytes_)} for {what}, {share:.3g} % of their logits")
    if 2 * bytes_ > shutil.disk_usage(file.parent).free:
        raise RunError(f"'{file}': {size(2 * bytes_)} are needed while it is written, and the disk has less")
    return ask(requests)

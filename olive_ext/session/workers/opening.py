"""Opens a crew for a resolved model: where its workers are, and what each of them opens."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from olive_ext.config import ModelSettings
from olive_ext.errors import RunError
from olive_ext.model import ResolvedModel
from olive_ext.records import Records
from olive_ext.session.workers.crew import Crew
from olive_ext.session.workers.process_worker import ProcessWorker
from olive_ext.session.workers.served_model import OWN, Job
from olive_ext.session.workers.worker import Watchdog


def open_crew(model: ResolvedModel, reference: ResolvedModel | Records | None, record_to: Any) -> Crew:
    """The workers that the settings of `model` ask for, open. Records are written by one worker alone."""
    wanted, limit_s = model.settings.workers, model.settings.step_timeout
    if wanted is None:
        return Crew([ProcessWorker(job_of(model, reference, record_to, 1), Watchdog(limit_s))])
    count = 1 if record_to is not None else wanted.count
    job = job_of(model, reference, record_to, count if wanted.address is None else 1)
    from olive_ext.session.workers.ray_worker import ray_workers

    crew = Crew(ray_workers(job, wanted, [Watchdog(limit_s) for _ in range(count)]))
    _check_alike(crew)
    return crew


def job_of(model: ResolvedModel, reference: ResolvedModel | Records | None, record_to: Any, share: int) -> Job:
    """What each of `share` workers on this machine opens: the model's settings, with the machine's threads divided."""
    settings = _settings(model, share)
    if isinstance(reference, Records):
        return Job(settings, model.handed_over, reference_records=str(reference.folder.resolve()))
    given = record_to if isinstance(record_to, Mapping) or record_to is None else {"folder": str(record_to)}
    other = None if reference is None else _settings(reference, share)
    return Job(settings, model.handed_over, other, None, given)


def _settings(model: ResolvedModel, share: int) -> dict[str, Any]:
    engine = model.settings.engine
    if share > 1 and engine.num_threads == "auto":
        engine = engine.model_copy(update={"num_threads": max(1, _num_processors() // share)})
    is_fixed = model.settings.deterministic is not False
    given = {
        "deterministic": is_fixed,
        "isolation": "none",
        "workers": None,
        "tokenizer": model.files.tokenizer,
        "engine": engine,
    }
    settings: ModelSettings = model.settings.model_copy(update=given)
    return settings.model_dump(mode="json", exclude_unset=True, exclude_none=True)


def _num_processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_alike(crew: Crew) -> None:
    """Raises where workers would not give the same bits."""
    num_slots = {served.models[OWN].num_slots for served in crew.all_served}
    if len(num_slots) > 1:
        raise RunError(
            f"the workers have room for different numbers of sequences ({sorted(num_slots)}), so that their numbers "
            "would differ by rounding: set 'engine.num_slots'"
        )

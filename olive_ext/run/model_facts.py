"""What facts of two executions say of their models: where answers end, which context is shorter, and what is damaged.

Knows no open model, so that reports and baselines are read alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from olive_ext.errors import ModelError
from olive_ext.model import ResolvedModel
from olive_ext.report.comparison import TRIALS, StopTokens

STOP_FACTS = ("stop_ids", "unused_stop_ids", "stop_ids_file", "search")
"""Facts of an execution that `stops_of` reads."""

UNJUDGED = "unjudged"
"""The fact of a report that holds `Models.unjudged`."""


def damage_of(reference: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, str]:
    """What is damaged by facts of two executions, where the reference does not have it too: files that are not judged,
    and what trials of opening have found, which tasks may not show."""
    known = reference.get(UNJUDGED, {})
    files = {name: what for name, what in model.get(UNJUDGED, {}).items() if known.get(name) != what}
    failed = {name: model[fact] for fact, name in TRIALS.items() if model.get(fact) and not reference.get(fact)}
    return {**files, **failed}


def contexts_of(candidate: int | None, other: int | None) -> tuple[int, int] | None:
    """Both contexts, where the model's is known to be shorter than its reference's."""
    return (candidate, other) if candidate and other and candidate < other else None


def ends_of(model: ResolvedModel) -> Mapping[str, Any]:
    """`STOP_FACTS` of a model by its files, which may have no tokenizer."""
    from olive_ext.session.generation_bounds import read_start, read_stop_ids
    from olive_ext.session.tokenizer import load_tokenizer

    files, settings = model.processor_files, model.settings
    with suppress(ModelError):
        tokenizer = load_tokenizer(model.files.tokenizer, trust_remote_code=settings.trust_remote_code)
        start = read_start(tokenizer, files, settings.language, settings.speech_task) if model.source else ()
        return read_stop_ids(files, tokenizer.eos_token_id, start).facts
    return read_stop_ids(files, None).facts


def stops_of(reference: Mapping[str, Any], candidate: Mapping[str, Any]) -> StopTokens | None:
    """Where both models end their answers, from the facts of their executions; None where one does not say it."""
    from olive_ext.session.generation_bounds import other_search

    if not all(isinstance(facts.get("stop_ids"), list | tuple) for facts in (reference, candidate)):
        return None
    both = [(tuple(facts["stop_ids"]), str(facts.get("stop_ids_file", ""))) for facts in (reference, candidate)]
    search = other_search(reference.get("search") or {}, candidate.get("search") or {}) if "search" in reference else ()
    return StopTokens(*both[0], *both[1], search, tuple(reference.get("unused_stop_ids", candidate["stop_ids"])))

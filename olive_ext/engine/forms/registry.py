"""The forms of a step on ONNX Runtime, and which one a model is opened with."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from olive_ext.engine.forms.kv_store import GraphForm
from olive_ext.engine.forms.packed import PackedOnGraph
from olive_ext.engine.forms.returned import ReturnedOnGraph
from olive_ext.engine.forms.rows import RowsOnGraph
from olive_ext.engine.forms.tree import TreeOnGraph
from olive_ext.model import ResolvedModel
from olive_ext.model.decisions import Decision

FORMS: list[type[GraphForm]] = [PackedOnGraph, TreeOnGraph, ReturnedOnGraph, RowsOnGraph]
"""The forms, in the order in which they are asked. The last one takes every model that the others refuse."""


def choose(model: ResolvedModel, problems: Mapping[str, str] = MappingProxyType({})) -> tuple[GraphForm, Decision]:
    """The form with which `model` is opened, and why, as far as that is known without a session. `problems`: why
    forms were refused, by name. Raises `ConfigError`."""
    reasons: list[str] = []
    for form in FORMS:
        reason = problems.get(form.name) or form.against(model)
        if reason is None:
            return form(model), form.decision(model, next(iter(reasons), "engine.scoring"))
        if reason:
            reasons.append(form.refused(model, reason))
    raise AssertionError("the last form takes every model")

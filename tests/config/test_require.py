"""Bounds as a recipe writes them."""

from __future__ import annotations

from typing import Any

import pytest

from olive_ext.config import WorkflowSettings
from olive_ext.errors import ConfigError


def parse(*bounds: Any, **values: Any) -> WorkflowSettings:
    return WorkflowSettings.parse({"tasks": ["a"], "require": list(bounds), **values}, "passes.gate")


@pytest.mark.parametrize(
    ("bound", "message"),
    [
        ({"metric": "acc"}, "passes.gate.require.0: give 'max' or 'min' for 'acc'"),
        ({"metric": "acc", "min": 2, "max": 1}, "passes.gate.require.0: 'min' = 2 of 'acc' is above 'max' = 1"),
        ({"metrik": "acc", "max": 1}, "unknown key 'passes.gate.require.0.metrik': did you mean 'metric'"),
        ({"max": 1}, "missing key 'passes.gate.require.0.metric'"),
        ({"metric": "acc", "max": True}, "'passes.gate.require.0.max' = True: give a number"),
        ({"metric": "acc", "max": float("nan")}, "'passes.gate.require.0.max' = nan: give a number"),
        (3, "'passes.gate.require.0' = 3: give a mapping"),
    ],
)
def test_wrong_bound_is_refused_by_its_place(bound: Any, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(bound)
    assert message in str(raised.value)

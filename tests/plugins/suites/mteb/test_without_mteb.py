"""What is said where mteb, which is an extra, is not installed."""

from __future__ import annotations

import sys

import pytest

from olive_ext.errors import ConfigError
from olive_ext.registry import hook
from tests.refusals import refused


def test_tasks_name_the_extra_that_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mteb", None)
    monkeypatch.delitem(sys.modules, "olive_ext.plugins.suites.mteb.evaluation", raising=False)
    with refused(ConfigError, "needs_package", holds="'mteb'"):
        hook("embedding_tasks", "'tasks'")(None, None, None)

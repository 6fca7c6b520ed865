"""What people and programs read of stored evaluations stays as it is: verdict, terminal, markdown and page."""

from __future__ import annotations

import difflib
import json

import pytest

from olive_ext.report import to_json
from tests.report.golden import FOLDER, RUNS, goldens, stored

pytest.importorskip("jinja2")


def test_people_read_what_they_read_before() -> None:
    changes: list[str] = []
    for name, text in goldens().items():
        before = (FOLDER / name).read_text(encoding="utf-8").splitlines()
        changes += difflib.unified_diff(before, text.splitlines(), name, f"{name} now", n=1, lineterm="")
    assert not changes, "\n".join(["`python -m tests.report.golden` makes these changes:", *changes])


@pytest.mark.parametrize("name", RUNS)
def test_programs_read_what_they_read_before(name: str) -> None:
    """The verdict, which a report is written with, is computed anew."""
    assert json.loads(to_json(stored(name))) == json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))

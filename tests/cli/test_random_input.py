"""Random damage to packages, graphs, task files, journals and records of a reference, forged journals and
reports, and poisoned folders: the command ends as `tests.fuzz` asks of it."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from olive_ext.cli import main
from tests.fuzz import KINDS, MORE_KINDS, Root, judged, numbers

few = settings(
    max_examples=max(5, settings().max_examples // 20),
    deadline=None,
    phases=[Phase.reuse, Phase.generate],  # a smaller seed is no smaller case
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Root:
    root = Root(tmp_path_factory.mktemp("random_input"))
    begun = Path.cwd()
    os.chdir(root.whole)
    try:
        assert main(root.with_reference()) == 0
    finally:
        os.chdir(begun)
    root.expected = numbers(root.whole)
    return root


@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.long) for kind in MORE_KINDS)])
@few
@given(seed=st.integers(0, 2**32))
def test_damage_ends_in_a_line_or_changes_nothing(
    kind: str, seed: int, root: Root, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = root.whole.parent / "case"
    shutil.rmtree(here, ignore_errors=True)
    shutil.copytree(root.whole, here)
    case = {**KINDS, **MORE_KINDS}[kind](random.Random(seed), root, here)
    monkeypatch.chdir(here)
    capfd.readouterr()
    status = main(case.argv)
    assert judged(case, here, root, status, capfd.readouterr().err) == "", case

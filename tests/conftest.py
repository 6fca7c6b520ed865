"""What holds for the whole suite: one thread a session, because several workers run at a time, how many random examples
a property test draws and by which seed, which cases a sample has, and what a device is needed for."""

from __future__ import annotations

import gc
import hashlib
import os
import random
import subprocess
import zlib
from collections import Counter
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any

import onnx
import onnxruntime
import pytest
from hypothesis import settings

from olive_ext.model.spec import decoder_spec
from olive_ext.model.spec.step_choices import read_step_choices
from tests import emulated
from tests.exports.cache import cache_folder, run_forked

if emulated.IS_EMULATED:
    emulated.hold()

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's and BLAS's, in the processes that tests start as well
os.environ.setdefault("OLIVE_EXT_ISOLATION", "none")  # tests that want a worker process say so

settings.register_profile("quick", max_examples=40, deadline=None)
settings.register_profile("thorough", max_examples=300, deadline=None, derandomize=False, print_blob=True)
settings.load_profile("quick")  # --hypothesis-profile=thorough: .ci/run


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Draws random examples by the day, $CI_DAY or UTC's: others tomorrow, and what failed today fails again today."""
    if config.getoption("--hypothesis-seed") is None:
        config.option.hypothesis_seed = os.environ.get("CI_DAY") or datetime.now(timezone.utc).date().isoformat()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sample", metavar="SEED", help="of each selected test one case alone, drawn by SEED")
    parser.addoption("--seventh", metavar="DATE", help="of the selected tests those of DATE: each has one day in seven")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Draws the sample of what `-m` and `-k` leave. What is drawn of a file does not depend on the others."""
    seed, date = config.getoption("--sample"), config.getoption("--seventh")
    drawn = set(items) if seed is None else one_of_each(items, seed)
    if date is not None:
        drawn &= those_of_the_day(items, datetime.fromisoformat(date).toordinal())
    config.hook.pytest_deselected(items=[item for item in items if item not in drawn])
    items[:] = [item for item in items if item in drawn]


def one_of_each(items: list[pytest.Item], seed: str) -> set[pytest.Item]:
    """One case of each test, and of each group of a table whose cases' names begin with "GROUP: "."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        test, _, case = item.nodeid.partition("[")
        group, colon, _ = case.partition(": ")
        cases.setdefault(f"{test}[{group}" if colon else test, []).append(item)
    return {random.Random(f"{seed} {test}").choice(of_test) for test, of_test in cases.items()}


def those_of_the_day(items: list[pytest.Item], day: int) -> set[pytest.Item]:
    """Those of one day in seven. A test's cases are on days one after the other, and the first cases of a file's tests
    on one day, because they share what the file prepares."""
    drawn, cases = set(), Counter[str]()
    for item in items:
        file, test = item.nodeid.partition("::")[0], item.nodeid.partition("[")[0]
        if (zlib.crc32(file.encode()) + cases[test] - day) % 7 == 0:
            drawn.add(item)
        cases[test] += 1
    return drawn


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """The objects of all libraries that tests import stay: a search for garbage, as each comparison makes, would take a
    second to look at them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """As do those that the tests of a file have imported: else a tenth of the suite's time goes into the search."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before any fixture opens a model
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests marked `webgpu` or `gpu` where there is no such device, with the reason."""
    if marked := {"webgpu", "gpu"}.intersection(mark.name for mark in item.iter_markers()):
        from tests.device.open import why_no_cuda, why_no_webgpu

        if reason := why_no_webgpu() if "webgpu" in marked else why_no_cuda():
            pytest.skip(reason)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's cache is the tests' own, also of processes that they start: one model is exported once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_folder() / "user"))


@pytest.fixture
def forked_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports that the package makes start no process that imports the builder for seconds; tests/run/test_export.py
    has those that do."""
    from olive_ext.run import export

    monkeypatch.setattr(export, "module_command", lambda module, *arguments: ["-m", module, *arguments])
    run = SimpleNamespace(run=run_forked, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(export, "subprocess", run)


class _OneThread(onnxruntime.SessionOptions):
    """ONNX Runtime's threads spin while they wait: those of one worker would take the processors of the others. No
    variable of the environment names their number, and threads within an operator change no bit of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.intra_op_num_threads = 1


onnxruntime.SessionOptions = _OneThread


_choices: dict[tuple[bytes, str], Any] = {}


def _choices_once(model: onnx.ModelProto, *given: Any) -> Any:
    """What a graph decides by a step's length follows from its nodes: it is found out once for a graph, not for each of
    a thousand sessions on the same few. tests/model/test_step_choices.py calls the function itself."""
    key = hashlib.sha256(model.SerializeToString()).digest(), repr(given)
    if key not in _choices:
        _choices[key] = read_step_choices(model, *given)
    return _choices[key]


decoder_spec.read_step_choices = _choices_once

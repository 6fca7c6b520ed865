"""Steps that begin before the one before them is read change no result, and leave nothing running."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice, zip_longest
from pathlib import Path

import numpy as np
import pytest

from olive_ext.engine import engine as engine_module
from olive_ext.engine.engine import Engine
from olive_ext.engine.requests import Beams, Counters, Generation, Ids, Request, Sampling
from olive_ext.engine.runners.runner import StepForm
from olive_ext.engine.scheduling.planned_step import THREAD_NAME, StepThread
from olive_ext.engine.scheduling.prefix_tree import make_plan
from olive_ext.engine.step import Row, Step, StepOutput
from olive_ext.errors import MemoryShortageError, RunError
from tests.engine.fake_runner import FORMS, PACKED, RANGE, VOCAB, FakeRunner
from tests.engine.strategies import assert_runs_as_oracle, ran


class Scarce(FakeRunner):
    """Loses its memory for more than one row at step number `at`, which may be one that waits behind another."""

    at = 0

    def _execute(self, step: Step) -> StepOutput:
        if len(self.steps) >= self.at and len(step.rows) > 1:
            raise MemoryShortageError("planted")
        return super()._execute(step)


def test_settling_waits_for_a_step_whose_beginning_was_interrupted() -> None:
    """Ctrl-C may come after the step is handed over, and before it is noted."""
    done = list[Step]()
    step = Step((Row(0, 0, (1,)),))

    def run(one: Step) -> StepOutput:
        time.sleep(0.1)
        done.append(one)
        return StepOutput(np.zeros(0, np.float32), np.zeros(0, np.int64), np.zeros((0, 0), np.float32))

    thread = StepThread(run)
    thread.begin(step)
    thread._begun.clear()
    thread.settle()
    assert done == [step]
    thread.close()


@pytest.mark.parametrize("at", range(3, 10))
def test_memory_that_is_lost_on_the_way_costs_no_token(at: int) -> None:
    requests = [Request((1, 2, i), 0, Generation(9, frozenset({3}))) for i in range(3)]
    runner = Scarce(3, RANGE, overlaps_steps=True)
    runner.at = at
    assert ran(runner, requests, 8).steps_halved >= 1


def _decode(batching: StepForm, requests: list[Request], overlaps_steps: bool = True) -> tuple[Counters, FakeRunner]:
    runner = FakeRunner(4, batching, overlaps_steps=overlaps_steps)
    return ran(runner, requests), runner


def _queue(count: int, stop_ids: frozenset[int] = frozenset()) -> list[Request]:
    """More prompts than there are slots, of many lengths, with answers of many."""
    return [
        Request((1, *range(2, 3 + i % 7), i % VOCAB), 0, Generation(10 + i * 7 % 13, stop_ids)) for i in range(count)
    ]


def test_slot_of_an_answer_whose_last_token_is_found_next_is_free_at_once() -> None:
    """Steps are fed with every token that is not the last: none stands still for a slot."""
    requests = [Request((i, 2, 1), 0, Generation(6)) for i in range(12)]
    counters, runner = _decode(PACKED, requests)
    assert [len(step.rows) for step in runner.steps] == [4] * 18
    assert counters.steps_overlapped == 17
    assert counters.rows_dropped == 0


SAMPLED = [Request((1, 9, i), 0, Generation(9, sampling=Sampling(1.0, seed=i))) for i in range(5)]
SEARCHED = [Request((1, 7, i), 0, Generation(5, beams=Beams(2))) for i in range(3)]


@pytest.mark.parametrize(
    ("batching", "requests", "num_overlapped"),
    [
        (PACKED, [one for trio in zip_longest(SAMPLED, SEARCHED, _queue(9)) for one in trio if one is not None], None),
        (RANGE, SAMPLED[:3], 2),
    ],
    ids=["beside greedy ones that do not wait", "alone"],
)
def test_sampled_and_searched_rows_are_read_before_what_follows_them(
    batching: StepForm, requests: list[Request], num_overlapped: int | None
) -> None:
    """Steps that compute no input hold all that decode; alone only the second and the third prompt overlap."""
    ahead, serial = (Engine(FakeRunner(4, batching, overlaps_steps=keeps), 4) for keeps in (True, False))
    assert ahead.run(requests) == serial.run(requests)
    assert 0 < ahead.counters.steps_overlapped < ahead.counters.steps
    assert num_overlapped in (None, ahead.counters.steps_overlapped)
    ahead.close()


_others = set[threading.Thread]()
"""Threads that were there before a test: of engines that a test elsewhere has left, because it failed."""


@pytest.fixture(autouse=True)
def _noted() -> None:
    _others.clear()
    _others.update(threading.enumerate())


def _threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith(THREAD_NAME) and one not in _others]


class Slow(FakeRunner):
    """Takes a while for each step, and notes when it is at work."""

    is_closed = False

    def _execute(self, step: Step) -> StepOutput:
        time.sleep(0.005)
        assert not self.is_closed
        return super()._execute(step)

    def close(self) -> None:
        assert self._running.acquire(blocking=False), "closed while a step runs"
        self.is_closed = True


LONG = [Request((1, 2, i), 0, Generation(30)) for i in range(3)]


def _slow() -> tuple[Engine, Slow]:
    runner = Slow(3, RANGE, overlaps_steps=True)
    return Engine(runner, 8), runner


def _assert_idle(runner: Slow) -> None:
    with runner._running:
        before = len(runner.steps)
    time.sleep(0.03)
    assert len(runner.steps) == before


def _assert_usable(engine: Engine) -> None:
    assert_runs_as_oracle(engine, [LONG])
    assert engine.counters.steps_overlapped
    engine.close()
    assert _threads() == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_error_while_stops_are_looked_for_leaves_the_engine_usable(error: type[BaseException]) -> None:
    engine, runner = _slow()

    def fail(tokens: object) -> bool:
        if len(tokens) == 5:  # type: ignore[arg-type]
            raise error
        return False

    with pytest.raises(error):
        engine.run([Request((5, 6), 0, Generation(30, is_finished=fail)), *LONG])
    _assert_idle(runner)
    _assert_usable(engine)


def test_interruption_of_the_wait_leaves_the_engine_usable() -> None:
    """The second Ctrl-C comes while the first one waits for the step that runs."""
    engine, runner = _slow()
    raised = []

    class Interrupted(type(engine._generating.thread)):  # type: ignore[misc]
        def settle(self) -> None:
            if raised or self._executor is None:
                super().settle()
            else:
                raised.append(True)
                raise KeyboardInterrupt

    engine._generating.thread = Interrupted(runner.run)
    results = engine.run_slices([list(enumerate([Request((5, 6), 0, Generation(4)), *LONG]))])
    next(results)
    with pytest.raises(KeyboardInterrupt):
        results.close()  # type: ignore[attr-defined]
    assert raised
    _assert_usable(engine)


@pytest.mark.parametrize("end", [None, Engine.close, Engine.reset])
def test_end_in_the_middle_of_an_iterator_waits_for_the_step_that_runs(end: Callable[[Engine], None] | None) -> None:
    """Also where the iterator is given up."""
    engine, runner = _slow()
    results = engine.run_continuous(enumerate([Request((5, 6), 0, Generation(4)), *LONG]))
    next(results)
    results.close() if end is None else end(engine)  # type: ignore[attr-defined]
    if end is Engine.close:  # the runner has checked that nothing runs
        assert runner.is_closed
        assert _threads() == []
    else:
        _assert_idle(runner)
        _assert_usable(engine)


def _slices(read: list[int]) -> Iterator[list[tuple[int, Request]]]:
    """Two of scored texts, each after three parts of the work that they are; then one that cannot be made."""
    for first in (0, 40):
        for part in range(3):
            read.append(first + part)
            yield []
        yield [(first + i, Request((1, *range(2, 3 + i % 7), i % VOCAB, first % 5), 1)) for i in range(40)]
    read.append(80)
    raise RunError("planted")


@pytest.mark.parametrize("overlaps_steps", [True, False])
def test_the_next_slice_is_read_part_by_part_while_a_device_computes(
    overlaps_steps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And planned. Nothing changes but when that is: not the steps, nor what was answered before an error."""
    if overlaps_steps:
        monkeypatch.setattr(engine_module, "make_plan", lambda *_: pytest.fail("planned when it is due"))
    runner = Slow(4, PACKED, overlaps_steps=overlaps_steps)  # else a step may be over before the host would wait for it
    engine, read, found = Engine(runner, 8), list[int](), dict[int, object]()
    num_read: list[int] = []

    def run() -> None:
        for key, result in engine.run_slices(_slices(read)):
            found[key] = result
            num_read.append(len(read))

    with pytest.raises(RunError, match="planted"):
        run()
    ahead = next(place for place, parts in enumerate(num_read) if parts >= 6)  # 7: the error after it was met, too
    assert ahead < 30 if overlaps_steps else ahead == 40
    assert sorted(found) == list(range(80))
    alone = FakeRunner(4, PACKED, overlaps_steps=overlaps_steps)
    again, slices = Engine(alone, 8), islice(filter(None, _slices([])), 2)
    assert found == {key: result for items in slices for key, result in again.run_slices([items])}
    assert [step.rows for step in runner.steps] == [step.rows for step in alone.steps]
    for one in (engine, again):
        one.close()


def test_planning_reads_no_integers_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [Request((*range(30), i % 7, *range(5)), 3) for i in range(200)]
    monkeypatch.setattr(Ids, "__iter__", lambda ids: pytest.fail("read one by one"))
    plan = make_plan(enumerate(requests))
    assert (len(plan.sequences), plan.tokens_distinct) == (7, 30 + 7 * 5)
    assert all(np.shares_memory(one.tokens, requests[place].tokens.array) for place, one in enumerate(plan.sequences))


class Failing(FakeRunner):
    """Fails at step number `at`."""

    at = 6

    def _execute(self, step: Step) -> StepOutput:
        if len(self.steps) == self.at:
            self.at = -1
            raise RunError("planted")
        return super()._execute(step)


@pytest.mark.parametrize("at", [4, 5, 6])
def test_step_behind_one_that_failed_is_not_run(at: int) -> None:
    runner = Failing(3, RANGE, overlaps_steps=True)
    runner.at = at
    engine = Engine(runner, 8)
    with pytest.raises(RunError, match="planted"):
        engine.run(LONG)
    assert len(runner.steps) == at
    _assert_usable(engine)


@pytest.mark.parametrize("batching", FORMS)
def test_scoring_is_planned_while_the_step_before_runs(batching: StepForm) -> None:
    requests = [Request((i % VOCAB, i % 3, 2, i % 5, 4), 2) for i in range(40)]
    counters = ran(FakeRunner(4, batching, overlaps_steps=True), requests, 8)
    assert counters.steps_overlapped == counters.steps - 1


def test_engine_that_keeps_no_tokens_starts_no_thread() -> None:
    serial = Engine(FakeRunner(3, RANGE), 8)
    serial.run(LONG)
    assert _threads() == []


ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import signal, threading, time
from tests.engine.scheduling.test_overlapped_steps import LONG, _assert_usable, _slow
from olive_ext.engine.requests import Generation, Request
engine, runner = _slow()
"""


def _run_program(lines: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM + lines]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.skipif(os.name == "nt", reason="signals are sent in another way")
def test_ctrl_c_between_any_two_steps_leaves_the_engine_usable() -> None:
    done = _run_program("""
signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
begin = time.perf_counter()
engine.run(LONG)
whole = time.perf_counter() - begin
interrupted = 0
for number, part in enumerate((*range(1, 16), *(5,) * 50)):
    if number >= 15 and interrupted > 10:  # on a busy machine the first run may be a slow one, the others end before
        break
    signal.setitimer(signal.ITIMER_REAL, whole * part / 20)
    try:
        engine.run(LONG)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        interrupted += 1
_assert_usable(engine)
print("usable" if interrupted > 10 else interrupted)
""")
    assert (done.stdout.split(), done.stderr, done.returncode) == (["usable"], "", 0)


IN_THE_MIDDLE = """
results = engine.run_continuous(enumerate([Request((5, 6), 0, Generation(4)), *LONG]))
next(results)
"""
GARBAGE = """
import gc, sys
time.sleep(0.02)  # its thread waits for another step
sys.setswitchinterval(1e-6)  # and ends as soon as it can
both = [results, engine]
both.append(both)
del results, engine, runner, both
gc.collect()
"""


@pytest.mark.parametrize("end", ["", GARBAGE], ids=["program", "garbage"])
def test_end_of_what_holds_an_iterator_is_silent_and_waits_for_no_thread_that_is_gone(end: str) -> None:
    done = _run_program(f"{IN_THE_MIDDLE}{end}print('given up')")
    assert (done.stdout.split(), done.stderr, done.returncode) == (["given", "up"], "", 0)

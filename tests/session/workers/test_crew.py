"""Whatever happens to workers, each request has its own result, or is named; and little is computed twice. Chunks are
read as there is room, and handed out so that old ones are complete first and the workers end together."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from olive_ext.backends.progress import progress_bar, shown
from olive_ext.engine.requests import Lost, Request, Result
from olive_ext.errors import RunError, TaskError, WorkerError
from olive_ext.session.workers import crew
from olive_ext.session.workers.crew import AHEAD, MOST_GUILTY, PAUSES_S, Chunk, ChunkFeed, Crew, WorkerPool
from olive_ext.session.workers.worker import OWN, Reply, Served, Watchdog, WorkerLostError
from tests.engine.fake_runner import oracle
from tests.engine.strategies import assert_equal
from tests.refusals import refused
from tests.session.workers.fake_model import CRASH, FAIL, FakeServed


class FakeWorker:
    """A worker in a thread, which is lost in the calls whose numbers are in `losses`, and by requests with `CRASH`.
    `opening` is called with each opening's number, and may give other versions; `running` before each chunk."""

    def __init__(
        self,
        name: str,
        losses: Sequence[int] = (),
        opening: Callable[[int], object] = lambda number: None,
        running: Callable[[], object] = lambda: None,
    ) -> None:
        self.name = name
        self.num_calls = self.num_released = 0
        self.num_openings = 0
        self.asked: list[Request] = []
        self._losses = set(losses)
        self._opening, self._running = opening, running
        self._served: FakeServed | None = None

    def open(self) -> Served:
        self.num_openings += 1
        versions = self._opening(self.num_openings)
        self._served = FakeServed()
        served = self._served.open(None)
        return replace(served, versions=versions) if isinstance(versions, dict) else served

    def run(self, which: str, requests: Sequence[Request]) -> Reply:
        self.num_calls += 1
        self._running()
        if self._served is None:
            raise WorkerLostError("not running")
        if self.num_calls in self._losses or any(CRASH in request.tokens for request in requests):
            self._served = None
            raise WorkerLostError("ended by SIGSEGV")
        self.asked += requests
        return self._served.run(which, requests)

    def release_memory(self, which: str) -> None:
        self.num_released += 1

    def stop(self) -> None:
        self._served = None


def failing(error: BaseException, numbers: Iterable[int] = range(1, 99)) -> Callable[..., None]:
    """Raises the error in the openings of these numbers, and in each chunk."""

    def fail(number: int = 1) -> None:
        if number in numbers:
            raise error

    return fail


def requests_of(count: int, crashing: Sequence[int] = ()) -> list[Request]:
    return [
        Request((1, 2, CRASH if number in crashing else 3 + number % 20, number % 7, 5), 2) for number in range(count)
    ]


def run(crew: Crew, chunks: Sequence[Sequence[Request]]) -> dict[int, Sequence[Result | Lost]]:
    return dict(crew.run(OWN, chunks))


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    losses=st.lists(st.lists(st.integers(1, 6), max_size=3), min_size=1, max_size=4),
)
def test_results_are_those_of_the_requests_whichever_workers_are_lost(
    sizes: list[int], losses: list[list[int]]
) -> None:
    requests = requests_of(sum(sizes))
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    chunks = [requests[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    workers = [FakeWorker(f"worker {number}", lost) for number, lost in enumerate(losses)]
    found = run(Crew(workers), chunks)
    assert sorted(found) == list(range(len(chunks)))
    for number, chunk in enumerate(chunks):
        for request, result in zip(chunk, found[number], strict=True):
            if isinstance(result, Result):
                assert_equal(result, oracle(request))
            else:
                assert len(losses) > 0
    asked = sum(len(worker.asked) for worker in workers)
    lost = sum(isinstance(result, Lost) for results in found.values() for result in results)
    assert asked + lost == len(requests)


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6), data=st.data(), num_workers=st.integers(1, 3))
def test_requests_that_crash_are_named_and_all_others_answered(
    sizes: list[int], data: st.DataObject, num_workers: int
) -> None:
    """A chunk with such a request costs two workers, and the request by itself one more."""
    crashing = data.draw(st.sets(st.integers(0, len(sizes) - 1), max_size=3))
    chunks = [requests_of(size, [size // 2] if number in crashing else []) for number, size in enumerate(sizes)]
    workers = [FakeWorker(f"worker {number}") for number in range(num_workers)]
    crew = Crew(workers)
    found = run(crew, chunks)
    for number, size in enumerate(sizes):
        for place, (request, result) in enumerate(zip(chunks[number], found[number], strict=True)):
            if number in crashing and place == size // 2:
                assert isinstance(result, Lost)
                assert "SIGSEGV" in result.reason
            else:
                assert_equal(result, oracle(request))
    assert crew.num_lost == sum(2 + (sizes[number] > 1) for number in crashing)
    assert sum(len(worker.asked) for worker in workers) == sum(sizes) - len(crashing)


def test_a_chunk_of_which_every_request_crashes_costs_few_workers() -> None:
    crew = Crew([FakeWorker("worker")])
    found = run(crew, [requests_of(50, range(50)), requests_of(3)])
    assert [isinstance(result, Lost) for result in (*found[0], *found[1])] == [True] * 50 + [False] * 3
    assert crew.num_lost == 2 + MOST_GUILTY


def test_chunks_are_read_as_workers_need_them() -> None:
    complete, read = [0], [0]

    def chunks() -> Iterator[list[Request]]:
        for size in range(1, 60):
            read[0] += 1
            assert read[0] - complete[0] <= 2 * (AHEAD + 1) + 1
            yield requests_of(size)

    for _ in Crew([FakeWorker("one"), FakeWorker("two")]).run(OWN, chunks()):
        complete[0] += 1
    assert complete == read == [59]


def test_an_empty_chunk_asks_no_worker() -> None:
    worker = FakeWorker("one")
    found = run(Crew([worker]), [[], requests_of(2), []])
    assert [len(found[number]) for number in range(3)] == [0, 2, 0]
    assert (worker.num_calls, run(Crew([worker]), [[]])) == (1, {0: []})
    assert worker.num_calls == 1


def test_what_a_model_raises_is_raised_and_the_crew_can_be_used_again() -> None:
    crew = Crew([FakeWorker("one"), FakeWorker("two")])
    with refused(TaskError, "contradiction", "luck", holds="no such luck"):
        run(crew, [requests_of(3), [Request((1, FAIL, 2), 1)]])
    assert len(run(crew, [requests_of(3)])[0]) == 3


def test_a_caller_that_stops_reading_ends_the_call() -> None:
    crew = Crew([FakeWorker("one")])
    for _ in crew.run(OWN, [requests_of(3), requests_of(2)]):
        break
    assert "one" not in {thread.name for thread in threading.enumerate()}


def test_a_worker_that_is_stopped_under_an_open_call_is_not_lost_and_not_opened_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As a session is closed after Ctrl-C."""
    stopped, calls = threading.Event(), []

    def running() -> None:
        calls.append(len(calls))
        assert calls == [0] or stopped.wait(9)

    crew = Crew([worker := FakeWorker("one", running=running)])
    results = crew.run(OWN, [requests_of(3), requests_of(2)])
    next(results)
    crew.stop()
    stopped.set()
    with refused(RunError, "failed", holds="one"):
        next(results)
    assert (worker.num_openings, crew.num_lost, caplog.records) == (1, 0, [])


def test_a_worker_that_does_not_come_up_again_is_left_out_until_none_is_left() -> None:
    at_once, again = [0.0] * len(PAUSES_S), range(2, 2 + len(PAUSES_S))
    broken = FakeWorker("one", losses=[1], opening=failing(RunError("no memory"), again))
    found = run(Crew([broken, FakeWorker("good")], at_once), [requests_of(3), requests_of(4), requests_of(5)])
    assert [len(found[number]) for number in range(3)] == [3, 4, 5]
    with refused(WorkerError, "worker", holds=("one", "no memory")):
        run(
            Crew([FakeWorker("one", losses=[1], opening=failing(RunError("no memory"), range(2, 11)))], at_once),
            [requests_of(3)],
        )


def poor(num_refusals: int) -> FakeWorker:
    """Lost in its first call; the machine then refuses to start it so many times."""
    error = OSError(errno.ENOMEM, "Cannot allocate memory")
    return FakeWorker("poor", losses=[1], opening=failing(error, range(2, 2 + num_refusals)))


def test_a_worker_that_the_machine_refuses_to_start_is_tried_again_and_then_named() -> None:
    """As `fork` fails where memory is short, just after the system has killed the worker for it."""
    at_once = [0.0] * len(PAUSES_S)
    assert len(run(Crew([poor(len(PAUSES_S) - 1)], at_once), [requests_of(3)])[0]) == 3
    with refused(WorkerError, "worker", holds=("poor", "OSError: ", "Cannot allocate memory")):
        run(Crew([poor(99)], at_once), [requests_of(3)])
    found = run(Crew([poor(99), FakeWorker("good")], at_once), [requests_of(3)] * 9)
    assert [len(results) for results in found.values()] == [3] * 9


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError(), SystemExit(3), KeyError(1)])
def test_whatever_ends_the_thread_of_a_worker_ends_the_call(error: BaseException) -> None:
    with pytest.raises(type(error) if isinstance(error, Exception) else RunError):
        run(Crew([FakeWorker("odd", running=failing(error)) for _ in range(2)]), [requests_of(3)] * 9)
    with refused(RunError, "worker", holds=(f"{type(error).__name__}",)):
        Crew([FakeWorker("good"), FakeWorker("odd", opening=failing(error))])


def test_a_machine_without_a_thread_left_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    crew = Crew([FakeWorker("one"), FakeWorker("two")])
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "two":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    for attempt in (lambda: run(crew, [requests_of(3)]), lambda: Crew([FakeWorker("one"), FakeWorker("two")])):
        with refused(WorkerError, "worker", holds=("two", "(can't start")):
            attempt()
    monkeypatch.undo()
    assert len(run(crew, [requests_of(3)])[0]) == 3


def test_counters_are_right_while_workers_are_lost_and_others_answer() -> None:
    """Each of the workers has counters of its own, which begin anew when it does."""
    crew = Crew([FakeWorker(f"worker {number}", losses=range(2, 200, 7)) for number in range(8)])
    chunks = [requests_of(2 + number % 3) for number in range(150)]
    answered = 0
    for _ in range(2):
        found = run(crew, chunks)
        answered += sum(isinstance(result, Result) for results in found.values() for result in results)
        assert crew.counters.requests == answered


def test_counters_outlive_a_call_that_is_interrupted() -> None:
    crew = Crew([FakeWorker("one")])
    for _ in crew.run(OWN, [requests_of(3)]):
        break
    run(crew, [requests_of(4)])
    assert crew.counters.requests == 7


def test_a_worker_that_is_lost_between_calls_is_not_asked_to_free_its_memory() -> None:
    class Gone(FakeWorker):
        def release_memory(self, which: str) -> None:
            raise WorkerLostError("ended by SIGKILL")

    crew = Crew([Gone("gone"), good := FakeWorker("good")])
    crew.release_memory(OWN)
    assert good.num_released == 1
    assert len(run(crew, [requests_of(3)])[0]) == 3


class HomelessWorker(FakeWorker):
    """Lost in its first call; until there is room for it, `open` then waits until the worker is stopped."""

    def __init__(self, name: str) -> None:
        super().__init__(name, losses=[1])
        self.is_lost, self.is_stopped = threading.Event(), threading.Event()
        self.has_room = False

    def open(self) -> Served:
        if self.num_openings and not self.has_room:
            self.is_lost.set()
            assert self.is_stopped.wait(60), "nobody stopped it"
            self.is_stopped.clear()
            raise WorkerLostError("was stopped")
        return super().open()

    def stop(self) -> None:
        self.is_stopped.set()


def patient(other: HomelessWorker) -> FakeWorker:
    """Begins when the other one is lost."""
    return FakeWorker("good", running=lambda: other.is_lost.wait(60))


def test_a_worker_without_room_is_not_waited_for_where_others_do_the_work() -> None:
    gone = HomelessWorker("gone")
    crew = Crew([gone, good := patient(gone)])
    for number in range(2):
        found = run(crew, [requests_of(3), requests_of(4), requests_of(5)])
        assert [len(found[place]) for place in range(3)] == [3, 4, 5]
        crew.release_memory(OWN)
        assert (gone.num_released, good.num_released) == (0, number + 1)
    assert crew.num_lost == 1, "being absent is no loss"
    assert "gone" not in {thread.name for thread in threading.enumerate()}


def test_progress_says_how_many_workers_are_open_and_were_lost(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A bar over three calls of a chunk each: one loses a worker, the next goes on without it, then it is back."""
    gone = HomelessWorker("gone")
    pool = WorkerPool(crew := Crew([gone, patient(gone)]))
    states: list[str] = []
    seconds = iter(range(0, 1000, 60))
    token = shown.set(True)
    with progress_bar("Scoring", 9, lambda: 0, False, now=lambda: next(seconds), at_work=lambda: pool.at_work) as bar:
        assert pool.at_work == "2 of 2 workers"
        for gone.has_room in (False, False, True):
            for _, results in crew.run(OWN, [requests_of(3)]):
                bar(len(results))
                states.append(pool.at_work)
    shown.reset(token)
    assert states == ["1 of 2 workers, 1 lost", "1 of 2 workers, 1 lost", "2 of 2 workers, 1 lost"]
    assert capsys.readouterr().err.splitlines() == [
        "olive-ext: Scoring: 6 of 9 requests, 0 tokens/s, 1 of 2 workers, 1 lost, 01:00 left",
        "olive-ext: Scoring: 9 of 9 requests, 0 tokens/s, 2 of 2 workers, 1 lost, 00:00 left",
    ]
    assert any(line.startswith("gone ") for line in caplog.messages)


def test_pool_answers_requests_in_their_order_and_streams() -> None:
    pool = WorkerPool(Crew([FakeWorker("one"), FakeWorker("two")]))
    requests = requests_of(50)
    found = dict(pool.run_slices([[*enumerate(requests)]]))
    for number, request in enumerate(requests):
        assert_equal(found[number], oracle(request))
    items = [(str(number), request) for number, request in enumerate(requests)]
    streamed = dict(pool.run_continuous(iter([*items[:7], None, *items[7:]])))
    assert streamed == {str(number): result for number, result in found.items()}
    assert pool.describe()["workers"] == {"names": ["one", "two"], "lost": 0}
    pool.close()


def seconds_until_hung(limit_s: int, num_steps: Iterable[int | None]) -> int | None:
    """By a watchdog that looks every second, while the worker reports `num_steps`; None where it is left alone."""
    dog = Watchdog(limit_s)
    dog.begin(0.0)
    return next((second for second, number in enumerate(num_steps, 1) if dog.is_hung(second, number)), None)


def test_a_worker_hangs_after_the_limit_without_a_step() -> None:
    assert seconds_until_hung(7, [0] * 90) == 9, "the first report counts as a step"
    assert seconds_until_hung(7, [None] * 90) == 8
    assert seconds_until_hung(7, range(90)) is None
    assert seconds_until_hung(7, [*range(20), *[20] * 90]) == 29
    assert seconds_until_hung(0, [0] * 9000) is None


def test_time_in_which_nobody_looked_is_not_the_workers() -> None:
    """Ctrl-Z, a machine that slept: both stood still."""
    dog = Watchdog(60)
    dog.begin(0.0)
    assert not any(dog.is_hung(3600.0 * number, 3) for number in range(1, 9))


def chunk(size: int, length: int = 4) -> list[Request]:
    return [Request(tuple(range(number, number + length)), 1) for number in range(size)]


def taken(feed: ChunkFeed) -> Chunk:
    found = feed.take()
    assert found is not None
    return found


def test_chunks_come_in_order_while_more_follow_and_then_the_largest_first() -> None:
    feed = ChunkFeed(map(chunk, [7, 5, 3, 9, 4, 6]), 1)
    assert [feed.read() is not None for _ in range(AHEAD + 1)] == [True] * AHEAD + [False]
    first, second = taken(feed), taken(feed)
    assert (first.number, second.number) == (0, 1)
    assert [feed.read() is not None for _ in range(3)] == [True, True, False]
    assert taken(feed).number == 2
    assert not feed.read()  # there are no more
    first.lose("is gone")
    feed.put(first)
    assert [taken(feed).number for _ in range(4)] == [3, 5, 4, 0]
    feed.end()
    assert feed.take() is None


def test_no_more_tokens_are_held_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "HELD_TOKENS", 30_000)
    long = 30_000 // 3 - 200
    read: list[int] = []

    def chunks() -> Iterator[Sequence[Request]]:
        for number in range(8):
            read.append(number)
            yield [Request(range(long), 1)]  # as long as a tuple, without its memory

    feed = ChunkFeed(chunks(), 100)
    while feed.read():
        pass
    assert read == [0, 1, 2, 3]  # the fourth goes beyond the bound
    assert [feed.complete(taken(feed)) for _ in range(2)] == [(0, []), (1, [])]
    while feed.read():
        pass
    assert read == [0, 1, 2, 3, 4, 5]


@given(sizes=st.lists(st.integers(1, 7), max_size=20), num_workers=st.integers(1, 3), data=st.data())
def test_every_chunk_is_complete_once_however_often_a_worker_is_lost(
    sizes: list[int], num_workers: int, data: st.DataObject
) -> None:
    feed, found = ChunkFeed(map(chunk, sizes), num_workers), {}
    while feed.has_work:
        if feed.read():
            continue
        while not feed.outcomes.empty():
            number, results = feed.complete(feed.outcomes.get())
            assert number not in found
            found[number] = len(results)
        if feed.has_work:
            part = taken(feed)
            if data.draw(st.booleans()):
                part.lose("is gone")
            else:
                part.results += [Lost("")] * len(part.next)
            feed.put(part)
    assert found == dict(enumerate(sizes))


def test_a_worker_that_computes_with_another_release_is_refused_and_left_out_where_it_comes_back_so() -> None:
    """As nodes of a cluster may: the model's files are the same, and the answers would be of two runtimes."""
    other = {"onnxruntime": "1.27.0"}
    with refused(RunError, RunError.code, holds="two has onnxruntime 1.27.0, others olive-ext"):
        Crew([FakeWorker("one"), FakeWorker("two", opening=lambda number: other)])
    moved = FakeWorker("one", losses=[1], opening=lambda number: other if number > 1 else None)
    found = run(Crew([moved, FakeWorker("good")], [0.0] * len(PAUSES_S)), [requests_of(3)] * 4)
    assert (moved.num_openings, moved.num_calls, [*map(len, found.values())]) == (1 + len(PAUSES_S), 1, [3] * 4)


def test_facts_of_several_workers_are_of_one_whose_trial_failed() -> None:
    class Failed(FakeWorker):
        def run(self, which: str, requests: Sequence[Request]) -> Reply:
            return replace(super().run(which, requests), execution={"parts_failure": "token 9, fed alone"})

    crew = Crew([FakeWorker("one"), Failed("two")])
    run(crew, [requests_of(3)] * 29)
    assert WorkerPool(crew).describe()["parts_failure"] == "token 9, fed alone"

from __future__ import annotations

from docs.benchmarks.speed.job import PROBE, BenchRun, Schedule, best

BACKENDS = ("olive-ext", "hf", "onnxruntime")
SECONDS = {("hf", 1): 5.0, ("hf", 4): 2.0, ("hf", 8): 3.0}


def measured(backend: str, size: int | None, number: int) -> BenchRun:
    return BenchRun(backend, size, number, seconds={"loglikelihood": SECONDS.get((backend, size or 0), 1.0)})


def order(schedule: Schedule, launch=measured) -> list[tuple[str, int | None, int]]:
    return [(run.backend, run.batch_size, run.round) for run in schedule.run(launch)]


def test_backends_take_turns_and_later_rounds_take_the_fastest_batch_size() -> None:
    assert order(Schedule(BACKENDS, (1, 4, 8), 2)) == [
        ("olive-ext", None, 0),
        ("hf", 1, 0),
        ("hf", 4, 0),
        ("hf", 8, 0),
        ("onnxruntime", None, 0),
        ("olive-ext", None, 1),
        ("hf", 4, 1),
        ("onnxruntime", None, 1),
    ]


def test_batch_sizes_are_probed_first_where_that_is_asked_for() -> None:
    found = order(Schedule(BACKENDS, (1, 4), 1, probes=True))
    assert found == [
        ("hf", 1, PROBE),
        ("hf", 4, PROBE),
        ("olive-ext", None, 0),
        ("hf", 4, 0),
        ("onnxruntime", None, 0),
    ]


def test_peer_that_failed_its_probes_is_not_run() -> None:
    def launch(backend: str, size: int | None, number: int) -> BenchRun:
        return BenchRun(backend, size, number, error="no") if backend == "hf" else measured(backend, size, number)

    found = order(Schedule(BACKENDS, (1, 4), 2, probes=True), launch)
    assert [number for name, _, number in found if name == "hf"] == [PROBE, PROBE]


def test_slow_peer_runs_once() -> None:
    found = order(Schedule(BACKENDS, (1,), 3, once=["onnxruntime"]))
    assert [name for name, _, _ in found].count("onnxruntime") == 1
    assert [name for name, _, _ in found].count("hf") == 3


def test_peer_that_failed_is_not_asked_again_and_the_others_go_on() -> None:
    def launch(backend: str, size: int | None, number: int) -> BenchRun:
        fails = backend == "onnxruntime" or (backend == "hf" and number == 1)
        return BenchRun(backend, size, number, error="no") if fails else measured(backend, size, number)

    found = order(Schedule(BACKENDS, (4,), 3), launch)
    assert [round_number for name, _, round_number in found if name == "hf"] == [0, 1]
    assert [round_number for name, _, round_number in found if name == "onnxruntime"] == [0]
    assert [round_number for name, _, round_number in found if name == "olive-ext"] == [0, 1, 2]


def test_batch_size_that_fails_is_not_the_best() -> None:
    failed = BenchRun("hf", 8, 0, error="out of memory")
    assert best([failed, measured("hf", 1, 0), measured("hf", 4, 0)]) == measured("hf", 4, 0)
    assert best([failed]) is None

"""Ray's workers: the same bytes for any number of them, and nothing lost with a worker, a node or the driver.

Needs the extra `[ray]`; the driver is a process of its own, so that Ray's threads end with it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import olive_ext
from olive_ext.errors import ConfigError
from olive_ext.session import Session
from olive_ext.session.requests import GenerationRequest, ScoringRequest
from tests.exports import genai_export
from tests.exports.media import plain_encoder_export
from tests.exports.quickstart import TASKS, exported, quantized
from tests.families.pictures import picture
from tests.model.tiny import olive_packed, packed
from tests.strangers import environment, put_modules

pytestmark = pytest.mark.other_env
ray = pytest.importorskip("ray")

PAIRS = [
    ([20 + number % 9] * 30 + [7 + number % 11, *range(10, 40 + number % 90)], [5 + number % 50, 6])
    for number in range(400)
]
PROMPTS = [GenerationRequest(context, 8, stop="e", temperature=0.5, seed=3) for context, _ in PAIRS[:150]]


def open_tiny(**given: Any) -> Session:
    return olive_ext.open(genai_export("llama"), engine={"num_threads": 1, "num_slots": 4}, deterministic=True, **given)


def answers(session: Session) -> tuple[list[Any], list[Any]]:
    return session.loglikelihood(PAIRS), session.generate(PROMPTS)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[Any]]:
    """The answers of an engine in this process."""
    with open_tiny() as session:
        session.keep_answers(tmp_path_factory.mktemp("journal") / "answers")
        return answers(session)


@pytest.fixture(scope="module", autouse=True)
def local() -> Iterator[None]:
    """One Ray for all tests on this machine: starting it takes seconds."""
    ray.init(
        address="local",
        num_cpus=8,
        num_gpus=2,
        object_store_memory=128 << 20,
        include_dashboard=False,
        log_to_driver=False,
    )
    yield
    ray.shutdown()


@pytest.mark.parametrize("count", [1, 5])  # the other tests have two
def test_bytes_are_the_same_for_any_number_of_workers(count: int, expected: Any) -> None:
    with open_tiny(workers=count) as session:
        assert answers(session) == expected
        counters = session.counters
        assert counters.tokens_fed - counters.tokens_generated <= 1.05 * counters.tokens_distinct
        assert len(session.describe_execution()["workers"]["names"]) == count


def test_pictures_travel_to_workers_and_give_the_same_bytes() -> None:
    """As pictures, as the bytes of a file: each is prepared where it is encoded."""
    drawn = [picture(seed, 40, 40) for seed in range(6)]
    scored = [
        ScoringRequest(f"{word} sees the <image> and", target, images=[one])
        for one in drawn
        for word in ("Ann", "Bob")
        for target in (" blue stone", " of the garden")
    ]
    asked = [GenerationRequest("Ann sees the <image> and", 6, images=[one]) for one in drawn]
    found = []
    for given in ({}, {"workers": 2}):
        package, engine = plain_encoder_export("f32", "default"), {"num_threads": 1, "num_slots": 4}
        with olive_ext.open(package, engine=engine, deterministic=True, **given) as session:
            found.append((session.loglikelihood(scored), session.generate(asked)))
            execution = session.describe_execution()
            assert len(drawn) <= execution["images_encoded"] <= 2 * len(drawn)  # each worker has its own
    assert found[0] == found[1]
    assert len(execution["workers"]["names"]) == 2


@pytest.mark.parametrize("is_olives", [True, False])
def test_variant_of_a_package_is_the_same_on_every_worker(is_olives: bool, tmp_path: Path) -> None:
    """On Ray and in a process of this machine, to the bit what its folder gives."""
    one, two = (shutil.copytree(folder, tmp_path / folder.name) for folder in (quantized(4, 32), exported()))
    package = (
        olive_packed(tmp_path, one, two) if is_olives else packed(tmp_path / "p", **{one.name: one, two.name: two})
    )
    found = []
    for path, given in ((two, {}), (package, {"workers": 2}), (package, {"isolation": "process"})):
        which = {"variant": two.name} if path == package else {}
        engine = {"num_threads": 1, "num_slots": 4}
        with olive_ext.open(path, engine=engine, deterministic=True, **which, **given) as session:
            found.append((session.loglikelihood(PAIRS[:80]), session.generate(PROMPTS[:20])))
    assert found[0] == found[1] == found[2]


def test_budgets_of_reasoning_reach_workers_and_give_the_same_bytes() -> None:
    """As a token id, and as a text that each worker looks for by itself."""
    asked = [
        GenerationRequest(
            context, 24, think_end_token=end, thinking_budget=number % 9, temperature=number % 2, seed=number
        )
        for number, (context, _) in enumerate(PAIRS[:60])
        for end in (5, "</think>", "e")
    ]
    found = []
    for given in ({}, {"workers": 2}):
        with open_tiny(**given) as session:
            found.append(session.generate(asked))
    assert found[0] == found[1]
    forced = [one.reasoning.is_forced for one in found[0] if one.reasoning is not None]
    assert len(asked) / 3 < sum(forced) < len(asked)


def actors() -> list[psutil.Process]:
    """The processes of our actors."""
    found = [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"]]
    return [process for process in found if "ray::ServedModel" in process.info["cmdline"][0]]


def test_killed_workers_cost_their_chunks_only(expected: Any) -> None:
    others = set(actors())
    with open_tiny(workers=2) as session:
        ours = sorted(set(actors()) - others, key=lambda process: process.pid)
        ours[0].suspend()  # else all answers may be there before it is killed
        timer = threading.Timer(0.5, ours[0].kill)
        timer.start()
        assert answers(session) == expected
        timer.join()
        assert session.describe_execution()["workers"]["lost"] == 1


def test_an_address_without_a_cluster_is_named() -> None:
    program = "import olive_ext, sys; olive_ext.open(sys.argv[1], workers={'count': 2, 'address': '127.0.0.1:1'})"
    command = [sys.executable, "-c", program, str(genai_export("llama"))]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "ConfigError: 'workers.address' = '127.0.0.1:1': " in found.stderr


def test_workers_without_room_are_refused_in_time() -> None:
    with pytest.raises(Exception, match=r"worker \d .* 3 s: ") as caught:
        open_tiny(workers={"count": 1, "resources": {"moon": 1}, "start_timeout": 3})
    assert not isinstance(caught.value, ConfigError)


def test_each_worker_takes_a_gpu_of_its_own(expected: Any) -> None:
    """docs/gpus.md: Ray counts GPUs that are only claimed."""
    with open_tiny(workers={"count": 2, "resources": {"GPU": 1}}) as session:
        assert answers(session) == expected
        assert ray.available_resources().get("GPU", 0) == 0
    with pytest.raises(Exception, match=r"worker \d .* 3 s: "):
        open_tiny(workers={"count": 3, "resources": {"GPU": 1}, "start_timeout": 3})


def test_actors_import_nothing_from_the_drivers_working_directory(tmp_path: Path) -> None:
    """Ray puts that on their path; relative paths of models still begin there."""
    model = shutil.copytree(genai_export("llama"), tmp_path / "model")
    put_modules(model)
    (tmp_path / "driver.py").write_text(
        "import olive_ext\n"
        "with olive_ext.open('.', workers=2) as session:\n"
        "    print(session.loglikelihood([([5, 6, 7], [8])])[0].logprob < 0)\n"
    )
    ran = tmp_path / "ran"
    given = {**environment(ran, PYTHONPATH=os.pathsep.join(sys.path)), "RAY_ADDRESS": ""}
    found = subprocess.run(
        [sys.executable, tmp_path / "driver.py"], cwd=model, env=given, capture_output=True, text=True
    )
    assert found.stdout == "True\n", found.stderr
    assert not ran.exists(), ran.read_text()


DRIVER = """
import json, sys
from tests.plugins.cluster.test_ray_worker import answers, open_tiny
given = json.loads(sys.argv[1])
with open_tiny(**given) as session:
    session.keep_answers(sys.argv[2])
    print("open", flush=True)
    found = answers(session)
    print("done", session.journal.num_known, hash(tuple(found[0])), flush=True)
"""


def wait_for_answers(driver: subprocess.Popen[str], folder: Path) -> None:
    """Until the driver's journal in `folder` has got some."""
    assert driver.stdout.readline() == "open\n"
    (journal,) = folder.glob("answers_*.jsonl")
    size = journal.stat().st_size
    while journal.stat().st_size == size:
        time.sleep(0.01)


def test_a_killed_driver_resumes_and_its_workers_end(expected: Any, tmp_path: Path) -> None:
    before = {process.pid for process in actors()}
    given = json.dumps({"workers": 2})
    command = [sys.executable, "-c", DRIVER, given, str(tmp_path / "answers")]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "RAY_ADDRESS": ""})
    wait_for_answers(driver, tmp_path)
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    deadline = time.monotonic() + 60
    while {process.pid for process in actors()} - before and time.monotonic() < deadline:
        time.sleep(0.5)
    assert {process.pid for process in actors()} <= before
    with open_tiny(workers=2) as session:
        session.keep_answers(tmp_path / "answers")
        assert answers(session) == expected
        assert session.journal.num_known > 0
        assert session.counters.requests <= len(set(map(repr, PAIRS))) + len(PROMPTS) - session.journal.num_known


def test_sigterm_ends_the_command_with_one_line_and_its_workers_and_nothing_that_was_answered(tmp_path: Path) -> None:
    """At a moment of its run, and as Ray starts, which has its own way to end a program, or aborts."""
    command = [sys.executable, "-c", "import sys; from olive_ext.cli import main; sys.exit(main())", "evaluate"]
    command += [str(exported()), "--tasks", "quickstart_letters", "--include-path", str(TASKS), "--workers", "2"]
    command += ["--output", str(tmp_path)]
    early = "import os, signal, threading, ray; old = ray.init\ndef init(*a, **k):\n    threading.Timer(0.3, os.kill, "
    early += "(os.getpid(), signal.SIGTERM)).start(); return old(*a, **k)\nray.init = init\n"
    late = "import os, signal; from ray._private import worker; old = worker.connect\ndef connect(*a, **k):\n    "
    late += "old(*a, **k); os.kill(os.getpid(), signal.SIGTERM)\nworker.connect = connect\n"
    for script, is_running in (("", True), (early, False), (late, False)):
        before = {process.pid for process in actors()}
        environment = {**os.environ, "RAY_ADDRESS": ""}
        given = [command[0], "-c", script + command[2], *command[3:]]
        driver = subprocess.Popen(given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        while is_running and not any(file.stat().st_size > 2000 for file in tmp_path.rglob("*.jsonl")):
            assert driver.poll() is None
            time.sleep(0.05)
        if is_running:
            driver.send_signal(signal.SIGTERM)
        _, lines = driver.communicate(timeout=120)
        assert lines.splitlines()[-1].startswith("olive-ext: terminated: ")
        assert driver.returncode == 143
        assert "Traceback" not in lines
        deadline = time.monotonic() + 60
        while {process.pid for process in actors()} - before and time.monotonic() < deadline:
            time.sleep(0.5)
        assert {process.pid for process in actors()} <= before
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert "damaged" not in done.stderr
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report["model"]["journal"]["answers_known"] > 0


def told(session: Session, found: tuple[list[Any], list[Any]]) -> str:
    """How many workers were lost, and the answers, as `lost_in` reads them."""
    scores, texts = found
    lost = session.describe_execution()["workers"]["lost"]
    return json.dumps([lost, [output.logprob for output in scores], [output.text for output in texts]])


def lost_in(program: str, expected: Any, tolerance: float = 0.0) -> int:
    """How many workers were lost in a process that runs `program` and prints what is `told`; the answers are right, to
    `tolerance` nats."""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=400, check=False)
    assert found.returncode == 0, found.stderr[-3000:]
    lost, scores, texts = json.loads(found.stdout.splitlines()[-1])
    assert scores == pytest.approx([output.logprob for output in expected[0]], rel=0, abs=tolerance)
    assert texts == [output.text for output in expected[1]]
    return int(lost)


def test_a_node_that_leaves_costs_its_chunks_only(expected: Any) -> None:
    """A cluster of two raylets on this machine."""
    program = """
import time
from concurrent.futures import ThreadPoolExecutor
from ray.cluster_utils import Cluster
from tests.plugins.cluster.test_ray_worker import answers, open_tiny, told
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
second = cluster.add_node(num_cpus=1)
with open_tiny(workers={"count": 2, "address": cluster.address}) as session, ThreadPoolExecutor() as pool:
    found = pool.submit(lambda: [answers(session) for _ in range(8)])  # once takes 0.3 s on a quiet machine
    time.sleep(0.3)
    cluster.remove_node(second)
    time.sleep(2)
    cluster.add_node(num_cpus=1)  # Ray wants the main thread
    print(told(session, found.result()[-1]))
"""
    assert lost_in(program, expected) >= 1


def test_workers_that_ray_ends_for_memory_cost_their_chunks_only(expected: Any) -> None:
    """Ray's memory monitor, which is told that this machine has three gigabytes left, while the driver takes more.
    It may end both workers with one chunk, which then runs in halves, and rounds otherwise."""
    if psutil.virtual_memory().available < 8 << 30:
        pytest.skip("takes four gigabytes of memory for a moment")
    program = """
import os, time
import psutil
from concurrent.futures import ThreadPoolExecutor
from tests.plugins.cluster.test_ray_worker import actors, answers, open_tiny, told
memory = psutil.virtual_memory()
least = memory.available - (3 << 30)
os.environ["RAY_memory_usage_threshold"] = str(1 - least / memory.total)
os.environ["RAY_memory_monitor_refresh_ms"] = "100"
others = set(actors())
def until_lost(session):
    while not session.describe_execution()["workers"]["lost"]:
        found = answers(session)
    return found
with open_tiny(workers=2) as session, ThreadPoolExecutor() as pool:
    ours, held = set(actors()) - others, []
    found, deadline = pool.submit(until_lost, session), time.monotonic() + 120
    while ours <= set(actors()) and time.monotonic() < deadline:
        held += [b"x" * (64 << 20)] if psutil.virtual_memory().available > least - (2 << 30) else []
    held.clear()
    print(told(session, found.result(60)))
"""
    assert lost_in(program, expected, tolerance=1e-5) >= 1


CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""

MANY = [
    ([20 + number % 9] * 30 + [3 + number % 50, 3 + number // 50 % 50, 3 + number // 2500, *range(10, 90)], [5, 6])
    for number in range(5_000)
]

LONG_DRIVER = """
import json, sys
from olive_ext.errors import RunError
from olive_ext.plugins.cluster import ray_worker
from tests.plugins.cluster.test_ray_worker import MANY, open_tiny
assert {"_LOOK_S", "BEAT_S"} <= vars(ray_worker).keys()
ray_worker._LOOK_S = ray_worker.BEAT_S = 0.05
with open_tiny(workers={"count": 2, "address": sys.argv[1]}) as session:
    session.keep_answers(sys.argv[2])
    print("open", flush=True)
    try:
        session.loglikelihood(MANY)
    except RunError as error:
        sys.exit(str(error))
"""


@pytest.fixture
def cluster() -> Iterator[tuple[str, psutil.Process]]:
    """Another cluster on this machine: its address, and its head's process."""
    command = [sys.executable, "-c", CLUSTER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as starter:
        address = starter.stdout.readline().strip()
        children = psutil.Process(starter.pid).children(recursive=True)
        (head,) = (child for child in children if child.name() == "gcs_server")
        yield address, head
        starter.communicate("", timeout=60)


def test_without_the_head_a_run_ends_by_name_and_goes_on_elsewhere(
    cluster: tuple[str, psutil.Process], tmp_path: Path
) -> None:
    """Looks are a twentieth of a second apart; by default the driver has ended within a minute."""
    address, head = cluster
    command = [sys.executable, "-c", LONG_DRIVER, address, str(tmp_path / "answers")]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_answers(driver, tmp_path)
    head.kill()
    _, told = driver.communicate(timeout=60)
    assert driver.returncode == 1
    assert address in told.splitlines()[-1]
    with open_tiny(workers=2) as session:
        session.keep_answers(tmp_path / "answers")
        found = session.loglikelihood(MANY)
        num_known = session.journal.num_known
        assert 0 < num_known < len(MANY)
        assert session.counters.requests == len(MANY) - num_known
    with open_tiny() as session:
        session.keep_answers(tmp_path / "others")
        assert found == session.loglikelihood(MANY)


def test_two_workers_are_timed_against_one_of_two_threads_and_of_one() -> None:
    """The benchmark ends with its table; what it times is none of a test's business."""
    forms = ["--forms", "2x1,1x2,1x1", "--limit", "20", "--rounds", "1"]
    tasks = ["--tasks", "quickstart_letters", "--include-path", str(TASKS)]
    command = [sys.executable, "-m", "docs.benchmarks", "worker_cost", str(exported()), *tasks, *forms]
    found = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert found.returncode == 0, found.stderr[-3000:]
    assert re.search(r"\| 1x2 \| [\d.]+ \| [\d.]+ \| [\d.]+ \([\d.]+ to [\d.]+\) \|", found.stdout)

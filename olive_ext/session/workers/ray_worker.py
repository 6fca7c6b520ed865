"""A worker as an actor of Ray, on this machine or a cluster: the only door to Ray. `RayWorker` is in the driver.

Ray places the actors and gives them their GPUs; what is lost is run again by the crew, not by Ray, whose own retries
know no chunks.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from olive_ext.config.workers import WorkerSettings
from olive_ext.engine.requests import Pulse, Request
from olive_ext.errors import ConfigError, RunError, first_line, one_line
from olive_ext.python_processes import import_path
from olive_ext.session.workers.served_model import Job, Reply, Served, ServedModel, read_error, told_error
from olive_ext.session.workers.worker import Watchdog, Worker, WorkerLostError

_BEAT_S = 1.0
_STORE_BYTES = 128 << 20
"""Shared memory of a Ray that is started here: requests and results are small."""

_CONNECT_S = 10
_LOOK_S = 5.0
_MOST_MISSED = 4
"""Looks in a row, `_LOOK_S` apart, that miss the head of the cluster before it is gone: 20 s at most where its port
refuses. After 60 s Ray ends the whole process, without a word."""

_GPU_PROVIDERS = ("cuda", "tensorrt", "nvtensorrtrtx", "rocm", "migraphx")


def ray_workers(job: Job, wanted: WorkerSettings, watchdogs: Sequence[Watchdog]) -> list[Worker]:
    """A worker that opens `job` for each of `watchdogs`. Raises `ConfigError` where Ray is not installed, or not at the
    address."""
    try:
        import ray  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise ConfigError(f"'workers' needs Ray (pip install 'olive-ext[ray]'): {one_line(error)}") from error
    cluster = _Cluster(ray, wanted, len(watchdogs))
    return [RayWorker(job, cluster, f"worker {number}", watchdog) for number, watchdog in enumerate(watchdogs)]


class _Cluster:
    """Ray, joined or started here; one that was started here ends with its last worker."""

    def __init__(self, ray: Any, wanted: WorkerSettings, count: int) -> None:
        self.ray = ray
        self.wanted = wanted
        self._count = count
        self._lock = threading.Lock()
        self._is_ours = False
        self._num_actors = 0
        self._head = ""
        self._next_look = 0.0
        self._num_missed = 0
        self._join()

    def actor(self, job: Job) -> Any:
        """A new actor. Ray starts it when there is room."""
        with self._lock:
            self._join()
            self._num_actors += 1
        resources = dict(self.wanted.resources)
        options: dict[str, Any] = {
            "num_cpus": resources.pop("CPU", 1 if self.wanted.address is None else _threads(job)),
            "num_gpus": resources.pop("GPU", _num_gpus(job)),
            "resources": resources,
            "max_concurrency": 2,  # the model's steps are counted while a chunk runs
            "max_restarts": 0,
            "scheduling_strategy": "SPREAD",
        }
        if "memory" in resources:
            options["memory"] = resources.pop("memory")
        return self.ray.remote(_Actor).options(**options).remote(job)

    def check(self) -> None:
        """Raises `RunError` where the head is gone; to be called often. The workers are of no use then: none could be
        replaced, and Ray would end this process."""
        with self._lock:
            now = time.monotonic()
            if now >= self._next_look:
                self._next_look = now + _LOOK_S
                try:
                    _connect(self._head)
                    self._num_missed = 0
                except OSError:
                    self._num_missed += 1
        if self._num_missed >= _MOST_MISSED:
            raise RunError(
                f"the head of the Ray cluster at {self._head} is gone: what was answered is kept where there is a "
                "journal; run again on another cluster"
            )

    def release(self, actor: Any) -> None:
        """Ends the actor, and a Ray that has none left where it was started here. Without its head nothing can be
        ended: Ray's processes end by themselves."""
        if self._num_missed >= _MOST_MISSED:
            return
        with suppress(Exception):  # the cluster may be gone
            self.ray.kill(actor)
        with self._lock:
            self._num_actors -= 1
            if self._is_ours and not self._num_actors:
                self._is_ours = False
                self.ray.shutdown()

    def _join(self) -> None:
        """Joins the cluster at the address; without one, a Ray that the program has joined, or a new one here."""
        if self.ray.is_initialized():
            self._note_head()
            return
        address, environment = self.wanted.address, dict(self.wanted.runtime_env)
        given: dict[str, Any] = {}
        if address is None:
            given |= {"num_cpus": max(self._count, os.cpu_count() or 1), "object_store_memory": _STORE_BYTES}
            environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(import_path())}, **environment}
            given["include_dashboard"] = False
        if "://" in (address or ""):
            given["runtime_env"] = environment
        else:
            job = given["job_config"] = self.ray.job_config.JobConfig(runtime_env=environment)
            job._runtime_env_has_working_dir = lambda: True  # else the driver's comes first on the path of the actors
        try:
            _connect(address)
            with _own_sigterm():
                self.ray.init(address=address or "local", log_to_driver=False, logging_level="error", **given)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            where = f"'workers.address' = '{address}': no Ray cluster can be joined" if address else "Ray cannot start"
            raise ConfigError(f"{where}: {first_line(error)}") from error
        self._is_ours = True
        self._note_head()

    def _note_head(self) -> None:
        """Where the head listens; by a client's address ("ray://") it is not known, nor looked at."""
        address = self.wanted.address or ""
        self._head = address if "://" in address else self.ray.get_runtime_context().gcs_address


class RayWorker:
    """An actor with the model of `job`."""

    def __init__(self, job: Job, cluster: _Cluster, name: str, watchdog: Watchdog) -> None:
        self.name = name
        self._job = job
        self._cluster = cluster
        self._watchdog = watchdog
        self._actor: Any = None

    def open(self) -> Served:
        self.stop()
        self._actor = self._cluster.actor(self._job)
        timeout = self._cluster.wanted.start_timeout
        try:
            served: Served = self._answer(self._remote("facts"), timeout)
        except TimeoutError:
            self.stop()
            raise RunError(
                f"{self.name} did not come up within {timeout} s: the cluster has {self._room()} ('workers.resources', "
                "'workers.start_timeout')"
            ) from None
        return served

    def run(self, which: str, requests: Sequence[Request]) -> Reply:
        self._watchdog.begin(time.monotonic())
        reference = self._remote("run", which, list(requests))
        while not self._cluster.ray.wait([reference], timeout=_BEAT_S)[0]:
            self._cluster.check()
            if self._watchdog.is_hung(time.monotonic(), self._pulse()):
                self.stop()
                raise WorkerLostError("ended because it hung")
        reply: Reply = self._answer(reference)
        return reply

    def call(self, which: str, name: str) -> Any:
        return self._answer(self._remote("call", which, name))

    def stop(self) -> None:
        actor, self._actor = self._actor, None
        if actor is not None:
            self._cluster.release(actor)

    def _remote(self, name: str, *arguments: Any) -> Any:
        actor = self._actor
        if actor is None:
            raise WorkerLostError("not running")
        return getattr(actor, name).remote(*arguments)

    def _pulse(self) -> Pulse | None:
        with suppress(TimeoutError):
            found: Pulse = self._answer(self._remote("pulse"), _BEAT_S)
            return found
        return None

    def _answer(self, reference: Any, timeout: float | None = None) -> Any:
        """What the actor answers, or raises. Raises `TimeoutError`, and `WorkerLostError` where the actor is gone."""
        try:
            error, content = self._cluster.ray.get(reference, timeout=timeout)
        except TimeoutError:
            raise
        except self._cluster.ray.exceptions.RayError as problem:
            self.stop()
            raise WorkerLostError(f"was lost ({_short(problem)})") from problem
        if error is not None:
            raise read_error(error)
        return content

    def _room(self) -> dict[str, float]:
        room = self._cluster.ray.available_resources()
        return {name: room[name] for name in ("CPU", "GPU", *self._cluster.wanted.resources) if name in room}


class _Actor:
    """The actor: a `ServedModel` whose errors are answers, so that Ray wraps none of them."""

    def __init__(self, job: Job) -> None:
        self._served: ServedModel | None = None
        self._error: tuple[str, str] | None = None
        try:
            self._served = ServedModel(job)
        except Exception as error:  # noqa: BLE001 - raised in the driver, which asks for the facts
            self._error = told_error(error)

    def facts(self) -> Any:
        return (self._error, None) if self._served is None else (None, self._served.facts)

    def pulse(self) -> Any:
        return None, None if self._served is None else self._served.pulse

    def run(self, *arguments: Any) -> Any:
        return self._answer("run", *arguments)

    def call(self, *arguments: Any) -> Any:
        return self._answer("call", *arguments)

    def _answer(self, name: str, *arguments: Any) -> Any:
        try:
            return None, getattr(self._served, name)(*arguments)
        except Exception as error:  # noqa: BLE001 - raised in the driver, whatever it is
            return told_error(error), None


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keeps what the program does at SIGTERM: from its first line on Ray has it exit with a status of its own, and
    without a word."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as end:
        signal.signal(signal.SIGTERM, before)
        if end.code == signal.SIGTERM:
            signal.raise_signal(signal.SIGTERM)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _connect(address: str | None) -> None:
    """Raises `OSError` where nobody listens at an address of the form host:port, for which Ray itself waits long."""
    host, _, port = (address or "").rpartition(":")
    if host and port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()


def _threads(job: Job) -> int:
    number = job.settings.get("engine", {}).get("num_threads", 1)
    return number if isinstance(number, int) else 1


def _num_gpus(job: Job) -> int:
    """One for a model on a provider of GPUs; for a Hugging Face model where its device is one."""
    named = str([job.settings.get("execution_provider"), job.handed_over, job.settings.get("device")]).lower()
    return int(any(name in named for name in _GPU_PROVIDERS))


def _short(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__

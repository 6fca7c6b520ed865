"""A worker as an actor of Ray, on this machine or a cluster: the only module that uses Ray. `RayWorker` is in the
driver.

Ray places the actors and gives them their GPUs. The crew runs lost chunks again, as those of a process worker: an
`ActorPool` of `ray.util` retries nothing, and keeps a dead actor.
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

from typing_extensions import override

from olive_ext.config.model import WorkerSettings
from olive_ext.engine.requests import Request
from olive_ext.errors import ConfigError, RunError, first_line, one_line
from olive_ext.python_processes import BEAT_S, import_path
from olive_ext.session.workers.worker import (
    Reply,
    Served,
    ServedModel,
    Watchdog,
    Worker,
    WorkerJob,
    WorkerLostError,
    content_of,
    to_send,
)

_STORE_BYTES = 128 << 20
"""Shared memory of a Ray that is started here: requests and results are small."""

_CONNECT_S = 10
_LOOK_S = 5.0
_MOST_MISSED = 4
"""After so many failed looks in a row, `_LOOK_S` apart, the head of the cluster counts as gone: 20 s at most where its
port refuses. After 60 s Ray ends the whole process silently."""

_GPU_PROVIDERS = ("cuda", "tensorrt", "nvtensorrtrtx", "rocm", "migraphx")


def ray_workers(job: WorkerJob, wanted: WorkerSettings, watchdogs: Sequence[Watchdog]) -> list[Worker]:
    """A worker for each of `watchdogs`; without any Ray is not started. Raises `ConfigError` where Ray is not
    installed, or not at the address."""
    try:
        import ray  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        problem = f"needs Ray: install the extra 'ray' ('.[ray]' in a clone): {one_line(error)}"
        raise ConfigError(problem, "workers", code="needs_package") from error
    if not watchdogs:
        return []
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

    def actor(self, job: WorkerJob) -> Any:
        """A new actor. Ray starts it when there is room."""
        with self._lock:
            self._join()
            self._num_actors += 1
        resources, settings = dict(self.wanted.resources), job.settings
        threads = settings.get("engine", {}).get("num_threads", 1) if self.wanted.address is not None else 1
        # A GPU for a model on a provider of GPUs, for a Hugging Face model where its device is one.
        places = str([settings.get("execution_provider"), settings.get("device")]).lower()
        options: dict[str, Any] = {
            "num_cpus": resources.pop("CPU", threads if isinstance(threads, int) else 1),
            "num_gpus": resources.pop("GPU", int(any(name in places for name in _GPU_PROVIDERS))),
            "resources": resources,
            "max_concurrency": 2,  # the model's steps are counted while a chunk runs
            "max_restarts": 0,
            "scheduling_strategy": "SPREAD",
        }
        if "memory" in resources:
            options["memory"] = resources.pop("memory")
        return self.ray.remote(ServedModel).options(**options).remote()

    def check(self) -> None:
        """Raises `RunError` where the head is gone, before Ray ends this process; to be called often."""
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
            raise RunError(f"the head of the Ray cluster at {self._head} is gone: run again on another cluster")

    def release(self, actor: Any) -> None:
        """Ends the actor, and a Ray started here with its last one; without a head they end by themselves."""
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
        options: dict[str, Any] = {}
        if address is None:
            options |= {"num_cpus": max(self._count, os.cpu_count() or 1), "object_store_memory": _STORE_BYTES}
            environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(import_path())}, **environment}
            options["include_dashboard"] = False
        if "://" in (address or ""):
            options["runtime_env"] = environment
        else:
            job = options["job_config"] = self.ray.job_config.JobConfig(runtime_env=environment)
            job._runtime_env_has_working_dir = lambda: True  # else the driver's comes first on the path of the actors
        try:
            _connect(address)
            with _uninterrupted(self.ray._private.utils):
                self.ray.init(address=address or "local", log_to_driver=False, logging_level="error", **options)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            where = f"'workers.address' = '{address}': no Ray cluster can be joined" if address else "Ray cannot start"
            raise ConfigError(f"{where}: {first_line(error)}") from error
        self._is_ours = True
        self._note_head()

    def _note_head(self) -> None:
        """The address of the head; with a client's address ("ray://") it is not known, and not checked."""
        address = self.wanted.address or ""
        self._head = address if "://" in address else self.ray.get_runtime_context().gcs_address


class RayWorker(Worker):
    """An actor with the model of `job`."""

    def __init__(self, job: WorkerJob, cluster: _Cluster, name: str, watchdog: Watchdog) -> None:
        self.name = name
        self._job = job
        self._cluster = cluster
        self._watchdog = watchdog
        self._actor: Any = None

    @override
    def open(self) -> Served:
        self.stop()
        self._actor = self._cluster.actor(self._job)
        timeout = self._cluster.wanted.start_timeout
        try:
            served: Served = self._result(self._sent("open", self._job), timeout)
        except TimeoutError:
            self.stop()
            free = self._cluster.ray.available_resources()
            room = {name: free[name] for name in ("CPU", "GPU", *self._cluster.wanted.resources) if name in free}
            raise RunError(
                f"{self.name} did not come up within {timeout} s: the cluster has {room} ('workers.resources', "
                "'workers.start_timeout')"
            ) from None
        return served

    @override
    def run(self, which: str, requests: Sequence[Request]) -> Reply:
        self._watchdog.begin(time.monotonic())
        sent = self._sent("run", which, [*map(to_send, requests)])
        while not self._cluster.ray.wait([sent], timeout=BEAT_S)[0]:
            self._cluster.check()
            if self._watchdog.is_hung(time.monotonic(), self._num_steps()):
                self.stop()
                raise WorkerLostError("ended because it hung")
        reply: Reply = self._result(sent)
        return reply

    @override
    def release_memory(self, which: str) -> None:
        self._result(self._sent("release_memory", which))

    @override
    def stop(self) -> None:
        actor, self._actor = self._actor, None
        if actor is not None:
            self._cluster.release(actor)

    def _sent(self, *message: Any) -> Any:
        actor = self._actor
        if actor is None:
            raise WorkerLostError("not running")
        return actor.answer.remote(*message)

    def _num_steps(self) -> int | None:
        with suppress(TimeoutError):
            number: int | None = self._result(self._sent("num_steps"), BEAT_S)
            return number
        return None

    def _result(self, reference: Any, timeout: float | None = None) -> Any:
        """The actor's answer; its error is raised. Raises `TimeoutError`, `WorkerLostError` where it is gone."""
        try:
            answer = self._cluster.ray.get(reference, timeout=timeout)
        except TimeoutError:
            raise
        except self._cluster.ray.exceptions.RayError as problem:
            self.stop()
            raise WorkerLostError(f"was lost ({one_line(problem, 160)})") from problem
        return content_of(answer)


@contextmanager
def _uninterrupted(utils: Any) -> Iterator[None]:
    """SIGINT and SIGTERM wait until Ray (2.60) has started. Meanwhile Ray would lose the SystemExit of a handler that
    it sets by `utils` of `ray._private`; its handler in C++ calls ours, and aborts the process three seconds later.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[int] = []
    watched = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.signal(number, lambda received, _: waiting.append(received)) for number in watched]
    ray_sets, utils.set_sigterm_handler = utils.set_sigterm_handler, lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = ray_sets
        for number, handler in zip(watched, handlers, strict=True):
            signal.signal(number, handler)
        if waiting:
            if hasattr(signal, "alarm"):  # not on Windows
                signal.alarm(0)
            signal.raise_signal(waiting[0])


def _connect(address: str | None) -> None:
    """Raises `OSError` where nobody listens at an address of the form host:port, for which Ray itself waits long."""
    host, _, port = (address or "").rpartition(":")
    if host and port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()

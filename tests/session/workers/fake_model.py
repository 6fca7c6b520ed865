"""A model for workers: the engine over the fake runner, and tokens that make the worker's process crash, hang, fail."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from olive_ext.engine.engine import Engine
from olive_ext.engine.requests import Request
from olive_ext.errors import TaskError
from olive_ext.media.items import ItemLimit
from olive_ext.session.workers.worker import OWN, ModelFacts, Reply, Served, ServedModel, serve_model
from tests.engine.fake_runner import RANGE, FakeRunner

CRASH, HANG, FAIL, SLOW = 101, 102, 103, 104
CHILD = "from tests.session.workers.fake_model import serve_fake; serve_fake()"
SERVED = Served({OWN: ModelFacts(512, 2, ItemLimit(), {})}, None)


class FakeServed(ServedModel):
    """`job` is passed over."""

    def __init__(self) -> None:
        super().__init__()
        self._engine = Engine(FakeRunner(2, RANGE, has_tree_batches=True), 4)

    def open(self, job: Any) -> Served:
        return SERVED

    def num_steps(self) -> int:
        return self._engine.counters.steps

    def run(self, which: str, requests: Sequence[Request]) -> Reply:
        tokens = {token for request in requests for token in request.tokens}
        if CRASH in tokens:
            os.kill(os.getpid(), signal.SIGSEGV)
        if HANG in tokens:
            time.sleep(600)
        if FAIL in tokens:
            raise TaskError("no such luck", "luck", 7, code="contradiction")
        if SLOW in tokens:
            time.sleep(1.5)
        before = asdict(self._engine.counters)
        ((_, results),) = self._engine.run_chunks([list(enumerate(requests))])
        counted = {name: count - before[name] for name, count in asdict(self._engine.counters).items()}
        return Reply(results, counted, {"pid": os.getpid()})

    def release_memory(self, which: str) -> None:
        """There is nothing to free."""

    def close(self) -> None:
        """Ends quietly."""


def serve_fake() -> None:
    """The child of a `ProcessWorker`."""
    serve_model(FakeServed)

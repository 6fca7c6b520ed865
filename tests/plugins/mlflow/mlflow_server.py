"""A real MLflow server with a database, as a program of an environment of its own, since its pins and ours clash:
MLFLOW_SERVER names it."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from olive_ext.plugins.mlflow.mlflow_log import VARIABLE

SERVER = os.environ.get("MLFLOW_SERVER")


class Server:
    """`mlflow server` on sqlite below a folder."""

    def __init__(self, folder: Path) -> None:
        if SERVER is None:
            pytest.skip("MLFLOW_SERVER names no mlflow program")
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            self.port = taken.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self.folder = folder
        self.start()

    def start(self) -> None:
        store = [
            "--backend-store-uri",
            f"sqlite:///{self.folder}/runs.db",
            "--artifacts-destination",
            f"{self.folder}/a",
        ]
        command = [str(SERVER), "server", "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1", *store]
        log = (self.folder / "server.log").open("a")
        clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", VARIABLE)}
        self.process = subprocess.Popen(
            command, cwd=self.folder, stdout=log, stderr=log, env=clean, start_new_session=True
        )
        end = time.monotonic() + 300
        while not self._answers():
            assert self.process.poll() is None, (self.folder / "server.log").read_text()
            if time.monotonic() > end:
                self.kill()
                raise AssertionError("the server did not start")
            time.sleep(0.2)

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.uri}/health", timeout=5).close()
        except OSError:
            return False
        return True

    def kill(self) -> None:
        os.killpg(self.process.pid, 9)
        self.process.wait()


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """A server whose runs lie in `folder`, until the block ends; MLflow's client and our own log there."""
    import mlflow

    server = Server(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, server.uri)
        mlflow.set_tracking_uri(server.uri)
        try:
            yield server
        finally:
            mlflow.set_tracking_uri(None)
            server.kill()


def client() -> Any:
    import mlflow

    return mlflow.MlflowClient()


def children(parent: str) -> list[Any]:
    """The runs of a parent, in the order of their steps."""
    found = client().search_runs(["0"], f"tags.`mlflow.parentRunId` = '{parent}'")
    return sorted(found, key=lambda run: run.info.start_time)

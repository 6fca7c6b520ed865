"""One node of a job on several: the first starts a Ray cluster and runs a command in it, the others join it, and leave
when it ends.

    python -m olive_ext.plugins.jobs.azureml_node COMMAND [ARGUMENT ...]

Azure ML runs the same command line on every node, and says by environment variables which one it is on (those of its
"pytorch" distribution, with one process a node). The nodes have RAY_AUTH_TOKEN in common, and refuse all others.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from olive_ext.python_processes import module_command

JOIN_S = 600
"""Seconds in which the first node must have come up."""

NODE = "olive_ext_node"
"""What Ray counts one of on each node of a job: a worker takes it, so that each node has one, whenever it joins."""

TOKEN = "RAY_AUTH_TOKEN"
"""The variable of the token, which whoever submits the job gives: in job.yml it would lie open."""

_BEAT_S = 2.0
_MISSED = 5
"""Beats in a row that the first node may miss."""

_CLOSING_S = 40
_UP = "Ray runtime started"


def run_node(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """The exit status of this node: on the first the command's; on another 0 once the first has ended. 1 where Ray does
    not come up, or there is no token."""
    if not environment.get(TOKEN):
        return _refuse(f"'{TOKEN}' is not set: submit the job as its README.md says")
    host, port = socket.gethostbyname(environment["MASTER_ADDR"]), int(environment["MASTER_PORT"])
    is_first, deadline = int(environment["NODE_RANK"]) == 0, time.monotonic() + JOIN_S
    while not is_first and not _listens(host, port):
        if time.monotonic() > deadline:
            return _refuse(f"no first node at {host}:{port} within {JOIN_S} s")
        time.sleep(_BEAT_S)
    first = ("--head", f"--node-ip-address={host}", f"--port={port}", "--include-dashboard=false")
    ray = _started(*first) if is_first else _started(f"--address={host}:{port}")
    if ray is None:
        return _refuse(f"Ray did not come up within {JOIN_S} s")
    try:
        if is_first:
            return subprocess.run(command, env={**environment, "RAY_ADDRESS": f"{host}:{port}"}).returncode
        missed = 0
        while ray.poll() is None and missed < _MISSED:
            missed = 0 if _listens(host, port) else missed + 1
            time.sleep(_BEAT_S)
        return 0
    finally:
        _end(ray)


def _refuse(why: str) -> int:
    sys.stderr.write(f"olive-ext: {why}\n")
    return 1


def _started(*arguments: str) -> subprocess.Popen[str] | None:
    """`ray start` in the foreground, once it says that the node is up. It is tried again where Ray gives up, which it
    does on a busy machine."""
    resources = json.dumps({NODE: 1})
    command = module_command("ray.scripts.scripts", "start", "--block", "--resources", resources, *arguments)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    deadline = time.monotonic() + JOIN_S
    while time.monotonic() < deadline:
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
        ray = subprocess.Popen(command, text=True, errors="replace", env=environment, **pipes)
        is_up = threading.Event()
        threading.Thread(target=_forward, args=(ray, is_up), daemon=True).start()
        while ray.poll() is None and time.monotonic() < deadline:
            if is_up.wait(_BEAT_S):
                return ray
        _end(ray)
    return None


def _forward(ray: subprocess.Popen[str], is_up: threading.Event) -> None:
    """Passes on what Ray says, as long as anybody reads it: nothing else empties the pipe that Ray writes to."""
    assert ray.stdout is not None
    for line in ray.stdout:
        with suppress(OSError, ValueError):
            sys.stderr.write(line)
        if _UP in line:
            is_up.set()


def _end(ray: subprocess.Popen[str]) -> None:
    ray.terminate()
    with suppress(subprocess.TimeoutExpired):
        ray.wait(_CLOSING_S)
    ray.kill()
    ray.wait()


def _listens(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), timeout=_BEAT_S):
        return True
    return False


if __name__ == "__main__":
    sys.exit(run_node(sys.argv[1:], os.environ))

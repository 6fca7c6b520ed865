"""Telemetry of other libraries, by what they would do: files in the user's folders, and connections. Each library's own
is seen where the user asked for it, so that silence means something."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from olive_ext import SWITCHES, switch_off
from olive_ext.workflow import registration

NOISY = (*SWITCHES, "CI", "DISABLE_TELEMETRY", "DO_NOT_TRACK", "PYTEST_CURRENT_TEST", "HF_HUB_OFFLINE")

ORT = """
import olive_ext
import onnxruntime, time
time.sleep(1)
"""
OLIVE = """
import olive_ext.workflow
from olive.telemetry.telemetry import Telemetry
messages = Telemetry()
messages.log("OliveAction", {"invoked_from": "test"})
messages.shutdown()
"""
HUB = """
import olive_ext
import time
from huggingface_hub.utils import send_telemetry
send_telemetry("test")
time.sleep(2)
"""
MLFLOW = """
import olive_ext
from mlflow.telemetry.client import get_telemetry_client, set_telemetry_client
set_telemetry_client()
print(get_telemetry_client())
"""


@pytest.fixture
def hub() -> Iterator[socket.socket]:
    """Notes who calls."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        yield server


def was_called(server: socket.socket) -> bool:
    try:
        server.accept()[0].close()
    except TimeoutError:
        return False
    return True


def said(program: str, **variables: str) -> str:
    """What the program prints to a user who has chosen nothing but these variables."""
    silent = {name: value for name, value in os.environ.items() if name not in NOISY}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env={**silent, **variables}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def files_of(home: Path, program: str, server: socket.socket, **chosen: str) -> list[str]:
    """What the program leaves in the user's home, besides matplotlib's."""
    places = {"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache"), "XDG_CONFIG_HOME": str(home / ".config")}
    address = {"HF_ENDPOINT": f"http://127.0.0.1:{server.getsockname()[1]}", "NO_PROXY": "127.0.0.1"}
    said(program, **places, **address, **chosen)
    return sorted(file.name for file in home.rglob("*") if file.is_file() and "matplotlib" not in str(file))


@pytest.mark.parametrize(
    ("program", "variable", "file"),
    [
        pytest.param(ORT, "ORT_DISABLE_TELEMETRY", "onnxruntime.db", id="onnxruntime", marks=pytest.mark.long),
        pytest.param(OLIVE, "OLIVE_DISABLE_TELEMETRY", "deviceid", id="olive", marks=pytest.mark.long),
    ],
)
def test_library_writes_nothing_unless_the_user_wants_it(
    program: str, variable: str, file: str, tmp_path: Path, hub: socket.socket
) -> None:
    silent, asked = tmp_path / "silent", tmp_path / "asked"
    assert files_of(silent, program, hub) == []
    assert files_of(silent, program, hub, **{variable: "1"}) == []
    if file not in files_of(asked, program, hub, **{variable: "0"}):
        pytest.skip(f"this build writes no {file}")


@pytest.mark.parametrize("choice", ["1", "0"])
def test_wait_for_olives_message_is_beside_the_work(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain `olive run` has sent it before it reads a recipe."""
    is_over = threading.Event()
    off: list[bool] = []
    fake = SimpleNamespace(shutdown=is_over.set, disable_telemetry=lambda: off.append(True))
    monkeypatch.setattr(registration, "Telemetry", lambda: fake)
    monkeypatch.setenv("OLIVE_DISABLE_TELEMETRY", choice)
    registration.silence()
    assert is_over.wait(5 if choice == "1" else 0) == (choice == "1") == bool(off)


def test_hub_is_told_of_no_use_unless_the_user_wants_it(tmp_path: Path, hub: socket.socket) -> None:
    files_of(tmp_path, HUB, hub)
    assert not was_called(hub)
    files_of(tmp_path, HUB, hub, HF_HUB_DISABLE_TELEMETRY="0")
    assert was_called(hub)


def test_datasets_count_no_downloads() -> None:
    assert said("import olive_ext, datasets.config as config; print(config.HF_UPDATE_DOWNLOAD_COUNTS)") == "False"


@pytest.mark.other_env
@pytest.mark.parametrize(("chosen", "is_on"), [({}, False), ({"MLFLOW_DISABLE_TELEMETRY": "false"}, True)])
def test_mlflow_has_no_client(chosen: dict[str, str], is_on: bool, tmp_path: Path) -> None:
    pytest.importorskip("mlflow.telemetry")
    found = said(MLFLOW, HOME=str(tmp_path), XDG_CONFIG_HOME=str(tmp_path), **chosen)
    assert (found != "None") == is_on


@pytest.mark.other_env
@pytest.mark.parametrize(
    ("choice", "expected"), [(None, "DISABLED_EXPLICITLY"), ('{"usage_stats": true}', "ENABLED_EXPLICITLY")]
)
def test_ray_reports_no_usage_unless_the_user_wants_it(choice: str | None, expected: str, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    if choice is not None:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "config.json").write_text(choice)
    program = "import olive_ext; from ray._common.usage import usage_lib; print(usage_lib._usage_stats_enabledness())"
    assert said(program, HOME=str(tmp_path)).endswith(expected)


@pytest.mark.parametrize("chosen", ["DO_NOT_TRACK", "DISABLE_TELEMETRY", "HF_HUB_DISABLE_TELEMETRY"])
def test_choice_by_another_of_the_librarys_variables_stays(chosen: str) -> None:
    environment = {chosen: "0"}
    switch_off(environment)
    assert environment[chosen] == "0"
    assert environment.get("HF_HUB_DISABLE_TELEMETRY", "0") == "0"
    assert environment["ORT_DISABLE_TELEMETRY"] == "1"

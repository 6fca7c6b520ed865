"""Names on a hub that does not answer are told before anything heavy is imported, which takes seconds; mistakes are
told as early: the commands of `tests/mistakes/table.py`."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from olive_ext.cli import main
from olive_ext.cli.exit_status import command
from olive_ext.errors import ConfigError
from tests.mistakes.early import told
from tests.refusals import assert_says, refused


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a hub that takes no connection and refuses none, as behind a firewall: its queue is full."""
    with ExitStack() as open_sockets:
        server = open_sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(2):
            client = open_sockets.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def refusing() -> str:
    """The address of a hub where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


NAME = "some-owner/some-model"
OF_RECIPE = ("run --config recipe.json", {"input_model": {"type": "HfModel", "model_path": NAME}})


@pytest.mark.parametrize(
    ("hub", "reason", "given"),
    [
        pytest.param("silent", "127.0.0.1 1", [f"evaluate {NAME} TASKS"], marks=pytest.mark.long),
        ("refusing", "refused", [f"evaluate MODEL TASKS --reference {NAME}", OF_RECIPE]),
        ("offline", "HF_HUB_OFFLINE", [f"evaluate MODEL TASKS --set tokenizer={NAME}"]),
    ],
)
def test_name_on_a_hub_that_does_not_answer(
    tmp_path: Path, hub: str, reason: str, given: list[Any], request: pytest.FixtureRequest
) -> None:
    network = {"HF_HUB_OFFLINE": "1"} if hub == "offline" else {"HF_ENDPOINT": request.getfixturevalue(hub)}
    found = told(tmp_path, given, HF_HOME=str(tmp_path), NO_PROXY="127.0.0.1", **network)
    assert len(found) == len(given)
    for error in found:
        assert_says(error, "needs_network", holds=(f"'{NAME}'", *reason.split()))
        assert not error.imported


def test_help_of_run_names_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: olive-ext run ")
    assert "--list_required_packages" in said


def test_working_directory_that_is_gone_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check torch's libraries end the process: "Cannot load libtorch_cpu.so", no word of the cause."""
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    with refused(ConfigError, "not_found"):
        command(["evaluate", "m", "--tasks", "a"], None)

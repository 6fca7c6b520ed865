"""A mistake is reported before Olive, lm-eval, torch, transformers or ONNX Runtime is imported, which takes seconds."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from olive_ext.cli import main
from olive_ext.cli.commands import IN_CLONE

SCRIPT = """
import json, os, sys
from olive_ext.cli import main
for folder, *argv in json.loads(sys.argv[1]):
    os.chdir(folder)
    status = main(argv)
    heavy = {"olive", "lm_eval", "torch", "transformers", "onnxruntime", "evalution"} & set(sys.modules)
    print(f"status {status}, imported:", *sorted(heavy), file=sys.stderr)
"""
TASKS = ["--tasks", "quickstart_choice", "--include-path", str(IN_CLONE / "tasks")]
MODEL = str(IN_CLONE / "model")


IN_RECIPE = ["run", "--config", "recipe.json"]
BUILDS = {"int4": {"type": "ModelBuilder", "precison": "int4"}}


def put_recipe(folder: Path, changes: dict[str, Any]) -> None:
    """The quickstart's recipe in `folder`, its evaluator or its top keys changed."""
    made = json.loads((IN_CLONE / "recipe.json").read_text(encoding="utf-8"))
    for key, value in changes.items():
        (made if key in made else made["evaluators"]["quickstart"])[key] = value
    (folder / "recipe.json").write_text(json.dumps(made), encoding="utf-8")
    (folder / "recipes").symlink_to(IN_CLONE.parent, target_is_directory=True)
    (folder / "gone").mkdir()


def ends(*commands: list[str], **environment: str) -> list[str]:
    """The line on stderr of `olive-ext` for each of these, which begin with the folder that they are run in: all in one
    process, which has imported nothing heavy."""
    paths = {"PYTHONPATH": str(IN_CLONE.parents[1]), "PATH": "", **environment}
    command = [sys.executable, "-c", SCRIPT, json.dumps(commands)]
    said = subprocess.run(command, capture_output=True, text=True, env=paths).stderr.splitlines()
    assert said[1::2] == ["status 2, imported:"] * len(commands), said
    return [line.removeprefix("olive-ext: error: ") for line in said[::2]]


TWO = {"int4": {"type": "ModelBuilder", "precision": "int4"}, "next": {"type": "ModelBuildr"}}
MISTAKES: list[tuple[list[str], dict[str, Any], str]] = [
    (["evaluate", "nowhere", *TASKS], {}, "model path 'nowhere' does not exist"),
    (["evaluate", MODEL, *TASKS, "--reference", "gone/it"], {}, "--reference: 'gone/it' does not exist"),
    (["evaluate", MODEL, "--tasks", "hellaswagg"], {}, "unknown task 'hellaswagg': did you mean 'hellaswag'"),
    (
        ["evaluate", MODEL, "--tasks", "homes.csv"],
        {},
        "unknown task 'homes.csv': a task is a YAML file that names its data (docs/",
    ),
    (["mend", MODEL, "--within", "0.01"], {}, "--within = '0.01': give kl_mean=NATS"),
    (["evaluate", "recipe.json"], {}, "'recipe.json' is a recipe: `olive-ext run` runs it"),
    (["compare", "gone/it", "gone"], {}, "'gone/it': no such file or folder"),
    (["evalution", "no.yaml"], {}, "'no.yaml': no such file"),
    (["run"], {}, "the following arguments are required: --config/--run-config (see 'olive-ext run --help')"),
    (["run", "--config", "no.json"], {}, "cannot read the recipe 'no.json': No such file or directory"),
    (["run", "no.json", "-o", "out"], {}, "cannot read the recipe 'no.json': No such file or directory"),
    (["check", "recipe.json"], {"taskz": ["a"]}, "unknown key 'evaluators.quickstart.taskz': did you mean 'tasks'?"),
    (["check", "recipe.json"], {"host": "locl"}, "'host' = 'locl': not in 'systems', which has local"),
    (IN_RECIPE, {"taskz": ["a"]}, "unknown key 'evaluators.quickstart.taskz': did you mean 'tasks'?"),
    (IN_RECIPE, {"passes": BUILDS}, "unknown key 'passes.int4.precison': did you mean 'precision'?"),
    (IN_RECIPE, {"passes": TWO}, "'passes.next.type' = 'ModelBuildr': did you mean 'ModelBuilder'?"),
    (IN_RECIPE, {"output_dir": "recipe.json"}, "'output_dir' = 'recipe.json': '"),
    (IN_RECIPE, {"tasks": ["quickstart_choise"]}, "'evaluators.quickstart.tasks': unknown task 'quickstart_choise'"),
]


def test_mistakes(tmp_path: Path) -> None:
    folders = [tmp_path / str(number) for number in range(len(MISTAKES))]
    for folder, (_, changes, _) in zip(folders, MISTAKES, strict=True):
        folder.mkdir()
        put_recipe(folder, changes)
    commands = [[str(folder), *argv] for folder, (argv, _, _) in zip(folders, MISTAKES, strict=True)]
    begins = [line for _, _, line in MISTAKES]
    assert [line[: len(begin)] for line, begin in zip(ends(*commands), begins, strict=True)] == begins


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


@pytest.mark.parametrize(
    ("hub", "reason", "commands"),
    [
        ("silent", "no answer from 127.0.0.1 in 1 s", [["evaluate", NAME, *TASKS]]),
        ("refusing", "Connection refused", [["evaluate", MODEL, *TASKS, "--reference", NAME], IN_RECIPE]),
        ("offline", "HF_HUB_OFFLINE is set", [["evaluate", MODEL, *TASKS, "--set", f"tokenizer={NAME}"]]),
    ],
)
def test_name_on_a_hub_that_does_not_answer(
    tmp_path: Path, hub: str, reason: str, commands: list[list[str]], request: pytest.FixtureRequest
) -> None:
    network = {"HF_HUB_OFFLINE": "1"} if hub == "offline" else {"HF_ENDPOINT": request.getfixturevalue(hub)}
    put_recipe(tmp_path, {"input_model": {"type": "HfModel", "model_path": NAME}})
    here = [[str(tmp_path), *argv] for argv in commands]
    for said in ends(*here, HF_HOME=str(tmp_path), NO_PROXY="127.0.0.1", **network):
        assert said.startswith(f"'{NAME}' is no file or folder here")
        assert said.endswith(f" cannot be asked: {reason}")


def test_help_of_run_names_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: olive-ext run ")
    assert "--list_required_packages" in said


def test_working_directory_that_is_gone_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the check torch's libraries end the process: "Cannot load libtorch_cpu.so", no word of the cause."""
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert main(["evaluate", MODEL, *TASKS]) == 2
    assert "the working directory" in capsys.readouterr().err

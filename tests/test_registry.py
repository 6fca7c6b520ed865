"""Plug-ins of other distributions: what they add, and what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from olive_ext.registry import plugins
from tests.refusals import tells

ROOT = Path(__file__).resolve().parents[1]

STRANGER = """
from olive_ext.registry import Command, Plugin
plugin = Plugin(
    commands={NAME: Command("Say hello.", "stranger:hello", (("whom", "NAME", "Whom.", {}),))},
)
def hello(arguments):
    print("hello", arguments.whom)
    return 5
"""


def installed(folder: Path, text: str, entry: str = "stranger") -> Path:
    (folder / "stranger.py").write_text(text, encoding="utf-8")
    metadata = folder / "stranger-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: stranger\nVersion: 1.0\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text(f"[olive_ext.plugins]\n{entry} = stranger:plugin\n", encoding="utf-8")
    return folder


def olive_ext(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    program = "import json, sys; sys.path.insert(0, sys.argv[1]); from olive_ext.cli import main; "
    program += "sys.exit(main(json.loads(sys.argv[2])))"
    command = [sys.executable, "-c", program, str(folder), json.dumps(argv)]
    return subprocess.run(command, capture_output=True, text=True)


def test_command_of_another_distribution_is_listed_and_runs(tmp_path: Path) -> None:
    folder = installed(tmp_path, STRANGER.replace("NAME:", "'greet':"))
    done = olive_ext(folder, "greet", "you")
    assert (done.returncode, done.stdout) == (5, "hello you\n")
    assert "Say hello." in olive_ext(folder, "--help").stdout


@pytest.mark.parametrize(
    ("text", "entry", "words"),
    [
        ("raise RuntimeError('no licence')", "stranger", "'stranger': 'stranger:plugin' licence"),
        (STRANGER.replace("NAME:", "'gate':"), "stranger", "'stranger': 'gate'"),
        (STRANGER.replace("NAME:", "'check':"), "stranger", "'stranger': 'check'"),
        (STRANGER.replace("NAME:", "'greet':"), "gate", "'gate': 'stranger:plugin'"),
    ],
)
def test_plugin_that_fails_or_takes_a_name_is_refused(tmp_path: Path, text: str, entry: str, words: str) -> None:
    done = olive_ext(installed(tmp_path, text, entry), "--help")
    assert done.returncode == 2
    assert tells(done.stderr, words)
    assert done.stderr.count("\n") == 1


def test_every_hook_is_asked_for_offered_and_on_the_map() -> None:
    sources = [path for path in (ROOT / "olive_ext").rglob("*.py") if path.name != "registry.py"]
    asked = {name for path in sources for name in re.findall(r'\bhooks?\(\s*"(\w+)"', path.read_text(encoding="utf-8"))}
    assert asked == {name for plugin in plugins().values() for name in plugin.hooks}
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert {name for name in asked if f"`{name}`" not in page} == set()

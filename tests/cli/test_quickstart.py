"""`olive-ext quickstart DIR`: what it copies, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from olive_ext.check import check_recipe
from olive_ext.cli import main
from olive_ext.cli.commands import IN_CLONE


def paths(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_copy_is_whole_and_its_recipe_is_valid_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "with a space" / "try"
    assert main(["quickstart", str(target)]) == 0
    assert capsys.readouterr().out == f"cd '{target}' && olive run --config recipe.json\n"
    assert [entry.name for entry in target.parent.iterdir()] == ["try"]
    assert {"recipe.json", "olive_ext_plugin.py", "model/model.safetensors", "model/config.json"} <= paths(target)
    assert not {path for path in paths(target) if path.startswith("make/")}
    model = "model/model.safetensors"
    assert (target / model).read_bytes() == (IN_CLONE / model).read_bytes()
    assert "recipes/" not in (target / "recipe.json").read_text(encoding="utf-8")
    assert json.loads((target / "recipe.json").read_text(encoding="utf-8"))["input_model"]["model_path"] == "model"
    monkeypatch.chdir(target)
    assert check_recipe("recipe.json").problems == []


def test_empty_folder_is_taken_and_any_other_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quickstart", str(tmp_path / "new")]) == 0
    (tmp_path / "empty").mkdir()
    assert main(["quickstart", str(tmp_path / "empty")]) == 0
    before = paths(tmp_path)
    (tmp_path / "file").touch()
    for taken in ("new", "file"):
        capsys.readouterr()
        assert main(["quickstart", str(tmp_path / taken)]) == 2
        assert capsys.readouterr().err.startswith(f"olive-ext: error: 'folder' = '{tmp_path / taken}': ")
    assert paths(tmp_path) == before | {"file"}

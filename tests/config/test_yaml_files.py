"""Values of YAML files that are none of their tags are errors that readers expect."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from olive_ext.config.yaml_files import LOADER, WRONG_TAGS, yaml_bytes

NUMBER = ":".join(["1"] * 999)


@pytest.mark.parametrize(
    "text", ["!!int ''", "!!int '-'", "!!float '+_'", "!!bool maybe", "!!timestamp soon", f"{NUMBER}.5"]
)
def test_values_that_are_none_of_their_tags_are_errors_that_readers_expect(text: str) -> None:
    with pytest.raises(WRONG_TAGS):
        yaml.load(f"a: {text}\n", Loader=LOADER)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1:30:00", 5400),
        ("!!int 0x1f", 31),
        ("!!float 5", 5.0),
        ("!!bool Yes", True),
        ("!!int '-1_000'", -1000),
        (f"'{NUMBER} of them'", f"{NUMBER} of them"),
    ],
)
def test_values_that_are_what_they_say_are_read(text: str, value: object, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"a: {text}\nb: !!timestamp 2026-11-23 10:00:00\n")
    assert yaml.load(yaml_bytes(tmp_path / "a.yaml"), Loader=LOADER)["a"] == value

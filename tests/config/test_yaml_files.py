"""Files of YAML that a reader reads for ever, or that end it with any exception, are refused by line and limit."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from olive_ext.config.yaml_files import LOADER, MOST_PARTS, WRONG_TAGS, UnboundedError, yaml_bytes

NUMBER = ":".join(["1"] * (MOST_PARTS + 1))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"a: 1\nb: {NUMBER}\n", r"line 2: a number of more than 64 parts \(MOST_PARTS\)"),
        (f"b: 1{':1' * 1_500_000}\n", "MOST_PARTS"),
        (f"b: {NUMBER}.5\n", "MOST_PARTS"),
        (f"b: !!int '{NUMBER}'\n", "MOST_PARTS"),
    ],
)
def test_values_that_no_reader_ends_with_are_refused(text: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(UnboundedError, match=expected):
        yaml_bytes(tmp_path / "a.yaml")


@pytest.mark.parametrize("text", ["!!int ''", "!!int '-'", "!!float '+_'", "!!bool maybe", "!!timestamp soon"])
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

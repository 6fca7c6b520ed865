"""Copies the quickstart (recipe, model, tasks) to a folder where its recipe runs without a clone. Knows no model."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from olive_ext.errors import ConfigError, OliveExtError

PACKAGE = Path(__file__).resolve().parents[1]
IN_WHEEL, IN_CLONE = PACKAGE / "quickstart", PACKAGE.parent / "recipes" / "quickstart"
CLONE_PREFIX = "recipes/quickstart/"
"""Olive takes a recipe's paths from the working directory: a clone's root there, the copy's folder here."""

NOT_COPIED = ("make", "__pycache__", "README.md", "info.yml", "requirements.txt")
"""What the folder of a clone has beside what runs; setup.py leaves the same out of the wheel."""


def copy_quickstart(target: Path) -> None:
    """Makes the folder `target`, with the recipe's paths taken from it; all of it or nothing.

    Raises `ConfigError` where `target` is there and not an empty folder.
    """
    source = next((folder for folder in (IN_WHEEL, IN_CLONE) if (folder / "recipe.json").is_file()), None)
    if source is None:
        raise OliveExtError(f"the quickstart is missing from this installation: neither '{IN_WHEEL}' nor '{IN_CLONE}'")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"'{target}' is there already: give a folder that is new or empty")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        made = shutil.copytree(source, Path(scratch, "made"), ignore=shutil.ignore_patterns(*NOT_COPIED))
        for recipe in made.glob("*.json"):
            recipe.write_text(recipe.read_text(encoding="utf-8").replace(CLONE_PREFIX, ""), encoding="utf-8")
        if target.is_dir():
            target.rmdir()  # only POSIX renames over an empty folder
        made.replace(target)

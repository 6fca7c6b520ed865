"""Which files a model's folder may have this package open: its own, and no others.

A file is one of the folder's where it lies in it once every symbolic link on the way is followed, or among the blobs of
Hugging Face's cache, to which all names of a snapshot are links. Knows no file's content.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from olive_ext.errors import ModelError

_SUB_FOLDERS = ("additional_chat_templates",)
"""Folders of a model's in which transformers look for files, too."""


def inside(folder: Path, name: str, key: str) -> Path:
    """The file or folder that a configuration in `folder` names under `key`. Raises `ModelError` for an absolute path,
    for one with "..", and for a symbolic link that leads out of the folder."""
    written = PurePosixPath(name.replace("\\", "/"))
    if written.is_absolute() or Path(name).is_absolute() or ".." in written.parts or "\0" in name:
        raise ModelError(
            f"'{folder}' names '{name}' for {key}, which is not inside of the folder: no model names other files"
        )
    if _leads_out(folder / name, folder):
        raise ModelError(
            f"'{folder}' names '{name}' for {key}, a link that leads out of the folder, to "
            f"'{(folder / name).resolve()}'"
        )
    return folder / name


def within(path: Path, *folders: Path) -> Path:
    """`path`, a file or folder that was found in a model's folder by its name. Raises `ModelError` where it leads out
    of all `folders`, which are by default the one that it lies in, and where it is a pipe, a socket or a device."""
    if _leads_out(path, *(folders or (path.parent,))):
        raise ModelError(f"'{path}' leads out of the model's folder, to '{path.resolve()}': put the file itself there")
    if kind := special_kind(path):
        raise ModelError(f"'{path}' is {kind}: a model consists of files and folders")
    return path


def refuse_strangers(folder: Path) -> None:
    """Raises `ModelError` as `within` does for any file of a folder that is given to transformers or onnxruntime-genai,
    which open each name that they know. Links to folders, hidden files and graphs may lie there: they open none of
    these by its name alone."""
    try:
        for place in (folder, *(within(folder / name, folder) for name in _SUB_FOLDERS if (folder / name).is_dir())):
            for path in sorted(place.iterdir()):
                if not (path.name.startswith(".") or ".onnx" in path.name or stat.S_ISDIR(_mode(path))):
                    within(path, folder)
    except OSError as error:
        raise ModelError(f"the model's folder '{folder}' cannot be read: {error.strerror or error}") from error


def special_kind(path: Path) -> str:
    """What `path` is where it is neither a file nor a folder, for an error message; empty where it is, or is not there.
    Reading such a thing may never end."""
    kinds = {stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket", stat.S_ISCHR: "a device", stat.S_ISBLK: "a device"}
    return next((kind for is_kind, kind in kinds.items() if is_kind(_mode(path))), "")


def _mode(path: Path) -> int:
    """As the system has it, behind links; 0 for what cannot be reached, and so cannot be opened."""
    try:
        return path.stat().st_mode
    except OSError:
        return 0


def _leads_out(path: Path, *folders: Path) -> bool:
    if not _mode(path):
        return False
    real = path.resolve()
    return not any(real.is_relative_to(place) for folder in folders for place in _places(folder.resolve()))


def _places(folder: Path) -> Iterator[Path]:
    """Where the files of a folder lie: in it, and where it is a snapshot of Hugging Face's cache, or in one, in the
    blobs of the same model."""
    yield folder
    for place in (folder, *folder.parents):
        if place.parent.name == "snapshots":
            yield place.parent.parent / "blobs"

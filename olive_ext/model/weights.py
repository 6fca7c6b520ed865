"""Where a graph's external data lies, and how ONNX Runtime is told so. Reads no graph: it is given the locations.

ONNX Runtime takes a graph from memory together with one folder, and refuses every location that leaves this folder,
also through a symbolic link. In a Hugging Face cache every file is such a link (snapshots/<rev>/model.onnx.data ->
blobs/<hash>). So links are resolved here, the folder becomes the deepest one that holds all the real files, and the
locations are rewritten relative to it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from olive_ext.errors import ModelError


def weight_files(decoder: Path, locations: Iterable[str]) -> dict[str, Path]:
    """Location -> file, as named, for each external-data location in `decoder`, sorted.

    A location is looked up beside the decoder, then beside the file that a symbolic link `decoder` points to. Raises
    `ModelError` that names the missing file, or a location outside the model's folder.
    """
    found = {}
    for location in sorted(set(locations)):
        relative = PurePosixPath(os.path.normpath(location).replace("\\", "/"))
        if relative.is_absolute() or relative.parts[:1] == ("..",):
            raise ModelError(f"'{decoder}' keeps weights in '{location}', outside its own folder")
        places = (decoder.parent / relative, decoder.resolve().parent / relative)
        file = next((place for place in places if place.is_file()), None)
        if file is None:
            raise ModelError(f"'{decoder}' keeps weights in '{location}', and '{places[0]}' does not exist")
        found[location] = file
    return found


def external_data_plan(decoder: Path, locations: Iterable[str]) -> tuple[Path, dict[str, str]]:
    """The folder to open `decoder` from memory with, and new location by old one for those that change.

    Raises `ModelError` as `weight_files` does, and where the files lie on different drives.
    """
    files = {location: file.resolve() for location, file in weight_files(decoder, locations).items()}
    if not files:
        return decoder.resolve().parent, {}
    try:
        folder = Path(os.path.commonpath([file.parent for file in files.values()]))
    except ValueError as error:
        raise ModelError(f"the weights of '{decoder}' lie on different drives") from error
    moved = {location: file.relative_to(folder).as_posix() for location, file in files.items()}
    return folder, {old: new for old, new in moved.items() if old != new}

"""The keys of our passes in Olive's cache: digests of everything that decides what they give.

Olive keys its cache to the recipe and to a part of the model's files only. Knows no recipe file.
"""

from __future__ import annotations

import ast
import glob
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

from olive_ext.backends.task_files import TaskFiles
from olive_ext.config import (
    ModelSettings,
    PassSettings,
    ReferenceConfig,
)
from olive_ext.engine.requests import NUMBERS
from olive_ext.errors import OliveExtError
from olive_ext.model import resolve
from olive_ext.model.files.content import digest_of, unchanged_facts
from olive_ext.model.files.model_package import is_package
from olive_ext.package_versions import versions
from olive_ext.run.task_fit import is_onnx_model
from olive_ext.workflow.current_run import settled
from olive_ext.workflow.handlers import COMPONENTS, tokenizer_candidates

_TASK_FILES = (".yaml", ".yml")
_DIGEST_BYTES = 8


def environment(settings: PassSettings, day: date | None = None) -> str:
    """Digest (16 hex digits) of the versions in use, and of the task files, adapters and models in the settings.

    Task files count by `unchanged_facts`, since data sets lie among them; a reference by `model_digest`. Where chat
    templates are used, the `day` counts, by default today.
    """
    paths = {*_task_files(settings), *map(Path, settings.engine.adapters)}
    files = [[str(path), *unchanged_facts(path)] for path in sorted(paths) if path.is_file()]
    own = None if settings.reference is None else settled(settings.reference)
    reference = [] if own is None else [_reference(own)]
    if own is not None and own.float_model is not None:
        reference.append(_reference(ReferenceConfig(path=own.float_model)))
    if (named := getattr(settings, "like", None)) is not None:  # a mended model's
        like = Path(named)  # of which the size counts, whatever it is
        sizes = [(path.name, path.stat().st_size) for path in sorted(like.rglob("*")) if path.is_file()]
        reference.append([named, sizes or (like.stat().st_size if like.is_file() else None)])
    # Chat templates may print it; answers to prompts without it are in the journal anyway.
    printed = str(day or date.today()) if settings.apply_chat_template else ""
    facts = {"versions": versions(), "numbers": NUMBERS, "date": printed}
    return digest({**facts, "files": files, "reference": reference})


def content(model: Any, tokenizer: str | None = None) -> str:
    """Digest of all files that opening the model of Olive's configuration reads: its model id says what made a model,
    not what lies in its cache now. Empty where the files cannot be found: the evaluation then raises the error.
    """
    path, attributes = model.config.get("model_path"), model.config.get("model_attributes")
    if not isinstance(path, str) or not Path(path).exists():
        return ""
    kind: Any = "onnx" if is_onnx_model(model.type) else "hf"
    where = {"onnx_file_name": model.config.get("onnx_file_name"), "components": (attributes or {}).get(COMPONENTS, {})}
    return _content(tokenizer_candidates(attributes), model=path, kind=kind, tokenizer=tokenizer, **where)


def _reference(reference: ReferenceConfig) -> list[Any]:
    """The reference's settings and its content; of a model on the hub, the revision in the local cache."""
    settings = reference.model_dump(mode="json", exclude={"path", "records_dir"})
    path = Path(reference.path)
    if not path.exists():
        return [settings, reference.path, _snapshot(reference.path)]
    if reference.is_records or (reference.variant is None and is_package(path)):  # one for any provider's variant
        files = [file for file in sorted({path, *path.rglob("*")}) if file.is_file()]
        return [settings, digest_of((str(file.relative_to(path)), file) for file in files)]
    which = reference.model_dump(include={"kind", "onnx_file_name", "variant", "components", "tokenizer"})
    return [settings, _content((), model=reference.path, **which)]


def _content(candidates: Sequence[str], **which: Any) -> str:
    try:
        return str(resolve(ModelSettings(**which), tokenizer_candidates=candidates).digest)
    except OliveExtError:  # opening it will say so
        return ""


def _snapshot(name: str) -> str:
    """The path of the model's config.json in the hub's cache, which contains the revision; empty where it has none."""
    from huggingface_hub import try_to_load_from_cache

    file = try_to_load_from_cache(name, "config.json")
    return file if isinstance(file, str) else ""


def deciding_settings(values: Mapping[str, Any], *, bounds_decide: bool = False) -> dict[str, Any]:
    """Settings as written, without those that change no number: `require` (which decides the documents where these are
    "enough", and with `bounds_decide` the model that is made) and the folder of the records.

    Olive makes folders absolute once they exist, which would also make a second run differ from the first.
    """
    is_free = not bounds_decide and values.get("documents") != "enough"
    kept = {name: value for name, value in values.items() if not (is_free and name == "require")}
    if isinstance(kept.get("reference"), Mapping):
        kept["reference"] = {name: value for name, value in kept["reference"].items() if name != "records_dir"}
    return kept


def digest(value: Any) -> str:
    """16 hex digits of any value that JSON can represent."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def _task_files(settings: PassSettings) -> Iterator[Path]:
    """What lies in the folders of tasks, and what tasks name: includes, Python, data, and what a text in their Python
    says that it reads."""
    written = settings.include_path or []
    folders = [written] if isinstance(written, str) else written
    files = TaskFiles(settings.tasks, folders)
    named = files.all_files()
    yield from named
    inline = (task for task in settings.tasks if isinstance(task, Mapping))
    texts = [(Path(), text) for config in (*files.contents.values(), *inline) for text in _texts_of_data(config)]
    for file in (file for file in named if file.suffix == ".py"):
        places = {Path(), file.parent, file.parent.parent}
        texts += [(place, text) for text in _texts_of_code(file) for place in places]
    read = {path for place, text in texts for path in _meant(place, text)}
    yield from read
    around = {*map(Path, folders), *(path.parent for path in named if path.suffix in _TASK_FILES)}
    output = Path(getattr(settings, "output_dir", None) or os.devnull).resolve()
    for folder in around | {path for path in read if not _is_above_work(path) and path.resolve() != output}:
        yield from _files_below(folder, output)


def _meant(place: Path, text: str) -> Iterator[Path]:
    """The file or folder that a text names from a place; else the folder in which it is a name's beginning, or a
    pattern of names."""
    with suppress(OSError, ValueError):  # no file can have such a name
        beginning = re.split(r"[*?[]", text)[0].rpartition("/")[0]
        if (path := place / text).exists():
            yield path
        elif beginning.strip("./") and (place / beginning).exists():
            yield place / beginning


def _texts_of_data(value: Any, keys: Collection[str] = ("dataset_path", "dataset_kwargs")) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        items = value if isinstance(value, list) else [value.get(key) for key in keys or value]
        for item in items:
            yield from _texts_of_data(item, ())


def _texts_of_code(file: Path) -> Iterator[str]:
    """The texts in a file of Python, which is not run. An absolute path counts as the files that it names: "/usr" is no
    task's."""
    with suppress(OSError, SyntaxError, ValueError, RecursionError):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Constant) and isinstance(text := node.value, str):
                is_absolute = text.startswith("/")
                named = glob.glob(text) if is_absolute else [text]  # noqa: PTH207 - here "**" is one folder, not all
                yield from (one for one in named if not (is_absolute and Path(one).is_dir()))


def _is_above_work(folder: Path) -> bool:
    """Whether a folder contains the place where the workflow runs and writes, and whatever else lies there."""
    return Path.cwd().is_relative_to(os.path.realpath(folder))


def _files_below(folder: Path, output: Path) -> Iterator[Path]:
    """The files of a folder and, if the workflow does not run there, of the folders in it."""
    is_working = _is_above_work(folder)
    for root, names, files in os.walk(folder):
        inner = [] if is_working else [Path(root, name) for name in names if not name.startswith((".", "__pycache__"))]
        names[:] = [path.name for path in inner if path.resolve() != output]
        yield from (Path(root, name) for name in files)

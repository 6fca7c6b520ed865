"""The keys of our passes in Olive's cache: digests of what decides what they give. What a task of one's own reads may
lie anywhere, so that a pass with such a task runs anew in each workflow.

Olive keys its cache to the recipe and to a part of the model's files only. Knows no recipe file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

from olive_ext.backends.task_files import is_file
from olive_ext.config import ModelSettings, PassSettings, ReferenceConfig
from olive_ext.engine.requests import NUMBERS
from olive_ext.errors import OliveExtError
from olive_ext.model import resolve
from olive_ext.model.files.content import digest_of
from olive_ext.package_versions import versions
from olive_ext.run.task_fit import is_onnx_model
from olive_ext.workflow.current_run import files_of, settled
from olive_ext.workflow.handlers import COMPONENTS, tokenizer_candidates


def has_own_tasks(keys: Mapping[str, Any]) -> bool:
    """Whether a task among the keys of a pass may be the user's: what it reads lies anywhere."""
    tasks = keys.get("tasks") or ()
    return keys.get("include_path") is not None or any(not isinstance(task, str) or is_file(task) for task in tasks)


def environment(settings: PassSettings, day: date | None = None) -> str:
    """Digest (16 hex digits) of the versions in use, and of the adapters and models in the settings. Where chat
    templates are used, the `day` counts, by default today."""
    own = None if settings.reference is None else settled(settings.reference)
    references = [] if own is None else [_reference(own)]
    if own is not None and own.float_model is not None:
        references.append(_reference(ReferenceConfig(path=own.float_model)))
    adapters = [path for path in map(Path, settings.engine.adapters) if path.is_file()]
    # Chat templates may print it; answers to prompts without it are in the journal anyway.
    printed = str(day or date.today()) if settings.apply_chat_template else ""
    facts = {"versions": versions(), "numbers": NUMBERS, "date": printed, "references": references}
    return digest({**facts, "adapters": digest_of((str(path), path) for path in adapters)})


def content(model: Any, tokenizer: str | None = None) -> str:
    """Digest of all files that opening the model of Olive's configuration reads: its model id says what made a model,
    not what lies in its cache now. Empty where the files cannot be found: the pass then raises the error.
    """
    path, attributes = model.config.get("model_path"), model.config.get("model_attributes")
    if not isinstance(path, str) or not Path(path).exists():
        return ""
    kind: Any = "onnx" if is_onnx_model(model.type) else "hf"
    where = {"onnx_file_name": model.config.get("onnx_file_name"), "components": (attributes or {}).get(COMPONENTS, {})}
    which = ModelSettings(model=path, kind=kind, tokenizer=tokenizer, **where)
    try:
        return str(resolve(which, tokenizer_candidates=tokenizer_candidates(attributes)).digest)
    except OliveExtError:  # opening it will say so
        return ""


def _reference(reference: ReferenceConfig) -> list[Any]:
    """The reference's settings and its content; of a model on the hub the path of its config.json in the local cache,
    which contains the revision, and None where it is not there."""
    settings = reference.model_dump(mode="json", exclude={"records_dir"})
    if Path(reference.path).exists():
        return [settings, digest_of((str(file), file) for file in files_of(reference))]
    from huggingface_hub import try_to_load_from_cache

    known = try_to_load_from_cache(reference.path, "config.json")
    return [settings, known if isinstance(known, str) else None]


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
    return digest_of([("", text.encode())])[:16]

"""The command line that repeats an evaluation. Knows the options' names and nothing of how they are parsed."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

_FLAGS = {
    "limit": "--limit",
    "num_fewshot": "--num-fewshot",
    "batch_size": "--batch-size",
    "max_length": "--max-length",
    "tokenizer": "--tokenizer",
    "system_instruction": "--system-instruction",
    "reference": "--reference",
    "use_cache": "--use-cache",
    "sample_log_num": "--sample-log-num",
    "seed": "--seed",
    "output_dir": "--output",
}
_SWITCHES = {"allow_cpu_fallback": "--allow-cpu-fallback", "fewshot_as_multiturn": "--fewshot-as-multiturn"}


def command(config: Mapping[str, Any]) -> str:
    """`olive-ext evaluate ...` for a configuration as written, quoted for a POSIX shell; empty without a model."""
    model = config.get("model")
    if not isinstance(model, Mapping) or not model.get("path"):
        return ""
    return shlex.join(["olive-ext", "evaluate", str(model["path"]), *_options(config, model)])


def _options(config: Mapping[str, Any], model: Mapping[str, Any]) -> Iterator[str]:
    for key, written in config.items():
        if key == "model":
            continue
        value = _plain_reference(written) if key == "reference" else written
        if key == "tasks" and _are_words(value):
            yield from ("--tasks", ",".join(value))
        elif key in _SWITCHES and value is True:
            yield _SWITCHES[key]
        elif key in _FLAGS and isinstance(value, str | int | float) and not str(value).startswith("-"):
            yield from (_FLAGS[key], str(value))
        elif value is not None:
            yield from _set(key, value)
    for key, value in model.items():
        if key != "path" and value is not None:
            yield from _set(f"model.{key}", value)


def _plain_reference(value: Any) -> Any:
    """The path alone, where nothing else is said of the reference."""
    return value["path"] if isinstance(value, Mapping) and set(value) == {"path"} else value


def _set(key: str, value: Any) -> Iterator[str]:
    yield from ("--set", f"{key}={value if _is_plain_text(value) else json.dumps(value, ensure_ascii=False)}")


def _is_plain_text(value: Any) -> bool:
    """Whether `--set` reads the text as that text, and not as the JSON that it happens to be."""
    if not isinstance(value, str):
        return False
    try:
        json.loads(value)
    except json.JSONDecodeError:
        return True
    return False


def _are_words(tasks: Any) -> bool:
    return all(isinstance(task, str) and "," not in task and task == task.strip() for task in tasks)

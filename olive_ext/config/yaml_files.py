"""Files of YAML that others wrote, which no reader fails to end with: the library's own ends the process where brackets
nest deeply; and recipes, which may be such files. Knows nothing of what the files say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from olive_ext.errors import ConfigError, keys_once, special_kind

DEEPEST = 64
"""Collections inside of each other; lm-eval's files have 7."""

LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

WRONG_TAGS = (AttributeError, LookupError, OverflowError, ValueError)
"""What the library's readers raise for a value that is none of the type that its tag names, or of its form."""


class UnboundedError(ValueError):
    """A file that a reader would not end with."""


def yaml_bytes(path: Path) -> bytes:
    """The content of a file that every reader ends with.

    Raises:
        UnboundedError: no reader might; the message names the line.
        OSError: there is no such file, or it cannot be read.
        yaml.YAMLError: it is no YAML.
    """
    if kind := special_kind(path):
        raise UnboundedError(f"it is {kind}")
    content = path.read_bytes()
    _refuse_unbounded(content)
    return content


def doubled_key(path: Path) -> str | None:
    """The place where a mapping of a file has a key twice, of which readers take the last; None without any. Raises as
    `yaml_bytes` does."""
    waiting, seen = [yaml.compose(yaml_bytes(path), Loader=LOADER)], set[int]()
    while waiting:
        node = waiting.pop()
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        names = [str(key.value) for key, _ in pairs]
        if twice := [key for key, _ in pairs if names.count(str(key.value)) > 1 and key.value != "<<"]:
            return f"line {twice[-1].start_mark.line + 1}: the key '{twice[-1].value}' is there twice"
        if id(node) not in seen and isinstance(node, yaml.CollectionNode):
            waiting += [value for _, value in pairs] or node.value
        seen.add(id(node))
    return None


def _refuse_unbounded(content: bytes) -> None:
    """Reads the library's events, which are made without recursion."""
    begun: list[str | None] = []
    for event in yaml.parse(content, Loader=LOADER):
        if isinstance(event, yaml.AliasEvent) and event.anchor in begun:
            raise UnboundedError(f"{_line(event)}: '*{event.anchor}' stands inside of what it names")
        if isinstance(event, yaml.CollectionStartEvent):
            begun.append(event.anchor)
        elif isinstance(event, yaml.CollectionEndEvent):
            begun.pop()
        if len(begun) > DEEPEST:
            raise UnboundedError(f"{_line(event)}: more than {DEEPEST} collections inside of each other (DEEPEST)")


def _line(event: Any) -> str:
    return f"line {event.start_mark.line + 1}"


def read_recipe(path: str | Path) -> Mapping[str, Any]:
    """The recipe at `path`, JSON or YAML by its name; raises `ConfigError`."""
    path = Path(path)
    if kind := special_kind(path):
        raise ConfigError(f"the recipe '{path}' is {kind}: give a file", code="no_access")
    try:
        if path.suffix.lower() in (".yaml", ".yml"):
            if twice := doubled_key(path):
                raise ValueError(twice)
            recipe = yaml.safe_load(yaml_bytes(path))
        else:
            recipe = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=keys_once)
    except OSError as error:
        raise ConfigError(f"cannot read the recipe '{path}': {error.strerror or error}", code="no_access") from error
    except (*WRONG_TAGS, yaml.YAMLError, RecursionError) as error:
        problem = f"cannot parse the recipe '{path}': {' '.join(str(error).split())}"
        raise ConfigError(problem, code="damaged") from error
    if not isinstance(recipe, Mapping):
        raise ConfigError(f"the recipe '{path}' holds no mapping of keys", code="damaged")
    return recipe

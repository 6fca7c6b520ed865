"""Files of YAML that others wrote, read within limits: a few bytes of anchors can stand for more than any memory holds,
and the library's own reader ends the process where brackets nest deeply. Knows nothing of what the files say.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from olive_ext.errors import special_kind

LARGEST_FILE = 4 * 2**20
"""Bytes of a file: the largest of lm-eval's task files has 63 thousand."""

MOST_NODES = 200_000
"""Values, keys and collections of a file with every alias written out; none of lm-eval's has more than 765."""

DEEPEST = 64
"""Collections inside of each other; lm-eval's files have 7."""

MOST_PARTS = 64
"""Parts of a number of base 60, 1:30:00 for instance, which YAML has: they take quadratic time, and end floats."""

_PARTS = re.compile(r"[-+]?[0-9_]+(:[0-9_]+)+(\.[0-9_]*)?")

LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

WRONG_TAGS = (AttributeError, LookupError, ValueError)
"""What the library's readers raise for a value that is none of the type that its tag names."""


class UnboundedError(ValueError):
    """A file that a reader would read for ever, or without end of memory."""


def yaml_bytes(path: Path) -> bytes:
    """The content of a file whose reading ends.

    Raises:
        UnboundedError: a limit of this module is broken; the message names the line, and the limit with its value.
        OSError: there is no such file, or it cannot be read.
        yaml.YAMLError: it is no YAML.
    """
    size = path.stat().st_size
    if kind := special_kind(path):
        raise UnboundedError(f"it is {kind}")
    if size > LARGEST_FILE:
        raise UnboundedError(f"it has {size:,} bytes, more than {LARGEST_FILE:,} (LARGEST_FILE)")
    content = path.read_bytes()
    _refuse_unbounded(content)
    return content


def doubled_key(content: bytes) -> str | None:
    """The place where a mapping of `yaml_bytes` has a key twice, of which readers take the last; None without any."""
    waiting, seen = [yaml.compose(content, Loader=LOADER)], set[int]()
    while waiting:
        node = waiting.pop()
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        names = [str(key.value) for key, _ in pairs]
        if twice := [
            key for (key, _), name in zip(pairs, names, strict=True) if names.count(name) > 1 and name != "<<"
        ]:
            return f"line {twice[-1].start_mark.line + 1}: the key '{twice[-1].value}' is there twice"
        if id(node) not in seen and isinstance(node, yaml.CollectionNode):
            waiting += [value for _, value in pairs] or node.value
        seen.add(id(node))
    return None


def _refuse_unbounded(content: bytes) -> None:
    """Counts nodes as the library's events come, which are made without recursion."""
    sizes: dict[str | None, int] = {}
    begun: list[tuple[str | None, int]] = []
    count = 0
    for event in yaml.parse(content, Loader=LOADER):
        if isinstance(event, yaml.AliasEvent):
            if any(event.anchor == anchor for anchor, _ in begun):
                raise UnboundedError(f"{_line(event)}: '*{event.anchor}' stands inside of what it names")
            count += sizes.get(event.anchor, 1)
        elif isinstance(event, yaml.CollectionStartEvent):
            begun.append((event.anchor, count))
            count += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = begun.pop()
            sizes[anchor] = count - before
        elif isinstance(event, yaml.ScalarEvent):
            count += 1
            sizes[event.anchor] = 1
            if event.value.count(":") >= MOST_PARTS and _PARTS.fullmatch(event.value):
                raise UnboundedError(f"{_line(event)}: a number of more than {MOST_PARTS} parts (MOST_PARTS)")
        if count > MOST_NODES:
            limit = f"more than {MOST_NODES:,} values (MOST_NODES)"
            raise UnboundedError(f"{_line(event)}: with aliases written out {limit}")
        if len(begun) > DEEPEST:
            raise UnboundedError(f"{_line(event)}: more than {DEEPEST} collections inside of each other (DEEPEST)")


def _line(event: Any) -> str:
    return f"line {event.start_mark.line + 1}"

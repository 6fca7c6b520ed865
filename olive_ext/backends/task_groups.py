"""Groups of tasks: what is refused of them before lm-eval, which follows their members without end, loads any. Knows no
model and loads no data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from olive_ext.backends.task_files import read_task
from olive_ext.backends.task_names import Spec, is_file
from olive_ext.errors import TaskError

MOST_TASKS = 10_000
"""Tasks that a group may stand for, one that is in several of its groups counted each time; lm-eval's largest group has
some hundreds, and lm-eval makes each of them as it loads a group."""

DEEPEST = 32
"""Groups inside of each other; lm-eval's have 4."""


def refuse_groups(specs: Sequence[Spec], index: Mapping[str, Any]) -> None:
    """Raises `TaskError` for a group among `specs`, or inside of one, that has no tasks, is a member of itself, or
    breaks a limit. `index` is lm-eval's, by name; members that it lacks count as tasks."""
    known: dict[str, int] = {}
    for spec in specs:
        if isinstance(spec, str) and is_file(spec) and (path := Path(spec).expanduser()).is_file():
            _num_tasks(read_task(path), index, known, ())
        else:
            _num_tasks(spec, index, known, ())


def _num_tasks(member: Any, index: Mapping[str, Any], known: dict[str, int], above: tuple[str, ...]) -> int:
    """The tasks that a member stands for; `known` are those of groups by name, `above` the groups that it is in."""
    config = _config(member, index)
    if config is None:
        return 1
    name, members = str(config.get("group")), config.get("task")
    if name in above:
        raise TaskError(f"group '{name}' is a member of itself: {' > '.join([*above[above.index(name) :], name])}")
    if len(above) >= DEEPEST:
        raise TaskError(f"group '{above[0]}' has more than {DEEPEST} groups inside of each other (DEEPEST)")
    if name not in known or isinstance(member, Mapping):
        if not isinstance(members, list) or not members:
            raise TaskError(f"group '{name}' has no tasks: 'task' = {members!r}; give a list of names")
        known[name] = sum(_num_tasks(item, index, known, (*above, name)) for item in members)
    if known[name] > MOST_TASKS:
        raise TaskError(f"group '{name}' stands for {known[name]:,} tasks: at most {MOST_TASKS:,} (MOST_TASKS)")
    return known[name]


def _config(member: Any, index: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What defines a group: where it is written, or in the index; None for a task and for a tag."""
    name = member.get("group", member.get("task")) if isinstance(member, Mapping) else member
    written = member if isinstance(member, Mapping) and "group" in member and "task" in member else None
    entry = index.get(name) if isinstance(name, str) and written is None else None
    config = written if entry is None else entry.cfg
    return config if isinstance(config, Mapping) and "group" in config and "class" not in config else None

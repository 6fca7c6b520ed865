"""The base of every configuration model: frozen, unknown keys refused by name with the nearest known one.

Field docstrings are the only place a setting is described: the JSON schema, the docs table and the Olive pass
parameters are made from them.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from typing_extensions import Self

from olive_ext.errors import ConfigError


class Strict(BaseModel):
    """A frozen model that refuses unknown keys; `parse` turns pydantic's report into one `ConfigError`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())

    @classmethod
    def parse(cls, values: Mapping[str, Any], where: str = "") -> Self:
        """Validates `values`; raises `ConfigError` with every problem, each naming key, value and what is accepted."""
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            problems = [_problem(cls, dict(item), where) for item in error.errors()]
            raise ConfigError("; ".join(dict.fromkeys(problems))) from error


def _problem(model: type[BaseModel], item: dict[str, Any], where: str) -> str:
    path = [str(part) for part in item["loc"]]
    key = ".".join([where, *path] if where else path)
    if item["type"] == "extra_forbidden":
        known = _fields_at(model, path[:-1])
        near = difflib.get_close_matches(path[-1], known, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(sorted(known))}"
        return f"unknown key '{key}': {hint}"
    message = item["msg"].removeprefix("Value error, ")
    return f"'{key}' = {item['input']!r}: {message}" if key else message


def _fields_at(model: type[BaseModel], path: list[str]) -> list[str]:
    current: type[BaseModel] = model
    for part in path:
        field = current.model_fields.get(part)
        annotation = field.annotation if field else None
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            current = annotation
    return list(current.model_fields)

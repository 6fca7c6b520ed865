"""Writes olive_ext/functions.pyi, which is what mypy and editors know of `olive_ext.evaluate` and the others: the
functions' own parameters, and a keyword with its type for each of the settings that they take (`config.base.takes`).
"""

from __future__ import annotations

import inspect
from textwrap import indent
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ByteSize
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

import olive_ext
from olive_ext.config.base import possible_path

_HEAD = '''"""What `olive_ext` exports. Made by docs/generate.py; do not edit."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from olive_ext.backends.lm_eval_run import LM
from olive_ext.check import Findings
from olive_ext.config import EvaluationConfig, ModelSettings
from olive_ext.plugins.diagnose.remedy.pages import Bill, LossMap
from olive_ext.plugins.diagnose.settings import LocationConfig, MendingConfig
from olive_ext.report import Report
from olive_ext.session.local import RecordTo
from olive_ext.session.opening import Reference
from olive_ext.session.session import Session
'''


def functions() -> str:
    """The file's text."""
    return "\n".join([_HEAD, *map(_function, olive_ext.__all__[1:])])


def _function(name: str) -> str:
    function = getattr(olive_ext, name)
    function = getattr(function, name, function)  # the room `check` has the function of its name
    shown = inspect.signature(function)
    lines, is_keyword = [], False
    for parameter in shown.parameters.values():
        if not is_keyword and parameter.kind is parameter.KEYWORD_ONLY:
            lines.append("    *,")
            is_keyword = True
        kind, has_default = parameter.annotation, parameter.default is not parameter.empty
        written = " | ".join(dict.fromkeys(_types(kind))) if isinstance(kind, FieldInfo) else kind
        lines.append(f"    {parameter.name}: {written}{' = ...' * has_default},")
    text = f'"""{inspect.cleandoc(function.__doc__)}\n"""'
    return "\n".join([f"def {name}(", *lines, f") -> {shown.return_annotation}:", indent(text, "    "), ""])


def _types(kind: Any) -> list[str]:
    """The types of what a caller may give for a setting."""
    if isinstance(kind, FieldInfo):
        kind = Annotated[(kind.annotation, *kind.metadata)] if kind.metadata else kind.annotation
    arguments, origin = get_args(kind), get_origin(kind)
    if origin is Annotated:
        before = [item for item in arguments[1:] if isinstance(item, BeforeValidator)]
        given = [item.json_schema_input_type for item in before if item.json_schema_input_type is not PydanticUndefined]
        is_path = any(item.func is possible_path for item in before)
        return ["str", "Path"] if is_path else _types((given or arguments)[0])
    if origin in (Union, UnionType):
        return [name for each in arguments for name in _types(each)]
    if origin is Literal:
        return [f"Literal[{', '.join(map(repr, arguments))}]".replace("'", '"')]
    if origin in (list, tuple):
        return [f"Sequence[{' | '.join(dict.fromkeys(_types(arguments[0]))) if origin is list else 'Any'}]"]
    if kind is ByteSize:
        return ["int", "str"]
    if origin is dict or (isinstance(kind, type) and issubclass(kind, BaseModel)):
        names_model = origin is not dict and "path" in kind.model_fields
        return [*["str", "Path"] * names_model, "Mapping[str, Any]"]
    return ["None" if kind is NoneType else kind.__name__]

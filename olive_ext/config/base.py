"""The base of every configuration model: frozen, unknown keys refused by name with the nearest known one. Field
docstrings alone describe a setting: the JSON schema, the docs table and Olive's pass parameters are made of them."""

from __future__ import annotations

import difflib
import inspect
import json
import os
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from olive_ext.errors import ConfigError, OliveExtError, combined
from olive_ext.registry import plugins

TASK_FILES = (".yaml", ".yml")
_NAME_BYTES, _PATH_BYTES = 255, 4095  # Linux's NAME_MAX, and PATH_MAX without its end
UNCLEAR_PATH = "unclear_path"
"""Type of an error whose message says all of a text that is to be a path, and means none, or two things."""


def word(value: Any) -> Any:
    """Gives back the word that Olive made an absolute path of. Before it runs a recipe Olive replaces every text that
    is also the name of a file or folder in the working directory: the task "mmlu" or the provider "cuda" where such a
    folder exists. Paths of YAML files, which tasks may be, stay."""
    if not isinstance(value, str) or value.lower().endswith(TASK_FILES):
        return value
    path = Path(value)
    return path.name if path.is_absolute() and path.exists() else value


def possible_path(value: Any) -> Any:
    """Refuses a text that can name no file, which would be an `OSError` wherever it is looked for."""
    if isinstance(value, str):
        is_text = not any("\ud800" <= letter < "\udc80" for letter in value)  # else a half of a character, from JSON
        raw = os.fsencode(value) if is_text else b"\0"
        if b"\0" in raw or len(raw) > _PATH_BYTES or any(len(name) > _NAME_BYTES for name in raw.split(b"/")):
            raise PydanticCustomError(UNCLEAR_PATH, "no file can have this name")
    return value


def without_paths(value: Any) -> Any:
    """`value` with the `pathlib` paths in it as texts, which is what settings are."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {name: without_paths(item) for name, item in value.items()}
    return [without_paths(item) for item in value] if isinstance(value, list) else value


def not_bool(value: Any) -> Any:
    """Refuses true and false."""
    if isinstance(value, bool):
        raise ValueError("true and false are no numbers")  # pydantic would take them for 1 and 0
    return value


def installed_runtime(name: str) -> str:
    """Refuses a name under which no plug-in has a runtime."""
    if not any(name in plugin.runtimes for plugin in plugins().values()):
        raise ValueError("no runtime of this name is installed")
    return name


InstalledRuntime = Annotated[
    str, Field(description="the name of a plug-in's runtime"), AfterValidator(installed_runtime)
]
PathText = Annotated[str, BeforeValidator(possible_path)]
Word = Annotated[str, BeforeValidator(word)]
Auto = Annotated[Literal["auto"], BeforeValidator(word)]
Int = Annotated[int, BeforeValidator(not_bool)]
Seed = Annotated[int, Field(ge=0, lt=2**32), BeforeValidator(not_bool)]
"""What all random generators take: numpy's have 32 bits."""

Slots = Annotated[int, Field(ge=1, le=2**16), BeforeValidator(not_bool)]
MOST_REPEATS = 10_000
"""Answers to one document: lm-eval makes a request for each, and published tasks ask for 200 at most."""

Repeats = Annotated[int, Field(ge=1, le=MOST_REPEATS), BeforeValidator(not_bool)]
PositiveInt = Annotated[int, Field(ge=1), BeforeValidator(not_bool)]
NonNegativeInt = Annotated[int, Field(ge=0), BeforeValidator(not_bool)]


class StrictModel(BaseModel):
    """A frozen model that refuses unknown keys; `parse` turns pydantic's report into one `ConfigError`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())

    other_words: ClassVar[Mapping[str, str]] = {}
    """Keys by what other calls name the same thing."""

    def written(self, names: Container[str] | None = None) -> dict[str, Any]:
        """The settings that were written, of `names` alone where these are given; no defaults."""
        own = (name for name in type(self).model_fields if name in self.model_fields_set)
        return {name: getattr(self, name) for name in own if names is None or name in names}

    @classmethod
    def parse(cls, values: Mapping[str, Any], where: str = "") -> Self:
        """Validates `values`; raises `ConfigError` with every problem, each naming key, value and what is accepted. Its
        code, field and value are the first problem's.

        `where` is put before each key, for instance "evaluators.mine".
        """
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            problems = [_problem(cls, dict(item), where, values) for item in error.errors()]
            raise combined(problems) from error


def _problem(model: type[BaseModel], item: dict[str, Any], where: str, values: Mapping[str, Any]) -> ConfigError:
    """The error for one entry of pydantic's report; all entries about one field give the same sentence.

    After the field, pydantic's `loc` goes on with the member of a union and the index in a list, one entry for each
    member that was tried; the sentence is about the whole field instead.
    """
    owner, names = _locate(model, item["loc"])
    key = ".".join([where, *names] if where else names)
    if item["type"] == "missing":
        return ConfigError(f"missing key '{key}'", key, code="missing")
    if item["type"] == "extra_forbidden":
        return ConfigError(f"unknown key '{key}': {_hint(names[-1], owner)}", key, item["input"], code="unknown_key")
    message = item["msg"].removeprefix("Value error, ")
    cause = item.get("ctx", {}).get("error")
    is_written = item["type"] == "value_error"
    is_whole = not names or names[-1] not in owner.model_fields  # the model itself, or an item of a list
    if (is_written and (is_whole or nested_model(owner, names[-1]) is not None)) or not names:
        code = cause.code if isinstance(cause, OliveExtError) else "contradiction"
        problem = ConfigError(f"{key}: {message}" if key else message, code=code)
        field = cause.field if isinstance(cause, OliveExtError) else ""
        return problem.about(".".join(filter(None, (key, field))), getattr(cause, "value", None))
    if is_whole:
        return ConfigError("give a mapping", key, item["input"])
    value: Any = values
    for name in names:
        value = value.get(name, item["input"]) if isinstance(value, Mapping) else item["input"]
    complaint = message if item["type"] == UNCLEAR_PATH else f"give {accepts(owner.model_fields[names[-1]])}"
    return ConfigError(complaint, key, value)


def _locate(model: type[BaseModel], loc: tuple[int | str, ...]) -> tuple[type[BaseModel], list[str]]:
    names: list[str] = []
    for part in loc:
        names.append(str(part))
        nested = model if isinstance(part, int) else nested_model(model, names[-1])
        if nested is None or len(names) == len(loc):
            break
        model = nested
    return model, names


def nested_model(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    """The model that field `name` of `model` holds: alone, in a list or in a union; None where it holds none."""
    field = model.model_fields.get(name)
    return _model_in(field.annotation) if field else None


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if get_origin(annotation) in (list, Annotated):
        return _model_in(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return next(filter(None, map(_model_in, get_args(annotation))), None)
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _hint(key: str, model: type[BaseModel]) -> str:
    if (meant := getattr(model, "other_words", {}).get(key)) is not None:
        return f"the key is '{meant}' here"
    known = sorted(model.model_fields)
    inside = [f"{name}.{key}" for name in known if key in getattr(nested_model(model, name), "model_fields", {})]
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.85) or inside
    near = near or difflib.get_close_matches(key, known, n=1)
    return f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(known)}"


_PLAIN = {"string": "a string", "boolean": "true or false", "integer": "an integer", "number": "a number"}


def accepts(field: FieldInfo) -> str:
    """What a field accepts in words, for error messages and for the docs table; for instance: a positive integer or
    "auto". That a key may be left out or null is not part of it."""
    return _words(TypeAdapter(field.rebuild_annotation()).json_schema())


def _words(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type")
    if "$ref" in schema or "properties" in schema:
        return "a mapping"
    if "description" in schema:
        return str(schema["description"])
    if branches := schema.get("anyOf"):
        return _or([_words(branch) for branch in branches if branch != {"type": "null"}])
    if values := schema.get("enum", [schema["const"]] if "const" in schema else []):
        return _or([json.dumps(value) for value in values])
    if "prefixItems" in schema:
        return f"a pair [{', '.join(map(_words, schema['prefixItems']))}]"
    if kind == "array":
        return f"a {'non-empty ' if schema.get('minItems') else ''}list, each item {_words(schema['items'])}"
    if kind == "object":
        values = schema.get("additionalProperties", True)
        return "a mapping" if values is True else f"a mapping of names, each to {_words(values)}"
    return _number(schema) or _PLAIN.get(kind or "", "anything")


def _number(schema: Mapping[str, Any]) -> str:
    """A number with bounds in words; empty without any."""
    least, most, above, below = map(schema.get, ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
    if schema.get("type") == "integer" and least is not None:
        most = most if below is None else below - 1
        if most is None:
            return "a positive integer" if least == 1 else f"an integer from {least}"
        return f"an integer from {least} to {most}"
    if above is not None:
        return f"a number above {above}" + ("" if below is None else f", below {below}")
    return "" if least is None else f"a number from {least} to below {below}"


def _or(words: list[str]) -> str:
    words = list(dict.fromkeys(words))
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


_Function = TypeVar("_Function", bound=Callable[..., Any])
_FIRST = ("tasks", "reference", "limit", "num_fewshot", "include_path", "output_dir")


def takes(settings: type[StrictModel]) -> Callable[[_Function], _Function]:
    """Shows a keyword for each of the `settings` in a function's signature, in place of its `**settings`, as help and
    editors have it: what people use first."""

    def showing(function: _Function) -> _Function:
        signature, fields = inspect.signature(function), settings.model_fields
        shown = list(signature.parameters.values())[:-1]
        for name in sorted(fields.keys() - signature.parameters.keys(), key=[*_FIRST, *fields].index):
            default = ... if fields[name].is_required() else fields[name].get_default(call_default_factory=True)
            keyword = inspect.Parameter.KEYWORD_ONLY
            shown.append(inspect.Parameter(name, keyword, default=default, annotation=fields[name]))
        function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
        return function

    return showing

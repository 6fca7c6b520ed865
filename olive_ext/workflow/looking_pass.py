"""What the passes of this package share: parameters are the fields of the settings, described by their docstrings.

Most look at a model, keep files with it, and hand it on unchanged. Knows no report and no map.
"""

from __future__ import annotations

import copy
import itertools
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from olive.model import ONNXModelHandler
from olive.passes import Pass
from olive.passes.pass_config import PassConfigParam
from pydantic.fields import FieldInfo

from olive_ext.config import PassSettings, Strict
from olive_ext.model.files.content import read_outline
from olive_ext.workflow.evaluation_cache import deciding, environment
from olive_ext.workflow.evaluator import surfaced
from olive_ext.workflow.handlers import additional_files
from olive_ext.workflow.preflight import FINGERPRINT, parse

_DESCRIPTION = "Set by the pass: versions and task files, so that Olive's cache notices when they change."


class OwnPass(Pass):  # type: ignore[misc]
    """A pass whose settings are a configuration model of this package."""

    settings_type: ClassVar[type[PassSettings]]
    bounds_decide: ClassVar[bool] = False
    """Whether bounds decide what the pass gives."""

    @classmethod
    def parameters(cls) -> dict[str, Any]:
        """Olive's parameters of the pass, one for each field of its settings, described by its docstring."""
        own = {
            name: PassConfigParam(
                type_=_annotated(field),
                required=field.is_required(),
                default_value=None if field.is_required() else _plain(field.get_default(call_default_factory=True)),
                description=" ".join((field.description or "").split()),
            )
            for name, field in cls.settings_type.model_fields.items()
        }
        return {**own, FINGERPRINT: PassConfigParam(type_=str, default_value=None, description=_DESCRIPTION)}

    @staticmethod
    def is_accelerator_agnostic(accelerator_spec: Any) -> bool:
        """A measurement belongs to the accelerator that it was made on."""
        return False

    @classmethod
    def _default_config(cls, accelerator_spec: Any) -> dict[str, Any]:
        return cls.parameters()

    @classmethod
    def get_config_params(
        cls, accelerator_spec: Any, config: dict[str, Any] | None = None, disable_search: bool | None = False
    ) -> Any:
        """Like Olive's; refuses unknown keys first, and adds the fingerprint, which becomes part of the cache key."""
        given = dict(config or {})
        marked = {**given, FINGERPRINT: environment(parse(cls.settings_type, given))}
        return super().get_config_params(accelerator_spec, marked, disable_search)

    @classmethod
    def get_config_class(cls, accelerator_spec: Any, disable_search: bool | None = False) -> Any:
        """Like Olive's, with a cache key that leaves out the settings which change no number."""
        made, default = super().get_config_class(accelerator_spec, disable_search)

        class Keyed(made):  # type: ignore[misc, valid-type]
            def to_json(self, *args: Any, **kwargs: Any) -> Any:
                return deciding(super().to_json(*args, **kwargs), bounds_decide=cls.bounds_decide)

        return Keyed, default

    def settings(self, config: Any) -> Any:
        """What a recipe wrote, of `settings_type`."""
        values, known = config.model_dump(), self.parameters()
        given = {name: value for name, value in values.items() if value != known[name].default_value}
        return parse(self.settings_type, copy.deepcopy(given))


class LookingPass(OwnPass):
    """Looks at a model, also at a composite one, which Olive gives to no evaluator. What it writes travels with the
    model as additional files."""

    _accepts_composite_model = True

    @abstractmethod
    def look(self, model: Any, settings: Any, folder: Path) -> Sequence[Path]:
        """Writes what is to be kept with the model into `folder`, under names that the numbers of earlier ones may be
        put into."""

    def run(self, model: Any, output_model_path: str) -> Any:
        """Like Olive's, but copies no files that travel with the model into its own folder, which is not ours."""
        return self._run_for_config(model, self.config, output_model_path)

    def _run_for_config(self, model: Any, config: Any, output_model_path: str) -> Any:
        """A copy of `model` whose `additional_files` also name what was written, which lies in `output_model_path`."""
        folder = folder_of(output_model_path)
        written = self.look(model, self.settings(config), folder)
        output = _kept_whole(copy.deepcopy(model))
        attributes = output.model_attributes or {}
        carried = additional_files(attributes)
        with surfaced(f"{written[0].stem.replace('_', ' ')} cannot be kept with the model"):
            files = _under_free_names(written, carried)
        output.model_attributes = {**attributes, "additional_files": sorted({str(file) for file in (*carried, *files)})}
        return output


def folder_of(output_model_path: str) -> Path:
    """Olive's place for a pass's output as a folder: it may name a file that is to be."""
    path = Path(output_model_path)
    return path.parent if path.suffix == ".onnx" else path


def _kept_whole(model: Any) -> Any:
    """The model, named by its folder where it is a file with external data: Olive would save the file without them."""
    if isinstance(model, ONNXModelHandler) and Path(model.get_resource("model_path")).is_file():
        path = Path(model.model_path)
        if any((path.parent / location).exists() for location in read_outline(path).locations):
            model.change_model_path_to_dir()
    return model


def _under_free_names(paths: Sequence[Path], carried: Sequence[Path]) -> list[Path]:
    """The files, under names that no file carried along has: a model may be looked at more than once."""
    taken = {file.name for file in carried}
    numbers = (n for n in itertools.count(1) if taken.isdisjoint(_numbered(path, n).name for path in paths))
    number = next(numbers)
    return [path.replace(_numbered(path, number)) for path in paths]


def _numbered(path: Path, number: int) -> Path:
    return path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")


def _annotated(field: FieldInfo) -> Any:
    """The field's type with its validators: a reference, for instance, may be written as a path."""
    parts: Any = (field.annotation, *field.metadata)
    return Annotated[parts] if field.metadata else field.annotation


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json", exclude_unset=True) if isinstance(value, Strict) else value

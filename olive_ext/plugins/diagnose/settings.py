"""The settings of a loss map and of a mended model: the work that shows the loss, the float model, how finely the loss
is located, and the loss or the size to keep."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, ByteSize, Field, model_validator
from typing_extensions import Self

from olive_ext.config.base import PathText, PositiveInt, StrictModel, Word, not_bool
from olive_ext.config.evaluation import EvaluationConfig, EvaluationSettings, WrittenBound
from olive_ext.config.work import ModelWork, PassSettings, Reference, TaskSettings
from olive_ext.errors import ContradictionError, MissingError


class LocationSettings(PassSettings):
    """Keys of the pass `OrtLossMap`."""

    tasks: Annotated[list[Word | dict[str, Any]], Field(min_length=1)]
    """lm-eval tasks: registered names, paths of task YAML files, inline task definitions."""

    reference: Reference
    """The float model that the quantized one was made of, in ONNX by the same exporter, so that nodes have the same
    names; or a Hugging Face model, of which onnxruntime-genai's builder makes one."""

    top: PositiveInt = 10
    """Documents are measured until it is certain which these many largest losses are."""

    resume: bool = True
    """Whether measurements that are in the journal, in `output_dir`, are taken from it."""

    output_dir: PathText | None = None
    """Folder for loss_map.json, loss_map.md and loss_map.html, and for the journal. None writes none."""

    @model_validator(mode="after")
    def _check_place(self) -> Self:
        if self.reference.mode == "resident":
            raise ContradictionError("'reference.mode' = 'resident': a loss map reads the reference's records")
        if self.workers is not None or self.isolation == "process":
            raise ContradictionError("'workers' and 'isolation' = 'process': a loss map is measured in its own process")
        return self

    def shared(self, other: type[TaskSettings]) -> dict[str, Any]:
        """The written settings that those of `other` have, too, but for its own folder, journal and bounds."""
        return self.written(other.model_fields.keys() - {"output_dir", "resume", "require"})

    def own(self) -> dict[str, Any]:
        """The written settings that an evaluation does not have, but for the folder, and the journal's."""
        return self.written(self.model_fields_set - self.shared(EvaluationSettings).keys() - {"output_dir", "model"})


class LocationConfig(ModelWork, LocationSettings):
    """A whole loss map: the settings and the model."""

    call: ClassVar[str] = "locate"

    def evaluation(self) -> EvaluationConfig:
        """The evaluation that asks the same documents of the same models."""
        return EvaluationConfig(model=self.model, **self.shared(EvaluationSettings))


Size = Annotated[ByteSize, Field(ge=1000, description='bytes, or a text such as "1.2GB"'), BeforeValidator(not_bool)]


class Within(StrictModel):
    """The loss to keep."""

    kl_mean: Annotated[float, Field(gt=0), BeforeValidator(not_bool)]
    """Mean divergence of the next-token distributions from the float model's, in nats a position."""


class MendingSettings(LocationSettings):
    """Keys of the pass `OrtMending`. Needs at least one of `within`, `at_most`, or a bound on kl_mean in
    `require`."""

    within: Within | None = None
    """The largest loss: the smallest model that keeps it is written."""

    at_most: Size | None = None
    """The largest size of graph and weights, in bytes or as "1.2GB": the model with the least loss in it is written,
    with `within` the smallest one that keeps both."""

    require: list[WrittenBound] = Field(default_factory=list)
    """As the pass OrtLMEvaluation takes it: the bound on "kl_mean" is taken for `within`; others are not for this
    pass."""

    @model_validator(mode="after")
    def _check_goal(self) -> Self:
        if type(self) is MendingSettings and self.output_dir is not None:
            raise ContradictionError("'output_dir': the model of a pass goes where Olive puts it", "output_dir")
        for bound in self.require:
            if bound.metric != "kl_mean" or bound.max is None or bound.task not in (None, "all"):
                raise ContradictionError(f"'{bound.metric}' is not bounded here: give 'max' of 'kl_mean'", "require")
        if self.within is None and self.at_most is None and not self.require:
            raise MissingError("give what the mended model is to keep: 'within' or 'at_most'")
        return self

    @property
    def most_kl(self) -> float | None:
        """The largest loss that was asked for."""
        bounds = [float(bound.max) for bound in self.require if bound.max is not None]
        return min([*bounds, *([self.within.kl_mean] if self.within is not None else [])], default=None)


class MendingConfig(ModelWork, MendingSettings):
    """A whole mended model: the settings, the quantized model and the folder for it."""

    call: ClassVar[str] = "mend"

    output_dir: PathText
    """Folder for the mended package, new or empty, with bill.json, bill.md and bill.html."""

    @property
    def unfinished(self) -> Path:
        """The hidden folder for what is measured and tried, until the model is complete."""
        output = Path(self.output_dir).absolute()
        return output.with_name(f".{output.name}.unfinished")

    def location(self) -> LocationConfig:
        """The loss map that decides."""
        values = {**self.shared(LocationConfig), "resume": self.resume}
        return LocationConfig(**values, output_dir=str(self.unfinished))

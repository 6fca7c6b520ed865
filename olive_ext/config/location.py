"""The settings of a loss map: the work that shows the loss, the float model, and how finely the loss is located."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator
from typing_extensions import Self

from olive_ext.config.base import Place, PositiveInt, Word, word
from olive_ext.config.evaluation import EvaluationConfig, EvaluationSettings
from olive_ext.config.execution import ExecutionSettings
from olive_ext.config.work import ModelWork, Reference, WorkSettings

NEEDS_ONNX = "a loss is located in a quantized ONNX model: put the pass behind one that makes it"


class LocationSettings(WorkSettings, ExecutionSettings):
    """Keys of the pass `OrtLossMap`."""

    tasks: Annotated[list[Word | dict[str, Any]], Field(min_length=1)]
    """lm-eval tasks: registered names, paths of task YAML files, inline task definitions."""

    reference: Reference
    """The float model that the quantized one was made of, in ONNX by the same exporter, so that nodes have the same
    names; or a Hugging Face model, of which onnxruntime-genai's builder makes one."""

    by: Annotated[Literal["node", "layer", "kind"], BeforeValidator(word)] = "node"
    """What is quantized together: the weight of one node, all of a layer, or all of one kind (mlp/down_proj)."""

    top: PositiveInt = 10
    """Documents are measured until it is certain which these many largest losses are."""

    resume: bool = True
    """Whether measurements that are in the journal, in `output_dir`, are taken from it."""

    output_dir: Place | None = None
    """Folder for loss_map.json, loss_map.md and loss_map.html, and for the journal. None writes none."""

    @model_validator(mode="after")
    def _check_place(self) -> Self:
        if self.reference.mode == "resident":
            raise ValueError("'reference.mode' = 'resident': a loss map reads the reference's records")
        if self.workers is not None or self.isolation == "process":
            raise ValueError("'workers' and 'isolation' = 'process': a loss map is measured in its own process")
        return self

    def shared(self, other: type[WorkSettings]) -> dict[str, Any]:
        """The written settings that those of `other` have, too, but for folder and journal, which are its own."""
        names = self.model_fields_set & other.model_fields.keys() - {"output_dir", "resume"}
        return {name: getattr(self, name) for name in names}

    def own(self) -> dict[str, Any]:
        """The written settings that an evaluation does not have, but for the folder, and the journal's."""
        names = self.model_fields_set - self.shared(EvaluationSettings).keys() - {"output_dir", "model"}
        return {name: getattr(self, name) for name in names}


class LocationConfig(ModelWork, LocationSettings):
    """A whole loss map: the settings and the model."""

    call: ClassVar[str] = "locate"

    def evaluation(self) -> EvaluationConfig:
        """The evaluation that asks the same documents of the same models."""
        return EvaluationConfig(model=self.model, **self.shared(EvaluationSettings))

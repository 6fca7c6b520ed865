"""The settings of an evaluation: the model, a reference to it, the tasks, and how lm-eval is driven.

`EvaluationSettings` holds the keys that an Olive evaluator and an Olive pass take; the model itself comes from Olive
there, and from `EvaluationConfig.model` on the command line and from Python.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from typing_extensions import Self

from olive_ext.config.base import NonNegativeInt, Place, PositiveInt, Seed, Strict, Word, not_bool, word
from olive_ext.config.certain import Certain, Number, implied
from olive_ext.config.model import ExecutionSettings, ModelConfig, ModelSettings, ProviderOptions, ProviderRequest

Limit = PositiveInt | Annotated[float, Field(gt=0, lt=1)]


INPUT_MODEL = "input_model"
"""Stands for the model that an Olive workflow started from."""


def _input_model(value: Any) -> Any:
    """Gives back the word where Olive made an absolute path of it: see `base.word`."""
    is_word = isinstance(value, str) and Path(value) == Path.cwd() / INPUT_MODEL
    return INPUT_MODEL if is_word else value


class ReferenceConfig(ModelConfig):
    """The reference model and how it is run. A text alone is its `path`."""

    path: Annotated[Place, BeforeValidator(_input_model)]
    """As `model.path`: an ONNX model, a package, a Hugging Face model; or "input_model" in an Olive recipe: the model
    the workflow started from."""

    execution_provider: ProviderRequest | None = None
    """Execution provider of the reference. None takes that of the evaluated model."""

    provider_options: ProviderOptions | list[ProviderOptions] | None = None
    """Options of the reference's providers. None takes those of the evaluated model where `execution_provider` is its
    too."""

    mode: Annotated[Literal["auto", "resident", "recorded"], BeforeValidator(word)] = "auto"
    """"resident" keeps both models open and compares whole distributions. "recorded" runs the reference alone first and
    keeps a compact form of its distributions on disk, for this and later runs. "auto" is "resident" where both models
    fit in the free memory and neither speed nor memory is to be measured; in a workflow with "input_model" it is
    "recorded", so that the input model is asked once, for its own row and for all output models."""

    export: Annotated[Literal["auto", "never"], BeforeValidator(word)] = "auto"
    """"auto" runs a Hugging Face model on the CPU as an ONNX export in fp32, which is made once for its content, kept
    in the user's cache, and trusted where it scores 20 requests as transformers do; what cannot be exported runs on
    transformers. "never" always runs it there. A Hugging Face model as the evaluated one goes the same way."""

    records_dir: Place | None = None
    """Folder of the records. None takes `olive_ext/records` in the user's cache folder ($XDG_CACHE_HOME, ~/.cache)."""

    top: PositiveInt | None = None
    """Recorded: the most likely tokens of a position that are kept with their log-probabilities. None takes a number
    by the vocabulary: all of at most 2048 tokens, else 16 to 64, so that records take 2 % of the logits."""

    drawn: Annotated[int, Field(ge=2), BeforeValidator(not_bool)] | None = None
    """Recorded: tokens drawn from the rest of a position's distribution, from which the rest of the divergence is
    estimated. None takes as many as `top`."""

    @property
    def is_input_model(self) -> bool:
        """Whether the reference is the workflow's input model, whose path is known only when the workflow runs."""
        return self.path == INPUT_MODEL


def _from_text(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


Reference = Annotated[
    ReferenceConfig,
    BeforeValidator(_from_text, json_schema_input_type=str | ReferenceConfig),
    Field(description="a path or a mapping"),
]
"""A reference as recipes write it: a path, or the mapping."""


class EvaluationSettings(ExecutionSettings):
    """Keys of the evaluator `OrtLMEvaluator` and of the pass `OrtLMEvaluation`. Those of Olive's LMEvaluator keep
    their names and meanings."""

    tasks: Annotated[list[Word | dict[str, Any]], Field(min_length=1)]
    """lm-eval tasks: registered names, paths of task YAML files, inline task definitions. `size_on_disk` adds the
    model's size, `peak_memory` the process's highest memory use (both in bytes), `tokens_per_second` the speed in
    tokens and in requests per second."""

    reference: Reference | None = None
    """The model to compare with: a path, or a mapping. Adds to the report how far the two models' next-token
    distributions are apart on the same tokens, and which answers flip."""

    matters: Annotated[float, Field(gt=0, lt=100), BeforeValidator(not_bool)] = 1.0
    """The loss that matters, for the verdict of a comparison: in percentage points of accuracy, in per cent of a
    perplexity. "No loss found" is said only where a loss of this size is excluded."""

    limit: Limit | None = None
    """Documents per task: a count, or a fraction below 1. None takes all."""

    documents: Annotated[Literal["all", "enough"], BeforeValidator(word)] = "all"
    """"enough" stops as soon as `certain` is decided: the reference answers all documents, the candidate only those
    that are drawn by how sure the reference is. Needs `reference`."""

    certain: Certain | None = None
    """What "enough" makes certain. None takes the bound in `require` on one of its metrics; without any a loss
    of accuracy that does not matter (`matters`)."""

    model_class: Annotated[Literal["hf", "ort", "ortgenai", "ort-multimodal"], BeforeValidator(word)] | None = None
    """Accepted so that a recipe ports by changing `type`: "ort", "ortgenai" and "ort-multimodal" all name this
    package's engine, "hf" the Hugging Face baseline. None decides by the model's files."""

    baseline: Annotated[Literal["auto", "lm_eval"], BeforeValidator(word)] = "auto"
    """What runs a Hugging Face model as the evaluated one: "auto" this package's engine in float32
    (`reference.export`), "lm_eval" lm-eval's own backend, as `model_args` do, which are that backend's."""

    model_args: dict[str, Any] = Field(default_factory=dict)
    """Extra keyword arguments for the lm-eval model's constructor (`OrtLM`, or `HFLM` for a baseline)."""

    num_fewshot: NonNegativeInt | None = None
    """Examples in the prompt. None takes each task's own number."""

    apply_chat_template: bool | Word = False
    """Wraps requests in the tokenizer's chat template; a string names one of several templates."""

    system_instruction: str | None = None
    """System prompt put before each request."""

    fewshot_as_multiturn: bool = False
    """Gives examples as turns of a conversation. Needs `apply_chat_template`."""

    gen_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Generation settings laid over those of every generation task (lm-eval's `gen_kwargs`)."""

    include_path: Place | list[Place] | None = None
    """Folders with your own task YAML files."""

    bootstrap_iters: NonNegativeInt = 100000
    """Resamples for the error bars that have no formula; 0 leaves those out."""

    sample_log_num: NonNegativeInt = 0
    """Documents of each task whose questions and answers are logged as JSON lines."""

    sample_log_dir: Place | None = None
    """Folder of those logs; by default `output_dir`."""

    use_cache: Place | None = None
    """Path stem of the journal, which keeps every answer so that an interrupted run resumes. Its file belongs to the
    model's content and to the settings that decide an answer. None takes `journal/answers` in `output_dir`, where that
    is given."""

    resume: bool | None = None
    """Whether answers that are in the journal are taken from it; with false they are computed anew. None takes them,
    except where `tokens_per_second` or `peak_memory` is measured."""

    on_error: Annotated[Literal["stop", "report"], BeforeValidator(word)] = "stop"
    """What becomes of requests that every worker crashed on (with `isolation` or `workers`), or whose picture or sound
    cannot be read: the others are evaluated and reported in any case, with what is missing; then "stop" fails, and
    "report" does not."""

    output_dir: Place | None = None
    """Folder for report.json, report.md and report.html. None writes none."""

    seed: Seed | None = None
    """Seed of few-shot sampling and of sampled generation. None takes lm-eval's own, so that the examples in a prompt
    are those of its other backends."""

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.fewshot_as_multiturn and self.apply_chat_template is False:
            raise ValueError("'fewshot_as_multiturn' needs 'apply_chat_template'")
        if self.documents == "enough" and self.reference is None:
            raise ValueError("'documents' = 'enough' needs 'reference': its answers say which documents to draw")
        if self.documents == "enough" and self.limit is not None:
            raise ValueError(f"'limit' = {self.limit:g} cannot go with 'documents' = 'enough', which stops by itself")
        if self.documents == "all" and self.certain is not None:
            raise ValueError("'certain' needs 'documents' = 'enough'")
        return self

    @property
    def claim(self) -> Certain:
        """What "enough" makes certain."""
        return self.certain or Certain(within=self.matters / 100)


class EvaluationConfig(EvaluationSettings):
    """A whole evaluation: the settings and the model."""

    model: ModelConfig
    """The model to evaluate."""

    def as_job(self) -> Self:
        """The evaluation as a job of its own, not a call in a Python program: `isolation` is decided."""
        if self.isolation != "auto":
            return self
        isolation = "none" if "peak_memory" in self.tasks else os.environ.get("OLIVE_EXT_ISOLATION", "process")
        return self.model_copy(update={"isolation": isolation})

    @property
    def journal(self) -> str | None:
        """Path stem of the journal; None where no place for it is given."""
        if self.use_cache is None and self.output_dir is not None:
            return str(Path(self.output_dir, "journal", "answers"))
        return self.use_cache

    def opening(self) -> ModelSettings:
        """The settings of opening the evaluated model. Where `model.kind` is "auto", `model_class` decides the kind:
        each of its values names the backend of one kind."""
        kind = self.model.kind
        if kind == "auto" and self.model_class is not None:
            kind = "hf" if self.model_class == "hf" else "onnx"
        shared = {name: getattr(self, name) for name in ExecutionSettings.model_fields}
        shared["deterministic"] = self.deterministic is not False
        which = {**self.model.model_dump(exclude={"path"}), "kind": kind}
        return ModelSettings(model=self.model.path, **which, **shared)

    def reference_patch(self) -> dict[str, Any]:
        """The settings in `reference` for opening the reference, as `ModelSettings.of_reference` takes them."""
        assert self.reference is not None
        names = ReferenceConfig.model_fields.keys() & ModelSettings.model_fields.keys()
        return {"model": self.reference.path, **{name: getattr(self.reference, name) for name in names}}


class Bound(Strict):
    """A number that a metric must not go beyond."""

    metric: Word
    """Name of the metric as a report has it, for instance "acc", "kl_mean", or a task's name that has one metric only
    ("size_on_disk")."""

    task: Word | None = None
    """The metric's task; "all" for a comparison with the reference over all tasks. May be left out where only one
    task has the metric, and for comparisons over all tasks."""

    filter: Word | None = None
    """lm-eval's filter, where the task has the metric once for each of several."""

    max: Number | None = None
    """Largest value that passes."""

    min: Number | None = None
    """Smallest value that passes."""

    @model_validator(mode="after")
    def _check_bounded(self) -> Self:
        if self.max is None and self.min is None:
            raise ValueError(f"give 'max' or 'min' for '{self.metric}'")
        if self.max is not None and self.min is not None and self.min > self.max:
            raise ValueError(f"'min' = {self.min:g} of '{self.metric}' is above 'max' = {self.max:g}")
        return self


class WorkflowSettings(EvaluationSettings):
    """All keys of the evaluator `OrtLMEvaluator` and of the pass `OrtLMEvaluation`."""

    require: list[Bound] = Field(default_factory=list)
    """Bounds on metrics; a broken one fails the workflow, behind the report and the model, which are kept. The pass
    judges the model that it measures. The evaluator judges output models, and the input model where there are no
    passes. In a search a candidate that breaks a bound is out."""

    @model_validator(mode="before")
    @classmethod
    def _settle_claim(cls, values: Any) -> Any:
        """The bound in `require` becomes the claim, which then goes wherever the settings go."""
        is_enough = isinstance(values, dict) and values.get("documents") == "enough"
        if not is_enough or values.get("certain") is not None:
            return values
        try:
            bounds = [Bound.model_validate(item) for item in values.get("require") or ()]
        except ValidationError:
            return values  # told with the field
        claim = implied(bounds)
        return values if claim is None else {**values, "certain": claim}

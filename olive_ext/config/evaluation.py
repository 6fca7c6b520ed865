"""What a user may say about an evaluation: the model, the tasks, the providers and how lm-eval is driven.

`EvaluationSettings` holds the keys that an Olive evaluator and an Olive pass take; the model itself comes from Olive
there, and from `EvaluationConfig.model` on the command line and from Python.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from typing_extensions import Self

from olive_ext.config.base import NonNegativeInt, PositiveInt, Strict, Word, word
from olive_ext.config.engine import EngineConfig
from olive_ext.config.reference import Reference

ProviderName = Word
ProviderOptions = Annotated[dict[str, str | int | float | bool], Field(description="a mapping of options")]
ProviderRequest = ProviderName | list[ProviderName | tuple[ProviderName, ProviderOptions]]
Limit = PositiveInt | Annotated[float, Field(gt=0, lt=1)]
BatchSize = PositiveInt | Annotated[str, Field(pattern=r"^auto(:\d+)?$", description='"auto"'), BeforeValidator(word)]


class ModelConfig(Strict):
    """Where the model is."""

    path: str
    """An .onnx file, a folder with one, a folder with genai_config.json, Olive's output folder, or a Hugging Face
    model (folder or hub name)."""

    kind: Literal["auto", "onnx", "hf"] = "auto"
    """"hf" runs the model through lm-eval's Hugging Face backend, as the baseline; "auto" tells by the files."""

    onnx_file_name: str | None = None
    """Which .onnx file in the folder, relative to it, where there are several."""


class EvaluationSettings(Strict):
    """Keys of the evaluator `OrtLMEvaluator` and of the pass `OrtLMEvaluation`. Those of Olive's LMEvaluator keep
    their names and meanings."""

    tasks: Annotated[list[Word | dict[str, Any]], Field(min_length=1)]
    """lm-eval tasks: registered names, paths of task YAML files, inline task definitions. `size_on_disk` adds the
    model's size, `peak_memory` the process's highest memory use (both in bytes), `tokens_per_second` the speed in
    tokens and in requests per second."""

    reference: Reference | None = None
    """The model to compare with: a path, or a mapping. Adds to the report how far the two models' next-token
    distributions are apart on the same tokens, and which answers flip."""

    limit: Limit | None = None
    """Documents per task: a count, or a fraction below 1. None takes all."""

    batch_size: BatchSize = "auto"
    """Sequences decoded together. "auto" (also "auto:N") lets the engine choose from the free memory."""

    max_length: PositiveInt | None = None
    """Longest context in tokens. None takes the model's own."""

    tokenizer: str | None = None
    """Folder or hub name of the tokenizer; by default the one found beside the model."""

    execution_provider: ProviderRequest | None = None
    """Execution provider: a short or full name, or a list of names or (name, options) pairs in order of preference.
    None takes what Olive hands over, then genai_config.json's, then the CPU."""

    provider_options: ProviderOptions | list[ProviderOptions] | None = None
    """Options of the first provider, or a list with one entry for each provider."""

    provider_libraries: dict[str, str] = Field(default_factory=dict)
    """Plugin provider libraries to register first: a name of your choice, and the library's path or the Python
    package that ships it (for instance "onnxruntime_ep_webgpu")."""

    allow_cpu_fallback: bool = False
    """With true a provider that is missing or was dropped by ONNX Runtime is a warning, and the CPU runs the model."""

    device: Word | None = None
    """Torch device of a Hugging Face baseline ("cpu", "cuda:0"). None takes what Olive hands over."""

    model_class: Annotated[Literal["hf", "ort", "ortgenai"], BeforeValidator(word)] | None = None
    """Accepted so that a recipe ports by changing `type`: "ort" and "ortgenai" both name this package's engine, "hf"
    the Hugging Face baseline. None tells by the model."""

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

    include_path: str | list[str] | None = None
    """Folders with your own task YAML files."""

    bootstrap_iters: NonNegativeInt = 100000
    """Resamples for the error bars that have no formula; 0 leaves those out."""

    sample_log_num: NonNegativeInt = 0
    """Documents of each task whose questions and answers are logged as JSON lines."""

    sample_log_dir: str | None = None
    """Folder of those logs; by default `output_dir`."""

    use_cache: str | None = None
    """Path stem of a database that keeps every answer, so that an interrupted run resumes. Keyed to the model's
    content."""

    output_dir: str | None = None
    """Folder for report.json, report.md and report.html. None writes none."""

    seed: NonNegativeInt | None = None
    """Seed of few-shot sampling and of sampled generation. None takes lm-eval's own, so that the examples in a prompt
    are those of its other backends."""

    engine: EngineConfig = Field(default_factory=EngineConfig)
    """Settings of the decoder runner."""

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.fewshot_as_multiturn and self.apply_chat_template is False:
            raise ValueError("'fewshot_as_multiturn' needs 'apply_chat_template'")
        return self


class EvaluationConfig(EvaluationSettings):
    """A whole evaluation: the settings and the model."""

    model: ModelConfig
    """The model to evaluate."""

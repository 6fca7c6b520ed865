"""The work that a model is asked to do: tasks, their documents, how they are asked, and a reference that does the same.

What is made of the answers, a report or a map of losses, is for those that inherit these settings.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from olive_ext.config.base import (
    UNCLEAR_PATH,
    NonNegativeInt,
    PathText,
    PositiveInt,
    Seed,
    StrictModel,
    Word,
    not_bool,
    without_paths,
    word,
)
from olive_ext.config.model import EngineConfig, ExecutionSettings, ModelConfig, ProviderOptions, ProviderRequest
from olive_ext.errors import ConfigError, ContradictionError, MissingError

Limit = PositiveInt | Annotated[float, Field(gt=0, lt=1)]

INPUT_MODEL = "input_model"
"""Stands for the model that an Olive workflow started from."""

AT_HAND = "auto"
"""Stands for the float ONNX model that a pass of an Olive workflow made of it."""

SAME_MODEL = "same_model"
"""Stands for the evaluated model itself, run in another place: on another provider, by another engine."""

NEEDS_ONNX = "a loss is located in a quantized ONNX model: put the pass after one that makes it"

RECORDS_SUFFIX = ".records"
"""Ends the name of a file with a reference's records."""

EXPORT = "export"
"""Stands for the float ONNX model that onnxruntime-genai's builder makes of a checkpoint."""


def _model_word(value: Any) -> Any:
    """Gives back the word where Olive made an absolute path of it: see `base.word`. Refuses what is no path here and
    near to a word: Olive would look for it on the hub after all passes."""
    words = (INPUT_MODEL, SAME_MODEL) if isinstance(value, str) else ()
    word_of_path = next((name for name in words if Path(value) == Path.cwd() / name), value)
    near = difflib.get_close_matches(Path(str(value)).name, words, n=1, cutoff=0.8)
    if near and word_of_path not in words and Path(value).parent in (Path(), Path.cwd()) and not Path(value).exists():
        raise PydanticCustomError(UNCLEAR_PATH, "did you mean '{name}'?", {"name": near[0]})
    return word_of_path


def _float_word(value: Any) -> Any:
    """As `_model_word`. Refuses a path here that has the name of another word: Olive may have made it of the word."""
    path = Path(value) if isinstance(value, str) else Path()
    if path.parent == Path.cwd() and path.name in (AT_HAND, EXPORT):
        raise PydanticCustomError(
            UNCLEAR_PATH,
            "the word '{name}', or what has that name in the working directory: rename that, or give the file in it",
            {"name": path.name},
        )
    return _model_word(value)


class ReferenceConfig(ModelConfig):
    """The reference model and how it is run. A text alone is its `path`."""

    path: Annotated[PathText, BeforeValidator(_model_word)]
    """As `model.path`: an ONNX model, a package, a Hugging Face model; a file NAME.records that `olive-ext record`
    wrote of one, here or elsewhere; "same_model": the evaluated model itself, in the place that the other keys name; or
    "input_model" in an Olive recipe: the model the workflow started from."""

    is_same_model: bool | None = None
    """True if the reference is the same model and may differ by rounding only. The verdict then says
    whether they are the same except for rounding, differ by rounding of the kernels, or differ, and where. None means
    true for "same_model" and for records of a model with the same content, else false."""

    engine: EngineConfig | None = None
    """Keys of `engine` for the reference: `runtime`, `num_threads`, `graph_optimization` and others. A key that is not
    named has the evaluated model's value if the reference is "same_model", else its default."""

    dtype: Annotated[Literal["auto", "float32", "float16", "bfloat16"], BeforeValidator(word)] | None = None
    """Data type of a Hugging Face reference's numbers. None takes float32, of "same_model" the evaluated model's."""

    device: Word | None = None
    """Torch device of a Hugging Face reference. None takes the evaluated model's."""

    repro: PathText | None = None
    """Folder for a minimal graph and its inputs, which show in plain ONNX Runtime where two places differ. Written
    where they do; None writes none."""

    execution_provider: ProviderRequest | None = None
    """Execution provider of the reference. None takes that of the evaluated model."""

    provider_options: ProviderOptions | list[ProviderOptions] | None = None
    """Options of the reference's providers. None takes those of the evaluated model where `execution_provider` is its
    too."""

    mode: Annotated[Literal["auto", "resident", "recorded"], BeforeValidator(word)] = "auto"
    """"resident" keeps both models open and compares whole distributions. "recorded" runs the reference alone first and
    keeps a compact form of its distributions on disk, for this and later runs. "auto" is "resident" if both models run
    on the CPU and fit in its free memory, and neither speed nor memory is measured. With a Hugging Face model as
    "input_model" it is "recorded", so that this is evaluated once, for its own row and for all output models."""

    export: Annotated[Literal["auto", "never"], BeforeValidator(word)] = "auto"
    """"auto" runs a Hugging Face model on the CPU as an ONNX export in fp32, which is made once for its content, kept
    in the user's cache, and trusted where it scores random texts as transformers do: 20 of up to 192 tokens, and one
    beyond each window of up to 1024 in its configuration. What cannot be exported runs on transformers. "never" always
    runs it there. A Hugging Face model as the evaluated one goes the same way."""

    records_dir: PathText | None = None
    """Folder of the records. None takes `olive_ext/records` in the user's cache folder ($XDG_CACHE_HOME, ~/.cache)."""

    top: PositiveInt | None = None
    """Recorded: the most likely tokens of a position that are kept with their log-probabilities. None takes a number
    by the vocabulary: all of at most 2048 tokens, else 16 to 64, so that records take 2 % of the logits."""

    drawn: Annotated[int, Field(ge=2), BeforeValidator(not_bool)] | None = None
    """Recorded: tokens drawn from the rest of a position's distribution, from which the rest of the divergence is
    estimated. None takes as many as `top`."""

    float_model: Annotated[PathText, BeforeValidator(_float_word)] | None = None
    """The float ONNX model between a Hugging Face reference and the evaluated model, a quantized form of it. In an
    Olive recipe also "input_model", or "auto": the last float ONNX model among those that the evaluated one was made
    from. "export" has onnxruntime-genai's builder make one in fp32, once, into the user's cache. The report then says
    what the conversion lost (reference to float) and what quantization did (float to evaluated), which takes an
    evaluation of each."""

    tokenizer: PathText | None = None
    """As the evaluated model's: a folder or a name on the hub. None takes the one beside the reference."""

    @model_validator(mode="after")
    def _check_records(self) -> Self:
        where = ("execution_provider", "provider_options", "engine", "dtype", "device", "top", "drawn", "repro")
        if self.is_records and (given := [name for name in where if getattr(self, name) is not None]):
            problem = f"records ('{self.path}') were made with settings of their own: leave it out"
            raise ContradictionError(problem, given[0])
        if self.is_records and self.mode == "resident":
            raise ContradictionError(f"'mode' = 'resident' cannot go with '{self.path}', which is recorded", "mode")
        return self

    @property
    def is_same(self) -> bool:
        """Whether the reference is the evaluated model itself."""
        return self.path == SAME_MODEL

    @property
    def is_records(self) -> bool:
        """Whether the reference is a file of records."""
        return self.path.endswith(RECORDS_SUFFIX)

    @property
    def is_input_model(self) -> bool:
        """Whether the reference is the workflow's input model, whose path is known only when the workflow runs."""
        return self.path == INPUT_MODEL


Reference = Annotated[
    ReferenceConfig,
    BeforeValidator(
        lambda value: {"path": value} if isinstance(value, str) else value, json_schema_input_type=str | ReferenceConfig
    ),
    Field(description="a path or a mapping"),
]
"""A reference as recipes write it: a path, or the mapping."""


class TaskSettings(StrictModel):
    """Which documents are asked, and how. Keys of Olive's LMEvaluator keep their names and meanings."""

    include_path: PathText | list[PathText] | None = None
    """Folders with your own task YAML files."""

    limit: Limit | None = None
    """Documents per task: a count, or a fraction below 1. None takes all."""

    num_fewshot: NonNegativeInt | None = None
    """Examples in the prompt. None takes each task's own number."""

    apply_chat_template: bool | Word = False
    """Wraps requests in the tokenizer's chat template; a string names one of several templates."""

    system_instruction: str | None = None
    """System prompt put before each request."""

    fewshot_as_multiturn: bool = False
    """Gives examples as turns of a conversation. Needs `apply_chat_template`."""

    metadata: dict[str, Any] = Field(default_factory=dict)
    """Laid over the metadata of every task (lm-eval's `metadata`), for tasks that make their documents by it: RULER's
    take "max_seq_lengths" and "tokenizer"."""

    gen_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Generation settings laid over those of every generation task (lm-eval's `gen_kwargs`)."""

    confirm_run_unsafe_code: bool = False
    """Runs tasks of code (HumanEval, MBPP): what the model writes is executed, on Linux alone, each answer in a process
    of its own without network, files, environment and more than little time and memory (docs/security.md)."""

    seed: Seed | None = None
    """Seed of few-shot sampling and of sampled generation. None takes lm-eval's own, so that the examples in a prompt
    are those of its other backends."""

    @model_validator(mode="after")
    def _check_turns(self) -> Self:
        if self.fewshot_as_multiturn and self.apply_chat_template is False:
            raise MissingError("'fewshot_as_multiturn' needs 'apply_chat_template'", "fewshot_as_multiturn")
        return self


class PassSettings(TaskSettings, ExecutionSettings):
    """The settings of all passes that ask a model."""

    if TYPE_CHECKING:  # declared, with their places among the others, by each
        tasks: list[str | dict[str, Any]]
        reference: ReferenceConfig | None


class ModelWork(StrictModel):
    """Work with the model that is to do it."""

    call: ClassVar[str] = "evaluate"
    """The function that takes these settings, for messages."""

    model: ModelConfig
    """The model to evaluate, or to look into."""

    @classmethod
    def of(cls, given: Mapping[str, Any] | str | Path | Self | None, settings: Mapping[str, Any]) -> Self:
        """The configuration from a call in Python: a model's path or a mapping of this class's keys, with `settings`
        laid over it, or these alone. A path stands for a model where a mapping is expected. Raises `ConfigError`."""
        if isinstance(given, cls):
            given = given.model_dump(exclude_unset=True)
        elif isinstance(given, str | Path):
            if "model" in settings:
                raise ContradictionError(f"{cls.call}: it is given twice, the other time as '{given}'", "model")
            given = {"model": given}
        elif given is not None and not isinstance(given, Mapping):
            problem = f"{type(given).__name__} is no model: give its path, or a mapping of settings"
            raise ConfigError(f"{cls.call}: {problem}")
        values = without_paths({**(given or {}), **settings})
        if isinstance(values.get("model"), str):
            values["model"] = {"path": values["model"]}
        return cls.parse(values)

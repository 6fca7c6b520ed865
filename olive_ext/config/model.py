"""Which model is opened, and how: the only declaration of these settings, which every entry inherits. Reads no file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator
from typing_extensions import Self

from olive_ext.config.base import (
    Auto,
    InstalledRuntime,
    NonNegativeInt,
    PathText,
    PositiveInt,
    Slots,
    StrictModel,
    Word,
    not_bool,
    word,
)
from olive_ext.errors import ContradictionError, MissingError

ProviderOptions = Annotated[dict[str, str | int | float | bool], Field(description="a mapping of options")]
ProviderRequest = Word | list[Word | tuple[Word, ProviderOptions]]
BatchSize = Slots | Annotated[str, Field(pattern=r"^auto(:\d+)?$", description='"auto"'), BeforeValidator(word)]


class EngineConfig(StrictModel):
    """Settings of the in-package decoder runner. They change speed and memory, never the numbers."""

    runtime: Annotated[Literal["auto", "onnxruntime", "genai"] | InstalledRuntime, BeforeValidator(word)] = "auto"
    """Which library runs the model. "onnxruntime" opens its graph in a session, with the KV cache, the batches and the
    scoring on the device. "genai" drives onnxruntime-genai, one sequence at a time, for packages that nothing else can
    run. "auto" takes "genai" where genai_config.json splits the decoder into a pipeline or has inputs of a fixed
    length; the execution's `runtime_origin` gives the reason. Other packages may bring runtimes."""

    num_slots: Slots | Auto = "auto"
    """Sequences whose KV cache is resident at once, and so the most that are decoded together. "auto" takes
    `batch_size` if a number, else as many as fit in a quarter of the host's free memory, by the longest request of each
    call, or in half of a CUDA device's, at most 64 (an evaluation counts half of all memory as free); 8 where free
    memory is not known. With packed steps sequences take blocks of that memory as they grow, at most 512; where it is
    full the last is computed again later (counted as `preemptions`). Where an allocation fails, half as many are
    taken."""

    chunk_size: PositiveInt | Auto = "auto"
    """Most tokens fed in one step; a longer prompt is fed in several. "auto" takes 1,024 on a device, the most over a
    paged cache on CUDA; on the CPU, and where steps have few shapes, 256 for a prompt, and for texts that are scored
    what costs least by a rule. The tokens of a picture or a sound are fed in one step: with "auto" the step is then as
    long as needed. With a number, a request with a larger picture or sound is an error; with `strict_shapes` a model is
    refused if all its pictures are larger."""

    scoring: Annotated[Literal["auto", "tree", "packed", "answers", "rows"], BeforeValidator(word)] = "auto"
    """How texts that are scored share a step. "tree" makes tree batches on the CPU: many texts after their common
    prefix in one step. "packed" fills steps with the tokens of many texts and prompts on CUDA and WebGPU, where
    attention over a paged cache takes the place of the graph's. "rows" computes one text after the other; "answers",
    too, but those that add only a few tokens to what is resident (the answers to one question) share steps of one token
    each. "auto" is "packed" where that is possible and agrees with the graph's attention when the model is opened; on
    the CPU it takes of "tree" and "rows" what is faster by a rule. Elsewhere it is "answers" where that agrees and is
    faster by a rule, else "rows". It is "rows" where activations are rounded to few bits (the numbers would differ by
    that rounding); the execution's `scoring` names the choice."""

    shapes: Annotated[Literal["auto", "any", "bucketed"], BeforeValidator(word)] = "auto"
    """Which shapes the steps have. "any" gives the model just the tokens that are to be computed. "bucketed" pads each
    step to a shape bucket, one of a few dozen shapes, and runs each bucket once when the KV slots are made, for
    providers that plan or compile for every new shape; texts are then scored one after the other. "auto" is "bucketed"
    on such providers, or with `strict_shapes`, and "any" elsewhere. Where the model is compared with a reference, or
    its KV cache is not written in place, the steps have any shape even with "bucketed"."""

    strict_shapes: bool = False
    """Raises an error for a step, or a run of an encoder, whose shape was not run beforehand, instead of counting it as
    `shapes_late`. Where a decoder's steps cannot have few shapes, it is about encoders alone, if there are any."""

    graph_capture: bool | Auto = "auto"
    """Captures steps in which every row decodes and replays them (CUDA graphs; WebGPU's graph capture). Packed steps
    are padded to 1, 2, 4, ... 64 rows, and run plainly with more; elsewhere all slots decode, steps are padded to shape
    buckets, and WebGPU needs a graph that was exported for it. A replay is compared with a plain step when the model is
    opened: where they differ, true is an error. "auto" captures packed steps on CUDA, unless that cannot be done or
    differs, which a note says; steps of other forms and devices run plainly."""

    overlaps_steps: bool | Auto = "auto"
    """Whether steps overlap (async scheduling): the next one, of greedy generations and of prompts that wait, is
    planned and begins before the tokens of the last one are read; the host looks for stops meanwhile. A sequence that
    has ended then costs one more row. "auto" overlaps steps on every device but the CPU, whose cores have enough to
    do; the execution's `overlaps_steps` names the choice. Steps never overlap in models that onnxruntime-genai or
    transformers run, nor where steps are padded to shape buckets (`shapes`; `graph_capture` but for packed steps)."""

    graph: Annotated[Literal["scoring_head", "untouched"], BeforeValidator(word)] = "scoring_head"
    """"scoring_head" opens the graph with the scored rows gathered after the last attention, or else before the LM
    head, and the log-probabilities computed on the device. "untouched" opens the file as it is and computes them in a
    second graph on the device; only KV caches that drop old positions (sliding_window_cache) are given their full
    length, and a total length that is the first row's becomes that of all rows, in both."""

    adapters: list[PathText] = Field(default_factory=list)
    """LoRA adapters (.onnx_adapter files) for a graph that takes their weights as inputs, all of them active on every
    run. The one setting here that changes the numbers."""

    encoder_provider: ProviderRequest | dict[Literal["vision", "audio"], ProviderRequest] | None = None
    """Execution provider of the encoders of pictures and sound, where it is not the decoder's: exporters give encoders
    operators that some providers lack. Its forms are those of `execution_provider`; a mapping names it for the "vision"
    and the "audio" encoder. None takes that of the encoder's section of genai_config.json or its package's variant,
    unless the decoder's is set elsewhere; else the decoder's. Features are copied to the decoder's device."""

    encoder_batch_rows: PositiveInt | Auto = "auto"
    """The most rows of features that an encoder of pictures or sound makes in one run. Items that wait are encoded
    together if a trial shows that each gets the features that it gets alone. An item with more rows runs alone. One run
    takes pictures of any size if their patches have a grid, sounds of any length if they have a mask (padding counts as
    rows), and otherwise 1, 2, 4, ... items of one shape. "auto" is 2048 on a device; on the CPU, and if `deterministic`
    is true, it encodes items one by one."""

    compiled_dir: PathText | Literal[False] | None = None
    """Folder of what execution providers compile (TensorRT's engines, EP context), kept by the graph's content, the
    provider with its options and version, and the device, so that a second run compiles nothing. None takes
    `olive_ext/compiled` in the user's cache folder ($XDG_CACHE_HOME, ~/.cache); false keeps nothing. Beyond 50 GB
    the entries that were unused for longest are deleted. A folder that `provider_options` or `session_options` name is
    used instead."""

    num_threads: PositiveInt | Auto = "auto"
    """Threads inside one operator (ONNX Runtime's intra_op_num_threads). "auto" leaves ONNX Runtime its default."""

    graph_optimization: Annotated[Literal["disable", "basic", "extended", "layout", "all"], BeforeValidator(word)] = (
        "all"
    )
    """ONNX Runtime's level of graph optimizations (its `graph_optimization_level`)."""

    session_options: dict[str, str] = Field(default_factory=dict)
    """ONNX Runtime session configuration entries, name to value, for instance
    {"session.intra_op.allow_spinning": "0"}."""

    @property
    def threads(self) -> int | None:
        """`num_threads`; None leaves a library its default."""
        return None if self.num_threads == "auto" else self.num_threads

    @model_validator(mode="after")
    def _check_steps(self) -> Self:
        """Refuses settings that need shape buckets together with settings that need steps of any shape."""
        few = ["'strict_shapes' = true"] if self.strict_shapes else []
        few += ["'shapes' = \"bucketed\""] if self.shapes == "bucketed" else []
        if self.graph_capture is True and self.scoring == "tree":
            raise ContradictionError("it excludes 'scoring' = \"tree\", whose steps have any shape", "graph_capture")
        if few and self.scoring in ("tree", "packed"):
            raise ContradictionError(f"{few[0]} excludes 'scoring' = \"{self.scoring}\", whose steps have any shape")
        if few and self.overlaps_steps is True:
            raise ContradictionError(f"{few[0]} excludes 'overlaps_steps' = true: its tokens come from the host")
        if self.strict_shapes and self.shapes == "any":
            raise ContradictionError("'strict_shapes' = true excludes 'shapes' = \"any\"", "strict_shapes")
        if self.graph_capture is True and self.graph == "untouched":
            raise ContradictionError("'graph_capture' = true excludes 'graph' = \"untouched\"", "graph_capture")
        return self


class WorkerSettings(StrictModel):
    """Ray actors, each with the model open. Needs the extra `[ray]`. A number alone is their `count`."""

    count: PositiveInt = 1
    """Number of workers. Results are the same bytes for any number if `engine.num_slots` is set, and for up to four
    workers on one machine's CPU. More workers divide the memory of slots, so fewer long sequences may share a step."""

    address: str | None = None
    """Address of the Ray cluster ("auto": the one that this machine belongs to). None starts Ray on this machine alone;
    an address at which there is no cluster is an error, never this machine instead."""

    resources: dict[str, Annotated[float, Field(gt=0), BeforeValidator(not_bool)]] = Field(default_factory=dict)
    """What each worker takes of a node, as Ray counts it: "CPU", "GPU", "memory" (bytes), or names of your own. A
    worker of a model on CUDA takes one GPU, others none, and its threads of the CPUs."""

    runtime_env: dict[str, Any] = Field(default_factory=dict)
    """Ray's runtime environment of the workers, for a cluster whose nodes do not have the package or the files."""

    start_timeout: PositiveInt = 600
    """Seconds to wait for workers. After that it is an error if the cluster has no room or a worker has not started."""


Workers = Annotated[
    WorkerSettings,
    BeforeValidator(
        lambda value: {"count": value} if isinstance(value, int | str) and not isinstance(value, bool) else value,
        json_schema_input_type=PositiveInt | WorkerSettings,
    ),
    Field(description="a number or a mapping"),
]
"""Workers as recipes write them: how many, or the mapping."""


class ExecutionSettings(StrictModel):
    """How a model is run: the settings that recipes, `OrtLM` and `olive_ext.open` share."""

    batch_size: BatchSize = "auto"
    """Sequences decoded together. "auto" (also "auto:N") lets the engine choose from the free memory."""

    max_length: PositiveInt | None = None
    """Longest context in tokens. None takes the model's own."""

    tokenizer: PathText | None = None
    """Folder or hub name of the tokenizer; by default the one beside the model, or up to three folders above."""

    execution_provider: ProviderRequest | None = None
    """Execution provider: a short or full name, or a list of names or (name, options) pairs in order of preference.
    None takes what Olive hands over, then genai_config.json's, then the CPU."""

    provider_options: ProviderOptions | list[ProviderOptions] | None = None
    """Options of the first provider, or a list with one entry for each provider."""

    provider_libraries: dict[str, str] = Field(default_factory=dict)
    """Plugin provider libraries to register first: a name of your choice, and the library's path or the Python
    package that ships it (for instance "onnxruntime_ep_webgpu")."""

    allow_cpu_fallback: bool = False
    """With true a provider that is missing, was dropped by ONNX Runtime, or computes nothing of the model, is a
    warning, and the CPU runs the model."""

    device: Word | None = None
    """Torch device of a Hugging Face model ("cpu", "cuda:0"). None takes what Olive hands over, else "cuda" where there
    is one, else "cpu". For an ONNX model `execution_provider` decides where it runs."""

    non_finite: Annotated[Literal["error", "report"], BeforeValidator(word)] = "error"
    """What happens where the model's output is NaN or infinite: "error" stops at the first such request and names it;
    "report" counts these requests and goes on; the verdict is then "cannot tell", and every bound is broken."""

    deterministic: bool | Auto = "auto"
    """With true two calls give the same bytes: no call uses what an earlier one has left in the KV cache, and slots
    follow from the device's whole memory. "auto" is true in every evaluation, and false in a Python session."""

    trust_remote_code: bool = False
    """Allows code of the model's folder to run: libraries of operators (`custom_ops_library` in genai_config.json), and
    Python of tokenizers and of Hugging Face models; of a reference's folder, too. The only such switch; without it
    such a model is refused."""

    engine: EngineConfig = Field(default_factory=EngineConfig)
    """Settings of the decoder runner."""

    isolation: Annotated[Literal["auto", "process", "none"], BeforeValidator(word)] = "auto"
    """"process" runs the model in a worker process, which is started again where it crashes, hangs or is killed: that
    costs the chunk of requests in flight. "auto" is "process" in a workflow and on the command line, except where
    `peak_memory` is measured, and "none" elsewhere; the environment's OLIVE_EXT_ISOLATION overrules it. lm-eval's
    own model is always in this process."""

    step_timeout: NonNegativeInt = 1800
    """Seconds without a completed step after which a worker counts as hung and is started again: the chunk in flight is
    run once more. 0 waits for ever."""

    workers: Workers | None = None
    """Runs the model on several workers, on this machine or a Ray cluster: how many, or a mapping."""


Kind = Annotated[Literal["auto", "onnx", "hf"], BeforeValidator(word)]
Components = dict[Literal["decoder", "embedding", "vision", "audio", "encoder", "first_step"], str]
"""Graphs of a model by what they do."""

_LIKE_THE_CANDIDATE = (
    *("device", "execution_provider", "provider_libraries", "allow_cpu_fallback", "batch_size", "max_length"),
    *("non_finite", "deterministic", "isolation", "step_timeout", "workers", "language", "speech_task"),
    "trust_remote_code",
)
"""Settings that a reference takes from the evaluated model: how a model is run, not which model it is."""


class ModelPath(StrictModel):
    """Where a model is."""

    other_words: ClassVar[Mapping[str, str]] = {"model": "path", "model_path": "path"}

    path: PathText
    """An .onnx file, a folder with one, a folder with genai_config.json, a model package of ONNX Runtime, Olive's
    output folder, or a Hugging Face model (folder or hub name)."""


class ModelChoice(StrictModel):
    """Which model is meant, where a path has several."""

    kind: Kind = "auto"
    """"hf" is a Hugging Face model, "onnx" a graph or a package of graphs; "auto" decides by the files."""

    onnx_file_name: str | None = None
    """Which .onnx file in the folder, relative to it, where there are several."""

    variant: Word | None = None
    """Which variant of an ONNX Runtime model package. None takes the one for the execution provider that is asked for,
    else the only one, else the one for the CPU."""

    components: Components = Field(default_factory=dict)
    """Which graph does what, where a model is several and neither their interfaces nor genai_config.json show it:
    "decoder", "embedding" (token ids to what the decoder takes), "vision" and "audio" (encoders of pictures and sound),
    or "encoder" and "first_step" of an encoder-decoder, each an .onnx file relative to the path. One that contradicts
    the graphs is refused."""


class ModelConfig(ModelChoice, ModelPath):
    """A model as recipes name it."""


class OpenSettings(ModelChoice, ExecutionSettings):
    """All settings of opening a model, whichever it is; `OrtLM`'s arguments inherit them."""

    max_batch_size: PositiveInt | None = None
    """The most sequences that a `batch_size` of "auto" may decode together, where memory allows more."""

    dtype: Annotated[Literal["auto", "float32", "float16", "bfloat16"], BeforeValidator(word)] = "float32"
    """Data type of a Hugging Face model's numbers; "auto" takes config.json's, else the type that it is stored in."""

    add_bos_token: bool | None = None
    """Whether texts are encoded with a BOS token in front. None leaves it to the tokenizer, as HFLM does."""

    prefix_token_id: NonNegativeInt | None = None
    """Token that stands for an empty context. None takes BOS, else EOS."""

    language: str | None = None
    """Language of what a model of speech hears, as its generation_config.json names it ("en"): the decoder begins with
    its token, with the task's, and without timestamps. None leaves that to `forced_decoder_ids` and the prompt."""

    speech_task: Annotated[Literal["transcribe", "translate"] | None, BeforeValidator(word)] = None
    """What a model of speech does with a `language`: write it down (None, too) or translate it."""


class ModelSettings(OpenSettings):
    """A model and how it is opened: what `olive_ext.open` takes, and what `model.resolve` resolves."""

    model: str
    """As `ModelConfig.path`."""

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str = "") -> Self:
        """From arguments: None counts as not given, paths become texts. Raises `ConfigError`."""
        named = {name: value for name, value in values.items() if value is not None}
        for name in {"model", "tokenizer"} & named.keys():
            named[name] = str(named[name])
        return cls.parse(named, where)

    @property
    def location(self) -> tuple[object, ...]:
        """The settings that determine a model's files, and whether these are trusted."""
        which = self.model, self.kind, self.onnx_file_name, self.variant, self.components
        return *which, self.execution_provider, self.tokenizer, self.trust_remote_code

    def of_reference(self, patch: str | Path | Mapping[str, Any]) -> Self:
        """The settings of a reference for this model: a path, or a mapping of settings.

        For settings that `patch` does not name, the reference takes this model's value if the setting is about how a
        model is run, and the default if it is about which model is run. Provider options are taken only together with
        the provider that they are for. Raises `ConfigError`.
        """
        named = dict(patch) if isinstance(patch, Mapping) else {"model": str(patch)}
        if "model" not in named:
            raise MissingError("give the model's path, or a mapping with the key 'model'", "reference")
        taken = {name: getattr(self, name) for name in _LIKE_THE_CANDIDATE}
        if named.get("execution_provider") is None:
            taken["provider_options"] = self.provider_options
        engine = {"num_threads": self.engine.num_threads, "chunk_size": self.engine.chunk_size}
        return self._with({**taken, "engine": engine}, named)

    def in_other_place(self, named: Mapping[str, Any]) -> Self:
        """The settings of this model in another place: these, with those that are `named` in their stead. Provider
        options go with their provider, and both with another variant. Raises `ConfigError`."""
        settings = self.model_dump(exclude_unset=True)
        if named.get("execution_provider") is not None or named.get("variant") is not None:
            settings.pop("provider_options", None)
        if named.get("variant") is not None:  # which is for a provider of its own
            settings.pop("execution_provider", None)
        return self._with(settings, {**named, "model": None, "kind": None, "components": None})

    def _with(self, settings: Mapping[str, Any], named: Mapping[str, Any]) -> Self:
        given = {name: value for name, value in named.items() if value is not None}
        if "engine" in given:
            engine = given["engine"]
            engine = engine if isinstance(engine, Mapping) else engine.model_dump(exclude_unset=True)
            given["engine"] = {**settings.get("engine", {}), **engine}
        return type(self).of({**settings, **given}, where="reference")

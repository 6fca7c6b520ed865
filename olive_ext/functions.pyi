"""What `olive_ext` exports. Made by docs/generate.py; do not edit."""

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

def check(
    target: str | Path,
    *,
    verify: bool = ...,
    against: str | Path | None = ...,
    tasks: Sequence[str | Mapping[str, Any]] = ...,
    reference: str | Path | Mapping[str, Any] | None = ...,
    limit: int | float | None = ...,
    num_fewshot: int | None = ...,
    include_path: str | Path | Sequence[str | Path] | None = ...,
    output_dir: str | Path | None = ...,
    batch_size: int | str = ...,
    max_length: int | None = ...,
    tokenizer: str | Path | None = ...,
    execution_provider: str | Sequence[str | Sequence[Any]] | None = ...,
    provider_options: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = ...,
    provider_libraries: Mapping[str, Any] = ...,
    allow_cpu_fallback: bool = ...,
    device: str | None = ...,
    non_finite: Literal["error", "report"] = ...,
    deterministic: bool | Literal["auto"] = ...,
    trust_remote_code: bool = ...,
    engine: Mapping[str, Any] = ...,
    isolation: Literal["auto", "process", "none"] = ...,
    step_timeout: int = ...,
    workers: int | Mapping[str, Any] | None = ...,
    apply_chat_template: bool | str = ...,
    system_instruction: str | None = ...,
    fewshot_as_multiturn: bool = ...,
    metadata: Mapping[str, Any] = ...,
    gen_kwargs: Mapping[str, Any] = ...,
    confirm_run_unsafe_code: bool = ...,
    seed: int | None = ...,
    matters: float = ...,
    fail_on_loss: float | None = ...,
    require: Sequence[str | Mapping[str, Any]] = ...,
    use_cache: str | Path | None = ...,
    resume: bool | None = ...,
    documents: Literal["all", "enough"] = ...,
    certain: Mapping[str, Any] | None = ...,
    model_class: Literal["hf", "ort", "ortgenai", "ort-multimodal"] | None = ...,
    model_args: Mapping[str, Any] = ...,
    repeats: int | None = ...,
    bootstrap_iters: int = ...,
    sample_log_num: int = ...,
    sample_log_dir: str | Path | None = ...,
    on_error: Literal["stop", "report"] = ...,
    model: str | Path | Mapping[str, Any] = ...,
) -> Findings:
    """What a recipe (.json, .yaml, .yml) or a model at `target` resolves to, without running it: print it. What is
    wrong is in its `errors`, what was lost in its `differences`, and the sentences of both in its `problems`.

    `settings` are keys of an evaluation of the model; with `tasks` its work is predicted. `verify` also runs the model
    and compares its log-probabilities with those of the untouched graph; `against`, a checkpoint, compares with that.
    Raises `ConfigError` for settings that are wrong in themselves.
    """

def evaluate(
    config: EvaluationConfig | Mapping[str, Any] | str | Path | None = ...,
    *,
    lm: LM | None = ...,
    progress: bool | None = ...,
    names: Mapping[str, str | None] = ...,
    tasks: Sequence[str | Mapping[str, Any]] = ...,
    reference: str | Path | Mapping[str, Any] | None = ...,
    limit: int | float | None = ...,
    num_fewshot: int | None = ...,
    include_path: str | Path | Sequence[str | Path] | None = ...,
    output_dir: str | Path | None = ...,
    batch_size: int | str = ...,
    max_length: int | None = ...,
    tokenizer: str | Path | None = ...,
    execution_provider: str | Sequence[str | Sequence[Any]] | None = ...,
    provider_options: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = ...,
    provider_libraries: Mapping[str, Any] = ...,
    allow_cpu_fallback: bool = ...,
    device: str | None = ...,
    non_finite: Literal["error", "report"] = ...,
    deterministic: bool | Literal["auto"] = ...,
    trust_remote_code: bool = ...,
    engine: Mapping[str, Any] = ...,
    isolation: Literal["auto", "process", "none"] = ...,
    step_timeout: int = ...,
    workers: int | Mapping[str, Any] | None = ...,
    apply_chat_template: bool | str = ...,
    system_instruction: str | None = ...,
    fewshot_as_multiturn: bool = ...,
    metadata: Mapping[str, Any] = ...,
    gen_kwargs: Mapping[str, Any] = ...,
    confirm_run_unsafe_code: bool = ...,
    seed: int | None = ...,
    matters: float = ...,
    fail_on_loss: float | None = ...,
    require: Sequence[str | Mapping[str, Any]] = ...,
    use_cache: str | Path | None = ...,
    resume: bool | None = ...,
    documents: Literal["all", "enough"] = ...,
    certain: Mapping[str, Any] | None = ...,
    model_class: Literal["hf", "ort", "ortgenai", "ort-multimodal"] | None = ...,
    model_args: Mapping[str, Any] = ...,
    repeats: int | None = ...,
    bootstrap_iters: int = ...,
    sample_log_num: int = ...,
    sample_log_dir: str | Path | None = ...,
    on_error: Literal["stop", "report"] = ...,
    model: str | Path | Mapping[str, Any] = ...,
) -> Report:
    """Runs an evaluation and returns its report; writes the report and sample logs where `config` names folders.

    `config` is a model's path with the other keys as keywords (`evaluate("model.onnx", tasks=["mmlu"], limit=50)`), a
    mapping of all keys, or an `EvaluationConfig`; keywords are laid over the last two, and alone are all keys.
    `settings` are all other keys of a recipe's evaluator. `lm` stands in for the model that `config` names, and stays
    open. `names` are those that people use for the "model" and the "reference", where these are not their paths.
    `progress` shows bars on a terminal, else a line a minute on stderr; None shows it on a terminal only. Every
    failure but an interruption is an `OliveExtError`; what does not exist (model, provider, folder, task) is noticed
    before the model is opened. Answers are journaled as they come; all else is written when all is done. A broken
    bound (`fail_on_loss`, `require`) is a `RequirementError` that has the `report`.
    """

def locate(
    config: LocationConfig | Mapping[str, Any] | str | Path,
    *,
    progress: bool | None = ...,
    tasks: Sequence[str | Mapping[str, Any]] = ...,
    reference: str | Path | Mapping[str, Any] = ...,
    limit: int | float | None = ...,
    num_fewshot: int | None = ...,
    include_path: str | Path | Sequence[str | Path] | None = ...,
    output_dir: str | Path | None = ...,
    batch_size: int | str = ...,
    max_length: int | None = ...,
    tokenizer: str | Path | None = ...,
    execution_provider: str | Sequence[str | Sequence[Any]] | None = ...,
    provider_options: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = ...,
    provider_libraries: Mapping[str, Any] = ...,
    allow_cpu_fallback: bool = ...,
    device: str | None = ...,
    non_finite: Literal["error", "report"] = ...,
    deterministic: bool | Literal["auto"] = ...,
    trust_remote_code: bool = ...,
    engine: Mapping[str, Any] = ...,
    isolation: Literal["auto", "process", "none"] = ...,
    step_timeout: int = ...,
    workers: int | Mapping[str, Any] | None = ...,
    apply_chat_template: bool | str = ...,
    system_instruction: str | None = ...,
    fewshot_as_multiturn: bool = ...,
    metadata: Mapping[str, Any] = ...,
    gen_kwargs: Mapping[str, Any] = ...,
    confirm_run_unsafe_code: bool = ...,
    seed: int | None = ...,
    top: int = ...,
    resume: bool = ...,
    model: str | Path | Mapping[str, Any] = ...,
) -> LossMap:
    """The loss map of a quantized model; written where `config` names a folder.

    `config` is the model's path with the other keys as keywords (`locate("int4", reference="float", tasks=["mmlu"])`),
    a mapping of all keys, or a `LocationConfig`; keywords are laid over the last two. `progress` shows bars on a
    terminal, else a line a minute on stderr; None shows it on a terminal only. Every failure but an interruption is an
    `OliveExtError`. With a folder an interrupted call goes on where it was.
    """

def mend(
    config: MendingConfig | Mapping[str, Any] | str | Path,
    *,
    progress: bool | None = ...,
    tasks: Sequence[str | Mapping[str, Any]] = ...,
    reference: str | Path | Mapping[str, Any] = ...,
    limit: int | float | None = ...,
    num_fewshot: int | None = ...,
    include_path: str | Path | Sequence[str | Path] | None = ...,
    output_dir: str | Path = ...,
    batch_size: int | str = ...,
    max_length: int | None = ...,
    tokenizer: str | Path | None = ...,
    execution_provider: str | Sequence[str | Sequence[Any]] | None = ...,
    provider_options: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = ...,
    provider_libraries: Mapping[str, Any] = ...,
    allow_cpu_fallback: bool = ...,
    device: str | None = ...,
    non_finite: Literal["error", "report"] = ...,
    deterministic: bool | Literal["auto"] = ...,
    trust_remote_code: bool = ...,
    engine: Mapping[str, Any] = ...,
    isolation: Literal["auto", "process", "none"] = ...,
    step_timeout: int = ...,
    workers: int | Mapping[str, Any] | None = ...,
    apply_chat_template: bool | str = ...,
    system_instruction: str | None = ...,
    fewshot_as_multiturn: bool = ...,
    metadata: Mapping[str, Any] = ...,
    gen_kwargs: Mapping[str, Any] = ...,
    confirm_run_unsafe_code: bool = ...,
    seed: int | None = ...,
    top: int = ...,
    resume: bool = ...,
    within: Mapping[str, Any] | None = ...,
    at_most: int | str | None = ...,
    require: Sequence[str | Mapping[str, Any]] = ...,
    model: str | Path | Mapping[str, Any] = ...,
) -> Bill:
    """Writes the mended model into `output_dir`, with its bill, which is returned.

    `config` is the model's path with the other keys as keywords
    (`mend("int4", reference="float", tasks=["mmlu"], within={"kl_mean": 0.01}, output_dir="mended")`), a mapping of all
    keys, or a `MendingConfig`. Every failure but an interruption is an `OliveExtError`: `RequirementError` where no
    model keeps the bound, within the size. Then nothing is left behind. Whether documents that chose nothing confirm
    the bound is the bill's `verdict`.

    What has been measured lies in a hidden folder beside `output_dir` until the call ends: one that was interrupted, or
    that the machine made fail, goes on from it when it is made again.
    """

def open(
    model: str | Path | ModelSettings,
    *,
    reference: Reference | None = ...,
    record_to: RecordTo | None = ...,
    batch_size: int | str = ...,
    max_length: int | None = ...,
    tokenizer: str | Path | None = ...,
    execution_provider: str | Sequence[str | Sequence[Any]] | None = ...,
    provider_options: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = ...,
    provider_libraries: Mapping[str, Any] = ...,
    allow_cpu_fallback: bool = ...,
    device: str | None = ...,
    non_finite: Literal["error", "report"] = ...,
    deterministic: bool | Literal["auto"] = ...,
    trust_remote_code: bool = ...,
    engine: Mapping[str, Any] = ...,
    isolation: Literal["auto", "process", "none"] = ...,
    step_timeout: int = ...,
    workers: int | Mapping[str, Any] | None = ...,
    kind: Literal["auto", "onnx", "hf"] = ...,
    onnx_file_name: str | None = ...,
    variant: str | None = ...,
    components: Mapping[str, Any] = ...,
    max_batch_size: int | None = ...,
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = ...,
    add_bos_token: bool | None = ...,
    prefix_token_id: int | None = ...,
    language: str | None = ...,
    speech_task: Literal["transcribe", "translate"] | None = ...,
) -> Session:
    """Opens the model at `model`: an ONNX file or folder, a genai package, Olive's output folder, or a Hugging Face
    model, which runs on transformers in `dtype` on `device`; `kind` "onnx" or "hf" chooses where a folder has both.

    `settings` mean what the keys of the same name mean in a recipe: the fields of `ModelSettings`, an object of which
    may take their place. Raises `ConfigError`, `ModelError` or `ProviderError`, and `TypeError` for an unknown name.

    With a `reference` every score has in `compared` how far the two models' distributions are apart. `reference` is a
    path, a mapping of arguments of this function (what it leaves out of providers, threads and lengths is taken from
    this call), or the `Records` of a reference. `record_to`, a folder or a mapping ("folder", "top", "drawn", "seed"),
    makes this model a reference: its distributions are kept on disk, and candidates are opened with `Session.records`.
    """

"""Peers: lm-eval's own backends and Olive's, which ours is compared with, opened on the same model with as many
threads; and the requests that lm-eval makes of a model, recorded by a stand-in, so that all of them get the same ones.
Knows no clock.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from olive_ext.backends.lm_eval import OrtLM
from olive_ext.backends.lm_eval_patches import replaced
from olive_ext.backends.lm_eval_run import run_tasks
from olive_ext.backends.task_loading import load_tasks
from olive_ext.config import EvaluationSettings, ModelSettings
from olive_ext.errors import TaskError
from olive_ext.model import resolve
from olive_ext.session.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Opening:
    """The arguments with which every backend is opened. None leaves a backend its own default."""

    model: str
    hf: str | None = None
    batch_size: int | None = None
    num_threads: int | None = None
    execution_provider: str | None = None
    provider_options: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    dtype: str = "auto"
    max_length: int | None = None
    add_bos_token: bool | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)


def refuse_code() -> None:
    """Has transformers refuse a folder's Python in this process where nothing was said of it: lm-eval's ONNX backends
    and Olive's say nothing, and it would ask on the terminal."""
    from transformers import dynamic_module_utils

    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0


def open_backend(name: str, opening: Opening) -> LM:
    """Opens one of lm-eval's backends, or ours; exceptions of the backend pass unchanged."""
    if name in ("onnxruntime", "onnxruntime-genai"):
        return _open_onnx(name, opening)
    return _open_hf(opening) if name == "hf" else _open_ours(opening)


def feed_our_tokens(lm: Any, opening: Opening) -> None:
    """Has a peer encode texts as our backend does. By themselves lm-eval's ONNX backends and Olive's leave out the BOS
    token that a tokenizer adds, and hf scores it as text in rolling log-likelihoods."""
    folder = resolve(ModelSettings(model=opening.model, kind="onnx")).files.tokenizer
    tokenizer = load_tokenizer(folder, add_bos_token=opening.add_bos_token)
    ask_rolling, is_rolling = lm.loglikelihood_rolling, [False]

    def tok_encode(string: str, *_: Any, add_special_tokens: bool | None = None, **__: Any) -> list[int]:
        return tokenizer.encode(string, False if is_rolling[0] else add_special_tokens)

    def loglikelihood_rolling(*arguments: Any, **options: Any) -> Any:
        is_rolling[0] = True
        try:
            return ask_rolling(*arguments, **options)
        finally:
            is_rolling[0] = False

    lm.tok_encode, lm.loglikelihood_rolling = tok_encode, loglikelihood_rolling


def _open_ours(opening: Opening) -> LM:
    threads = {} if opening.num_threads is None else {"num_threads": opening.num_threads}
    return OrtLM(
        opening.model,
        batch_size=opening.batch_size or "auto",
        execution_provider=opening.execution_provider,
        provider_options=dict(opening.provider_options) or None,
        max_length=opening.max_length,
        add_bos_token=opening.add_bos_token,
        engine={**opening.engine, **threads},
    )


def _open_hf(opening: Opening) -> LM:
    import torch
    from lm_eval.models.huggingface import HFLM

    if opening.num_threads is not None:
        torch.set_num_threads(opening.num_threads)
    return HFLM(
        opening.hf,
        device=opening.device,
        dtype=opening.dtype,
        batch_size=opening.batch_size or 1,
        max_length=opening.max_length,
        add_bos_token=opening.add_bos_token,
    )


def _open_onnx(name: str, opening: Opening) -> LM:
    from lm_eval.models.onnxruntime_genai import ONNXRuntimeGenAILM
    from lm_eval.models.onnxruntime_ort import ONNXRuntimeLM

    with fixed_threads(opening.num_threads):
        return {"onnxruntime": ONNXRuntimeLM, "onnxruntime-genai": ONNXRuntimeGenAILM}[name](
            opening.model,
            execution_provider=opening.execution_provider,
            max_length=opening.max_length,
            provider_options=dict(opening.provider_options),
        )


@contextmanager
def fixed_threads(number: int | None) -> Iterator[None]:
    """Inside, ONNX Runtime and onnxruntime-genai open models with `number` threads: no peer has a setting for it. None
    changes nothing."""
    if number is None:
        yield
        return
    import onnxruntime
    import onnxruntime_genai

    kept_session, kept_config = onnxruntime.InferenceSession, onnxruntime_genai.Config

    def session(path: Any, sess_options: Any = None, **options: Any) -> Any:
        sess_options = sess_options or onnxruntime.SessionOptions()
        sess_options.intra_op_num_threads = number
        return kept_session(path, sess_options, **options)

    def config(path: str) -> Any:
        made = kept_config(path)
        made.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": number}}}}))
        return made

    with replaced(onnxruntime, "InferenceSession", session), replaced(onnxruntime_genai, "Config", config):
        yield


def open_olive(name: str, opening: Opening, staging: Path) -> Any:
    """Opens Olive's `ort` or `ortgenai`; exceptions of the backend pass unchanged.

    `ort` requires a Hugging Face configuration in the graph's folder, which onnxruntime-genai's builder does not write:
    the model's files are linked into `staging`, and the configuration of `opening.hf` is put there.
    """
    from olive.evaluator.lmeval_ort import LMEvalORTEvaluator, LMEvalORTGenAIEvaluator

    batch_size, provider = opening.batch_size or 1, opening.execution_provider
    where = {"execution_provider": provider, "provider_options": dict(opening.provider_options) or None}
    model = resolve(ModelSettings.of({"model": opening.model, "kind": "onnx", **where}))
    files = model.files
    with fixed_threads(opening.num_threads):
        if name == "olive-ort":
            graph = files.decoder
            if not files.hf_config and opening.hf is not None:
                graph = _beside_config(files.decoder, Path(opening.hf), staging)
            first = model.providers[0]
            lm = LMEvalORTEvaluator(
                str(graph),
                batch_size=batch_size,
                max_length=opening.max_length,
                ep=first.name,
                ep_options=dict(first.options),
            )
            _ = lm.prefill.session  # opened here and not inside the clock
            return lm
        return LMEvalORTGenAIEvaluator(
            str(files.directory),
            batch_size=batch_size,
            max_length=opening.max_length,
            ep=provider or "follow_config",
            ep_options={key: str(value) for key, value in opening.provider_options.items()},
        )


def _beside_config(graph: Path, hf: Path, staging: Path) -> Path:
    """The graph in `staging`, together with its weights, its tokenizer and `hf`'s configuration."""
    staging.mkdir(parents=True, exist_ok=True)
    for file in (*graph.parent.iterdir(), hf / "config.json"):
        link = staging / file.name
        if not file.is_file() or link.exists():
            continue
        try:
            os.link(file.resolve(), link)  # ONNX Runtime refuses weights that are reached by a link
        except OSError:  # another file system
            shutil.copyfile(file, link)
    return staging / graph.name


Kind = Literal["loglikelihood", "loglikelihood_rolling", "generate_until"]


@dataclass(frozen=True)
class RecordedRequest:
    """One request: lm-eval's arguments, and the task and document to which it belongs."""

    kind: Kind
    args: tuple[Any, ...]
    task: str
    document: int


class _Recorder(LM):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.requests: list[RecordedRequest] = []

    def _keep(self, kind: Kind, requests: Sequence[Instance]) -> None:
        for one in requests:
            if len(one.args) > 2:
                raise TaskError(f"task '{one.task_name}' asks with images or sound, which is not compared")
            args = copy.deepcopy(tuple(one.args))
            self.requests.append(RecordedRequest(kind, args, str(one.task_name), int(one.doc_id)))

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        self._keep("loglikelihood", requests)
        return [(-1.0, False)] * len(requests)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        self._keep("loglikelihood_rolling", requests)
        return [-1.0] * len(requests)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        self._keep("generate_until", requests)
        return [""] * len(requests)


def record(settings: EvaluationSettings) -> list[RecordedRequest]:
    """The requests of the tasks, in lm-eval's order. Raises `TaskError`."""
    recorder = _Recorder()
    tasks = load_tasks(settings.tasks, settings.include_path, settings.seed)
    run_tasks(recorder, tasks, settings.model_copy(update={"bootstrap_iters": 0}))
    if not recorder.requests:
        raise TaskError(f"tasks {settings.tasks} ask nothing of a model")
    return recorder.requests


def instances(requests: Sequence[RecordedRequest]) -> list[Instance]:
    """Requests of one kind as lm-eval passes them to a model: copies, since the model may change them."""
    return [
        Instance(one.kind, {}, copy.deepcopy(one.args), index, metadata=(one.task, one.document, 1))
        for index, one in enumerate(requests)
    ]

"""A Hugging Face model as ONNX, so that a baseline or a reference runs as fast as the evaluated model.

onnxruntime-genai's builder makes it in a process of its own, in fp32 as transformers computes it, once for each content
and version; it is kept in the user's cache. It is used only where it scores as transformers does. Knows no task.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
from filelock import FileLock

from olive_ext.engine.runners.hf_runner import PlainPass
from olive_ext.engine.runtimes import stated_type
from olive_ext.errors import OliveExtError, first_line
from olive_ext.model import ResolvedModel
from olive_ext.package_versions import installed
from olive_ext.python_processes import module_command
from olive_ext.records.files import cache_folder, make_own_folder
from olive_ext.report.report_files import whole_folder
from olive_ext.session import Session
from olive_ext.session.opening import open_model

BUILDER, MODULE = "onnxruntime-genai", "onnxruntime_genai.models.builder"
NUM_REQUESTS, LONGEST = 20, 192
"""The number of requests that both score before an export is used, and the tokens of the longest."""

FARTHEST = 1282
"""The most tokens of a text that is scored for a length in the checkpoint's configuration, such as a window of 1024."""

LARGEST_DIFFERENCE = 1e-3
"""Nats between a token's log-probabilities that are rounding in fp32; wrong graphs are off by 0.1 and more."""

_MEMORY_FACTOR, _DISK_FACTOR = 3.0, 2.0
"""Free memory and disk space that a build may need, in multiples of the weights in fp32."""

_CHECKED = "compared.json"
_DIGEST = "digest"
_SECONDS = 3600


def exported(
    model: ResolvedModel, root: Path | None = None, tell: Callable[[str], object] = str
) -> tuple[ResolvedModel, str]:
    """`model`, a Hugging Face one, as ONNX where that can be made and scores alike, with a sentence on how it was made;
    else the model itself, and why. `tell` is called before a build, which may take minutes."""
    reason = obstacle(model)
    if reason is None:
        try:
            folder, checked, how = _made(model, root or cache_folder("exports"), tell)
            if (off := checked["largest_difference"]) <= LARGEST_DIFFERENCE:
                near = f"within {off:.1g} nats of transformers on {checked['requests']} requests"
                return _of(model, folder), f"exported to ONNX {how} ('{folder}'), {near}"
            reason = f"{BUILDER}'s export of it scores up to {off:.2g} nats off transformers"
        except (OliveExtError, OSError) as error:
            reason = first_line(error)
    how = f"dtype {model.settings.dtype}; {stated_type(model.files)}"
    return model, f"runs on transformers ({how}), not exported: {reason}"


def float_export(model: ResolvedModel, tell: Callable[[str], object] = str) -> Path:
    """The folder of `model`, a Hugging Face one, as ONNX in fp32, whatever it scores. Raises `OliveExtError` where it
    cannot be made. `tell` is as in `exported`."""
    model = model.patched({"dtype": "float32", "device": "cpu"})
    if (reason := _lack(model)) is not None:
        raise OliveExtError(reason)
    return _made(model, cache_folder("exports"), tell)[0]


def obstacle(model: ResolvedModel) -> str | None:
    """Why `model` does not run as its export; None where that can be tried."""
    settings = model.settings
    if settings.dtype != "float32":
        return f"only float32 is, and 'dtype' is {settings.dtype}"
    if not model.runtime.is_on_host(model):
        return "on a GPU transformers run it"
    return _lack(model)


def _lack(model: ResolvedModel) -> str | None:
    """Why no export of `model` can be made; None where it can be tried."""
    if not model.files.directory.is_dir() or model.size is None:
        return "its files are not in a folder here"
    if model.media is not None or model.source is not None:
        return "only what takes text alone is"
    if not installed(BUILDER):
        return f"{BUILDER} is not installed"
    weights = 2 * model.size  # stored in 16 bits, as most are
    if _MEMORY_FACTOR * weights > psutil.virtual_memory().available:
        return "the memory may not suffice for that"
    return None


def _made(model: ResolvedModel, root: Path, tell: Callable[[str], object]) -> tuple[Path, dict[str, Any], str]:
    """The export in the cache, which is made where it is missing, or has changed since it was compared: its folder,
    `_compared` of it, and "in 30.1 s" or "earlier"."""
    name = f"{model.digest}-fp32-{installed(BUILDER)}-{installed('transformers')}"
    target = root / name
    make_own_folder(root)
    with FileLock(root / f"{name}.lock"):
        begin, file = time.monotonic(), target / _CHECKED
        known = json.loads(file.read_text(encoding="utf-8")).get(_DIGEST) if file.is_file() else None
        if is_new := known is None or known != _of(model, target).digest:
            takes = "seconds" if (model.size or 0) < 10**8 else "minutes"
            tell(f"exporting '{model.settings.model}' to ONNX in fp32, once, into '{target}': this takes {takes}")
            _make(model, target)
        checked = json.loads((target / _CHECKED).read_text(encoding="utf-8"))
    return target, checked, f"in {time.monotonic() - begin:.1f} s" if is_new else "earlier"


def _of(model: ResolvedModel, folder: Path) -> ResolvedModel:
    """The export, with the model's own tokenizer, on the CPU as transformers would run it."""
    changes = {"model": str(folder), "kind": "onnx", "tokenizer": model.files.tokenizer, "device": None}
    export = model.patched({**changes, "execution_provider": "CPUExecutionProvider", "provider_options": None})
    return replace(export, stands_for=model.processor_files)


def _make(model: ResolvedModel, target: Path) -> None:
    """Builds and compares; `target` appears after both. Raises `OliveExtError` with the builder's last line."""
    assert model.size is not None
    if shutil.disk_usage(target.parent).free < _DISK_FACTOR * 2 * model.size:
        raise OliveExtError(f"the disk of '{target.parent}' is too full", code="failed")
    with whole_folder(target) as folder:
        options = ["-i", str(model.files.directory.resolve()), "-o", str(folder), "-p", "fp32", "-e", "cpu"]
        options += ["-c", str(folder.parent / "cache")]
        options += ["--extra_options", f"hf_remote={str(model.settings.trust_remote_code).lower()}"]  # true by default
        command = module_command(MODULE, *options)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
        except subprocess.TimeoutExpired as error:
            raise OliveExtError(f"{BUILDER} has not exported it within {_SECONDS} s", code="failed") from error
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no message"]
            raise OliveExtError(f"{BUILDER} cannot: {lines[-1]}", code="failed")
        checked = {**_compared(model, folder), _DIGEST: _of(model, folder).digest}
        (folder / _CHECKED).write_text(json.dumps(checked), encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)  # an export that has changed


def _compared(model: ResolvedModel, folder: Path) -> dict[str, float]:
    """The largest difference of a token's log-probability, in nats, between plain passes of transformers and this
    package's engine, and the number of texts. Infinity where one is no number."""
    plain, random = PlainPass(model), np.random.default_rng(0)
    texts = [tuple(random.integers(0, plain.vocab_size, length).tolist()) for length in _lengths(plain)]
    with open_model(_of(model, folder).patched({"max_length": None})) as session:
        both = zip(texts, logprobs(session, texts), strict=True)
    differences = [np.abs(plain.logprobs(text) - own) for text, own in both]
    largest = float(np.concatenate(differences).max())
    return {"largest_difference": largest if np.isfinite(largest) else float("inf"), "requests": len(texts)}


def logprobs(session: Session, texts: Sequence[tuple[int, ...]]) -> list[npt.NDArray[np.float64]]:
    """Log-probabilities of each text's tokens after the first, as this package's engine scores them."""
    outputs = session.loglikelihood([(text[:1], text[1:]) for text in texts])
    return [np.array(output.token_logprobs, np.float64) for output in outputs]


def _lengths(plain: PlainPass) -> list[int]:
    """Lengths of texts: 2 to 192 tokens, and one beyond each number of tokens in the checkpoint's configuration."""
    lengths = np.linspace(2, min(LONGEST, plain.context_length), NUM_REQUESTS).astype(int).tolist()
    longest = min(FARTHEST, plain.context_length)
    beyond = [min(length, longest) for length in plain.lengths_beyond if length > LONGEST]
    return [*lengths, *sorted(set(beyond))]

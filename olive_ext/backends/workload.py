"""How much an evaluation asks of a model: documents, requests, and the tokens to compute, estimated from texts; and how
long a machine takes for that, by measured rates. Nothing is run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import psutil
from lm_eval.api.model import LM

from olive_ext.errors import OliveExtError, counted
from olive_ext.graph.nodes import attribute
from olive_ext.model import ResolvedModel
from olive_ext.model.decisions import choose_num_slots, planned_positions, shared_positions
from olive_ext.model.files.content import load_graph
from olive_ext.model.files.package_config import read_json
from olive_ext.model.providers.resolution import first_name
from olive_ext.model.providers.table import ROWS
from olive_ext.report.numbers import predicted, size

START_SECONDS = 6
"""The time of an evaluation besides its tokens: imports, opening, tasks and statistics, on two cores."""

_MOST_TOKENS = 256
"""The length of an answer whose task names none: lm-eval's default."""

_SAMPLE = 16


def new_letters(texts: Sequence[str]) -> list[int]:
    """The letters of each text that no text before it in sorted order shares: what a prefix tree adds."""
    counts, before = [0] * len(texts), ""
    for index in sorted(range(len(texts)), key=texts.__getitem__):
        text = texts[index]
        low, high = 0, min(len(before), len(text))
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if before[low:middle] == text[low:middle] else (low, middle - 1)
        counts[index], before = len(text) - low, text
    return counts


@dataclass
class Workload:
    """The requests of one kind."""

    documents: set[tuple[str, Any]] = field(default_factory=set)
    tokens: list[float] = field(default_factory=list)
    """About the tokens to compute for each request; of a text with which others begin, only what it adds."""

    answers: int = 0
    """The most tokens that are generated."""

    def __str__(self) -> str:
        parts = [counted(len(self.documents), "document"), counted(len(self.tokens), "request")]
        generated = f", at most {self.answers:,} to generate" if self.answers else ""
        return f"{', '.join(parts)}, about {float(f'{sum(self.tokens):.2g}'):,.0f} tokens to compute{generated}"

    def __add__(self, other: Workload) -> Workload:
        return Workload(self.documents | other.documents, self.tokens + other.tokens, self.answers + other.answers)


def workload_of(requests: Sequence[Any], encode: Callable[[str], Sequence[int]]) -> Workload:
    """The work of lm-eval's requests of one kind. `encode` gives a text's tokens, of which a sample is counted."""
    texts = ["".join(part for part in request.args[:2] if isinstance(part, str)) for request in requests]
    sample = texts[:: max(1, len(texts) // _SAMPLE)][:_SAMPLE]
    share = sum(len(encode(text)) for text in sample) / max(1, sum(map(len, sample)))
    settings = [request.args[1] for request in requests if len(request.args) > 1 and isinstance(request.args[1], dict)]
    answers = sum(int(setting.get("max_gen_toks") or _MOST_TOKENS) for setting in settings)
    documents = {(str(request.task_name), request.doc_id) for request in requests}
    return Workload(documents, [share * letters for letters in new_letters(texts)], answers)


class CountingLM(LM):  # type: ignore[misc]
    """Answers nothing, and counts what is asked."""

    def __init__(self, encode: Callable[[str], Sequence[int]]) -> None:
        super().__init__()
        self._encode, self.work = encode, Workload()

    def loglikelihood(self, requests: Sequence[Any], **_: object) -> list[Any]:
        """Counts requests of any kind; a task cannot read the answers, and lm-eval asks all before it reads any."""
        self.work += workload_of(requests, self._encode)
        return ["" for _ in requests]

    loglikelihood_rolling = loglikelihood
    generate_until = loglikelihood


class Rate(NamedTuple):
    """Operations a second in matrix products, for scored texts and for answers; what they were measured on; and the
    seconds of a step and of an answer's token even in a tiny model."""

    scored: float
    generated: float
    machine: str
    step_s: float = 0.0
    answer_s: float = 0.0


RATES = {"cpu": Rate(100e9, 25e9, "a core with AVX-512", 1e-3, 2e-4), "cuda": Rate(250e12, 31e12, "an H200")}
"""CPU: docs/benchmarks/README.md, "On a CPU"; a core; small models: the quickstart's. CUDA: docs/scaling.md, 622
questions of 160 own tokens and 12,721 generated tokens a second, of 1.24 billion parameters."""


def parameters(model: ResolvedModel) -> float:
    """About the number of parameters that multiply each token: of products in the decoder's graph, else by the size."""
    if model.kind != "onnx":
        config = read_json(model.files.directory / "config.json")
        is_float = (config.get("dtype") or config.get("torch_dtype")) == "float32"
        return (model.size or 0) / (4 if is_float else 2)
    graph = load_graph(model.files.decoder).graph
    sizes = {item.name: prod(item.dims) for item in graph.initializer if len(item.dims) == 2}
    weights = sum(_weights(node, sizes) for node in graph.node)
    return weights or (model.size or 0) / 2


def _weights(node: Any, sizes: dict[str, int]) -> int:
    if node.op_type == "MatMulNBits":
        return int(attribute(node, "K", 0) * attribute(node, "N", 0))
    return sum(sizes.get(name, 0) for name in node.input) if node.op_type in ("MatMul", "Gemm", "FusedMatMul") else 0


def forecast(model: ResolvedModel, work: Workload, *, begins: bool = True) -> str:
    """About how long a model takes for the work, with its start and end, and its memory, in words."""
    known = seconds_of(model, work)
    time = f"{predicted(known[0])} on {known[1]}" if known else "no rate of this device is known"
    time += f", and some {START_SECONDS} s to begin and to end" if begins else ""
    caches = cache_bytes(model)
    and_caches = "caches" if caches is None else f"at most {size(caches)} of caches"
    return f"{time}; {size(model.size)} of weights in memory, and {and_caches}" if model.size else time


def cache_bytes(model: ResolvedModel) -> int | None:
    """The most bytes that the slots of a model take on this machine; None for a model that another library runs."""
    with suppress(OliveExtError):
        if (slots := _slots(model)) is not None:
            spec, positions = model.spec, slots * planned_positions(model.spec)
            shared = shared_positions(model.settings, spec, model.device)
            positions = positions if shared is None else min(positions, shared)
            return positions * (spec.bytes_per_position + spec.gathered_bytes) + slots * spec.bytes_of_source
    return None


def _slots(model: ResolvedModel) -> int | None:
    """Sequences that the model decodes together; None for a model that another library runs."""
    with suppress(OliveExtError):
        if model.kind == "onnx" and model.runtime.runs_graph:
            return choose_num_slots(model.settings, model.spec, model.device)[0]
    return None


def seconds_of(model: ResolvedModel, work: Workload) -> tuple[float, str] | None:
    """Seconds to compute the tokens of prompts and of answers, and the rate used; None where none is known."""
    try:
        named = not model.settings.allow_cpu_fallback and first_name(model.settings.execution_provider)
        row = ROWS.get(str(named).lower())  # of a provider that this machine may lack
        kind = model.device.kind if row is None else row.device
        rate = RATES.get(kind)
        if rate is None or not (each := 2 * parameters(model)):
            return None
    except (OliveExtError, OSError, ValueError):
        return None
    cores = psutil.cpu_count(logical=False) or 1
    times, machine = (cores, f"{cores} x {rate.machine}") if kind == "cpu" else (1, rate.machine)
    steps = len(work.tokens) + work.answers / (_slots(model) or 1)
    host = steps * rate.step_s + work.answers * rate.answer_s
    return each * (sum(work.tokens) / rate.scored + work.answers / rate.generated) / times + host, machine

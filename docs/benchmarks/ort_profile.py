"""What ran in a session, from ONNX Runtime's profile: the nodes of each run, and the tensors that changed memory.

Inside a session a copy between the host's and a device's memory is a node. What is bound as the session's own input or
output is copied without one and is not seen here.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime

TO_HOST, FROM_HOST = "MemcpyToHost", "MemcpyFromHost"

MOST_VALUES = {True: 1024, False: 65536}
"""Elements that may be copied at once, for real numbers and for whole ones: token ids, masks and log-probabilities of
any step pass; hidden states of a token, a row of logits of any real vocabulary and KV do not."""

_BYTES = {"double": 8, "int64": 8, "uint64": 8, "float": 4, "int32": 4, "uint32": 4, "float16": 2, "bfloat16": 2}
_REAL = frozenset({"double", "float", "float16", "bfloat16"})


@dataclass(frozen=True)
class Tensor:
    """Element type as the profile spells it ("float", "int64") and shape."""

    kind: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of types shorter than 16 bits each element counts as a byte."""
        return math.prod(self.shape) * _BYTES.get(self.kind, 1)

    @property
    def is_large(self) -> bool:
        """Whether it is more than `MOST_VALUES` allows."""
        return math.prod(self.shape) > MOST_VALUES[self.kind in _REAL]


@dataclass(frozen=True)
class Node:
    """One run of one node. `seconds` are the host's: of a kernel that a device runs later only its launch."""

    op: str
    provider: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    seconds: float = 0.0

    @property
    def is_to_host(self) -> bool:
        """Whether it copies to the host's memory."""
        return self.op == TO_HOST


@contextmanager
def profiling(prefix: Path) -> Iterator[None]:
    """Has each session that is opened meanwhile write a profile into a file whose path begins with `prefix`."""
    plain = onnxruntime.SessionOptions

    class Profiling(plain):
        def __init__(self) -> None:
            super().__init__()
            self.enable_profiling = True
            self.profile_file_prefix = str(prefix)

    onnxruntime.SessionOptions = Profiling
    try:
        yield
    finally:
        onnxruntime.SessionOptions = plain


def read_runs(file: Path) -> list[list[Node]]:
    """The nodes of each run of the session, in order, from a finished profile."""
    events = json.loads(file.read_text(encoding="utf-8"))
    begins = sorted(event["ts"] for event in events if event.get("cat") == "Session" and event["name"] == "model_run")
    runs: list[list[Node]] = [[] for _ in begins]
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            runs[bisect_right(begins, event["ts"]) - 1].append(_node(event["args"], event["dur"] / 1e6))
    return runs


def large_copies(runs: Iterable[Sequence[Node]]) -> list[str]:
    """What crossed between host and device and should not have: "MemcpyToHost float16[150, 2048]", each once."""
    copied = (f"{node.op} {_written(out)}" for node, out in _copies(runs) if out.is_large)
    return list(dict.fromkeys(copied))


def summarize(runs: Iterable[Sequence[Node]]) -> list[dict[str, Any]]:
    """For each form of step, [rows, tokens of a row]: how many there were, and of one of them on average the seconds by
    operator, the operators on the host, and the copies with their bytes."""
    forms: dict[tuple[int, int] | None, list[Sequence[Node]]] = {}
    for run in runs:
        forms.setdefault(_form(run), []).append(run)
    return [_summary(form, own) for form, own in forms.items()]


def _summary(form: tuple[int, int] | None, runs: Sequence[Sequence[Node]]) -> dict[str, Any]:
    number = len(runs)
    seconds: defaultdict[str, float] = defaultdict(float)
    on_host: Counter[str] = Counter()
    for node in (node for run in runs for node in run):
        seconds[node.op] += node.seconds
        on_host[node.op] += node.provider == "CPUExecutionProvider"
    copies = Counter((node.op, out) for node, out in _copies(runs))
    return {
        "rows_tokens": form,
        "steps": number,
        "nodes": sum(map(len, runs)) / number,
        "seconds": sum(seconds.values()) / number,
        "seconds_by_operator": {op: seconds[op] / number for op in sorted(seconds, key=lambda op: -seconds[op])},
        "operators_on_host": {op: total / number for op, total in on_host.most_common() if total},
        "copies": [
            {"node": op, "tensor": _written(out), "bytes": out.num_bytes, "times": total / number}
            for (op, out), total in copies.most_common()
        ],
    }


def _copies(runs: Iterable[Sequence[Node]]) -> Iterator[tuple[Node, Tensor]]:
    return ((node, out) for run in runs for node in run if node.op in (TO_HOST, FROM_HOST) for out in node.outputs)


def _form(run: Sequence[Node]) -> tuple[int, int] | None:
    """Rows and tokens, of the queries of the first attention [rows, tokens, hidden]."""
    queries = (node.inputs[0].shape for node in run if "Attention" in node.op and node.inputs)
    return next(((shape[0], shape[1]) for shape in queries if len(shape) == 3), None)


def _written(tensor: Tensor) -> str:
    return f"{tensor.kind}{list(tensor.shape)}"


def _node(args: dict[str, Any], seconds: float) -> Node:
    inputs, outputs = (_tensors(args.get(f"{side}_type_shape", ())) for side in ("input", "output"))
    return Node(args["op_name"], args.get("provider", ""), inputs, outputs, seconds)


def _tensors(entries: Iterable[dict[str, list[int]]]) -> tuple[Tensor, ...]:
    return tuple(Tensor(kind, tuple(shape)) for entry in entries for kind, shape in entry.items())

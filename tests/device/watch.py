"""Sees what crosses to the host: through the doors that ONNX Runtime's Python has, and inside its sessions.

Inside a session a copy between devices is a node, which the profile shows. A graph's output that is bound to the host
is copied without a node, so those are noted as the sessions run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import onnxruntime as ort
import pytest

from olive_ext.bench.profile import Tensor


@dataclass
class Watch:
    """What sessions have handed out in the host's memory, and the sessions that were run."""

    tensors: list[Tensor] = field(default_factory=list)
    sessions: dict[int, ort.InferenceSession] = field(default_factory=dict)

    def note(self, value: ort.OrtValue) -> None:
        self.tensors.append(Tensor(value.data_type().removeprefix("tensor(").removesuffix(")"), tuple(value.shape())))

    @property
    def host_nodes(self) -> list[tuple[str, list[str]]]:
        """For each session: its first output, and the operators that were placed on the CPU. Needs sessions opened
        with `session.record_ep_graph_assignment_info`."""
        found = []
        for session in self.sessions.values():
            parts = [part for part in session.get_provider_graph_assignment_info() if part.ep_name.startswith("CPU")]
            operators = [node.op_type for part in parts for node in part.get_nodes()]
            found.append((session.get_outputs()[0].name, operators))
        return found


@contextmanager
def watching() -> Iterator[Watch]:
    """Notes outputs that lie in the host's memory after a run, and device values that are read from there."""
    watch = Watch()
    run, read = ort.InferenceSession.run_with_iobinding, ort.OrtValue.numpy

    def run_and_note(session: ort.InferenceSession, binding: ort.IOBinding, *rest: Any) -> None:
        run(session, binding, *rest)
        watch.sessions[id(session)] = session
        for value in binding.get_outputs():
            if value.device_name() == "cpu":
                watch.note(value)

    def read_and_note(value: ort.OrtValue) -> Any:
        if value.device_name() != "cpu":
            watch.note(value)
        return read(value)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("everything must go through IOBinding: run() and copies bring outputs to the host")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ort.InferenceSession, "run_with_iobinding", run_and_note)
        patch.setattr(ort.InferenceSession, "run", refuse)
        patch.setattr(ort.IOBinding, "copy_outputs_to_cpu", refuse)
        patch.setattr(ort.OrtValue, "numpy", read_and_note)
        patch.setattr(ort, "copy_tensors", refuse, raising=False)
        yield watch

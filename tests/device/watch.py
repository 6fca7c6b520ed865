"""Sees what crosses to the host, through the doors that ONNX Runtime's Python has, and with which input shapes sessions
are run, whoever runs them: nothing of the package is asked.

Inside a session a copy between devices is a node, which the profile shows. A graph's output that is bound to the host
is copied without a node, so those are noted as the sessions run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import onnxruntime as ort
import pytest

from docs.benchmarks.ort_profile import Tensor
from olive_ext.session import Session

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass
class Watch:
    """What sessions have handed out in the host's memory, and the sessions that were run."""

    tensors: list[Tensor] = field(default_factory=list)
    sessions: dict[int, ort.InferenceSession] = field(default_factory=dict)
    runs: list[tuple[ort.InferenceSession, Shapes]] = field(default_factory=list)

    def new_since(self, begin: int) -> list[tuple[ort.InferenceSession, Shapes]]:
        """Runs after the first `begin` ones with shapes that their sessions had not met by then; each once."""
        met = {(id(session), shapes) for session, shapes in self.runs[:begin]}
        found = {(id(session), shapes): (session, shapes) for session, shapes in self.runs[begin:]}
        return [run for key, run in found.items() if key not in met]

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
    """Notes outputs that lie in the host's memory after a run, device values that are read from there, and all
    shapes."""
    watch = Watch()
    bound: dict[ort.IOBinding, dict[str, tuple[int, ...]]] = {}
    run, read = ort.InferenceSession.run_with_iobinding, ort.OrtValue.numpy
    bind_array, bind_value = ort.IOBinding.bind_cpu_input, ort.IOBinding.bind_ortvalue_input
    bind_place = ort.IOBinding.bind_input

    def note(binding: ort.IOBinding, name: str, shape: Any) -> None:
        bound.setdefault(binding, {})[name] = tuple(shape)

    def run_and_note(session: ort.InferenceSession, binding: ort.IOBinding, *rest: Any) -> None:
        watch.runs.append((session, tuple(sorted(bound.get(binding, {}).items()))))
        run(session, binding, *rest)
        watch.sessions[id(session)] = session
        for value in binding.get_outputs():
            if value.device_name() == "cpu":
                watch.note(value)

    def read_and_note(value: ort.OrtValue) -> Any:
        if value.device_name() != "cpu":
            watch.note(value)
        return read(value)

    def bind_array_and_note(binding: ort.IOBinding, name: str, array: Any) -> None:
        bind_array(binding, name, array)
        note(binding, name, array.shape)

    def bind_value_and_note(binding: ort.IOBinding, name: str, value: ort.OrtValue) -> None:
        bind_value(binding, name, value)
        note(binding, name, value.shape())

    def bind_place_and_note(binding: ort.IOBinding, name: str, *rest: Any) -> None:
        note(binding, name, rest[3])
        bind_place(binding, name, *rest)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("everything must go through IOBinding: run() and copies bring outputs to the host")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ort.InferenceSession, "run_with_iobinding", run_and_note)
        patch.setattr(ort.InferenceSession, "run", refuse)
        patch.setattr(ort.IOBinding, "copy_outputs_to_cpu", refuse)
        patch.setattr(ort.OrtValue, "numpy", read_and_note)
        patch.setattr(ort.IOBinding, "bind_cpu_input", bind_array_and_note)
        patch.setattr(ort.IOBinding, "bind_ortvalue_input", bind_value_and_note)
        patch.setattr(ort.IOBinding, "bind_input", bind_place_and_note)
        patch.setattr(ort, "copy_tensors", refuse, raising=False)
        yield watch


def on_the_way(session: Session) -> Callable[[ort.InferenceSession], bool]:
    """Whether one of ONNX Runtime's sessions is none of the decoder's: those are the decoder, its cache's and its
    head's."""
    runner: Any = session.executor.runner  # type: ignore[attr-defined]
    runner = getattr(runner, "inner", runner)
    own = {id(runner._feed.session)}
    for value in (*vars(runner._kv).values(), *vars(runner._head).values()):
        kept = (getattr(value, name, None) for name in ("_sessions", "_session", "session"))
        inner = next(filter(None, kept), None)
        own |= {id(one) for one in (inner.values() if isinstance(inner, dict) else [inner, value])}
    return lambda one: id(one) not in own


def late_on_the_way(session: Session, observed: Watch, begin: int) -> list[str]:
    """Runs after the first `begin` ones with shapes that sessions on the way of items had not met by then."""
    is_on_the_way = on_the_way(session)
    return [
        f"{one.get_modelmeta().graph_name}: {shapes}" for one, shapes in observed.new_since(begin) if is_on_the_way(one)
    ]

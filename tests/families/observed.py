"""Sees with which input shapes ONNX Runtime's sessions are run, whoever runs them: nothing of the package is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import onnxruntime as ort
import pytest

from olive_ext.session import Session

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


class Observed:
    """Runs by session, in order."""

    def __init__(self) -> None:
        self.runs: list[tuple[ort.InferenceSession, Shapes]] = []

    def new_since(self, begin: int) -> list[tuple[ort.InferenceSession, Shapes]]:
        """Runs behind the first `begin` ones with shapes that their sessions had not met by then; each once."""
        met = {(id(session), shapes) for session, shapes in self.runs[:begin]}
        found = {(id(session), shapes): (session, shapes) for session, shapes in self.runs[begin:]}
        return [run for key, run in found.items() if key not in met]


@contextmanager
def observing() -> Iterator[Observed]:
    """Notes every run in this process."""
    observed = Observed()
    bound: dict[ort.IOBinding, dict[str, tuple[int, ...]]] = {}
    run, bind_array = ort.InferenceSession.run_with_iobinding, ort.IOBinding.bind_cpu_input
    bind_value, bind_place = ort.IOBinding.bind_ortvalue_input, ort.IOBinding.bind_input

    def note(binding: ort.IOBinding, name: str, shape: Any) -> None:
        bound.setdefault(binding, {})[name] = tuple(shape)

    def run_and_note(session: ort.InferenceSession, binding: ort.IOBinding, *rest: Any) -> None:
        observed.runs.append((session, tuple(sorted(bound[binding].items()))))
        run(session, binding, *rest)

    def bind_array_and_note(binding: ort.IOBinding, name: str, array: Any) -> None:
        note(binding, name, array.shape)
        bind_array(binding, name, array)

    def bind_value_and_note(binding: ort.IOBinding, name: str, value: ort.OrtValue) -> None:
        note(binding, name, value.shape())
        bind_value(binding, name, value)

    def bind_place_and_note(binding: ort.IOBinding, name: str, *rest: Any) -> None:
        note(binding, name, rest[3])
        bind_place(binding, name, *rest)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a session is run with a binding, whose shapes are seen")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ort.InferenceSession, "run_with_iobinding", run_and_note)
        patch.setattr(ort.InferenceSession, "run", refuse)
        patch.setattr(ort.IOBinding, "bind_cpu_input", bind_array_and_note)
        patch.setattr(ort.IOBinding, "bind_ortvalue_input", bind_value_and_note)
        patch.setattr(ort.IOBinding, "bind_input", bind_place_and_note)
        yield observed


def on_the_way(session: Session) -> Callable[[ort.InferenceSession], bool]:
    """Whether one of ONNX Runtime's sessions is none of the decoder's: those are the decoder, its cache's and its
    head's."""
    runner: Any = session.executor.runner  # type: ignore[attr-defined]
    runner = getattr(runner, "inner", runner)
    own = {id(runner._session)}
    for value in (*vars(runner._kv).values(), *vars(runner._head).values()):
        inner = getattr(value, "_sessions", None) or getattr(value, "_session", None)
        own |= {id(one) for one in (inner.values() if isinstance(inner, dict) else [inner, value])}
    return lambda one: id(one) not in own


def late_on_the_way(session: Session, observed: Observed, begin: int) -> list[str]:
    """Runs behind the first `begin` ones with shapes that sessions on the way of items had not met by then."""
    is_on_the_way = on_the_way(session)
    return [
        f"{one.get_modelmeta().graph_name}: {shapes}" for one, shapes in observed.new_since(begin) if is_on_the_way(one)
    ]

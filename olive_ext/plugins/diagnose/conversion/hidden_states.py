"""The first place where the hidden states of transformers and of a graph part.

A module's output is looked for among all values of the graph by its numbers, whatever exporters call them: what an
exporter fuses is in no value, so a module agrees, too, where a later one does. Axes: S tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from olive_ext.engine.runners.hf.plain_pass import EMBEDDED, NORMED, PlainPass, States
from olive_ext.engine.runners.ort.plain_graph import PlainGraph
from olive_ext.errors import ModelError
from olive_ext.model import ResolvedModel
from olive_ext.plugins.diagnose.conversion.agreement import StateDifference

LARGEST_ERROR = 3e-4
"""Of a token's state, relative to its length, that is rounding in fp32."""

MOST_ERROR = 1e9
"""What an error counts at most, and where it is no number."""

LEAST_LENGTH = 1e-3
"""Of a state, as a part of the mean length."""

MOST_TOKENS = 128
"""Of a text of which every value of the graph is kept; of a longer one those that are states of its beginning."""

Floats = npt.NDArray[np.float32]


class _Nearest(NamedTuple):
    name: str
    errors_S: Floats


def first_state_difference(
    plain: PlainPass, model: ResolvedModel, tokens: Sequence[int], bound: float
) -> StateDifference | None:
    """Where states part first on `tokens`; None where all that were found are equal. `bound` is the error that is
    rounding. Raises `ModelError` where the graph cannot be run alone, or has no hidden states."""
    values = None
    if len(tokens) > MOST_TOKENS:
        begin = tokens[:MOST_TOKENS]
        values = [best.name for best in _nearest(plain.states(begin), PlainGraph(model).run(begin), bound).values()]
    states = plain.states(tokens)
    nearest = _nearest(states, PlainGraph(model, values).run(tokens), bound)
    if not nearest:
        raise ModelError("which layer it is cannot be told: no value of the graph has the size of a hidden state")
    wrong = {name: best for name, best in nearest.items() if best.errors_S.max() > bound}
    layers = plain.layers
    borders = [EMBEDDED, *(name for name in states if _is_layer(name, layers)), NORMED]
    borders = [name for name in borders if name in nearest]

    def parts(layer: str) -> list[str]:
        return [name for name in nearest if name.startswith(f"{layer}.") and "." not in name[len(layer) + 1 :]]

    if borders[-1] == NORMED and len(borders) > 1 and (last := parts(borders[-2])) and not wrong.keys() & set(last):
        wrong.pop(borders[-2], None)  # a fused norm adds its parts up and returns no sum
    first = _behind_last_equal(borders, wrong)
    if first is None:
        return None
    inside = parts(first)
    side_by_side = next((name for name in inside if name in wrong), None)  # as attention and MLP are in some models
    part = _behind_last_equal(inside, wrong) or side_by_side
    equal = [name for name in states if name in nearest and name not in wrong]
    best = nearest[part or first]
    return StateDifference(
        place=_place(first, layers),
        part="" if part is None else part.removeprefix(f"{first}."),
        behind=equal[-1] if equal else "",
        token=int(np.argmax(best.errors_S > bound)) + 1,
        error=float(best.errors_S.max()),
    )


def states_error(exact: States, rounded: States) -> float:
    """The largest error of a token's state at any module that both have."""
    return max(float(_errors(rounded[name], exact[name]).max()) for name in exact.keys() & rounded.keys())


def _behind_last_equal(names: Sequence[str], wrong: Mapping[str, object]) -> str | None:
    """The first of `names` behind the last that is not in `wrong`; None where that is the last of all."""
    last = max((place for place, name in enumerate(names) if name not in wrong), default=-1)
    return names[last + 1] if last + 1 < len(names) else None


def _is_layer(name: str, layers: str) -> bool:
    return bool(layers) and name.startswith(f"{layers}.") and name[len(layers) + 1 :].isdecimal()


def _place(name: str, layers: str) -> str:
    if name == NORMED:
        return "the last norm"
    return "the embeddings" if name == EMBEDDED else f"layer {name[len(layers) + 1 :]}"


def _nearest(states: States, values: Mapping[str, npt.NDArray[Any]], bound: float) -> dict[str, _Nearest]:
    """For each state the value of the graph that has the most equal tokens, and of these the least error."""
    by_size: dict[int, list[tuple[str, Floats]]] = defaultdict(list)
    for name, value in values.items():
        if value.dtype.kind == "f":
            by_size[value.size].append((name, value.astype(np.float32)))

    def candidates(state: Floats) -> Iterator[_Nearest]:
        for name, value in by_size[state.size]:
            yield _Nearest(name, _errors(value.reshape(state.shape), state))

    def rank(one: _Nearest) -> tuple[int, float]:
        return int((one.errors_S > bound).sum()), float(one.errors_S.mean())

    return {name: min(candidates(state), key=rank) for name, state in states.items() if by_size[state.size]}


def _errors(value: Floats, state: Floats) -> Floats:
    """Of each token [S], relative to its state's length; of one that is nearly zero, as a pad token's embedding is, to
    the others'."""
    length_S = np.linalg.norm(state, axis=1)
    length_S = np.maximum(length_S, LEAST_LENGTH * length_S.mean())
    with np.errstate(all="ignore"):
        errors_S: Floats = np.nan_to_num(np.linalg.norm(value - state, axis=1) / length_S, nan=MOST_ERROR)
    return np.minimum(errors_S, MOST_ERROR)

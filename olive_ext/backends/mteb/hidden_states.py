"""Hidden states of a decoder by the engine, which computes a shared instruction once and shares steps between texts.

The graph's hidden states take the place of its logits, whose head is dropped, and a tap keeps the rows that are read.
Axes: N texts, T positions read of a text, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from olive_ext.engine.opening import engine_on, open_runner
from olive_ext.engine.reference.kernels import to_host
from olive_ext.engine.reference.tap import Tap, target_arrays
from olive_ext.engine.requests import Notes, Request
from olive_ext.engine.step import Step, StepOutput
from olive_ext.errors import ModelError, listed
from olive_ext.graph.nodes import remove_dead
from olive_ext.model import ResolvedModel

Array = npt.NDArray[np.float32]

OUTPUTS = ("hidden_states", "last_hidden_state")
"""Names of the hidden states behind a decoder's last norm: onnxruntime-genai's builder, optimum."""

_TEXTS_AT_ONCE = 4096
_POSITIONS_AT_ONCE = 1 << 16
"""Texts, and positions that are read, of one run of the engine: it keeps each position's hidden state until it ends."""


def put_in_place_of_logits(graph: Any, logits: str) -> None:
    """Changes a decoder (onnx.ModelProto) so that its output `logits` [B, S, ...] is its hidden states. Raises
    `ModelError` where it returns none."""
    outputs = {output.name: output for output in graph.graph.output}
    name = next((name for name in OUTPUTS if name in outputs), None)
    if name is None:
        raise ModelError(
            f"the decoder returns no hidden states, only {listed(outputs)}: build it with include_hidden_states"
        )
    if logits in outputs:
        graph.graph.output.remove(outputs[logits])
        remove_dead(graph.graph, logits)
    graph.graph.node.add(op_type="Identity", name="olive_ext/hidden_states", input=[name], output=[logits])
    next(output for output in graph.graph.output if output.name == name).name = logits


class HiddenStatesTap(Tap):
    """Notes for each target the hidden state that it is scored with."""

    @override
    def note(self, step: Step, output: StepOutput) -> Notes:
        rows_RH = to_host(output.logits_RV)
        notes_T = np.zeros(len(step.targets), [("hidden", np.float32, (rows_RH.shape[-1],))])
        if step.targets:
            notes_T["hidden"] = rows_RH[target_arrays(step)[0]]
        return notes_T


class DecoderStates:
    """An open decoder that returns hidden states; closed by `close`."""

    def __init__(self, model: ResolvedModel) -> None:
        """Raises `ModelError`, `ProviderError` or `ConfigError`."""
        section = model.files.genai_config.get("model", {}).get("decoder", {})
        logits = section.get("outputs", {}).get("logits", "logits")
        edited = replace(model, edit_graph=partial(put_in_place_of_logits, logits=logits), is_compared=True)
        self._engine = engine_on(open_runner(edited), edited, HiddenStatesTap())
        self.max_length = self._engine.context_length

    def pooled(self, texts: Sequence[Sequence[int]], pooling: str) -> Array:
        """[N, H], the `pooling` ("last", "mean" or "cls") of each text's tokens."""
        found: list[Array] = []
        begin = positions = 0
        for place, tokens in enumerate(texts):
            count = len(tokens) if pooling == "mean" else 1
            if place > begin and (positions + count > _POSITIONS_AT_ONCE or place - begin == _TEXTS_AT_ONCE):
                found.append(self._pooled(texts[begin:place], pooling))
                begin, positions = place, 0
            positions += count
        found.append(self._pooled(texts[begin:], pooling))
        return np.concatenate(found)

    def _pooled(self, texts: Sequence[Sequence[int]], pooling: str) -> Array:
        # A request for each position: what requests have in common is computed once. The token behind the last is never
        # fed; as a target it has to be one of H.
        ends = [_ends(len(tokens), pooling) for tokens in texts]
        requests = [Request((*tokens[:end], 0), 1) for tokens, stops in zip(texts, ends, strict=True) for end in stops]
        notes = [result.notes for result in self._engine.run(requests)]
        states = np.stack([one["hidden"][0] for one in notes if one is not None])
        starts = np.cumsum([0, *map(len, ends[:-1])])
        sums: Array = np.add.reduceat(states, starts, axis=0)
        return sums / np.array([len(stops) for stops in ends], np.float32)[:, None]

    def describe(self) -> dict[str, Any]:
        """Facts of the execution."""
        return self._engine.describe()

    def reset(self) -> None:
        """Drops what could be reused."""
        self._engine.reset()

    def close(self) -> None:
        """Releases the model."""
        self._engine.close()


def _ends(length: int, pooling: str) -> range:
    """How many tokens lie up to each position that is read, itself included."""
    return {"mean": range(1, length + 1), "cls": range(1, 2), "last": range(length, length + 1)}[pooling]

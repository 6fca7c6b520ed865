"""Runs steps on ONNX Runtime sessions with everything bound. Knows graphs and devices, no requests.

Axes: B rows, S tokens of a row, W width of the mask, R head rows, T targets, K sampled rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from olive_ext.engine.head import Head
from olive_ext.engine.kv import KvStore
from olive_ext.engine.step import Batching, Row, Step, StepOutput
from olive_ext.errors import RunError
from olive_ext.model.types import DecoderSpec, TensorSpec

CAPACITY_STEP = 64
"""Slots grow by multiples of this many positions, so that a slightly longer request does not allocate anew."""

Array = npt.NDArray[Any]
INT32 = 6


class OrtRunner:
    """A decoder session, its KV store and its scoring head."""

    def __init__(
        self, session: ort.InferenceSession, spec: DecoderSpec, kv: KvStore, head: Head, facts: Mapping[str, Any]
    ) -> None:
        self._facts = facts
        self._session = session
        self._spec = spec
        self._kv = kv
        self._head = head

    @property
    def batching(self) -> Batching:
        return self._kv.batching

    @property
    def num_slots(self) -> int:
        return self._kv.num_slots

    @property
    def capacity(self) -> int:
        return self._kv.capacity

    @property
    def context_length(self) -> int:
        return self._spec.context_length

    @property
    def host_bytes(self) -> int:
        """Bytes of outputs that have been read on the host."""
        return self._head.host_bytes

    def reserve(self, positions: int) -> None:
        """Grows the slots to `positions` (rounded up), at least doubling; never shrinks them."""
        if positions <= self.capacity:
            return
        wanted = max(positions, 2 * self.capacity)
        rounded = -(-wanted // CAPACITY_STEP) * CAPACITY_STEP
        self._kv.reserve(min(rounded, self.context_length))

    def run(self, step: Step) -> StepOutput:
        """Raises `RunError` with the step and ONNX Runtime's reason when the device fails."""
        try:
            for copy in step.copies:
                self._kv.copy(copy)
            return self._run(step)
        except Exception as error:
            if isinstance(error, RunError) or not is_ort_error(error):
                raise
            shape = f"{len(step.rows)} x {len(step.rows[0].tokens)} tokens behind {step.rows[0].past} positions"
            raise RunError(f"ONNX Runtime failed on a step of {shape}: {first_line(error)}") from error

    def describe(self) -> Mapping[str, Any]:
        return {
            **self._facts,
            "providers": self._session.get_providers(),
            "capacity": self.capacity,
            "context_length": self.context_length,
            "batching": self.batching.value,
            **self._kv.describe(),
            **self._head.describe(),
        }

    def close(self) -> None:
        self._kv.close()

    def _run(self, step: Step) -> StepOutput:
        binding = self._kv.bind(step.rows)
        for name, array in self._inputs(step.rows).items():
            binding.bind_cpu_input(name, array)
        self._head.bind(binding, step)
        self._session.run_with_iobinding(binding)
        outputs = binding.get_outputs()
        num_kv = len(self._spec.kv)
        self._kv.collect(step.rows, outputs[:num_kv])
        return self._head.read(outputs[num_kv:], step)

    def _inputs(self, rows: Sequence[Row]) -> dict[str, Array]:
        spec = self._spec
        tokens_BS = np.array([row.tokens for row in rows], np.int64)
        past_B1 = np.array([[row.past] for row in rows], np.int64)
        feeds = [(spec.input_ids, tokens_BS)]
        num_tokens = tokens_BS.shape[1]
        if spec.attention_mask is not None:
            width = int(past_B1.max()) + num_tokens
            feeds.append((spec.attention_mask, (np.arange(width) < past_B1 + num_tokens).astype(np.int64)))
        if spec.position_ids is not None:
            positions = past_B1 + np.arange(num_tokens)
            rank = len(spec.position_ids.shape)
            feeds.append((spec.position_ids, positions if rank == 2 else np.stack([positions] * 3)))
        return {tensor.name: _cast(tensor, array) for tensor, array in feeds}


def _cast(tensor: TensorSpec, array: Array) -> Array:
    return np.ascontiguousarray(array, np.int32 if tensor.elem_type == INT32 else np.int64)


def is_ort_error(error: Exception) -> bool:
    """ONNX Runtime raises its own classes, and RuntimeError from its allocators."""
    return type(error).__module__.startswith("onnxruntime") or isinstance(error, (RuntimeError, MemoryError))


def first_line(error: Exception) -> str:
    """The first line of a message, without a trailing stack."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__

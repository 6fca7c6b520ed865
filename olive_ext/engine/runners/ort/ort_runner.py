"""Runs steps on ONNX Runtime sessions with everything bound. Knows graphs and devices, no requests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import onnxruntime as ort

from olive_ext.engine.requests import Source, refuse_source
from olive_ext.engine.runners.ort.adapters import Adapters
from olive_ext.engine.runners.ort.capture import NOT_CAPTURED, Capture, Captured, run_options
from olive_ext.engine.runners.ort.embedding import Embedding
from olive_ext.engine.runners.ort.encoder import Encoder
from olive_ext.engine.runners.ort.feed import Feed
from olive_ext.engine.runners.ort.head import Head, output_rows
from olive_ext.engine.runners.ort.inputs import Layout
from olive_ext.engine.runners.ort.kv.base import Device, KvStore
from olive_ext.engine.runners.ort.kv.tree_cells import SharedPrefixKv
from olive_ext.engine.step import Batching, Step, StepOutput
from olive_ext.errors import MemoryShortageError, RunError, first_line
from olive_ext.model.types import DecoderSpec, SourceKind

logger = logging.getLogger(__name__)

CAPACITY_STEP = 64
"""Slots grow by multiples of this many positions, so that a slightly longer request does not allocate anew."""

MEMORY_WORDS = (
    "to allocate",
    "smaller than requested bytes",
    "out of memory",
    "outofmemory",
    "alloc_failed",
    "bad_alloc",
    "bad allocation",
)
"""Of ONNX Runtime's arena (two), CUDA, DirectML, cuBLAS and cuDNN, C++, and numpy."""


class OrtRunner:
    """A decoder session, its KV store and its scoring head."""

    def __init__(
        self,
        session: ort.InferenceSession,
        spec: DecoderSpec,
        kv: KvStore,
        head: Head,
        facts: Mapping[str, Any],
        device: Device,
        open_graph: Callable[[bytes], ort.InferenceSession],
        embedding: Embedding | None = None,
        encoder: Encoder | None = None,
        adapters: Adapters | None = None,
        trunk: SharedPrefixKv | None = None,
        capture: Capture | None = None,
    ) -> None:
        self.device = device
        self.open_graph = open_graph
        self._adapters = adapters
        self._trunk = trunk
        self._capture = capture
        self._run_options = run_options(NOT_CAPTURED) if capture is not None else None
        self._embedding = embedding
        self._encoder = encoder
        self._feed = Feed(session, device)
        self._facts = facts
        self._session = session
        self._spec = spec
        self._kv = kv
        self._head = head

    @property
    def vocab_size(self) -> int:
        """Tokens that it has logits for."""
        return self._spec.vocab_size

    @property
    def batching(self) -> Batching:
        # Rows of one step may have different sources, and their lengths differ.
        return self._kv.batching if self._encoder is None and self.chunked_prefill else Batching.SINGLE

    @property
    def can_rewind(self) -> bool:
        return not self._spec.states

    @property
    def chunked_prefill(self) -> bool:
        return self._spec.is_splittable

    @property
    def async_decode(self) -> bool:
        return self._head.async_decode

    @property
    def num_slots(self) -> int:
        return self._kv.num_slots

    @property
    def capacity(self) -> int:
        return self._kv.capacity

    @property
    def has_tree_batches(self) -> bool:
        return self._trunk is not None and self._trunk.is_used

    @property
    def shared_prefix_capacity(self) -> int:
        return self._trunk.kv.capacity if self._trunk is not None else 0

    @property
    def context_length(self) -> int:
        return self._spec.context_length

    @property
    def host_bytes(self) -> int:
        """Bytes of outputs that have been read on the host."""
        return self._head.host_bytes

    @property
    def source_kind(self) -> SourceKind | None:
        return self._encoder.kind if self._encoder is not None else None

    def check_source(self, source: Source | None) -> None:
        """Raises `OliveExtError` where the encoder cannot take `source`, or there is none."""
        if self._encoder is None:
            refuse_source(source)
        else:
            self._encoder.check(source)

    def reserve(self, positions: int) -> None:
        """Grows the slots to `positions` (rounded up), at least by a quarter; never shrinks them."""
        if positions <= self.capacity:
            return
        if fixed := next((tensor.capacity for tensor in self._spec.kv if tensor.capacity is not None), None):
            self._reserve_slots(fixed)
            return
        self._reserve_slots(min(_grown(self.capacity, positions), self.context_length))

    def reserve_shared_prefix(self, cells: int) -> None:
        """Grows the trunk to `cells` (rounded up), at least by a quarter; never shrinks it."""
        if self._trunk is not None and cells > self._trunk.kv.capacity:
            self._trunk.kv.reserve(_grown(self._trunk.kv.capacity, cells))

    def run(self, step: Step) -> StepOutput:
        """Raises `RunError` with the step and ONNX Runtime's reason when the device fails."""
        try:
            for copy in step.copies:
                self._kv.copy(copy)
            for move in step.moves:
                assert self._trunk is not None
                self._trunk.kv.move(move)
            return self._run(step)
        except Exception as error:
            if isinstance(error, RunError) or not is_ort_error(error):
                raise
            kind = MemoryShortageError if is_memory_error(error) else RunError
            shape = f"{len(step.rows)} x {len(step.rows[0].tokens)} tokens behind {step.rows[0].past} positions"
            raise kind(f"ONNX Runtime failed on a step of {shape}: {first_line(error)}") from error

    def describe(self) -> Mapping[str, Any]:
        return {
            **self._facts,
            "num_slots": self.num_slots,
            "providers": self._session.get_providers(),
            "capacity": self.capacity,
            "context_length": self.context_length,
            "batching": self.batching.value,
            **self._kv.describe(),
            **self._head.describe(),
            **(self._encoder.describe() if self._encoder is not None else {}),
            **(self._capture.describe() if self._capture is not None else {}),
        }

    def close(self) -> None:
        self._kv.close()
        if self._trunk is not None:
            self._trunk.kv.close()
        if self._encoder is not None:
            self._encoder.close()

    def _reserve_slots(self, capacity: int) -> None:
        """Allocates the slots, half as many where there is no memory for them."""
        if self._capture is not None:
            self._capture.forget()
        try:
            self._kv.reserve(capacity)
        except Exception as error:
            if not is_memory_error(error):
                raise
            if self._kv.num_slots == 1:
                raise MemoryShortageError(
                    f"no memory for the KV cache of one sequence of {capacity} positions ({first_line(error)}): give "
                    "a smaller 'max_length'"
                ) from error
            fewer = self._kv.num_slots // 2
            logger.warning("no memory for %d KV slots of %d positions, %d now", self._kv.num_slots, capacity, fewer)
            self._kv.num_slots = fewer
            self._reserve_slots(capacity)

    def _run(self, step: Step) -> StepOutput:
        layout = Layout.of(step.rows, step.first_cell, step.width)
        if step.first_cell is not None and self._trunk is not None:
            binding = self._trunk.bind(step)
        else:
            binding = self._kv.bind(step.rows)
        if self._capture is not None and self._capture.takes(step, self.num_slots):
            captured = self._capture.captured(step, partial(self._kv.bind_anew, step.rows), output_rows(step))
            self._bind(captured, captured.feed, layout, step)
            outputs = self._capture.run(captured)
        else:
            self._bind(binding, self._feed, layout, step)
            self._session.run_with_iobinding(binding, self._run_options)
            outputs = binding.get_outputs()
        num_caches = len(self._spec.caches)
        self._kv.collect(step.rows, outputs[:num_caches])
        return self._head.read(outputs[num_caches:], step)

    def _bind(self, binding: ort.IOBinding | Captured, feed: Feed, layout: Layout, step: Step) -> None:
        """All but the caches."""
        tokens = self._head.next_ids if step.uses_previous_tokens else None
        assert tokens is not None or not step.uses_previous_tokens
        feed.bind_inputs(binding, self._spec.inputs, layout, tokens)
        if self._trunk is not None:
            self._trunk.bias.bind(binding, feed, step)
        if self._embedding is not None:
            self._embedding.bind(layout, binding, tokens)
        if self._encoder is not None:
            self._encoder.bind(step.rows[0].source, binding)
        if self._adapters is not None:
            self._adapters.bind(binding)
        self._head.bind(binding, feed, step)


def _grown(capacity: int, wanted: int) -> int:
    """At least `wanted`, at least a quarter more than there is, in whole steps. Not more: with huge pages all of the
    new memory is filled with zeros."""
    return -(-max(wanted, capacity * 5 // 4) // CAPACITY_STEP) * CAPACITY_STEP


def is_ort_error(error: Exception) -> bool:
    """ONNX Runtime raises its own classes, and RuntimeError from its allocators."""
    return type(error).__module__.startswith("onnxruntime") or isinstance(error, (RuntimeError, MemoryError))


def is_memory_error(error: Exception) -> bool:
    """Whether the message of ONNX Runtime, a provider or numpy speaks of memory that could not be had."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(words in text for words in MEMORY_WORDS)

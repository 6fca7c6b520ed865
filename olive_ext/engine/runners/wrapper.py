"""A runner around another one, for those that do something beside what that one does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from olive_ext.engine.requests import Source
from olive_ext.engine.step import Batching, Runner, Step, StepOutput
from olive_ext.model.types import SourceKind


class WrappedRunner:
    """Does what `inner` does, but takes tokens from the host: what it adds to a step, or runs beside it, has no next
    token."""

    async_decode = False

    def __init__(self, inner: Runner) -> None:
        self._inner = inner

    @property
    def batching(self) -> Batching:
        return self._inner.batching

    @property
    def can_rewind(self) -> bool:
        return self._inner.can_rewind

    @property
    def chunked_prefill(self) -> bool:
        return self._inner.chunked_prefill

    @property
    def num_slots(self) -> int:
        return self._inner.num_slots

    @property
    def has_tree_batches(self) -> bool:
        return self._inner.has_tree_batches

    @property
    def shared_prefix_capacity(self) -> int:
        return self._inner.shared_prefix_capacity

    @property
    def capacity(self) -> int:
        return self._inner.capacity

    @property
    def context_length(self) -> int:
        return self._inner.context_length

    @property
    def host_bytes(self) -> int:
        return self._inner.host_bytes

    @property
    def source_kind(self) -> SourceKind | None:
        return self._inner.source_kind

    def check_source(self, source: Source | None) -> None:
        self._inner.check_source(source)

    def reserve(self, positions: int) -> None:
        self._inner.reserve(positions)

    def reserve_shared_prefix(self, cells: int) -> None:
        self._inner.reserve_shared_prefix(cells)

    def run(self, step: Step) -> StepOutput:
        return self._inner.run(step)

    def release_memory(self) -> None:
        self._inner.release_memory()

    def describe(self) -> Mapping[str, Any]:
        return self._inner.describe()

    def close(self) -> None:
        self._inner.close()

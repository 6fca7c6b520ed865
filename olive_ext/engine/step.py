"""What the scheduler hands to a runner and what comes back: integers out, small arrays in.

Axes: R logits rows of a step, T targets, K sampled rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from olive_ext.engine.requests import Notes, Source
from olive_ext.model.types import SourceKind

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
CellArray = npt.NDArray[np.int32]


class Batching(str, Enum):
    """Which slots one step may decode together."""

    SINGLE = "single"
    """One row a step."""

    RANGE = "range"
    """Neighbouring slots; a gap between two rows is filled with an idle row."""

    PACKED = "packed"
    """Any slots, with any numbers of tokens."""

    POOL = "pool"
    """All slots; those that are not decoding are idle rows."""


@dataclass(frozen=True)
class Copy:
    """The first `length` positions of slot `source` are copied to slot `target` before the rows run."""

    source: int
    target: int
    length: int


SHARED_PREFIX = -1
"""The slot whose steps hold branches."""


@dataclass(frozen=True)
class Move:
    """The trunk's cells `source_N` are copied to cells `target` and following before the rows run."""

    source_N: CellArray
    target: int


@dataclass(frozen=True)
class Row:
    """`tokens` are fed behind the `past` positions resident in `slot`."""

    slot: int
    past: int
    tokens: tuple[int, ...]
    is_checkpoint: bool = False
    """What is resident after these tokens is kept, for other sequences to go on from."""

    source: Source | None = None
    """What the encoder of an encoder-decoder has been given; the same for all that is resident in the slot."""

    cells_P: CellArray | None = None
    """Of a branch: where in the trunk each of the `past` positions lies. None where position and cell are one."""


@dataclass(frozen=True)
class LogitsRow:
    """The row and the offset in its tokens whose next-token distribution is asked for."""

    row: int
    offset: int
    record: int = -1
    """Number of the reference's record of that distribution, where there are records."""


@dataclass(frozen=True)
class Step:
    """One forward pass: `rows` (of one length unless packed or a tree batch), the `logits_rows` to read, `targets`
    (index of a logits row, token id) and `samples` (indices of logits rows)."""

    rows: tuple[Row, ...]
    logits_rows: tuple[LogitsRow, ...] = ()
    targets: tuple[tuple[int, int], ...] = ()
    samples: tuple[int, ...] = ()
    copies: tuple[Copy, ...] = ()
    moves: tuple[Move, ...] = ()
    first_cell: int | None = None
    """Of branches: the cell that the first row's first token goes into; the others follow. None for other steps."""

    width: int | None = None
    """Positions that the inputs speak of where that is more than the rows have: those behind them are masked."""

    uses_previous_tokens: bool = False
    """The rows' tokens are those that the step before found, row by row; what stands in them is a placeholder."""


@dataclass(frozen=True)
class StepOutput:
    """`target_logprobs[T]` in nats, `greedy_ids[R]`, `sample_logits_KV` in fp32."""

    target_logprobs: FloatArray
    greedy_ids: IntArray
    sample_logits_KV: FloatArray
    logits_RV: Any = None
    """The logits rows' logits in fp32, where the runner exposes them: an OrtValue on its device, or a numpy array. One
    row, which means nothing, where there are no logits rows."""

    notes_T: Notes | None = None
    """What the runner notes of each target beside its score."""


class Runner(Protocol):
    """Executes steps over `num_slots` KV slots of `capacity` positions each."""

    @property
    def batching(self) -> Batching: ...

    @property
    def can_rewind(self) -> bool:
        """Whether a slot can be cut back to any position, or only to those that were kept as checkpoints."""
        ...

    @property
    def chunked_prefill(self) -> bool:
        """Whether an input may be fed in several steps, or go on from what another has computed. Where it may not,
        `batching` is SINGLE."""
        ...

    @property
    def async_decode(self) -> bool:
        """Whether it takes steps that follow the one before, whose greedy tokens it keeps."""
        ...

    @property
    def num_slots(self) -> int: ...

    @property
    def has_tree_batches(self) -> bool:
        """Whether a step may hold branches."""
        ...

    @property
    def shared_prefix_capacity(self) -> int:
        """Cells of the trunk."""
        ...

    @property
    def capacity(self) -> int: ...

    @property
    def context_length(self) -> int: ...

    @property
    def host_bytes(self) -> int:
        """Bytes that have crossed from the device to the host so far."""
        ...

    @property
    def source_kind(self) -> SourceKind | None:
        """What the encoder takes; None where there is none."""
        ...

    def check_source(self, source: Source | None) -> None:
        """Raises `OliveExtError` where a request cannot have this source, or needs one."""
        ...

    def reserve(self, positions: int) -> None:
        """Makes every slot hold `positions`; what is resident is lost when that changes `capacity`."""
        ...

    def reserve_shared_prefix(self, cells: int) -> None:
        """Makes the trunk hold `cells`; what is resident is lost when that changes `shared_prefix_capacity`."""
        ...

    def run(self, step: Step) -> StepOutput: ...

    def release_memory(self) -> None:
        """Frees what has grown with use: KV caches, captured steps, what the encoder returned, the allocator's spare
        memory. The weights stay, and `reserve` makes room again."""
        ...

    def describe(self) -> Mapping[str, Any]: ...

    def close(self) -> None: ...

"""The tap of an engine: it gets every scored step with its output, and returns notes on the step's targets.

Three forms listen: `ResidentTap` here runs a reference on the same steps, those in `recorded` write and read the
reference log-prob cache. Knows no graph and no tokenizer. Axes: R logits rows of a step, T targets.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from typing_extensions import override

from olive_ext.engine.capacity import UNLIMITED
from olive_ext.engine.forms.base import joined
from olive_ext.engine.media.items import Media, MediaItem
from olive_ext.engine.reference.kernels import DivergenceKernels
from olive_ext.engine.requests import KeyedRequest, Notes, Result
from olive_ext.engine.runners.runner import OpenedRunner, Runner, Traits
from olive_ext.engine.step import IntArray, Step, StepOutput
from olive_ext.errors import NotComparableError
from olive_ext.stats.compared_fields import COMPARED

logger = logging.getLogger(__name__)

KEPT_ITEMS = 64
"""Pictures of which a resident reference remembers how it prepares them: those of the steps at hand."""

Items = Sequence[KeyedRequest]


class Tap(ABC):
    """Listens to the steps of requests that are scored only; what is generated does not come here."""

    longest_step = UNLIMITED
    """Tokens of a prompt that a step may hold at most."""

    runners: tuple[Runner, ...] = ()
    """Models of the tap's own: they have the room of the engine's runner, and end with it."""

    kernels: DivergenceKernels | None = None
    """What compares rows of logits, or makes records of them."""

    @property
    def host_bytes(self) -> int:
        """Bytes that were copied from the device to the host for the notes."""
        return sum(one.host_bytes for one in (*self.runners, self.kernels) if one is not None)

    @abstractmethod
    def note(self, step: Step, output: StepOutput) -> Notes | None:
        """Notes [T] on the step's targets. Raises `MemoryShortageError` where memory does not suffice for the step: the
        two parts that the step is then split into, which come without its copies and moves, may still be noted."""

    def traits(self, runner: Runner) -> Traits:
        """What noted steps of `runner` can do: all but overlap, since a step is noted before the next one runs."""
        return replace(runner.traits, overlaps_steps=False)

    def own_media(self, media: Media) -> Media:
        """The pictures and sounds of a request as the tap's `runners` take them."""
        return media

    def miss(self, step: Step) -> None:  # noqa: B027 (most taps have no model of their own)
        """The runner has made the copies and moves of `step`, then ran out of memory; the step's two parts follow."""

    def forget(self) -> None:  # noqa: B027
        """Drops what is known of the slots: the tokens resident in them count no more."""

    def prepare(self, items: Items) -> tuple[Mapping[Hashable, Result], Items]:
        """The results that are known without running their requests, and what is to be run."""
        return {}, items

    def finish(self, key: Hashable, result: Result) -> Result:
        """The complete `result` of the request with this key of those that were prepared last."""
        return result

    def flush(self) -> None:  # noqa: B027
        """The run has ended, however it did: what is complete is kept."""

    def describe(self) -> Mapping[str, Any]:
        """Facts for `describe_execution`."""
        return {}


class NoTap(Tap):
    """Notes nothing, and leaves the traits of the steps as they are."""

    @override
    def note(self, step: Step, output: StepOutput) -> None:
        return None

    @override
    def traits(self, runner: Runner) -> Traits:
        return runner.traits


class ResidentTap(Tap):
    """Runs every step on a reference, too, and compares both models' distributions. Notes are `COMPARED`.

    Both runners return their logits rows. Steps use what both runners can do: the candidate may have more slots than
    its scheduler sees, and so may the reference.
    """

    kernels: DivergenceKernels

    def __init__(
        self,
        candidate: Runner,
        reference: OpenedRunner,
        kernels: DivergenceKernels,
        own_item: Callable[[MediaItem], MediaItem] = lambda item: item,
    ) -> None:
        """`own_item`: a picture as the reference prepares it. Raises `ConfigError` for models of different kinds."""
        self._reference, self.longest_step = reference
        kinds = [runner.traits.source_kind for runner in (self._reference, candidate)]
        if kinds[0] is not kinds[1]:
            names = [kind.value if kind else "none" for kind in kinds]
            raise NotComparableError(f"the reference's encoder takes {names[0]} and the model's {names[1]}")
        self._reference.residency = candidate.residency
        self.runners, self.kernels = (self._reference,), kernels
        self._own_item = lru_cache(maxsize=KEPT_ITEMS)(own_item)
        self._has_warned = False
        self._missed: tuple[Step, ...] = ()
        self._seconds = 0.0

    @override
    def traits(self, runner: Runner) -> Traits:
        own, other = runner.traits, self._reference.traits
        counts = runner.capacity.num_slots, self._reference.capacity.num_slots
        return Traits(
            context_length=min(own.context_length, other.context_length),
            form=joined(own.form, other.form, counts),
            can_rewind=own.can_rewind and other.can_rewind,
            chunked_prefill=own.chunked_prefill and other.chunked_prefill,
            source_kind=own.source_kind,
            row_group=max(own.row_group, other.row_group),
            item_limit=own.item_limit.both(other.item_limit),
            lengths=tuple(sorted({*own.lengths, *other.lengths})),
        )

    def miss(self, step: Step) -> None:
        """Keeps the step for the reference, which has not made its copies and moves."""
        self._missed = (*self._missed, step)

    @override
    def forget(self) -> None:
        self._missed = ()

    @override
    def note(self, step: Step, output: StepOutput) -> Notes:
        missed, self._missed = (*self._missed, step), ()
        copies = tuple(copy for one in missed for copy in one.copies)
        moves = tuple(move for one in missed for move in one.moves)
        begin = time.perf_counter()
        rows = tuple(row._replace(media=self.own_media(row.media)) if row.media else row for row in step.rows)
        reference = self._reference.run(replace(step, rows=rows, copies=copies, moves=moves))
        self._seconds += time.perf_counter() - begin
        notes_T = np.zeros(len(step.targets), COMPARED)
        if not step.targets:
            return notes_T
        both = (reference.logits_RV, output.logits_RV, reference.greedy_ids, output.greedy_ids)
        rows_T, tokens_T = target_arrays(step)
        for name, values_R in self.kernels.compare(*both).items():
            notes_T[name] = values_R[rows_T]
        notes_T["kl_lower"] = notes_T["kl"]
        notes_T["reference_logprobs"] = reference.target_logprobs
        notes_T["reference_is_greedy"] = reference.greedy_ids[rows_T] == tokens_T
        notes_T["same_top"] = (reference.greedy_ids == output.greedy_ids)[rows_T]
        return notes_T

    @override
    def own_media(self, media: Media) -> Media:
        prepared = tuple(replace(run, item=self._own(run.item)) for run in media)
        if not self._has_warned and media != prepared:
            self._has_warned = True
            logger.warning("the reference prepares pictures otherwise than the model: that is compared, too")
        return prepared

    def _own(self, item: MediaItem) -> MediaItem:
        with item.or_lost():
            return self._own_item(item)

    @override
    def describe(self) -> Mapping[str, Any]:
        return {"reference": {"mode": "resident", "seconds": self._seconds, **self._reference.describe()}}


def target_arrays(step: Step) -> tuple[IntArray, IntArray]:
    """The logits row and the token of each target; [T] each."""
    pairs_T2 = np.array(step.targets, np.int64).reshape(-1, 2)
    return pairs_T2[:, 0], pairs_T2[:, 1]

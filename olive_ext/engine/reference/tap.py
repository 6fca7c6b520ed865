"""The tap of an engine: it gets every scored step with its output, and returns notes on the step's targets.

`ResidentTap` runs a reference on the same steps. `WritingTap` writes a reference's distributions into the reference
log-prob cache, and `ReadingTap` compares with them. Knows no graph and no tokenizer. Axes: R logits rows of a step, T
targets.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from typing_extensions import override

from olive_ext.engine.reference.kernels import DivergenceKernels, shape_of
from olive_ext.engine.requests import KeyedRequest, Notes, Request, Result, source_key
from olive_ext.engine.runners.runner import OpenedRunner, Runner, Traits, joined
from olive_ext.engine.step import UNLIMITED, IntArray, Step, StepOutput
from olive_ext.errors import NotComparableError, RecordsError, UnsupportedError
from olive_ext.media.items import Media, MediaItem, media_key
from olive_ext.records import Records, request_key, scored_targets
from olive_ext.stats.compared_fields import COMPARED

logger = logging.getLogger(__name__)

KEPT_ITEMS = 64
"""A resident reference remembers how it prepares so many pictures: those of the steps in progress."""

Items = Sequence[KeyedRequest]


class Tap:
    """Gets the steps of requests that are only scored; generated text does not come here. This one notes nothing, and
    leaves the traits of the steps as they are."""

    longest_step = UNLIMITED
    """The most tokens of a prompt in one step."""

    runners: tuple[Runner, ...] = ()
    """Models of the tap's own: they have the room of the engine's runner, and end with it."""

    kernels: DivergenceKernels | None = None
    """The kernels that compare rows of logits, or make records of them."""

    @property
    def host_bytes(self) -> int:
        """Bytes that were copied from the device to the host for the notes."""
        return sum(part.host_bytes for part in (*self.runners, self.kernels) if part is not None)

    def note(self, step: Step, output: StepOutput) -> Notes | None:
        """Notes [T] on the step's targets. Raises `MemoryShortageError` where memory does not suffice for the step."""
        return None

    def traits(self, runner: Runner) -> Traits:
        """What noted steps of `runner` can do: all but overlap, since a step is noted before the next one runs."""
        return runner.traits if type(self) is Tap else replace(runner.traits, overlaps_steps=False)

    def own_media(self, media: Media) -> Media:
        """The pictures and sounds of a request as the tap's `runners` take them."""
        return media

    def prepare(self, items: Items) -> tuple[Mapping[Hashable, Result], Items]:
        """The results that are known without running their requests, and what is to be run."""
        return {}, items

    def finish(self, key: Hashable, result: Result) -> Result:
        """The complete `result` of the request with this key of those that were prepared last."""
        return result

    def flush(self) -> None:
        """The run has ended, however it did: what is complete is kept."""

    def describe(self) -> Mapping[str, Any]:
        """Facts for `describe_execution`."""
        return {}


class ResidentTap(Tap):
    """Runs every step on a reference, too, and compares both models' distributions. Notes are `COMPARED`.

    Both runners return their logits rows. Steps use what both runners can do: the candidate may have more slots than
    its scheduler sees, and so may the reference.
    """

    kernels: DivergenceKernels

    def __init__(
        self,
        candidate: OpenedRunner,
        reference: OpenedRunner,
        kernels: DivergenceKernels,
        own_item: Callable[[MediaItem], MediaItem] = lambda item: item,
    ) -> None:
        """`own_item`: prepares a picture as the reference does. Raises `ConfigError` for models of different kinds, and
        where one takes one token a step and the other only whole texts."""
        self._reference, self.longest_step = reference
        runners = self._reference, candidate.runner
        names = [runner.encoder.kind.value if runner.encoder else "none" for runner in runners]
        if names[0] != names[1]:
            raise NotComparableError(f"the reference's encoder takes {names[0]} and the model's {names[1]}")
        if 1 in (candidate.chunk_size, self.longest_step) and not all(one.traits.chunked_prefill for one in runners):
            problem = "one of the models takes one token a step and the other only whole texts: set it to 'recorded'"
            raise UnsupportedError(problem, "reference.mode", "resident")
        self._reference.residency = candidate.runner.residency
        self.runners, self.kernels = (self._reference,), kernels
        self._own_item = lru_cache(maxsize=KEPT_ITEMS)(own_item)
        self._has_warned = False
        self._seconds = 0.0

    @override
    def traits(self, runner: Runner) -> Traits:
        candidate, reference = runner.traits, self._reference.traits
        counts = runner.capacity.num_slots, self._reference.capacity.num_slots
        return Traits(
            context_length=min(candidate.context_length, reference.context_length),
            form=joined(candidate.form, reference.form, counts),
            tree_batches=candidate.tree_batches and reference.tree_batches,
            can_rewind=candidate.can_rewind and reference.can_rewind,
            chunked_prefill=candidate.chunked_prefill and reference.chunked_prefill,
            row_group=max(candidate.row_group, reference.row_group),
            item_limit=candidate.item_limit.both(reference.item_limit),
            lengths=tuple(sorted({*candidate.lengths, *reference.lengths})),
        )

    @override
    def note(self, step: Step, output: StepOutput) -> Notes:
        begin = time.perf_counter()
        rows = tuple(row._replace(media=self.own_media(row.media)) if row.media else row for row in step.rows)
        reference = self._reference.run(replace(step, rows=rows))
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
        prepared: Media = ()
        for run in media:
            with run.item.or_lost():
                prepared = (*prepared, replace(run, item=self._own_item(run.item)))
        if not self._has_warned and media != prepared:
            self._has_warned = True
            logger.warning("the reference prepares pictures otherwise than the model: that is compared, too")
        return prepared

    @override
    def describe(self) -> Mapping[str, Any]:
        return {"reference": {"mode": "resident", "seconds": self._seconds, **self._reference.describe()}}


def target_arrays(step: Step) -> tuple[IntArray, IntArray]:
    """The logits row and the token of each target; [T] each."""
    pairs_T2 = np.array(step.targets, np.int64).reshape(-1, 2)
    return pairs_T2[:, 0], pairs_T2[:, 1]


RECORDED = np.dtype([("record", "<i8")])
"""The note of a `WritingTap` on a target: the number of the record of the distribution that scored it."""


class WritingTap(Tap):
    """Records the distributions that targets are scored with, each once. Requests that are recorded are not run."""

    kernels: DivergenceKernels

    def __init__(self, records: Records, kernels: DivergenceKernels) -> None:
        self._records, self.kernels = records, kernels
        self._rng = np.random.default_rng(records.form.seed)
        self._digests: dict[Hashable, bytes] = {}

    @override
    def prepare(self, items: Items) -> tuple[Mapping[Hashable, Result], Items]:
        self._digests = {key: key_of(request) for key, request in items}
        content = zlib.crc32(b"".join(sorted(self._digests.values())))
        self._rng = np.random.default_rng([self._records.form.seed, content])  # the same requests, the same tokens
        recorded = {key: known_result(self._records, digest) for key, digest in self._digests.items()}
        known = {key: result for key, result in recorded.items() if result is not None}
        return known, [item for item in items if item[0] not in known]

    @override
    def note(self, step: Step, output: StepOutput) -> Notes:
        notes_T = np.zeros(len(step.targets), RECORDED)
        if step.targets:
            rows_T, _ = target_arrays(step)
            wanted, places_T = np.unique(rows_T, return_inverse=True)
            records_R = self.kernels.record(output.logits_RV, self._records.form, self._rng)
            notes_T["record"] = self._records.append(records_R[wanted])[places_T]
        return notes_T

    def finish(self, key: Hashable, result: Result) -> Result:
        """Keeps the request's scores. The result goes on without notes: it was not compared with anything."""
        assert result.notes is not None
        targets = scored_targets(result.notes["record"], result.logprobs, result.is_greedy)
        self._records.put(self._digests[key], targets)
        return replace(result, notes=None)

    @override
    def flush(self) -> None:
        self._records.flush()

    @override
    def describe(self) -> Mapping[str, Any]:
        return {"records": self._records.describe()}


class ReadingTap(Tap):
    """Compares with the records of a reference. Notes are `COMPARED`.

    The logits rows name the numbers of their records. What depends on the target alone (its log-probability under the
    reference) is not noted of a step: the records have it by request.
    """

    kernels: DivergenceKernels

    def __init__(self, records: Records, kernels: DivergenceKernels) -> None:
        self._records, self.kernels = records, kernels
        self._scored: dict[Hashable, Notes] = {}

    def traits(self, runner: Runner) -> Traits:
        """The traits of any tap, with the reference's sides too: a row of logits is compared with one record."""
        traits = super().traits(runner)
        lengths = {*traits.lengths, *self._records.facts.get("lengths", ())}
        return replace(traits, lengths=tuple(sorted(lengths)))

    def prepare(self, items: Items) -> tuple[Mapping[Hashable, Result], Items]:
        """The requests with the numbers of their records. Raises `RecordsError` for one that is not recorded."""
        records = {key: self._records.find(key_of(request)) for key, request in items}
        self._scored = {key: scored for key, scored in records.items() if scored is not None}
        if missing := len(records) - len(self._scored):
            raise RecordsError(
                f"the records in '{self._records.folder}' hold nothing of {missing} of {len(records)} requests: record "
                "the reference on the same tasks, with the same limit, template, max_length and image processor"
            )
        numbers = {key: tuple(scored["record"].tolist()) for key, scored in self._scored.items()}
        return {}, [(key, replace(request, records=numbers[key])) for key, request in items]

    @override
    def note(self, step: Step, output: StepOutput) -> Notes:
        notes_T = np.zeros(len(step.targets), COMPARED)
        if not step.targets:
            return notes_T
        assert len(step.logits_rows) == shape_of(output.logits_RV)[0]
        form = self._records.form
        records_R = self._records.get(np.array([max(row.record, 0) for row in step.logits_rows]))
        compared = self.kernels.compare_recorded(records_R, form, output.logits_RV, output.greedy_ids)
        rows_T, _ = target_arrays(step)
        for name, values_R in compared.items():
            notes_T[name] = values_R[rows_T]
        if form.is_whole:
            top_R = records_R["logits"].argmax(-1)
            notes_T["kl_lower"] = notes_T["kl"]
        else:
            top_R = records_R["ids"][:, 0]
            notes_T["tail_mass"] = records_R["tail"][rows_T]
            notes_T["kl_reverse"] = np.nan
        notes_T["same_top"] = (top_R == output.greedy_ids)[rows_T]
        return notes_T

    @override
    def finish(self, key: Hashable, result: Result) -> Result:
        assert result.notes is not None
        result.notes["reference_logprobs"] = self._scored[key]["logprob"]
        result.notes["reference_is_greedy"] = self._scored[key]["is_greedy"]
        return result

    @override
    def describe(self) -> Mapping[str, Any]:
        return {"reference": {"mode": "recorded", **self._records.describe()}}


def known_result(records: Records, key: bytes) -> Result | None:
    """The recorded scores of the request with this key."""
    scored = records.find(key)
    return None if scored is None else Result(tuple(scored["logprob"].tolist()), tuple(scored["is_greedy"].tolist()))


def key_of(request: Request) -> bytes:
    """The key of a request in the reference log-prob cache."""
    return request_key(request.tokens.array, request.num_targets, source_key(request.source) + media_key(request.media))

"""Taps at both ends of the reference log-prob cache: one writes a reference's distributions, one compares with them.

Knows no graph and no tokenizer. Axes: R logits rows of a step, T targets.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from typing_extensions import override

from olive_ext.engine.media.items import media_key
from olive_ext.engine.reference.kernels import DivergenceKernels, shape_of
from olive_ext.engine.reference.tap import Items, Tap, target_arrays
from olive_ext.engine.requests import Notes, Request, Result, source_key
from olive_ext.engine.runners.runner import Runner, Traits
from olive_ext.engine.step import Step, StepOutput
from olive_ext.errors import RecordsError
from olive_ext.records import Records, request_key, scored_targets
from olive_ext.stats.compared_fields import COMPARED

RECORDED = np.dtype([("record", "<i8")])
"""A `WritingTap`'s note on a target: the number of the record of the distribution that it was scored with."""


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
        known = {key: result for key in self._digests if (result := self._known(key)) is not None}
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
        """Keeps the request's scores. The result goes on without notes: there is nothing that it was compared with."""
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

    def _known(self, key: Hashable) -> Result | None:
        scored = self._records.find(self._digests[key])
        if scored is None:
            return None
        return Result(tuple(scored["logprob"].tolist()), tuple(scored["is_greedy"].tolist()))


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
        """Those of any tap, on the reference's sides, too: a row of logits is compared with one record."""
        traits = super().traits(runner)
        lengths = {*traits.lengths, *self._records.facts.get("lengths", ())}
        return replace(traits, lengths=tuple(sorted(lengths)))

    def prepare(self, items: Items) -> tuple[Mapping[Hashable, Result], Items]:
        """The requests with the numbers of their records. Raises `RecordsError` where one is not recorded."""
        found = {key: self._records.find(key_of(request)) for key, request in items}
        self._scored = {key: scored for key, scored in found.items() if scored is not None}
        if missing := len(found) - len(self._scored):
            raise RecordsError(
                f"the records in '{self._records.folder}' hold nothing of {missing} of {len(found)} requests: record "
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
        found = self.kernels.compare_recorded(records_R, form, output.logits_RV, output.greedy_ids)
        rows_T, _ = target_arrays(step)
        for name, values_R in found.items():
            notes_T[name] = values_R[rows_T]
        if form.is_whole:
            top_R = records_R["logits"].argmax(-1)
            notes_T["kl_lower"] = notes_T["kl"]
        else:
            top_R = records_R["ids"][:, 0]
            notes_T["tail_mass"] = records_R["tail"][rows_T]
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


def key_of(request: Request) -> bytes:
    """The key of a request in the reference log-prob cache."""
    return request_key(request.tokens, request.num_targets, source_key(request.source) + media_key(request.media))

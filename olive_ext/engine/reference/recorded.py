"""The two ends of records: a runner that writes what a reference says, and one that compares with it later.

Axes: R logits rows of a step, T targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from olive_ext.engine.reference.kernels import Divergence, shape_of
from olive_ext.engine.reference.resident import heads_and_tokens
from olive_ext.engine.requests import Notes
from olive_ext.engine.runners.wrapper import WrappedRunner
from olive_ext.engine.step import Runner, Step, StepOutput
from olive_ext.records import Records
from olive_ext.stats.compared_fields import COMPARED

RECORDED = np.dtype([("record", "<i8")])
"""What a `RecordingRunner` notes of a target: the number of the record of the distribution that it was scored with."""


class RecordingRunner(WrappedRunner):
    """Records the distributions that targets are scored with, each once."""

    def __init__(self, reference: Runner, records: Records, divergence: Divergence) -> None:
        super().__init__(reference)
        self._records = records
        self._divergence = divergence
        self._rng = np.random.default_rng([records.form.seed, records.num_records])

    @property
    def host_bytes(self) -> int:
        return self._inner.host_bytes + self._divergence.host_bytes

    def run(self, step: Step) -> StepOutput:
        output = self._inner.run(step)
        notes_T = np.zeros(len(step.targets), RECORDED)
        if step.targets:
            heads_T, _ = heads_and_tokens(step)
            wanted, places_T = np.unique(heads_T, return_inverse=True)
            records_R = self._divergence.record(output.logits_RV, self._records.form, self._rng)
            notes_T["record"] = self._records.append(records_R[wanted])[places_T]
        return replace(output, logits_RV=None, notes_T=notes_T)

    def describe(self) -> Mapping[str, Any]:
        return {**self._inner.describe(), "records": self._records.describe()}


class RecordedRunner(WrappedRunner):
    """Compares with the records whose numbers the logits rows name.

    What depends on the target alone (its log-probability under the reference) is not noted here: the records have it by
    request.
    """

    def __init__(self, candidate: Runner, records: Records, divergence: Divergence) -> None:
        super().__init__(candidate)
        self._records = records
        self._divergence = divergence

    @property
    def host_bytes(self) -> int:
        return self._inner.host_bytes + self._divergence.host_bytes

    def run(self, step: Step) -> StepOutput:
        output = self._inner.run(step)
        return replace(output, logits_RV=None, notes_T=self._notes(step, output))

    def describe(self) -> Mapping[str, Any]:
        return {**self._inner.describe(), "reference": {"mode": "recorded", **self._records.describe()}}

    def _notes(self, step: Step, output: StepOutput) -> Notes:
        notes_T = np.zeros(len(step.targets), COMPARED)
        if not step.targets:
            return notes_T
        assert len(step.logits_rows) == shape_of(output.logits_RV)[0]
        form = self._records.form
        records_R = self._records.get(np.array([max(head.record, 0) for head in step.logits_rows]))
        found = self._divergence.compare_recorded(records_R, form, output.logits_RV, output.greedy_ids)
        heads_T, _ = heads_and_tokens(step)
        for name, values_R in found.items():
            notes_T[name] = values_R[heads_T]
        if form.is_whole:
            top_R = records_R["logits"].argmax(-1)
            notes_T["kl_lower"] = notes_T["kl"]
        else:
            top_R = records_R["ids"][:, 0]
            notes_T["tail_mass"] = records_R["tail"][heads_T]
        notes_T["same_top"] = (top_R == output.greedy_ids)[heads_T]
        return notes_T

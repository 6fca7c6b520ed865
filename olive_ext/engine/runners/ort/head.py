"""The scoring head of a runner: binds its row indices, reads the few numbers that are copied to the host.
Knows no cache.

Axes: B rows, S tokens of a row, R logits rows, T targets, K sampled rows, N rows of beams, C candidates, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort
from typing_extensions import override

from olive_ext.engine.requests import integers
from olive_ext.engine.runners.ort.inputs import InputFeed
from olive_ext.engine.step import NO_CANDIDATES, Candidates, IntArray, Step, StepOutput
from olive_ext.errors import understood
from olive_ext.graph.onnx_file import ModelProto
from olive_ext.graph.scoring_head import BANNED, NEXT_IDS, SCORES_ONLY, HeadOutputs, ScoringGraph, add_scoring_head
from olive_ext.graph.standalone_graphs import CANDIDATE_OUTPUTS, candidates_graph
from olive_ext.model.providers.devices import Device
from olive_ext.model.types import DecoderSpec

OUTPUTS = ("target_logprobs", "greedy_ids", "sample_logits")
ROWS_OUTPUT = "score_logits"


def with_head(proto: ModelProto, spec: DecoderSpec, outputs: HeadOutputs = SCORES_ONLY) -> ScoringGraph:
    """The decoder with the scoring head. Raises ModelError where it cannot be scored."""
    keeps = "few rows take other kernels, which the rounding of activations would show" if spec.rounds_rows else ""
    with understood(proto.graph.name or "the decoder"):
        return add_scoring_head(proto, spec.logits.name, outputs, keeps_layers=keeps)


class HeadPlan(NamedTuple):
    """Where a scoring head runs, and what it leaves on that device."""

    open_graph: Callable[[bytes], ort.InferenceSession]
    """Opens the small graph that reads candidates of beams."""

    exposes_rows: bool
    """The logits rows are left."""

    overlaps_steps: bool
    """The greedy tokens are left, for a step that begins before they are read."""

    has_bans: bool
    """The graph takes the number of each row's list of tokens that it must not give."""

    device: Device
    kind: str = "untouched"
    reason: str = "the graph runs as it is; its logits feed a second graph"
    products: Sequence[tuple[int, int]] = ()
    """(inner size, columns) of those besides the head's that run on scored rows only."""


class ScoringHead:
    """Computes a step's scores on the device, in the decoder's graph. Rows to sample from stay there unread."""

    def __init__(self, plan: HeadPlan) -> None:
        self.next_ids: ort.OrtValue | None = None
        """The greedy tokens of the step read last, one for each logits row, as the decoder takes them."""

        self._plan = plan
        self._beams_session: ort.InferenceSession | None = None
        """Reads candidates of beams: opened when a first beam search needs it."""

    @property
    def overlaps_steps(self) -> bool:
        """Whether `next_ids` are kept."""
        return self._plan.overlaps_steps

    def bind(self, binding: ort.IOBinding, feed: InputFeed, step: Step) -> None:
        """Binds the inputs and outputs that the head adds to the decoder session; `feed` is that session's. Row indices
        go in, scores out to the host: `score_rows`[R] of B*S, `target_rows`[T] and `sample_rows`[K] of R."""
        device, whole_rows = self._plan.device, step.whole_rows
        rows_R, offsets_R, _, bans_R = _columns(step.logits_rows, 4)
        target_rows_T, target_ids_T = _columns(step.targets, 2)
        num_idle = output_rows(step)["sample_logits"] - len(whole_rows)
        indices = {
            "score_rows": step.columns.starts_B[rows_R] + offsets_R,
            "target_rows": target_rows_T,
            "target_ids": target_ids_T,
            "sample_rows": integers([*whole_rows, *[0] * num_idle]),
        }
        if self._plan.has_bans:
            indices["score_bans"] = bans_R if len(bans_R) else integers([0])
        for name, values in indices.items():
            feed.bind(binding, name, values)
        for name in OUTPUTS:
            is_read = name != "sample_logits" or bool(step.samples and not step.beams)
            binding.bind_output(name, *(() if is_read else (device.kind, device.index)))
        self.next_ids = None
        if self._plan.overlaps_steps:
            binding.bind_output(NEXT_IDS, device.kind, device.index)
        if self._plan.exposes_rows:
            binding.bind_output(ROWS_OUTPUT, device.kind, device.index)

    def read(self, outputs: Sequence[ort.OrtValue], step: Step) -> StepOutput:
        """The scores of a step that has run; without those of what it was filled up with."""
        logprobs_T, greedy_R, samples_KV = outputs[: len(OUTPUTS)]
        num_sampled, candidates = len(step.samples), NO_CANDIDATES
        read_T = logprobs_T.numpy()[: len(step.targets)] if step.targets else np.zeros(0, np.float32)
        empty_KV = np.zeros((0, samples_KV.shape()[1]), np.float32)
        sampled_KV = samples_KV.numpy()[:num_sampled] if step.samples else empty_KV
        if step.beams:
            rows = range(num_sampled, num_sampled + len(step.beams))
            candidates = self._candidates(samples_KV, rows, step.num_candidates)
        output = StepOutput(read_T, greedy_R.numpy()[: len(step.logits_rows)], sampled_KV, candidates=candidates)
        rest = list(outputs[len(OUTPUTS) :])
        if self._plan.overlaps_steps and rest:  # a captured step leaves none
            self.next_ids = rest.pop(0)
        return replace(output, logits_RV=rest[0]) if rest else output

    def _candidates(self, logits_KV: ort.OrtValue, rows: range, count: int) -> Candidates:
        """Those of `rows`, of each `count` or the whole vocabulary. Banned tokens have -inf."""
        vocab_size = logits_KV.shape()[1]
        if self._beams_session is None:
            self._beams_session = self._plan.open_graph(candidates_graph(vocab_size))
        binding = self._beams_session.io_binding()
        binding.bind_ortvalue_input("logits", logits_KV)
        for name, number in (("first", rows.start), ("stop", rows.stop), ("count", min(count, vocab_size))):
            binding.bind_cpu_input(name, np.array([number], np.int64))
        for name in CANDIDATE_OUTPUTS:
            binding.bind_output(name)
        self._beams_session.run_with_iobinding(binding)
        logprobs, ids = binding.get_outputs()
        logprobs_NC = logprobs.numpy()
        return Candidates(np.where(logprobs_NC > BANNED / 2, logprobs_NC, np.float32(-np.inf)), ids.numpy())

    def describe(self) -> Mapping[str, Any]:
        """Where the head is, why, and the products that run on scored rows."""
        return {
            "scoring_head": self._plan.kind,
            "scoring_head_reason": self._plan.reason,
            "scored_row_products": [list(sizes) for sizes in self._plan.products],
        }


class SeparateHead(ScoringHead):
    """The decoder's graph is untouched: its logits stay on the device and feed a second session."""

    def __init__(self, session: ort.InferenceSession, logits: str, plan: HeadPlan) -> None:
        super().__init__(plan)
        self._session = session
        self._logits = logits
        self._feed = InputFeed(session, plan.device)

    @override
    def bind(self, binding: ort.IOBinding, feed: InputFeed, step: Step) -> None:
        binding.bind_output(self._logits, self._plan.device.kind, self._plan.device.index)

    @override
    def read(self, outputs: Sequence[ort.OrtValue], step: Step) -> StepOutput:
        (logits,) = outputs
        binding = self._session.io_binding()
        binding.bind_ortvalue_input("logits", logits)
        super().bind(binding, self._feed, step)
        self._session.run_with_iobinding(binding)
        return super().read(binding.get_outputs(), step)


def _columns(items: Sequence[tuple[int, ...]], width: int) -> list[IntArray]:
    """The numbers of each place in the items, of which there may be none."""
    return [integers(column) for column in zip(*items, strict=True)] or [integers(())] * width


def output_rows(step: Step) -> dict[str, int]:
    """Rows of each output of the scoring head; none is empty where a step has a `width`, as some providers need."""
    num_samples = max(1, len(step.whole_rows)) if step.width is not None else len(step.whole_rows)
    return dict(zip(OUTPUTS, (len(step.targets), len(step.logits_rows), num_samples), strict=True))

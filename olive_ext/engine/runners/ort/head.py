"""The scoring head of a runner: binds its row indices, reads the few numbers that are copied to the host.
Knows no cache.

Axes: B rows, S tokens of a row, R logits rows, T targets, K sampled rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import onnxruntime as ort

from olive_ext.engine.requests import integers
from olive_ext.engine.runners.ort.candidates import CandidateReader
from olive_ext.engine.runners.ort.inputs import Feed
from olive_ext.engine.runners.ort.kv.kv_store import Device
from olive_ext.engine.step import NO_CANDIDATES, Step, StepOutput
from olive_ext.errors import understood
from olive_ext.graph.onnx_file import ModelProto
from olive_ext.graph.scoring_head import NEXT_IDS, SCORES_ONLY, HeadOutputs, ScoringGraph, add_scoring_head
from olive_ext.model.types import DecoderSpec

OUTPUTS = ("target_logprobs", "greedy_ids", "sample_logits")
ROWS_OUTPUT = "score_logits"


def with_head(proto: ModelProto, spec: DecoderSpec, outputs: HeadOutputs = SCORES_ONLY) -> ScoringGraph:
    """The decoder with the scoring head. Raises ModelError where it cannot be scored."""
    keeps = "few rows take other kernels, which the rounding of activations would show" if spec.rounds_rows else ""
    with understood(proto.graph.name or "the decoder"):
        return add_scoring_head(proto, spec.logits.name, outputs, keeps_layers=keeps)


class Head:
    """Computes a step's scores on the device `place`, as a part of the decoder's graph. The logits rows are left on the
    device `exposed`, the greedy tokens on `kept`, where these are given; rows to sample from that nobody reads stay.
    `has_bans`: the graph takes the number of each row's list of tokens that it must not give.

    `open_graph` opens the small graph that reads candidates of beams. `products`: (inner size, columns) of those
    besides the head's that run on scored rows only.
    """

    def __init__(
        self,
        kind: str,
        reason: str,
        place: Device,
        open_graph: Callable[[bytes], ort.InferenceSession],
        exposed: Device | None = None,
        kept: Device | None = None,
        products: Sequence[tuple[int, int]] = (),
        *,
        has_bans: bool = False,
    ) -> None:
        self.next_ids: ort.OrtValue | None = None
        """The greedy tokens of the step read last, one for each logits row, as the decoder takes them."""

        self._place = place
        self._candidates = CandidateReader(open_graph)
        self._products = products
        self._exposed = exposed
        self._kept = kept
        self._has_bans = has_bans
        self._kind = kind
        self._reason = reason

    @property
    def async_decode(self) -> bool:
        """Whether `next_ids` are kept."""
        return self._kept is not None

    def bind(self, binding: ort.IOBinding, feed: Feed, step: Step) -> None:
        """Binds the inputs and outputs that the head adds to the decoder session; `feed` is that session's. Row indices
        go in, scores out to the host: `score_rows`[R] of B*S, `target_rows`[T] and `sample_rows`[K] of R."""
        starts = list(accumulate(map(len, [row.tokens for row in step.rows]), initial=0))
        whole_rows = step.whole_rows
        num_idle = output_rows(step)["sample_logits"] - len(whole_rows)
        indices = {
            "score_rows": [starts[found.row] + found.offset for found in step.logits_rows],
            "target_rows": [row for row, _ in step.targets],
            "target_ids": [token for _, token in step.targets],
            "sample_rows": [*whole_rows, *[0] * num_idle],
        }
        if self._has_bans:
            indices["score_bans"] = [found.ban for found in step.logits_rows] or [0]
        for name, values in indices.items():
            feed.bind(binding, name, integers(values))
        for name in OUTPUTS:
            is_read = name != "sample_logits" or bool(step.samples and not step.beams)
            binding.bind_output(name, *(() if is_read else (self._place.kind, self._place.index)))
        self.next_ids = None
        if self._kept is not None:
            binding.bind_output(NEXT_IDS, self._kept.kind, self._kept.index)
        if self._exposed is not None:
            binding.bind_output(ROWS_OUTPUT, self._exposed.kind, self._exposed.index)

    def read(self, outputs: Sequence[ort.OrtValue], step: Step) -> StepOutput:
        logprobs_T, greedy_R, samples_KV = outputs[: len(OUTPUTS)]
        num_sampled, candidates = len(step.samples), NO_CANDIDATES
        sampled_KV = samples_KV.numpy() if step.samples else np.zeros((0, samples_KV.shape()[1]), np.float32)
        if step.beams:
            rows, sampled_KV = range(num_sampled, num_sampled + len(step.beams)), sampled_KV[:num_sampled]
            candidates = self._candidates.read(samples_KV, rows, step.num_candidates)
        output = StepOutput(logprobs_T.numpy(), greedy_R.numpy(), sampled_KV, candidates=candidates)
        rest = list(outputs[len(OUTPUTS) :])
        if self._kept is not None:
            self.next_ids = rest.pop(0)
        return replace(output, logits_RV=rest[0]) if rest else output

    def describe(self) -> Mapping[str, Any]:
        return {
            "scoring_head": self._kind,
            "scoring_head_reason": self._reason,
            "scored_row_products": [list(sizes) for sizes in self._products],
        }


class SeparateHead(Head):
    """The decoder's graph is untouched: its logits stay on the device and feed a second session."""

    def __init__(
        self,
        session: ort.InferenceSession,
        logits: str,
        device: Device,
        open_graph: Callable[[bytes], ort.InferenceSession],
        *,
        exposes_rows: bool,
        async_decode: bool,
        has_bans: bool,
    ) -> None:
        why = "the graph runs as it is; its logits feed a second graph"
        places = (device if exposes_rows else None), (device if async_decode else None)
        super().__init__("untouched", why, device, open_graph, *places, has_bans=has_bans)
        self._session = session
        self._logits = logits
        self._device = device
        self._feed = Feed(session, device)

    def bind(self, binding: ort.IOBinding, feed: Feed, step: Step) -> None:
        binding.bind_output(self._logits, self._device.kind, self._device.index)

    def read(self, outputs: Sequence[ort.OrtValue], step: Step) -> StepOutput:
        (logits,) = outputs
        binding = self._session.io_binding()
        binding.bind_ortvalue_input("logits", logits)
        super().bind(binding, self._feed, step)
        self._session.run_with_iobinding(binding)
        return super().read(binding.get_outputs(), step)


def output_rows(step: Step) -> dict[str, int]:
    """How many rows each output of the scoring head has. A step with a `width` has no empty ones, which not
    every provider takes."""
    num_samples = max(1, len(step.whole_rows)) if step.width is not None else len(step.whole_rows)
    return dict(zip(OUTPUTS, (len(step.targets), len(step.logits_rows), num_samples), strict=True))

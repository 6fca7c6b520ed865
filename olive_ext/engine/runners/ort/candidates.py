"""Reads the most probable tokens of rows of logits that stay where they are. Knows no decoder.

Axes: K rows of logits, V vocabulary, N rows that are read, C candidates of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnxruntime as ort

from olive_ext.engine.step import Candidates
from olive_ext.graph.candidates import OUTPUTS, candidates_graph
from olive_ext.graph.scoring_head import BANNED


class CandidateReader:
    """One small graph, opened when a first beam search needs it."""

    def __init__(self, open_graph: Callable[[bytes], ort.InferenceSession]) -> None:
        self._open_graph = open_graph
        self._session: ort.InferenceSession | None = None

    def read(self, logits_KV: ort.OrtValue, rows: Sequence[int], count: int) -> Candidates:
        """Those of `rows`, of each `count` or the whole vocabulary. Banned tokens have -inf."""
        vocab_size = logits_KV.shape()[1]
        if self._session is None:
            self._session = self._open_graph(candidates_graph(vocab_size))
        binding = self._session.io_binding()
        binding.bind_ortvalue_input("logits", logits_KV)
        binding.bind_cpu_input("rows", np.array(rows, np.int64))
        binding.bind_cpu_input("count", np.array([min(count, vocab_size)], np.int64))
        for name in OUTPUTS:
            binding.bind_output(name)
        self._session.run_with_iobinding(binding)
        logprobs, ids = binding.get_outputs()
        logprobs_NC = logprobs.numpy()
        return Candidates(np.where(logprobs_NC > BANNED / 2, logprobs_NC, np.float32(-np.inf)), ids.numpy())

"""The reference where there is no Hugging Face model: a plain forward pass of the file as it is, logits on the host.

Shares no code with the package: inputs are filled by their names and types, caches are empty or zero.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

TYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
    "tensor(bool)": np.bool_,
}


class PlainForward:
    """Log-probabilities of a package's decoder by whole forward passes."""

    def __init__(self, decoder: Path, embedding: Path | None = None) -> None:
        self._decoder = _session(decoder)
        self._embedding = _session(embedding) if embedding else None
        self._config = _genai_config(decoder)
        outputs = [output.name for output in self._decoder.get_outputs()]
        self._logits = next(name for name in outputs if name.startswith("logits"))

    def logprobs(self, tokens: Sequence[int]) -> np.ndarray:
        """[S, V] in double precision: row s is the distribution behind token s."""
        feeds = {value.name: self._fill(value, tokens) for value in self._decoder.get_inputs()}
        if self._embedding is not None:
            feeds |= self._embed(tokens)
        (logits,) = self._decoder.run([self._logits], feeds)
        logits_SV = logits[0].astype(np.float64)
        largest_S1 = logits_SV.max(-1, keepdims=True)
        return logits_SV - largest_S1 - np.log(np.exp(logits_SV - largest_S1).sum(-1, keepdims=True))

    def score(self, context: Sequence[int], target: Sequence[int]) -> list[float]:
        logprobs_SV = self.logprobs([*context, *target][:-1])
        return [float(logprobs_SV[len(context) - 1 + i, token]) for i, token in enumerate(target)]

    def generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(int(self.logprobs(tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    def _embed(self, tokens: Sequence[int]) -> dict[str, np.ndarray]:
        assert self._embedding is not None
        feeds = {value.name: self._fill(value, tokens) for value in self._embedding.get_inputs()}
        names = [output.name for output in self._embedding.get_outputs()]
        return dict(zip(names, self._embedding.run(names, feeds), strict=True))

    def _fill(self, value: Any, tokens: Sequence[int]) -> np.ndarray:
        length, kind = len(tokens), TYPES[value.type]
        positions = np.arange(length)
        known = {
            "input_ids": np.array([tokens]),
            "attention_mask": np.ones((1, length)),
            "position_ids": np.broadcast_to(positions, (3, 1, length) if len(value.shape) == 3 else (1, length)),
            "cache_position": positions,
            "past_seq_len": np.full([1] * len(value.shape), length - 1),
            "total_seq_len": np.full([1] * len(value.shape), length),
            "write_indices": np.zeros(1),
            "nonpad_kv_seqlen": np.full(1, length),
            "use_cache_branch": np.zeros(1),
        }
        if value.name in known:
            return np.ascontiguousarray(known[value.name], kind)
        return np.zeros([self._size(size, axis, length) for axis, size in enumerate(value.shape)], kind)

    def _size(self, size: int | str, axis: int, length: int) -> int:
        if isinstance(size, int):
            return size
        if axis == 0 and "batch" in size:
            return 1
        if "sliding" in size:
            return max(length, self._config["decoder"]["sliding_window"]["window_size"])
        if size == "kv_cache_dim":
            return int(self._config["decoder"]["head_size"])
        return 0


def _genai_config(decoder: Path) -> dict[str, Any]:
    for folder in (decoder.parent, decoder.parent.parent):
        if (folder / "genai_config.json").is_file():
            return json.loads((folder / "genai_config.json").read_text())["model"]
    return {}


@lru_cache(maxsize=4)
def _session(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

"""What the generators of one onnxruntime-genai model can do, found by trying: what they refuse depends on the model,
the device and the release, and some do not refuse but go wrong.

Axes: S tokens fed, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from olive_ext.errors import ModelError, NonFiniteError
from olive_ext.model.types import ModelFiles

MAX_DEVIATION = 0.05
"""Part of the logits' own spread by which they may differ between two ways to feed the same tokens. Kernels for one and
for several tokens round differently (1 % with int4 weights); a cache with the wrong content differs by about 1."""

NUM_TOKENS = 4
"""Tokens that a trial feeds."""

Logits = npt.NDArray[np.float64]


GenaiGenerator: TypeAlias = Any
"""An `onnxruntime_genai.Generator`. No token is drawn from it: its stop ids and search settings play no part."""


class Continues(str, Enum):
    """How tokens may follow those that a generator holds."""

    BY_MANY = "several tokens at once"
    BY_ONE = "one token at a time"
    NOT = "not at all"


@dataclass(frozen=True)
class GeneratorTraits:
    """What every generator of one model can do."""

    continues: Continues
    returns_all_rows: bool
    """The logits behind every token fed can be read, not only those behind the last."""

    rewinds: bool
    """A generator can be cut back to fewer tokens."""


def input_window(files: ModelFiles) -> int:
    """Tokens that a graph of static shape takes (0: any); `slide_inputs` is true where it is not written."""
    window = (files.genai_config.get("model") or {}).get("decoder", {}).get("sliding_window") or {}
    return int(window.get("window_size", 0)) if window.get("slide_inputs", True) else 0


def feed(generator: GenaiGenerator, tokens: Sequence[int], one_by_one: bool = False) -> None:
    """Appends `tokens`; none is lawful."""
    size = 1 if one_by_one else max(1, len(tokens))
    for start in range(0, len(tokens), size):
        generator.append_tokens(np.array(tokens[start : start + size], np.int32))


def find_traits(
    new_generator: Callable[[], GenaiGenerator],
    tokens: Sequence[int],
    logits_name: str,
    *,
    may_rewind: bool = True,
    window_size: int = 0,
) -> GeneratorTraits:
    """Feeds the first `NUM_TOKENS` of `tokens` in several ways and compares the logits behind the last.

    `may_rewind` is False where a rewind is known to go wrong only later (a cache that drops old positions).
    `window_size` is that of a model whose inputs have a fixed length; `tokens` are as many at least. Its generators
    count the padding of their last window as tokens: nothing can follow, and trying may end the process (0.14.1 and
    0.18.0). Raises `ModelError` where different ways to feed give different logits and none is known to be right, and
    `NonFiniteError` for logits that are NaN or +inf.
    """
    trial = _GeneratorTrial(new_generator, list(tokens[:NUM_TOKENS]), logits_name)
    continues = Continues.NOT if window_size else trial.continues()
    if continues is Continues.NOT:
        trial.check_padding(tokens[:window_size])
        return GeneratorTraits(continues, returns_all_rows=False, rewinds=False)
    return GeneratorTraits(continues, trial.returns_all_rows, may_rewind and trial.rewinds(continues))


class _GeneratorTrial:
    def __init__(self, new_generator: Callable[[], GenaiGenerator], tokens: list[int], logits_name: str) -> None:
        self._new_generator = new_generator
        self._tokens = tokens
        self._logits_name = logits_name
        self._is_refused = False
        generator = self._fed(tokens)
        self._expected_V = _last(generator)
        if not (self._expected_V < np.inf).all():  # no comparison of such logits tells anything
            raise NonFiniteError(f"the model's output behind {len(tokens)} tokens, tried as it opens, is not finite")
        self.returns_all_rows = len(self._rows(generator)) == len(tokens)

    def continues(self) -> Continues:
        for way in (Continues.BY_MANY, Continues.BY_ONE):
            if self._agrees(self._fed(self._tokens[:1]), 1, way):
                return way
        return Continues.NOT

    def rewinds(self, continues: Continues) -> bool:
        generator = self._fed(self._tokens)
        for length in (1, 0):
            try:
                generator.rewind_to(length)
            except RuntimeError:
                return False
            if not self._agrees(generator, length, continues):
                return False
        return True

    def check_padding(self, window: Sequence[int]) -> None:
        """Raises `ModelError` where tokens that are fed at once get other logits with padding than without.

        A full `window` needs no padding, and its rows are those of its beginnings: they are compared. Without a window
        a generator that refuses to go on from a past passes, and one that goes on with wrong logits does not.
        """
        if not window and self._is_refused:
            return
        rows_SV = self._rows(self._fed(window)) if window else np.empty((0, 0))
        place = min(len(self._tokens), len(window)) - 1
        if len(rows_SV) != len(window) or place < 0 or not self._is_close(rows_SV[place]):
            raise ModelError(
                "onnxruntime-genai gives different logits for the same tokens, depending on how they are fed to this "
                "model: the package does not fit the release that is installed"
            )

    def _fed(self, tokens: Sequence[int]) -> GenaiGenerator:
        generator = self._new_generator()
        feed(generator, tokens)
        return generator

    def _rows(self, generator: GenaiGenerator) -> Logits:
        try:
            rows_SV: Logits = generator.get_output(self._logits_name)[0].astype(np.float64)
        except RuntimeError:
            return np.empty((0, 0))
        return rows_SV

    def _agrees(self, generator: GenaiGenerator, length: int, way: Continues) -> bool:
        """Whether the generator, which holds `length` tokens, ends with the expected logits after the others."""
        try:
            feed(generator, self._tokens[length:], one_by_one=way is Continues.BY_ONE and length > 0)
        except RuntimeError:
            self._is_refused = True
            return False
        return self._is_close(_last(generator))

    def _is_close(self, logits_V: Logits) -> bool:
        spread = np.linalg.norm(self._expected_V - self._expected_V.mean())
        return bool(np.linalg.norm(logits_V - self._expected_V) <= MAX_DEVIATION * spread and spread > 0)


def _last(generator: GenaiGenerator) -> Logits:
    logits_V: Logits = generator.get_logits().reshape(-1).astype(np.float64)
    return logits_V

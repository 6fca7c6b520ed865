"""Runs steps on a generator of onnxruntime-genai, one sequence at a time. Knows generators by what they do, not their
package.

The generator only ever takes tokens in: it never draws one, so its stop ids and search settings play no part.
Axes: S tokens of a row, R head rows, T targets, K sampled rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from olive_ext.engine.step import Batching, FloatArray, Step, StepOutput
from olive_ext.errors import ModelError, RunError

CAPACITY_STEP = 64
"""Generators are made for multiples of this many positions."""

MAX_DEVIATION = 0.05
"""Part of the logits' own spread by which they may differ between two ways to feed the same tokens. Kernels for one and
for several tokens round differently (1 % with int4 weights); a cache with the wrong content differs by about 1."""

Array = npt.NDArray[Any]


class Generator(Protocol):
    """The part of `onnxruntime_genai.Generator` that is used."""

    def append_tokens(self, tokens: npt.NDArray[np.int32], /) -> None: ...

    def get_output(self, name: str, /) -> Array: ...

    def get_logits(self) -> Array:
        """Those behind the last token, [1, 1, V]."""
        ...

    def rewind_to(self, length: int, /) -> None: ...


@dataclass(frozen=True)
class Traits:
    """What a model's generators can do, as found by trying."""

    returns_all_rows: bool
    """The logits behind every token fed can be read, not only those behind the last."""

    continues_by_many: bool
    """Several tokens at once may follow a past."""

    rewinds: bool
    """A generator can be cut back to fewer tokens. Otherwise a new one is fed what is to stay."""


class Model(Protocol):
    """A model that has been opened."""

    @property
    def context_length(self) -> int: ...

    @property
    def traits(self) -> Traits: ...

    @property
    def logits_name(self) -> str: ...

    def new_generator(self, capacity: int) -> Generator:
        """An empty one with room for `capacity` tokens."""
        ...

    def describe(self) -> Mapping[str, Any]: ...

    def close(self) -> None: ...


class GenaiRunner:
    """One slot, which is one generator."""

    batching = Batching.SINGLE
    num_slots = 1

    def __init__(self, model: Model, facts: Mapping[str, Any]) -> None:
        self.capacity = 0
        self.host_bytes = 0
        self.tokens_replayed = 0
        self._model = model
        self._traits = model.traits
        self._facts = facts
        self._generator: Generator | None = None
        self._tokens: list[int] = []

    @property
    def can_cut(self) -> bool:
        return self._traits.rewinds

    @property
    def context_length(self) -> int:
        return self._model.context_length

    def reserve(self, positions: int) -> None:
        """Makes room for `positions` (rounded up), at least twice what there was; never shrinks it."""
        if positions <= self.capacity:
            return
        wanted = max(positions, 2 * self.capacity)
        self.capacity = min(-(-wanted // CAPACITY_STEP) * CAPACITY_STEP, self.context_length)
        self._forget()

    def run(self, step: Step) -> StepOutput:
        """Raises `RunError` with the step and onnxruntime-genai's reason when the device fails."""
        (row,) = step.rows
        try:
            self._go_to(row.past)
            logits_RV = self._feed(row.tokens, [head.offset for head in step.heads])
        except (RuntimeError, MemoryError) as error:
            self._forget()
            shape = f"{len(row.tokens)} tokens behind {row.past} positions"
            raise RunError(f"onnxruntime-genai failed on a step of {shape}: {one_line(error)}") from error
        return score(logits_RV, step)

    def describe(self) -> Mapping[str, Any]:
        return {
            **self._facts,
            **self._model.describe(),
            "capacity": self.capacity,
            "context_length": self.context_length,
            "batching": self.batching.value,
            "kv_cache": "onnxruntime-genai's generator",
            "kv_binding": "rewound to the shared prefix" if self._traits.rewinds else "fed again behind a fork",
            "scoring_head": "host",
            "scoring_head_reason": "onnxruntime-genai returns whole rows of logits to the host",
            "tokens_replayed": self.tokens_replayed,
        }

    def close(self) -> None:
        self._forget()
        self._model.close()

    def _forget(self) -> None:
        self._generator = None
        self._tokens = []

    def _go_to(self, past: int) -> Generator:
        """The generator with the first `past` of its tokens and no others."""
        if self._generator is not None and past == len(self._tokens):
            return self._generator
        if self._generator is not None and self._traits.rewinds:
            self._generator.rewind_to(past)
            del self._tokens[past:]
            return self._generator
        kept = self._tokens[:past]
        self._forget()  # before the next one is made: two would take twice the memory
        self._generator = self._model.new_generator(self.capacity)
        self._append(kept)
        self.tokens_replayed += past
        return self._generator

    def _feed(self, tokens: Sequence[int], offsets: list[int]) -> FloatArray:
        """Feeds `tokens` behind the past; the logits behind those at `offsets` (ascending), in fp32."""
        generator = self._generator
        assert generator is not None
        at_once = self._traits.continues_by_many or not self._tokens
        if offsets != [len(tokens) - 1] and offsets and at_once and self._traits.returns_all_rows:
            self._append(tokens)
            logits_SV = generator.get_output(self._model.logits_name)[0]
            self.host_bytes += logits_SV.nbytes
            return np.asarray(logits_SV[offsets], np.float32)
        rows: list[FloatArray] = []
        start = 0
        for offset in offsets:
            self._append(tokens[start : offset + 1])
            logits_V = generator.get_logits().reshape(-1)
            self.host_bytes += logits_V.nbytes
            rows.append(np.asarray(logits_V, np.float32))
            start = offset + 1
        self._append(tokens[start:])
        return np.stack(rows) if rows else np.empty((0, 0), np.float32)

    def _append(self, tokens: Sequence[int]) -> None:
        assert self._generator is not None
        feed(self._generator, tokens, one_by_one=bool(self._tokens) and not self._traits.continues_by_many)
        self._tokens += tokens


def feed(generator: Generator, tokens: Sequence[int], one_by_one: bool = False) -> None:
    """Appends `tokens`; none is lawful."""
    size = 1 if one_by_one else max(1, len(tokens))
    for start in range(0, len(tokens), size):
        generator.append_tokens(np.array(tokens[start : start + size], np.int32))


def score(logits_RV: FloatArray, step: Step) -> StepOutput:
    """The log-softmax in fp32 with the sum in fp64, the argmax, and the rows to sample from."""
    num_heads, vocab_size = logits_RV.shape
    greedy_R = logits_RV.argmax(-1) if num_heads else np.empty(0, np.int64)
    normalizers: dict[int, float] = {}
    logprobs_T = np.empty(len(step.targets), np.float32)
    for place, (head, token) in enumerate(step.targets):
        logits_V = logits_RV[head]
        if head not in normalizers:
            top = logits_V.max()
            normalizers[head] = float(top) + float(np.log(np.exp(logits_V - top).sum(dtype=np.float64)))
        logprobs_T[place] = float(logits_V[token]) - normalizers[head]
    samples_KV = logits_RV[list(step.samples)] if step.samples else np.empty((0, vocab_size), np.float32)
    return StepOutput(logprobs_T, greedy_R.astype(np.int64), samples_KV)


def find_traits(
    new_generator: Callable[[], Generator], tokens: Sequence[int], logits_name: str, may_rewind: bool
) -> Traits:
    """Feeds four or more `tokens` in several ways and compares the logits behind the last.

    `may_rewind` is False where a rewind is known to go wrong only later (a window that has moved on). Raises
    `ModelError` where even one token at a time does not give the logits of all tokens at once.
    """
    generator = new_generator()
    feed(generator, tokens)
    expected_V = _last(generator)
    try:
        returns_all_rows = generator.get_output(logits_name).shape[1] == len(tokens)
    except RuntimeError:
        returns_all_rows = False

    def agrees(generator: Generator, rest: Sequence[int], one_by_one: bool = False) -> bool:
        try:
            feed(generator, rest, one_by_one)
        except RuntimeError:
            return False
        difference_V = _last(generator) - expected_V
        return bool(np.linalg.norm(difference_V) <= MAX_DEVIATION * np.linalg.norm(expected_V - expected_V.mean()))

    def rewinds(generator: Generator) -> bool:
        for length in (1, 0):
            try:
                generator.rewind_to(length)
            except RuntimeError:
                return False
            if not agrees(generator, tokens[length:], one_by_one=bool(length) and not continues_by_many):
                return False
        return True

    generator = _started(new_generator, tokens)
    continues_by_many = agrees(generator, tokens[1:])
    if not continues_by_many:
        generator = _started(new_generator, tokens)
        if not agrees(generator, tokens[1:], one_by_one=True):
            raise ModelError(
                "onnxruntime-genai gives other logits for the same tokens fed at once and one by one: the model's "
                "cache does not hold what genai_config.json says"
            )
    return Traits(returns_all_rows, continues_by_many, may_rewind and rewinds(generator))


def _started(new_generator: Callable[[], Generator], tokens: Sequence[int]) -> Generator:
    generator = new_generator()
    feed(generator, tokens[:1])
    return generator


def _last(generator: Generator) -> npt.NDArray[np.float64]:
    return generator.get_logits().reshape(-1).astype(np.float64)


def one_line(error: Exception, max_chars: int = 400) -> str:
    """A message without line breaks."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= max_chars else text[: max_chars - 4] + " ..."

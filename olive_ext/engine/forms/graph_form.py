"""A way of sharing a step on ONNX Runtime: whether a model's graph, device and settings allow it, what it needs of the
graph and of memory, and how it is tried before it is trusted: two ways of feeding a few random texts must agree.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from olive_ext.engine.forms.kv_store import KvPlace, KvStore
from olive_ext.engine.runners.runner import Runner
from olive_ext.engine.step import FloatArray, LogitsRow, Row, Step
from olive_ext.errors import ModelError, RunError
from olive_ext.graph.edits import WHOLE_LENGTH, with_full_length_kv, with_total_of_all_rows, with_whole_length
from olive_ext.graph.onnx_file import ModelProto
from olive_ext.graph.scoring_head import check_scoring
from olive_ext.model import ResolvedModel
from olive_ext.model.decisions import Decision
from olive_ext.model.runtimes import with_alternative
from olive_ext.model.types import DecoderSpec, InputSpec, Role, TensorSpec

ONE_BY_ONE = "texts are scored one after the other"
"""Begins the notes on why scored texts share no steps, where a user may have expected that they do."""


class NotFittingError(Exception):
    """Why a form cannot be used on a graph or a device: another form is to be opened."""


class NotCapturedError(Exception):
    """Why decoding steps cannot be captured: the form is to be opened without."""


@dataclass
class OpenedDecoder:
    """A decoder on its way through the trials at opening, which change what it is trusted with."""

    model: ResolvedModel
    spec: DecoderSpec
    runner: Runner
    chunk_size: int
    """The most tokens of a prompt's step."""

    notes: list[str]


def decoder_graph(model: ResolvedModel, notes: tuple[str, ...] = ()) -> tuple[ModelProto, DecoderSpec]:
    """The decoder with caches that keep all positions, and with lengths that are those of its rows and of whole texts,
    whatever else the step holds; and what it takes, with `notes` on the form. Raises `ModelError` for a graph that
    cannot be scored."""
    spec = replace(model.spec, notes=(*model.notes, *notes))
    proto = model.decoder_graph()
    try:
        check_scoring(proto, spec.logits.name)
    except ModelError as error:
        raise with_alternative(error, model.files) from error
    proto = with_total_of_all_rows(with_full_length_kv(proto))
    if not spec.choices or not spec.choices.by_length or model.settings.engine.graph == "untouched":
        return proto, spec
    length = InputSpec(Role.WHOLE_LENGTH, TensorSpec(WHOLE_LENGTH, 7, ()))
    return with_whole_length(proto, spec.choices.by_length), replace(spec, inputs=(*spec.inputs, length))


class GraphForm(ABC):
    """One way, for one opening of one model."""

    name: ClassVar[str]
    """The value of the decision "scoring", and of `engine.scoring`."""

    def __init__(self, model: ResolvedModel) -> None:
        self.model = model

    @classmethod
    @abstractmethod
    def against(cls, model: ResolvedModel) -> str | None:
        """Why `model` cannot use this form. None: it can. Empty: it cannot, and no note says so."""

    @classmethod
    def refused(cls, model: ResolvedModel, reason: str) -> str:
        """The note where the form is not used for this reason. Raises `ConfigError` where settings demand it."""
        return reason

    @classmethod
    @abstractmethod
    def decision(cls, model: ResolvedModel, reason: str) -> Decision:
        """How texts that are scored share steps. `reason`: why they do not in the first form that was refused."""

    def refusal_of_graph(self) -> str | None:
        """Why the graph, which is read for it, cannot have this form; None where nothing but opening it shows that."""
        return None

    def rewrite(self, proto: ModelProto, spec: DecoderSpec) -> tuple[ModelProto, DecoderSpec]:
        """The graph as the form needs it, and what that takes. Raises `NotFittingError`."""
        return proto, spec

    @abstractmethod
    def allocate(self, place: KvPlace) -> KvStore:
        """The store of the KV cache, without memory yet."""

    def trial(self, decoder: OpenedDecoder) -> None:  # noqa: B027 (nothing to be tried)
        """Tries what does not show on the graph. Raises `NotFittingError` where another form is to be opened."""

    def finish(self, decoder: OpenedDecoder) -> None:  # noqa: B027 (nothing to be done)
        """Puts around the runner what is to stand between it and the engine."""


TOLERANCE, MOST = 0.02, 0.3
"""The accepted difference, as a share of the difference between two contexts: rounding is far below, a token that
sees wrong positions is far above. Where activations are rounded to few bits, three times the difference that feeding
the same tokens one by one makes, up to `MOST`."""

TARGETS = (0, 1, 2, 3)
"""Tokens whose log-probabilities are compared, after each text."""

STEM, SUFFIX = 5, 4
"""Tokens of a tree's stem, and of each of its two ends."""

Text = tuple[int, ...]


def draw(vocab_size: int) -> Callable[[int], Text]:
    """Gives random texts of given lengths, always the same ones."""
    rng = np.random.default_rng(0)
    return lambda length: tuple(rng.integers(0, vocab_size, length).tolist())


def targets_of(num_rows: int) -> tuple[tuple[int, int], ...]:
    """`TARGETS` after each logits row of a step."""
    return tuple((row, token) for row in range(num_rows) for token in TARGETS)


def read_end(tokens: Text, past: int = 0) -> Step:
    """A step of `tokens`, of which `past` are resident, that reads `TARGETS` after them."""
    return Step((Row(0, past, tokens[past:]),), (LogitsRow(0, len(tokens) - past - 1),), targets_of(1))


def score(runner: Runner, tokens: Text, past: int = 0) -> FloatArray:
    """Log-probabilities [T] of `TARGETS` after `tokens`, of which `past` are resident; in nats."""
    return runner.run(read_end(tokens, past)).target_logprobs[: len(TARGETS)]


def score_one_by_one(runner: Runner, tokens: Text, first: int) -> FloatArray:
    """As `score` [T], with the first `first` tokens in one step and each later one in a step of its own."""
    logprobs_T = score(runner, tokens[:first])
    for past in range(first, len(tokens)):
        logprobs_T = score(runner, tokens[: past + 1], past)
    return logprobs_T


Together = Callable[[Text, Text, Text], FloatArray]
"""Runs steps on a stem and two ends after it: the log-probabilities [2 T] after both ends."""


def two_ends_problem(
    runner: Runner, vocab_size: int, step: str, what: str, together: Together, cells: int = 0
) -> str | None:
    """Why steps, `what` such as a `step`, must not be used; None where they score what single rows score."""
    stem, left, right = map(draw(vocab_size), (STEM, SUFFIX, SUFFIX))
    runner.reserve(STEM + SUFFIX, cells)
    try:
        expected = [score(runner, stem + end) for end in (left, right)]
        again = score_one_by_one(runner, stem + right, STEM)
        both_T = together(stem, left, right)
    except RunError as error:
        return f"{step} fails: {error}"
    num_targets = len(TARGETS)
    return disagreement(what, expected, [both_T[:num_targets], both_T[num_targets : 2 * num_targets]], again)


def disagreement(
    what: str, expected: Sequence[FloatArray], given: Sequence[FloatArray], again: FloatArray
) -> str | None:
    """How far `given`, which `what` score, is from `expected`, two contexts' log-probabilities; None where that is
    rounding, and the contexts differ. `again` is the second context's, fed one token a step."""
    difference = max(float(np.abs(a - b).max()) for a, b in zip(expected, given, strict=True))
    spread = float(np.abs(expected[0] - expected[1]).max())
    rounding = float(np.abs(expected[1] - again).max())
    if spread == 0:
        return f"{what} cannot be tried: the scores of two texts are equal, as if this device computed nothing"
    if difference <= max(TOLERANCE * spread, min(3 * rounding, MOST * spread)):
        return None
    return f"{what} score {difference:.2g} nats off, where another context makes {spread:.2g}"

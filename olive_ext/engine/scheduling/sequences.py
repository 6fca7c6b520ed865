"""A request that is being computed, the result that it fills, and a planned step's rows. Knows no form and no output.

Several requests may read from one sequence (they share a prefix), and one request may read from several sequences. So
`Sequence` (computed) and `PendingResult` (returned) are two classes.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from olive_ext.engine.requests import FinishReason, Hypothesis, Notes, Request, Result, Sampling, TokenArray
from olive_ext.engine.step import ONE_SIDE, Row, Side

PROBE = -1
"""In place of a target's number: the log-probability of this target (a probe) only shows whether the distribution is
finite. The log-probability of the most probable token cannot show that, because a row of NaN has one, too."""

PROBED = 0
"""The token of a probe, which every vocabulary has. The input's own may be numbers of a picture."""


_NONE: list[int] = []
"""The empty list of requests without a generation; nothing is added to it. With a list for each, 60,000 scored requests
were planned in 0.44 s, not 0.34: Python's garbage collector visits each list."""


class PendingResult:
    """Collects a request's scores and generated tokens until none is missing."""

    def __init__(self, key: Hashable, request: Request) -> None:
        generation = request.generation
        self.key, self.request = key, request
        self.before = len(request.tokens.array) - request.num_targets - 1
        """The position from which the first target is read: that of the token before it."""

        self._scores: tuple[list[float], list[bool]] | None = None  # made with the first one
        self._notes: Notes | None = None
        self._num_missing = request.num_targets
        self.generated: list[int] = [] if generation else _NONE
        self.finish_reason: FinishReason | None = None if generation else FinishReason.SCORED
        self.stop_id: int | None = None
        self.is_finite = True
        self._hypotheses: tuple[Hypothesis, ...] = ()
        self._thinking = None if generation is None else generation.thinking  # until the reasoning has ended
        self.forced: list[int] = self._force()
        """Tokens that are forced to come next, whatever the model finds."""

    def put_token(self, token: int) -> None:
        """Adds the next generated token."""
        self.generated.append(token)
        if self._thinking is not None and not self.forced:
            self.forced = self._force()

    def _force(self) -> list[int]:
        budget = self._thinking
        if budget is None:
            return _NONE
        forced = budget.forced_after(self.generated)
        self._thinking = budget if forced is None else None
        return forced or []

    def note_non_finite(self) -> bool:
        """Marks an output of the model as not finite. Returns whether it is the result's first."""
        was_finite, self.is_finite = self.is_finite, False
        return was_finite

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missing."""
        return self._num_missing == 0 and self.finish_reason is not None

    def put_scores(self, first: int, logprobs: list[float], is_greedy: list[bool], notes_T: Notes | None) -> bool:
        """Stores the scores of the request's targets from number `first` on, and a tap's notes on them; each is stored
        once. Returns whether the result is complete now."""
        targets, count = slice(first, first + len(logprobs)), self.request.num_targets
        if self._scores is None:
            self._scores = [0.0] * count, [False] * count
        self._scores[0][targets], self._scores[1][targets] = logprobs, is_greedy
        self._num_missing -= len(logprobs)
        if notes_T is not None:
            if self._notes is None:
                self._notes = np.zeros(count, notes_T.dtype)
            self._notes[targets] = notes_T
        return self.is_complete

    def put_hypotheses(self, best: tuple[Hypothesis, ...]) -> None:
        """Ends the generation with the sequences of a beam search, best first."""
        self._hypotheses = best
        self.generated = list(best[0].tokens)
        self.finish_reason, self.stop_id = best[0].finish_reason, best[0].stop_id

    def finished(self) -> Result:
        """The result, which must be complete."""
        assert self.finish_reason is not None
        assert not self._num_missing
        logprobs, is_greedy = self._scores or ((), ())
        ended = self.finish_reason, self.stop_id
        scores = tuple(logprobs), tuple(is_greedy)
        return Result(*scores, tuple(self.generated), *ended, self._notes, self.is_finite, self._hypotheses)


class Targets(NamedTuple):
    """Targets `begin` to `stop` of a result's request; one `PROBE` of a generation."""

    result: PendingResult
    begin: int
    stop: int

    @property
    def positions(self) -> range:
        """The positions from which the targets are read: those of the tokens before them."""
        before = self.result.before
        return range(before + self.begin, before + self.stop)

    def within(self, past: int, stop: int) -> Targets:
        """The targets that are read from positions `past` to `stop`."""
        before = self.result.before
        return Targets(self.result, max(self.begin, past - before), min(self.stop, stop - before))


@dataclass(eq=False)
class Sequence:
    """Tokens to compute in one slot: `tokens[:computed]` are resident there, `tokens[computed:end]` are pending.

    `targets` are those that are read from it. Later sequences branch off after `checkpoints` tokens.
    """

    tokens: TokenArray
    end: int
    result: PendingResult
    """The request of its generation, if it has one; else the first request that is computed here."""

    side: Side = ONE_SIDE
    """On which side of a length it is, where a model computes longer texts otherwise."""

    targets: list[Targets] = field(default_factory=list)
    checkpoints: set[int] = field(default_factory=set)
    rng: np.random.Generator | None = None
    num_shared: int = 0
    """The number of its first tokens that an earlier sequence computes: the plan expects them to be resident."""

    parent: Sequence | None = None
    """The earlier sequence that computes the last of these."""

    num_children: int = 0
    """The number of sequences whose parent this is, and that have no slot yet."""

    is_short: bool = False
    """Whether its unshared tokens are so few that they are fed one a step, together with those of other sequences."""

    slot: int = -1
    computed: int = 0
    """Tokens that the steps planned so far compute."""

    is_expected: bool = False
    """Whether its last token is one that a step in progress finds."""

    has_ended: bool = False
    """Whether its generation is complete. Steps that were begun before that was known may still contain it."""

    def __post_init__(self) -> None:
        request = self.result.request
        self.generation, self.source, self.media = request.generation, request.source, request.media
        self.num_input = self.end
        self.room = min(len(self.tokens), self.side.last)
        """The most tokens that it can have: after the last of its side it begins anew, as another sequence."""

        self.num_slots = 1 if self.generation is None else self.generation.num_slots
        """The slots that it needs: one for each of its beams."""

        self.needs_rows = self.generation is not None and not self.generation.sampling.is_greedy
        """Whether the host chooses its next token from the whole row of logits; otherwise the device does."""

        self.has_bans = self.generation is not None and bool(self.generation.suppressed)
        """Whether some tokens are not allowed as its next one."""

    @property
    def is_input_computed(self) -> bool:
        """Whether its input is computed and tokens are generated now."""
        return self.computed >= self.num_input

    def append(self, token: int, logits_V: npt.NDArray[np.float32] | None = None) -> bool:
        """Takes the next token: `token`, or one drawn from `logits_V`. False where it only ends the generation."""
        generation, result = self.generation, self.result
        assert generation is not None
        if not result.is_finite:
            self._end(FinishReason.NON_FINITE)
            return False
        if result.forced:
            token = result.forced.pop(0)
        elif logits_V is not None:
            assert self.rng is not None
            token = drawn(logits_V, generation.sampling, self.rng)
        if token in generation.stop_ids:
            result.stop_id = token
            self._end(FinishReason.STOP_ID)
            return False
        result.put_token(token)
        if generation.is_finished is not None and generation.is_finished(result.generated):
            self._end(FinishReason.STOPPED)
        elif len(result.generated) >= generation.max_new_tokens:
            self._end(FinishReason.LENGTH)
        else:
            self.feed(token)
        return True

    def _end(self, reason: FinishReason) -> None:
        self.result.finish_reason, self.has_ended = reason, True
        self.end -= self.is_expected
        self.is_expected = False

    def expect(self) -> bool:
        """Adds the token that a step in progress finds to the pending tokens; False where another token is forced."""
        if self.result.forced:
            return False
        self.end += 1
        self.is_expected = True
        return True

    def feed(self, token: int) -> None:
        """Adds `token` to the pending tokens, or fills in the one that was expected."""
        self.end += not self.is_expected
        self.is_expected = False
        self.tokens[self.end - 1] = token

    def begun_anew(self, side: Side) -> Sequence:
        """The rest of its generation as a new sequence on `side`, with all its tokens to compute."""
        begun: dict[str, Any] = {"num_shared": 0, "parent": None, "num_children": 0, "slot": -1, "computed": 0}
        return replace(self, targets=[], checkpoints=set(), side=side, **begun)

    def give_up(self) -> None:
        """Starts again in another slot: all its tokens are computed again, and only what has not been read is read."""
        targets = [part.within(self.computed, self.end) for part in self.targets]
        self.targets = [part for part in targets if part.begin < part.stop]
        self.parent, self.num_shared = None, 0
        self.slot, self.computed, self.num_input = -1, 0, self.end

    def continue_from(self, other: Sequence) -> None:
        """Takes over the tokens of `other`, all of which are computed."""
        self.tokens[: other.end] = other.tokens[: other.end]
        self.end, self.computed = other.end, other.computed

    def targets_within(self, past: int, stop: int) -> list[Targets]:
        """The targets that are read from positions `past` to `stop`."""
        parts = [targets.within(past, stop) for targets in self.targets] if past < self.num_input else []
        return [targets for targets in parts if targets.begin < targets.stop]

    def first_read(self) -> int:
        """The first position whose distribution is read. From there on nothing may be reused as resident."""
        return min([part.result.before + part.begin for part in self.targets], default=self.num_input - 1)


def drawn(logits_V: npt.NDArray[np.float32], sampling: Sampling, rng: np.random.Generator) -> int:
    """One token id, after temperature, top_k and top_p in the order of Hugging Face's logits processors. top_p keeps
    the smallest set of most probable tokens whose sum reaches it (Holtzman et al. 2020), and at least one token."""
    scaled_V = logits_V.astype(np.float64) / sampling.temperature
    order_V = np.argsort(-scaled_V, kind="stable")
    if sampling.top_k:
        order_V = order_V[: sampling.top_k]
    probs_V = np.exp(scaled_V[order_V] - scaled_V[order_V[0]])
    probs_V /= probs_V.sum()
    if sampling.top_p < 1.0:
        before_V = np.cumsum(probs_V) - probs_V
        kept = max(1, int((before_V < sampling.top_p).sum()))
        order_V, probs_V = order_V[:kept], probs_V[:kept] / probs_V[:kept].sum()
    return int(rng.choice(order_V, p=probs_V))


ChosenRow = tuple[Sequence | None, Row]
"""A row and its sequence; None for an idle one."""

"""What the scheduler plans for: forms of steps, and the runners that execute these over the slots of a KV cache. The
scheduler asks a form for the rows of the next step, and never checks its type.

Knows no arrays and no graph, and of a request only its source.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

from typing_extensions import override

from olive_ext.engine.scheduling.prefix_tree import TreeBatches
from olive_ext.engine.scheduling.sequences import ChosenRow, Sequence
from olive_ext.engine.step import IDLE_TOKEN, UNLIMITED, Capacity, Row, Side, Step, StepOutput
from olive_ext.errors import OliveExtError
from olive_ext.media.items import ItemLimit, Media, MediaItem, Source, chunk_end, refuse_other_source
from olive_ext.model.providers.devices import Device

MIN_COPY, MIN_FORK = 16, 4
"""The fewest positions that a copy from another slot must save; below that, feeding the tokens costs less. The second
number is for slots of blocks, of which at most one is copied. Where nothing is copied, any saving counts."""


@dataclass(frozen=True)
class ReadySequences:
    """The running sequences that have tokens to compute, and what limits the next step."""

    sequences: list[Sequence]
    most_tokens: int
    """The most tokens of inputs in a step."""

    limit: int
    """The most tokens of a step, where memory did not suffice for a longer one; also the most rows."""

    capacity: int
    """Positions of a slot."""

    traits: Traits
    """Those of the runner."""

    def split(self) -> tuple[list[Sequence], list[Sequence]]:
        """The inputs, whose next rows may have several tokens, and the sequences that are fed one token a step. The
        last row of a scored text is extended to a whole group of rows, unless it is fed one token a step."""
        inputs: list[Sequence] = []
        decoding: list[Sequence] = []
        has_groups = self.traits.row_group > 1
        for sequence in self.sequences:
            has_many = sequence.end - sequence.computed > 1 or (has_groups and sequence.generation is None)
            (inputs if has_many and not sequence.is_short else decoding).append(sequence)
        return inputs, decoding

    def row(self, sequence: Sequence, most: int) -> Row:
        """The sequence's next tokens, up to `most` where it may be split; all of an item that they begin with."""
        start, stop = sequence.computed, sequence.end
        if stop - start == 1 and sequence.generation is not None and not sequence.checkpoints:
            return Row(sequence.slot, start, (sequence.tokens.item(start),), False, sequence.source, sequence.media)
        if self.traits.chunked_prefill:
            stop = min(stop, start + most)
            if sequence.media and stop < sequence.end:
                stop = chunk_end(sequence.media, start, stop, self.traits.row_group)
        if not self.traits.can_rewind:
            stop = min((length for length in sequence.checkpoints if start < length < stop), default=stop)
        is_checkpoint = not self.traits.can_rewind and stop in sequence.checkpoints
        tokens = tuple(sequence.tokens[start:stop].tolist())
        if sequence.generation is None and stop == sequence.end and not sequence.is_short:
            missing = (start - stop) % self.traits.row_group
            if stop + missing <= self.capacity:  # else the slot has no room for a whole group
                tokens += (IDLE_TOKEN,) * missing
        return Row(sequence.slot, start, tokens, is_checkpoint, sequence.source, sequence.media)


class StepForm(ABC):
    """Which sequences may share a step, and which other rows the step must have."""

    name: ClassVar[str]
    """The form's name in `describe_execution` ("batching")."""

    has_blocks: ClassVar[bool] = False
    """Whether slots share memory, so that copies between them cost next to nothing."""

    spans_slots: ClassVar[bool] = False
    """Whether a step has rows for all slots from the first to the last of its sequences."""

    longest_step: int = UNLIMITED
    """The most tokens in a step that the device is known to handle without a crash. An item, which is fed in one step,
    must not have more either."""

    mixes_pasts: bool = True
    """Whether rows of one token each may have pasts of different lengths."""

    @property
    def padded(self) -> StepForm:
        """The form of the same steps where each is padded to one of a few shapes: one row, or all slots."""
        return ONE_ROW

    @abstractmethod
    def next_rows(self, ready: ReadySequences) -> list[ChosenRow]:
        """The rows of the next step."""

    def slots_of(self, slots: list[int], num_slots: int) -> list[int]:
        """The slots of a step in which `slots` (ascending) have rows. Those without a sequence get idle rows."""
        return slots

    def room(self, most_tokens: int, pending: int) -> tuple[int, int]:
        """The tokens and the number of inputs to admit beside inputs with `pending` tokens: here one by one."""
        return (0, 0) if pending else (most_tokens, 1)

    def min_copy(self, answer_tokens: int) -> int:
        """The fewest positions that a copy between slots must save: few in blocks, or for short answers in one step."""
        return MIN_FORK if answer_tokens or self.has_blocks else MIN_COPY

    def most_step_tokens(self, chunk_size: int, num_slots: int) -> int:
        """The tokens of a step whose inputs have up to `chunk_size`."""
        return chunk_size + num_slots

    def scored_steps(self, rule: ScoringRule) -> ScoredSteps:
        """How scored texts share steps."""
        return ScoredSteps("rows", rule.reason)

    @abstractmethod
    def runs(self, other: StepForm) -> bool:
        """Whether a runner of this form can run steps of the `other` form, too."""

    def with_other(self, other: StepForm, counts: Items[int]) -> StepForm:
        """This form, limited to steps that a runner of the `other` form, which `runs` it, can compute as well. The
        runners have `counts` slots."""
        return self


def joined(first: StepForm, second: StepForm, counts: Items[int]) -> StepForm:
    """The form of steps that two runners both execute. `counts`: the slots of each runner."""
    if second.runs(first):
        return first.with_other(second, counts)
    return second.with_other(first, counts) if first.runs(second) else ONE_ROW


@dataclass(frozen=True)
class OneRow(StepForm):
    """A step has one row."""

    name: ClassVar[str] = "single"
    mixes_pasts: ClassVar[bool] = False  # type: ignore[misc]

    @override
    def next_rows(self, ready: ReadySequences) -> list[ChosenRow]:
        inputs, decoding = ready.split()
        return [(sequence, ready.row(sequence, ready.most_tokens)) for sequence in (inputs or decoding)[:1]]

    @override
    def runs(self, other: StepForm) -> bool:
        return isinstance(other, OneRow)


ONE_ROW = OneRow()


@dataclass(frozen=True)
class ScoringRule:
    """How scored texts share steps: the chunk size decides, or a rule on what steps cost."""

    is_open: bool = False
    reason: str = "engine.chunk_size"


class ScoredSteps:
    """The present choice of how scored texts share steps: here they are computed in slots, as all others."""

    num_tokens = 0
    """Tokens of a step of texts without slots; 0 where scored texts have slots."""

    answer_tokens = 0
    """A text whose unshared tokens are at most so many is fed one token a step."""

    def __init__(self, name: str, reason: str) -> None:
        self.name, self.reason = name, reason

    @property
    def sizes(self) -> tuple[int, int]:
        """The sizes that a scheduler plans by."""
        return self.num_tokens, self.answer_tokens

    def choose(self, sequences: Iterable[Sequence], capacity: Capacity) -> None:
        """Takes what is cheapest for these sequences."""

    def batches(self, capacity: Capacity) -> TreeBatches | None:
        """The plan of scored texts where they have no slots."""
        return None

    def memory(self, scored: int, generated: int, context_length: int, row_group: int) -> tuple[int, int]:
        """Positions of a slot, and cells beside the slots, for requests of at most so many positions."""
        most = max(scored, generated)
        return min(most + -most % row_group, context_length), 0

    def describe(self) -> Mapping[str, Any]:
        """The form and the reason."""
        facts = {"scoring": self.name, "scoring_step": self.num_tokens, "scoring_reason": self.reason}
        return {**facts, "answer_tokens": self.answer_tokens} if self.answer_tokens else facts


class NotFittingError(Exception):
    """Why a form cannot be used on a graph or a device: another form must be opened."""


class PartsDifferError(Exception):
    """How far texts that are fed in parts, or in company, are from those fed whole and alone."""


@dataclass(frozen=True)
class Traits:
    """The abilities of a runner, which are fixed when the model is open."""

    context_length: int
    """The most positions that a sequence may occupy."""

    form: StepForm = ONE_ROW
    """Which sequences that have slots share a step."""

    tree_batches: bool = False
    """Whether scored texts may share steps without slots, as tree batches."""

    can_rewind: bool = True
    """Whether a slot can be cut back to any position; otherwise only to those that were kept as checkpoints."""

    chunked_prefill: bool = True
    """Whether an input may be fed in several steps, and after what another has computed; else a step has one row."""

    overlaps_steps: bool = False
    """Whether the runner takes a step that is fed with the greedy tokens of the step before."""

    row_group: int = 1
    """Inputs are fed in steps of a multiple of so many tokens. Kernels take that many at a time, from a step's first
    token on, and the rest by another kernel, whose last bits differ."""

    item_limit: ItemLimit = field(default_factory=ItemLimit)
    """How many tokens a picture or a sound may have."""

    lengths: tuple[int, ...] = ()
    """Positions beyond which a text is computed otherwise, by its whole length (longrope), in ascending order. Texts on
    different sides of such a position share no step and nothing that is resident."""

    def one_by_one(self) -> Traits:
        """The traits of a runner whose texts are fed whole and alone."""
        return replace(self, form=ONE_ROW, tree_batches=False, chunked_prefill=False)

    def side(self, num_positions: int) -> Side:
        """The side that a text of so many positions belongs to."""
        passed = sum(length < num_positions for length in self.lengths)
        first = self.lengths[passed - 1] + 1 if passed else 0
        return Side(first, self.lengths[passed] if passed < len(self.lengths) else UNLIMITED)


class Residency:
    """Remembers whose sequences are resident in a runner's slots. Runners that execute the same steps share one."""

    def __init__(self) -> None:
        self._owner: object | None = None

    def claim(self, owner: object) -> bool:
        """Gives the slots to `owner`; True where they still hold what it left there."""
        is_kept, self._owner = self._owner is owner, owner
        return is_kept


class Runner(ABC):
    """Executes steps."""

    device = Device("cpu")
    """The device on which the logits rows of a step are left."""

    open_graph: Callable[[bytes], Any] | None = None
    """Opens a graph without weights on that device, where the runner has sessions of its own."""

    encoder: Any = None
    """The encoder of an encoder-decoder, which takes sources of its `kind` for its input `source`."""

    embedding: Any = None
    """Puts the features of pictures and sounds among the embeddings of tokens, where the runner has graphs for that."""

    def __init__(self, traits: Traits) -> None:
        self.traits = traits
        self.residency = Residency()

    @property
    @abstractmethod
    def capacity(self) -> Capacity:
        """The memory that is allocated."""

    @property
    @abstractmethod
    def host_bytes(self) -> int:
        """Bytes that were copied from the device to the host so far."""

    @property
    def vocab_size(self) -> int | None:
        """The number of the model's logits, where a graph or a configuration names it."""
        return None

    @abstractmethod
    def run(self, step: Step) -> StepOutput:
        """Runs the step. Raises `MemoryShortageError` where memory does not suffice for it, and `RunError` where the
        device fails otherwise; nothing counts as resident after that."""

    @abstractmethod
    def reserve(self, positions: int, cells: int = 0) -> None:
        """Makes slots hold `positions`, the shared prefix `cells`. A change of `capacity` loses what is resident."""

    def renew(self, num_slots: int, positions: int) -> bool:
        """Frees memory that slots have grown into, where so many slots of so many positions might not fit beside it.
        Returns whether it did: what was resident is lost then."""
        return False

    def check_source(self, source: Source | None) -> None:
        """Raises `OliveExtError` where a request cannot have this source, or needs one."""
        if self.encoder is not None:
            refuse_other_source(source, self.encoder.kind, self.encoder.source)
        elif source is not None:
            raise OliveExtError("the request has a source, but this model has no encoder: give it as the prompt")

    def check_media(self, media: Media) -> None:
        """Raises `OliveExtError` where a request cannot have these pictures and sounds."""
        if self.embedding is not None:
            self.embedding.check(media)
        elif media:
            kind = media[0].item.modality.kind
            raise OliveExtError(f"the request has a {kind}, but this model takes text only")

    def expect_media(self, media: Media) -> None:
        """Takes note of an admitted request's pictures and sounds: those of several may be encoded together."""
        if self.embedding is not None:
            self.embedding.expect(media)

    def warm_up(self, items: Items[MediaItem], most: int) -> None:
        """Runs encoders beforehand on `items` of every shape, and the graphs that put features into steps of `most`
        tokens. Raises `RunError` where the device fails."""
        if self.embedding is not None:
            most = self.traits.form.most_step_tokens(most, self.capacity.num_slots)
            self.embedding.warm_up(items, most)

    @abstractmethod
    def release_memory(self) -> None:
        """Frees what has grown with use, and spare memory. The weights stay, and `reserve` makes room again."""

    def describe(self) -> Mapping[str, Any]:
        """Facts of the opened model for `describe_execution`: here those of every runner."""
        facts = {"capacity": self.capacity.positions, "context_length": self.traits.context_length}
        return {**facts, "batching": self.traits.form.name}

    @abstractmethod
    def close(self) -> None:
        """Releases the model's memory."""


class OpenedRunner(NamedTuple):
    """A runner on an open model, and the most tokens of a prompt that it takes in one step."""

    runner: Runner
    chunk_size: int

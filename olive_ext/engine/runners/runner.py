"""A runner executes steps over the slots of a KV cache. Knows no graph, and of a request only its source."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from olive_ext.engine.forms.base import ONE_ROW, StepForm
from olive_ext.engine.step import UNLIMITED, Capacity, Side, Step, StepOutput
from olive_ext.errors import OliveExtError
from olive_ext.media.items import ItemLimit, Media, MediaItem, Source, refuse_other_source
from olive_ext.model.providers.devices import Device


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

    def warm_up(self, items: Sequence[MediaItem], most: int) -> None:
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

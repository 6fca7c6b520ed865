"""The KV cache of a runner, and what forms share on ONNX Runtime. A store binds past and present of a step's rows to a
session, and keeps what comes back. A form says whether a model's graph, device and settings allow it, what it needs of
the graph and of memory, and how it is tried before it is used."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, ClassVar

import numpy.typing as npt
import onnxruntime as ort

from olive_ext.engine.runners.runner import Runner, StepForm
from olive_ext.engine.step import UNLIMITED, Capacity, Copy, Move, Row, Step
from olive_ext.errors import ModelError
from olive_ext.graph.edits import WHOLE_LENGTH, with_full_length_kv, with_total_of_all_rows, with_whole_length
from olive_ext.graph.nodes import ModelProto
from olive_ext.graph.scoring_head import check_scoring
from olive_ext.graph.standalone_graphs import equal_parts
from olive_ext.model import ResolvedModel
from olive_ext.model.decisions import BLOCK_SIZE, Decision
from olive_ext.model.providers.bindings import UINT8, allocate, device_zeros
from olive_ext.model.providers.devices import Device
from olive_ext.model.runtimes import with_alternative
from olive_ext.model.types import ITEM_BYTES, DecoderSpec, InputSpec, KvTensor, Role, TensorSpec


@dataclass(frozen=True)
class KvPlace:
    """What a store works with: the decoder's session, its caches, the slots, and how helper graphs are opened."""

    session: ort.InferenceSession
    spec: DecoderSpec
    num_slots: int
    device: Device
    open_graph: Callable[[bytes], ort.InferenceSession]
    most_positions: int | None = None
    """Positions of all slots together that fit in memory, where slots share it and that is known."""


class KvStore(ABC):
    """The KV of all slots."""

    form: StepForm
    """The form of the steps that the store can bind."""

    is_in_place: ClassVar[bool] = True
    """Whether the graph writes into the memory that is bound, so that its present outputs need not be read."""

    kv_binding: ClassVar[str]
    """In words how past and present are bound."""

    has_cells: ClassVar[bool] = False
    """Whether cells may be held beside the slots, for texts without slots: tree batches."""

    pads_in_front = False
    """Whether rows of a step that have fewer positions than others are padded in front, and not at the end."""

    def __init__(self, place: KvPlace) -> None:
        most = UNLIMITED if place.most_positions is None else place.most_positions
        self.capacity = Capacity(place.num_slots, most_positions=most)
        self.touched = 0, 0
        """The most slots, and the most positions of one slot, that were in use since memory was allocated."""

        self._session = place.session
        self._spec = place.spec
        self._place = place
        self._device = place.device
        self._open_graph = place.open_graph

    @abstractmethod
    def reserve(self, positions: int) -> None:
        """Allocates anew with so many positions for each slot; what was resident is lost."""

    @abstractmethod
    def copy(self, copies: Sequence[Copy]) -> None:
        """Copies the first positions of slots to other slots, one copy after the other."""

    @abstractmethod
    def bind(self, rows: Sequence[Row]) -> ort.IOBinding:
        """A binding of the session in which past and present of `rows` are bound."""

    def halve(self) -> bool:
        """Makes the next `reserve` take half as much memory; False where less would not suffice."""
        if self.capacity.num_slots == 1:
            return False
        self.capacity = self.capacity._replace(num_slots=self.capacity.num_slots // 2)
        return True

    def has_outgrown(self, num_slots: int, positions: int) -> bool:
        """Whether the memory in use so far (most slots times the longest slot) is more than this request needs, and
        more than 125 % of `most_positions`."""
        slots, longest = self.touched
        self.touched = max(slots, num_slots), max(longest, positions)
        in_all = self.capacity.most_positions
        return in_all < UNLIMITED and math.prod(self.touched) > max(num_slots * positions, in_all * 5 // 4)

    def reserve_cells(self, num_cells: int) -> None:  # noqa: B027 (most stores have none)
        """Allocates so many cells anew."""

    def move(self, move: Move) -> None:
        """Moves cells."""
        raise TypeError(f"{type(self).__name__} has no cells")

    def bind_masks(self, bind: Callable[[str, npt.NDArray[Any]], None], step: Step) -> None:  # noqa: B027
        """Binds what tells the graph which cells a token sees."""

    def bind_anew(self, rows: Sequence[Row]) -> ort.IOBinding:
        """As `bind`, for a binding that is kept. Only caches that are written in place have one."""
        raise TypeError(f"{type(self).__name__} has caches that move")

    def collect(self, rows: Sequence[Row], presents: Sequence[ort.OrtValue]) -> None:  # noqa: B027 (nothing to do)
        """Takes the present outputs, in the caches' order, after the run; none where the graph writes in place."""

    def describe(self) -> Mapping[str, Any]:
        """How it holds the cache, for `describe_execution`."""
        return {"kv_cache": "in_place" if self.is_in_place else "returned", "kv_binding": self.kv_binding}

    def release_memory(self) -> None:
        """Releases the memory until `reserve` allocates anew."""
        self.close()
        self.capacity = self.capacity._replace(positions=0, cells=0)

    @abstractmethod
    def close(self) -> None:
        """Releases the memory."""


COPIED_BYTES = 128
"""The most bytes of a pool for which one index stands, and so the most that one thread of ScatterND on CUDA copies.
Whole blocks, of 262,144 bytes an index, took 10.1 ms a tensor and 98 % of the device's time. Rows of 128 bytes take
0.007 ms, and scoring went from 20 to 622 questions a second (one H200, 27 November 2026, onnxruntime-gpu 1.31.1,
Llama-3.2-1B, fp16). They are words of 8 bytes, because CUDA's Gather counts elements in 32 bits: 16 GiB a tensor."""

WORDS = {1: UINT8, 2: 5, 4: 6, 8: 7}
"""ONNX's integer types by their bytes: CUDA does not copy fp8 by its own type."""


class Pool:
    """Zeroed memory of one KV tensor's blocks [N, positions, heads, size]: what lies after a row's last position must
    be finite. It is held as bytes where values have addresses."""

    def __init__(
        self,
        session: ort.InferenceSession,
        tensor: KvTensor,
        num_blocks: int,
        device: Device,
        open_graph: Callable[[bytes], ort.InferenceSession],
    ) -> None:
        shape = [num_blocks, BLOCK_SIZE, tensor.heads, tensor.head_size]
        size = math.prod(shape[2:]) * ITEM_BYTES[tensor.elem_type]
        word = gcd(size, 8)
        parts = equal_parts(size // word, COPIED_BYTES // word)
        self.words = WORDS[word], parts
        """The integer type in which positions are copied by address, and how many such integers make a position."""

        self._device = device
        self._typed = tensor.elem_type, shape
        self._as_words = WORDS[word], [num_blocks * BLOCK_SIZE * parts, size // word // parts]
        if device.has_pointers:
            self._value = device_zeros(open_graph, [num_blocks, BLOCK_SIZE, size], device)
        else:
            self._value = allocate(session, shape, tensor.elem_type, device)

    def bind_copy(self, binding: ort.IOBinding, i: int) -> None:
        """Binds the pool as tensor `i` of the graph that copies."""
        if not self._device.has_pointers:
            binding.bind_ortvalue_input(f"r{i}", self._value)
        self.bind(binding, f"x{i}", f"y{i}", self._as_words)

    def bind(self, binding: ort.IOBinding, past: str, present: str, form: tuple[int, list[int]] | None = None) -> None:
        """Binds the pool as past and as present; as values of another type and shape where `form` names these."""
        if self._device.has_pointers:
            place = self._device.kind, self._device.index, *(form or self._typed), self._value.data_ptr()
            binding.bind_input(past, *place)
            binding.bind_output(present, *place)
        else:
            binding.bind_ortvalue_input(past, self._value)
            binding.bind_ortvalue_output(present, self._value)


ONE_BY_ONE = "texts are scored one after the other"
"""The beginning of notes on why scored texts share no steps, where a user may have expected that they do."""


@dataclass
class OpenedDecoder:
    """A decoder that is being opened; trials change what it is trusted with."""

    spec: DecoderSpec
    runner: Runner
    chunk_size: int
    """The most tokens of a prompt in one step."""

    notes: list[str]


def decoder_graph(model: ResolvedModel, notes: tuple[str, ...] = ()) -> tuple[ModelProto, DecoderSpec]:
    """The decoder, with caches that keep all positions and with lengths that are those of its rows and of whole texts,
    whatever else the step holds. Also returns what the graph takes, and `notes` on the form. Raises `ModelError` for a
    graph that cannot be scored."""
    spec = replace(model.spec, notes=(*model.notes, *notes))
    proto = model.decoder_graph()
    try:
        check_scoring(proto, spec.logits.name)
    except ModelError as error:
        raise with_alternative(error, model.files) from error
    proto = with_total_of_all_rows(with_full_length_kv(proto))
    if not spec.choices.by_length or model.settings.engine.graph == "untouched":
        return proto, spec
    length = InputSpec(Role.WHOLE_LENGTH, TensorSpec(WHOLE_LENGTH, 7, ()))
    return with_whole_length(proto, spec.choices.by_length), replace(spec, inputs=(*spec.inputs, length))


class GraphForm(ABC):
    """One form, for one opening of one model."""

    name: ClassVar[str]
    """The value of the decision "scoring", and of `engine.scoring`."""

    def __init__(self, model: ResolvedModel) -> None:
        self.model = model

    @classmethod
    @abstractmethod
    def against(cls, model: ResolvedModel) -> str | None:
        """Why `model` cannot use this form. None: it can. Empty: it cannot, and no note says why."""

    @classmethod
    def refused(cls, model: ResolvedModel, reason: str) -> str:
        """The note where the form is not used for this reason. Raises `ConfigError` where settings demand the form."""
        return reason

    @classmethod
    @abstractmethod
    def decision(cls, model: ResolvedModel, reason: str) -> Decision:
        """How scored texts share steps. `reason`: why they do not in the first form that was refused."""

    def refusal_of_graph(self) -> str | None:
        """Why the graph, which is loaded for it, cannot have this form; None where only opening it can show that."""
        return None

    def rewrite(self, proto: ModelProto, spec: DecoderSpec) -> tuple[ModelProto, DecoderSpec]:
        """The graph as the form needs it, and its inputs. Raises `NotFittingError`."""
        return proto, spec

    @abstractmethod
    def allocate(self, place: KvPlace) -> KvStore:
        """The store of the KV cache, without memory yet."""

    def trial(self, decoder: OpenedDecoder) -> None:  # noqa: B027 (nothing to be tried)
        """Tries what the graph does not show. Raises `NotFittingError` where another form must be opened."""

    def finish(self, decoder: OpenedDecoder) -> None:  # noqa: B027 (nothing to be done)
        """Wraps the runner in what stands between it and the engine."""

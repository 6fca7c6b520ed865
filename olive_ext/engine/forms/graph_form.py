"""A way of sharing a step on ONNX Runtime: whether a model's graph, device and settings allow it, what it needs of the
graph and of memory, and how it is tried before it is trusted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

from olive_ext.engine.forms.kv_store import KvPlace, KvStore
from olive_ext.engine.runners.runner import Runner
from olive_ext.errors import ModelError
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
        """Why steps of `model` are not to have this form; None where they may, empty where nobody would expect it."""

    @classmethod
    def refused(cls, model: ResolvedModel, reason: str) -> str:
        """What is told where the form is not used for this reason. Raises `ConfigError` where settings demand it."""
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

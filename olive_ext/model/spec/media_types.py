"""What a multimodal package takes besides text, resolved: its encoders, and the tokens that their features replace.

Knows no session, and no picture.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from typing_extensions import override

from olive_ext.errors import ModelError
from olive_ext.model.types import GraphFiles, InputSpec, TensorSpec


class Modality(str, Enum):
    """What a request may hold besides text."""

    IMAGE = "image"
    AUDIO = "audio"


class Words(NamedTuple):
    """How a modality's items are called: `kind` in messages, `counted` in the names of counters."""

    kind: str
    counted: str


WORDS = {Modality.IMAGE: Words("picture", "image"), Modality.AUDIO: Words("sound", "sound")}

MEDIA_PARTS = {"vision": Modality.IMAGE, "audio": Modality.AUDIO}
"""The encoders of pictures and sound among a model's companions."""

PLACEHOLDER_KEYS = {
    Modality.IMAGE: ("image_token_id", "image_token_index"),
    Modality.AUDIO: ("audio_token_id", "audio_token_index"),
}
"""Keys of genai_config.json's `model` and of config.json for the token that stands for features."""

_PARTS_OF_NAMES = {Modality.IMAGE: ("image", "vision", "visual", "pixel"), Modality.AUDIO: ("audio", "speech", "sound")}
"""Parts of the names of a graph's inputs."""


def modalities_of(name: str) -> list[Modality]:
    """What an input is for, as far as its name tells."""
    return [modality for modality, parts in _PARTS_OF_NAMES.items() if any(part in name.lower() for part in parts)]


def modality_of(feature: str) -> Modality:
    """The modality of an embedding graph's input. Raises `ModelError` for a name that tells none."""
    modalities = modalities_of(feature)
    if len(modalities) != 1:
        raise ModelError(f"the embedding graph's input '{feature}' is neither for pictures nor for sound, by its name")
    return modalities[0]


@dataclass(frozen=True)
class MediaInput:
    """What a model takes besides text, of one modality."""

    modality: Modality
    placeholder: int
    """The token id that a row of features replaces."""

    @property
    def num_rows(self) -> int | None:
        """Rows of features of each item, where all have as many and the model declares it."""
        return None


@dataclass(frozen=True)
class MediaEncoderSpec(MediaInput):
    """An encoder of pictures or sound."""

    part: str
    """Its name among the model's companions."""

    files: GraphFiles
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    """What it returns of features: [rows, size], or with axes in front that are joined with the rows. Where features
    are several tensors, rows of all belong to the same placeholders."""

    features: tuple[TensorSpec, ...]
    """The embedding graph's inputs for them, [rows, size], in the order of `outputs`."""

    real_rows: TensorSpec | None = None
    """The output that tells which rows of the features are of the item and not of its padding: their number [B], or a
    mask [B, rows]. None where all are."""

    @property
    def one_by_one(self) -> str:
        """Why it takes one item a run, as far as its interface tells; empty where several may be tried."""
        for tensor in self.inputs:
            if isinstance(tensor.shape[0], int):
                return f"'{tensor.name}' {list(tensor.shape)} has room for {tensor.shape[0]}"
        return ""

    @property
    def grid(self) -> str | None:
        """The input with a row for each picture, whose patches lie one after the other; None where there is none."""
        return next((tensor.name for tensor in self.inputs if "grid" in tensor.name), None)

    @property
    def has_mask(self) -> bool:
        """Whether an input tells what of an item is padding."""
        return any("mask" in tensor.name for tensor in self.inputs)

    @property
    def has_own_rows(self) -> bool:
        """Whether it returns as many rows as its items have, whatever the shape of their inputs, [B, T, size]."""
        is_open = all(len(tensor.shape) == 2 and isinstance(tensor.shape[0], str) for tensor in self.outputs)
        return is_open and self.grid is None and self.real_rows is None and len(self.inputs[0].shape) == 3

    @property
    @override
    def num_rows(self) -> int | None:
        if self.real_rows is not None:
            return None
        return next((size for size in self.outputs[0].shape[-2:-1] if isinstance(size, int)), None)


@dataclass(frozen=True)
class MediaSpec:
    """What a multimodal model takes besides text."""

    inputs: tuple[MediaInput, ...]
    has_rotary_grid: bool = False
    """Whether the decoder takes positions in time, height and width (multimodal rotary embeddings)."""

    notes: tuple[str, ...] = ()
    """What the export computes otherwise than the original model, one sentence each."""

    problem: str = ""
    """Why there are no encoders, or not all, although the package has some: text runs without them."""

    @property
    def encoders(self) -> tuple[MediaEncoderSpec, ...]:
        """Encoders that are graphs: all of a package, none of a checkpoint, which transformers encode themselves."""
        return tuple(entry for entry in self.inputs if isinstance(entry, MediaEncoderSpec))

    @property
    def modalities(self) -> tuple[Modality, ...]:
        """Modalities of the inputs, in their order."""
        return tuple(entry.modality for entry in self.inputs)


@dataclass(frozen=True)
class EmbeddingSpec:
    """The graph that turns token ids into what a decoder takes instead of them."""

    inputs: tuple[InputSpec, ...]
    features: tuple[TensorSpec, ...]
    """Inputs for images and sound, [rows, size]; text has no rows of them."""

    outputs: tuple[str, ...]
    """Outputs to bind, each named as the decoder's input."""

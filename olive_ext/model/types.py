"""What is on disk and on this machine, resolved and frozen: no "auto" is left, and each value says where it came from.
At the end, what a multimodal package takes besides text. Knows no Olive, no lm-eval, no session and no picture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from typing_extensions import override

from olive_ext.errors import ModelError

NamedGraph = tuple[Path, str]
"""A graph's file, and the rule that found it."""


@dataclass(frozen=True)
class GraphFiles:
    """A graph that the decoder needs (embedding, encoder, first step), and its external-data files."""

    graph: Path
    weights: tuple[Path, ...] = ()

    provider: str = ""
    """Full name of the execution provider that a model package has it for; empty for any."""


@dataclass(frozen=True)
class ModelFiles:
    """Where the parts of one model are. `origins` names for each field the rule that found its value."""

    decoder: Path
    """The .onnx file that holds the decoder and returns logits; of a pipeline its first graph."""

    directory: Path
    """The package's root: the folder with genai_config.json, else the decoder's own."""

    genai_config: Mapping[str, Any]
    """The parsed genai_config.json; empty where there is none."""

    hf_config: Mapping[str, Any]
    """The parsed config.json beside the decoder or in the package's root; empty where there is none."""

    tokenizer: str
    """Folder (or hub name) that transformers' AutoTokenizer loads."""

    origins: Mapping[str, str] = field(default_factory=dict)

    weights: tuple[Path, ...] = ()
    """The decoder's external-data files, by location in the graph; then a pipeline's other graphs and their files."""

    pipeline: tuple[str, ...] = ()
    """Names of the graphs that make the decoder only together (genai_config.json's `model.decoder.pipeline`)."""

    companions: Mapping[str, GraphFiles] = field(default_factory=dict)
    """The other graphs, by what they do: "embedding" where the decoder takes embeddings, not ids."""

    variant: str = ""
    """The name of the variant of a model package; empty elsewhere."""

    variant_provider: str = ""
    """Full name of the execution provider that the variant is for; empty for any."""

    @property
    def stages(self) -> tuple[Path, ...]:
        """A pipeline's other graphs than `decoder`."""
        return tuple(file for file in self.weights if self.pipeline and file.suffix == ".onnx")


ITEM_BYTES = {1: 4, 2: 1, 3: 1, 10: 2, 11: 8, 16: 2, 17: 1, 18: 1, 19: 1, 20: 1}
"""Bytes of an element by ONNX type (FLOAT 1, UINT8 2, INT8 3, FLOAT16 10, DOUBLE 11, BFLOAT16 16, FLOAT8* 17-20)."""


@dataclass(frozen=True)
class TensorSpec:
    """A graph input or output: name, ONNX element type (`onnx.TensorProto.DataType`), shape with symbolic names."""

    name: str
    elem_type: int
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class KvTensor:
    """One key or value cache: input `past`, output `present`.

    Its shape is [B, heads, T, head_size], or [B, T, heads * head_size] where `position_axis` is 1.
    """

    past: str
    present: str
    elem_type: int
    heads: int
    head_size: int
    position_axis: int = 2
    capacity: int | None = None
    """T where the graph fixes it (a static cache)."""

    window: int | None = None
    """T in the file where the graph drops older positions (sliding_window_cache=1); the engine keeps all."""

    def shape(self, num_rows: int, num_positions: int) -> list[int]:
        """The cache's shape for that many rows (B) and positions (T), of which a static cache has its own number."""
        positions = self.capacity or num_positions
        return [num_rows, *(positions if size is None else size for size in self.row_shape)]

    @property
    def row_shape(self) -> tuple[int | None, ...]:
        """The axes of a row, None in the place of its positions."""
        return (None, self.heads * self.head_size) if self.position_axis == 1 else (self.heads, None, self.head_size)


@dataclass(frozen=True)
class StateTensor:
    """A state of all positions so far, [B, *row_shape], zeros at first, which cannot be cut back to fewer positions."""

    past: str
    present: str
    elem_type: int
    row_shape: tuple[int, ...]

    def shape(self, num_rows: int, num_positions: int) -> list[int]:
        """The state's shape for that many rows (B), after any number of positions."""
        return [num_rows, *self.row_shape]


class SourceKind(str, Enum):
    """What an encoder takes."""

    TOKENS = "token ids"
    FEATURES = "features"


@dataclass(frozen=True)
class CrossInputs:
    """Inputs of an encoder-decoder's decoder that are the same on every run after one source."""

    states: tuple[TensorSpec, ...] = ()
    """The encoder's hidden states [B, T, H]."""

    masks: tuple[TensorSpec, ...] = ()
    """1 for each of the encoder's positions [B, T]."""

    kv: Mapping[str, TensorSpec] = field(default_factory=dict)
    """KV of the attention to the encoder, by the name of the output that carries it in the other graph."""

    def __bool__(self) -> bool:
        return bool(self.states or self.masks or self.kv)

    @property
    def names(self) -> frozenset[str]:
        """Names of all these inputs."""
        return frozenset(tensor.name for tensor in (*self.states, *self.masks, *self.kv.values()))


class Role(str, Enum):
    """What an input of the decoder carries. B rows, S new tokens of a row, W width of the mask."""

    INPUT_IDS = "input_ids"
    """Token ids [B, S], or [all new tokens] (paged)."""

    ATTENTION_MASK = "attention_mask"
    """1 for each position up to the row's last new token, [B, W]."""

    POSITION_IDS = "position_ids"
    """Positions of the new tokens, [B, S], [all new tokens] (paged), or [3, B, S] for multimodal rotary embeddings."""

    CACHE_POSITION = "cache_position"
    """Positions of the new tokens of the only row, [S]."""

    LAST_POSITIONS = "past_seq_len"
    """Index of each row's last position after the step (GroupQueryAttention's seqlens_k), [B, 1] or [B]."""

    TOTAL_LENGTH = "total_seq_len"
    """Largest number of positions of a row after the step, [] or [1]."""

    WRITE_INDICES = "write_indices"
    """Where each row's new tokens go in a static cache, [B]."""

    VALID_LENGTHS = "nonpad_kv_seqlen"
    """Positions of each row after the step, [B]."""

    BLOCK_TABLE = "block_table"
    """Blocks of each row in a paged cache, [B, blocks]; the KV store fills it."""

    CUMULATIVE_LENGTHS = "cumulative_sequence_lengths"
    """Where each row's new tokens begin and the last one's end among all new tokens, [B + 1] (paged)."""

    PAST_LENGTHS = "past_sequence_lengths"
    """Positions of each row before the step, [B] (paged)."""

    ATTENTION_BOUNDS = "attention_metadata"
    """Most new tokens and most positions of a row after the step, and a lower bound of these, [2] or [3] (paged)."""

    USE_CACHE_BRANCH = "use_cache_branch"
    """Whether there is a past at all, bool [1] (merged decoders)."""

    WHOLE_LENGTH = "olive_ext_whole_length"
    """Positions of the texts to which a step's rows belong, []: added to graphs that would choose by the step's."""


@dataclass(frozen=True)
class InputSpec:
    """An input that the runner computes from the rows of a step."""

    role: Role
    tensor: TensorSpec


class LengthChoice(NamedTuple):
    """A value [1, ...] of `rank` axes by which a graph chooses between numbers for shorter and for longer texts, such
    as the factors of a rotary embedding (longrope). A plain pass over a text of up to `length` tokens gives one side,
    over a longer text the other; the value is then `is_true_beyond`."""

    value: str
    rank: int
    length: int
    is_true_beyond: bool


@dataclass(frozen=True)
class ItemMasks:
    """Layers of a decoder that takes token ids beside embeddings, counted by their attention."""

    joined: tuple[int, ...] = ()
    """Layers in which an item's tokens see the tokens after them."""

    beyond_window: tuple[int, ...] = ()
    """Layers among `joined` in which an item's tokens see further back than a token of text does."""


@dataclass(frozen=True)
class StepChoices:
    """What in a step decides its numbers, beside each row's own tokens and positions."""

    by_length: tuple[LengthChoice, ...] = ()
    """Choices between short and long texts, which can be made for the whole text beforehand."""

    leak: str = ""
    """The first node that depends on the step in another way; empty where there is none."""

    numbers: tuple[int, ...] = ()
    """Numbers with which positions may be compared, those of windows included, ascending."""

    of_provider: tuple[int, ...] = ()
    """Positions beyond which the provider computes otherwise, by the step."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """The most positions of texts on each side, but for the last, ascending."""
        return tuple(sorted({*self.of_provider, *(choice.length for choice in self.by_length)}))


@dataclass(frozen=True)
class DecoderSpec:
    """What a decoder takes, returns and can do, read from its graph and genai_config.json."""

    inputs: tuple[InputSpec, ...]
    kv: tuple[KvTensor, ...]
    logits: TensorSpec
    vocab_size: int
    context_length: int
    is_kv_in_place: bool
    """Whether past and present may share one buffer."""

    states: tuple[StateTensor, ...] = ()
    embeddings: tuple[str, ...] = ()
    """Inputs that an embedding graph computes from the token ids."""

    embedding_rows: int | None = None
    """The number of tokens for which the decoder itself has a row, where its graph shows it."""

    cross: CrossInputs = field(default_factory=CrossInputs)
    """Inputs that an encoder gives; none in a decoder-only model."""

    alone: str = ""
    """Why each request is fed whole and alone: what a token's numbers depend on beside its own text; empty where it may
    be fed in parts and with others."""

    choices: StepChoices = field(default_factory=StepChoices)
    """What of a step decides its numbers."""

    takes_one_row: bool = False
    """Whether the graph's batch is fixed at one row."""

    item_masks: ItemMasks = field(default_factory=ItemMasks)
    """In which layers the tokens of a picture see each other, as far as the graph shows it."""

    rounds_rows: bool = False
    """Whether activations are rounded to few bits, each row by itself: a difference in the last bit may then grow."""

    gathered_bytes: int = 0
    """Bytes that attention takes beside the caches, for each row of a step and each position of its longest row."""

    contradicted: tuple[str, ...] = ()
    """What genai_config.json states and the graph contradicts: onnxruntime-genai follows the file."""

    notes: tuple[str, ...] = ()
    """One sentence on each decision that is not obvious, for `olive-ext check`."""

    @property
    def num_ids(self) -> int:
        """Ids that the model both takes and gives: a head may be padded farther than the embedding, or the reverse."""
        return min(self.vocab_size, self.embedding_rows or self.vocab_size)

    @property
    def is_paged(self) -> bool:
        """Whether the KV cache is made of blocks that a table assigns to rows."""
        return any(entry.role is Role.BLOCK_TABLE for entry in self.inputs)

    @property
    def caches(self) -> tuple[KvTensor | StateTensor, ...]:
        """The tensors that are carried from one step to the next: KV caches and states."""
        return (*self.kv, *self.states)

    @property
    def bytes_per_position(self) -> int:
        """Bytes of KV that one position of one slot takes, all layers together."""
        return sum(tensor.heads * tensor.head_size * ITEM_BYTES[tensor.elem_type] for tensor in self.kv)

    @property
    def bytes_of_source(self) -> int:
        """Bytes of the encoder states and the cross-attention KV that are kept for one source. Where the graph does not
        give the encoder's number of positions, the decoder's context length stands for it."""
        return sum(
            math.prod(size if isinstance(size, int) else self.context_length for size in tensor.shape[1:])
            * ITEM_BYTES[tensor.elem_type]
            for tensor in (*self.cross.states, *self.cross.kv.values())
        )


class Modality(str, Enum):
    """What a request may hold besides text."""

    IMAGE = "image"
    AUDIO = "audio"

    @property
    def kind(self) -> str:
        """What messages call its items."""
        return {"image": "picture", "audio": "sound"}[self.value]


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
    """What an input is for, as far as its name says."""
    return [modality for modality, parts in _PARTS_OF_NAMES.items() if any(part in name.lower() for part in parts)]


def modality_of(feature: str) -> Modality:
    """The modality of an embedding graph's input. Raises `ModelError` for a name that says none."""
    modalities = modalities_of(feature)
    if len(modalities) != 1:
        raise ModelError(f"the embedding graph's input '{feature}' is neither for pictures nor for sound, by its name")
    return modalities[0]


@dataclass(frozen=True)
class MediaInput:
    """What a model takes besides text, of one modality."""

    modality: Modality
    placeholder: int
    """The token id that is replaced by a row of features."""

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
    """Its outputs of features: [rows, size], or with axes in front that are joined with the rows. Where there are
    several, rows of all of them belong to the same placeholders."""

    features: tuple[TensorSpec, ...]
    """The embedding graph's inputs for them, [rows, size], in the order of `outputs`."""

    real_rows: TensorSpec | None = None
    """The output that says which rows of the features belong to the item and not to its padding: their number [B], or a
    mask [B, rows]. None where all do."""

    @property
    def one_by_one(self) -> str:
        """Why it takes one item a run, as far as its interface shows; empty where several may be tried."""
        for tensor in self.inputs:
            if isinstance(tensor.shape[0], int):
                return f"'{tensor.name}' {list(tensor.shape)} has room for {tensor.shape[0]}"
        return ""

    @property
    def grid(self) -> str | None:
        """The input with a row for each picture, whose patches are concatenated; None where there is none."""
        return next((tensor.name for tensor in self.inputs if "grid" in tensor.name), None)

    @property
    def has_mask(self) -> bool:
        """Whether an input marks the padding of an item."""
        return any("mask" in tensor.name for tensor in self.inputs)

    @property
    def has_own_rows(self) -> bool:
        """Whether it returns as many rows as its items have, for any shape of its inputs, [B, T, size]."""
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
    """Why encoders are missing although the package has some: text runs without them."""

    @property
    def encoders(self) -> tuple[MediaEncoderSpec, ...]:
        """Encoders that are graphs: all of a package's, none of a checkpoint's, which transformers runs itself."""
        return tuple(entry for entry in self.inputs if isinstance(entry, MediaEncoderSpec))

    @property
    def modalities(self) -> tuple[Modality, ...]:
        """Modalities of the inputs, in their order."""
        return tuple(entry.modality for entry in self.inputs)


@dataclass(frozen=True)
class EmbeddingSpec:
    """The graph that turns token ids into what the decoder takes in their place."""

    inputs: tuple[InputSpec, ...]
    features: tuple[TensorSpec, ...]
    """Inputs for images and sound, [rows, size]; text has no rows of them."""

    outputs: tuple[str, ...]
    """Outputs to bind, each named as the decoder's input."""

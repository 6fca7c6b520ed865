"""Which graph of a model does what: by the graphs themselves, which make what others take, then by the names that a
user, a configuration or an exporter gives them. Where both speak and differ, that is an error.

Knows no folder's layout and no session.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from olive_ext.errors import MismatchError, ModelError
from olive_ext.model.spec.encoder_spec import read_cross_inputs
from olive_ext.model.spec.media_types import MEDIA_PARTS, Modality, modalities_of, modality_of
from olive_ext.model.spec.tensor_names import EMBEDDING_NAMES, STATES_OUTPUTS, Outline
from olive_ext.model.types import TensorSpec

Named = tuple[Path, str]
"""A graph's file, and the rule that found it."""

_PARTS = {modality: part for part, modality in MEDIA_PARTS.items()}


@dataclass(frozen=True)
class Part:
    """What a graph does for a decoder, and how its interface shows that."""

    name: str
    why: str


def find_parts(decoder: Outline, others: Mapping[Path, Outline]) -> dict[Path, Part]:
    """What each of `others` does for `decoder`, for those of which the graphs tell."""
    parts = dict(_embeddings(decoder, others))
    features = [
        tensor
        for file in parts
        for tensor in others[file].inputs.values()
        if len(tensor.shape) == 2 and tensor.elem_type in (1, 10, 11, 16)  # of floats
    ]
    for file, graph in others.items():
        if file not in parts and (feature := _feature_of(graph, features)) is not None:
            part = _PARTS[modality_of(feature.name)]
            parts[file] = Part(part, f"it returns what the embedding graph takes as '{feature.name}'")
    cross = read_cross_inputs(decoder.inputs, {})
    for file, graph in others.items():
        made = graph.outputs.keys() & {*STATES_OUTPUTS, *cross.kv}
        if cross and made and file not in parts:
            name = "first_step" if graph.has_logits else "encoder"
            parts[file] = Part(name, f"it returns '{min(made)}', which the decoder's attention takes")
    return parts


def settle(named: Mapping[str, Named], parts: Mapping[Path, Part]) -> dict[str, Named]:
    """The graph of each part: those that are `named`, and those that the graphs tell. Raises `ModelError` where a name
    and the graphs contradict each other, or two graphs that nothing names do the same."""
    for part, (file, rule) in named.items():
        real = parts.get(file)
        if real is not None and real.name != part:
            raise ModelError(f"by {rule} '{file}' is the part '{part}'; by the graphs it is '{real.name}': {real.why}")
    settled = dict(named)
    for file, real in parts.items():
        if real.name in named:
            continue
        if real.name in settled:
            raise MismatchError(
                f"both '{settled[real.name][0]}' and '{file}' are '{real.name}' by the graphs: name one in 'components'"
            )
        settled[real.name] = (file, real.why)
    return settled


def _embeddings(decoder: Outline, others: Mapping[Path, Outline]) -> Iterator[tuple[Path, Part]]:
    for file, graph in others.items():
        made = EMBEDDING_NAMES & decoder.inputs.keys() & graph.outputs.keys()
        if made and not graph.has_logits:
            yield file, Part("embedding", f"it returns '{min(made)}', which the decoder takes")


def _feature_of(graph: Outline, features: list[TensorSpec]) -> TensorSpec | None:
    """The embedding graph's input that `graph` makes: of its output's name; else the only one of an output's size that
    is for what the names of the graph's own inputs say."""
    named = [feature for feature in features if feature.name in graph.outputs]
    if named or graph.has_logits:
        return named[0] if named else None
    meant = {modality for name in graph.inputs for modality in modalities_of(name)} or set(Modality)
    fitting = [
        feature
        for feature in features
        if meant.intersection(modalities_of(feature.name))
        and any(width_fits(output, feature) for output in graph.outputs.values())
    ]
    return fitting[0] if len(fitting) == 1 else None


def width_fits(tensor: TensorSpec, feature: TensorSpec) -> bool:
    """Whether an encoder's output may be the embedding graph's input `feature`, by its type and last axis."""
    width = tensor.shape[-1] if tensor.shape else None
    is_width = width == feature.shape[-1] or isinstance(width, str)
    return len(tensor.shape) in (2, 3) and tensor.elem_type == feature.elem_type and is_width

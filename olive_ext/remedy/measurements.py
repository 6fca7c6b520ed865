"""What variants are measured with, which targets are quantized together in one, and what has been measured, by the
content of documents and the weights that were quantized: kept in a journal, so that an interrupted map goes on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from olive_ext.records.journal import Journal
from olive_ext.remedy.bound_session import Floats
from olive_ext.remedy.documents import Document, document_key
from olive_ext.remedy.roundings import AnyTarget
from olive_ext.remedy.variants import Variants


@dataclass(frozen=True)
class Material:
    """What a loss is measured with: variants of the float model, and documents whose distributions it has recorded."""

    variants: Variants
    documents: Sequence[Document]
    tasks: Sequence[str]
    """Of each document."""

    positions: npt.NDArray[np.int64]
    """Of each document [N]."""

    journal: Journal | None

    def part(self, numbers: Sequence[int]) -> Material:
        """Some of the documents."""
        documents, tasks = [self.documents[n] for n in numbers], [self.tasks[n] for n in numbers]
        return replace(self, documents=documents, tasks=tasks, positions=self.positions[list(numbers)])


class Measurements:
    """KL(float || variant), by documents that are recorded."""

    def __init__(self, variants: Variants, documents: Sequence[Document], journal: Journal | None) -> None:
        """`journal` is of the facts of `variants` and of the quantized model."""
        self._variants, self._documents, self._journal = variants, documents, journal
        self._keys = [document_key(document) for document in documents]

    def kl(self, targets: Collection[AnyTarget], numbers: Sequence[int]) -> Floats:
        """Nats summed over the positions of each of N documents, by their numbers [N]; the variant has the quantized
        numbers of `targets`."""
        names = repr(sorted((target.what, node) for target in targets for node in target.nodes))
        return self.kept(names, numbers, lambda documents: self._variants.kl(targets, documents))

    def kept(self, name: str, numbers: Sequence[int], measure: Callable[[Sequence[Document]], Floats]) -> Floats:
        """As `kl`, of a variant that has this name in the journal and is measured by `measure`."""
        keys = [hashlib.blake2b(name.encode() + self._keys[number], digest_size=16).digest() for number in numbers]
        known = {key: self._journal[key] for key in keys if key in self._journal} if self._journal is not None else {}
        missing = [(key, number) for key, number in zip(keys, numbers, strict=True) if key not in known]
        if missing:
            measured = measure([self._documents[number] for _, number in missing])
            made = dict(zip((key for key, _ in missing), measured.tolist(), strict=True))
            if self._journal is not None:
                self._journal.add(made)
            known |= made
        return np.array([known[key] for key in keys], np.float64)


@dataclass(frozen=True)
class Group:
    """Targets that are quantized together: one, a layer's weights or activations, or those of one kind."""

    name: str
    targets: tuple[AnyTarget, ...]

    @property
    def layer(self) -> int | None:
        """The layer of all; None where they have several, or are outside of the layers."""
        layers = {target.layer for target in self.targets}
        return layers.pop() if len(layers) == 1 else None

    @property
    def kind(self) -> str:
        """The kind of all; of several what these have in common: "activations", or nothing."""
        kinds = {target.kind for target in self.targets}
        return kinds.pop() if len(kinds) == 1 else self.targets[0].what.strip(", ")


def grouped(targets: Sequence[AnyTarget], by: str) -> list[Group]:
    """The targets one by one ("node"), by layer, or by kind; those outside of the layers by kind in any case."""

    def key(target: AnyTarget) -> str:
        if by == "node" and target.is_alone:
            return target.name
        if target.layer is None:
            return target.kind or target.name
        return target.kind if by == "kind" else f"layer {target.layer}{target.what}"

    names = list(dict.fromkeys(map(key, targets)))
    return [Group(name, tuple(target for target in targets if key(target) == name)) for name in names]

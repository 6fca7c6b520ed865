"""Weights, or activations, that are quantized together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from olive_ext.remedy.roundings import AnyTarget


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

"""What some decoders need besides a session, a cache and a scoring head: the graphs that make their inputs, adapters,
the shared-prefix cache of tree batches, captured steps, what providers compile. Knows no step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from olive_ext.engine.runners.ort.capture import Capture
from olive_ext.engine.runners.ort.companion_inputs import Adapters, Encoder
from olive_ext.engine.runners.ort.embedding import Embedding
from olive_ext.engine.runners.ort.kv.in_place import ViewKv
from olive_ext.graph.tree_attention import BiasInput
from olive_ext.model.compiled import Compiled


@dataclass(frozen=True)
class SharedPrefixKv:
    """The shared-prefix cache: one slot of cells, and the biases that hide from a token the cells it may not see."""

    kv: ViewKv
    biases: Sequence[BiasInput]


@dataclass(frozen=True)
class OrtParts:
    """What some decoders need besides a session, a cache and a scoring head."""

    compiled: Compiled
    embedding: Embedding | None = None
    encoder: Encoder | None = None
    adapters: Adapters | None = None
    shared_prefix: SharedPrefixKv | None = None
    capture: Capture | None = None

    def forget(self) -> None:
        """Frees captured steps and what encoders have made."""
        if self.capture is not None:
            self.capture.forget()
        for encoded in (self.embedding, self.encoder):
            if encoded is not None:
                encoded.close()

    def close(self) -> None:
        """Releases the shared prefix, and what encoders have made; keeps what was compiled."""
        if self.shared_prefix is not None:
            self.shared_prefix.kv.close()
        self.forget()
        self.compiled.close()

    def describe(self) -> Mapping[str, Any]:
        """What the parts have to tell."""
        told = [part.describe() for part in (self.encoder, self.embedding, self.capture) if part is not None]
        told.append(self.compiled.describe())
        return {name: value for facts in told for name, value in facts.items()}

"""What a row behind a source is fed on transformers: the encoder's states of it, computed once while they are kept.

Knows no cache and no step.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from olive_ext.engine.requests import Source
from olive_ext.engine.runners.runner import refuse_other_source
from olive_ext.model.types import SourceKind, TensorSpec

if TYPE_CHECKING:
    import torch

KEPT = 8
"""Sources whose states are kept: those of the requests at hand."""


class SourceStates:
    """The encoder of an encoder-decoder."""

    def __init__(self, model: Any, kind: SourceKind, source: TensorSpec) -> None:
        """`source`: the encoder's input."""
        self.kind = kind
        self.source = source
        self.num_runs = 0
        self._model = model
        self._states = lru_cache(maxsize=KEPT)(self._encode)

    def check(self, source: Source | None) -> None:
        """Raises `OliveExtError` for a source that the encoder does not take."""
        refuse_other_source(source, self.kind, self.source)

    def inputs(self, source: Source | None) -> dict[str, Any]:
        """What the model is given beside the decoder's tokens."""
        assert source is not None, "checked when the request came"
        return {"encoder_outputs": (self._states(source),)}

    def forget(self) -> None:
        """Gives the memory back."""
        self._states.cache_clear()

    def _encode(self, source: Source) -> torch.Tensor:
        """[1, positions, hidden size]."""
        import torch

        self.num_runs += 1
        given = torch.from_numpy(source.array[None]).to(self._model.device)
        given = given.to(self._model.dtype) if self.kind is SourceKind.FEATURES else given
        with torch.inference_mode():
            states: torch.Tensor = self._model.get_encoder()(given)[0]
        return states

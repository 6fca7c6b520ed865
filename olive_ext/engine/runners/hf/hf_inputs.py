"""What a row is fed on transformers besides tokens: the arrays of its pictures and sounds, the encoder's states of its
source.

With pictures or sounds a row is fed all that is before the last of them in one pass, with the arrays of all: features
get into the embeddings by counting placeholders from the beginning of a pass, and some models let a picture's tokens
see each other, which no pass behind a cache does. Knows no cache of the decoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from olive_ext.engine.media.items import Media, filled_up, rotary_positions
from olive_ext.engine.requests import Source
from olive_ext.engine.runners.hf.hf_model import new_cache
from olive_ext.engine.runners.runner import refuse_other_source
from olive_ext.engine.step import FIRST_CELL, Row, Step, visible_cells
from olive_ext.model.spec.media_types import Modality
from olive_ext.model.types import SourceKind, TensorSpec

if TYPE_CHECKING:
    import torch

KEPT_SOURCES = 8
"""Sources whose states are kept: those of the requests at hand."""

_TYPES = ("token_type_ids", "mm_token_type_ids")
"""Names of the input that tells the tokens of pictures and sounds from text (0), in the models that take it."""

_TYPE_IDS = {Modality.IMAGE: 1, Modality.AUDIO: 3}


@dataclass(frozen=True)
class FedRow:
    """The tokens of one pass, with placeholders, and where they begin in the sequence."""

    begin: int
    ids: list[int]
    runs: Media
    """The pictures and sounds among `ids`, whole."""

    @property
    def stop(self) -> int:
        """The position behind the last token."""
        return self.begin + len(self.ids)


def fed_row(tokens: Sequence[int], held: int, media: Media) -> FedRow:
    """What is fed for `tokens`, `held` of which are cached: with an item among the others, all tokens."""
    begun = tuple(run for run in media if run.start < len(tokens))
    if not begun or begun[-1].stop <= held:
        return FedRow(held, list(tokens[held:]), ())
    ids = list(tokens)
    for run in begun:
        ids[run.start : run.stop] = [run.item.placeholder] * run.item.num_tokens
    return FedRow(0, ids, begun)


def item_inputs(row: FedRow, accepted: Mapping[str, Any], device: Any) -> dict[str, torch.Tensor]:
    """The processor's arrays of the row's items that the model takes (`accepted`), joined, and its tokens' types."""
    import torch

    if not row.runs:
        return {}
    loaded: dict[str, list[npt.NDArray[Any]]] = {}
    for name, array in chain.from_iterable(run.item.arrays().items() for run in row.runs):
        loaded.setdefault(name, []).append(array)
    found = {name: torch.from_numpy(filled_up(loaded[name])).to(device) for name in loaded.keys() & accepted.keys()}
    types_S = torch.zeros((1, len(row.ids)), dtype=torch.long, device=device)
    for run in row.runs:
        types_S[:, run.start : run.stop] = _TYPE_IDS[run.item.modality]
    return {**found, **{name: types_S for name in _TYPES if name in accepted}}


def rotary_inputs(row: FedRow, media: Media, device: Any) -> dict[str, torch.Tensor]:
    """Time, height and width [3, 1, S] of a row behind a cache. Such models know the positions of a pass with pictures
    by themselves, and remember of it how far text goes on: of another sequence, where that was the last one."""
    import torch

    if row.runs:
        return {}
    positions_3S = rotary_positions(media, range(row.begin, row.stop))
    return {"position_ids": torch.from_numpy(positions_3S)[:, None].to(device)}


class SourceStates:
    """The encoder of an encoder-decoder, whose states of a source are computed once while they are kept."""

    def __init__(self, model: Any, kind: SourceKind, source: TensorSpec) -> None:
        """`source`: the encoder's input."""
        self.kind = kind
        self.source = source
        self.num_runs = 0
        self._model = model
        self._states = lru_cache(maxsize=KEPT_SOURCES)(self._encode)

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


class HfSharedPrefix:
    """The shared-prefix cache: a cache of transformers whose places are cells, less cell 0, which no token sees."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache: Any = None

    def forget(self) -> None:
        """Gives the memory back; the next step must begin at the first cell."""
        self._cache = None

    def run(self, step: Step) -> torch.Tensor:
        """The logits [max(R, 1), V] of the step's logits rows, in fp32."""
        import torch

        assert step.first_cell is not None
        with torch.inference_mode():
            self._settle(step)
            ids = torch.tensor([[token for row in step.rows for token in row.tokens]], device=self._model.device)
            positions = [row.past + place for row in step.rows for place in range(len(row.tokens))]
            starts = np.cumsum([0, *(len(row.tokens) for row in step.rows)])
            rows = torch.tensor([int(starts[found.row]) + found.offset for found in step.logits_rows] or [0])
            logits_RV: torch.Tensor = self._model(
                input_ids=ids,
                attention_mask=self._mask(step.rows, step.first_cell),
                position_ids=torch.tensor([positions], device=self._model.device),
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=rows,
            ).logits[0]
        return logits_RV.float()

    def _settle(self, step: Step) -> None:
        """Makes the step's moves, and drops the cells that the step writes anew."""
        import torch

        assert step.first_cell is not None
        if self._cache is None:
            self._cache = new_cache(self._model.config)
        for move in step.moves:
            sources, target = move.source_N - FIRST_CELL, move.target - FIRST_CELL
            for layer in self._cache.layers:
                for cells in (layer.keys, layer.values):
                    cells[:, :, target : target + len(sources)] = cells[:, :, sources]
        stale = self._cache.get_seq_length() - (step.first_cell - FIRST_CELL)
        if stale > 0:
            self._cache.crop(-stale)  # a negative number takes that many away, in every version 5
        elif stale < 0:  # anything goes into cells that were never written: steps are tried and timed on any cache
            ids = torch.zeros((1, -stale), dtype=torch.long, device=self._model.device)
            self._model(input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)

    def _mask(self, rows: Sequence[Row], first_cell: int) -> torch.Tensor:
        """[1, 1, S, T], added to scores."""
        import torch

        visible_ST = visible_cells(rows, first_cell, None)[0, 0, :, FIRST_CELL:]
        fresh = first_cell - FIRST_CELL
        visible_ST[:, fresh:] &= np.tri(len(visible_ST), dtype=np.bool_)
        hidden_ST = torch.from_numpy(~visible_ST).to(self._model.device)
        bias_ST = torch.zeros(hidden_ST.shape, dtype=self._model.dtype, device=self._model.device)
        return bias_ST.masked_fill_(hidden_ST, torch.finfo(self._model.dtype).min)[None, None]

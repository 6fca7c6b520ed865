"""What a row with pictures or sounds is fed on transformers: all that is before its last one, in one pass with the
arrays of all.

There features get into the embeddings by counting placeholders from the beginning of a pass, and some models let a
picture's tokens see each other, which no pass behind a cache does. Knows no cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from olive_ext.engine.media import Media, filled_up, rotary_positions
from olive_ext.model.media_types import Modality

if TYPE_CHECKING:
    import torch

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
    """What is fed for `tokens`, of which `held` are in the cache: where one of the others is a picture's or a sound's,
    all from the first token on."""
    begun = tuple(run for run in media if run.start < len(tokens))
    if not begun or begun[-1].stop <= held:
        return FedRow(held, list(tokens[held:]), ())
    ids = list(tokens)
    for run in begun:
        ids[run.start : run.stop] = [run.item.placeholder] * run.item.num_tokens
    return FedRow(0, ids, begun)


def item_inputs(row: FedRow, accepted: Mapping[str, Any], device: Any) -> dict[str, torch.Tensor]:
    """The processor's arrays of the row's pictures and sounds that the model takes by name (`accepted`), joined, and
    the types of its tokens."""
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

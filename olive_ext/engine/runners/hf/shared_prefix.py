"""Tree batches on transformers, behind a cache of their own. Knows no tokenizer.

Axes: S tokens of a tree batch, T cells, R logits rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from olive_ext.engine.step import FIRST_CELL, Row, Step, visible_cells

if TYPE_CHECKING:
    import torch


class HfSharedPrefix:
    """The shared-prefix cache: a cache of transformers whose places are cells, less cell 0, which no token sees."""

    def __init__(self, model: Any, new_cache: Callable[[], Any]) -> None:
        self._model = model
        self._new_cache = new_cache
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
            self._cache = self._new_cache()
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

    def _mask(self, rows: tuple[Row, ...], first_cell: int) -> torch.Tensor:
        """[1, 1, S, T], added to scores."""
        import torch

        visible_ST = visible_cells(rows, first_cell, None)[0, 0, :, FIRST_CELL:]
        fresh = first_cell - FIRST_CELL
        visible_ST[:, fresh:] &= np.tri(len(visible_ST), dtype=np.bool_)
        hidden_ST = torch.from_numpy(~visible_ST).to(self._model.device)
        bias_ST = torch.zeros(hidden_ST.shape, dtype=self._model.dtype, device=self._model.device)
        return bias_ST.masked_fill_(hidden_ST, torch.finfo(self._model.dtype).min)[None, None]

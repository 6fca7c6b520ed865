"""The rows of a step that is being planned, with their sequences. Knows no form and no step's output.

Most rows of a step that decodes many sequences are alike: one token behind those of its slot, and the next one is what
the device finds. Of such (`plain`) there are columns and no objects: planning 256 of them takes a third less.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import cached_property

from olive_ext.engine.requests import integers
from olive_ext.engine.scheduling.sequences import Sequence
from olive_ext.engine.step import IDLE_TOKEN, PlainRows, Row

PlannedRow = tuple[Sequence | None, Row]
"""A row and its sequence; None for an idle one."""


@dataclass(frozen=True)
class ChosenRows:
    """Those of `plain` sequences, behind them `others`."""

    others: Items[PlannedRow]
    plain: Items[Sequence] = ()

    @cached_property
    def rows(self) -> Items[Row]:
        """As a step has them. The token of a plain one that the step before finds is not known yet."""
        others = tuple([row for _, row in self.others])
        if not self.plain:
            return others
        slots_B = integers([one.slot for one in self.plain])
        past_B = integers([one.computed for one in self.plain])
        tokens = [IDLE_TOKEN if one.is_expected else one.tokens.item(one.computed) for one in self.plain]
        return PlainRows(slots_B, past_B, integers(tokens), others)

    @cached_property
    def sequences(self) -> tuple[Sequence | None, ...]:
        """Of each row; None for an idle one."""
        return (*self.plain, *[sequence for sequence, _ in self.others])

"""Items whose tokens see each other are parted by no step and no shared prefix; text beside them is cut and shared.

The runner notes, in the place of an item's tokens, which items touch it, so that one that was seen among others would
give other numbers than the oracle's.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from olive_ext.engine.engine import Engine
from olive_ext.engine.halves import halve
from olive_ext.engine.media import Media, MediaItem, MediaRun, blocks, whole_stop
from olive_ext.engine.requests import Generation, Request
from olive_ext.engine.step import Batching, LogitsRow, Row, RowMix, Step, StepOutput
from olive_ext.errors import OliveExtError
from olive_ext.model.media_types import Modality
from tests.engine.fake_runner import FakeRunner
from tests.engine.strategies import assert_runs_as_oracle

WHOLE = frozenset({7})
ITEMS = [
    MediaItem(Modality.IMAGE, f"picture {size}", size, placeholder, dict)
    for size, placeholder in ((1, 7), (4, 7), (9, 7), (5, 8))
]
"""The last one may be parted."""


def shown(media: Media) -> Iterable[tuple[int, int]]:
    """(position, number) of all tokens of items: of what is seen there."""
    for block in blocks(media, WHOLE):
        seen = zlib.crc32(" ".join(run.item.key for run in block).encode()) % 10**6
        yield from ((place, 100 + seen + place - block[0].start) for place in range(block[0].start, block[-1].stop))


def request(parts: Iterable[Any], num_targets: int = 0, generation: Generation | None = None) -> Request:
    """Of items and lists of tokens, one behind the other."""
    tokens: list[int] = []
    runs = []
    for part in parts:
        if isinstance(part, MediaItem):
            runs.append(MediaRun(len(tokens), part))
            part = [0] * part.num_tokens
        tokens += part
    media = tuple(runs)
    for place, number in shown(media):
        tokens[place] = number
    return Request(tuple(tokens), num_targets, generation, media=media)


class SeeingRunner(FakeRunner):
    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.traits = replace(self.traits, whole_items=WHOLE)

    def check_media(self, media: Media) -> None:
        """Takes all."""

    def _execute(self, step: Step) -> StepOutput:
        for row in step.rows:
            for position in (row.past, row.past + len(row.tokens)):
                assert whole_stop(row.media, -1, position, WHOLE) == position
        return super()._execute(replace(step, rows=tuple(map(_seen, step.rows))))


def _seen(row: Row) -> Row:
    tokens = list(row.tokens)
    for place, number in shown(row.media):
        if row.past <= place < row.past + len(tokens):
            tokens[place - row.past] = number
    return row._replace(tokens=tuple(tokens))


TEXT = st.lists(st.integers(0, 2), max_size=6)


@st.composite
def requests_with_items(draw: st.DrawFn) -> list[Request]:
    stems = draw(st.lists(st.lists(st.one_of(TEXT, st.sampled_from(ITEMS)), max_size=5), min_size=1, max_size=3))
    found = []
    for _ in range(draw(st.integers(1, 8))):
        targets = draw(st.lists(st.integers(0, 2), max_size=3))
        generation = Generation(draw(st.integers(1, 5))) if not targets or draw(st.booleans()) else None
        found.append(request([[3], *draw(st.sampled_from(stems)), targets], len(targets), generation))
    return found


@given(
    calls=st.lists(requests_with_items(), min_size=1, max_size=3),
    num_slots=st.integers(1, 4),
    chunk_size=st.integers(1, 12),
    runner=st.sampled_from([*[(batching, True) for batching in Batching], (Batching.SINGLE, False)]),
)
def test_no_step_and_no_prefix_parts_an_item(
    calls: list[list[Request]], num_slots: int, chunk_size: int, runner: tuple[Batching, bool]
) -> None:
    batching, can_rewind = runner
    mix = RowMix(pasts=True, prompts=True, continued=True)
    engine = Engine(SeeingRunner(num_slots, batching, can_rewind=can_rewind, row_mix=mix), chunk_size)
    assert_runs_as_oracle(engine, calls)


def test_what_lies_before_and_behind_an_item_is_shared() -> None:
    large = ITEMS[2]
    asked = [request([[3] * 20, large, [1] * 10, [target]], 1) for target in range(3)]
    asked += [request([[3] * 20, large, [target]], 1) for target in range(3)]
    engine = Engine(SeeingRunner(2, Batching.SINGLE), 4)
    assert_runs_as_oracle(engine, [asked])
    assert engine.counters.tokens_fed == engine.counters.tokens_distinct == 20 + 9 + 10


def test_item_that_ends_a_prompt_is_fed_again_as_a_whole() -> None:
    """Its last token is read, so a second request cannot go on behind it."""
    asked = [request([[3] * 20, ITEMS[2]], generation=Generation(2))]
    runner = SeeingRunner(1, Batching.SINGLE)
    assert_runs_as_oracle(Engine(runner, 64), [asked, asked])
    assert [len(step.rows[0].tokens) for step in runner.steps] == [29, 1, 9, 1]


def test_step_is_halved_beside_an_item_or_not_at_all() -> None:
    media = (MediaRun(2, ITEMS[2]),)
    row = Row(0, 0, tuple(range(12)), media=media)
    halves = halve(Step((row,), (LogitsRow(0, 11),)), Batching.SINGLE, WHOLE)
    assert halves is not None
    assert [len(half.rows[0].tokens) for half in halves] == [2, 10]
    behind = row._replace(past=2, tokens=row.tokens[2:])
    halves = halve(Step((behind,), (LogitsRow(0, 9),)), Batching.SINGLE, WHOLE)
    assert halves is not None
    assert [len(half.rows[0].tokens) for half in halves] == [9, 1]
    assert halve(Step((behind._replace(tokens=row.tokens[2:11]),)), Batching.SINGLE, WHOLE) is None


def test_item_longer_than_a_step_of_the_device_is_refused_and_text_is_not() -> None:
    runner = SeeingRunner(1, Batching.SINGLE)
    runner.traits = replace(runner.traits, longest_step=8)
    engine = Engine(runner, 8)
    assert_runs_as_oracle(engine, [[request([[3] * 30, ITEMS[1], ITEMS[3], [1]], 1)]])
    with pytest.raises(OliveExtError, match=r"image of 9 tokens, which see each other .* a step has 8"):
        engine.run([request([[3], ITEMS[2], [1]], 1)])
    with pytest.raises(OliveExtError, match="image of 13 tokens"):
        engine.run([request([[3], ITEMS[1], ITEMS[2], [1]], 1)])

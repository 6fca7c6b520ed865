"""The engine over a fake runner equals the naive oracle, and feeds no more than the distinct prefixes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from olive_ext.engine.engine import Engine
from olive_ext.engine.requests import Beams, Generation, Request
from olive_ext.engine.runners.runner import MIN_COPY, Capacity, StepForm, Traits
from olive_ext.engine.step import UNLIMITED
from olive_ext.errors import MemoryShortageError, OliveExtError
from olive_ext.media.items import Source
from tests.engine.fake_runner import FORMS, PACKED, RANGE, SINGLE, VOCAB, FakeRunner, oracle
from tests.engine.strategies import (
    RUNNERS,
    SOURCES,
    WITHOUT_SOURCES,
    assert_equal,
    assert_runs_as_oracle,
    assert_tables_agree,
    requests_of,
)
from tests.refusals import refused

_FULL_SLOT = [
    Request((1, 0, 0), 1),
    *(
        Request(tokens, 0, Generation(most))
        for tokens, most in [((1,), 5), ((0,), 1), ((1, 0, 0), 3), ((1, 0, 0), 1), ((1,), 4), ((1,), 1), ((1, 1), 1)]
    ),
]
"""One that fills its slot waits for its last token between two that are fed."""


@pytest.mark.parametrize("kind", RUNNERS)
@settings(max_examples=settings().max_examples // 2)
@given(data=st.data(), chunk_size=st.integers(1, 60))
def test_any_runner_gives_what_the_oracle_gives(kind: str, data: st.DataObject, chunk_size: int) -> None:
    """Calls and streams of any requests, also after memory was released; and what every step has in common."""
    runner = data.draw(RUNNERS[kind])
    engine, lengths = Engine(runner, chunk_size), runner.traits.lengths
    calls = data.draw(st.lists(requests_of(1 if kind in WITHOUT_SOURCES else len(SOURCES)), min_size=1, max_size=3))
    for requests in calls:
        items, before = list(enumerate(requests)), len(runner.steps)
        is_stream = data.draw(st.booleans())
        found = dict(engine.run_continuous(iter(items)) if is_stream else engine.run_slices([items]))
        assert len(found) == len(items)
        for place, request in items:
            assert_equal(found[place], oracle(request, lengths))
        if len(runner.steps) > before:
            assert_tables_agree(engine, runner)
        if kind == "trees" and not is_stream:
            sizes = [step.num_tokens for step in runner.steps[before:] if step.first_cell is not None]
            assert all(size == chunk_size for size in sizes[:-1])
        if end := data.draw(st.sampled_from([None, Engine.reset, Engine.release_memory])):
            end(engine)
            assert end is Engine.reset or runner.capacity == Capacity(
                runner.capacity.num_slots, most_positions=runner.capacity.most_positions
            )
    counters, steps = engine.counters, runner.steps
    assert counters.requests == sum(map(len, calls))
    assert sum(step.num_tokens for step in steps) == counters.tokens_fed + counters.idle_rows + counters.rows_dropped
    assert counters.steps == len(steps) or (counters.steps_halved and kind == "little memory")
    assert not counters.steps_halved or engine.describe()["step_limit"] <= max(3, chunk_size, 8)
    assert counters.tokens_reused == 0 or counters.prefix_hits > 0
    if kind in ("packed", "few blocks"):
        assert all(sum(len(row.tokens) for row in step.rows if len(row.tokens) > 1) <= chunk_size for step in steps)
    if kind == "few positions" and len(calls) == 1 and not is_stream:
        longest = max((one.num_positions for one in calls[0]), default=1)
        num_used = len({row.slot for step in steps for row in step.rows})
        assert not num_used or num_used * longest <= max(runner.capacity.most_positions, longest)
    if kind == "whole texts":
        inputs = {one.tokens if one.generation else one.tokens[:-1] for call in calls for one in call}
        assert all(len(step.rows) == 1 and not step.copies for step in steps)
        assert lengths or {step.rows[0].tokens for step in steps if step.rows[0].past == 0} == inputs
        assert all(len(step.rows[0].tokens) == 1 for step in steps if step.rows[0].past)
    engine.close()


@pytest.mark.parametrize("overlaps_steps", [False, True])
def test_a_slot_that_is_full_waits_where_memory_is_short(overlaps_steps: bool) -> None:
    runner = FakeRunner(4, RANGE, overlaps_steps=overlaps_steps, most_tokens=3)
    assert_runs_as_oracle(Engine(runner, 1), [_FULL_SLOT])


@pytest.mark.parametrize(
    ("form", "how", "slack"),
    [
        (RANGE, {}, 0),
        (RANGE, {"has_tree_batches": True}, 0),
        (RANGE, {"answer_steps": True}, MIN_COPY),
        (PACKED, {}, MIN_COPY),
    ],
    ids=["rows", "trees", "answers", "packed"],
)
@given(requests=requests_of(max_sources=1), chunk_size=st.integers(1, 60), num_slots=st.integers(1, 8))
def test_scoring_feeds_the_distinct_prefixes_and_at_most_what_is_too_little_to_copy(
    form: StepForm, how: dict[str, bool], slack: int, requests: list[Request], chunk_size: int, num_slots: int
) -> None:
    scored = [Request(request.tokens, request.num_targets) for request in requests if request.num_targets]
    engine = Engine(FakeRunner(num_slots, form, **how), chunk_size)
    engine.run(scored)
    counters = engine.counters
    assert counters.tokens_distinct == len({one.tokens[:end] for one in scored for end in range(1, len(one.tokens))})
    assert 0 <= counters.tokens_fed - counters.tokens_distinct <= slack * len(scored)
    assert counters.tokens_naive == sum(len(request.tokens) - 1 for request in scored)


STEM = tuple(range(20))
HEARD, SEEN = SOURCES[1:3]
ON_SIDES = [[Request((*STEM, *range(rest), 3 + last), 1) for rest in (2, 12) for last in range(4)]]
LENGTHS = (3, 20, 4, 30, 5, 6, 40, 2, 25, 9)


@pytest.mark.parametrize(
    ("runner", "calls", "counted"),
    [
        pytest.param(
            FakeRunner(1, RANGE),
            [[Request((*STEM, 1, 2), 1)], [Request((*STEM, 3, 2), 1)]],
            {"tokens_fed": 21 + 1, "prefix_hits": 1},
            id="a later call finds what an earlier one has left",
        ),
        pytest.param(
            FakeRunner(3, SINGLE),
            [[Request((*STEM, 1, 2), 1, source=HEARD)], [Request((*STEM, 3, 2), 1, source=SEEN)]],
            {"tokens_fed": 21 + 21, "prefix_hits": 0},
            id="not after another source",
        ),
        pytest.param(
            FakeRunner(3, SINGLE),
            [[Request((*STEM, last, 2), 1, source=Source(HEARD.array.copy()))] for last in (1, 3)],
            {"tokens_fed": 21 + 1, "prefix_hits": 1},
            id="after an equal source",
        ),
        pytest.param(
            FakeRunner(4, RANGE),
            [[Request((*STEM, *STEM, *STEM, last), 0, Generation(8)) for last in range(4)]],
            {"copies": 3, "tokens_fed": 60 + 4 + 4 * 7},
            id="a prompt is copied between slots",
        ),
        pytest.param(
            FakeRunner(3, RANGE),
            [[Request((i, i + 1), 0, Generation(length)) for i, length in enumerate((3, 6, 9))]],
            {"steps": 3 + 8, "tokens_generated": 18},
            id="generations decode together and end one by one",
        ),
        pytest.param(
            FakeRunner(8, RANGE),
            [[Request((first, 1, 2), 0, Generation(most)) for first, most in enumerate(LENGTHS)]],
            {"idle_rows": 0, "copies": 2},
            id="those that go on move together where others have ended",
        ),
        pytest.param(
            FakeRunner(16, RANGE),
            [[Request((first, 1, 2), 0, Generation(20 if first % 2 else 4)) for first in range(16)]],
            {"idle_rows": 0, "copies": 4},
            id="several at once",
        ),
        *(
            pytest.param(
                FakeRunner(4, form, most_tokens=9),
                [[Request((first, *[2, 3] * 20), 0, Generation(4)) for first in range(6)]] * 2,
                {"steps_halved": 5 if form is PACKED else 3},
                id=f"steps that memory did not suffice for are not tried again, {form.name}",
            )
            for form in FORMS
        ),
        pytest.param(
            FakeRunner(4, PACKED, lengths=(25,)),
            [*ON_SIDES, [Request((*STEM, 1), 1), Request((*STEM, *range(9), 1), 1)]],
            {"tokens_fed": 22 + 32 + 20 + 29},
            id="prefixes are shared on each side and nothing across",
        ),
        pytest.param(
            FakeRunner(2, RANGE, lengths=(6,)),
            [[Request((1, 2, 3, 4), 0, Generation(6))]],
            {"tokens_fed": 6 + 7 + 2},
            id="a generation that crosses is computed anew once",
        ),
    ],
)
def test_no_more_is_done_than_needs_to_be(
    runner: FakeRunner, calls: list[list[Request]], counted: dict[str, int]
) -> None:
    engine = Engine(runner, 256)
    assert_runs_as_oracle(engine, calls, runner.traits.lengths)
    assert {name: getattr(engine.counters, name) for name in counted} == counted


def test_source_is_the_same_by_type_shape_and_content() -> None:
    ids = np.arange(6)
    assert Source(ids) == Source(ids.copy())
    others = [ids + 1, ids.reshape(2, 3), ids.astype(np.float32), ids[:5]]
    assert len({Source(array) for array in (ids, *others)}) == 5


def test_slices_of_an_interrupted_call_are_let_go() -> None:
    class Slices:
        def __iter__(self) -> Iterator[list[tuple[int, Request]]]:
            yield from ([(number, Request((1, number, 2), 1))] for number in range(3))

    engine, slices = Engine(FakeRunner(2, RANGE), 4), Slices()
    held = weakref.ref(slices)
    results = engine.run_slices(part for one in [slices] for part in one)
    next(results)
    del slices, results
    gc.collect()
    assert held() is None


def test_run_continuous_reads_ahead_only_one_window() -> None:
    engine = Engine(FakeRunner(1, SINGLE), 4)
    pulled = []

    def source() -> object:
        for i in range(200):
            pulled.append(i)
            yield i, Request((1, i % VOCAB, 2), 1)

    next(iter(engine.run_continuous(source())))  # type: ignore[arg-type]
    assert len(pulled) <= 32


def test_texts_that_need_more_cells_wait_for_what_runs_and_nothing_is_lost() -> None:
    """Cells are there from an earlier call; steps are planned by what this one has needed so far."""
    engine = Engine(FakeRunner(2, RANGE, has_tree_batches=True), 8)
    engine.run([Request((1, 2, 3, 4) * 40, 3)])
    engine.reset()

    def source() -> Iterator[tuple[str, Request] | None]:
        for number in range(3):
            yield f"answer {number}", Request((1, 2, number), 0, Generation(40))
            yield None
            yield f"text {number}", Request((*((1, 2, 3, 4) * (5 + 10 * number)), number), 3)
            yield None

    asked = dict(one for one in source() if one is not None)
    found = dict(engine.run_continuous(source()))
    assert found.keys() == asked.keys()
    for key, result in found.items():
        assert_equal(result, oracle(asked[str(key)]))


def test_requests_that_come_while_others_run_wait_where_they_would_change_the_slots() -> None:
    """A long request behind short ones, in slots that are long enough for it."""
    runner = FakeRunner(8, RANGE, most_positions=300)
    engine = Engine(runner, 64)
    long = Request(tuple(range(90)), 0, Generation(9))
    requests = [long, *[Request((first, 1), 0, Generation(20)) for first in range(6)], long]
    engine.run([long])
    engine.reset()
    items = [None if number == 4 else (number, request) for number, request in enumerate(requests)]
    found = dict(engine.run_continuous(iter(items)))
    assert sorted(found) == [0, 1, 2, 3, 5, 6, 7]
    for number, request in enumerate(requests):
        if number in found:
            assert_equal(found[number], oracle(request))


def _search(num_tokens: int, num_beams: int, most: int) -> Request:
    return Request(tuple(range(num_tokens)), 0, Generation(most, beams=Beams(num_beams)))


@pytest.mark.parametrize(
    ("runner", "asked", "field", "holds"),
    [
        (FakeRunner(1, SINGLE, context_length=8), Request(tuple(range(10)), 1), "", ("9", "8")),
        (FakeRunner(8, RANGE, most_positions=200), _search(50, 4, 10), "", ("num_beams", "4", "200")),
        (FakeRunner(4, PACKED, most_blocks=20), _search(2, 4, 30), "", ("num_beams", "4", "31", "80")),
        (FakeRunner(3, PACKED), _search(2, 4, 6), "num_beams", ("4", "3", "engine.num_slots")),
        (FakeRunner(4, RANGE, lengths=(6,)), _search(4, 2, 6), "", ("4", "9", "6")),
    ],
    ids=["context", "beams in few positions", "beams in few blocks", "beams in few slots", "beams across a side"],
)
def test_request_beyond_what_the_runner_can_do_is_refused_by_its_numbers(
    runner: FakeRunner, asked: Request, field: str, holds: tuple[str, ...]
) -> None:
    with refused(OliveExtError, "unsupported", field, holds=holds):
        Engine(runner, 64).run([asked])


@pytest.mark.parametrize(
    ("tokens", "num_targets", "generation"),
    [((), 0, None), ((1,), 1, None), ((1, 2), 0, None), ((), 0, Generation(3)), ((1,), 0, Generation(0))],
)
def test_request_without_sense_is_refused(tokens: tuple[int, ...], num_targets: int, generation: Generation) -> None:
    with pytest.raises(OliveExtError):
        Request(tokens, num_targets, generation)


def test_closed_engine_refuses_to_run_and_closes_twice() -> None:
    engine = Engine(FakeRunner(1, SINGLE), 4)
    engine.close()
    engine.close()
    with pytest.raises(OliveExtError, match="closed"):
        engine.run([Request((1, 2), 1)])


def test_a_step_of_one_token_without_memory_is_an_error() -> None:
    with refused(MemoryShortageError, "out_of_memory"):
        Engine(FakeRunner(1, RANGE, most_tokens=0), 8).run([Request((1, 2, 3), 1)])


@pytest.mark.parametrize(
    ("num_positions", "side"), [(1, (0, 60)), (60, (0, 60)), (61, (61, 100)), (100, (61, 100)), (101, (101, UNLIMITED))]
)
def test_a_side_has_the_lengths_up_to_the_next(num_positions: int, side: tuple[int, int]) -> None:
    assert Traits(512, lengths=(60, 100)).side(num_positions) == side

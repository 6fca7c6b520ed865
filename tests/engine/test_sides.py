"""Texts on either side of a length behind which a model computes them otherwise, over a fake runner whose slots show by
which side each token was computed: the engine equals an oracle that feeds each text whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from olive_ext.engine.capacity import UNLIMITED
from olive_ext.engine.engine import Engine
from olive_ext.engine.forms.base import StepForm
from olive_ext.engine.forms.returned import AlikeRows
from olive_ext.engine.requests import Beams, Generation, Request
from olive_ext.engine.runners.runner import Traits
from olive_ext.errors import OliveExtError
from tests.engine.fake_runner import FORMS, PACKED, RANGE, SINGLE, SidedRunner, oracle
from tests.engine.strategies import assert_equal, assert_runs_as_oracle, requests_of
from tests.refusals import refused

LENGTHS = st.lists(st.integers(1, 35), min_size=1, max_size=2, unique=True).map(sorted).map(tuple)
MIXED = AlikeRows(mixes_pasts=True, prompts=True, continued=True)


@given(
    calls=st.lists(requests_of(), min_size=1, max_size=3),
    lengths=LENGTHS,
    num_slots=st.integers(1, 8),
    chunk_size=st.integers(1, 40),
    batching=st.sampled_from(FORMS),
    overlaps_steps=st.booleans(),
)
def test_each_text_is_on_the_side_of_its_whole_length(
    calls: list[list[Request]],
    lengths: tuple[int, ...],
    num_slots: int,
    chunk_size: int,
    batching: StepForm,
    overlaps_steps: bool,
) -> None:
    traits = {"overlaps_steps": overlaps_steps, "row_mix": MIXED}
    assert_runs_as_oracle(Engine(SidedRunner(lengths, num_slots, batching, **traits), chunk_size), calls, lengths)


@given(
    calls=st.lists(requests_of(max_sources=1), min_size=1, max_size=3),
    lengths=LENGTHS,
    num_slots=st.integers(1, 4),
    chunk_size=st.integers(1, 40),
)
def test_tree_batches_hold_texts_of_one_side(
    calls: list[list[Request]], lengths: tuple[int, ...], num_slots: int, chunk_size: int
) -> None:
    runner = SidedRunner(lengths, num_slots, RANGE, has_tree_batches=True)
    assert_runs_as_oracle(Engine(runner, chunk_size), calls, lengths)


@given(requests=requests_of(), lengths=LENGTHS, batching=st.sampled_from(FORMS), is_whole=st.booleans())
def test_streams_and_whole_inputs_equal_the_oracle(
    requests: list[Request], lengths: tuple[int, ...], batching: StepForm, is_whole: bool
) -> None:
    how = {"chunked_prefill": False} if is_whole else {"row_mix": MIXED}
    runner = SidedRunner(lengths, 3, SINGLE if is_whole else batching, **how)
    found = dict(Engine(runner, 7).run_continuous(enumerate(requests)))
    for place, request in enumerate(requests):
        assert_equal(found[place], oracle(request, lengths))


def test_prefixes_are_shared_on_each_side_and_nothing_across() -> None:
    stem = tuple(range(20))
    short, long = ([Request((*stem, *range(rest), 3 + last), 1) for last in range(4)] for rest in (2, 12))
    engine = Engine(SidedRunner((25,), 4, PACKED), 256)
    engine.run([*short, *long])
    assert engine.counters.tokens_fed == 22 + 32  # four answers behind one text of each side
    engine.run([Request((*stem, 1), 1), Request((*stem, *range(9), 1), 1)])
    assert engine.counters.tokens_fed == 22 + 32 + 20 + 29  # what the last side left is of no use to the first


def test_a_generation_that_crosses_is_computed_anew_once() -> None:
    engine = Engine(SidedRunner((6,), 2, RANGE), 256)
    request = Request((1, 2, 3, 4), generation=Generation(6))
    assert_equal(engine.run([request])[0], oracle(request, (6,)))
    assert engine.counters.tokens_fed == 6 + 7 + 2  # up to six tokens, all seven, two more


def test_a_beam_search_that_would_cross_is_refused_by_its_lengths() -> None:
    engine = Engine(SidedRunner((6,), 4, RANGE), 256)
    with refused(OliveExtError, "unsupported", holds=("4", "9", "6")):
        engine.run([Request((1, 2, 3, 4), generation=Generation(6, beams=Beams(2)))])
    assert len(engine.run([Request((1, 2, 3, 4), generation=Generation(3, beams=Beams(2)))])[0].tokens) == 3


@pytest.mark.parametrize(
    ("num_positions", "side"), [(1, (0, 60)), (60, (0, 60)), (61, (61, 100)), (100, (61, 100)), (101, (101, UNLIMITED))]
)
def test_a_side_has_the_lengths_up_to_the_next(num_positions: int, side: tuple[int, int]) -> None:
    assert Traits(512, lengths=(60, 100)).side(num_positions) == side

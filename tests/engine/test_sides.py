"""Texts on either side of a length behind which a model computes them otherwise, over a fake runner whose slots show by
which side each token was computed: the engine equals an oracle that feeds each text whole."""

from __future__ import annotations

import pytest

from olive_ext.engine.capacity import UNLIMITED
from olive_ext.engine.engine import Engine
from olive_ext.engine.requests import Beams, Generation, Request
from olive_ext.engine.runners.runner import Traits
from olive_ext.errors import OliveExtError
from tests.engine.fake_runner import PACKED, RANGE, FakeRunner, oracle
from tests.engine.strategies import assert_equal
from tests.refusals import refused


def test_prefixes_are_shared_on_each_side_and_nothing_across() -> None:
    stem = tuple(range(20))
    short, long = ([Request((*stem, *range(rest), 3 + last), 1) for last in range(4)] for rest in (2, 12))
    engine = Engine(FakeRunner(4, PACKED, lengths=(25,)), 256)
    engine.run([*short, *long])
    assert engine.counters.tokens_fed == 22 + 32  # four answers behind one text of each side
    engine.run([Request((*stem, 1), 1), Request((*stem, *range(9), 1), 1)])
    assert engine.counters.tokens_fed == 22 + 32 + 20 + 29  # what the last side left is of no use to the first


def test_a_generation_that_crosses_is_computed_anew_once() -> None:
    engine = Engine(FakeRunner(2, RANGE, lengths=(6,)), 256)
    request = Request((1, 2, 3, 4), generation=Generation(6))
    assert_equal(engine.run([request])[0], oracle(request, (6,)))
    assert engine.counters.tokens_fed == 6 + 7 + 2  # up to six tokens, all seven, two more


def test_a_beam_search_that_would_cross_is_refused_by_its_lengths() -> None:
    engine = Engine(FakeRunner(4, RANGE, lengths=(6,)), 256)
    with refused(OliveExtError, "unsupported", holds=("4", "9", "6")):
        engine.run([Request((1, 2, 3, 4), generation=Generation(6, beams=Beams(2)))])
    assert len(engine.run([Request((1, 2, 3, 4), generation=Generation(3, beams=Beams(2)))])[0].tokens) == 3


@pytest.mark.parametrize(
    ("num_positions", "side"), [(1, (0, 60)), (60, (0, 60)), (61, (61, 100)), (100, (61, 100)), (101, (101, UNLIMITED))]
)
def test_a_side_has_the_lengths_up_to_the_next(num_positions: int, side: tuple[int, int]) -> None:
    assert Traits(512, lengths=(60, 100)).side(num_positions) == side

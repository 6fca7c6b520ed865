"""Chunks hold every request once, follow from the requests alone, and cost few tokens more than one plan would. Rows
told by columns against the rows they stand for."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from olive_ext.engine.engine import Engine
from olive_ext.engine.requests import Generation, Request
from olive_ext.engine.scheduling import prefix_tree
from olive_ext.engine.scheduling.prefix_tree import input_key, make_plan
from olive_ext.engine.step import Row, Step
from tests.engine.fake_runner import RANGE, FakeRunner, oracle
from tests.engine.strategies import assert_equal, requests_of


def texts(num_stems: int, per_stem: int, stem: int = 600, own: int = 60) -> list[Request]:
    rng = np.random.default_rng(num_stems)
    found = []
    for _ in range(num_stems):
        shared = tuple(rng.integers(1, 1000, stem).tolist())
        found += [Request(shared + tuple(rng.integers(1, 1000, own).tolist()), 1) for _ in range(per_stem)]
    return found


@given(requests=requests_of())
def test_every_request_is_in_one_chunk_in_any_order(requests: list[Request]) -> None:
    found = prefix_tree.cut(requests, 2)
    assert sorted(place for chunk in found for place in chunk) == list(range(len(requests)))
    shuffled = random.Random(1).sample(range(len(requests)), len(requests))
    again = prefix_tree.cut([requests[place] for place in shuffled], 2)
    inputs = [[input_key(requests[place]) for place in chunk] for chunk in found]
    assert [[input_key(requests[shuffled[place]]) for place in chunk] for chunk in again] == inputs


def test_chunks_are_cut_between_stems() -> None:
    requests = texts(20, 40)
    found = prefix_tree.cut(requests, 8)
    assert len(found) == 20
    assert all(len({requests[place].tokens[:600] for place in chunk}) == 1 for chunk in found)


@pytest.mark.parametrize(("num_stems", "stem", "least"), [(3, 600, 10), (30, 20, 20), (2, 3000, 3)])
def test_chunks_feed_few_tokens_more_than_distinct_ones(num_stems: int, stem: int, least: int) -> None:
    requests = texts(num_stems, 4000 // num_stems, stem)
    found = prefix_tree.cut(requests, 8)
    distinct = make_plan(enumerate(requests)).tokens_distinct
    fed = sum(make_plan(enumerate(requests[place] for place in chunk)).tokens_distinct for chunk in found)
    assert least <= len(found) <= 35
    assert distinct < fed <= 1.05 * distinct


def test_generations_are_counted_by_slots() -> None:
    requests = [Request((1, place + 2), 0, Generation(50)) for place in range(100)]
    assert [len(chunk) for chunk in prefix_tree.cut(requests, 4)] == [32, 32, 32, 4]
    assert prefix_tree.predicted_tokens(requests[:4]) == 4 * 50 + 5


@given(requests=st.lists(st.integers(0, 6), min_size=1, max_size=30), reverse=st.booleans())
def test_an_engine_answers_chunks_as_it_answers_requests(requests: list[int], reverse: bool) -> None:
    asked = [Request((1, 2, *range(3, 4 + count)), 1) for count in requests]
    engine = Engine(FakeRunner(2, RANGE, has_tree_batches=True), 4)
    order = [[(place, asked[place])] for place in range(len(asked))]
    found = dict(engine.run_chunks(order[::-1] if reverse else order))
    results = [found[number][0] for number in range(len(asked))]
    for result, request in zip(results[::-1] if reverse else results, asked, strict=True):
        assert_equal(result, oracle(request))


def test_tokens_that_follow_take_the_places_of_those_not_known() -> None:
    """A row of several tokens keeps its own; the columns stay as they were."""
    step = Step((Row(0, 5, (0,)), Row(1, 0, (7, 8)), Row(2, 9, (0,))), follows=(1, -1, 0))
    assert step.columns.tokens_after(step.follows, np.array([40, 50])).tolist() == [50, 7, 8, 40]
    assert step.columns.tokens_N.tolist() == [0, 7, 8, 0]

"""The engine over a fake runner equals the naive oracle, and feeds no more than the distinct prefixes."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from olive_ext.engine.engine import Engine
from olive_ext.engine.forms.base import StepForm
from olive_ext.engine.forms.returned import AlikeRows
from olive_ext.engine.requests import Beams, FinishReason, Generation, Request, Result, Sampling
from olive_ext.engine.runners.runner import Capacity
from olive_ext.errors import MemoryShortageError, OliveExtError
from olive_ext.media.items import Source
from tests.engine.fake_runner import ALIKE, FORMS, PACKED, RANGE, SINGLE, VOCAB, FakeRunner, ShortRunner, oracle
from tests.engine.strategies import SOURCES, assert_equal, assert_runs_as_oracle, requests_of
from tests.refusals import refused

SIBLINGS = [Request((*range(20), first, 2, 3), 3) for first in range(4)]
"""Four answers behind one context."""


@given(
    calls=st.lists(requests_of(), min_size=1, max_size=3),
    num_slots=st.integers(1, 8),
    chunk_size=st.integers(1, 40),
    runner=st.sampled_from([*[(batching, True) for batching in FORMS], (SINGLE, False)]),
)
def test_run_equals_oracle_for_any_requests_slots_and_chunks(
    calls: list[list[Request]], num_slots: int, chunk_size: int, runner: tuple[StepForm, bool]
) -> None:
    batching, can_rewind = runner
    engine = Engine(FakeRunner(num_slots, batching, can_rewind=can_rewind), chunk_size)
    assert_runs_as_oracle(engine, calls)


@given(
    calls=st.lists(requests_of(), min_size=1, max_size=3),
    num_slots=st.integers(1, 8),
    chunk_size=st.integers(1, 40),
    row_mix=st.builds(AlikeRows, st.booleans(), st.booleans(), st.booleans(), st.booleans()),
    can_rewind=st.booleans(),
    overlaps_steps=st.booleans(),
)
def test_rows_that_are_alike_share_steps_and_equal_the_oracle(
    calls: list[list[Request]],
    num_slots: int,
    chunk_size: int,
    row_mix: AlikeRows,
    can_rewind: bool,
    overlaps_steps: bool,
) -> None:
    traits = {"row_mix": row_mix, "can_rewind": can_rewind, "overlaps_steps": overlaps_steps}
    assert_runs_as_oracle(Engine(FakeRunner(num_slots, ALIKE, **traits), chunk_size), calls)  # type: ignore[arg-type]


@pytest.mark.parametrize(("pasts", "num_steps"), [(True, 4 + 7), (False, 1 + 7)])
def test_generations_that_are_alike_decode_together(pasts: bool, num_steps: int) -> None:
    """Prompts of four lengths where lengths may differ, else of one: each step decodes all of them."""
    runner = FakeRunner(4, ALIKE, row_mix=AlikeRows(mixes_pasts=pasts, prompts=True))
    prompts = [(first, *range(2, 5 + first * pasts)) for first in range(4)]
    requests = [Request(tokens, 0, Generation(8)) for tokens in prompts]
    assert_runs_as_oracle(Engine(runner, 64), [requests])
    assert len(runner.steps) == num_steps


@pytest.mark.parametrize("num_slots", [3, 8, 16])
@pytest.mark.parametrize("batching", [ALIKE, PACKED])
def test_slots_whose_content_waiting_sequences_share_are_not_overwritten(batching: StepForm, num_slots: int) -> None:
    """More contexts than slots, in steps of many rows."""
    draw = random.Random(11)
    stems = [[draw.randrange(VOCAB) for _ in range(draw.randint(20, 60))] for _ in range(6)]
    ends = [[draw.randrange(VOCAB) for _ in range(draw.randint(3, 9))] for _ in range(40)]
    requests = [Request((*draw.choice(stems), *end), 2) for end in ends]
    mix = AlikeRows(mixes_pasts=True, prompts=True)
    engine = Engine(FakeRunner(num_slots, batching, can_rewind=False, row_mix=mix), 256)
    assert_runs_as_oracle(engine, [requests])
    assert engine.counters.tokens_fed <= 1.02 * engine.counters.tokens_distinct


@pytest.mark.parametrize(
    ("requests", "rows"), [(SIBLINGS, [1, 4]), ([Request((first, *range(20)), 3) for first in range(4)], [4])]
)
def test_texts_that_are_alike_are_scored_together(requests: list[Request], rows: list[int]) -> None:
    runner = FakeRunner(4, ALIKE, can_rewind=False, row_mix=AlikeRows(continued=True, prompts=True))
    engine = Engine(runner, 64)
    assert_runs_as_oracle(engine, [requests])
    assert engine.counters.tokens_fed == engine.counters.tokens_distinct
    assert [len(step.rows) for step in runner.steps] == rows


@given(
    calls=st.lists(requests_of(max_sources=1), min_size=1, max_size=3),
    num_slots=st.integers(1, 4),
    chunk_size=st.integers(1, 40),
)
def test_tree_batches_equal_oracle_and_fill_steps(calls: list[list[Request]], num_slots: int, chunk_size: int) -> None:
    runner = FakeRunner(num_slots, RANGE, has_tree_batches=True)
    engine = Engine(runner, chunk_size)
    for requests in calls:
        before = len(runner.steps)
        for found, request in zip(engine.run(requests), requests, strict=True):
            assert_equal(found, oracle(request))
        branched = [step for step in runner.steps[before:] if step.first_cell is not None]
        sizes = [sum(len(row.tokens) for row in step.rows) for step in branched]
        assert all(size == chunk_size for size in sizes[:-1])
    assert engine.counters.tokens_reused == 0 or engine.counters.prefix_hits > 0


@given(
    calls=st.lists(requests_of(), min_size=1, max_size=3), num_slots=st.integers(1, 8), chunk_size=st.integers(1, 40)
)
def test_inputs_that_cannot_be_split_are_fed_whole_and_alone(
    calls: list[list[Request]], num_slots: int, chunk_size: int
) -> None:
    runner = FakeRunner(num_slots, SINGLE, chunked_prefill=False)
    engine = Engine(runner, chunk_size)
    assert_runs_as_oracle(engine, calls)
    inputs = {request.tokens if request.generation else request.tokens[:-1] for call in calls for request in call}
    assert all(len(step.rows) == 1 and not step.copies for step in runner.steps)
    assert {step.rows[0].tokens for step in runner.steps if step.rows[0].past == 0} == inputs
    assert all(len(step.rows[0].tokens) == 1 for step in runner.steps if step.rows[0].past)


@given(requests=requests_of(), num_slots=st.integers(1, 8), batching=st.sampled_from(FORMS))
def test_run_continuous_equals_oracle_under_the_callers_keys(
    requests: list[Request], num_slots: int, batching: StepForm
) -> None:
    engine = Engine(FakeRunner(num_slots, batching), 7)
    keys = [f"key {i}" for i in range(len(requests))]
    results = dict(engine.run_continuous(zip(keys, requests, strict=True)))
    assert set(results) == set(keys)
    for key, request in zip(keys, requests, strict=True):
        assert_equal(results[key], oracle(request))


@given(requests=requests_of(max_sources=1), chunk_size=st.integers(1, 40), has_tree_batches=st.booleans())
def test_scoring_feeds_exactly_the_distinct_prefixes(
    requests: list[Request], chunk_size: int, has_tree_batches: bool
) -> None:
    scored = [
        Request(request.tokens, request.num_targets, source=request.source)
        for request in requests
        if request.num_targets
    ]
    engine = Engine(FakeRunner(3, RANGE, has_tree_batches=has_tree_batches), chunk_size)
    engine.run(scored)
    inputs = {(request.source, request.tokens[:end]) for request in scored for end in range(1, len(request.tokens))}
    assert engine.counters.tokens_distinct == len(inputs)
    assert engine.counters.tokens_fed == len(inputs)
    assert engine.counters.tokens_naive == sum(len(request.tokens) - 1 for request in scored)


def _shaped(kind: str) -> list[Request]:
    """Requests in the shape of HellaSwag (4 long endings), MMLU (4 one-token answers), ARC (25 shots, 4 answers)."""
    rng = random.Random(0)
    words = lambda n: tuple(rng.randrange(VOCAB) for _ in range(n))  # noqa: E731
    shots = {"hellaswag": 0, "mmlu": 120, "arc": 300}[kind]
    ending = {"hellaswag": (10, 40), "mmlu": (1, 1), "arc": (1, 12)}[kind]
    prefix = words(shots)
    requests = []
    for _ in range(25):
        context = prefix + words(rng.randint(15, 60))
        for _ in range(4):
            target = words(rng.randint(*ending))
            requests.append(Request(context + target, len(target)))
    return requests


@pytest.mark.parametrize("kind", ["hellaswag", "mmlu", "arc"])
@pytest.mark.parametrize("num_slots", [1, 3, 8])
def test_benchmark_shapes_stay_at_the_prefix_tree_bound(kind: str, num_slots: int) -> None:
    requests = _shaped(kind)
    engine = Engine(FakeRunner(num_slots, RANGE), 256)
    engine.run(requests)
    counters = engine.counters
    assert counters.tokens_fed <= 1.05 * counters.tokens_distinct + len(requests)
    assert counters.tokens_naive > 1.5 * counters.tokens_fed


def test_later_call_reuses_what_an_earlier_one_left_resident() -> None:
    engine = Engine(FakeRunner(1, RANGE), 256)
    stem = tuple(range(20))
    engine.run([Request((*stem, 1, 2), 1)])
    engine.run([Request((*stem, 3, 2), 1)])
    assert engine.counters.tokens_fed == 21 + 1
    assert engine.counters.prefix_hits == 1


def test_prefix_is_reused_behind_the_same_source_and_fed_again_behind_another() -> None:
    engine = Engine(FakeRunner(3, SINGLE), 256)
    stem = tuple(range(20))
    engine.run([Request((*stem, 1, 2), 1, source=SOURCES[1])])
    engine.run([Request((*stem, 3, 2), 1, source=SOURCES[2])])
    assert (engine.counters.tokens_fed, engine.counters.prefix_hits) == (21 + 21, 0)
    engine.run([Request((*stem, 3, 2), 1, source=Source(SOURCES[1].array.copy()))])
    assert (engine.counters.tokens_fed, engine.counters.prefix_hits) == (21 + 21 + 1, 1)


def test_source_is_the_same_by_type_shape_and_content() -> None:
    ids = np.arange(6)
    assert Source(ids) == Source(ids.copy())
    others = [ids + 1, ids.reshape(2, 3), ids.astype(np.float32), ids[:5]]
    assert len({Source(array) for array in (ids, *others)}) == 5


def test_generations_with_a_shared_prompt_copy_it_between_slots() -> None:
    prompt = tuple(range(20)) * 3
    runner = FakeRunner(4, RANGE)
    engine = Engine(runner, 256)
    engine.run([Request((*prompt, last), 0, Generation(8)) for last in range(4)])
    assert engine.counters.copies == 3
    assert engine.counters.tokens_fed <= 60 + 4 + 4 * 7


def test_generations_are_decoded_together_and_retired_one_by_one() -> None:
    runner = FakeRunner(3, RANGE)
    engine = Engine(runner, 256)
    engine.run([Request((i, i + 1), 0, Generation(length)) for i, length in enumerate((3, 6, 9))])
    assert max(len(step.rows) for step in runner.steps) == 3
    assert len(runner.steps) < 3 + 6 + 9
    assert engine.counters.tokens_generated == 18


def test_sampling_is_reproducible_by_seed_and_differs_between_seeds() -> None:
    def draw(seed: int) -> tuple[int, ...]:
        engine = Engine(FakeRunner(2, RANGE), 8)
        return engine.run([Request((1, 2), 0, Generation(12, sampling=Sampling(1.0, seed=seed)))])[0].tokens

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_interrupted_run_leaves_the_engine_usable() -> None:
    engine = Engine(FakeRunner(2, RANGE), 4)
    requests = [Request(tuple(range(i, i + 9)), 3) for i in range(6)]
    for _ in engine.run_slices([list(enumerate(requests))]):
        break
    for found, request in zip(engine.run(requests), requests, strict=True):
        assert_equal(found, oracle(request))


def test_run_continuous_reads_ahead_only_one_window() -> None:
    engine = Engine(FakeRunner(1, SINGLE), 4)
    pulled = []

    def source() -> object:
        for i in range(200):
            pulled.append(i)
            yield i, Request((1, i % VOCAB, 2), 1)

    next(iter(engine.run_continuous(source())))  # type: ignore[arg-type]
    assert len(pulled) <= 32


@pytest.mark.parametrize("num_slots", [1, 3])
def test_run_continuous_goes_on_where_no_request_is_there_for_now(num_slots: int) -> None:
    """The source gives the next request only when it has seen the result before."""
    requests = [Request((number, 1), 0, Generation(3)) for number in range(5)]
    found: dict[int, Result] = {}

    def source() -> Iterator[tuple[int, Request] | None]:
        yield None
        for number, request in enumerate(requests):
            yield number, request
            while number not in found:
                yield None

    engine = Engine(FakeRunner(num_slots, RANGE), 4)
    for key, result in engine.run_continuous(source()):
        assert isinstance(key, int)
        found[key] = result
    for number, request in enumerate(requests):
        assert_equal(found[number], oracle(request))


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


@given(calls=st.lists(requests_of(max_sources=1), min_size=2, max_size=3), has_tree_batches=st.booleans())
def test_released_memory_is_allocated_anew_and_changes_no_result(
    calls: list[list[Request]], has_tree_batches: bool
) -> None:
    runner = FakeRunner(2, RANGE, has_tree_batches=has_tree_batches)
    engine = Engine(runner, 4)
    for requests in calls:
        for found, request in zip(engine.run(requests), requests, strict=True):
            assert_equal(found, oracle(request))
        engine.release_memory()
        assert runner.capacity == Capacity(2)


@given(
    calls=st.lists(requests_of(max_sources=1), min_size=1, max_size=3),
    batching=st.sampled_from([RANGE, ALIKE]),
    most_positions=st.integers(1, 300),
    is_deterministic=st.booleans(),
)
def test_memory_of_few_positions_changes_no_result_and_is_never_exceeded(
    calls: list[list[Request]], batching: StepForm, most_positions: int, is_deterministic: bool
) -> None:
    """Slots that are in use hold no more positions together than memory does, but for a single one."""
    runner = FakeRunner(8, batching, most_positions=most_positions)
    assert_runs_as_oracle(Engine(runner, 7, is_deterministic=is_deterministic), calls)
    slots = {row.slot for step in runner.steps for row in step.rows}
    longest = max((one.num_positions for requests in calls for one in requests), default=1)
    if len(calls) == 1:
        assert not slots or len(slots) * longest <= max(most_positions, longest)


def test_steps_of_a_call_follow_from_its_own_requests_whatever_was_longer_before() -> None:
    """Eight short answers after a long one have the steps of eight short answers alone, three of the long ones fit."""
    short = [Request((first, 1), 0, Generation(5)) for first in range(8)]
    long = [Request((first, *range(2, 90)), 0, Generation(12)) for first in range(8)]
    runner = FakeRunner(8, RANGE, most_positions=300)
    engine = Engine(runner, 64, is_deterministic=True)
    engine.run(long)
    assert max(len(step.rows) for step in runner.steps) == 3
    num_steps = len(runner.steps)
    engine.run(short)
    alone = FakeRunner(8, RANGE, most_positions=300)
    Engine(alone, 64).run(short)
    assert [step.rows for step in runner.steps[num_steps:]] == [step.rows for step in alone.steps]
    assert max(len(step.rows) for step in alone.steps) == 8


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


def test_beams_that_memory_cannot_hold_together_are_refused_by_name() -> None:
    """Four beams of 60 positions, where there is room for 200."""
    engine = Engine(FakeRunner(8, RANGE, most_positions=200), 64)
    request = Request(tuple(range(50)), 0, Generation(10, beams=Beams(4)))
    with refused(OliveExtError, "unsupported", holds=("num_beams", "4", "200")):
        engine.run([request])


def test_answers_that_end_early_leave_no_idle_rows_behind() -> None:
    """Those that go on move together once nothing waits for their slots; what they say is the oracle's."""
    lengths = [3, 20, 4, 30, 5, 6, 40, 2, 25, 9]
    requests = [Request((first, 1, 2), 0, Generation(most)) for first, most in enumerate(lengths)]
    engine = Engine(FakeRunner(8, RANGE), 64)
    assert_runs_as_oracle(engine, [requests])
    assert engine.counters.idle_rows == 0
    assert engine.counters.copies > 0


def test_empty_call_gives_empty_list() -> None:
    assert Engine(FakeRunner(1, SINGLE), 4).run([]) == []


@pytest.mark.parametrize(
    ("tokens", "num_targets", "generation"),
    [((), 0, None), ((1,), 1, None), ((1, 2), 0, None), ((), 0, Generation(3)), ((1,), 0, Generation(0))],
)
def test_request_without_sense_is_refused(tokens: tuple[int, ...], num_targets: int, generation: Generation) -> None:
    with pytest.raises(OliveExtError):
        Request(tokens, num_targets, generation)


def test_request_longer_than_the_context_is_refused_by_number() -> None:
    engine = Engine(FakeRunner(1, SINGLE, context_length=8), 4)
    with refused(OliveExtError, "unsupported", holds=("9", "8")):
        engine.run([Request(tuple(range(10)), 1)])


def test_closed_engine_refuses_to_run_and_closes_twice() -> None:
    engine = Engine(FakeRunner(1, SINGLE), 4)
    engine.close()
    engine.close()
    with pytest.raises(OliveExtError, match="closed"):
        engine.run([Request((1, 2), 1)])


def test_finish_reasons_say_why() -> None:
    engine = Engine(FakeRunner(1, SINGLE), 4)
    first = oracle(Request((1, 2), 0, Generation(1))).tokens[0]
    results = engine.run(
        [
            Request((1, 2), 0, Generation(2)),
            Request((1, 2), 0, Generation(2, frozenset({first}))),
            Request((1, 2), 0, Generation(2, is_finished=lambda tokens: True)),
            Request((1, 2), 1),
        ]
    )
    assert [result.finish_reason for result in results] == [
        FinishReason.LENGTH,
        FinishReason.STOP_ID,
        FinishReason.STOPPED,
        FinishReason.SCORED,
    ]


@given(
    calls=st.lists(requests_of(max_sources=1), min_size=1, max_size=2),
    num_slots=st.integers(1, 6),
    chunk_size=st.integers(1, 40),
    batching=st.sampled_from([SINGLE, RANGE, PACKED]),
    has_tree_batches=st.booleans(),
)
def test_steps_without_memory_are_halved_and_results_stay(
    calls: list[list[Request]], num_slots: int, chunk_size: int, batching: StepForm, has_tree_batches: bool
) -> None:
    runner = ShortRunner(num_slots, batching, has_tree_batches=has_tree_batches)
    engine = Engine(runner, chunk_size)
    assert_runs_as_oracle(engine, calls)
    longest = max((step.num_tokens for step in runner.steps), default=0)
    assert longest <= runner.most
    if engine.counters.steps_halved:
        assert engine.describe()["step_limit"] <= max(runner.most, chunk_size, num_slots)


def test_a_step_of_one_token_without_memory_is_an_error() -> None:
    runner = ShortRunner(1, RANGE)
    runner.most = 0
    with refused(MemoryShortageError, "out_of_memory"):
        Engine(runner, 8).run([Request((1, 2, 3), 1)])

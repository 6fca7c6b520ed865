"""What a runner does where there is no memory for its slots."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest

import olive_ext
from olive_ext.config import ModelSettings
from olive_ext.engine.engine import Engine, open_engine
from olive_ext.engine.forms.rows import ViewKv
from olive_ext.engine.requests import Generation, Request
from olive_ext.engine.runners.ort.ort_runner import OrtRunner
from olive_ext.errors import MemoryShortageError
from olive_ext.model import resolve
from olive_ext.model.providers.devices import Provider
from olive_ext.model.providers.resolution import resolve_providers
from tests.exports import genai_export
from tests.refusals import refused

MOST = 1000
"""Positions of all slots together."""


class _Small:
    """A KV store with memory for `most` slots."""

    def __init__(self, store: ViewKv, most: int) -> None:
        self.store, self.most = store, most

    def __getattr__(self, name: str) -> object:
        return getattr(self.store, name)

    def reserve(self, positions: int) -> None:
        if self.store.capacity.num_slots > self.most:
            raise MemoryError("Unable to allocate 3 TiB")
        self.store.reserve(positions)


@pytest.mark.parametrize("shapes", ["any", "bucketed"])
def test_closed_session_holds_no_weights_however_long_it_is_kept(shapes: str) -> None:
    session = olive_ext.open(genai_export("llama", None), engine={"shapes": shapes})
    session.loglikelihood([([5, 6], [7])])
    runner = session.executor.runner  # type: ignore[attr-defined]
    weights = weakref.ref(getattr(runner, "inner", runner)._feed.session)
    assert weights() is not None
    session.close()
    runner.close()  # as another engine on it does
    gc.collect()
    assert weights() is None


@pytest.mark.parametrize("most", [3, 0])
def test_slots_are_halved_until_they_fit_or_one_does_not(most: int) -> None:
    with olive_ext.open(genai_export("llama", None), engine={"num_slots": 8, "scoring": "rows"}) as session:
        runner = session.executor.runner  # type: ignore[attr-defined]
        assert isinstance(runner, OrtRunner)
        runner._kv = _Small(runner._kv, most)  # type: ignore[assignment, arg-type]
        if most == 0:
            with refused(MemoryShortageError, "out_of_memory", holds="max_length"):
                session.generate([[5, 6, 7]])
            return
        assert [len(output.tokens) > 0 for output in session.generate([[5, 6, 7], [5, 8]] * 4)] == [True] * 8
        assert session.describe_execution()["num_slots"] == 2


def test_a_provider_that_does_not_come_up_leaves_nothing_of_its_choices_behind() -> None:
    providers = (Provider("CUDAExecutionProvider", "cuda", plans_shapes=True), *resolve_providers("cpu"))
    model = resolve(ModelSettings(model=str(genai_export("llama", None)), allow_cpu_fallback=True))
    engine = open_engine(replace(model, session_providers=providers))
    facts = engine.describe()
    engine.close()
    assert facts["providers"] == ["CPUExecutionProvider"]
    assert (facts["overlaps_steps"], facts["scoring"], facts["batching"]) == (False, "tree", "range")


def _touched(store: ViewKv) -> int:
    """Positions of slots in which something lies."""
    memory = store._buffers[0].by_position
    return int(memory.reshape(*memory.shape[:2], -1).any(axis=-1).sum())


def test_calls_of_ever_more_and_shorter_answers_touch_no_more_memory_than_one() -> None:
    """Few long slots and many short ones are each as much as memory holds, and lie in part in other places."""
    settings = ModelSettings(model=str(genai_export("llama", None)), deterministic=True)
    engine = open_engine(resolve(settings))
    assert isinstance(engine.runner, OrtRunner)
    store = engine.runner._kv
    assert isinstance(store, ViewKv)
    store.capacity = store.capacity._replace(most_positions=MOST)
    touched, alone = [], open_engine(resolve(settings))
    for count in (2, 4, 8, 16, 32):
        tokens = tuple(5 + place % 40 for place in range(MOST // count - 8))
        requests = [Request((4 + number, *tokens), 0, Generation(8)) for number in range(count)]
        assert [one.tokens for one in engine.run(requests)] == [one.tokens for one in alone.run(requests)]
        touched.append(_touched(store))
    engine.close()
    alone.close()
    assert max(touched) <= MOST * 5 // 4, touched


def test_slots_of_a_reference_touch_no_more_memory_than_planned_either() -> None:
    """It runs the candidate's scored steps, of few long contexts and then of many short ones."""
    path, stores = str(genai_export("llama", None)), []
    with olive_ext.open(path, reference=path, engine={"scoring": "answers"}, deterministic=True) as session:
        engine = session.executor
        assert isinstance(engine, Engine)
        for runner in (engine.runner, *engine._tap.runners):
            assert isinstance(runner, OrtRunner)
            assert isinstance(runner._kv, ViewKv)
            runner._kv.capacity = runner._kv.capacity._replace(most_positions=MOST)
            stores.append(runner._kv)
        touched = []
        for count in (2, 4, 8, 16, 32):
            context = [5 + place % 40 for place in range(MOST // count - 8)]
            session.loglikelihood([([4 + number, *context], [5, 7]) for number in range(count)])
            touched += map(_touched, stores)
    assert MOST // 2 < max(touched) <= MOST * 5 // 4, touched

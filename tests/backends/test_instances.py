"""Slices come in sorted order, each item once, and are encoded ahead. How much requests ask, estimated from their
texts; and how long that takes by measured rates. Progress where stderr is no terminal: a line a minute, and nothing
unless it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from olive_ext.backends.lm_eval.instances import encoded_slices
from olive_ext.backends.progress import progress_bar, shown
from olive_ext.backends.workload import (
    RATES,
    START_SECONDS,
    CountingLM,
    Workload,
    cache_bytes,
    forecast,
    new_letters,
    parameters,
    seconds_of,
)
from olive_ext.config import EngineConfig, ModelSettings
from olive_ext.errors import ProviderError
from olive_ext.model import resolve
from olive_ext.model.decisions import choose_num_slots
from olive_ext.model.providers.devices import Device
from olive_ext.report.numbers import predicted, size
from tests.exports import genai_export, hf_model


@given(items=st.lists(st.text("ab", max_size=4), max_size=20), count=st.integers(1, 6))
def test_every_item_comes_once_and_neighbours_are_alike(items: list[str], count: int) -> None:
    encoded = []
    for upper in encoded_slices(items, str, lambda texts: [text.upper() for text in texts], count):
        assert len(upper) <= count
        encoded += upper
    assert encoded == sorted(item.upper() for item in items)


@given(st.lists(st.text("ab", max_size=6), max_size=8))
def test_new_letters_are_the_nodes_of_the_prefix_tree(texts: list[str]) -> None:
    nodes = {text[:end] for text in texts for end in range(1, len(text) + 1)}
    assert sum(new_letters(texts)) == len(nodes)


def request(doc: int, *args: Any, task: str = "t") -> Any:
    return SimpleNamespace(args=args, task_name=task, doc_id=doc)


def test_model_that_counts_answers_nothing() -> None:
    lm = CountingLM(list)
    asked = (lm.loglikelihood, ("a", "b")), (lm.loglikelihood_rolling, ("ab",))
    for number, (call, args) in enumerate((*asked, (lm.generate_until, ("ab", {"max_gen_toks": 5})))):
        assert call([request(number, *args)]) == [""]
    assert (len(lm.work.documents), sum(lm.work.tokens), lm.work.answers) == (3, 6.0, 5)


def test_forecast_is_by_the_products_of_the_graph() -> None:
    model = resolve(ModelSettings(model=str(genai_export("llama"))))
    hidden, rate = parameters(model), RATES["cpu"]
    work = Workload(tokens=[500.0, 500.0], answers=10)
    seconds, machine = seconds_of(model, work) or (0.0, "")
    cores = int(machine.partition(" ")[0])
    products = 2 * hidden * (1000 / rate.scored + 10 / rate.generated) / cores
    slots = choose_num_slots(model.settings, model.spec, model.device)[0]
    assert seconds == pytest.approx(products + (2 + 10 / slots) * rate.step_s + 10 * rate.answer_s)
    assert hidden == parameters(model.patched({"max_length": 64})) > 64 * 1024  # at least the LM head
    assert forecast(model, work).startswith(f"{predicted(0.5)} on {machine}, and some {START_SECONDS} s to begin")
    two = model.patched({"engine": EngineConfig(num_slots=2)})
    kv_bytes = 2 * two.spec.context_length * two.spec.bytes_per_position
    assert f"at most {size(kv_bytes)} of caches" in forecast(two, work)
    long = Workload(tokens=[10.0] * 960, answers=960 * 128)  # took 60 s, of a model of 0.5 MB
    assert 60 < (seconds_of(two, long) or (0.0,))[0] < 120
    assert "begin" not in forecast(two, long, begins=False)
    assert kv_bytes < (cache_bytes(model) or 0) <= 32 * kv_bytes
    assert forecast(resolve(ModelSettings(model=str(hf_model("llama")))), work).endswith(", and caches")


def test_caches_of_a_device_that_is_gone_are_not_known() -> None:
    class Gone:
        kind, runtime, spec = (
            "onnx",
            SimpleNamespace(runs_graph=True),
            SimpleNamespace(context_length=8, is_paged=False, takes_one_row=False),
        )
        settings = ModelSettings.of({"model": "m", "engine": {"num_slots": 2}})
        devices: Iterator[Any] = iter([Device("cuda")])

        @property
        def device(self) -> Device:
            if (device := next(self.devices, None)) is None:
                raise ProviderError("the device is gone")
            return device

    model: Any = Gone()
    assert cache_bytes(model) is None


@pytest.fixture(params=[True, False, None])
def is_shown(request: pytest.FixtureRequest) -> Iterator[bool | None]:
    token = shown.set(request.param)
    yield request.param
    shown.reset(token)


@pytest.mark.parametrize("is_quiet", [True, False])
def test_line_a_minute_says_what_is_left_unless_it_is_told_to_be_quiet(
    is_shown: bool | None, is_quiet: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = iter(range(0, 10_000, 20))
    with progress_bar("Scoring", 10, lambda: 600, is_quiet, now=lambda: float(next(seconds))) as advance:
        for _ in range(8):
            advance(1)
    lines = capsys.readouterr().err.splitlines()
    expected = [
        "olive-ext: Scoring: 2 of 10 requests, 0 tokens/s, 02:40 left",
        "olive-ext: Scoring: 5 of 10 requests, 0 tokens/s, 01:40 left",
        "olive-ext: Scoring: 8 of 10 requests, 0 tokens/s, 00:40 left",
    ]
    assert lines == (expected if is_shown and not is_quiet else [])


# Tokens fed at each answer's end, and the answers' tokens; 10 prompts of 30 tokens. One token takes 1 s.
@pytest.mark.parametrize(
    ("fed", "answered", "left"),
    [
        ([30, 60], [0, 0], "04:00"),  # 8 prompts of 10 are left
        ([60, 300], [30, 30], "05:00"),  # 2 of 10 answered by 60 tokens each: 300 of 600 are left, begun ones known
        ([300, 570], [30, 30], "00:30"),  # all are nearly done
        ([0, 30], [0, 0], "04:00"),  # the first was in the journal
    ],
)
def test_time_left_is_that_of_the_tokens_left(
    fed: list[int], answered: list[int], left: str, capsys: pytest.CaptureFixture[str]
) -> None:
    token, known = shown.set(True), [0]
    how: dict[str, Any] = {"expected": 300, "about": "3 of it", "now": lambda: float(known[0])}
    with progress_bar("Generating", 10, lambda: known[0], False, **how) as advance:
        for number, length in zip(fed, answered, strict=True):
            known[0] = number
            advance(1, 30, length)
    shown.reset(token)
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "olive-ext: Generating: 3 of it"
    assert f"{left} left" in lines[-1]

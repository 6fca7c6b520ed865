"""Steps that begin before the one before them is read: tokens that stay on the device are those that the host reads."""

from __future__ import annotations

import random

import pytest

from olive_ext.session.requests import GenerationOutput, GenerationRequest
from tests.device.open import open_on
from tests.exports import VOCAB, genai_export

pytestmark = pytest.mark.slow

DEVICES = ["cpu", pytest.param("webgpu", marks=pytest.mark.webgpu)]


def _requests() -> list[GenerationRequest]:
    """More than there are slots, of many lengths; some end by a stop string that any text of theirs has."""
    rng = random.Random(8)
    draw = lambda length: [rng.randrange(4, VOCAB) for _ in range(length)]  # noqa: E731
    return [
        GenerationRequest(draw(3 + 5 * i), max_new_tokens=4 + 6 * i, stop=["e", "th"] if i % 3 == 2 else [])
        for i in range(8)
    ]


def _generate(device: str, family: str, **engine: object) -> tuple[list[GenerationOutput], dict[str, object]]:
    with open_on(device, genai_export(family), **engine) as session:
        outputs = [*session.generate(_requests()), *session.generate(_requests()[:2])]
        return outputs, session.describe_execution()


@pytest.mark.parametrize("graph", ["scoring_head", "untouched"])
@pytest.mark.parametrize("num_slots", [1, 3, 5])
@pytest.mark.parametrize("device", DEVICES)
def test_answers_are_those_of_steps_that_wait(device: str, num_slots: int, graph: str) -> None:
    found, facts = _generate(device, "llama", num_slots=num_slots, graph=graph, overlaps_steps=True)
    expected, serial = _generate("cpu", "llama", num_slots=num_slots, overlaps_steps=False)
    assert found == expected
    assert facts["counters"]["steps_overlapped"] > 40  # type: ignore[index]
    assert serial["counters"]["steps_overlapped"] == 0  # type: ignore[index]


@pytest.mark.parametrize("device", DEVICES)
def test_answers_of_a_model_with_states_are_those_of_steps_that_wait(device: str) -> None:
    """A state cannot be cut back: what a dropped row was fed stays in it."""
    found, facts = _generate(device, "lfm2", overlaps_steps=True)
    expected, _ = _generate("cpu", "lfm2", overlaps_steps=False)
    assert found == expected
    assert facts["counters"]["steps_overlapped"] > 40  # type: ignore[index]


@pytest.mark.parametrize(
    ("device", "expected"),
    [("cpu", False), pytest.param("webgpu", True, marks=pytest.mark.webgpu)],
)
def test_auto_goes_ahead_elsewhere_than_on_the_cpu(device: str, expected: bool) -> None:
    with open_on(device, genai_export("llama")) as session:
        facts = session.describe_execution()
    assert facts["overlaps_steps"] is expected
    assert facts["overlaps_steps_reason"].startswith("auto: ")


@pytest.mark.parametrize("wanted", [True, False])
def test_decode_ahead_is_pinned_by_the_user(wanted: bool) -> None:
    with open_on("cpu", genai_export("llama"), overlaps_steps=wanted) as session:
        session.generate(_requests()[:3])
        facts = session.describe_execution()
    assert (facts["overlaps_steps"], facts["overlaps_steps_reason"]) == (wanted, "engine.overlaps_steps")
    assert bool(facts["counters"]["steps_overlapped"]) is wanted

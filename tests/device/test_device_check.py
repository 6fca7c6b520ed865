"""A device that attends to long steps wrongly is found out before numbers are taken from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from olive_ext.engine.runners.trials import SHORT_STEP, attends_to_long_steps, fitting_attention
from olive_ext.model.files.content import load_graph
from olive_ext.model.files.locate import locate
from olive_ext.model.providers.devices import Device
from olive_ext.model.providers.ort_session import open_session
from olive_ext.model.providers.resolution import register_libraries, resolve_providers
from olive_ext.model.spec.decoder_spec import read_spec
from olive_ext.model.types import DecoderSpec
from tests.device.open import LIBRARY, open_on
from tests.exports import genai_export


@dataclass
class FakeAttention:
    """Averages the values seen so far, as attention to equal keys would; of long steps only `num_right` rows."""

    num_right: int = 1000
    arrays: dict[str, Any] = field(default_factory=dict)

    def io_binding(self) -> FakeAttention:
        return self

    def bind_cpu_input(self, name: str, array: Any) -> None:
        self.arrays[name] = array

    def bind_output(self, name: str, *place: object) -> None:
        assert name == "attended"

    def run_with_iobinding(self, binding: FakeAttention) -> None:
        assert binding is self

    def get_outputs(self) -> list[FakeAttention]:
        return [self]

    def numpy(self) -> Any:
        values = self.arrays["value"]
        length = values.shape[1]
        attended = np.cumsum(values, axis=1) / np.arange(1, length + 1)[:, None]
        if length > SHORT_STEP:
            attended[:, self.num_right :] += 1
        return attended


@pytest.mark.parametrize(("num_right", "is_right"), [(1000, True), (SHORT_STEP, True), (30, False), (8, False)])
def test_rows_of_a_long_step_must_equal_those_of_a_short_one(num_right: int, is_right: bool) -> None:
    assert attends_to_long_steps(lambda graph: FakeAttention(num_right)) is is_right


def test_the_cpu_passes() -> None:
    providers = resolve_providers("cpu")
    assert attends_to_long_steps(lambda graph: open_session(graph, providers))


@pytest.mark.parametrize(
    ("kind", "chunk_size", "num_right", "expected"),
    [("webgpu", 256, 8, SHORT_STEP), ("webgpu", 256, 1000, 256), ("webgpu", 16, 8, 16), ("cpu", 256, 8, 256)],
)
def test_only_a_webgpu_device_that_fails_gets_short_steps(
    kind: str, chunk_size: int, num_right: int, expected: int
) -> None:
    found, notes = fitting_attention(chunk_size, Device(kind), _spec(), lambda graph: FakeAttention(num_right))
    assert found == expected
    assert bool(notes) is (expected != chunk_size)


def _spec() -> DecoderSpec:
    files = locate(str(genai_export("llama")))
    return read_spec(load_graph(files.decoder), files.genai_config)


@pytest.mark.webgpu
def test_the_session_says_that_its_steps_are_cut_where_the_device_fails() -> None:
    register_libraries(LIBRARY)
    providers = resolve_providers("webgpu")
    is_right = attends_to_long_steps(lambda graph: open_session(graph, providers))
    with open_on("webgpu", genai_export("llama"), chunk_size=256) as session:
        facts = session.describe_execution()
    assert facts["chunk_size"] == (256 if is_right else SHORT_STEP)
    assert any("steps are cut to 31 tokens" in note for note in facts["notes"]) is not is_right

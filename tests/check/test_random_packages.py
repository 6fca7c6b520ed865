"""Random damage to a package: whatever is in its files, checking it ends with findings and problems, never with another
error."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from olive_ext.check import check_model
from olive_ext.config import EvaluationConfig
from tests.check.tiny import put_model

DECODER = {
    "filename": "model.onnx",
    "head_size": 4,
    "num_key_value_heads": 2,
    "inputs": {"input_ids": "input_ids", "past_key_names": "past_key_values.%d.key"},
    "outputs": {"logits": "logits"},
    "session_options": {"provider_options": [{"cpu": {}}]},
}
GENAI = {"model": {"type": "llama", "context_length": 64, "vocab_size": 320, "eos_token_id": [1], "decoder": DECODER}}
HF = {"max_position_embeddings": 64, "vocab_size": 320, "eos_token_id": 1, "text_config": {"n_positions": 64}}

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner))


def places(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [way, *(found for key, item in inner for found in places(item, (*way, key)))]


def replaced(value: Any, way: tuple[Any, ...], new: Any) -> Any:
    if not way:
        return new
    changed = copy.deepcopy(value)
    place = changed
    for key in way[:-1]:
        place = place[key]
    place[way[-1]] = new
    return changed


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = put_model(tmp_path_factory.mktemp("random") / "whole")
    (folder / "genai_config.json").write_text(json.dumps(GENAI))
    (folder / "config.json").write_text(json.dumps(HF))
    return folder


def ends_well(folder: Path) -> None:
    found = check_model(EvaluationConfig.parse({"model": {"path": str(folder)}, "tasks": ["size_on_disk"]}))
    assert found.problems or found.sections
    assert all(isinstance(problem, str) and problem for problem in found.problems)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(data=st.data(), new=values)
def test_any_value_anywhere_in_the_json_files(package: Path, data: st.DataObject, new: Any) -> None:
    name, content = data.draw(st.sampled_from([("genai_config.json", GENAI), ("config.json", HF)]))
    way = data.draw(st.sampled_from(places(content)))
    (package / name).write_text(json.dumps(replaced(content, way, new)))
    try:
        ends_well(package)
    finally:
        (package / name).write_text(json.dumps(content))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(data=st.data())
def test_any_bytes_in_the_graph(package: Path, data: st.DataObject) -> None:
    whole = (package / "model.onnx").read_bytes()
    broken = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        broken[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.sampled_from([len(whole), len(whole) // 2]))
    folder = package.parent / "broken"
    shutil.copytree(package, folder, dirs_exist_ok=True)
    (folder / "model.onnx").write_bytes(broken[:end])
    ends_well(folder)

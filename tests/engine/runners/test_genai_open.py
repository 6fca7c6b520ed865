"""What of the user's settings reaches onnxruntime-genai's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from olive_ext.config import EngineConfig
from olive_ext.engine.runners.genai.genai_runner import overlay_of, set_providers
from olive_ext.errors import ModelError
from olive_ext.model.providers.devices import Provider
from olive_ext.model.types import ModelFiles

CPU_LAST = Provider("CPUExecutionProvider", "cpu", {}, "always last")


class FakeConfig:
    """Notes what is called, as `onnxruntime_genai.Config` would be."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []

    def clear_providers(self) -> None:
        self.calls.append(("clear",))

    def append_provider(self, name: str) -> None:
        self.calls.append(("append", name))

    def set_provider_option(self, name: str, key: str, value: str) -> None:
        self.calls.append(("option", name, key, value))


def package(folder: Path, decoder: str = "model.onnx", **config: Any) -> ModelFiles:
    (folder / "model.onnx").touch()
    (folder / decoder).touch()
    return ModelFiles(folder / decoder, folder, {"model": {"decoder": {"filename": "model.onnx", **config}}}, {}, ".")


@pytest.mark.parametrize("origin", ["genai_config.json", "default"])
def test_package_keeps_its_own_providers_unless_asked(origin: str) -> None:
    config = FakeConfig()
    set_providers(config, (Provider("CUDAExecutionProvider", "cuda", {"a": "1"}, origin), CPU_LAST))
    assert config.calls == []


def test_provider_asked_for_takes_their_place() -> None:
    config = FakeConfig()
    asked = Provider("CUDAExecutionProvider", "cuda", {"use_tf32": "0"}, "execution_provider")
    assert set_providers(config, (asked, CPU_LAST)) == ["CUDAExecutionProvider", "CPUExecutionProvider"]
    assert config.calls == [("clear",), ("append", "cuda"), ("option", "cuda", "use_tf32", "0")]


def test_cpu_asked_for_removes_the_package_s_providers() -> None:
    config = FakeConfig()
    set_providers(config, (Provider("CPUExecutionProvider", "cpu", {}, "execution_provider"),))
    assert config.calls == [("clear",)]


def test_nothing_is_overlaid_unasked(tmp_path: Path) -> None:
    assert overlay_of(package(tmp_path), EngineConfig(), None) == {"model": {"decoder": {}}}


def test_threads_session_options_and_profile_are_overlaid(tmp_path: Path) -> None:
    config = EngineConfig(num_threads=3, session_options={"session.intra_op.allow_spinning": "0"})
    options = {"session.intra_op.allow_spinning": "0", "intra_op_num_threads": 3, "enable_profiling": "p"}
    assert overlay_of(package(tmp_path), config, Path("p")) == {"model": {"decoder": {"session_options": options}}}


def test_another_graph_than_the_configured_one_is_overlaid(tmp_path: Path) -> None:
    assert overlay_of(package(tmp_path, "other.onnx"), EngineConfig(), None)["model"]["decoder"] == {
        "filename": "other.onnx"
    }


def test_graph_beside_a_pipeline_cannot_run_on_genai(tmp_path: Path) -> None:
    files = package(tmp_path, "other.onnx", filename="", pipeline=[{"a": {"filename": "model.onnx"}}])
    with pytest.raises(ModelError, match="none of the graphs of the pipeline"):
        overlay_of(files, EngineConfig(), None)


def test_padding_of_fixed_inputs_is_no_token(tmp_path: Path) -> None:
    files = package(tmp_path, sliding_window={"window_size": 8})
    assert overlay_of(files, EngineConfig(), None)["model"]["pad_token_id"] == -1

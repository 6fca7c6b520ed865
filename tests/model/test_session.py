from __future__ import annotations

import logging
import warnings
from pathlib import Path

import numpy as np
import pytest

from olive_ext.config import EngineConfig, ExecutionSettings
from olive_ext.errors import ConfigError, ModelError, ProviderError
from olive_ext.graph.nodes import external_locations
from olive_ext.model.files.content import relocated, weight_files
from olive_ext.model.providers.devices import Provider
from olive_ext.model.providers.ort_session import open_session
from olive_ext.model.providers.resolution import register_libraries, resolve_providers
from olive_ext.model.providers.table import CPU
from tests.model.tiny import SIZE, graph, in_hf_cache, put_graph, put_weight
from tests.refusals import refused

CPU_ONLY = (Provider(CPU, "cpu"),)
CUDA = "CUDAExecutionProvider"
WEBGPU = "WebGpuExecutionProvider"


def run(session) -> float:
    """The sum over the weights at index 1: each weight adds 1."""
    return float(session.run(None, {"x": np.zeros(SIZE, np.float32)})[0][1])


def reopen(decoder: Path, locations: list[str]) -> float:
    """Opens the graph from memory, as the engine does."""
    folder, model = relocated(decoder, graph(locations=locations))
    return run(open_session(model.SerializeToString(), CPU_ONLY, external_data_folder=folder))


def test_plain_layout_needs_no_renames_beside_a_link_neither(tmp_path: Path) -> None:
    decoder = put_graph(tmp_path / "model.onnx", locations=["model.onnx.data"])
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "link.onnx").symlink_to(decoder)
    for file in (decoder, tmp_path / "links" / "link.onnx"):
        for model in (graph(locations=["model.onnx.data"]), graph()):
            assert relocated(file, model) == (tmp_path, model)
            assert relocated(file, model)[1] is model
    assert reopen(decoder, ["model.onnx.data"]) == 1


def test_hub_cache_opens_from_its_blobs(tmp_path: Path) -> None:
    weight = put_weight(tmp_path / "w").read_bytes()
    locations = ["a.data", "b.data"]
    files = {"onnx/model.onnx": graph(locations=locations).SerializeToString()}
    snapshot = in_hf_cache(tmp_path / "cache", files | {f"onnx/{name}": weight for name in locations})
    decoder = snapshot / "onnx" / "model.onnx"
    folder, model = relocated(decoder, graph(locations=locations))
    assert (folder, external_locations(model)) == (tmp_path / "cache" / "blobs", {"blob1", "blob2"})
    assert reopen(decoder, locations) == 2


def test_files_in_several_folders_open_from_their_common_one(tmp_path: Path) -> None:
    decoder = put_graph(tmp_path / "here" / "model.onnx", locations=["sub/a.data", "b.data"])
    (tmp_path / "here" / "b.data").unlink()
    (tmp_path / "here" / "b.data").symlink_to(put_weight(tmp_path / "here" / "there" / "real.bin"))
    folder, model = relocated(decoder, graph(locations=["sub/a.data", "b.data"]))
    assert (folder, external_locations(model)) == (tmp_path / "here", {"sub/a.data", "there/real.bin"})
    assert reopen(decoder, ["sub/a.data", "b.data"]) == 2


@pytest.mark.parametrize("location", ["/etc/hostname", "../w", "sub/../../w"])
def test_data_outside_the_models_folder_is_refused(tmp_path: Path, location: str) -> None:
    put_weight(tmp_path / "w")
    decoder = put_graph(tmp_path / "here" / "model.onnx")
    with refused(ModelError, "untrusted"):
        weight_files(decoder, [location])


def test_file_opens_by_path_and_one_whose_weights_are_short_does_not(tmp_path: Path) -> None:
    decoder = put_graph(tmp_path / "provider" / "model.onnx", locations=["w.data"])
    session = open_session(decoder, CPU_ONLY)
    assert run(session) == 1
    assert session.get_providers() == [CPU]
    (tmp_path / "provider" / "w.data").write_bytes(b"123")
    with refused(ModelError, "unsupported", holds="w0"):
        open_session(decoder, CPU_ONLY)


def _open_with(**options: str) -> None:
    names = {name.replace("__", "."): value for name, value in options.items()}
    open_session(graph().SerializeToString(), CPU_ONLY, ExecutionSettings(engine=EngineConfig(session_options=names)))


def test_session_option_that_is_misspelt_is_refused_and_another_unknown_one_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with refused(ConfigError, "unknown_name", holds=("intra_op", "allow_spining")):
        _open_with(session__intra_op__allow_spining="0", session__set_denormal_as_zero="1")
    _open_with(mine__x__y="0", session__intra_op__allow_spinning="0", ep__mine__x="1")
    (record,) = caplog.records
    assert "'mine.x.y'" in record.getMessage()


def test_dropped_provider_is_an_error_or_a_warning_where_allowed(caplog: pytest.LogCaptureFixture) -> None:
    providers = (Provider(CUDA, "dml"), *CPU_ONLY)
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("ignore")
        with refused(ProviderError, "provider", holds=("allow_cpu", CUDA, CPU)):
            open_session(graph().SerializeToString(), providers, label="m")
        session = open_session(graph().SerializeToString(), providers, ExecutionSettings(allow_cpu_fallback=True))
    assert run(session) == 0
    assert f"dropped {CUDA}" in caplog.text


@pytest.fixture
def webgpu() -> tuple[Provider, ...]:
    pytest.importorskip("onnxruntime_ep_webgpu")
    libraries = {"webgpu": "onnxruntime_ep_webgpu"}
    register_libraries(libraries)
    register_libraries(libraries)
    register_libraries({"by_another_name": "onnxruntime_ep_webgpu"})
    from olive_ext.model.providers.resolution import available_providers

    if WEBGPU not in available_providers():
        pytest.skip("the WebGPU provider found no device")
    return resolve_providers("webgpu", {"preferredLayout": "NCHW"})


@pytest.mark.webgpu
def test_plugin_provider_runs_and_is_listed_once(webgpu: tuple[Provider, ...], tmp_path: Path) -> None:
    import onnxruntime

    decoder = put_graph(tmp_path / "model.onnx", locations=["w.data"])
    session = open_session(decoder.read_bytes(), webgpu, external_data_folder=tmp_path)
    assert session.get_providers() == [WEBGPU, CPU]
    assert session.get_provider_options()[WEBGPU] == {"preferredLayout": "NCHW"}
    assert run(session) == 1
    paths = [device.ep_metadata["library_path"] for device in onnxruntime.get_ep_devices() if device.ep_name == WEBGPU]
    assert len(set(paths)) == 1


@pytest.mark.webgpu
def test_plugin_provider_refuses_a_built_in_one_beside_it_and_a_broken_model(webgpu: tuple[Provider, ...]) -> None:
    with refused(ProviderError, "contradiction", holds=CUDA):
        open_session(graph().SerializeToString(), (webgpu[0], Provider(CUDA, "cuda"), *CPU_ONLY))
    with refused(ModelError, "unsupported"):
        open_session(b"nonsense", webgpu)

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from olive_ext.errors import ProviderError
from olive_ext.model.providers.devices import Provider
from olive_ext.model.providers.resolution import (
    CPU,
    TABLE,
    ProviderRow,
    available_providers,
    check_distributions,
    register_libraries,
    resolve_providers,
)
from tests.refusals import refused

CUDA, TRT, DML = "CUDAExecutionProvider", "TensorrtExecutionProvider", "DmlExecutionProvider"
EVERYTHING = tuple(row.name for row in TABLE)
NOT_LISTED = {"ROCMExecutionProvider"}
"""Rows that ONNX Runtime's own list lacks: Olive still names this one, and older builds have it. Plugins with names of
their own belong here, too."""


def resolve(request: Any = None, options: Any = None, **keys: Any) -> tuple[Provider, ...]:
    return resolve_providers(request, options, **{"available": EVERYTHING, **keys})


def names(*args: Any, **keys: Any) -> list[str]:
    return [provider.name for provider in resolve(*args, **keys)]


def genai(*entries: Any) -> dict[str, Any]:
    return {"model": {"decoder": {"session_options": {"provider_options": list(entries)}}}}


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.short)
def test_each_row_is_found_by_each_of_its_names_in_any_case(row: ProviderRow) -> None:
    for name in (row.short, row.name, *row.aliases):
        for spelled in (name, name.upper(), name.lower()):
            first = resolve(spelled)[0]
            assert (first.name, first.device) == (row.name, row.device)
            assert first.options == row.defaults


def test_no_two_rows_share_a_name() -> None:
    keys = [key.lower() for row in TABLE for key in (row.short, row.name, *row.aliases)]
    assert len(keys) == len(set(keys))


def test_names_are_those_of_onnx_runtime() -> None:
    import onnxruntime

    assert {row.name for row in TABLE} - NOT_LISTED <= set(onnxruntime.get_all_providers())


def test_devices_are_those_of_onnx_runtime() -> None:
    from onnxruntime.capi.onnxruntime_inference_collection import OrtDevice

    for device in {row.device for row in TABLE}:
        assert OrtDevice.make(device, 0)


def test_order_is_kept_and_the_cpu_appended_once() -> None:
    assert names(["trt", "cuda"]) == [TRT, CUDA, CPU]
    assert names(["cuda", "cpu"]) == [CUDA, CPU]
    assert names(["cpu", "cuda"]) == [CPU, CUDA]
    assert names("CPU") == [CPU]


def test_duplicates_are_refused_by_name() -> None:
    with refused(ProviderError, "contradiction", holds=("execution_provider", CUDA)):
        resolve(["cuda", "cpu", CUDA])


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [("cudaa", "did you mean 'cuda'"), ("CudaExecutionProviders", "did you mean 'cuda'"), ("???", "known: cpu, cuda,")],
)
def test_unknown_name_is_refused_with_the_nearest(wrong: str, hint: str) -> None:
    with refused(ProviderError, "unknown_name", holds="execution_provider") as caught:
        resolve(wrong)
    assert hint in str(caught.value)
    assert repr(wrong) in str(caught.value)


@pytest.mark.parametrize("wrong", [["cuda", {"device_id": 0}], [3], [["cuda", "path"]], [[3, {}]], [["cuda", {}, 1]]])
def test_malformed_entry_is_refused(wrong: Any) -> None:
    with refused(ProviderError, "wrong_value"):
        resolve(wrong)


def test_unknown_plugin_that_is_available_is_taken() -> None:
    provider = resolve("OddExecutionProvider", available=(CPU, "OddExecutionProvider"))[0]
    assert (provider.name, provider.device) == ("OddExecutionProvider", "cpu")


# --- who is asked ----------------------------------------------------------------------------------------------------


def test_request_wins_over_olive_and_olive_over_genai_config() -> None:
    config = genai({"DML": {}})
    assert names("cuda", handed_over="TensorrtExecutionProvider", genai_config=config) == [CUDA, CPU]
    assert names(None, handed_over="TensorrtExecutionProvider", genai_config=config) == [TRT, CPU]
    assert names(None, handed_over=[CUDA, CPU], genai_config=config) == [CUDA, CPU]
    assert names(None, handed_over=None, genai_config=config) == [DML, CPU]
    assert names(None, handed_over=[], genai_config=genai()) == [CPU]
    assert names(None, genai_config={}) == [CPU]


def test_origin_says_who_asked() -> None:
    assert [p.origin for p in resolve("cuda")] == ["execution_provider", "always last"]
    assert resolve(handed_over="cuda")[0].origin == "Olive's accelerator"
    assert resolve(genai_config=genai({"cuda": {}}))[0].origin == "genai_config.json"
    assert resolve()[0].origin == "default"


def test_genai_config_keeps_its_order_and_options_without_those_of_its_own_runner() -> None:
    config = genai({"NvTensorRtRtx": {}}, {"cuda": {"enable_cuda_graph": "1", "device_id": 1}})
    providers = resolve(genai_config=config)
    assert [provider.name for provider in providers] == ["NvTensorRTRTXExecutionProvider", CUDA, CPU]
    assert providers[1].options == {"use_tf32": "0", "device_id": "1"}
    with refused(ProviderError, "unknown_name", holds=("qqq", "genai_config.json")):
        resolve(genai_config=genai({"qqq": {}}))


# --- options ---------------------------------------------------------------------------------------------------------


def test_options_mapping_belongs_to_the_first_provider() -> None:
    trt, cuda, cpu = resolve(["trt", "cuda"], {"device_id": 1})
    assert trt.options == {"device_id": "1"}
    assert cuda.options == {"use_tf32": "0"}
    assert cpu.options == {}
    assert resolve(handed_over="trt", options={"a": 1})[0].options == {"a": "1"}


def test_options_list_has_one_entry_for_each_provider() -> None:
    trt, cuda, _ = resolve(["trt", "cuda"], [{}, {"use_tf32": True}])
    assert (trt.options, cuda.options) == ({}, {"use_tf32": "1"})
    for wrong in ([{"a": 1}], [{}, {}, {"a": 1}]):
        with refused(ProviderError, "wrong_value", holds=("provider_options", "2", f"{len(wrong)}")):
            resolve(["trt", "cuda"], wrong)


def test_options_in_pairs_reach_their_provider() -> None:
    trt, cuda, _ = resolve(["trt", ["CUDA", {"device_id": 2}]])
    assert trt.options == {}
    assert cuda.options == {"use_tf32": "0", "device_id": "2"}


def test_options_given_twice_are_refused() -> None:
    with refused(ProviderError, "provider", holds=("execution_provider", "provider_options")):
        resolve([("cuda", {"a": 1})], {"b": 2})
    assert resolve([("trt", {}), ("cuda", {"a": 1})], {"b": 2})[0].options == {"b": "2"}


@pytest.mark.parametrize(("value", "text"), [(True, "1"), (False, "0"), (3, "3"), (0.5, "0.5"), ("x", "x")])
def test_option_values_become_strings(value: Any, text: str) -> None:
    assert resolve("trt", {"key": value})[0].options == {"key": text}


def test_other_option_values_are_refused() -> None:
    with refused(ProviderError, "wrong_value", holds=("'key'", TRT, "None")):
        resolve("trt", {"key": None})


# --- what this build has ---------------------------------------------------------------------------------------------


def test_missing_provider_names_what_the_build_has() -> None:
    with refused(ProviderError, "provider", holds=(CUDA, CPU, DML)):
        resolve(handed_over="cuda", available=(DML, CPU))


def test_missing_provider_is_dropped_with_a_warning_where_allowed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        providers = resolve(["cuda", "dml"], [{"a": 1}, {"b": 2}], available=(DML,), allow_cpu_fallback=True)
    assert [(p.name, dict(p.options)) for p in providers] == [(DML, {"b": "2"}), (CPU, {})]
    assert CUDA in caplog.text


def test_this_build_is_asked_by_default() -> None:
    assert CPU in available_providers()
    assert "AzureExecutionProvider" not in available_providers()
    assert resolve_providers()[0].name == CPU


# --- libraries and distributions -------------------------------------------------------------------------------------


def test_library_that_is_nowhere_is_refused(tmp_path: Path) -> None:
    register_libraries({})
    for place in ("no_such_package_here", str(tmp_path / "gone.so")):
        with refused(ProviderError, "not_found", holds="mine"):
            register_libraries({"mine": place})
    with refused(ProviderError, "provider", holds=("json", "get_library_path")):
        register_libraries({"mine": "json"})


def test_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lib.so").write_bytes(b"nonsense")
    with refused(ProviderError, "provider", holds=("mine", "lib.so")):
        register_libraries({"mine": str(tmp_path / "lib.so")})


@pytest.mark.parametrize(
    "pair",
    [("onnxruntime", "onnxruntime-gpu"), ("onnxruntime-genai", "onnxruntime-genai-cuda")],
    ids="-and-".join,
)
def test_two_builds_at_once_are_refused(pair: tuple[str, str]) -> None:
    check_distributions(lambda name: name == pair[0])
    check_distributions({"onnxruntime-gpu", "onnxruntime-genai-cuda", "onnxruntime-ep-webgpu"}.__contains__)
    with refused(ProviderError, "contradiction", holds=(pair[0], pair[1])):
        check_distributions(pair.__contains__)


@pytest.mark.parametrize(
    ("name", "given", "kept"),
    [
        ("MyPluginEP", {"device_id": "1", "precision": "fp16", "own": "2"}, {"device_id", "precision", "own"}),
        ("WebGpuExecutionProvider", {"device_id": "1", "enable_skip_layer_norm_strict_mode": "1"}, {"device_id"}),
        ("CPUExecutionProvider", {"device_id": "1", "enable_skip_layer_norm_strict_mode": "1"}, set()),
    ],
)
def test_only_options_that_are_surely_of_others_are_ignored(name: str, given: dict[str, str], kept: set[str]) -> None:
    assert set(resolve_providers(name, given, available=[name])[0].options) == kept

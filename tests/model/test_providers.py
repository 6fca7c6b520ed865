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


def genai(*entries: Any) -> dict[str, Any]:
    return {"model": {"decoder": {"session_options": {"provider_options": list(entries)}}}}


def test_names_are_those_of_onnx_runtime_and_no_two_rows_share_one() -> None:
    import onnxruntime
    from onnxruntime.capi.onnxruntime_inference_collection import OrtDevice

    keys = [key.lower() for row in TABLE for key in (row.short, row.name, *row.aliases)]
    assert len(keys) == len(set(keys))
    assert {row.name for row in TABLE} - NOT_LISTED <= set(onnxruntime.get_all_providers())
    for device in {row.device for row in TABLE}:
        assert OrtDevice.make(device, 0)
    assert CPU in available_providers()
    assert "AzureExecutionProvider" not in available_providers()
    assert resolve_providers()[0].name == CPU, "this build is asked by default"


TF32 = {"use_tf32": "0"}
FROM_DML = genai({"DML": {}})
TAKEN: list[tuple[dict[str, Any], list[tuple[str, dict[str, str]]], str]] = [
    ({"request": ["trt", "cuda"]}, [(TRT, {}), (CUDA, TF32)], "execution_provider"),
    ({"request": ["cuda", "cpu"]}, [(CUDA, TF32)], "execution_provider"),
    ({"request": TRT, "genai_config": FROM_DML}, [(TRT, {})], "execution_provider"),
    ({"request": [CUDA, CPU], "genai_config": FROM_DML}, [(CUDA, TF32)], "execution_provider"),
    ({"genai_config": FROM_DML}, [(DML, {})], "genai_config.json"),
    ({"request": [], "genai_config": genai()}, [], "default"),
    ({"genai_config": {}}, [], "default"),
    ({"request": "CPU"}, [], "execution_provider"),
    (
        {"genai_config": genai({"NvTensorRtRtx": {}}, {"cuda": {"enable_cuda_graph": "1", "device_id": 1}})},
        [("NvTensorRTRTXExecutionProvider", {}), (CUDA, {**TF32, "device_id": "1"})],
        "genai_config.json",
    ),
    ({"request": "Odd", "available": (CPU, "Odd")}, [("Odd", {})], "execution_provider"),
    (
        {"request": ["trt", "cuda"], "options": {"device_id": 1}},
        [(TRT, {"device_id": "1"}), (CUDA, TF32)],
        "execution_provider",
    ),
    ({"request": "trt", "options": {"a": 1}}, [(TRT, {"a": "1"})], "execution_provider"),
    (
        {"request": ["trt", "cuda"], "options": [{}, {"use_tf32": True}]},
        [(TRT, {}), (CUDA, {"use_tf32": "1"})],
        "execution_provider",
    ),
    (
        {"request": ["trt", ["CUDA", {"device_id": 2}]]},
        [(TRT, {}), (CUDA, {**TF32, "device_id": "2"})],
        "execution_provider",
    ),
    (
        {"request": [("trt", {}), ("cuda", {"a": 1})], "options": {"b": 2}},
        [(TRT, {"b": "2"}), (CUDA, {**TF32, "a": "1"})],
        "execution_provider",
    ),
    *(
        ({"request": "trt", "options": {"key": value}}, [(TRT, {"key": text})], "execution_provider")
        for value, text in ((True, "1"), (False, "0"), (3, "3"), (0.5, "0.5"), ("x", "x"))
    ),
]


@pytest.mark.parametrize(("given", "expected", "origin"), TAKEN)
def test_the_first_that_names_providers_is_taken_and_the_cpu_appended_once(
    given: dict[str, Any], expected: list[tuple[str, dict[str, str]]], origin: str
) -> None:
    providers = resolve(**given)
    assert [(one.name, dict(one.options)) for one in providers] == [*expected, (CPU, {})]
    assert {one.origin for one in providers} <= {origin, "always last"}
    assert providers[0].origin == origin


REFUSED: list[tuple[dict[str, Any], str, tuple[str, ...]]] = [
    ({"request": ["cuda", "cpu", CUDA]}, "contradiction", ("execution_provider", CUDA)),
    ({"request": "gpu"}, "unknown_name", ("'cuda' (extra 'gpu') or ", "or 'webgpu' (extra 'webgpu')?")),
    ({"request": "cudaa"}, "unknown_name", ("execution_provider", "'cudaa'", "'cuda'")),
    ({"request": "CudaExecutionProviders"}, "unknown_name", ("'CudaExecutionProviders'", "'cuda'")),
    ({"request": "???"}, "unknown_name", ("execution_provider", "'???'", "known: cpu, cuda,")),
    ({"genai_config": genai({"qqq": {}})}, "unknown_name", ("qqq", "genai_config.json")),
    *(
        ({"request": wrong}, "wrong_value", ())
        for wrong in (["cuda", {"device_id": 0}], [3], [["cuda", "path"]], [[3, {}]], [["cuda", {}, 1]])
    ),
    *(
        ({"request": ["trt", "cuda"], "options": wrong}, "wrong_value", ("provider_options", "2", f"{len(wrong)}"))
        for wrong in ([{"a": 1}], [{}, {}, {"a": 1}])
    ),
    (
        {"request": [("cuda", {"a": 1})], "options": {"b": 2}},
        "provider",
        ("execution_provider", "provider_options"),
    ),
    ({"request": "trt", "options": {"key": None}}, "wrong_value", ("'key'", TRT, "None")),
    ({"request": "cuda", "available": (DML, CPU)}, "provider", (CUDA, CPU, DML, "'gpu'")),
]


@pytest.mark.parametrize(("given", "code", "holds"), REFUSED)
def test_what_names_no_provider_is_refused(given: dict[str, Any], code: str, holds: tuple[str, ...]) -> None:
    with refused(ProviderError, code, holds=holds):
        resolve(**given)


def test_missing_provider_is_dropped_with_a_warning_where_allowed_and_the_cpu_may_be_first(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        providers = resolve(["cuda", "dml"], [{"a": 1}, {"b": 2}], available=(DML,), allow_cpu_fallback=True)
    assert [(p.name, dict(p.options)) for p in providers] == [(DML, {"b": "2"}), (CPU, {})]
    assert CUDA in caplog.text
    assert [one.name for one in resolve(["cpu", "cuda"])] == [CPU, CUDA]


def test_library_that_is_nowhere_is_refused(tmp_path: Path) -> None:
    register_libraries({})
    for place in ("no_such_package_here", str(tmp_path / "gone.so")):
        with refused(ProviderError, "not_found", "provider_libraries.mine", place):
            register_libraries({"mine": place})
    with refused(ProviderError, "provider", holds=("json", "get_library_path")):
        register_libraries({"mine": "json"})
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

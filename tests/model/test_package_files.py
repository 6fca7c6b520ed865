"""Which files a model's folder may have opened: links, names in its configurations, pipes and devices. Settings of a
package that need trust, each by its name, and those that exporters write, which need none."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from olive_ext.config import ModelSettings
from olive_ext.errors import ModelError, ProviderError
from olive_ext.media.processors import load_image_processor
from olive_ext.model.providers.resolution import operators_library
from olive_ext.model.providers.table import TABLE
from olive_ext.model.resolve import resolve
from tests.check.tiny import put_model
from tests.model.tiny import in_hf_cache, put_genai, put_graph, put_json
from tests.refusals import refused


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package with a file of every kind that is opened by its name, and external data in a sub-folder."""
    folder = put_model(tmp_path / "package")
    put_graph(folder / "model.onnx", locations=["model.onnx.data", "weights/b.data"])
    put_genai(folder)
    for name in ("config.json", "generation_config.json", "added_tokens.json", "preprocessor_config.json"):
        put_json(folder / name, {})
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    put_json(folder / "additional_chat_templates" / "tools.jinja", {})
    return folder


def opened(folder: Path, **settings: object) -> None:
    """All that is read of a model before a session is open."""
    model = resolve(ModelSettings.of({"model": str(folder), **settings}))
    assert model.digest


def moved_out(path: Path, elsewhere: Path) -> None:
    """`path` with a link of its name in its place."""
    elsewhere.mkdir(exist_ok=True)
    shutil.move(path, elsewhere / path.name)
    path.symlink_to(elsewhere / path.name)


def test_a_package_of_its_own_files_is_opened(package: Path, tmp_path: Path) -> None:
    moved_out(package / "chat_template.jinja", package / "below")
    moved_out(package / "model.onnx.data", package / "below")
    (package / "gone").symlink_to("/nowhere")
    (package / "loop").symlink_to("loop")
    (package / "cache").symlink_to(tmp_path, target_is_directory=True)
    opened(package)
    (tmp_path / "link").symlink_to(package, target_is_directory=True)
    opened(tmp_path / "link")


@pytest.mark.parametrize(
    "name",
    [
        *("model.onnx.data", "weights/b.data", "weights", "chat_template.jinja", "tokenizer.json", "config.json"),
        *("tokenizer_config.json", "added_tokens.json", "generation_config.json", "genai_config.json"),
        *("additional_chat_templates/tools.jinja", "additional_chat_templates", "preprocessor_config.json"),
        *("bare: model.onnx", "bare: sub"),
    ],
)
def test_a_link_out_of_the_folder_is_refused(package: Path, tmp_path: Path, name: str) -> None:
    """Of a bare graph, too, which nothing names."""
    if name.startswith("bare: "):
        package = put_model(tmp_path / "bare")
        name = name.removeprefix("bare: ")
        if name == "sub":
            (package / "sub").mkdir()
            (package / "model.onnx").rename(package / "sub" / "model.onnx")
    moved_out(package / name, tmp_path / "elsewhere")
    with refused(ModelError, "unsupported", holds=f"{tmp_path}/elsewhere"):
        opened(package)


def test_the_users_own_file_may_be_a_link_and_its_weights_lie_beside_either(package: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "other.txt").symlink_to("/etc/hostname")
    (tmp_path / "mine" / "mine.onnx").symlink_to(package / "model.onnx")
    opened(tmp_path / "mine" / "mine.onnx", tokenizer=str(package))


def test_a_package_below_a_snapshot_of_the_hubs_cache_is_opened(package: Path, tmp_path: Path) -> None:
    files = {str(Path("cpu", path.relative_to(package))): path.read_bytes() for path in package.rglob("*.*")}
    snapshot = in_hf_cache(tmp_path / "models--a--b", files)
    opened(snapshot / "cpu")
    (snapshot / "cpu" / "chat_template.jinja").unlink()
    (snapshot / "cpu" / "chat_template.jinja").symlink_to(put_json(tmp_path / "elsewhere.jinja", {}))
    with refused(ModelError, "unsupported", holds=f"{tmp_path}/elsewhere"):
        opened(snapshot / "cpu")


@pytest.fixture
def checkpoint(package: Path) -> Path:
    for name in ("model.onnx", "genai_config.json"):
        (package / name).unlink()
    for name in ("model.safetensors", "merges.txt"):
        (package / name).touch()
    return package


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "chat_template.jinja", "merges.txt"])
def test_a_file_of_a_checkpoint_is_no_link_out(checkpoint: Path, tmp_path: Path, name: str) -> None:
    opened(checkpoint)
    moved_out(checkpoint / name, tmp_path / "elsewhere")
    with refused(ModelError, "unsupported", holds=f"{tmp_path}/elsewhere"):
        opened(checkpoint)


@pytest.mark.parametrize(
    ("file", "content", "error"),
    [
        ("model.safetensors.index.json", {"weight_map": {"a": "../w.safetensors"}}, "index.json's weight_map"),
        ("tokenizer_config.json", {"fast_tokenizer_files": ["/x/tokenizer.4.0.json"]}, "fast_tokenizer_files"),
    ],
)
def test_a_file_that_a_checkpoint_names_is_inside(checkpoint: Path, file: str, content: object, error: str) -> None:
    put_json(checkpoint / file, content)
    with refused(ModelError, "untrusted", holds=error):
        opened(checkpoint)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def listener(path: Path) -> None:
    begun = Path.cwd()
    os.chdir(path.parent)  # a socket's address is short
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(begun)


@pytest.mark.parametrize(("put", "kind"), [(pipe, "a pipe"), (listener, "a socket")])
@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "model.safetensors", "merges.txt"])
def test_what_is_no_file_is_refused(package: Path, put: Callable[[Path], None], kind: str, name: str) -> None:
    (package / name).unlink(missing_ok=True)
    put(package / name)
    with refused(ModelError, "no_access", holds=(name, kind)):
        opened(package)


def test_files_of_processors_are_no_links_out(tmp_path: Path) -> None:
    folder = tmp_path / "package"
    put_json(folder / "preprocessor_config.json", {"image_processor_type": "CLIPImageProcessor"})
    load_image_processor([folder], None)
    moved_out(put_json(folder / "chat_template.json", {}), tmp_path / "elsewhere")
    with refused(ModelError, "unsupported", holds=f"{tmp_path}/elsewhere"):
        load_image_processor([folder], None)
    put_json(tmp_path / "other" / "processor_config.json", {"image_processor": {"image_processor_type": "x"}})
    moved_out(tmp_path / "other" / "processor_config.json", tmp_path / "elsewhere")
    with refused(ModelError, "unsupported", holds=f"{tmp_path}/elsewhere"):
        load_image_processor([tmp_path / "other"], None)


PLAIN = [
    {"cuda": {"enable_cuda_graph": "0", "enable_skip_layer_norm_strict_mode": "1"}},
    {"webgpu": {"enableGraphCapture": "1", "validationMode": "disabled", "multiRotaryCacheConcatOffset": "4096"}},
    {"NvTensorRtRtx": {"enable_cuda_graph": "1", "multi_rotary_cache_concat_offset": "4096"}},
    {"qnn": {"backend_path": "QnnHtp.dll", "soc_model": "60", "htp_performance_mode": "burst"}},
    {"QNNExecutionProvider": {"backend_path": "libQnnHtp.so", "backend_type": "htp"}},
    {"qnn": {"genie_model": "True", "enable_htp_shared_memory_allocator": "1", "genie_log_level": "error"}},
    {"OpenVINO": {"device_type": "GPU", "enable_causallm": "True", "device_filtering_options": {"hardware_id": 1}}},
    {"dml": {}},
    {"AMDGPU": {}},
]
"""What the builder, Olive and Intel's packages have."""

UNTRUSTED = [
    ("cuda", "gpu_external_alloc", "140737488355328"),
    ("CUDA", "user_compute_stream", "1"),
    ("CUDAExecutionProvider", "gpu_external_free", "1"),
    ("tensorrt", "trt_extra_plugin_lib_paths", "evil.so"),
    ("TensorrtExecutionProvider", "trt_engine_decryption_lib_path", "evil.so"),
    ("trt", "trt_engine_cache_enable", "1"),  # engines of the working directory are loaded
    ("trt", "trt_onnx_model_folder_path", "/"),
    ("NvTensorRtRtx", "nv_runtime_cache_path", "/home"),
    ("NvTensorRtRtx", "nv_onnx_bytestream", "140737488355328"),
    ("qnn", "backend_path", "./libevil.so"),
    ("qnn", "backend_path", "/tmp/QnnHtp.dll"),
    ("qnn", "backend_type", "saver"),
    ("qnn", "op_packages", "a:evil.so:b"),
    ("qnn", "profiling_file_path", "/home/me/.bashrc"),
    ("openvino", "load_config", "evil.json"),
    ("OpenVINO", "cache_dir", "/"),
    ("migraphx", "migraphx_model_cache_dir", "/"),
    ("rocm", "user_compute_stream", "1"),
    ("coreml", "ModelCacheDirectory", "/"),
    ("VitisAI", "config_file", "evil.json"),
    ("webgpu", "dawnProcTable", "1"),
    ("RyzenAI", "external_data_file", "x"),
    ("azure", "endpoint", "http://x"),
    ("a plugin of tomorrow", "anything", "1"),
]


def genai(options: Any, section: str = "decoder", key: str = "session_options") -> dict[str, Any]:
    return {"model": {section: {key: {"provider_options": options} if key == "session_options" else options}}}


@pytest.mark.parametrize("entry", PLAIN, ids=lambda entry: next(iter(entry)))
def test_what_exporters_write_needs_no_trust(entry: dict[str, Any]) -> None:
    assert operators_library(genai([entry]), Path("x")) is None
    one_more = "model.decoder.session_options.provider_options.openvino.load_config"
    with refused(ModelError, "untrusted", one_more, "x"):
        operators_library(genai([entry, {"openvino": {"load_config": "x"}}]), Path("x"))


def test_harmless_options_name_no_file_and_no_address() -> None:
    harmless = {name for row in TABLE for name in row.harmless}
    odd = {"path", "paths", "dir", "directory", "file", "lib", "alloc", "free", "stream", "bytestream"}
    odd |= {"instance", "dump"}
    # The first has a list of values of its own, the others are flags.
    known = {"backend_path", "use_ep_level_unified_stream", "do_copy_in_default_stream"}
    assert {name for name in harmless if odd & set(name.lower().split("_"))} == known


@pytest.mark.parametrize("section", ["decoder", "vision", "joiner"])
@pytest.mark.parametrize(("provider", "option", "value"), UNTRUSTED)
def test_option_that_names_more_than_numbers_is_refused_by_its_name(
    provider: str, option: str, value: str, section: str
) -> None:
    place = f"model.{section}.session_options.provider_options.{provider}.{option}"
    with refused(ModelError, "untrusted", place, value, holds=("x.json", provider)):
        operators_library(genai([{"cpu": {}}, {provider: {option: value}}], section), Path("x.json"))


HARMLESS: dict[str, dict[str, Any]] = {
    "session_options": {
        "log_id": "x",
        "intra_op_num_threads": 2,
        "graph_optimization_level": "ORT_ENABLE_ALL",
        "session.intra_op.allow_spinning": "0",
        "session.use_device_allocator_for_initializers": "1",
        "ep.cuda.fpa_intb_gemm": "1",
        "optimization.disable_specified_optimizers": "MatMulNBitsFusion",
        "session.disable_prepacking": "1",
        "mlas.qnbit.force_fp32": "1",
        "disable_cpu_ep_fallback": True,
        "use_env_allocators": True,
        "disable_quant_qdq": False,
    },
    "run_options": {"memory.enable_memory_arena_shrinkage": "cpu:0", "qnn.htp_perf_mode": "burst"},
}
HARMFUL = {
    "session_options": (
        *("enable_profiling", "session.enable_profiling", "session.optimized_model_filepath", "ep.tomorrow"),
        *("session.model_external_initializers_file_folder_path", "session.collect_node_memory_stats_to_file"),
        *("session.node_partition_config_file", "session.enable_moe_expert_statistics", "ep.context_file_path"),
        *("ep.openvinoexecutionprovider.load_config", "ep.cuda.gpu_external_alloc"),
    ),
    "run_options": ("enable_profiling", "qnn.lora_config"),
}


@pytest.mark.parametrize("key", HARMLESS)
def test_harmless_entries_need_no_trust(key: str) -> None:
    assert operators_library({"model": {"decoder": {key: HARMLESS[key]}}}, Path()) is None


@pytest.mark.parametrize(("key", "name"), [(key, name) for key, names in HARMFUL.items() for name in names])
def test_entry_that_is_not_known_as_harmless_is_refused_by_its_name(key: str, name: str) -> None:
    with refused(ModelError, "untrusted", f"model.decoder.{key}.{name}", "evil", holds="ONNX Runtime"):
        operators_library({"model": {"decoder": {key: {**HARMLESS[key], name: "evil"}}}}, Path("x"))


def test_the_switch_and_the_users_own_settings_are_free(tmp_path: Path) -> None:
    package = put_model(tmp_path / "package")
    put_genai(package, context_length=64)
    named = {"device_type": "CPU", "load_config": "evil.json"}
    own = ModelSettings.of({"model": str(package), "execution_provider": "openvino", "provider_options": named})
    with refused(ProviderError, "provider", holds="OpenVINOExecutionProvider"):
        _ = resolve(own).providers
    section = {"session_options": {"provider_options": [{"openvino": named}]}}
    put_genai(package, context_length=64, decoder={"filename": "model.onnx", **section})
    with refused(
        ModelError, "untrusted", "model.decoder.session_options.provider_options.openvino.load_config", "evil.json"
    ):
        resolve(ModelSettings(model=str(package)))
    with refused(ProviderError, "provider", holds="OpenVINOExecutionProvider"):
        _ = resolve(ModelSettings(model=str(package), trust_remote_code=True)).providers

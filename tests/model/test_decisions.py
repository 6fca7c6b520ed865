from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from olive_ext.config import EngineConfig
from olive_ext.errors import ModelError
from olive_ext.model.decisions import choose_runtime, input_window, suggest_genai
from olive_ext.model.types import ModelFiles


def files(pipeline: tuple[str, ...] = (), **decoder: Any) -> ModelFiles:
    config = {"model": {"decoder": decoder}}
    return ModelFiles(Path("/m/model.onnx"), Path("/m"), config, {}, "/m", pipeline=pipeline)


def test_one_graph_runs_on_onnxruntime() -> None:
    assert choose_runtime(EngineConfig(), files())[0] == "onnxruntime"
    window = {"window_size": 16, "slide_key_value_cache": False, "slide_inputs": False, "layers": [0]}
    assert choose_runtime(EngineConfig(), files(sliding_window=window))[0] == "onnxruntime"


def test_pipeline_runs_on_genai_and_the_reason_names_its_graphs() -> None:
    runtime, origin = choose_runtime(EngineConfig(), files(("embeddings", "lm_head")))
    assert runtime == "genai"
    assert origin.startswith("auto: ")
    assert "embeddings, lm_head" in origin


def test_inputs_of_fixed_length_run_on_genai() -> None:
    static = files(sliding_window={"window_size": 64, "pad_value": 0, "alignment": "left"})
    assert input_window(static) == 64
    origin = "auto: genai_config.json feeds the decoder windows of 64 tokens"
    assert choose_runtime(EngineConfig(), static) == ("genai", origin)


@pytest.mark.parametrize("runtime", ["onnxruntime", "genai"])
def test_setting_wins(runtime: Any) -> None:
    config = EngineConfig(runtime=runtime)
    assert choose_runtime(config, files()) == (runtime, "engine.runtime")
    assert choose_runtime(config, files(("a", "b"))) == (runtime, "engine.runtime")


def test_refused_graph_of_a_genai_package_is_told_the_other_runtime() -> None:
    refusal = ModelError("input 'x' is not supported yet")
    assert "'engine.runtime' = \"genai\"" in str(suggest_genai(refusal, files()))
    plain = ModelFiles(Path("/m/model.onnx"), Path("/m"), {}, {}, "/m")
    assert suggest_genai(refusal, plain) is refusal


def test_missing_genai_names_what_to_install() -> None:
    script = (
        "import sys; sys.modules['onnxruntime_genai'] = None\n"
        "from pathlib import Path\n"
        "from olive_ext.config import ModelSettings\n"
        "from olive_ext.engine.runners.genai.genai_runner import open_genai_runner\n"
        "from olive_ext.model import ModelFiles, Provider, ResolvedModel\n"
        "files = ModelFiles(Path('m.onnx'), Path('.'), {'model': {'decoder': {'filename': 'm.onnx'}}}, {}, '.')\n"
        "settings, came_up = ModelSettings(model='m.onnx'), (Provider('CPUExecutionProvider', 'cpu'),)\n"
        "open_genai_runner(ResolvedModel(settings, 'onnx', '', files, came_up=came_up))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "ProviderError: this model needs onnxruntime-genai" in done.stderr
    assert "olive-ext[cpu] or olive-ext[gpu]" in done.stderr

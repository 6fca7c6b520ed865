"""The registry of runtimes: which one "auto" takes, and a runtime that another package brings."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import olive_ext
from olive_ext.config import EngineConfig, ModelSettings
from olive_ext.engine.engine import open_runner
from olive_ext.engine.runners.genai_runner import open_genai_runner
from olive_ext.errors import ConfigError, ModelError, ProviderError
from olive_ext.model import ResolvedModel
from olive_ext.model.providers.devices import Provider
from olive_ext.model.providers.table import CPU
from olive_ext.model.runtimes import choose, refuse_settings, with_alternative
from olive_ext.model.types import ModelFiles
from olive_ext.registry import plugins
from tests.model.tiny import put_graph
from tests.refusals import refused
from tests.session.tiny import byte_level

TOY = '''
from dataclasses import replace

import numpy as np

from olive_ext.engine.runners.runner import Capacity, OpenedRunner, Runner, Traits
from olive_ext.engine.step import StepOutput
from olive_ext.model.decisions import Decision
from olive_ext.model.runtimes import Runtime

VOCAB = 512


class UniformRunner(Runner):
    """Every token is as probable as any other."""

    capacity, host_bytes = Capacity(num_slots=1), 0

    def run(self, step):
        logits_RV = np.zeros((len(step.logits_rows), VOCAB), np.float32)
        logprobs_T = np.full(len(step.targets), -np.log(VOCAB), np.float32)
        greedy_R = np.zeros(len(step.logits_rows), np.int64)
        return StepOutput(logprobs_T, greedy_R, logits_RV[list(step.samples)], logits_RV)

    def reserve(self, positions, cells=0):
        self.capacity = self.capacity._replace(positions=positions)

    def release_memory(self):
        self.capacity = Capacity(num_slots=1)

    def describe(self):
        return {"runtime": "toy", "num_slots": 1, "batching": self.traits.form.name}

    def close(self):
        pass


class Toy(Runtime):
    name = "toy"

    def decisions(self, model):
        yield Decision("num_slots", 1, "a toy has one")

    def open(self, model):
        return OpenedRunner(UniformRunner(Traits(context_length=64)), 16)
'''

PLUGIN = """
from olive_ext.registry import Plugin

plugin = Plugin(runtimes={"toy": "olive_ext_toy:Toy"})
"""


def resolved(
    settings: EngineConfig, pipeline: tuple[str, ...] = (), kind: Any = "onnx", **decoder: Any
) -> ResolvedModel:
    config = {"model": {"decoder": decoder}}
    files = ModelFiles(Path("/m/model.onnx"), Path("/m"), config, {}, "/m", pipeline=pipeline)
    return ResolvedModel(ModelSettings(model="/m", engine=settings), kind, "by the files", files)


FIXED = {"window_size": 64, "pad_value": 0, "alignment": "left"}
SLIDING = {"window_size": 16, "slide_key_value_cache": False, "slide_inputs": False, "layers": [0]}


@pytest.mark.parametrize(
    ("pipeline", "decoder", "expected"),
    [
        ((), {}, ("onnxruntime", "auto: the decoder is one graph")),
        ((), {"sliding_window": SLIDING}, ("onnxruntime", "auto: the decoder is one graph")),
        ((), {"sliding_window": FIXED}, ("genai", "auto: genai_config.json feeds the decoder windows of 64 tokens")),
        (("embeddings", "lm_head"), {}, ("genai", "auto: genai_config.json makes the decoder of a pipeline of graphs")),
    ],
    ids=["one graph", "sliding window", "inputs of fixed length", "pipeline"],
)
def test_auto_follows_the_package_and_says_why(
    pipeline: tuple[str, ...], decoder: dict[str, Any], expected: tuple[str, str]
) -> None:
    runtime, reason = choose(resolved(EngineConfig(), pipeline, **decoder))
    assert runtime.name == expected[0]
    assert reason.startswith(expected[1])
    assert all(name in reason for name in pipeline)


def test_refused_graph_of_a_genai_package_is_told_the_other_runtime() -> None:
    refusal = ModelError("input 'x' is not supported yet")
    assert "'engine.runtime' = \"genai\"" in str(with_alternative(refusal, resolved(EngineConfig()).files))
    plain = ModelFiles(Path("/m/model.onnx"), Path("/m"), {}, {}, "/m")
    assert with_alternative(refusal, plain) is refusal


@pytest.fixture(autouse=True)
def _plugins_found_anew() -> Iterator[None]:
    yield
    plugins.cache_clear()


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str, code: str) -> None:
    """What pip leaves of a package with a runtime, a plug-in and an entry point: all lie in a folder on the path."""
    (folder / f"{module}.py").write_text(code)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[olive_ext.plugins]\n{module} = {module}_plugin:plugin\n")
    made = PLUGIN.replace("olive_ext_toy", module).replace('"toy"', f'"{name}"')
    (folder / f"{module}_plugin.py").write_text(made)
    monkeypatch.syspath_prepend(str(folder))
    plugins.cache_clear()


def test_runtime_of_another_package_is_used_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("package", "model"):
        (tmp_path / folder).mkdir()
    install(tmp_path / "package", monkeypatch, "toy", "olive_ext_toy", TOY)
    put_graph(tmp_path / "model" / "model.onnx")
    byte_level().hf.save_pretrained(tmp_path / "model")
    with olive_ext.open(tmp_path / "model", engine={"runtime": "toy"}) as session:
        (output,) = session.loglikelihood([("the cat", " sat")])
        facts = session.describe_execution()
    assert output.logprob == pytest.approx(-output.token_count * math.log(512), rel=1e-6)
    assert (facts["runtime"], facts["num_slots"]) == ("toy", 1)
    assert choose(resolved(EngineConfig()))[0].name == "onnxruntime"  # "auto" chooses as without it


@pytest.mark.parametrize(
    ("name", "code", "holds"),
    [
        ("broken", "raise RuntimeError('no driver')\n", "engine.runtime"),
        ("leaving", "raise SystemExit('no driver')\n", "no driver"),
        ("other", "class Toy:\n    name = 'other'\n", "olive_ext.model.runtimes.Runtime"),
    ],
)
def test_runtime_that_cannot_be_loaded_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: Any, code: str, holds: str
) -> None:
    """One that fails or ends the process when it is imported, and a class that is no runtime."""
    install(tmp_path, monkeypatch, name, f"olive_ext_{name}", code)
    with refused(ConfigError, "wrong_value", holds=(f"olive_ext_{name}:Toy", holds)):
        choose(resolved(EngineConfig(runtime=name)))


def test_name_of_two_packages_is_refused_whichever_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("olive_ext_one", "olive_ext_two"):
        install(tmp_path, monkeypatch, "twofold", module, TOY)
    with refused(ConfigError, "wrong_value", holds=("plug-in 'olive_ext_", "twofold")):
        choose(resolved(EngineConfig(runtime="twofold")))


@pytest.mark.parametrize("method", ["decisions", "open", "refuse", "opens something else"])
def test_runtime_that_fails_later_is_named_with_what_it_was_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    name = f"failing_{method.split()[0]}"
    code, holds = TOY.replace('"toy"', f'"{name}"'), ("n_ctx", name, method)
    if method in name:
        code += f"\n    def {method}(self, model, *others):\n        raise KeyError('n_ctx')\n"
    else:
        code, holds = code.replace("OpenedRunner(Uni", "(Uni"), ("engine.runtime", name, "tuple")
    install(tmp_path, monkeypatch, name, f"olive_ext_{name}", code)
    model = resolved(EngineConfig(runtime=name))
    with refused(ModelError, "unsupported", holds=holds):
        model.decisions if method == "decisions" else open_runner(model)


def test_setting_that_the_named_runtime_does_not_follow_is_refused_with_those_that_it_takes() -> None:
    taken = "chunk_size, num_slots, num_threads, session_options"
    with pytest.raises(ConfigError) as caught:
        refuse_settings(resolved(EngineConfig(runtime="genai", scoring="rows")))
    why = f"changes nothing on 'genai' (engine.runtime), which takes {taken}: leave it out"
    assert str(caught.value) == f"'engine.scoring' = \"rows\" {why}"
    followed = EngineConfig(runtime="genai", chunk_size=64, num_threads=1, shapes="auto")
    assert refuse_settings(resolved(followed)) == []


def test_missing_genai_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime_genai", None)
    on_cpu = replace(resolved(EngineConfig(), filename="model.onnx"), session_providers=(Provider(CPU, "cpu"),))
    with refused(ProviderError, "provider", holds=("onnxruntime-genai", "'.[cpu]' in a clone")):
        open_genai_runner(on_cpu)

"""What Olive hands over, in this package's own words."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from olive.hardware.accelerator import Device
from olive.model import (
    CompositeModelHandler,
    DistributedOnnxModelHandler,
    HfModelHandler,
    ModelConfig,
    ONNXModelHandler,
)

import olive_ext
from olive_ext.config import EvaluationConfig, EvaluationSettings
from olive_ext.errors import ConfigError, ModelError, RunError
from olive_ext.model import resolve
from olive_ext.report import Report
from olive_ext.session.opening import open_model
from olive_ext.session.requests import ScoringRequest
from olive_ext.workflow.current_run import Run, running
from olive_ext.workflow.evaluator import measure
from olive_ext.workflow.handlers import (
    as_loaded,
    handler_of,
    label,
    name_of,
    onnx_config,
    text_decoder,
    torch_device,
)
from tests.backends.local_tasks import write_tasks
from tests.exports import genai_export, hf_model
from tests.exports.media import media_export
from tests.families.pictures import picture
from tests.refusals import refused
from tests.workflow.recipes import Evaluate


def settings(**values: Any) -> EvaluationSettings:
    return EvaluationSettings.parse({"tasks": ["t"], **values})


@pytest.fixture(scope="module")
def package() -> Path:
    return genai_export("llama")


def handler(path: Path, **more: Any) -> ONNXModelHandler:
    return ONNXModelHandler(str(path), **more)


def test_inference_settings_go_before_olives_provider_and_behind_the_recipes(package: Path) -> None:
    inference = {
        "execution_provider": ["CUDAExecutionProvider"],
        "provider_options": [{"device_id": "1"}],
        "session_options": {"intra_op_num_threads": 3, "extra_session_config": {"a": "1", "b": "2"}},
    }
    model = handler(package, inference_settings=inference)
    config = onnx_config(model, settings(engine={"session_options": {"b": "3"}}), "CPUExecutionProvider")
    assert config.execution_provider == ["CUDAExecutionProvider"]
    assert config.provider_options == [{"device_id": "1"}]
    assert config.engine.num_threads == 3
    assert config.engine.session_options == {"a": "1", "b": "3"}
    own = onnx_config(model, settings(execution_provider="cpu"), "CPUExecutionProvider")
    assert (own.execution_provider, own.provider_options) == ("cpu", None)


def test_composite_models_decoder_is_the_component_with_logits_wherever_it_lies(package: Path, tmp_path: Path) -> None:
    """Beside others in a folder of its own; in one folder, by genai_config.json."""
    other, root = tmp_path / "embedding", tmp_path / "root"
    other.mkdir()
    shutil.copytree(package, root)
    for graph in (other / "model.onnx", root / "embedding.onnx"):
        _no_logits(graph)
    kind, decoder = handler_of(CompositeModelHandler([handler(other), handler(package)], ["embedding", "anything"]))
    assert (kind, Path(decoder.model_path)) == ("onnx", package / "model.onnx")
    parts = [handler(root, onnx_file_name=name) for name in ("embedding.onnx", "model.onnx")]
    model = CompositeModelHandler(parts, ["embedding", "model"], model_path=str(root))
    assert Path(text_decoder(model).model_path) == root / "model.onnx"


def test_component_beside_the_decoder_stands_for_the_package_around_it() -> None:
    """A recipe that quantizes an encoder alone names nothing else; the rest travels along."""
    package = Path(__file__).resolve().parents[2] / "recipes" / "vision" / "model"
    model = CompositeModelHandler([handler(package / "vision_encoder")], ["vision_encoder"], model_path=str(package))
    assert Path(text_decoder(model).model_path) == package / "decoder" / "model.onnx"


@pytest.mark.parametrize("name", ["vision_encoder", "component_2"])
def test_composite_models_other_components_are_run_for_pictures(tmp_path: Path, name: str) -> None:
    source, _ = media_export("llava")
    names = {"decoder": "decoder", "embedding": "component_1", "vision_encoder": name}
    for place, folder in enumerate(names):
        shutil.copytree(source / folder, tmp_path / f"part{place}")
    extra = [str(file) for file in source.glob("*.json") if file.name != "genai_config.json"]
    parts = [handler(tmp_path / f"part{place}") for place in range(3)]
    model = CompositeModelHandler(parts, [*names.values()], model_attributes={"additional_files": extra})
    kind, decoder = handler_of(model)
    config = onnx_config(decoder, settings(), None)
    assert (kind, config.model.components["vision"]) == ("onnx", str(tmp_path / "part2" / "model.onnx"))
    asked = ScoringRequest("Ann sees the <image> and", " blue stone", images=[picture(0, 40, 40)])
    with open_model(resolve(config.opening())) as session, olive_ext.open(source) as package:
        assert session.loglikelihood([asked]) == package.loglikelihood([asked])


def test_composite_model_whose_names_contradict_its_graphs_or_without_a_decoder_is_refused(tmp_path: Path) -> None:
    source, _ = media_export("llava")
    parts = [handler(source / folder) for folder in ("decoder", "embedding", "vision_encoder")]
    model = CompositeModelHandler(parts, ["decoder", "vision_encoder", "embedding"])
    with refused(ModelError, "unsupported", holds="vision_encoder"):
        handler_of(model)
    _no_logits(tmp_path / "model.onnx")
    with refused(ModelError, "unsupported", holds="vision"):
        text_decoder(CompositeModelHandler([handler(tmp_path)], ["vision"]))


def test_other_handlers_are_refused_by_name(package: Path) -> None:
    model = DistributedOnnxModelHandler(str(package), "model.onnx", 1)
    with refused(ModelError, "unsupported", holds=("DistributedOnnxModelHandler", "HfModelHandler, ONNXModelHandler")):
        measure(model, settings(), evaluate=Evaluate())


def test_baseline_runs_on_olives_device_and_on_the_cpu_for_an_npu() -> None:
    assert torch_device(None, Device.CPU) == "cpu"
    assert torch_device(None, Device.NPU) == "cpu"
    assert torch_device("cpu", Device.GPU) == "cpu"
    with refused(ConfigError, "unknown_name", "device", "gpux"):
        torch_device("gpux", Device.CPU)


def test_plain_baseline_goes_the_references_way_and_a_changed_one_as_the_handler_loads_it() -> None:
    fake, path = Evaluate(), str(hf_model("llama"))
    measure(HfModelHandler(path), settings(), device=Device.CPU, evaluate=fake)
    assert fake.lms == [None]
    assert (fake.configs[0].model.path, fake.configs[0].device) == (path, "cpu")
    dtypes = []

    def loaded(config: EvaluationConfig, **given: Any) -> Report:
        folder = Path(config.model.path)
        dtypes.append(json.loads((folder / "config.json").read_text())["dtype"])
        assert (folder / "tokenizer.json").is_file()
        return fake(config, **given)

    measure(HfModelHandler(path, load_kwargs={"dtype": "bfloat16"}), settings(), device=Device.CPU, evaluate=loaded)
    assert dtypes == ["bfloat16"]
    assert not Path(fake.configs[1].model.path).exists()


def test_input_model_against_itself_is_held_to_no_bound_on_its_loss(tmp_path: Path) -> None:
    path, tasks = str(hf_model("llama")), str(write_tasks(tmp_path / "tasks"))
    given = {"tasks": ["tiny_choice"], "include_path": tasks, "reference": path, "fail_on_loss": 1}
    report = measure(HfModelHandler(path), EvaluationSettings.parse(given), device=Device.CPU)
    assert report.comparison is None
    assert report.broken == ()


class Adapted:
    """A handler and the model that it loads, which has an adapter that is saved only once it is merged in."""

    model_name_or_path = "m"

    def __init__(self, fault: str = "") -> None:
        self.fault = fault

    def load_model(self, cache_model: bool) -> Any:
        return SimpleNamespace(merge_and_unload=lambda: self)

    def get_hf_tokenizer(self) -> Any:
        return SimpleNamespace(save_pretrained=lambda folder: (Path(folder) / "tokenizer.json").write_text("{}"))

    def save_pretrained(self, folder: str) -> None:
        if self.fault:
            raise ValueError(self.fault)
        (Path(folder) / "merged").touch()


def test_adapters_are_merged_in_and_what_cannot_be_saved_is_named() -> None:
    with as_loaded(Adapted()) as folder:
        assert sorted(path.name for path in Path(folder).iterdir()) == ["merged", "tokenizer.json"]
    with refused(ModelError, "unsupported", holds="4"):
        as_loaded(Adapted("4 bits")).__enter__()


@pytest.mark.parametrize(
    "error", [RuntimeError("out of memory"), KeyError("x"), OSError("disk"), NotImplementedError()]
)
def test_every_failure_is_an_error_that_olive_raises(package: Path, error: Exception) -> None:
    with refused(RunError, "failed") as raised:
        measure(handler(package), settings(), evaluate=Evaluate(error))
    assert raised.value.__cause__ is error


def test_each_model_has_its_own_folder_of_reports(package: Path, tmp_path: Path) -> None:
    fake = Evaluate()
    measure(handler(package), settings(output_dir=str(tmp_path), sample_log_dir="logs"), evaluate=fake)
    assert fake.configs[0].output_dir == str(tmp_path / package.name)
    assert fake.configs[0].sample_log_dir == str(Path("logs") / package.name)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("cache/default_workflow/runs/1a2b3c4d/models", "1a2b3c4d"),
        ("cache/default_workflow/runs/1a2b3c4d/models/model.onnx", "1a2b3c4d"),
        ("cache/default_workflow/runs/1a2b3c4d/models/decoder/model.onnx", "1a2b3c4d"),
        ("models/phi", "phi"),
        ("models/phi/model.onnx", "phi"),
        ("models/phi/decoder_int4.onnx", "decoder_int4"),
        ("meta-llama/Llama-3.2-1B", "Llama-3.2-1B"),
    ],
)
def test_label_is_olives_model_id_or_the_last_name(path: str, expected: str) -> None:
    assert label(path) == expected


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    (tmp_path / "float").mkdir()
    begun = Run(ModelConfig(type="HfModel", config={"model_path": str(tmp_path / "float")}))
    begun.made_by["1a2b"], begun.types["int4"] = ("int4",), "ModelBuilder"
    token = running.set(begun)
    yield begun
    running.reset(token)


def test_models_of_a_workflow_are_called_by_what_was_done_to_them(run: Run, tmp_path: Path) -> None:
    made, given = "cache/w/runs/1a2b/models", str(tmp_path / "float")
    assert (label(made), name_of(made)) == ("int4", "ModelBuilder int4")
    assert (label(given), name_of(given)) == ("input_model", "input model")
    assert (label("elsewhere"), name_of("elsewhere")) == ("elsewhere", None)
    run.is_search = True
    assert (label(made), label(given)) == ("1a2b", "input_model")


def _no_logits(path: Path) -> None:
    from onnx import TensorProto, helper, save

    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", value[:1], value[1:])
    save(helper.make_model(graph), str(path))

"""What is added to Olive's engine, on an engine that does nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from olive.engine.config import RunPassConfig
from olive.engine.footprint import Footprint, FootprintNodeMetric
from olive.evaluator.olive_evaluator import OliveEvaluatorConfig
from olive.hardware.accelerator import AcceleratorSpec
from olive.model import ModelConfig
from olive.package_config import OlivePackageConfig
from olive.resource_path import create_resource_path

from olive_ext.check import check_recipe
from olive_ext.check.recipe import Passes, plain_path
from olive_ext.config import EVALUATOR_TYPE
from olive_ext.config.pass_options import pass_parameters
from olive_ext.errors import (
    ConfigError,
    MismatchError,
    ModelError,
    OliveExtError,
    RequirementError,
    RunError,
    TaskError,
)
from olive_ext.report import Report
from olive_ext.report.comparison import Comparison
from olive_ext.workflow.current_run import Run, evaluate_in_environment, running
from olive_ext.workflow.evaluator import to_metric_result
from olive_ext.workflow.olive_run import watched_runs
from olive_ext.workflow.preflight import FINGERPRINT
from olive_ext.workflow.registration import hook_engine, parse_recipe, register
from tests.exports import genai_export, hf_model
from tests.mistakes.recipes import with_value
from tests.mistakes.table import BLOCKS
from tests.model.tiny import put_graph, put_tokenizer
from tests.refusals import refused
from tests.run.reference.test_drawn_numbers import sampled_report
from tests.workflow.recipes import REPORT, Measure, saved
from tests.workflow.test_passes import make

PASSES = ("ModelBuilder", "OnnxConversion", "OnnxDynamicQuantization", "OnnxBlockWiseRtnQuantization", "GraphSurgeries")
"""Passes with parameters of their own, of functions, of module constants that are copied and updated, and of bases."""


@pytest.mark.parametrize("kind", PASSES)
def test_parameters_in_source_are_those_of_the_class(kind: str) -> None:
    imported = OlivePackageConfig.load_default_config().import_pass_module(kind)
    expected = imported.default_config(AcceleratorSpec("cpu", "CPUExecutionProvider"))
    assert {*pass_parameters(Passes().module(kind))} == {*expected}


def test_parameters_of_a_module_that_is_no_package_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = 'class Own:\n    def _default_config(cls, spec):\n        return {"size": PassConfigParam(type_=int)}\n'
    (tmp_path / "own_passes.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert {*pass_parameters("own_passes.Own")} == {"size"}


class Target:
    def __init__(self, kind: str = "LocalSystem") -> None:
        self.type = kind

    def to_json(self) -> dict[str, Any]:
        return {"type": self.type}


class Output:
    def __init__(self, has_model: bool, metrics: Any) -> None:
        self._has_model, self._metrics = has_model, metrics

    def has_output_model(self) -> bool:
        return self._has_model

    def get_input_model_metrics(self) -> Any:
        return self._metrics


class FakeEngine:
    """The methods of Olive's engine: evaluates once for each model id, and swallows like Olive."""

    target_config = Target()
    host_config = None
    olive_config = OlivePackageConfig.load_default_config()
    input_passes_configs: dict[str, Any] = {}  # noqa: RUF012 - as in Olive
    search_strategy = None

    def __init__(self, evaluator: Any = None, error: Exception | None = None) -> None:
        self.evaluator_config, self.error = evaluator, error
        self.cache = SimpleNamespace(dirs=SimpleNamespace(evaluations=Path("cache", "evaluations")))
        self.known: dict[str, Any] = {}
        self.num_evaluations = 0

    def initialize(self) -> None:
        for metric in self.evaluator_config.metrics:
            metric.name = str(Path(metric.name).resolve())

    def run(self, input_model_config: Any, evaluate_input_model: bool = True) -> Output:
        self.input_model = input_model_config
        self.initialize()
        try:
            signal = self._evaluate_model(input_model_config, "id", self.evaluator_config, None)
        except OliveExtError:
            signal = None
        return Output(False, signal)

    def _evaluate_model(self, model_config: Any, model_id: str, evaluator_config: Any, spec: Any) -> Any:
        signal = self._load_evaluation(model_id)
        if signal is None:
            if self.error is not None:
                raise self.error
            self.num_evaluations += 1
            signal = self.num_evaluations
            if (run := running.get()) is not None:
                run.reports.append(Report((), created=str(signal)))
            self._cache_evaluation(model_id, signal)
        return signal

    def _load_evaluation(self, model_id: str) -> Any:
        return self.known.get(model_id)

    def _cache_evaluation(self, model_id: str, signal: Any) -> None:
        self.known[model_id] = signal

    def _run_pass(self, pass_name: str, input_model_config: Any, input_model_id: str, spec: Any) -> Any:
        raise NotImplementedError

    def resolve_goals(self, model_config: Any, model_id: str, metrics: Any, spec: Any) -> dict[str, float]:
        return {}


def new_engine() -> Any:
    """A class of its own, since hooks stay."""
    kind: Any = type("Engine", (), dict(vars(FakeEngine)))
    hook_engine(kind)
    return kind


def ours(**settings: Any) -> Any:
    return OliveEvaluatorConfig(type=EVALUATOR_TYPE, name="e", **{"tasks": ["arc_easy"], **settings})


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    return ModelConfig(type="HfModel", config={"model_path": str(tmp_path)})


def evaluate(engine: Any, model: ModelConfig, evaluator: Any) -> Any:
    return engine._evaluate_model(model, "id", evaluator, None)


def test_evaluation_of_ours_is_made_anew_and_leaves_olives_cache_alone(model: ModelConfig) -> None:
    """It is known by the model's id: a verdict on other data, code or settings was taken from it four times."""
    engine = new_engine()()
    assert [evaluate(engine, model, ours()) for _ in range(2)] == [1, 2]
    assert engine.known == {}
    others = OliveEvaluatorConfig(type="LMEvaluator", tasks=["t"])
    assert [evaluate(engine, model, others) for _ in range(2)] == [3, 3]
    assert evaluate(engine, model, ours()) == 4


@pytest.mark.parametrize("place", ["file", "folder", "checkpoint"])
def test_pass_notices_changed_weights(place: str, tmp_path: Path) -> None:
    """Of their size and time, as of a model that a pass has left in Olive's cache: the id stays."""
    copy = tmp_path / "model"
    shutil.copytree(hf_model("llama") if place == "checkpoint" else genai_export("llama"), copy)
    kind = "HfModel" if place == "checkpoint" else "ONNXModel"
    model = ModelConfig(type=kind, config={"model_path": str(copy / "model.onnx" if place == "file" else copy)})
    file = copy / ("model.safetensors" if place == "checkpoint" else "model.onnx.data")
    weights, facts = bytearray(file.read_bytes()), file.stat()
    measuring = make(Measure()).config  # a pass that measures the model
    token = running.set(Run(model))
    before = measuring.to_json()
    weights[-1] ^= 1
    file.write_bytes(weights)
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    after = measuring.to_json()
    running.reset(token)
    assert after.pop(FINGERPRINT) != before.pop(FINGERPRINT)
    assert after == before


def test_second_mending_changes_nothing(model: ModelConfig) -> None:
    kind = new_engine()
    before = dict(vars(kind))
    hook_engine(kind)
    assert dict(vars(kind)) == before


def test_evaluator_of_a_pass_may_be_a_name() -> None:
    from olive.workflows.run.config import RunConfig

    recipe = {
        "input_model": {"type": "HfModel", "model_path": "owner/name"},
        "evaluators": {"mine": {"type": EVALUATOR_TYPE, "tasks": ["t"]}},
        "passes": {"q": {"type": "OnnxKQuantQuantization", "evaluator": "mine"}},
    }
    (config,) = RunConfig.model_validate(recipe).passes["q"]
    assert config.evaluator.type_args == {"tasks": ["t"]}


def test_composite_model_is_sent_to_the_pass() -> None:
    model = ModelConfig(type="CompositeModel", config={"model_components": [], "model_component_names": []})
    with refused(ModelError, "unsupported", holds="OrtLMEvaluation"):
        evaluate(new_engine()(), model, ours())


def test_what_olive_would_swallow_becomes_an_error_of_ours_a_failed_process_by_its_last_line(
    model: ModelConfig,
) -> None:
    died = subprocess.CalledProcessError(1, ["python"], stderr="Traceback\nTaskError: unknown task 't'\n")
    for error, told in (
        (RuntimeError("subprocess died"), "RuntimeError: subprocess died"),
        (died, "TaskError: unknown task 't'"),
    ):
        with refused(RunError, "failed", holds=told):
            evaluate(new_engine()(error=error), model, ours())


def test_process_of_a_python_environment_gets_a_script_that_imports_us(model: ModelConfig) -> None:
    evaluator, engine = ours(), new_engine()
    engine.target_config = Target("PythonEnvironment")
    engine(evaluator).run(model)
    assert "import olive_ext.workflow" in Path(evaluator.user_script).read_text()


@pytest.mark.parametrize("makes_report", [True, False])
def test_report_of_a_python_environments_process_is_one_of_the_workflow(
    makes_report: bool, model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss without a folder of reports ended well."""

    def process() -> str:
        token = running.set(None)
        monkeypatch.setenv("OLIVE_EXT_RUN", system.environ["OLIVE_EXT_RUN"])
        register()  # as a user's own script does: the verdict of its process was lost
        there = running.get()
        running.reset(token)
        assert (there.input_model, there.made_by, there.current) == (model, {"m": ["q"]}, ["q"])
        if makes_report:
            there.add(REPORT)
        return "signal"

    system = SimpleNamespace(environ={"A": "b"})
    token = running.set(run := Run(model, made_by={"m": ("q",)}, current=("q",)))
    try:
        assert evaluate_in_environment(system, {}, process) == "signal"
    finally:
        running.reset(token)
    assert run.reports == [REPORT][:makes_report]
    assert system.environ == {"A": "b"}


def test_mistakes_beyond_one_table_are_refused_all_at_once(model: ModelConfig) -> None:
    with refused(ConfigError, "unknown_key", "evalutor", "ours", holds="evaluator"):
        parse_recipe(None, {"file_or_obj": {"evalutor": "ours"}}, lambda **_: None)
    engine = new_engine()
    engine.input_passes_configs = {"m": [RunPassConfig(type="Foo")]}
    with refused(ConfigError, "unknown_name", "passes.m.type", "foo"):
        engine().run(model)
    engine.input_passes_configs = {"q": [RunPassConfig(type="OnnxKQuantQuantization", config={"block_sise": 32})]}
    with refused(ConfigError, "unknown_key", "evaluators.e.limts", 1, holds="passes.q.block_sise"):
        engine(ours(limts=1)).run(model)


@pytest.mark.parametrize(
    ("path", "value", "code"),
    [  # but for types and scripts, which Olive refuses itself
        (*at, code)
        for at, code, *below in BLOCKS
        if not at[0].endswith(("ours.type", "user_script")) and below[:1] != [".type"]
    ],
)
def test_check_and_olives_engine_tell_the_same_mistake(tmp_path: Path, path: str, value: Any, code: str) -> None:
    recipe = with_value(path, value)
    (known,) = check_recipe(saved(tmp_path, recipe)).errors
    kind = new_engine()
    kind.input_passes_configs = {name: [RunPassConfig(**keys)] for name, keys in recipe["passes"].items()}
    engine = kind(OliveEvaluatorConfig(name="ours", **recipe["evaluators"]["ours"]))
    with refused(OliveExtError, code, known.field) as raised:
        engine.run(ModelConfig(type="HfModel", config={"model_path": recipe["input_model"]["model_path"]}))
    assert str(raised.value).lower() == str(known).lower()  # Olive's types of passes are in lower case
    assert engine.num_evaluations == 0


def test_run_that_swallowed_our_failure_raises_it(model: ModelConfig) -> None:
    engine = new_engine()(ours(), TaskError("unknown task 't'"))
    with watched_runs() as outcomes, pytest.raises(TaskError, match="unknown task 't'"):
        engine.run(model)
    assert [outcome.gave_up for outcome in outcomes] == [True]


def test_reference_that_changes_in_the_run_is_refused(model: ModelConfig, tmp_path: Path) -> None:
    file = put_graph(put_tokenizer(tmp_path / "float") / "model.onnx")
    kind, reference = new_engine(), str(file.parent)
    kind.initialize = lambda self: file.write_bytes(b"another model")
    with refused(MismatchError, "contradiction", "reference", reference, holds=str(file)):
        kind(ours(reference=reference)).run(model)


def test_metric_names_that_olive_made_paths_of_are_put_right(
    model: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t").mkdir()
    monkeypatch.chdir(tmp_path)
    sub_types = [{"name": "accuracy_score", "priority": 1}]
    engine = new_engine()(ours(metrics=[{"name": "t", "type": "accuracy", "sub_types": sub_types}]))
    engine.initialize()
    assert engine.evaluator_config.metrics[0].name == "t"


@pytest.mark.parametrize(
    ("kind", "path"), [("HfModel", "recipes/quickstart/modle"), ("ONNXModel", "model.onnx"), ("HfModel", "/nowhere")]
)
def test_run_refuses_a_model_path_that_does_not_exist(kind: str, path: str) -> None:
    with refused(ModelError, "not_found", "input_model.model_path", holds=(f"{path}",)):
        new_engine()(ours()).run(ModelConfig(type=kind, config={"model_path": path}))


@pytest.mark.parametrize(
    "path",
    [
        *({"type": kind, "config": {"path": name}} for kind in ("File", "folder", "local_file") for name in "fdg"),
        *({"type": "string_name", "config": {key: "a/b"}} for key in ("name", "path")),
        {"type": "azureml_registry_model", "registry_name": "r", "name": "m", "version": 1},
        {"type": "azureml_registry_model", "registry_name": "r", "name": "m"},
        *({"type": "folder", "path": "d"}, {"path": "d"}, {"type": "folder"}, {"type": 3, "path": "d"}, ["d"], 3),
    ],
)
def test_mapping_of_a_model_path_is_what_olive_makes_of_it(
    path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "f").touch()
    monkeypatch.chdir(tmp_path)
    try:
        found = create_resource_path(path).get_path()
    except Exception:  # noqa: BLE001 - of any kind
        with pytest.raises(OliveExtError):
            plain_path(path)
    else:
        plain = plain_path(path)
        assert plain is path if "azureml" in found else found in (plain, str(Path(plain).resolve()))
        engine = new_engine()(ours())
        engine.run(ModelConfig(type="HfModel", config={"model_path": path}))
        assert engine.input_model.config["model_path"] == plain


def test_run_that_evaluates_nothing_is_refused(model: ModelConfig) -> None:
    with refused(ConfigError, "contradiction", "evaluate_input_model", False):
        new_engine()(ours()).run(model, evaluate_input_model=False)


def test_run_without_our_types_is_left_alone() -> None:
    engine = new_engine()(OliveEvaluatorConfig(type="LMEvaluator", taskz=["t"]))
    engine.run(ModelConfig(type="HfModel", config={"model_path": "/nowhere"}))
    assert engine.num_evaluations == 1


def evaluated(
    evaluator: Any, *, is_search: bool = False, has_passes: bool = True, found: Comparison | None = None
) -> Any:
    """An engine that evaluates the input model and then one output model; the numbers and what is `found` are known."""

    class Engine(FakeEngine):
        input_passes_configs = {"q": [RunPassConfig(type="OnnxKQuantQuantization")]} if has_passes else {}
        search_strategy = "any" if is_search else None
        seen: list[str] = []  # noqa: RUF012 - of this engine alone

        def initialize(self) -> None: ...

        def run(self, input_model_config: Any, evaluate_input_model: bool = True) -> Output:
            made = ModelConfig(type=input_model_config.type, config=dict(input_model_config.config))
            for name, model in {"input": input_model_config, "output": made}.items():
                self._evaluate_model(model, name, self.evaluator_config, None)
                self.seen.append(name)
            return Output(True, 1)

        def _evaluate_model(self, model_config: Any, model_id: str, evaluator_config: Any, spec: Any) -> Any:
            signal = to_metric_result(REPORT)
            if found is not None and (run := running.get()) is not None:
                run.add(replace(REPORT, comparison=found))
            metrics = FootprintNodeMetric(value=signal, if_goals_met=False)
            self.footprint.record(model_id=model_id, parent_model_id="another", metrics=metrics)
            return signal

    hook_engine(Engine)
    engine = Engine(evaluator)
    engine.footprint = Footprint()
    return engine


GROUP = {"group": "g", "task": ["arc_easy"]}
STRICT = {"metric": "acc", "min": 0.75}


LOST: Any = {"verdict": "loss", "estimate": -0.03, "low": -0.06, "high": -0.01}


@pytest.mark.parametrize(
    "found",
    [
        sampled_report(**LOST).comparison,
        replace(sampled_report().comparison, certainty=None, damaged={"norm": "is missing"}),
    ],
    ids=["a broken claim", "damage"],
)
def test_candidate_that_no_bound_finds_is_out_of_a_search(found: Comparison, model: ModelConfig) -> None:
    """It was saved, and a sound one passed over: neither a claim nor damage is a bound of the evaluator's numbers."""
    engine = evaluated(ours(tasks=[GROUP]), is_search=True, found=found)
    with refused(RequirementError, "bound_broken", holds="loss"):
        engine.run(model)
    engine.footprint.create_pareto_frontier()
    assert engine.footprint.output_model_ids == ["input"]


def test_candidate_of_a_search_is_out_at_once_and_the_input_model_where_there_is_no_other(model: ModelConfig) -> None:
    engine = evaluated(ours(tasks=[GROUP], require=[STRICT]), is_search=True)
    with pytest.raises(RequirementError):
        engine.run(model)
    assert engine.seen == ["input"]  # which is not judged
    engine.footprint.create_pareto_frontier()  # the output was the smallest of all, one that is out, too
    assert engine.footprint.output_model_ids == ["input"]
    engine = evaluated(ours(tasks=[GROUP], require=[{"metric": "size_on_disk", "max": 1}]), has_passes=False)
    with refused(RequirementError, "bound_broken", holds=("size_on_disk/bytes", "1024")):
        engine.run(model)

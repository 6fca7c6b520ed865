"""The pass as Olive drives it, and what comes after each pass: the chain's table and the bounds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from olive.engine.config import RunPassConfig
from olive.evaluator.olive_evaluator import OliveEvaluatorConfig
from olive.model import ModelConfig, ONNXModelHandler
from olive.package_config import OlivePackageConfig
from olive.passes.olive_pass import create_pass_from_dict

from olive_ext.config import PASS_TYPE, EvaluationSettings
from olive_ext.errors import MismatchError, RequirementError, RunError
from olive_ext.report import Report, from_json, write
from olive_ext.report.comparison import Comparison
from olive_ext.report.verdict import Reason, worst_status
from olive_ext.workflow import OrtLMEvaluation, register
from olive_ext.workflow.current_run import Run, running
from olive_ext.workflow.olive_run import cli_run, deciding, note_ended, note_unmeasured, print_results
from olive_ext.workflow.passes import carried_reports, publish, run_pass
from olive_ext.workflow.preflight import FINGERPRINT, references
from olive_ext.workflow.registration import wrap_once
from tests.exports import genai_export
from tests.model.tiny import put_graph, put_tokenizer
from tests.refusals import refused
from tests.run.reference.test_drawn_numbers import certainty
from tests.workflow.recipes import REPORT, SIZE, Measure


def make(fake: Measure, **settings: Any) -> Any:
    class Faked(OrtLMEvaluation):
        measure = staticmethod(fake)

    return create_pass_from_dict(Faked, {"tasks": ["tiny_choice"], **settings}, disable_search=True)


@pytest.fixture
def model() -> ONNXModelHandler:
    package = genai_export("llama")
    files = [str(package / name) for name in ("genai_config.json", "tokenizer.json")]
    return ONNXModelHandler(str(package), model_attributes={"additional_files": files, "own": 1})


def names(handler: Any) -> list[str]:
    return [Path(file).name for file in handler.model_attributes["additional_files"]]


def test_settings_and_accelerator_reach_the_measurement(model: ONNXModelHandler, tmp_path: Path) -> None:
    """Size alone is measured without a run."""
    fake = Measure()
    make(fake, limit=3, engine={"num_slots": 2}).run(model, str(tmp_path))
    settings = fake.calls[0]["settings"]
    asked = ["tiny_choice", "size_on_disk", "tokens_per_second"]
    assert settings == EvaluationSettings.parse({"tasks": asked, "limit": 3, "engine": {"num_slots": 2}})
    assert str(fake.calls[0]["device"]) == "cpu"
    assert fake.calls[0]["execution_providers"] == "CPUExecutionProvider"
    make(fake, tasks=["size_on_disk"]).run(model, str(tmp_path))
    assert fake.calls[1]["settings"].tasks == ["size_on_disk"]


def test_parameters_are_the_settings() -> None:
    assert set(OrtLMEvaluation.parameters()) == {*EvaluationSettings.model_fields, FINGERPRINT}
    assert OrtLMEvaluation.parameters()["tasks"].required
    assert OrtLMEvaluation.parameters()["limit"].description.startswith("Documents per task")


def test_configuration_survives_the_trip_through_json() -> None:
    made = make(Measure(), engine={"num_slots": 2}, execution_provider=["cpu"])
    again = create_pass_from_dict(OrtLMEvaluation, made.config.to_json(), disable_search=True)
    assert again.config.to_json() == made.config.to_json()


def test_cache_key_follows_no_bounds() -> None:
    low, high = (make(Measure(), require=[{"metric": "acc", "min": least}]).config for least in (0.1, 0.2))
    assert low.to_json() == high.to_json()
    assert [bound.min for bound in low.require + high.require] == [0.1, 0.2]


@pytest.mark.parametrize("type_name", [PASS_TYPE, PASS_TYPE.lower(), f"olive_ext.workflow.{PASS_TYPE}"])
@pytest.mark.parametrize("table", ["olives own", "a package config"])
def test_pass_is_found_with_and_without_a_package_config(type_name: str, table: str) -> None:
    register()
    own = {"passes": {"Mine": {"module_path": "mine.Mine"}}}
    config = OlivePackageConfig.load_default_config() if table == "olives own" else OlivePackageConfig(**own)
    assert config.get_pass_module_config(type_name).run_on_target is True
    assert config.import_pass_module(type_name) is OrtLMEvaluation
    with pytest.raises(ValueError, match="'nothing' not found"):
        config.get_pass_module_config("nothing")


def test_model_given_as_a_file_is_saved_with_its_external_data(tmp_path: Path) -> None:
    file = genai_export("llama") / "model.onnx"
    output = make(Measure()).run(ONNXModelHandler(str(file)), str(tmp_path))
    assert (Path(output.get_resource("model_path")), output.onnx_file_name) == (file.parent, "model.onnx")
    assert Path(output.model_path) == file


def test_files_that_travel_along_stay_where_they_are(tmp_path: Path) -> None:
    package = tmp_path / "users own"
    package.mkdir()
    (package / "model.onnx").touch()
    first = make(Measure()).run(ONNXModelHandler(str(package), "model.onnx"), str(tmp_path / "a"))
    make(Measure()).run(first, str(tmp_path / "b"))
    assert [path.name for path in package.iterdir()] == ["model.onnx"]


def ours(task: str, **settings: Any) -> OliveEvaluatorConfig:
    keys = {"tasks": [task], **settings}
    return OliveEvaluatorConfig.model_construct(name="e", type="OrtLMEvaluator", type_args=keys, metrics=[])


GATE, BY_GATE = ours("tiny_choice", fail_on_loss=0), "by 'evaluators.e', which has 'fail_on_loss'"
BOUND, BY_BOUND = ours("tiny_choice", require=["acc>=0.5"]), "by 'evaluators.e', which has 'require'"
BROKEN = [{"metric": "acc", "min": 0.75}, {"metric": "size_on_disk", "max": 1000}]


class Cache:
    """Olive's cache of one model; `saved` says where it was saved."""

    def __init__(self, model: ModelConfig) -> None:
        self.model, self.saved = model, []

    def load_model(self, model_id: str) -> Any:
        return {"type": self.model.type, "config": self.model.config}

    def save_model(self, *, model_id: str, output_dir: Path, overwrite: bool) -> None:
        output_dir.mkdir(parents=True, exist_ok=True)
        self.saved.append((model_id, output_dir))


def measured(folder: Path, *reports: Report) -> ModelConfig:
    """A model with the reports of earlier measurements in folders of their own."""
    files = []
    for number, report in enumerate(reports, 1):
        for path in write(report, folder / str(number)):
            own = path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")
            files.append(str(path.replace(own)))
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").touch()
    attributes = {"additional_files": [*files, str(folder / "tokenizer.json")]}
    return ModelConfig(type="ONNXModel", config={"model_path": str(folder), "model_attributes": attributes})


def report(*passes: str) -> Report:
    return replace(REPORT, model={"path": "m", "passes": list(passes)})


def engine_with(model: ModelConfig | str, passes: dict[str, RunPassConfig], error: Exception | None = None) -> Any:
    class FakeEngine:
        computed_passes_configs = passes
        olive_config = SimpleNamespace(
            get_pass_module_config=lambda name: SimpleNamespace(module_path=f"olive.passes.{name}")
        )
        evaluator_config, input_passes_configs = None, {}
        cache = Cache(model) if isinstance(model, ModelConfig) else None

        def _run_pass(self, pass_name: str, input_model_config: Any, input_model_id: str, spec: Any) -> Any:
            if error is not None:
                raise error
            return model, f"{input_model_id}+{pass_name}"

    wrap_once(FakeEngine, "_run_pass", run_pass)
    return FakeEngine()


def gate(*bounds: Any) -> RunPassConfig:
    return RunPassConfig(type=PASS_TYPE, config={"tasks": ["tiny_choice"], "require": list(bounds)})


@pytest.fixture
def run(tmp_path: Path) -> Any:
    begun = Run(ModelConfig(type="HfModel", config={"model_path": "m"}), tmp_path / "out")
    token = running.set(begun)
    yield begun
    running.reset(token)


def test_candidate_of_a_search_is_refused_without_leaving_files(run: Run, tmp_path: Path) -> None:
    run.is_search = True
    engine = engine_with(measured(tmp_path / "m", report()), {"g": gate(*BROKEN)})
    with pytest.raises(RequirementError):
        engine._run_pass("g", None, "in", None)
    assert engine.cache.saved == []
    assert not (tmp_path / "out").exists()


def test_failure_of_our_pass_is_kept_for_a_search_that_swallows_it(run: Run, tmp_path: Path) -> None:
    error = RunError("out of memory")
    with pytest.raises(RunError):
        engine_with("", {"m": gate()}, error)._run_pass("m", None, "in", None)
    assert run.failures == [error]


def test_pass_whose_reference_has_changed_in_the_run_is_refused(run: Run, tmp_path: Path) -> None:
    file = put_graph(put_tokenizer(tmp_path / "float") / "model.onnx")
    config = RunPassConfig(type=PASS_TYPE, config={"tasks": ["tiny_choice"], "reference": str(file.parent)})
    engine = engine_with(measured(tmp_path / "m", report()), {"g": config})
    engine.input_passes_configs = {"g": [config]}
    run.watch(reference for _, reference in references(engine))
    file.write_bytes(b"another model")
    with refused(MismatchError, "contradiction", "reference", str(file.parent), holds=str(file)):
        engine._run_pass("g", None, "in", None)


@pytest.mark.parametrize("gone", ["model_path", "additional_files", "model_components"])
def test_model_of_a_cache_that_lay_elsewhere_is_made_again(gone: str, run: Run, tmp_path: Path) -> None:
    """It ended in an AssertionError of Olive."""
    cached, lost = tmp_path / "model.json", str(tmp_path / "gone")
    cached.write_text("{}")
    part = {"type": "ONNXModel", "config": {"model_path": lost}}
    keys: dict[str, Any] = {
        "model_path": {"model_path": lost},
        "additional_files": {"model_path": str(tmp_path), "model_attributes": {"additional_files": [lost]}},
        "model_components": {"model_components": [part], "model_component_names": ["a"]},
    }
    kind = "CompositeModel" if gone == "model_components" else "ONNXModel"
    known, made = (ModelConfig(type=kind, config=config) for config in (keys[gone], {"model_path": str(tmp_path)}))

    def find() -> tuple[ModelConfig, str]:
        return (known if cached.exists() else made), "id"

    cache = SimpleNamespace(get_model_json_path=lambda model_id: cached if model_id == "id" else None)
    engine = SimpleNamespace(
        cache=cache,
        computed_passes_configs={"q": RunPassConfig(type="OnnxKQuantQuantization")},
        olive_config=SimpleNamespace(get_pass_module_config=lambda name: SimpleNamespace(module_path=name)),
    )
    assert run_pass(engine, {"pass_name": "q", "input_model_id": "in"}, find) == (made, "id")
    assert run.lineages["id"][-1] is made


def test_status_is_of_all_evaluations_since_the_last_change(run: Run, tmp_path: Path) -> None:
    lost = replace(report(), created="1", comparison=Comparison({}), broken=(Reason("bound_broken"),))
    other, asked = replace(REPORT, created="2"), Comparison({}, over_all=True)
    engine = engine_with(
        measured(tmp_path / "m", lost), {"g": gate(), "q": RunPassConfig(type="OnnxKQuantQuantization")}
    )
    engine._run_pass("g", None, "in", None)
    run.reports.append(other)
    assert worst_status(deciding(run)) == 1
    engine._run_pass("q", None, "in+g", None)
    assert worst_status(deciding(run)) == 0
    run.reports += [replace(other, comparison=asked), replace(other, comparison=Comparison({}))]
    assert [verdict.status for verdict in deciding(run)] == ["unknown"]
    run.reports = [lost]
    assert worst_status(deciding(run)) == 1


@pytest.mark.parametrize("asks", [{"over_all": True}, {"certainty": certainty()}, {}])
def test_gate_that_found_a_loss_fails_the_chain_that_goes_on_and_is_printed(
    asks: dict[str, Any], run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output was made of a model that did not pass. Without a bound of its own it was no gate, nor is an
    evaluator's report on the input model."""
    lost = replace(report(), comparison=Comparison({}, **asks), broken=(Reason("bound_broken", words="f1"),))
    engine = engine_with(
        measured(tmp_path / "m", lost), {"g": gate(), "q": RunPassConfig(type="OnnxKQuantQuantization")}
    )
    run.reports += [replace(lost, created="1", model={"path": "in"}), replace(lost, model={"path": "measured here"})]
    for name in ("g", "q"):
        engine._run_pass(name, None, "in", None)
    run.reports.append(replace(REPORT, created="2", comparison=Comparison({})))
    assert worst_status(deciding(run)) == (1 if asks else 0)
    print_results(run)
    assert capsys.readouterr().out.count("bound broken: f1") == bool(asks)
    run.is_search = True
    assert worst_status(deciding(run)) == 0


def test_report_of_costs_in_the_same_second_hides_no_loss(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.output_dir.mkdir()
    run.made_by["in"] = ("q",)
    lost = replace(report("q"), comparison=Comparison({}), broken=(Reason("bound_broken", words="acc"),))
    costs = replace(report("q"), metrics=(SIZE,))
    engine = engine_with(measured(tmp_path / "m", lost, costs), {"g": gate()})
    run.reports = [lost]
    engine._run_pass("g", None, "in", None)
    publish(engine, run, SimpleNamespace(get_best_candidate=lambda: SimpleNamespace(model_id="in+g")))
    print_results(run)
    assert [len(one.metrics) for one in run.reports] == [len(REPORT.metrics), 1]
    assert worst_status(deciding(run)) == 1
    assert "bound broken: acc" in capsys.readouterr().out


def test_reports_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    reports = [report(*map(str, range(number))) for number in range(11)]
    assert [len(found.model["passes"]) for found in carried_reports(measured(tmp_path, *reports).config)] == [
        *range(11)
    ]


AFTER = "after GraphSurgeries cut"


@pytest.mark.parametrize(
    ("has_pass", "evaluators", "made", "unmeasured"),
    [
        (True, [None, None], "float cut", AFTER),
        (True, [None, None], "float", ""),
        (True, [ours("tiny_choice"), None], "float cut", ""),
        (True, [ours("size_on_disk"), None], "float cut", AFTER),
        (True, [None, ours("size_on_disk")], "float cut", AFTER),
        (False, [ours("size_on_disk"), None], "float cut", ""),
        (False, [ours("tiny_choice"), ours("size_on_disk")], "float cut", "after float → GraphSurgeries cut"),
        (False, [GATE, None], "float cut", ""),
        (False, [GATE, ours("size_on_disk")], "float cut", BY_GATE),
        (False, [GATE, ours("tiny_choice")], "float cut", BY_GATE),
        (False, [ours("tiny_choice"), GATE], "float cut", ""),
        (False, [BOUND, None], "float cut", ""),
        (False, [BOUND, ours("tiny_choice")], "float cut", BY_BOUND),
        (False, [BOUND, GATE], "float cut", BY_BOUND),
    ],
)
def test_output_model_that_no_evaluation_of_answers_ran_on_is_named(
    has_pass: bool,
    evaluators: list[Any],
    made: str,
    unmeasured: str,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Olive's evaluators measure the output model itself: the last pass's, else the recipe's."""
    run.output_dir.mkdir()
    run.made_by["best"], run.types["cut"] = tuple(made.split()), "GraphSurgeries"
    engine = engine_with(measured(tmp_path / "m", *[report("float")][:has_pass]), {})
    engine.evaluator_config, of_pass = evaluators
    engine.input_passes_configs = {"cut": [RunPassConfig(type="GraphSurgeries", evaluator=of_pass)]}
    output = SimpleNamespace(get_best_candidate=lambda: SimpleNamespace(model_id="best"))
    publish(engine, run, output)
    note_unmeasured(engine, run, output)
    assert (run.unmeasured, run.is_undecided) == (unmeasured, unmeasured in (BY_GATE, BY_BOUND))
    monkeypatch.setattr("olive.cli.launcher.main", lambda _: note_ended(run))
    for run.is_search in (False, True):
        assert cli_run([]) == (3 if run.is_undecided else 0)


@pytest.mark.parametrize("is_broken", [False, True])
def test_commands_of_the_output_models_report_have_the_path_that_it_is_saved_in(
    is_broken: bool, run: Run, tmp_path: Path
) -> None:
    run.output_dir.mkdir()
    run.made_by["best"] = run.made_by["in"] = ("q",)
    found = Comparison({}, arguments="cache/m --reference r --tasks t")
    run.reports = [replace(report("q"), comparison=found)]
    engine = engine_with(measured(tmp_path / "m", *run.reports), {"g": gate(*BROKEN)})
    if is_broken:
        with pytest.raises(RequirementError):
            engine._run_pass("g", None, "in", None)
    else:
        publish(engine, run, SimpleNamespace(get_best_candidate=lambda: SimpleNamespace(model_id="best")))
    written = from_json((run.output_dir / "report.json").read_text())
    for one in (written, *run.reports):
        assert one.comparison.arguments == f"{run.output_dir} --reference r --tasks t"


def test_output_model_of_a_search_gets_its_chain(run: Run, tmp_path: Path) -> None:
    run.output_dir.mkdir()
    engine = engine_with(measured(tmp_path / "m", report(), report("int4")), {})
    publish(engine, run, SimpleNamespace(get_best_candidate=lambda: SimpleNamespace(model_id="best")))
    names = {path.name for path in run.output_dir.iterdir()}
    assert {"chain.json", "chain.md", "report-2.json", "report-2.md", "report.json", "report.md"} <= names

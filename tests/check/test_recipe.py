"""What a recipe says to this package, and the mistakes that are named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from olive_ext import package_versions
from olive_ext.backends.lm_eval.arguments import OrtLMArguments
from olive_ext.check import check_recipe, mistakes
from olive_ext.check.recipe import Passes
from olive_ext.cli import main
from olive_ext.errors import ConfigError, OliveExtError, ProviderError, warn_ignored
from olive_ext.model.files.hub import set_offline
from tests.check.tiny import put_model
from tests.mistakes.recipes import MEASURE, OURS, QUANTIZE, RECIPE, put, with_value
from tests.refusals import assert_says, refused

METRIC = {"name": "elsewhere", "type": "accuracy", "sub_types": [{"name": "accuracy_score"}]}


def problems(tmp_path: Path, recipe: Mapping[str, Any]) -> list[str]:
    return check_recipe(put(tmp_path, recipe)).problems


def one_of(tmp_path: Path, recipe: Mapping[str, Any]) -> OliveExtError:
    (error,) = check_recipe(put(tmp_path, recipe)).errors
    return error


def of_evaluator(**keys: Any) -> dict[str, Any]:
    """The recipe with more keys in its evaluator."""
    return with_value("evaluators.ours", {**RECIPE["evaluators"]["ours"], **keys})


def of_onnx(folder: Path, **keys: Any) -> dict[str, Any]:
    """The same for an ONNX input model."""
    model = {"type": "OnnxModel", "model_path": str(put_model(folder / "m"))}
    return {**of_evaluator(max_length=64, **keys), "input_model": model}


def built(**keys: Any) -> dict[str, Any]:
    """The same, whose evaluator is given what a pass makes of a Hugging Face model."""
    return {**of_evaluator(**keys), "passes": {"build": {"type": "ModelBuilder", "precision": "int4"}}}


@pytest.mark.parametrize(("precision", "is_known"), [("int5", False), ("INT4", True), ("SEARCHABLE_VALUES", True)])
def test_value_of_a_pass_that_olive_does_not_take_is_named_before_it_runs(
    tmp_path: Path, precision: str, is_known: bool
) -> None:
    found = problems(tmp_path, {**built(), "passes": {"build": {"type": "ModelBuilder", "precision": precision}}})
    told = "'passes.build.precision' = 'int5': give bf16, fp16, "
    assert [problem for problem in found if "precision" in problem and problem.startswith(told)] == found[is_known:]


@pytest.mark.parametrize(
    ("provider", "refused_floats"), [("CPU", ["bf16", "fp16"]), ("Dml", ["bf16"]), ("CUDA", []), ("", ["bf16", "fp16"])]
)
def test_float_that_olive_builds_for_a_gpu_only_is_refused_for_another_provider(
    provider: str, refused_floats: list[str]
) -> None:
    """Olive left the pass out, and the run ended without a model."""
    accelerators = [{"execution_providers": [f"{provider}ExecutionProvider"]}] if provider else []
    system = {"systems": {"here": {"type": "LocalSystem", "accelerators": accelerators}}, "target": "here"}
    found = [
        error.value
        for precision in ("bf16", "fp16", "fp32")
        for error in mistakes({**built(), **system, "passes": {"b": {"type": "ModelBuilder", "precision": precision}}})
        if error.field == "passes.b.precision"
    ]
    assert found == refused_floats


@pytest.mark.parametrize(
    ("kind", "ep", "keys", "places"),
    [
        ("LocalSystem", "", {"execution_provider": "qnn"}, ["evaluators.ours"]),
        ("LocalSystem", "", {"execution_provider": "qnn", "allow_cpu_fallback": True}, []),
        ("LocalSystem", "QNN", {"execution_provider": "cpu"}, []),
        ("LocalSystem", "QNN", {}, ["systems.here.accelerators"]),
        ("LocalSystem", "Foo", {}, ["systems.here.accelerators"]),
        ("Docker", "QNN", {"execution_provider": "qnn"}, []),
    ],
)
def test_provider_that_is_missing_is_refused_before_passes_run_here(
    kind: str, ep: str, keys: dict[str, Any], places: list[str], tmp_path: Path
) -> None:
    """The input model was evaluated, and the passes ran, before a run ended on it."""
    accelerators = [{"device": "npu", "execution_providers": [f"{ep}ExecutionProvider"]}] if ep else []
    systems = {"here": {"type": kind, "accelerators": accelerators}}
    recipe = {**built(**keys), "systems": systems, "target": "here"}
    recipe["passes"]["build"]["type"] = "OnnxConversion"  # which knows no precision
    del recipe["passes"]["build"]["precision"]
    found = [*mistakes(recipe, runs=True)]
    assert [error.field for error in found if isinstance(error, ProviderError)] == places
    errors = check_recipe(put(tmp_path, recipe)).errors
    assert any(isinstance(error, ProviderError) for error in errors) == bool(places), "as a run says"


@pytest.mark.parametrize("path", ["output_dir", "engine.output_dir", f"{OURS}.output_dir", f"{MEASURE}.output_dir"])
def test_folder_that_is_a_file_is_refused_before_a_run(tmp_path: Path, path: str) -> None:
    recipe = with_value(path, str(put(tmp_path, {})))
    recipe["passes"]["measure"]["config"]["tasks"] = ["arc_easy"]
    assert [error.field for error in mistakes(recipe, runs=True)] == [path]
    assert [*mistakes(recipe)] == [], "it may be another machine's"


BOUNDS = [
    {"metric": "kl_mean", "task": "all", "max": 0.02},
    {"metric": "acc", "filter": "none", "min": 0},
    {"metric": "size_on_disk", "max": 1e9},
]


@pytest.mark.parametrize(
    "keys", [{"fail_on_loss": 1}, {"documents": "enough", "certain": {"within": 0.01}}, {"require": BOUNDS}]
)
def test_what_needs_a_reference_may_have_one_that_the_recipe_names(tmp_path: Path, keys: dict[str, Any]) -> None:
    assert problems(tmp_path, of_onnx(tmp_path, reference="input_model", **keys)) == []


@pytest.mark.parametrize(("keys", "code"), [({"fail_on_loss": 1}, "not_comparable"), ({"require": BOUNDS}, "missing")])
def test_hugging_face_input_model_is_held_to_no_loss_against_itself(
    tmp_path: Path, keys: dict[str, Any], code: str
) -> None:
    """Neither by an evaluator nor by a pass; that of what another pass makes of it is its loss."""
    path = str(tmp_path)
    for reference in ("input_model", path):
        itself = of_evaluator(reference=reference, **keys)
        itself["input_model"]["model_path"] = path
        measure = {"type": "OrtLMEvaluation", "tasks": ["arc_easy"], "reference": reference, **keys}
        found = mistakes({**itself, "passes": {"measure": measure}}, Passes())
        places = [f"{where}.{next(iter(keys))}" for where in ("evaluators.ours", "passes.measure")]
        assert [(error.code, error.field) for error in found] == [(code, place) for place in places]
        changed = {"build": {"type": "SparseGPT"}, "measure": measure}
        assert [*mistakes({**itself, "passes": changed}, Passes())] == []


def put_package(root: Path, **eps: str) -> Path:
    """A model package with a variant for each of these providers, named in full but for the ending."""
    components = {"model": {"variants": {name: {"ep": f"{ep}ExecutionProvider"} for name, ep in eps.items()}}}
    for name in eps:
        put_model(root / name)
    (root / "manifest.json").write_text(json.dumps({"schema_version": "1.0", "components": components}))
    return root


def test_variant_of_a_reference_that_its_package_has_not_is_named_before_a_pass_runs(tmp_path: Path) -> None:
    package = put_package(tmp_path / "p.ortpackage", gpu="CUDA", npu="QNN")
    for named in ({"variant": "gpu"}, {"execution_provider": "cuda"}):
        assert problems(tmp_path, of_evaluator(reference={"path": str(package), **named})) == []
    wrong = ({"variant": "gone"}, "'variant' = 'gone'"), ({"execution_provider": "cpu"}, "CPU"), ({}, "CPU")
    for named, told in wrong:
        error = one_of(tmp_path, of_evaluator(reference={"path": str(package), **named}))
        assert_says(error, "not_found", "evaluators.ours.reference.variant", holds=told)
    for path in (str(package / "gpu"), "input_model"):
        error = one_of(tmp_path, of_evaluator(reference={"path": path, "variant": "gpu"}))
        assert_says(error, "contradiction", "evaluators.ours.reference.variant", "gpu")
    error = one_of(tmp_path, with_value("input_model.variant", "gpu"))  # as Olive refuses it after a start
    assert_says(error, "unknown_key", "input_model.variant", "gpu")


@pytest.mark.parametrize("key", ["path", "float_model"])
def test_package_of_which_several_variants_fit_any_provider_is_named_before_a_pass_runs(
    key: str, tmp_path: Path
) -> None:
    package = put_package(tmp_path / "p.ortpackage", a="CPU", b="CPU")
    for named in ({}, {"execution_provider": "cpu"}):
        reference = {"path": "org/name", key: str(package)}
        error = one_of(tmp_path, of_evaluator(reference=reference, **named))
        at = f"{OURS}.reference{'' if key == 'path' else '.float_model'}"
        assert_says(error, "missing", f"{at}.variant", holds=at)
        assert ("'variant'" in str(error)) == (key == "path"), "no key names a variant of a float model"


GPU = {"device": "gpu", "execution_providers": ["CUDAExecutionProvider"]}


@pytest.mark.parametrize(
    ("accelerators", "eps", "told"),
    [
        (None, {"a": "CPU", "b": "CPU", "c": "CUDA"}, "missing"),
        (None, {"a": "CPU", "c": "CUDA"}, ""),
        (None, {"c": "CUDA"}, "not_found CPU"),
        ([GPU], {"a": "CPU", "b": "CPU", "c": "CUDA"}, ""),
        ([{**GPU, "execution_providers": "CUDAExecutionProvider"}], {"c": "CUDA"}, ""),
        ([{"device": "gpu"}], {"c": "CUDA", "d": "CUDA"}, "missing"),
        ([{"device": "npu", "execution_providers": ["QNNExecutionProvider"]}], {"c": "CUDA"}, "not_found QNN"),
    ],
)
@pytest.mark.parametrize("is_built", [False, True])
def test_variant_of_a_reference_is_for_the_provider_of_the_target(
    accelerators: Any, eps: dict[str, str], told: str, is_built: bool, tmp_path: Path
) -> None:
    """Which Olive hands over: of an ONNX model the CPU's where the recipe has no target."""
    keys: dict[str, Any] = {"reference": str(put_package(tmp_path / "p.ortpackage", **eps))}
    recipe = built(**keys) if is_built else of_onnx(tmp_path, **keys)
    system = {"type": "LocalSystem", "accelerators": accelerators}
    target = {"systems": {"here": system}, "target": "here"} if accelerators else {}
    found = [*mistakes(recipe | target)]
    code, _, provider = told.partition(" ")
    assert [(one.code, provider in str(one)) for one in found] == [(code, True)] * bool(told)


def test_input_model_is_checked_on_the_provider_that_olive_hands_over(tmp_path: Path) -> None:
    """The run has no other, whatever genai_config.json names."""
    recipe = of_onnx(tmp_path)
    options = {"session_options": {"provider_options": [{"qnn": {}}]}}
    config = {"model": {"decoder": {"filename": "model.onnx", **options}}}
    (tmp_path / "m" / "genai_config.json").write_text(json.dumps(config))
    findings = check_recipe(put(tmp_path, recipe))
    assert findings.problems == []
    assert "QNN" not in findings.text()
    settings = {"execution_provider": ["FooExecutionProvider"], "session_options": {"intra_op_num_threads": 10_000}}
    recipe["input_model"]["inference_settings"] = settings  # go before what Olive hands over
    assert "10000" in str(problems(tmp_path, recipe))
    del settings["session_options"]
    assert "FooExecutionProvider" in str(problems(tmp_path, recipe))
    recipe["evaluators"]["ours"]["execution_provider"] = "cpu"
    assert problems(tmp_path, recipe) == []


def test_only_variant_is_the_reference_of_a_checkpoint_whatever_it_is_for(tmp_path: Path) -> None:
    """Olive hands no provider over."""
    package = put_package(tmp_path / "p.ortpackage", gpu="CUDA")
    assert [*mistakes(of_evaluator(reference=str(package)))] == []


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("recipe.yaml", "a: &a {x: 1}\nb: {<<: *a, <<: *a, x: 2}\nc:\n- d: 1\n  d: 2\n", ("5",)),
        ("recipe.json", "{", ()),
        ("recipe.json", "[]", ()),
    ],
    ids=["a key twice", "half of a file", "a list"],
)
def test_file_that_is_no_recipe_is_refused(tmp_path: Path, name: str, text: str, line: tuple[str, ...]) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with refused(ConfigError, "damaged", holds=line):
        check_recipe(tmp_path / name)


def test_an_evaluator_of_olives_own_beside_ours_is_no_misspelling() -> None:
    recipe = with_value("evaluators.olives", {"type": "LMEvaluator", "tasks": ["arc_easy"]})
    assert not list(mistakes(recipe))


def test_input_model_that_is_missing_is_the_only_mistake_of_what_names_it() -> None:
    recipe = of_evaluator(reference="input_model")
    del recipe["input_model"]
    assert [error.field for error in mistakes(recipe)] == ["input_model.type"]


@pytest.mark.parametrize("path", ["input_model.model_path", f"{OURS}.reference", f"{MEASURE}.config.reference"])
def test_name_of_which_the_hub_cannot_be_asked_is_told_as_by_a_run(tmp_path: Path, path: str) -> None:
    with set_offline():
        (error,) = check_recipe(put(tmp_path, with_value(path, "no-owner/no-model"))).errors
    assert_says(error, "needs_network", holds=("'no-owner/no-model'", "HF_HUB_OFFLINE"))


@pytest.mark.parametrize(
    ("olive", "genai", "host", "is_refused"),
    [
        ("0.13.0", "0.14.1", "local", False),
        ("0.13.0", "0.15.0", "local", True),
        ("0.13.0", "0.15rc1", "local", True),
        ("0.13.0", "1.0.0.dev1", "local", True),
        ("0.14.0", "0.15.0", "local", False),
        ("0.13.0", "0.15.0", "container", False),
        (None, "0.15.0", "local", False),
        ("0.13.0", None, "local", False),
    ],
)
def test_builder_that_the_installed_olive_cannot_drive_is_named(
    olive: str | None, genai: str | None, host: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds = {"olive-ai": olive, "onnxruntime-genai-cuda": genai}
    monkeypatch.setattr(package_versions, "version_of", builds.get)
    systems = {"local": {"type": "LocalSystem"}, "container": {"type": "Docker"}}
    recipe = {**built(), "systems": systems, "host": host}
    found = [error for error in mistakes(recipe) if error.field == "passes.build.type"]
    assert [error.code for error in found] == ["unsupported"] * is_refused
    if is_refused:
        assert_says(found[0], "unsupported", "passes.build.type", "ModelBuilder", holds=(genai, "onnxruntime-genai"))


@pytest.mark.parametrize("name", ["algo_config", "block_size", "nodes_to_exclude", "int4_blok_size"])
def test_option_that_the_installed_builder_would_ignore_is_named_with_those_that_it_knows(
    tmp_path: Path, name: str
) -> None:
    known = {"int4_algo_config": "rtn", "int4_nodes_to_exclude": "a", "use_qdq": True}  # one by a variable's name
    for keys in ({"extra_options": {**known, name: 1}}, {"config": {"extra_options": {name: 1}}}):
        (error,) = check_recipe(put(tmp_path, with_value(QUANTIZE, {"type": "modelbuilder", **keys}))).errors
        assert_says(
            error,
            "unknown_key",
            f"passes.q.extra_options.{name}",
            holds=("adapter_path, config_only, ", "int4_block_size"),
        )
    two = {"type": "ModelBuilder", "extra_options": {"block_size": 1, "q": 1}}
    first, last = check_recipe(put(tmp_path, with_value(QUANTIZE, two))).errors
    assert_says(
        first, "unknown_key", "passes.q.extra_options.block_size", holds=("'int4_block_size'", "'qmoe_block_size'")
    )
    assert_says(last, "unknown_key", "passes.q.extra_options.q", holds="adapter_path, ")


def test_arguments_of_a_hugging_face_model_are_lm_evals_and_of_an_onnx_model_ours(tmp_path: Path) -> None:
    eager: dict[str, Any] = {"model_args": {"attn_implementation": "eager"}}
    assert problems(tmp_path, of_evaluator(**eager)) == []
    for recipe in (of_onnx(tmp_path, **eager), built(**eager)):
        assert_says(one_of(tmp_path, recipe), "unknown_key", "evaluators.ours.model_args.attn_implementation")
    found, *_ = check_recipe(put(tmp_path, of_onnx(tmp_path, model_args={"execution_provider": "cudda"}))).errors
    assert_says(found, "unknown_name", "input_model", holds=("'cudda'", "'cuda'"))


PUBLIC: dict[str, Any] = {
    "model_class": "hf",
    "model_args": {"past_present_share_buffer": True},
    "provider_options": {"enable_skip_layer_norm_strict_mode": "1"},
    "batch_size": 1,
}
"""Keys that Olive's public recipes have beside ONNX models on CPUs."""


@pytest.mark.parametrize("kind", ["hf", "onnx"])
def test_what_other_backends_need_is_ignored_with_one_warning_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    warn_ignored.cache_clear()
    recipe = of_onnx(tmp_path, **PUBLIC) if kind == "onnx" else built(**PUBLIC, max_length=64)
    assert problems(tmp_path, recipe) == []
    OrtLMArguments.of("m", PUBLIC["model_args"], has_session=False)
    warnings = sorted(record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    names = ("model_class", "past_present_share_buffer", "enable_skip_layer_norm_strict_mode")
    assert [f"'{name}'" in line for line, name in zip(warnings, names, strict=True)] == [True] * 3


@pytest.mark.parametrize(
    ("keys", "accelerator", "code", "holds"),
    [
        ({"provider_options": {"enable_skip_layer_norm_strict_mod": "1"}}, None, "provider", "strict_mod"),
        ({"execution_provider": "cudda"}, None, "unknown_name", "'cuda'"),
        ({}, "CUDAExecutionProvidr", "unknown_name", "'CUDAExecutionProvidr'"),
    ],
)
def test_provider_of_what_passes_hand_on_is_checked(
    tmp_path: Path, keys: dict[str, Any], accelerator: str | None, code: str, holds: str
) -> None:
    found = one_of(tmp_path, on(accelerator, built(**keys)))
    assert_says(found, code, "evaluators.ours", holds=("evaluators.ours", holds))


def test_provider_of_another_machine_is_a_problem_as_of_a_run_and_all_else_is_checked(tmp_path: Path) -> None:
    recipe = on("CUDAExecutionProvider", built(provider_options={"enable_skip_layer_norm_strict_mode": "1"}))
    findings = check_recipe(put(tmp_path, recipe))
    assert [error.field for error in findings.errors] == ["systems.here.accelerators"]
    line = next(line for line in findings.text().splitlines() if "evaluators.ours: provider" in line)
    assert "CUDAExecutionProvider  (Olive's accelerator" in line
    found = problems(tmp_path, on("CUDAExecutionProvider", of_onnx(tmp_path)))
    assert found
    assert all("CUDAExecutionProvider" in problem for problem in found)


def on(accelerator: str | None, recipe: dict[str, Any]) -> dict[str, Any]:
    """The recipe with a target that has the execution provider."""
    if accelerator is None:
        return recipe
    accelerators = [{"device": "gpu", "execution_providers": [accelerator]}]
    return {**recipe, "systems": {"here": {"type": "LocalSystem", "accelerators": accelerators}}, "target": "here"}


def test_functions_of_tasks_that_are_asked_for_are_listed_with_their_file_and_not_imported(tmp_path: Path) -> None:
    block = with_folder(tmp_path, "mine")
    folder = tmp_path / "tasks"
    (folder / "mine.yaml").write_text("group: mine\ntask: [own, {task: colours, num_fewshot: 1}]\n", encoding="utf-8")
    (folder / "other.yaml").write_text("task: other\nprocess_docs: !function others.clean\n", encoding="utf-8")
    (folder / "base.yml").write_text("process_docs: !function deep.code.clean\n", encoding="utf-8")
    (folder / "own.yaml").write_text(
        "task: own\ninclude: base.yml\nmetric_list:\n- metric: !function code.score\n"
        "- metric: !function os.getpid\nclass: !function code.Task\n",
        encoding="utf-8",
    )
    (folder / "deep").mkdir()
    for place in (folder / "code.py", folder / "deep" / "code.py"):
        place.write_text("raise SystemExit('imported')", encoding="utf-8")
    text = check_recipe(put(tmp_path, {**RECIPE, "evaluators": {"ours": block}})).text()
    assert [line.split()[4:] for line in text.splitlines() if "(!function" in line] == [
        [str(folder / "code.py"), "(!function", "Task,", "score)"],
        [str(folder / "deep" / "code.py"), "(!function", "clean)"],
        ["os", "(!function", "getpid)"],
    ]


def test_answers_longer_than_the_context_of_the_input_model_are_refused(tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / "recipes" / "quickstart"
    block = {"type": "OrtLMEvaluator", "tasks": ["quickstart_generate"], "include_path": str(folder / "tasks")}
    recipe = {
        "input_model": {"type": "HfModel", "model_path": str(folder / "model")},
        "evaluators": {"ours": {**block, "gen_kwargs": {"max_gen_toks": 512}}},
        "evaluator": "ours",
    }
    assert_says(one_of(tmp_path, recipe), "task", "max_gen_toks", 512, holds=("'quickstart_generate'", "512"))


def with_folder(tmp_path: Path, *tasks: str) -> dict[str, Any]:
    """An evaluator with a folder of one task, `colours`."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "colours.yaml").write_text("task: colours\ndataset_path: json\n", encoding="utf-8")
    return {"type": "OrtLMEvaluator", "tasks": list(tasks), "include_path": str(folder)}


def test_recipe_without_a_block_of_ours_is_a_problem(tmp_path: Path) -> None:
    recipe: dict[str, Any] = {"input_model": RECIPE["input_model"]}
    kinds = ("OrtLMEvaluator", "OrtEvaluator", "OrtLMEvaluation", "OrtLossMap", "OrtMending")
    assert_says(one_of(tmp_path, recipe), "missing", holds=kinds)
    recipe["evaluators"] = {"olives": {"type": "LMEvaluator", "tasks": ["arc_easy"]}}
    assert_says(one_of(tmp_path, recipe), "missing", holds=(*kinds, "'evaluators.olives.type'"))


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"engine": {"evaluator": "ours"}, "passes": {}}, []),
        ({"passes": {"q": {"type": "OnnxKQuantQuantization", "evaluator": "ours"}}}, []),
        ({"evaluators": {"ours": {"metrics": [METRIC]}}}, []),
        ({}, []),
        ({"passes": {"q": {"type": "OnnxKQuantQuantization"}}}, ["evaluator"]),
    ],
)
def test_evaluator_is_named_elsewhere_or_kept_beside_a_pass_that_evaluates(
    tmp_path: Path, changes: dict[str, Any], missing: list[str]
) -> None:
    path = put(tmp_path, {**RECIPE, "evaluator": None, **changes})
    assert [(error.code, error.field) for error in check_recipe(path).errors] == [("missing", key) for key in missing]


@pytest.mark.parametrize("place", ["", "engine"])
def test_recipe_that_evaluates_nothing_is_refused(tmp_path: Path, place: str) -> None:
    """It ended with 0."""
    left_out: dict[str, Any] = {"evaluate_input_model": False}
    recipe = {**RECIPE, "passes": {}, **({place: left_out} if place else left_out)}
    (error,) = check_recipe(put(tmp_path, recipe)).errors
    assert (error.code, error.field, error.value) == ("contradiction", "evaluate_input_model", False)
    assert check_recipe(put(tmp_path, {**recipe, "passes": RECIPE["passes"]})).errors == []


def test_command_is_2_with_all_problems_on_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(put(tmp_path, of_evaluator(limt=3, seed="x")))]) == 2
    out, err = capsys.readouterr()
    assert out == "", "a mistake comes first"
    assert err.count("\n") == 1
    assert "limt" in err
    assert "seed" in err

"""What a recipe says to this package, and the mistakes that are named."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from olive_ext.backends.lm_eval.arguments import OrtLMArguments
from olive_ext.check import check_recipe, mistakes
from olive_ext.cli import main
from olive_ext.errors import ConfigError, OliveExtError, warn_ignored
from tests.check.tiny import put_model
from tests.refusals import assert_says, refused

RECIPE: dict[str, Any] = {
    "input_model": {"type": "HfModel", "model_path": "model"},
    "evaluators": {"ours": {"type": "OrtLMEvaluator", "tasks": ["arc_easy"], "batch_size": "auto"}},
    "passes": {"measure": {"type": "ortlmevaluation", "config": {"tasks": [{"task": "mine"}]}}},
    "evaluator": "ours",
}


def put(tmp_path: Path, recipe: dict[str, Any]) -> Path:
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(recipe), encoding="utf-8")
    return path


def problems(tmp_path: Path, *path: Any, value: Any) -> list[str]:
    """Of the recipe with `value` at `path`."""
    return list(map(str, mistakes_of(tmp_path, *path, value=value)))


def mistakes_of(tmp_path: Path, *path: Any, value: Any) -> list[OliveExtError]:
    """Of the recipe with `value` at `path`."""
    recipe = copy.deepcopy(RECIPE)
    *parents, last = path
    block: Any = recipe
    for part in parents:
        block = block.setdefault(part, {})
    block[last] = value
    return check_recipe(put(tmp_path, recipe)).errors


def test_good_recipe_has_no_problems_and_its_blocks_are_named(tmp_path: Path) -> None:
    findings = check_recipe(put(tmp_path, RECIPE))
    assert findings.problems == []
    assert "evaluators.ours  OrtLMEvaluator, tasks: arc_easy" in findings.text()
    assert "passes.measure   ortlmevaluation, tasks: mine" in findings.text()


def test_key_of_a_yaml_recipe_that_is_there_twice_is_named(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("a: &a {x: 1}\nb: {<<: *a, <<: *a, x: 2}\nc:\n- d: 1\n  d: 2\n", encoding="utf-8")
    with refused(ConfigError, "damaged", holds="5"):
        check_recipe(path)


def test_yaml_recipe_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(RECIPE), encoding="utf-8")
    assert check_recipe(path).problems == []


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (
            ("evaluators", "ours", "tassks"),
            1,
            {"code": "unknown_key", "field": "evaluators.ours.tassks", "value": 1, "holds": "tasks"},
        ),
        (
            ("evaluators", "ours", "batch_size"),
            "foo",
            {"code": "wrong_value", "field": "evaluators.ours.batch_size", "value": "foo", "holds": ("1", "65536")},
        ),
        (
            ("evaluators", "ours", "task"),
            1,
            {"code": "unknown_key", "field": "evaluators.ours.task", "value": 1, "holds": "tasks"},
        ),
        (
            ("passes", "measure", "limt"),
            1,
            {"code": "unknown_key", "field": "passes.measure.limt", "value": 1, "holds": "limit"},
        ),
        (
            ("passes", "measure", "require"),
            [{"metric": "acc"}],
            {"code": "contradiction", "field": "passes.measure.require.0", "holds": ("max", "min")},
        ),
        (("passes", "measure", "config"), {}, {"code": "missing", "field": "passes.measure.tasks"}),
        (
            ("evaluator",),
            "theirs",
            {"code": "unknown_name", "field": "evaluator", "value": "theirs", "holds": "evaluators"},
        ),
        (("evaluator",), {"type": "OrtLMEvaluator"}, {"code": "missing", "field": "evaluator.tasks"}),
        (("engine", "evaluator"), {"type": "OrtLMEvaluator"}, {"code": "missing", "field": "engine.evaluator.tasks"}),
        (
            ("passes", "other"),
            [{"type": "OrtLMEvaluations"}],
            {"code": "unknown_name", "field": "passes.other.type", "value": "OrtLMEvaluations"},
        ),
        (
            ("evaluators", "ours", "type"),
            "OrtLmEvaluator",
            {
                "code": "unknown_name",
                "field": "evaluators.ours.type",
                "value": "OrtLmEvaluator",
                "holds": "OrtLMEvaluator",
            },
        ),
        (
            ("evaluators", "ours", "tasks"),
            ["no/such.yaml"],
            {"code": "not_found", "field": "evaluators.ours.tasks", "value": "no/such.yaml"},
        ),
        (
            ("evaluators", "ours", "user_script"),
            "no.py",
            {"code": "not_found", "field": "evaluators.ours.user_script", "value": "no.py"},
        ),
        (
            ("evaluators", "ours", "require"),
            [{"metric": "kl_mean", "max": 0.02}],
            {"code": "missing", "field": "evaluators.ours.require", "holds": ("kl_mean", "reference")},
        ),
        (
            ("evaluators", "ours", "require"),
            [{"metric": "acc_nrm", "min": 0.5}],
            {"code": "unknown_name", "field": "evaluators.ours.require", "holds": ("acc_nrm", "acc_norm")},
        ),
        (
            ("evaluators", "ours", "require"),
            [{"metric": "acc", "task": "arc_challenge", "min": 0.5}],
            {"code": "unknown_name", "field": "evaluators.ours.require", "holds": ("arc_challenge", "arc_easy")},
        ),
        (("host",), "lokal", {"code": "unknown_name", "field": "host", "value": "lokal", "holds": "systems"}),
        (
            ("engine", "target"),
            "lokal",
            {"code": "unknown_name", "field": "engine.target", "value": "lokal", "holds": "systems"},
        ),
        (
            ("passes", "measure", "host"),
            "lokal",
            {"code": "unknown_name", "field": "passes.measure.host", "value": "lokal", "holds": "systems"},
        ),
        (
            ("passes",),
            [{"type": "OnnxKQuantQuantization"}],
            {"code": "wrong_value", "field": "passes", "value": [{"type": "OnnxKQuantQuantization"}]},
        ),
        (
            ("passes", "q"),
            "OnnxKQuantQuantization",
            {"code": "wrong_value", "field": "passes.q", "value": "OnnxKQuantQuantization"},
        ),
        (("systems",), "local", {"code": "wrong_value", "field": "systems", "value": "local"}),
        (("engine",), ["search"], {"code": "wrong_value", "field": "engine", "value": ["search"]}),
        (("$schema",), "x", {"code": "unknown_key", "field": "$schema"}),
        (("evalutor",), "ours", {"code": "unknown_key", "field": "evalutor", "value": "ours", "holds": "evaluator"}),
        (
            ("evaluators", "ours", "reference"),
            "input_mode",
            {
                "code": "wrong_value",
                "field": "evaluators.ours.reference.path",
                "value": "input_mode",
                "holds": "ours.reference.path",
            },
        ),
        (("input_model", "model_path"), None, {"code": "missing", "field": "input_model.model_path"}),
        (
            ("input_model",),
            {"type": "ONNXModel", "model_pth": "m"},
            {"code": "missing", "field": "input_model.model_path", "holds": "model_pth"},
        ),
        (
            ("passes", "q"),
            {"type": "OnnxKQuantQuantization", "block_sise": 32},
            {"code": "unknown_key", "field": "passes.q.block_sise", "holds": "block_size"},
        ),
        (
            ("passes", "q"),
            {"type": "ModelBuildr", "precision": "int4"},
            {"code": "unknown_name", "field": "passes.q.type", "value": "ModelBuildr", "holds": "ModelBuilder"},
        ),
        (
            ("passes", "q"),
            {"type": "OrtTransformersOptimization", "optimization_options": {"enable_gelo": False}},
            {"code": "unknown_key", "field": "passes.q.optimization_options.enable_gelo", "holds": "enable_gelu"},
        ),
        (
            ("passes", "q"),
            {"type": "OnnxStaticQuantization", "config": {"extra_options": {"SmoothQuantAlfa": 0.4}}},
            {"code": "unknown_key", "field": "passes.q.extra_options.SmoothQuantAlfa", "holds": "SmoothQuantAlpha"},
        ),
        (
            ("passes", "q"),
            {"type": "GraphSurgeries", "surgeries": [{"surgeon": "RenameInputs", "old_names": [], "new_name": []}]},
            {"code": "unknown_key", "field": "passes.q.surgeries.0.new_name", "holds": "new_names"},
        ),
        (
            ("passes", "q"),
            {"type": "GraphSurgeries", "surgeries": [{"surgeon": "RenameInput"}]},
            {
                "code": "unknown_name",
                "field": "passes.q.surgeries.0.surgeon",
                "value": "RenameInput",
                "holds": "renameinputs",
            },
        ),
    ],
)
def test_mistake_is_named(tmp_path: Path, path: tuple[str, ...], value: Any, problem: dict[str, Any]) -> None:
    (error,) = mistakes_of(tmp_path, *path, value=value)
    assert_says(error, **problem)


@pytest.mark.parametrize("name", ["algo_config", "block_size", "nodes_to_exclude", "int4_blok_size"])
def test_option_that_the_installed_builder_would_ignore_is_named_with_those_that_it_knows(
    tmp_path: Path, name: str
) -> None:
    known = {"int4_algo_config": "rtn", "int4_nodes_to_exclude": "a", "use_qdq": True}  # one by a variable's name
    for keys in ({"extra_options": {**known, name: 1}}, {"config": {"extra_options": {name: 1}}}):
        (told,) = problems(tmp_path, "passes", "q", value={"type": "modelbuilder", "precision": "int4", **keys})
        assert told.startswith(f"unknown key 'passes.q.extra_options.{name}': ")
        assert "the installed onnxruntime-genai takes adapter_path, config_only, disable_qkv_fusion, " in told
        assert "int4_block_size" in told
    two = {"type": "ModelBuilder", "extra_options": {"block_size": 1, "q": 1}}
    (told, last) = problems(tmp_path, "passes", "q", value=two)
    assert told.endswith(".block_size': did you mean 'int4_block_size' or 'qmoe_block_size'?")
    assert last.startswith(
        "unknown key 'passes.q.extra_options.q': the installed onnxruntime-genai takes adapter_path, "
    )


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (
            {"model_class": "ort", "model_args": {"ep": "cuda"}},
            {"code": "contradiction", "field": "evaluators.ours.model_args", "holds": ("ep", "execution_provider")},
        ),
        (
            {"model_class": "ort", "model_args": {"add_bos_tokn": True}},
            {
                "code": "unknown_key",
                "field": "evaluators.ours.model_args.add_bos_tokn",
                "value": True,
                "holds": "add_bos_token",
            },
        ),
        (
            {"model_class": "ort", "model_args": {"enable_thinking": True}},
            {
                "code": "missing",
                "field": "evaluators.ours.model_args.enable_thinking",
                "holds": ("think_end_token", "evaluators.ours.model_args"),
            },
        ),
    ],
)
def test_arguments_that_the_model_class_does_not_take_are_named(
    tmp_path: Path, keys: dict[str, Any], problem: dict[str, Any]
) -> None:
    (error,) = mistakes_of(tmp_path, "evaluators", "ours", value={**RECIPE["evaluators"]["ours"], **keys})
    assert_says(error, **problem)


def test_arguments_of_a_hugging_face_model_are_lm_evals(tmp_path: Path) -> None:
    block = {**RECIPE["evaluators"]["ours"], "model_args": {"attn_implementation": "eager"}}
    assert problems(tmp_path, "evaluators", "ours", value=block) == []


def test_arguments_for_an_onnx_input_model_are_ours_without_a_model_class(tmp_path: Path) -> None:
    recipe = {
        **copy.deepcopy(RECIPE),
        "input_model": {"type": "OnnxModel", "model_path": str(put_model(tmp_path / "m"))},
    }
    recipe["evaluators"]["ours"] |= {"model_args": {"attn_implementation": "eager"}, "max_length": 64}
    (unknown,) = check_recipe(put(tmp_path, recipe)).problems
    assert unknown.startswith("unknown key 'evaluators.ours.model_args.attn_implementation'")


def test_model_is_resolved_as_an_evaluation_opens_it_with_its_arguments(tmp_path: Path) -> None:
    recipe = {
        **copy.deepcopy(RECIPE),
        "input_model": {"type": "OnnxModel", "model_path": str(put_model(tmp_path / "m"))},
    }
    recipe["evaluators"]["ours"] |= {"model_args": {"execution_provider": "cudda"}, "max_length": 64}
    problems = check_recipe(put(tmp_path, recipe)).problems
    assert "names the unknown execution provider 'cudda': did you mean 'cuda'?" in problems[0]


PUBLIC: dict[str, Any] = {
    "model_class": "hf",
    "model_args": {"past_present_share_buffer": True},
    "provider_options": {"enable_skip_layer_norm_strict_mode": "1"},
    "batch_size": 1,
    "max_length": 64,
}
"""Keys that Olive's public recipes have beside ONNX models on CPUs."""

IGNORED = [
    "ignored: 'model_class' = 'hf', because the model is an ONNX model",
    "ignored: the argument 'past_present_share_buffer' of Olive's backend: the graph says whether the KV cache is "
    "updated in place",
    "ignored: the option 'enable_skip_layer_norm_strict_mode' is one of CUDAExecutionProvider, and the model runs on "
    "CPUExecutionProvider",
]


@pytest.mark.parametrize("kind", ["hf", "onnx"])
def test_what_other_backends_need_is_ignored_with_one_warning_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    warn_ignored.cache_clear()
    recipe = copy.deepcopy(RECIPE)
    recipe["evaluators"]["ours"] |= PUBLIC
    del recipe["passes"]["measure"]
    if kind == "onnx":
        recipe["input_model"] = {"type": "OnnxModel", "model_path": str(put_model(tmp_path / "m"))}
    else:
        recipe["passes"] = {"build": {"type": "ModelBuilder", "precision": "int4"}}
    assert check_recipe(put(tmp_path, recipe)).problems == []
    OrtLMArguments.of("m", recipe["evaluators"]["ours"]["model_args"], has_session=False)
    warnings = sorted(record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert [line.startswith(ignored) for line, ignored in zip(warnings, IGNORED, strict=True)] == [True] * 3


@pytest.mark.parametrize(
    ("keys", "accelerator", "problem"),
    [
        ({"provider_options": {"enable_skip_layer_norm_strict_mod": "1"}}, None, "takes no options, and was given"),
        ({"execution_provider": "cudda"}, None, "unknown execution provider 'cudda': did you mean 'cuda'?"),
        ({}, "CUDAExecutionProvidr", "unknown execution provider 'CUDAExecutionProvidr'"),
    ],
)
def test_provider_of_what_passes_hand_on_is_checked(
    tmp_path: Path, keys: dict[str, Any], accelerator: str | None, problem: str
) -> None:
    recipe = converting(accelerator, **keys)
    (found,) = check_recipe(put(tmp_path, recipe)).problems
    assert found.startswith("'evaluators.ours': ")
    assert problem in found


def test_provider_of_another_machine_is_no_problem(tmp_path: Path) -> None:
    recipe = converting("CUDAExecutionProvider", provider_options={"enable_skip_layer_norm_strict_mode": "1"})
    findings = check_recipe(put(tmp_path, recipe))
    assert findings.problems == []
    line = next(line for line in findings.text().splitlines() if "evaluators.ours: provider" in line)
    assert "CUDAExecutionProvider  (Olive's accelerator, which this machine has not)" in line


def converting(accelerator: str | None, **keys: Any) -> dict[str, Any]:
    """A recipe whose evaluator is given what a pass makes of a Hugging Face model."""
    recipe = copy.deepcopy(RECIPE)
    recipe["evaluators"]["ours"] |= keys
    recipe["passes"] = {"build": {"type": "ModelBuilder", "precision": "int4"}}
    if accelerator is not None:
        accelerators = [{"device": "gpu", "execution_providers": [accelerator]}]
        recipe |= {"systems": {"here": {"type": "LocalSystem", "accelerators": accelerators}}, "target": "here"}
    return recipe


def test_tasks_of_a_folder_are_known_without_their_data(tmp_path: Path) -> None:
    assert problems(tmp_path, "evaluators", "ours", value=with_folder(tmp_path, "colours", "size_on_disk")) == []


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
    lines = [" ".join(line.split()) for line in text.splitlines() if "code of task files" in line]
    assert lines == [
        f"code of task files {folder / 'code.py'} (!function Task, score)",
        f"code of task files {folder / 'deep' / 'code.py'} (!function clean)",
        "code of task files os (!function getpid)",
    ]


def test_unknown_member_of_a_group_is_told_by_the_files_alone(tmp_path: Path) -> None:
    block = with_folder(tmp_path, "mine")
    (tmp_path / "tasks" / "mine.yaml").write_text("group: mine\ntask: [colours, colour]\n", encoding="utf-8")
    recipe = {**RECIPE, "evaluators": {"ours": block}}
    (problem,) = map(str, mistakes(recipe))
    assert problem.startswith("'evaluators.ours.tasks': unknown task 'colour': did you mean 'colours'")


def test_arguments_are_those_of_the_model_that_passes_hand_on(tmp_path: Path) -> None:
    recipe = copy.deepcopy(RECIPE)
    recipe["evaluators"]["ours"] |= {"model_args": {"attn_implementation": "eager"}}
    recipe["passes"] = {"build": {"type": "ModelBuilder", "precision": "int4"}}
    (problem,) = check_recipe(put(tmp_path, recipe)).problems
    assert problem.startswith("unknown key 'evaluators.ours.model_args.attn_implementation'")


def test_answers_longer_than_the_context_of_the_input_model_are_refused(tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / "recipes" / "quickstart"
    block = {"type": "OrtLMEvaluator", "tasks": ["quickstart_generate"], "include_path": str(folder / "tasks")}
    recipe = {
        "input_model": {"type": "HfModel", "model_path": str(folder / "model")},
        "evaluators": {"ours": {**block, "gen_kwargs": {"max_gen_toks": 512}}},
    }
    assert check_recipe(put(tmp_path, recipe)).problems == [
        "task 'quickstart_generate': 'max_gen_toks' = 512 leaves no room for a prompt: it must be below the model's "
        "max_length of 512"
    ]


@pytest.mark.long
def test_misspelt_task_is_refused_as_the_run_does(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, "evaluators", "ours", value=with_folder(tmp_path, "arc_esy"))
    assert problem.startswith("'evaluators.ours.tasks': unknown task 'arc_esy'")


def with_folder(tmp_path: Path, *tasks: str) -> dict[str, Any]:
    """An evaluator with a folder of one task, `colours`."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "colours.yaml").write_text("task: colours\ndataset_path: json\n", encoding="utf-8")
    return {"type": "OrtLMEvaluator", "tasks": list(tasks), "include_path": str(folder)}


def test_bounds_on_what_will_be_measured_are_no_problem(tmp_path: Path) -> None:
    block = {
        **RECIPE["evaluators"]["ours"],
        "reference": "input_model",
        "require": [
            {"metric": "kl_mean", "task": "all", "max": 0.02},
            {"metric": "acc", "filter": "none", "min": 0},
            {"metric": "size_on_disk", "max": 1e9},
        ],
    }
    assert problems(tmp_path, "evaluators", "ours", value=block) == []


def test_recipe_without_a_block_of_ours_is_a_problem(tmp_path: Path) -> None:
    findings = check_recipe(put(tmp_path, {"input_model": {"type": "HfModel", "model_path": "m"}}))
    assert findings.problems == [
        "the recipe has no evaluator OrtLMEvaluator or OrtEvaluator and no pass OrtLMEvaluation or OrtLossMap or "
        "OrtMending"
    ]


def test_onnx_input_model_is_resolved_with_the_target_s_provider(tmp_path: Path) -> None:
    model = put_model(tmp_path / "model")
    system = {
        "type": "LocalSystem",
        "accelerators": [{"device": "gpu", "execution_providers": ["CUDAExecutionProvider"]}],
    }
    recipe = {
        **copy.deepcopy(RECIPE),
        "input_model": {"type": "ONNXModel", "model_path": str(model)},
        "systems": {"here": system},
        "target": "here",
    }
    recipe["evaluators"]["ours"]["max_length"] = 64
    findings = check_recipe(put(tmp_path, recipe))
    assert findings.problems
    assert all("CUDAExecutionProvider" in problem for problem in findings.problems)


@pytest.mark.parametrize(("text", "reason"), [("{", {"code": "damaged"}), ("[]", {"code": "damaged"})])
def test_file_that_is_no_recipe_is_refused(tmp_path: Path, text: str, reason: dict[str, Any]) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(text, encoding="utf-8")
    with refused(ConfigError, **reason):
        check_recipe(path)


def test_command_is_2_with_all_problems_on_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = copy.deepcopy(RECIPE)
    recipe["evaluators"]["ours"] |= {"limt": 3, "seed": "x"}
    assert main(["check", str(put(tmp_path, recipe))]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "limt" in err
    assert "seed" in err


def test_command_refuses_model_options_for_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(put(tmp_path, RECIPE)), "--provider", "cpu"]) == 2
    assert "options are for models" in capsys.readouterr().err

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
from olive_ext.errors import ConfigError, warn_ignored
from tests.check.tiny import put_model

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
    recipe = copy.deepcopy(RECIPE)
    *parents, last = path
    block: Any = recipe
    for part in parents:
        block = block.setdefault(part, {})
    block[last] = value
    return check_recipe(put(tmp_path, recipe)).problems


def test_good_recipe_has_no_problems_and_its_blocks_are_named(tmp_path: Path) -> None:
    findings = check_recipe(put(tmp_path, RECIPE))
    assert findings.problems == []
    assert "evaluators.ours  OrtLMEvaluator, tasks: arc_easy" in findings.text()
    assert "passes.measure   ortlmevaluation, tasks: mine" in findings.text()


def test_key_of_a_yaml_recipe_that_is_there_twice_is_named(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("a: &a {x: 1}\nb: {<<: *a, <<: *a, x: 2}\nc:\n- d: 1\n  d: 2\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"recipe.yaml' cannot be parsed: line 5: the key 'd' is there twice"):
        check_recipe(path)


def test_yaml_recipe_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(RECIPE), encoding="utf-8")
    assert check_recipe(path).problems == []


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (("evaluators", "ours", "tassks"), 1, "unknown key 'evaluators.ours.tassks': did you mean 'tasks'?"),
        (
            ("evaluators", "ours", "batch_size"),
            "foo",
            "'evaluators.ours.batch_size' = 'foo': give an integer from 1 to 65536 or \"auto\"",
        ),
        (("evaluators", "ours", "task"), 1, "unknown key 'evaluators.ours.task': did you mean 'tasks'?"),
        (("passes", "measure", "limt"), 1, "unknown key 'passes.measure.limt': did you mean 'limit'?"),
        (("passes", "measure", "require"), [{"metric": "acc"}], "passes.measure.require.0: give 'max' or 'min'"),
        (("passes", "measure", "config"), {}, "missing key 'passes.measure.tasks'"),
        (("evaluator",), "theirs", "'evaluator' = 'theirs': not in 'evaluators', which has ours"),
        (("evaluator",), {"type": "OrtLMEvaluator"}, "missing key 'evaluator.tasks'"),
        (("engine", "evaluator"), {"type": "OrtLMEvaluator"}, "missing key 'engine.evaluator.tasks'"),
        (("passes", "other"), [{"type": "OrtLMEvaluations"}], "did you mean 'OrtLMEvaluation'?"),
        (("evaluators", "ours", "type"), "OrtLmEvaluator", "did you mean 'OrtLMEvaluator'?"),
        (("evaluators", "ours", "tasks"), ["no/such.yaml"], "'evaluators.ours.tasks' = 'no/such.yaml': does not exist"),
        (("evaluators", "ours", "user_script"), "no.py", "'evaluators.ours.user_script' = 'no.py': does not exist"),
        (
            ("evaluators", "ours", "require"),
            [{"metric": "kl_mean", "max": 0.02}],
            "'evaluators.ours.require': no metric 'kl_mean' is measured: it needs 'reference'",
        ),
        (
            ("evaluators", "ours", "require"),
            [{"metric": "acc_nrm", "min": 0.5}],
            "'evaluators.ours.require': no metric 'acc_nrm' is measured: did you mean 'acc_norm'?",
        ),
        (
            ("evaluators", "ours", "require"),
            [{"metric": "acc", "task": "arc_challenge", "min": 0.5}],
            "'evaluators.ours.require': no task 'arc_challenge' is measured; there are arc_easy",
        ),
        (("host",), "lokal", "'host' = 'lokal': not in 'systems', which has none"),
        (("engine", "target"), "lokal", "'engine.target' = 'lokal': not in 'systems', which has none"),
        (("passes", "measure", "host"), "lokal", "'passes.measure.host' = 'lokal': not in 'systems', which has none"),
        (
            ("passes",),
            [{"type": "OnnxKQuantQuantization"}],
            "'passes' is a list: give a mapping, each entry under a name of its own",
        ),
        (("passes", "q"), "OnnxKQuantQuantization", "'passes.q' = \"OnnxKQuantQuantization\": give a mapping with"),
        (("systems",), "local", "'systems' is a text: give a mapping, each entry under a name of its own"),
        (("engine",), ["search"], "'engine' is a list: give a mapping"),
        (("$schema",), "x", "unknown key '$schema': Olive refuses it"),
        (("evalutor",), "ours", "unknown key 'evalutor': did you mean 'evaluator'?"),
        (("evaluators", "ours", "reference"), "input_mode", "ours.reference.path' = 'input_mode': did you mean 'in"),
        (("input_model", "model_path"), None, "missing key 'input_model.model_path': give a folder"),
        (
            ("input_model",),
            {"type": "ONNXModel", "model_pth": "m"},
            "'input_model.model_path': did you mean it by 'model_pth'?",
        ),
        (
            ("passes", "q"),
            {"type": "OnnxKQuantQuantization", "block_sise": 32},
            "unknown key 'passes.q.block_sise': did you mean 'block_size'?",
        ),
        (
            ("passes", "q"),
            {"type": "ModelBuildr", "precision": "int4"},
            "'passes.q.type' = 'ModelBuildr': did you mean 'ModelBuilder'?",
        ),
        (
            ("passes", "q"),
            {"type": "OrtTransformersOptimization", "optimization_options": {"enable_gelo": False}},
            "unknown key 'passes.q.optimization_options.enable_gelo': did you mean 'enable_gelu'? the installed onnxr",
        ),
        (
            ("passes", "q"),
            {"type": "OnnxStaticQuantization", "config": {"extra_options": {"SmoothQuantAlfa": 0.4}}},
            "unknown key 'passes.q.extra_options.SmoothQuantAlfa': did you mean 'SmoothQuantAlpha'?",
        ),
        (
            ("passes", "q"),
            {"type": "GraphSurgeries", "surgeries": [{"surgeon": "RenameInputs", "old_names": [], "new_name": []}]},
            "unknown key 'passes.q.surgeries.0.new_name': did you mean 'new_names'?",
        ),
        (
            ("passes", "q"),
            {"type": "GraphSurgeries", "surgeries": [{"surgeon": "RenameInput"}]},
            "'passes.q.surgeries.0.surgeon' = 'RenameInput': did you mean 'renameinputs'?",
        ),
    ],
)
def test_mistake_is_named(tmp_path: Path, path: tuple[str, ...], value: Any, problem: str) -> None:
    found = problems(tmp_path, *path, value=value)
    assert len(found) == 1
    assert problem in found[0]


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
            "evaluators.ours.model_args: 'ep' is an argument of Olive's backend: write 'execution_provider'",
        ),
        (
            {"model_class": "ort", "model_args": {"add_bos_tokn": True}},
            "unknown key 'evaluators.ours.model_args.add_bos_tokn': did you mean 'add_bos_token'?",
        ),
        (
            {"model_class": "ort", "model_args": {"enable_thinking": True}},
            "evaluators.ours.model_args: 'enable_thinking' needs 'think_end_token'",
        ),
    ],
)
def test_arguments_that_the_model_class_does_not_take_are_named(
    tmp_path: Path, keys: dict[str, Any], problem: str
) -> None:
    (found,) = problems(tmp_path, "evaluators", "ours", value={**RECIPE["evaluators"]["ours"], **keys})
    assert found.startswith(problem)


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


@pytest.mark.parametrize(("text", "reason"), [("{", "cannot be parsed"), ("[]", "holds no mapping of keys")])
def test_file_that_is_no_recipe_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=reason):
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

"""What an Olive recipe resolves to: our evaluator and pass blocks, and the input model where it is an ONNX model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from olive_ext.check.model_check import Findings, Section, check_model
from olive_ext.check.recipe import blocks, input_model, mapping, mistakes, read_recipe, what_is_missing
from olive_ext.config import EVALUATOR_TYPE, PASS_TYPE, EvaluationConfig, EvaluationSettings, WorkflowSettings
from olive_ext.errors import ConfigError, TaskError
from olive_ext.model import resolve
from olive_ext.model.folders import why_missing
from olive_ext.run.bounds import refuse_names
from olive_ext.run.costs import COSTS, with_costs
from olive_ext.run.model_arguments import is_onnx_model, refuse_arguments
from olive_ext.run.task_fit import refuse_generations, refuse_misfits, refuse_texts

if TYPE_CHECKING:
    from olive_ext.backends.task_inputs import TaskInputs


def check_recipe(path: str | Path, *, verify: bool = False) -> Findings:
    """Validates our blocks of the recipe at `path`, and resolves its input model where that is an ONNX model on disk.

    Raises `ConfigError` when the file is not a recipe at all.
    """
    recipe = read_recipe(path)
    findings = Findings(problems=list(mistakes(recipe)))
    section = findings.section(f"Recipe {path}")
    ours = [block for block in blocks(recipe) if block.is_ours]
    valid: list[WorkflowSettings] = []
    inputs: list[TaskInputs] = []
    for block in ours:
        try:
            settings = block.parsed()
        except ConfigError:
            continue  # one of the mistakes
        section.add(block.where, f"{block.type}, tasks: {', '.join(_task_name(task) for task in settings.tasks)}")
        valid.append(settings)
        with findings.noting_problems():
            refuse_arguments(settings, block.where, is_onnx=is_onnx_model(input_model(recipe)[0]))
        if not what_is_missing(block, settings):
            with findings.noting_problems():
                _add_code(settings, section)
                inputs += _inputs(settings, block.where)
                refuse_generations(inputs, settings.gen_kwargs)
                refuse_names(with_costs(settings), block.where, loads_tasks=True)
    if not ours:
        findings.problems.append(f"the recipe has no evaluator {EVALUATOR_TYPE} and no pass {PASS_TYPE}")
    _check_input_model(recipe, valid, inputs, findings, verify=verify)
    return findings


def _add_code(settings: WorkflowSettings, section: Section) -> None:
    """The Python that the block's task files bring, which runs with the user's rights."""
    from olive_ext.backends.task_files import functions_in
    from olive_ext.backends.task_folders import task_folders

    for place, functions in functions_in(settings.tasks, task_folders(settings.include_path)).items():
        section.add("code of task files", place, f"!function {', '.join(functions)}")


def _inputs(settings: WorkflowSettings, where: str) -> list[TaskInputs]:
    """What the tasks give a model. Raises `TaskError` for tasks that lm-eval and the settings' folders do not have;
    loads no data."""
    from olive_ext.backends.task_inputs import declared_inputs

    try:
        return declared_inputs([task for task in settings.tasks if task not in COSTS], settings.include_path)
    except TaskError as error:
        raise TaskError(f"'{where}.tasks': {error}") from error


def _task_name(task: str | dict[str, Any]) -> str:
    return task if isinstance(task, str) else str(task.get("task", "inline task"))


def _check_input_model(
    recipe: Mapping[str, Any],
    valid: Sequence[WorkflowSettings],
    inputs: Sequence[TaskInputs],
    findings: Findings,
    *,
    verify: bool,
) -> None:
    """With the first valid block's settings, and whether it takes what all tasks give (`inputs`); Olive makes other
    models from it only when it runs."""
    kind, keys = input_model(recipe)
    path, name = keys.get("model_path"), keys.get("onnx_file_name")
    section = findings.section("Input model")
    section.add("type", keys.get("type", "missing"))
    section.add("model_path", path if path is not None else "missing")
    if kind != "onnxmodel" or not isinstance(path, str) or not valid or why_missing(kind, path, name):
        return
    model = {"path": path, "kind": "onnx", "onnx_file_name": name}
    own = valid[0].model_fields_set & set(EvaluationSettings.model_fields)
    values = {name: getattr(valid[0], name) for name in own - {"reference"}}  # which the recipe may yet have to find
    with findings.noting_problems():
        config = EvaluationConfig.parse({**values, "model": model}, "input_model")
        findings.extend(check_model(config, verify=verify, handed_over=_accelerator(recipe)), "input_model")
        resolved = resolve(config.opening())
        refuse_misfits(resolved, inputs)
        refuse_generations(inputs, config.gen_kwargs, resolved)
        refuse_texts(resolved, config)


def _accelerator(recipe: Mapping[str, Any]) -> str | None:
    """The execution provider of the recipe's target, as Olive would hand it over; None where it names none."""
    target = recipe.get("target", mapping(recipe.get("engine")).get("target"))
    system = mapping(recipe.get("systems")).get(target) if isinstance(target, str) else target
    keys = {**mapping(mapping(system).get("config")), **mapping(system)}
    accelerators = keys.get("accelerators") or [{}]
    providers = mapping(accelerators[0]).get("execution_providers") or [None]
    first = providers[0]
    name = first[0] if isinstance(first, list) else first
    return name if isinstance(name, str) else None

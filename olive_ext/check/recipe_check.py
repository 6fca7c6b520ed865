"""What an Olive recipe resolves to: our evaluator and pass blocks, and the input model where it is an ONNX model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from olive_ext.check.model_check import Findings, Section, check_model
from olive_ext.check.recipe import Block, blocks, input_model, mapping, mistakes, read_recipe, what_is_missing
from olive_ext.config import (
    EvaluationConfig,
    EvaluationSettings,
    EvaluatorSettings,
    PassSettings,
    WorkflowSettings,
    evaluator_settings,
    pass_settings,
    settled_recipe,
)
from olive_ext.config.pass_options import unlike
from olive_ext.config.work import NEEDS_ONNX
from olive_ext.errors import ConfigError, MissingError, OliveExtError, ProviderError, TaskError, UnsupportedError
from olive_ext.model import resolve
from olive_ext.model.files.folders import why_missing
from olive_ext.registry import evaluators, hooks, load

if TYPE_CHECKING:
    from olive_ext.run.task_fit import TaskInputs


def check_recipe(path: str | Path, *, verify: bool = False) -> Findings:
    """Validates the recipe at `path` as far as this package and the keys of Olive's passes go, and resolves its input
    model where that is on disk.

    Raises `ConfigError` when the file is not a recipe at all.
    """
    recipe = read_recipe(path)
    findings = Findings(errors=list(mistakes(recipe)))
    with suppress(ConfigError):  # one of the mistakes
        recipe = settled_recipe(recipe)
    section = findings.section(f"Recipe {path}")
    valid: list[WorkflowSettings] = []
    inputs: list[TaskInputs] = []
    if not any(block.is_ours for block in blocks(recipe)):
        kinds, of_passes = " or ".join(evaluator_settings()), " or ".join(pass_settings())
        findings.errors.append(MissingError(f"the recipe has no evaluator {kinds} and no pass {of_passes}"))
    for block in blocks(recipe):
        if not block.is_ours:
            findings.errors += [*_unknown_pass(block), *_unknown_keys(block)]
            continue
        try:
            settings = block.parsed()
        except ConfigError:
            continue  # one of the mistakes
        if isinstance(settings, EvaluatorSettings):
            described = load(evaluators()[block.type].describe)(block.keys.get("metrics"), settings)
            section.add(block.where, f"{block.type}, {described}")
            valid.append(settings.as_evaluation())
            continue
        named = [task if isinstance(task, str) else str(task.get("task", "inline task")) for task in settings.tasks]
        section.add(block.where, f"{block.type}, tasks: {', '.join(named)}")
        if isinstance(settings, WorkflowSettings):
            valid.append(settings)
        inputs += _check_block(recipe, block, settings, findings)
    _check_input_model(recipe, valid, inputs, findings, verify=verify)
    return findings


def _check_block(
    recipe: Mapping[str, Any], block: Block, settings: PassSettings, findings: Findings
) -> list[TaskInputs]:
    """Adds what stands against a block of ours; what its tasks give a model, where they are known."""
    from olive_ext.run.bounds import refuse_names
    from olive_ext.run.costs import with_costs
    from olive_ext.run.task_fit import refuse_arguments, refuse_generations

    is_onnx = _gets_onnx(recipe, block)
    with findings.noting_problems():
        if isinstance(settings, WorkflowSettings):
            refuse_arguments(settings, block.where, is_onnx=is_onnx)
        elif not is_onnx:
            raise UnsupportedError(f"'{block.where}': {NEEDS_ONNX}")
    if is_onnx and input_model(recipe)[0] != "onnxmodel":  # else the input model's check says it
        with findings.noting_problems():
            _check_provider(recipe, block.where, settings, findings.sections[0])
    if what_is_missing(block, settings):
        return []
    inputs: list[TaskInputs] = []
    with findings.noting_problems():
        _add_code(settings, findings.sections[0])
        inputs = _inputs(settings, block.where)
        model_args = getattr(settings, "model_args", None) if is_onnx else None  # those of an `OrtLM`
        refuse_generations(inputs, settings.gen_kwargs, model_args=model_args)
        if isinstance(settings, WorkflowSettings):
            refuse_names(with_costs(settings), block.where, loads_tasks=True)
    return inputs


def _check_provider(recipe: Mapping[str, Any], where: str, settings: PassSettings, section: Section) -> None:
    """Adds the providers on which a model that passes make runs. Raises `ProviderError` for names and options that no
    machine takes: the recipe may be meant for another one, whose providers this one has not."""
    from olive_ext.model.providers.resolution import available_providers, resolve_providers
    from olive_ext.model.providers.table import TABLE

    if settings.provider_libraries:  # which are registered where the model is opened
        return
    here = available_providers()
    try:
        providers = resolve_providers(
            settings.execution_provider,
            settings.provider_options,
            handed_over=_accelerator(recipe),
            available=[*here, *(row.name for row in TABLE)],
        )
    except ProviderError as error:
        raise error.inside(f"'{where}'", where) from error
    missing = "" if providers[0].name in here else ", which this machine has not"
    section.add(f"{where}: provider", providers[0].name, f"{providers[0].origin}{missing}")


def _gets_onnx(recipe: Mapping[str, Any], block: Block) -> bool:
    """Whether a block of ours is given an ONNX model: the input model, or what a pass makes, of a block that is a pass
    one in front of it. An evaluator is given the last pass's model, whatever it was given before."""
    from olive_ext.run.task_fit import is_onnx_model

    if is_onnx_model(input_model(recipe)[0]):
        return True
    passes = [other for other in blocks(recipe) if other.is_pass]
    before = passes[: passes.index(block)] if block.is_pass else passes
    if all(other.is_ours for other in before):
        return False
    from olive_ext.workflow.preflight import makes_onnx

    return any(makes_onnx(other.type) for other in before)


def _unknown_pass(block: Block) -> list[OliveExtError]:
    """An error for a type near to one of Olive's passes; any other may be of a user's own table of passes."""
    if not block.is_pass:
        return []
    from olive_ext.workflow.preflight import nearest_pass

    near = nearest_pass(block.type)
    is_told = near in pass_settings()  # by `mistakes`
    meant = ConfigError(f"did you mean '{near}'?", f"{block.where}.type", block.type, code="unknown_name")
    return [meant] if near and not is_told else []


def _unknown_keys(block: Block) -> list[OliveExtError]:
    """An error for each key of one of Olive's passes that Olive would drop without a word."""
    if not block.is_pass or not block.settings():
        return []
    from olive_ext.workflow.preflight import parameters_of

    return list(unlike(block.settings(), parameters_of(block.type), block.where, f"'{block.type}'"))


def _add_code(settings: PassSettings, section: Section) -> None:
    """The Python that the block's task files bring, which runs with the user's rights."""
    from olive_ext.backends.task_files import functions_in
    from olive_ext.backends.task_names import task_folders

    for origin, functions in functions_in(settings.tasks, task_folders(settings.include_path)).items():
        section.add("code of task files", origin, f"!function {', '.join(functions)}")


def _inputs(settings: PassSettings, where: str) -> list[TaskInputs]:
    """What the tasks give a model. Raises `TaskError` for tasks that lm-eval and the settings' folders do not have;
    loads no data."""
    from olive_ext.run.costs import COSTS
    from olive_ext.run.task_fit import declared_inputs

    try:
        asked = [task for task in settings.tasks if task not in COSTS]
        return declared_inputs(asked, settings.include_path, runs_code=settings.confirm_run_unsafe_code)
    except TaskError as error:
        raise error.inside(f"'{where}.tasks'", f"{where}.tasks") from error


def _check_input_model(
    recipe: Mapping[str, Any],
    valid: Sequence[WorkflowSettings],
    inputs: Sequence[TaskInputs],
    findings: Findings,
    *,
    verify: bool,
) -> None:
    """Resolves the input model with the first valid block's settings, and refuses what it does not take of the tasks
    (`inputs`). Models that Olive makes from it have its context length and its tokenizer."""
    kind, keys = input_model(recipe)
    path, name = keys.get("model_path"), keys.get("onnx_file_name")
    section = findings.section("Input model")
    section.add("type", keys.get("type", "missing"))
    section.add("model_path", path if path is not None else "missing")
    if not isinstance(path, str) or not valid or why_missing(kind, path, name):
        return
    is_onnx, own = kind == "onnxmodel", valid[0].model_fields_set & set(EvaluationSettings.model_fields)
    if not is_onnx and (kind != "hfmodel" or not Path(path).exists() or keys.get("load_kwargs")):
        return
    values = {name: getattr(valid[0], name) for name in own - {"reference"}}  # which the recipe may yet have to find
    model = {"path": path, "kind": "onnx", "onnx_file_name": name} if is_onnx else {"path": path, "kind": "hf"}
    from olive_ext.run.task_fit import refuse_generations, refuse_misfits, refuse_texts

    with findings.noting_problems():
        for describe in hooks("package_without_scores").values() if is_onnx else ():
            if described := describe(Path(path), inputs):
                section.add("scoring", "none", described)
                return
        config = EvaluationConfig.parse({**values, "model": model}, "input_model")
        if is_onnx:
            findings.extend(check_model(config, verify=verify, handed_over=_accelerator(recipe)), "input_model")
        resolved = resolve(config.opening())
        if is_onnx:
            refuse_misfits(resolved, inputs)
        refuse_generations(inputs, config.gen_kwargs, resolved, config.model_args if is_onnx else None)
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

"""What a recipe or a model resolves to, and what is wrong with it, without evaluating anything.

`recipe` says what is wrong with a recipe, to every entry; `model_check` and `check_recipe` are `olive-ext check`. Knows
the resolver, and nothing of how a model is scored. The room is itself the function `check`, as `olive_ext.check`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from olive_ext.check.model_check import Findings, Section, check_model
from olive_ext.check.recipe import (
    Block,
    Passes,
    accelerator,
    blocks,
    execution,
    gets_onnx,
    input_model,
    mapping,
    mistakes,
    named_models,
    refuse,
    what_is_missing,
)
from olive_ext.config import (
    EVALUATOR_TYPE,
    RECIPE_SUFFIXES,
    EvaluationConfig,
    EvaluationSettings,
    EvaluatorSettings,
    PassSettings,
    evaluator_settings,
    pass_settings,
    settled_recipe,
)
from olive_ext.config.base import takes
from olive_ext.config.yaml_files import read_recipe
from olive_ext.errors import ConfigError, MissingError, ProviderError, TaskError
from olive_ext.model import resolve
from olive_ext.model.files.hub import offline_if_unreachable
from olive_ext.model.files.model_package import why_missing
from olive_ext.registry import entries, hooks, load

__all__ = ["Findings", "blocks", "check", "check_model", "check_recipe", "mistakes", "read_recipe", "refuse"]

Configs: TypeAlias = Mapping[str, Mapping[str, Any]]
"""The configurations of tasks, by name."""


def check_recipe(path: str | Path, *, verify: bool = False) -> Findings:
    """Validates the recipe at `path` as far as this package and the keys of Olive's passes go, and resolves its input
    model where that is on disk. Where its text is wrong, no tasks and no Hugging Face model are loaded, which takes
    seconds; else the hub is asked for names, as by `olive-ext run`. Raises `ConfigError` when the file is no recipe at
    all."""
    recipe = read_recipe(path)
    passes = Passes()
    findings = Findings(errors=list(mistakes(recipe)) or list(mistakes(recipe, passes)))
    with suppress(ConfigError):  # one of the mistakes
        recipe = settled_recipe(recipe)
    section = findings.section(f"Recipe {path}")
    valid: list[EvaluationSettings] = []
    inputs: dict[str, Mapping[str, Any]] = {}
    ours = [block for block in blocks(recipe) if block.is_ours]
    if not ours:
        kinds, of_passes = " or ".join(evaluator_settings()), " or ".join(pass_settings())
        olives = [f"{block.where}.type" for block in blocks(recipe) if block.type.lower() == "lmevaluator"]
        hint = f": make '{olives[0]}' {EVALUATOR_TYPE}" if olives else ""
        findings.errors.append(MissingError(f"the recipe has no evaluator {kinds} and no pass {of_passes}{hint}"))
    for block in ours:
        try:
            settings = block.parsed()
        except ConfigError:
            continue  # one of the mistakes
        if isinstance(settings, EvaluatorSettings):
            described = load(entries("evaluators")[block.type].describe)(block.keys.get("metrics"), settings)
            section.add(block.where, f"{block.type}, {described}")
            valid.append(settings.as_evaluation())
            continue
        named = [task if isinstance(task, str) else str(task.get("task", "inline task")) for task in settings.tasks]
        section.add(block.where, f"{block.type}, tasks: {', '.join(named)}")
        if isinstance(settings, EvaluationSettings):
            valid.append(settings)
        if not findings.errors:
            inputs |= _check_block(recipe, block, settings, findings, is_onnx=gets_onnx(recipe, block, passes))
    if ours and not any(mapping(keys).get("user_script") for keys in mapping(recipe.get("evaluators")).values()):
        why = "plain `olive run` knows evaluators by their 'user_script' alone, and no pass"
        section.add("command", "olive-ext run", why)
    with findings.noting_problems(), offline_if_unreachable(() if findings.errors else named_models(recipe)):
        _check_input_model(recipe, valid, inputs, findings, verify=verify)
    findings.errors += () if findings.errors else mistakes(recipe, runs=True)
    return findings


def _check_block(
    recipe: Mapping[str, Any], block: Block, settings: PassSettings, findings: Findings, *, is_onnx: bool
) -> Configs:
    """Adds the provider and the code of a block of ours. Returns what its tasks give a model, where that is known."""
    if is_onnx and input_model(recipe)[0] != "onnxmodel":  # else the input model's check says it
        with findings.noting_problems():
            _check_provider(recipe, block.where, settings, findings.sections[0])
    if any(what_is_missing(block, settings)):
        return {}
    from olive_ext.backends.lm_eval.arguments import refuse_generations
    from olive_ext.backends.task_files import TaskFiles, task_folders
    from olive_ext.backends.task_loading import declared_configs
    from olive_ext.run.bounds import COSTS

    inputs: Configs = {}
    with findings.noting_problems():
        files = TaskFiles(settings.tasks, task_folders(settings.include_path))
        for origin, functions in files.functions().items():
            findings.sections[0].add("code of task files", origin, f"!function {', '.join(functions)}")
        try:
            asked = [task for task in settings.tasks if task not in COSTS]
            inputs = declared_configs(asked, settings.include_path, runs_code=settings.confirm_run_unsafe_code)
        except TaskError as error:
            raise error.inside(f"'{block.where}.tasks'").about(f"{block.where}.tasks", error.value) from error
        model_args = getattr(settings, "model_args", None) if is_onnx else None  # those of an `OrtLM`
        refuse_generations(inputs, settings.gen_kwargs, model_args=model_args)
    return inputs


def _check_provider(recipe: Mapping[str, Any], where: str, settings: PassSettings, section: Section) -> None:
    """Adds the providers that a model made by passes runs on. Raises `ProviderError` for what no machine takes."""
    from olive_ext.model.providers.resolution import available_providers, known_providers, resolve_providers

    if settings.provider_libraries:  # which are registered where the model is opened
        return
    is_set = settings.execution_provider is not None
    try:
        providers = resolve_providers(
            settings.execution_provider if is_set else accelerator(recipe),
            settings.provider_options,
            available=known_providers(),
            setting="execution_provider" if is_set else "Olive's accelerator",
        )
    except ProviderError as error:
        raise error.inside(f"'{where}'", where) from error
    missing = "" if providers[0].name in available_providers() else ", which this machine has not"
    section.add(f"{where}: provider", providers[0].name, f"{providers[0].origin}{missing}")


_OF_REFERENCE = {"reference", "fail_on_loss", "documents", "certain"}
"""Settings of a reference, which the recipe may yet have to make."""


def _check_input_model(
    recipe: Mapping[str, Any], valid: Sequence[EvaluationSettings], inputs: Configs, findings: Findings, *, verify: bool
) -> None:
    """Resolves the input model with the first valid block's settings, and refuses what of the tasks (`inputs`) it does
    not take. Models that Olive makes from it have its context length and its tokenizer."""
    kind, keys = input_model(recipe)
    path, name = keys.get("model_path"), keys.get("onnx_file_name")
    section = findings.section("Input model")
    section.add("type", keys.get("type", "missing"))
    section.add("model_path", path if path is not None else "missing")
    if not isinstance(path, str) or not valid or why_missing(kind, path, name):
        return
    is_onnx = kind == "onnxmodel"
    is_here = kind == "hfmodel" and Path(path).exists() and not keys.get("load_kwargs")
    if not is_onnx and (findings.errors or not is_here):
        return
    values = valid[0].written(EvaluationSettings.model_fields.keys() - _OF_REFERENCE)
    values |= execution(valid[0], keys.get("inference_settings"), accelerator(recipe)) if is_onnx else {}
    model = {"path": path, "kind": "onnx", "onnx_file_name": name} if is_onnx else {"path": path, "kind": "hf"}
    from olive_ext.backends.lm_eval.arguments import refuse_generations
    from olive_ext.run.task_fit import refuse_arguments, refuse_misfits, refuse_texts

    try:
        refuse_arguments(valid[0], is_onnx=is_onnx)
    except ConfigError:
        return  # one of the mistakes
    with findings.noting_problems():
        for describe in hooks("package_without_scores").values() if is_onnx else ():
            if described := describe(Path(path), inputs):
                section.add("scoring", "none", described)
                return
        config = EvaluationConfig.parse({**values, "model": model}, "input_model")
        if is_onnx:
            findings.extend(check_model(config, verify=verify), "input_model")
        resolved = resolve(config.opening())
        if is_onnx:
            refuse_misfits(resolved, inputs)
        model_args = config.model_args if is_onnx else None
        refuse_generations(inputs, config.gen_kwargs, resolved.context_length, model_args)
        refuse_texts(resolved, config)


@takes(EvaluationConfig)
def check(target: str | Path, *, verify: bool = False, against: str | Path | None = None, **settings: Any) -> Findings:
    """What a recipe (.json, .yaml, .yml) or a model at `target` resolves to, without running it: print it. What is
    wrong is in its `errors`, what was lost in its `differences`, and the sentences of both in its `problems`.

    `settings` are keys of an evaluation of the model; with `tasks` its work is predicted. `verify` also runs the model
    and compares its log-probabilities with those of the untouched graph; `against`, a checkpoint, compares with that.
    Raises `ConfigError` for settings that are wrong in themselves.
    """
    if str(target).lower().endswith(RECIPE_SUFFIXES):
        if settings or against is not None:
            raise ConfigError("options are for models; a recipe says all itself", next(iter(settings), "against"))
        return check_recipe(target, verify=verify)
    model = {"path": str(target), **settings.get("model", {})}
    config = EvaluationConfig.of({"tasks": ["size_on_disk"], **settings, "model": model}, {})
    held = None if against is None else str(against)
    return check_model(config, work="tasks" in settings, verify=verify, against=held)


class _Room(ModuleType):
    """Python makes a package's room its attribute of that name, whichever was asked for first."""

    __call__ = staticmethod(check)


sys.modules[__name__].__class__ = _Room
__signature__ = inspect.signature(check)  # that of a module with `__call__` would lack the first argument

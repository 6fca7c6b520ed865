"""A recipe as far as it concerns this package: our evaluator and pass blocks, and `mistakes`, which lists all that is
wrong with it for `olive-ext check`, for `olive-ext run` before it imports Olive, and for Olive's engine before its
first pass.

Imports no Olive: the caller gives what is known of its passes.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from olive_ext.backends.task_files import refuse_unknown, task_folders
from olive_ext.config import (
    INPUT_MODEL,
    EvaluationSettings,
    EvaluatorSettings,
    PassSettings,
    ReferenceConfig,
    evaluator_settings,
    pass_settings,
    settings_of_pass,
    settled_recipe,
)
from olive_ext.config.base import TASK_FILES
from olive_ext.config.pass_options import (
    pass_classes,
    pass_parameters,
    unbuildable,
    undrivable_builder,
    unknown_keys,
    unknown_of_model,
    unknown_options,
    unknown_values,
    unlike,
)
from olive_ext.config.work import NEEDS_ONNX
from olive_ext.errors import (
    ConfigError,
    ContradictionError,
    MismatchError,
    MissingError,
    NotFoundError,
    OliveExtError,
    ProviderError,
    TaskError,
    UnsupportedError,
    combined,
    suggest,
)
from olive_ext.model.files.model_package import choose, is_package, why_missing
from olive_ext.model.files.package_config import is_hub_name, is_same_path
from olive_ext.model.providers.resolution import first_name, refuse_missing, resolve_providers
from olive_ext.model.providers.table import CPU
from olive_ext.registry import entries, load
from olive_ext.report import check_writable

if TYPE_CHECKING:
    from olive_ext.backends.task_loading import Declared

logger = logging.getLogger(__name__)

_OLIVE_EVALUATOR_KEYS = {"name", "type", "type_args", "user_script", "script_dir", "metrics"}
_OLIVE_PASS_KEYS = {"type", "config", "host", "evaluator"}
_KINDS = {"hfmodel": "hf", "onnxmodel": "onnx"}
"""Types of Olive's models that need a path; others may have a loader or components."""

_CHANGES = {
    "adapter_path": "has an adapter",
    "load_kwargs": "is loaded with its own arguments",
    "external_initializers_file_name": "has external initializers",
    "constant_inputs_file_name": "has constant inputs",
}
"""Keys of an input model that make it another model than the one at its path."""

_REGISTRY = "azureml_registry_model"
_RESOURCES = {"file": "path", "folder": "path", "string_name": "name", _REGISTRY: "registry_name name version"}
"""Types of Olive's mappings in place of a path, and the keys that each needs."""

Settings: TypeAlias = PassSettings | EvaluatorSettings
SettingsType: TypeAlias = type[Settings]


@dataclass(frozen=True)
class Passes:
    """What is known of Olive's passes."""

    modules: Mapping[str, str] = field(default_factory=pass_classes)
    """The class of each, "module.name", by its type in lower case; by default those of the installed Olive."""

    are_all: bool = False
    """Whether the run knows no other passes."""

    def module(self, pass_type: str) -> str:
        """The class of a pass, "module.name"; empty for an unknown one."""
        return self.modules.get(_plain(pass_type), "")


@dataclass(frozen=True)
class Block:
    """One evaluator or pass of a recipe: its place, as a dotted key, and its keys."""

    where: str
    keys: Mapping[str, Any]
    is_pass: bool = False

    @property
    def type(self) -> str:
        """The type as it is written; empty where it is missing."""
        return str(self.keys.get("type", ""))

    @property
    def is_ours(self) -> bool:
        """Whether the type is this package's."""
        return self.settings_type is not None

    @property
    def settings_type(self) -> SettingsType | None:
        """The settings that the block's own keys are; None for a block that is not this package's."""
        if self.is_pass:
            return settings_of_pass(self.type)
        return evaluator_settings().get(self.type)

    def settings(self) -> dict[str, Any]:
        """The block's own keys, without Olive's, from the block itself and from where Olive also takes them."""
        olive_keys, nested = (_OLIVE_PASS_KEYS, "config") if self.is_pass else (_OLIVE_EVALUATOR_KEYS, "type_args")
        keys = {key: value for key, value in self.keys.items() if key not in olive_keys}
        return {**keys, **mapping(self.keys.get(nested))}

    def parsed(self) -> Settings:
        """The keys of a block of ours, validated; raises `ConfigError`."""
        return (self.settings_type or EvaluationSettings).parse(self.settings(), self.where)


def mistakes(
    recipe: Mapping[str, Any], passes: Passes | None = None, *, has_model: bool = True, runs: bool = False
) -> Iterator[OliveExtError]:
    """An error for each mistake of the recipe. Without `passes`, mistakes that its text and the files that it names
    show. With them, also what blocks ask of the models that they get, and what is declared or bounded and not measured.
    `has_model`: the recipe's own model is used. `runs`: on this machine, which may lack providers and refuse folders.
    """
    if "$schema" in recipe:
        message = "unknown key '$schema': Olive refuses it; name the schema in the editor's settings"
        yield ConfigError(message, "$schema", code="unknown_key")
    yield from _no_mappings(recipe)
    try:
        recipe = settled_recipe(recipe)
    except ConfigError as error:
        yield error
    yield from unknown_keys(recipe)
    olives = passes or Passes()
    for block in blocks(recipe):
        yield from _mistakes_of_type(block, passes if "package_config" in recipe else olives)
        if block.is_ours:
            try:
                settings = block.parsed()
            except ConfigError as error:
                yield error
                continue
            yield from _mistakes_of(recipe, block, settings, passes, has_model=has_model)
            if runs:
                yield from _raised(_refuse_here, recipe, block, settings, olives)
        elif block.is_pass:
            host = _system(recipe, f"{block.where}.host")[1] or _system(recipe, "host")[1]
            undrivable = list(undrivable_builder(block.type, block.where)) if _is_local(host) else []
            yield from undrivable or unknown_options(block.type, block.settings(), block.where)
            if values := block.settings():
                module = olives.module(block.type)
                yield from unlike(values, pass_parameters(module), block.where, f"'{block.type}'")
                yield from unknown_values(module, values, block.where)
                yield from unbuildable(block.type, values, accelerator(recipe), block.where)
    yield from _undefined(recipe, "evaluators", _evaluator_references(recipe))
    if passes is None or not passes.are_all:  # an engine lists those that it was given
        yield from _unused(recipe)
    run_keys, is_ours = _run_keys(recipe), any(block.is_ours for block in blocks(recipe))
    if is_ours and not run_keys.get("passes") and not run_keys["evaluate_input_model"]:
        yield ContradictionError("nothing would be evaluated: there are no passes", "evaluate_input_model", False)
    yield from _undefined(recipe, "systems", _system_references(recipe))
    for where, keys in (("", recipe), ("engine.", mapping(recipe.get("engine")))):
        if runs and isinstance(folder := keys.get("output_dir"), str):
            yield from _raised(check_writable, folder, f"{where}output_dir")
    if has_model:
        yield from _mistakes_of_model(recipe)


def refuse(errors: Iterable[OliveExtError]) -> None:
    """Raises the error where there is one, and a `ConfigError` that has all sentences where there are several."""
    if several := list(errors):
        raise several[0] if len(several) == 1 else combined(several)


def _mistakes_of(
    recipe: Mapping[str, Any], block: Block, settings: Settings, passes: Passes | None, *, has_model: bool
) -> Iterator[OliveExtError]:
    missing = list(what_is_missing(block, settings))
    yield from missing
    kind, keys = input_model(recipe)
    has_model &= kind != "" and (kind not in _KINDS or keys.get("model_path") is not None)  # else that is the mistake
    if settings.reference is not None and (has_model or not settings.reference.is_input_model):
        olives = passes or Passes()
        on = settings.execution_provider or (accelerator(recipe) if gets_onnx(recipe, block, olives) else None)
        yield from _raised(_refuse_reference, settings.reference, block.where, kind, keys, on)
    metrics = block.keys.get("metrics")
    if isinstance(settings, EvaluatorSettings):
        yield from load(entries("evaluators")[block.type].mistakes)(recipe, block.where, metrics, settings)
    elif passes is not None and isinstance(settings, EvaluationSettings):
        from olive_ext.run.bounds import refuse_names
        from olive_ext.run.task_fit import refuse_arguments

        yield from _raised(refuse_arguments, settings, block.where, is_onnx=gets_onnx(recipe, block, passes))
        declared = [(str(entry.get("type")), str(entry.get("name"))) for entry in mappings(metrics)]
        if not missing and (settings.bounds or declared):
            measured = partial(metrics_of, settings, loads=bool(settings.bounds) and not passes.are_all)
            is_own = _is_own_reference(recipe, block, settings.reference)
            yield from _raised(lambda: refuse_names(settings, measured(), block.where, declared, is_own=is_own))
    elif passes is not None and not gets_onnx(recipe, block, passes):
        yield UnsupportedError(NEEDS_ONNX, block.where)


def _refuse_here(recipe: Mapping[str, Any], block: Block, settings: Settings, passes: Passes) -> None:
    """Raises `OliveExtError` for a folder that cannot be written, and for a provider that a run on this machine would
    lack, unless no workflow evaluates by the block."""
    used = [f"evaluators.{name}" for _, name in _evaluator_references(recipe) if isinstance(name, str)]
    if used and block.where.startswith("evaluators.") and block.where not in used:
        return
    where, system = _system(recipe, "target")
    if (folder := getattr(settings, "output_dir", None)) is not None:
        check_writable(folder, f"{block.where}.output_dir")
    if settings.provider_libraries or not _is_local(system) or not gets_onnx(recipe, block, passes):
        return  # libraries are registered where the model is opened
    named, options = settings.execution_provider, settings.provider_options
    try:
        if named is not None:
            resolve_providers(named, options, allow_cpu_fallback=settings.allow_cpu_fallback)
        else:
            refuse_missing(_accelerator(system)[0] or [accelerator(recipe) or CPU], f"{where}.accelerators")
    except ProviderError as error:
        raise error if named is None else error.inside(f"'{block.where}'", block.where) from error


def metrics_of(settings: EvaluationSettings, *, loads: bool) -> Declared | None:
    """The tasks with their metrics, as their files list them. Where the files do not (a group, a class, functions as
    metrics), the tasks are loaded with their data if `loads` is set (raises `TaskError`)."""
    from olive_ext.backends.task_loading import declared_metrics, load_tasks, loaded_metrics
    from olive_ext.run.bounds import COSTS

    asked = [task for task in settings.tasks if task not in COSTS]
    shared: dict[str, Any] = {"repeats": settings.repeats, "thinks": settings.thinks}
    metrics = declared_metrics(asked, settings.include_path, **shared)
    if not loads or (metrics is not None and None not in metrics.values()):
        return metrics
    shared |= {"metadata": settings.metadata, "runs_code": settings.confirm_run_unsafe_code}
    return loaded_metrics(load_tasks(asked, settings.include_path, **shared))


def _raised(check: Callable[..., object], *args: Any, **kwargs: Any) -> Iterator[OliveExtError]:
    try:
        check(*args, **kwargs)
    except OliveExtError as error:
        yield error


def _refuse_reference(
    reference: ReferenceConfig, where: str, kind: str, keys: Mapping[str, Any], provider: Any = None
) -> None:
    """Raises `ModelError` for a reference that does not exist, `ConfigError` for an input model that cannot be one."""
    is_named, reference = not reference.is_input_model, of_input_model(reference, kind, keys)
    is_there = reference.is_same or Path(reference.path).exists() or is_hub_name(reference.path)
    if is_named and not is_there:
        raise NotFoundError("no such file or folder", f"{where}.reference", reference.path)
    if reference.variant is not None and not is_package(Path(reference.path)):
        raise MismatchError(f"'{reference.path}' is no model package", f"{where}.reference.variant", reference.variant)
    for key, path, variant, on in (
        ("reference", reference.path, reference.variant, reference.execution_provider or provider),
        ("reference.float_model", reference.float_model, None, provider),
    ):
        is_there = path is not None and is_package(Path(path))
        for error in _raised(choose, Path(path or ""), variant, first_name(on)) if is_there else ():
            text = str(error) if key == "reference" else str(error).removeprefix("'variant': ")
            raise error.saying(text).inside(f"{where}.{key}", f"{where}.{key}")


def of_input_model(reference: ReferenceConfig, kind: str, keys: Mapping[str, Any]) -> ReferenceConfig:
    """The reference with "input_model" replaced by the path of the input model of Olive's type `kind`; others as they
    are. Raises `ConfigError` where its path alone does not define that model."""
    if reference.float_model == INPUT_MODEL:
        other = of_input_model(ReferenceConfig(path=INPUT_MODEL), kind, keys)
        file = other.path if other.onnx_file_name is None else str(Path(other.path, other.onnx_file_name))
        reference = reference.model_copy(update={"float_model": file})
    if not reference.is_input_model:
        return reference
    form, path = _KINDS.get(kind.lower()), keys.get("model_path")
    if form is None:
        raise _refusal(f"is of type {kind}: a reference is an HfModel or an ONNXModel")
    if not isinstance(path, str) or path.startswith("azureml:"):
        raise _refusal("has no 'model_path' on this machine")
    for key, problem in _CHANGES.items():
        if keys.get(key):
            raise _refusal(f"{problem} ('input_model.{key}'), which a reference cannot have")
    resolved = str(Path(path).resolve()) if Path(path).exists() else path
    name = keys.get("onnx_file_name") if form == "onnx" else None
    mode = "recorded" if reference.mode == "auto" and form == "hf" else reference.mode
    return reference.model_copy(update={"path": resolved, "kind": form, "onnx_file_name": name, "mode": mode})


def _refusal(problem: str) -> ConfigError:
    return ConfigError(f"the input model {problem}; give another model's path", "reference", INPUT_MODEL)


def named_models(recipe: Mapping[str, Any]) -> Iterator[str]:
    """The input model and the references that the recipe names: paths, or names on the hub."""
    references = [block.settings().get("reference") for block in blocks(recipe) if block.is_ours]
    named = [mapping(item).get("path") if not isinstance(item, str) else item for item in references]
    named = [input_model(recipe)[1].get("model_path"), *(item for item in named if item != INPUT_MODEL)]
    return (item for item in named if isinstance(item, str))


def _mistakes_of_model(recipe: Mapping[str, Any]) -> Iterator[OliveExtError]:
    kind, keys = input_model(recipe)
    path = keys.get("model_path")
    yield from (unknown := unknown_of_model(kind, keys))
    misspelt = suggest("model_path", [error.field.removeprefix("input_model.") for error in unknown])
    if not kind:
        yield MissingError("missing: give 'HfModel' or 'ONNXModel', for instance", "input_model.type")
    elif path is None and kind in _KINDS and not misspelt:
        yield MissingError("missing: give a folder, a file or a name on the hub", "input_model.model_path")
    elif problem := why_missing(kind, path, keys.get("onnx_file_name")):
        yield NotFoundError(problem).about("input_model.model_path", path)
    yield from _raised(plain_path, path)
    if "variant" in keys:
        problem = "Olive's models take none: give the file of one variant as 'input_model.model_path'"
        yield ConfigError(problem, "input_model.variant", keys["variant"], code="unknown_key")


def gets_onnx(recipe: Mapping[str, Any], block: Block, passes: Passes) -> bool:
    """Whether a block of ours gets an ONNX model: the input model, or what a pass makes (a pass before it, where the
    block is a pass itself). An evaluator gets the last pass's model, whatever it got before."""
    modules = [passes.module(other.type) for other in _passes_before(recipe, block)]
    return is_onnx_model(input_model(recipe)[0]) or any(one.startswith("olive.passes.onnx") for one in modules)


def is_onnx_model(kind: str) -> bool:
    """Whether an input model of Olive's type `kind` reaches the evaluation as ONNX graphs, whatever passes do."""
    return kind.lower() in ("onnxmodel", "compositemodel")


def _passes_before(recipe: Mapping[str, Any], block: Block) -> list[Block]:
    every = [other for other in blocks(recipe) if other.is_pass]
    return every[: every.index(block)] if block.is_pass else every


def _is_own_reference(recipe: Mapping[str, Any], block: Block, reference: ReferenceConfig | None) -> bool:
    """Whether a block is given the Hugging Face input model, which no pass of others changed, and compares with it."""
    kind, keys = input_model(recipe)
    if kind != "hfmodel" or reference is None or not all(other.is_ours for other in _passes_before(recipe, block)):
        return False
    is_at = is_same_path(str(keys.get("model_path")), reference.path)
    return reference.is_input_model or (is_at and not any(map(keys.get, _CHANGES)))


def accelerator(recipe: Mapping[str, Any]) -> str | None:
    """The execution provider that Olive passes on: the target's, else its device's, else the CPU's. None where it needs
    none: no ONNX model is evaluated before a pass, or made by one."""
    keys = _run_keys(recipe)
    names, device = _accelerator(_system(recipe, "target")[1])
    if names:
        return names[0]
    is_evaluated = keys.get("evaluator") and keys["evaluate_input_model"] and input_model(recipe)[0] == "onnxmodel"
    passes = Passes()
    made = [passes.module(block.type) for block in blocks(recipe) if block.is_pass]
    if not (is_evaluated or any(one.startswith("olive.passes.onnx") for one in made)):
        return None
    return "CUDAExecutionProvider" if device == "gpu" else CPU


def _run_keys(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the recipe and of its `engine`, with Olive's default."""
    return {"evaluate_input_model": True, **mapping(recipe.get("engine")), **recipe}


def _accelerator(system: Mapping[str, Any]) -> tuple[list[str], str]:
    """The providers that a system's first accelerator names, and its device."""
    first = next(iter(mappings({**mapping(system.get("config")), **system}.get("accelerators"))), {})
    names = first.get("execution_providers") or []
    named = [names] if isinstance(names, str) else names
    return [str(name[0] if isinstance(name, list) else name) for name in named], str(first.get("device")).lower()


def execution(settings: EvaluationSettings, inference: Any, handed_over: Any) -> dict[str, Any]:
    """The keys for where and how an ONNX model runs, as far as the settings do not have them: of the model's
    `inference_settings`, else the providers that Olive hands over (a name, names, or pairs of name and options)."""
    inference, engine = mapping(inference), settings.engine.written()
    options = dict(mapping(inference.get("session_options")))
    if threads := options.pop("intra_op_num_threads", None):
        engine = {"num_threads": threads, **engine}
    if extra := mapping(options.pop("extra_session_config", None)):
        written = {str(key): str(value) for key, value in extra.items()}
        engine["session_options"] = {**written, **engine.get("session_options", {})}
    if options:
        logger.warning("inference_settings.session_options: %s not used by the evaluation", ", ".join(sorted(options)))
    values: dict[str, Any] = {"engine": engine} if engine else {}
    named = inference.get("execution_provider")
    if settings.execution_provider is not None or not (providers := named or handed_over):
        return values
    names = [providers] if isinstance(providers, str) else providers
    values["execution_provider"] = [str(name) if isinstance(name, str) else name for name in names]
    if named and settings.provider_options is None and (own := inference.get("provider_options")):
        values["provider_options"] = [entry or {} for entry in own]
    return values


def input_model(recipe: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Type of the recipe's input model, in lower case, and its keys, those of its `config` too."""
    block = mapping(recipe.get("input_model"))
    keys = {**mapping(block.get("config")), **block}
    if (path := keys.pop("model_path", None)) is not None:
        with suppress(OliveExtError):  # one of the mistakes
            path = plain_path(path)
        keys["model_path"] = path
    return str(block.get("type", "")).lower(), keys


def plain_path(written: Any) -> Any:
    """The path or name of a 'model_path', also of Olive's mapping in its place; a registry's stays a mapping. Raises
    `OliveExtError` for what Olive refuses."""
    if written is None or isinstance(written, str):
        return written
    where, keys = "input_model.model_path", mapping(written)
    kind, keys = str(keys.get("type")).lower(), {**keys, **mapping(keys.get("config"))}
    if kind not in _RESOURCES:
        raise ConfigError(f"give a path, or a mapping with a 'type' of {', '.join(_RESOURCES)}", where, written)
    if missing := [key for key in _RESOURCES[kind].split() if not keys.get(key)]:
        raise MissingError("missing", f"{where}.config.{missing[0]}")
    named = str(keys[_RESOURCES[kind].split()[0]])
    if (kind == "file" and not Path(named).is_file()) or (kind == "folder" and not Path(named).is_dir()):
        raise NotFoundError(f"no such {kind}", f"{where}.config.path", named)
    return written if kind == _REGISTRY else named


def blocks(recipe: Mapping[str, Any]) -> Iterator[Block]:
    """Every evaluator and pass of the recipe, also those written in place of an evaluator's name."""
    for name, keys in mapping(recipe.get("evaluators")).items():
        yield Block(f"evaluators.{name}", mapping(keys))
    passes = mapping(recipe.get("passes"))
    for name, entry in passes.items():
        entries = entry if isinstance(entry, list) else [entry]
        for index, keys in enumerate(entries):
            where = f"passes.{name}" if len(entries) == 1 else f"passes.{name}.{index}"
            yield Block(where, mapping(keys), is_pass=True)
    for where, evaluator in _evaluator_references(recipe):
        if isinstance(evaluator, Mapping):
            yield Block(where, evaluator)


def _evaluator_references(recipe: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "evaluator", recipe.get("evaluator")
    yield "engine.evaluator", mapping(recipe.get("engine")).get("evaluator")
    for name, entry in mapping(recipe.get("passes")).items():
        for keys in entry if isinstance(entry, list) else [entry]:
            yield f"passes.{name}.evaluator", mapping(keys).get("evaluator")


def _system_references(recipe: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Where Olive takes a system's name or block, and what stands there."""
    for key in ("host", "target"):
        yield key, recipe.get(key)
        yield f"engine.{key}", mapping(recipe.get("engine")).get(key)
    for block in blocks(recipe):
        if block.is_pass:
            yield f"{block.where}.host", block.keys.get("host")


def _system(recipe: Mapping[str, Any], key: str) -> tuple[str, Mapping[str, Any]]:
    """The place and the keys of a system that is named, or written, at a key of the recipe or its engine."""
    written = (item for item in _system_references(recipe) if item[0] in (key, f"engine.{key}") and item[1])
    where, system = next(written, (key, {}))
    if isinstance(system, str):
        return f"systems.{system}", mapping(mapping(recipe.get("systems")).get(system))
    return where, mapping(system)


def _is_local(system: Mapping[str, Any]) -> bool:
    return str(system.get("type", "localsystem")).lower() in ("localsystem", "local")


def _undefined(recipe: Mapping[str, Any], section: str, references: Iterable[tuple[str, Any]]) -> list[OliveExtError]:
    known = list(mapping(recipe.get(section)))
    return [
        ConfigError(f"not in '{section}', which has {', '.join(known) or 'none'}", where, name, code="unknown_name")
        for where, name in references
        if isinstance(name, str) and name not in known
    ]


def _unused(recipe: Mapping[str, Any]) -> Iterator[OliveExtError]:
    """An error for evaluators of ours where no key names any: the run would end well, without a report. One that is
    kept beside the one that is named, or beside a pass that evaluates, is a choice."""
    ours = [block.where.partition(".")[2] for block in blocks(recipe) if block.is_ours and not block.is_pass]
    has_pass = any(block.is_pass and block.settings_type is EvaluationSettings for block in blocks(recipe))
    if ours and not has_pass and not any(evaluator for _, evaluator in _evaluator_references(recipe)):
        where = "here, as 'engine.evaluator' or as a pass's 'evaluator'"
        yield MissingError(f"nothing would be evaluated: give '{ours[0]}', {where}", "evaluator")


def _no_mappings(recipe: Mapping[str, Any]) -> Iterator[OliveExtError]:
    """An error for each part of the recipe that must be a mapping of names or of keys, and is not."""
    for section in ("systems", "evaluators", "passes"):
        entries = recipe.get(section)
        if entries is not None and not isinstance(entries, Mapping):
            yield ConfigError("give a mapping, each entry under a name of its own", section, entries)
        for name, entry in mapping(entries).items():
            is_chain = section == "passes" and isinstance(entry, list)
            for keys in entry if is_chain else [entry]:
                if not isinstance(keys, Mapping):
                    yield ConfigError("give a mapping with the key 'type'", f"{section}.{name}", keys)
    if not isinstance(recipe.get("engine", {}), Mapping | None):
        yield ConfigError("give a mapping", "engine", recipe["engine"])


def _mistakes_of_type(block: Block, passes: Passes | None) -> Iterator[OliveExtError]:
    if block.is_ours or (not block.is_pass and _plain(block.type) == "lmevaluator"):  # Olive's own is no misspelling
        return
    if block.keys and not block.type and (block.is_pass or "tasks" in block.settings()):
        wanted = "Olive's pass, for instance 'ModelBuilder'" if block.is_pass else "'OrtLMEvaluator'"
        yield MissingError(f"missing: give {wanted}", f"{block.where}.type")
        return
    ours = {name.lower(): name for name in (pass_settings() if block.is_pass else evaluator_settings())}
    near, cutoff, plain = dict(ours), 0.85, _plain(block.type)
    if block.is_pass and passes is not None:
        if plain in passes.modules:
            return
        near |= {name: kind.rpartition(".")[2] for name, kind in passes.modules.items()}
        cutoff = 0.8
    names = difflib.get_close_matches(plain, near, n=1, cutoff=cutoff)
    hint = f"did you mean '{near[names[0]]}'?" if names else "Olive knows no such pass"
    if names or (block.is_pass and passes is not None and passes.are_all):
        yield ConfigError(hint, f"{block.where}.type", block.type, code="unknown_name")


def _plain(pass_type: str) -> str:
    """Olive reads the types of passes without regard to case or to a leading path."""
    return pass_type.rpartition(".")[2].lower()


def what_is_missing(block: Block, settings: Settings) -> Iterator[OliveExtError]:
    """An error for each file that the block names and that does not exist, relative to the working directory; where all
    exist, one for the tasks that no file defines."""
    paths = [(key, block.keys[key]) for key in ("user_script", "script_dir") if block.keys.get(key)]
    tasks: list[Any] = []
    written: str | list[str] = []
    if not isinstance(settings, EvaluatorSettings):
        tasks, written = settings.tasks, settings.include_path or []
        paths += [("include_path", path) for path in ([written] if isinstance(written, str) else written)]
        paths += [("tasks", task) for task in tasks if isinstance(task, str) and task.endswith(TASK_FILES)]
    if missing := [(key, path) for key, path in paths if not Path(path).exists()]:
        where = block.where
        yield from (ConfigError("does not exist", f"{where}.{key}", path, code="not_found") for key, path in missing)
    elif tasks:
        from olive_ext.run.bounds import COSTS

        try:
            refuse_unknown([task for task in tasks if task not in COSTS], task_folders(written))
        except TaskError as error:
            yield error.inside(f"'{block.where}.tasks'").about(f"{block.where}.tasks", error.value)


def mapping(value: Any) -> Mapping[str, Any]:
    """`value`, or an empty mapping where it is none."""
    return value if isinstance(value, Mapping) else {}


def mappings(items: Any) -> list[Mapping[str, Any]]:
    """The mappings in a list, none where it is none."""
    return [item for item in items if isinstance(item, Mapping)] if isinstance(items, list) else []

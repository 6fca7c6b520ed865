"""Conversion of Olive's model handlers, device and execution providers to this package's own configuration.

Opens no ONNX model; loads Hugging Face models, which only the handler knows how to load.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from olive.model import CompositeModelHandler, HfModelHandler, ONNXModelHandler

from olive_ext.check.recipe import execution
from olive_ext.config import INPUT_MODEL, EvaluationConfig, EvaluationSettings, ModelSettings
from olive_ext.errors import ConfigError, ModelError, named_failures
from olive_ext.model import resolve
from olive_ext.model.files.content import read_outline
from olive_ext.model.files.locate import locate
from olive_ext.model.files.package_config import is_same_path
from olive_ext.model.spec.encoder_spec import find_parts, settle
from olive_ext.model.spec.tensor_names import Outline
from olive_ext.run.task_fit import refuse_arguments
from olive_ext.workflow.current_run import input_model_path, logger, running, with_reference

_DECODER_NAMES = ("decoder", "model", "text_decoder", "language_model")
_COMPONENT_NAMES = {"embedding": "embedding", "vision_encoder": "vision", "audio_encoder": "audio"}
"""mobius's names of a composite model's components, by what these do."""

COMPONENTS = "olive_ext_components"
"""Attribute of a decoder's handler: the other components' files by their part."""


def onnx_config(model: Any, settings: EvaluationSettings, execution_providers: Any) -> EvaluationConfig:
    """The whole configuration for an `ONNXModelHandler`; providers are the settings', else the model's
    `inference_settings`', else Olive's. Raises `ModelError`, `ConfigError`."""
    refuse_arguments(settings)
    for key in ("external_initializers_file_name", "constant_inputs_file_name", "use_ort_extensions"):
        if value := getattr(model, key, None):
            raise ModelError(f"the ONNX model has {key} = '{value}', which is not supported")
    resource, graph = Path(model.get_resource("model_path")), Path(model.model_path)
    is_folder = resource.is_dir()  # by which a package is recognised as one
    path, name = (resource, graph.relative_to(resource).as_posix()) if is_folder else (graph, None)
    where = {"onnx_file_name": name, "components": (model.model_attributes or {}).get(COMPONENTS, {})}
    which = ModelSettings(model=str(path), kind="onnx", tokenizer=settings.tokenizer, **where)
    files = resolve(which, tokenizer_candidates=tokenizer_candidates(model.model_attributes)).files
    values = {
        **written(settings),
        **execution(settings, getattr(model, "inference_settings", None), execution_providers),
        "model": {"path": str(path), "kind": "onnx", **where},
        "tokenizer": files.tokenizer,
    }
    return EvaluationConfig.parse(values)


def is_changed(model: Any) -> bool:
    """Whether the handler loads another model than the one in its folder or under its name."""
    return bool(getattr(model, "adapter_path", None) or getattr(model, "load_kwargs", None))


@contextmanager
def as_loaded(model: Any) -> Iterator[str]:
    """A folder, until the block ends, with the model that the handler loads by its arguments, adapters merged in, and
    its tokenizer. Raises `ModelError` where it cannot be loaded or saved."""
    with tempfile.TemporaryDirectory(prefix="olive-ext-") as folder:
        with named_failures(f"'{model.model_name_or_path}' with its adapter or load arguments", kind=ModelError):
            loaded = model.load_model(cache_model=False)
            merged = loaded.merge_and_unload() if hasattr(loaded, "merge_and_unload") else loaded
            merged.save_pretrained(folder)
            model.get_hf_tokenizer().save_pretrained(folder)
        yield folder


def torch_device(written_device: str | None, handed_over: Any) -> str:
    """torch's name of the setting, else of Olive's device; for an NPU, which torch does not know, the CPU. Raises
    `ConfigError` for a device that torch does not know, and for a CUDA device where it sees none."""
    import torch

    name = str(getattr(handed_over, "value", handed_over) or "cpu").lower()
    if written_device is None and name not in ("cpu", "gpu", "cuda"):
        logger.info("the Hugging Face baseline runs on the CPU: torch has no device '%s'", name)
        name = "cpu"
    asked = "cuda" if (written_device or name).lower() == "gpu" else written_device or name
    try:
        kind = torch.device(asked).type
    except RuntimeError as error:
        raise ConfigError("torch has no such device", "device", asked, code="unknown_name") from error
    if kind == "cuda" and not torch.cuda.is_available():
        origin = "'device'" if written_device else "Olive's accelerator"
        raise ConfigError(f"{origin} asks for a GPU, and torch sees none: set 'device' to 'cpu' for the baseline")
    return asked


def written(settings: EvaluationSettings) -> dict[str, Any]:
    """The evaluation's settings that the recipe has, so that defaults stay defaults; without `require`, which the
    workflow judges, but with the claim that one of its bounds is."""
    claim = settings.claim if settings.documents == "enough" and settings.require else settings.certain
    shared = settings.written(EvaluationSettings.model_fields.keys() - {"require"})
    return shared if claim is None else {**shared, "certain": claim}


def text_decoder(model: Any) -> Any:
    """The `ONNXModelHandler` of a composite model's text decoder.

    The package's genai_config.json names it; else it is the only component that returns logits, or among several the
    one with a decoder's name. Raises a `ModelError` that lists the components.
    """
    components = dict(model.get_model_components())
    onnx_parts = {name: part for name, part in components.items() if isinstance(part, ONNXModelHandler)}
    outlines = {name: read_outline(Path(part.model_path)) for name, part in onnx_parts.items()}
    graphs = [name for name, outline in outlines.items() if outline.has_logits]
    named = [name for name in _DECODER_NAMES if name in graphs]
    chosen = next(iter([*named, *graphs]), None) if named or len(graphs) == 1 else None
    parts = _parts(chosen, onnx_parts, outlines) if chosen is not None else {}
    root = model.get_resource("model_path")
    folders = [*([Path(root)] if root else []), *(file.parent for file in additional_files(model.model_attributes))]
    for folder in folders:
        if (folder / "genai_config.json").is_file() and (decoder := _in_package(model, folder, onnx_parts, parts)):
            return decoder
    if chosen is not None:
        return _with_components(model, onnx_parts[chosen], parts)
    listed = ", ".join(components)
    raise ModelError(
        f"several components of the composite model return logits ({', '.join(graphs)}); "
        f"one of them must be named {' or '.join(repr(name) for name in _DECODER_NAMES)}"
        if graphs
        else f"no component of the composite model is a text decoder: none of {listed} returns logits"
    )


def _parts(decoder: str, handlers: Mapping[str, ONNXModelHandler], outlines: Mapping[str, Outline]) -> dict[str, str]:
    files = {name: Path(part.model_path).resolve() for name, part in handlers.items() if name != decoder}
    known = find_parts(outlines[decoder], {file: outlines[name] for name, file in files.items()})
    named = {
        _COMPONENT_NAMES[name]: (file, f"the component's name '{name}'")
        for name, file in files.items()
        if name in _COMPONENT_NAMES and known
    }
    return {part: str(file) for part, (file, _) in settle(named, known).items()}


def _in_package(
    model: Any, folder: Path, handlers: Mapping[str, ONNXModelHandler], parts: Mapping[str, str]
) -> ONNXModelHandler | None:
    """The decoder that genai_config.json in `folder` names, also where the components are only the files next to it.
    None where they are not that package's files, but were made from them."""
    which = ModelSettings(model=str(folder), kind="onnx")
    files = resolve(which, tokenizer_candidates=tokenizer_candidates(model.model_attributes)).files
    same = [part for part in handlers.values() if Path(part.model_path).resolve() == files.decoder.resolve()]
    companions = {str(companion.graph.resolve()) for companion in files.companions.values()}
    paths = parts.values() if same else (str(Path(part.model_path).resolve()) for part in handlers.values())
    if not companions.issuperset(paths):
        return None
    return ONNXModelHandler(
        str(files.directory),
        onnx_file_name=files.decoder.relative_to(files.directory).as_posix(),
        inference_settings=getattr(next(iter(same), None), "inference_settings", None),
        model_attributes=model.model_attributes,
    )


def _with_components(model: Any, decoder: ONNXModelHandler, parts: Mapping[str, str]) -> ONNXModelHandler:
    if not parts:
        return decoder
    attributes = {**(model.model_attributes or {}), **(decoder.model_attributes or {}), COMPONENTS: dict(parts)}
    settings = getattr(decoder, "inference_settings", None)
    return ONNXModelHandler(decoder.model_path, inference_settings=settings, model_attributes=attributes)


def label(path: str) -> str:
    """A folder name for the model at `path`. In a workflow it is what made the model ("input_model", or the passes'
    names); for a search's candidates and outside a workflow, Olive's model id where the model is in Olive's cache; else
    its last name.

    An .onnx file is labelled by its own name, or by its folder's where it is just "model".
    """
    run, passes = running.get(), _passes(path)
    if run is not None and passes is not None and not (run.is_search and passes):
        return re.sub(r"[^\w.-]+", "_", "-".join(passes)) or INPUT_MODEL
    file, folder = _file_and_folder(path)
    last_name = file.stem if file != folder and file.stem != "model" else folder.name
    return _model_id(path) or last_name or "model"


def name_of(path: str) -> str | None:
    """What was done in the running workflow to the model at `path`; None where that is not known."""
    run, passes = running.get(), _passes(path)
    return None if run is None or passes is None else run.described(passes)


def _passes(path: str) -> tuple[str, ...] | None:
    """The passes that made the model at `path` in the running workflow, none of the input model."""
    run, model_id = running.get(), _model_id(path)
    if run is None:
        return None
    if model_id in run.made_by:
        return run.made_by[model_id]
    input_path = input_model_path()
    return () if input_path is not None and is_same_path(path, input_path) else None


def _model_id(path: str) -> str | None:
    """Olive's id of a model in its cache, `runs/<id>/models`."""
    folder = _file_and_folder(path)[1]
    parents = (parent for parent in (folder, *folder.parents) if parent.name == "models")
    return next((parent.parent.name for parent in parents if parent.parent.parent.name == "runs"), None)


def _file_and_folder(path: str) -> tuple[Path, Path]:
    """A model's path without links, and its folder, which is the same of one that is no .onnx file."""
    file = Path(path).resolve() if Path(path).exists() else Path(path)
    return file, file.parent if file.suffix == ".onnx" else file


def tokenizer_candidates(model_attributes: Mapping[str, Any] | None) -> list[str]:
    """Where a tokenizer may be, since Olive's passes do not carry that of an ONNX model along: the folders of the files
    that travel with the model, the model it was made from, and the recipe's input model with what it reads."""
    folders = [str(file.parent) for file in additional_files(model_attributes)]
    recipe_model = input_model_path()
    origins = [(model_attributes or {}).get("_name_or_path"), recipe_model]
    with suppress(ModelError):  # a variant of a model package shares its tokenizer with others
        origins += [locate(recipe_model).tokenizer] if recipe_model and Path(recipe_model).suffix == ".onnx" else []
    return list(dict.fromkeys([*folders, *(str(origin) for origin in origins if origin)]))


def additional_files(model_attributes: Mapping[str, Any] | None) -> list[Path]:
    """The files that travel with a model through Olive's passes."""
    return [Path(file) for file in (model_attributes or {}).get("additional_files") or []]


def config_of(model: Any, settings: EvaluationSettings, device: Any, execution_providers: Any) -> EvaluationConfig:
    """The whole configuration for a model handler on Olive's accelerator, with the reference that the running workflow
    names; `model_class` concerns ONNX models alone. Raises `OliveExtError`."""
    (kind, handler), settings = handler_of(model), with_reference(settings)
    if kind == "onnx":
        return onnx_config(handler, settings, execution_providers)
    which = {"path": str(handler.model_name_or_path), "kind": "hf"}
    config = EvaluationConfig.parse({**written(settings), "model": which})
    return config.model_copy(update={"device": torch_device(config.device, device)})


KINDS: dict[type, str] = {HfModelHandler: "hf", ONNXModelHandler: "onnx", CompositeModelHandler: "onnx"}


def handler_of(model: Any) -> tuple[str, Any]:
    """("hf" or "onnx", the handler to evaluate); `ModelError` for a handler of another kind."""
    kind = next((kind for handler, kind in KINDS.items() if isinstance(model, handler)), None)
    if kind is None:
        taken = ", ".join(handler.__name__ for handler in KINDS)
        raise ModelError(f"Olive hands over a {type(model).__name__}, which cannot be evaluated; {taken} can")
    return kind, text_decoder(model) if isinstance(model, CompositeModelHandler) else model

"""ONNX Runtime's model packages: a folder with manifest.json (often NAME.ortpackage) that holds several builds of one
model, its variants, each for an execution provider. This module finds the variant that is asked for.

A package has components, mostly a single one that holds a whole model with its genai_config.json. Where there are
several, each is a graph with a part of its own. Knows no graph's content. Paths lead only to files in the package, even
where its manifest says that the package is installed and may name others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args
from unicodedata import normalize

from olive_ext.config.model import Components
from olive_ext.errors import DamagedError, ModelError, NotFoundError, listed
from olive_ext.model.files.package_config import (
    GENAI_CONFIG,
    MANIFEST,
    OVERLAY,
    ComponentFile,
    GenaiConfig,
    Manifest,
    contents,
    has_components,
    inside,
    is_hub_name,
    json_object,
    mistakes_in,
    read_json,
)
from olive_ext.model.providers.table import CPU, ROWS, meant_provider
from olive_ext.model.types import GraphFiles

COMPONENT = "component.json"
METADATA = "metadata.json"
"""The name, before its own, of a component of a package by Olive 0.13's `generate-model-package`, in models/."""

CONFIGS = "configs"
"""The folder of such a package with what all variants share, tokenizer and genai_config.json among it. A variant adds
its `OVERLAY` to that, a JSON merge patch (RFC 7386)."""

ASSETS, ASSET = "shared_assets", "sha256:"
"""The prefix of shared folders, which are named by a digest of their content."""

WEIGHTS = "session.model_external_initializers_file_folder_path"
"""ONNX Runtime's session option for a graph's external data; a file of the same name may lie beside the graph."""

_MAJOR = "1"
"""The schema versions that are read."""

_ROLES = {
    "model": "decoder",
    "text": "decoder",
    "decoder_with_past": "decoder",
    "embeddings": "embedding",
    "vision_encoder": "vision",
    "speech": "audio",
    "speech_encoder": "audio",
    "audio_encoder": "audio",
}
"""Other names of components, and the part that each is."""

_PARTS = get_args(get_args(Components)[0])
"""Parts of a model that are graphs. Other components, a tokenizer for instance, are ignored."""


@dataclass(frozen=True)
class Variant:
    """One build of a component."""

    name: str
    folder: Path
    provider: str
    """Full name of the execution provider that it is for; empty for any."""

    ort: Mapping[str, Any]
    """What ONNX Runtime reads of it: `model_file`, and options of the session and the provider."""

    @property
    def graph(self) -> Path | None:
        """The graph as the package names it for ONNX Runtime, which may lie in a folder that variants share; None where
        no graph is named. Raises `ModelError` where its weights are not beside it."""
        file, options = self.ort.get("model_file"), self.ort.get("session_options")
        if weights := options.get(WEIGHTS) if isinstance(options, Mapping) else None:
            problem = f"variant '{self.name}' has its weights in another folder ({WEIGHTS} = '{weights}')"
            raise ModelError(f"'{self.folder}': {problem}; put them beside the graph", code="unsupported")
        return (asset if file.startswith(ASSET) else inside)(self.folder, file, "model_file") if file else None


def is_package(root: Path) -> bool:
    """Whether a folder is a model package. A manifest.json beside a genai_config.json belongs to another program. So
    does one without components beside a graph, or beside a config.json, which the Hub counts."""
    if not (root / MANIFEST).is_file() or (root / GENAI_CONFIG).exists():
        return False
    if not (root / "config.json").exists() and not any(root.glob("[!.]*.onnx")):
        return True
    return has_components(root / MANIFEST)


def why_missing(kind: str, path: Any, onnx_file_name: str | None) -> str:
    """Why a recipe's input model, of Olive's type `kind` in lower case, does not exist; empty where it does, or may.

    Olive takes a path that does not exist for a name on the hub, and looks there.
    """
    if not isinstance(path, str) or path.startswith("azureml:"):
        return ""
    if not path:
        return "'input_model.model_path' is empty: give a file, a folder, or a model's name on the hub"
    if not Path(path).exists() and (kind == "onnxmodel" or not is_hub_name(path)):
        return f"'input_model.model_path' = '{path}': no such file or folder"
    if is_package(Path(path)):
        how = "give the file of one variant as 'input_model.model_path', or evaluate it without a workflow"
        return f"'input_model.model_path' = '{path}' is a model package, which Olive does not open: {how}"
    if onnx_file_name and Path(path).is_dir() and not (Path(path) / onnx_file_name).is_file():
        return f"'input_model.onnx_file_name' = '{onnx_file_name}' is not in '{path}': {contents(Path(path))}"
    return ""


def choose(root: Path, name: str | None, provider: str | None) -> tuple[Variant, dict[str, GraphFiles], str]:
    """The variant of a package's decoder: by its `name`, else for the `provider` (a full name), else the only one, else
    the one for the CPU. Also the other graphs by part, and the rule that chose. Raises `ModelError`, with all variants,
    where there is no such variant or more than one."""
    components = _components(root)
    roles = _ROLES | ({"decoder": "first_step"} if "decoder_with_past" in components else {})
    parts: dict[str, list[Variant]] = {}
    for component, variants in components.items():
        part = roles.get(component, component)
        if part in parts:
            raise ModelError(f"'{root}' has two components that are its {part}: it has {listed(components)}")
        parts[part] = variants
    decoders = next(iter(parts.values())) if len(parts) == 1 else parts.get("decoder")
    if decoders is None:
        raise ModelError(f"'{root}' has no component that is the decoder: it has {listed(components)}")
    chosen, rule = _chosen(root, "decoder", decoders, name, *filter(None, [provider]))
    for named, is_there in ((chosen.folder, Path.is_dir), (chosen.graph, Path.is_file)):
        if named is not None and not is_there(named):
            raise NotFoundError(f"'{root}' names '{named}' of the variant '{chosen.name}'; it is not there")
    options = ("session_options", "provider_options")
    notes = [f"executor_info.ort.{key} is not applied" for key in options if chosen.ort.get(key)]
    graphs = {}
    for part, variants in parts.items():
        if variants is not decoders and part in _PARTS:
            asked = chosen.provider or provider or CPU
            variant = _chosen(root, part, variants, None, asked, CPU, like=chosen.name)[0]
            graphs[part] = GraphFiles(_graph(variant, part), provider=variant.provider)
            notes += [f"the variant '{variant.name}' of its {part}"] if variant.name != chosen.name else []
        elif variants is not decoders:
            notes.append(f"the component '{part}' is left alone")
    return chosen, graphs, "; ".join([rule, *notes])


def refuse_shared(root: Path, graph: Path) -> None:
    """Raises `ModelError` where several variants of a component have the graph: what changes one changes the others."""
    for variants in _components(root).values() if is_package(root) else ():
        names = [variant.name for variant in variants if graph == (variant.graph or variant.folder / graph.name)]
        if len(names) > 1:
            raise ModelError(f"the variants {listed(names)} have '{graph}' in common: give each a folder of its own")


def asset(folder: Path, uri: str, key: str) -> Path:
    """The folder that a variant's configuration names by a digest under `key`, in the package around `folder`."""
    root = next((above for above in (folder, *folder.parents) if is_package(above)), None)
    if root is None:
        raise NotFoundError(f"'{folder}' names '{uri}' for {key}, and is in no model package")
    digest, _, below = uri.partition("/")
    manifest = read_json(root / MANIFEST, Manifest)
    written = (manifest.get("shared_assets") or {}).get(digest) or f"{ASSETS}/{digest.replace(':', '-')}"
    place = inside(inside(root, written, f"shared_assets of {MANIFEST}"), below or ".", key)
    if not place.exists():
        raise NotFoundError(f"'{folder}' names '{uri}' for {key}; '{place}' does not exist")
    return place


def _chosen(
    root: Path, part: str, variants: Sequence[Variant], name: str | None, *providers: str, like: str = ""
) -> tuple[Variant, str]:
    """The variant of a part with that name. Without a name, the one for the first of `providers` that has any; of
    several, or without a provider, the one named `like`. Also the rule that chose."""
    names = ", ".join(f"{one.name} ({one.provider or 'any provider'})" for one in variants)
    there = f"'{root}' has of its {part} {names}"
    if name is not None:
        alike = (one for one in variants if normalize("NFC", one.name) == normalize("NFC", name))
        named = min(alike, key=lambda one: one.name != name, default=None)
        if named is None:
            raise NotFoundError(there, "variant", name)
        return named, f"the setting 'variant', of {names}"
    if not providers and len(variants) == 1:
        return variants[0], f"the only variant, of {names}"
    wanted = providers or (CPU,)
    fit = next(filter(None, ([v for v in variants if v.provider == one] for one in (*wanted, ""))), [])
    if not fit and part == "decoder" and wanted[0].lower() not in ROWS and (hint := meant_provider(wanted[0])):
        raise ModelError(f"{hint} {there}", "execution_provider", wanted[0], code="unknown_name")
    fit = [one for one in fit or variants if one.name == like] or fit
    if not fit:
        raise NotFoundError(f"no variant is for {wanted[0]}: {there}; name one, its provider or its folder", "variant")
    if len(fit) > 1:
        raise ModelError(f"several variants fit: {there}; name one, or its folder", "variant", code="missing")
    return fit[0], f"the variant for {wanted[0]}, of {names}"


def _graph(variant: Variant, part: str) -> Path:
    """The graph of a component that is a graph: as the package names it, else genai_config.json, else the only one."""
    config = variant.folder / GENAI_CONFIG
    whole = read_json(config, GenaiConfig) if config.is_file() else (with_overlay(variant.folder) or ({},))[0]
    written: Mapping[str, Any] = whole.get("model", {})
    section = written.get(part) or written.get("speech" if part == "audio" else part) or {}
    name = section.get("filename")
    graph = variant.graph or (inside(variant.folder, name, f"model.{part}.filename") if name else None)
    graphs = [graph] if graph else sorted(variant.folder.glob("*.onnx"))
    if len(graphs) != 1 or not graphs[0].is_file():
        raise NotFoundError(f"'{variant.folder}' names no graph of the component '{part}' and does not hold one alone")
    return graphs[0]


def _components(root: Path) -> dict[str, list[Variant]]:
    """The variants of each component. Raises `ModelError`."""
    file = root / MANIFEST
    manifest = read_json(file, Manifest)
    _refuse_version(file, manifest.get("schema_version", ""))
    components = manifest.get("components") or {}
    if isinstance(components, list):
        components = {name: f"models/{name}/{METADATA}" for name in components}
    by_part: dict[str, list[Variant]] = {}
    for component, written in components.items():
        folder, body = root, written
        if isinstance(written, str):
            path = inside(root, written, f"components.{component}")
            file = path / COMPONENT if path.is_dir() else path
            if not file.is_file():
                raise NotFoundError(f"'{root / MANIFEST}' names '{written}' for {component}; '{file}' does not exist")
            folder, body = file.parent, read_json(file, ComponentFile)
        _refuse_version(file, body.get("schema_version", _MAJOR))
        by_part[component] = [_variant(folder, name, one) for name, one in (body.get("variants") or {}).items()]
    if not any(by_part.values()):
        raise DamagedError(f"'{root / MANIFEST}' has no component with a variant")
    return {component: variants for component, variants in by_part.items() if variants}


def with_overlay(folder: Path, *others: Path) -> tuple[Mapping[str, Any], Path] | None:
    """genai_config.json of the variant in a folder, with `others` of the package's other components where a package by
    Olive 0.13 keeps it for all variants, and the folder of that file; else None. Raises `ModelError`."""
    root = folder.parent.parent.parent
    if not (folder.parent / METADATA).is_file() or not (root / CONFIGS / GENAI_CONFIG).is_file():
        return None
    shared = inside(root, CONFIGS, CONFIGS)
    config: Any = json_object(shared / GENAI_CONFIG, is_strict=True)
    for own in (one / OVERLAY for one in (*others, folder)):
        config = _patched(config, json_object(own, is_strict=True) if own.is_file() else {})
        with mistakes_in(own):
            GenaiConfig.parse(config)
    return config, shared


def _patched(value: Any, patch: Any) -> Any:
    if not isinstance(patch, Mapping):
        return patch
    value = value if isinstance(value, Mapping) else {}
    merged = {**value, **{key: _patched(value.get(key), item) for key, item in patch.items()}}
    return {key: item for key, item in merged.items() if item is not None}


def _refuse_version(file: Path, version: object) -> None:
    if str(version).partition(".")[0] != _MAJOR:
        raise ModelError(f"'{file}' has the schema_version '{version}': {_MAJOR}.x is read", code="unsupported")


def _variant(component: Path, name: str, written: Mapping[str, Any]) -> Variant:
    folder = inside(component, written.get("variant_directory") or name, "variant_directory")
    if not name or folder == component:
        raise DamagedError(f"'{component}' has a variant {name!r} in the folder '{folder}': give a name and a folder")
    ort = (written.get("executor_info") or {}).get("ort") or {}
    if isinstance(ort, str):
        config = inside(folder, ort, "executor_info.ort")
        if not config.is_file():
            raise NotFoundError(f"'{component}' names '{ort}' for the variant '{name}'; '{config}' does not exist")
        ort = json_object(config, is_strict=True)
    if not isinstance(file := ort.get("model_file") or "", str):
        raise DamagedError(f"'{component}' has {file!r} for the model_file of the variant '{name}'; it is no name")
    ep = written.get("ep") or ""
    if (row := ROWS.get(ep.lower())) is not None and row.name != ep:
        full = f"ONNX Runtime compares it with '{row.name}', letter by letter"
        raise DamagedError(f"'{component}' has '{ep}' for the ep of the variant '{name}': {full}")
    return Variant(name, folder, ep, ort)

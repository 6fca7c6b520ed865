"""From a path that a user wrote to the files of one decoder: graphs, configuration, tokenizer. Opens no session and
knows no Olive beyond the model_config.json that it leaves in an output folder."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from olive_ext.errors import DamagedError, MismatchError, ModelError, NotFoundError, counted, listed, warn_ignored
from olive_ext.model.files.content import hf_weights, read_outline, refuse_pointer, weight_files
from olive_ext.model.files.model_package import ASSET, asset, choose, is_package, with_overlay
from olive_ext.model.files.package_config import (
    GENAI_CONFIG,
    MEDIA_SECTIONS,
    OLIVE_RECORD,
    OVERLAY,
    GenaiConfig,
    HfConfig,
    contents,
    inside,
    is_hub_name,
    named_files,
    olive_record,
    read_json,
    real_path,
    refuse_strangers,
    within,
)
from olive_ext.model.spec.tensor_names import EMBEDDING_NAMES, Outline
from olive_ext.model.types import GraphFiles, ModelFiles, NamedGraph

logger = logging.getLogger(__name__)

Kind = Literal["onnx", "hf"]

_BY_USER = "the setting 'components'"
_GRAPHS = ("*.onnx", "*/*.onnx")
_MARKS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
"""Files by which a tokenizer's folder is recognized."""

_LEVELS_UP = 3

_TEXT_SECTIONS = {"embedding": "embedding", "encoder": "encoder"}
"""Sections of genai_config.json whose graph text needs, and the name of that part here."""

_SIBLINGS = {"encoder": "encoder", "embedding": "embedding", "vision_encoder": "vision", "audio_encoder": "audio"}
"""Folders beside the decoder's with a graph of its file name, as mobius makes them, and the name of that part here."""

_WITH_PAST, _WITHOUT_PAST, _MERGED = "decoder_with_past_model", "decoder_model", "decoder_model_merged"
_ENCODER = "encoder_model"
"""optimum's names of an encoder-decoder's graphs; a suffix such as "_quantized" may follow."""


def locate(
    path: str | Path,
    onnx_file_name: str | None = None,
    tokenizer: str | None = None,
    extra_tokenizer_candidates: Sequence[str | Path] = (),
    components: Mapping[str, str] | None = None,
    variant: str | None = None,
    provider: str | None = None,
) -> ModelFiles:
    """The files of the model at `path`: an .onnx file, a folder with one or several, a genai package, or Olive's output
    folder. `extra_tokenizer_candidates` (folders, files or a hub name) are tried after the model's own folders.
    `components` are graphs by what they do, relative to `path`. Of a model package the files are those of one variant,
    by its name or by the `provider` (a full name) that is asked for.

    The origins have the keys "decoder", "genai_config" and "tokenizer", of a package "variant". Raises `ModelError`.
    """
    root = real_path(path)
    logger.debug("looking for the files of '%s'", path)
    stated: dict[str, NamedGraph] = {}
    origins: dict[str, str] = {}
    graphs: dict[str, GraphFiles] = {}
    name = ep = ""
    if is_package(root):
        chosen, graphs, rule = choose(root, variant, provider)
        root, origins, name, ep = chosen.folder, {"variant": rule}, chosen.name, chosen.provider
        stated = {part: (one.graph, f"the package's component '{part}'") for part, one in graphs.items()}
        if chosen.graph is not None and onnx_file_name is None:
            stated["decoder"] = chosen.graph, "the package's model_file"
    elif variant is not None:
        raise MismatchError(f"'{root}' is no model package", "variant", variant)
    overlaid = with_overlay(root if root.is_dir() else root.parent, *(one.graph.parent for one in graphs.values()))
    beside = root.parent if root.is_file() else root
    for part, written in (components or {}).items():
        if not (beside / written).is_file():
            raise NotFoundError(f"it is not in '{beside}': {contents(beside)}", f"components.{part}", written)
        stated[part] = real_path(beside / written), _BY_USER
    decoder, rule = _find_decoder(root, onnx_file_name, stated.pop("decoder", None), overlaid and overlaid[0])
    outline = read_outline(decoder)
    weights = _weights(decoder, outline)
    config_file, config_rule = _find_genai_config(root, decoder)
    genai_config = read_json(config_file, GenaiConfig) if config_file else {}
    directory = config_file.parent if config_file else decoder.parent
    if config_file is None and overlaid is not None:
        genai_config, shared = overlaid
        config_rule = f"{shared.name}/{GENAI_CONFIG} with the variant's {OVERLAY}"
        extra_tokenizer_candidates = (shared, *extra_tokenizer_candidates)
    stages = _stages(directory, genai_config)
    if not any(file.is_file() and file.samefile(decoder) for file in stages.values()):
        stages = {}  # another graph in the same folder is a model of its own
    elif problem := _missing_stage(directory, stages):
        raise ModelError(problem)
    for graph in dict.fromkeys(file for file in stages.values() if not file.samefile(decoder)):
        weights += (graph, *_weights(graph, read_outline(graph)))
    candidates = list(_tokenizer_candidates(extra_tokenizer_candidates, root, decoder))
    tokenizer_place, tokenizer_rule = _find_tokenizer(decoder.parent, tokenizer, genai_config, candidates)
    named = {**find_companions(decoder, directory, genai_config, stated), **stated}
    companions = _companions(root, decoder, outline, named)
    for handed_on in dict.fromkeys((Path(tokenizer_place), *([directory] if config_file else []))):
        refuse_strangers(handed_on)
    for key, name_of_file in named_files(genai_config):  # onnxruntime-genai opens those of unknown sections, too
        inside(directory, name_of_file, key)
    folders = (decoder.parent, directory, *([Path(tokenizer_place)] if companions or overlaid else []))
    eps = {one.graph: one.provider for one in graphs.values()}
    return ModelFiles(
        decoder=decoder,
        directory=directory,
        genai_config=genai_config,
        hf_config=_hf_config(*folders),
        tokenizer=tokenizer_place,
        origins={**origins, "decoder": rule, "genai_config": config_rule, "tokenizer": tokenizer_rule}
        | {part: found_by for part, (_, _, found_by) in companions.items()},
        variant=name,
        variant_provider=ep,
        weights=weights,
        pipeline=tuple(stages),
        companions={
            part: GraphFiles(file, _weights(file, graph), eps.get(file, ""))
            for part, (file, graph, _) in companions.items()
        },
    )


def locate_hf(path: str, tokenizer: str | None = None) -> ModelFiles:
    """The files of the Hugging Face model in the folder, or under the hub name, `path`. Nothing is looked up."""
    origin = "the model's own" if tokenizer is None else "the setting 'tokenizer'"
    folder = Path(path)
    for handed_on in (folder, *([Path(tokenizer)] if tokenizer else [])):
        refuse_strangers(handed_on)
    weights = tuple(hf_weights(folder))
    return ModelFiles(folder, folder, {}, _hf_config(folder), tokenizer or path, {"tokenizer": origin}, weights)


def _hf_config(*candidates: Path) -> Mapping[str, Any]:
    config_file = next((file for folder in candidates if (file := folder / "config.json").is_file()), None)
    return read_json(config_file, HfConfig) if config_file else {}


def _companions(
    root: Path, decoder: Path, outline: Outline, named: Mapping[str, NamedGraph]
) -> dict[str, tuple[Path, Outline, str]]:
    """The other graphs by part, each with its interface and the rule that found it. Where nothing names the graph that
    makes the decoder's inputs from tokens, all graphs of the folder `root` are examined."""
    from olive_ext.model.spec.encoder_spec import find_parts, settle  # imported here: it brings onnx along

    graphs = {file: read_outline(file) for file, _ in named.values()}
    if (made := sorted(EMBEDDING_NAMES & outline.outputs.keys())) and not outline.has_logits:
        raise MismatchError(f"'{decoder}' is to be the decoder; it is the embedding, because it returns '{made[0]}'")
    takes = min(EMBEDDING_NAMES & outline.inputs.keys(), default=None)
    if takes and "embedding" not in named and root.is_dir():
        others = (file for pattern in _GRAPHS for file in _graphs_below(root, pattern) if file != decoder)
        graphs |= {file: graph for file in sorted(others) if (graph := _readable(file)) is not None}
    if not takes and named.get("embedding", (None, ""))[1] == _BY_USER:
        raise MismatchError(f"{_BY_USER} names an embedding graph; '{decoder}' takes token ids itself")
    settled = settle(named, find_parts(outline, graphs))
    if takes and "embedding" in named and takes not in graphs[named["embedding"][0]].outputs:
        file, rule = named["embedding"]
        shown = listed(graphs[file].outputs)
        raise MismatchError(f"by {rule} '{file}' is the part 'embedding'; it returns {shown}, not '{takes}'")
    for part, (file, rule) in named.items():
        if file == decoder and rule == _BY_USER:
            raise MismatchError("it is the decoder itself: name the graph of that part", f"components.{part}", file)
    return {part: (file, graphs[file], rule) for part, (file, rule) in settled.items()}


def _weights(graph: Path, outline: Outline) -> tuple[Path, ...]:
    locations = outline.locations
    files = weight_files(graph, locations)
    for location, file in files.items():
        refuse_pointer(file)
        size, needed = file.stat().st_size, locations[location]
        if size < needed:
            raise DamagedError(f"'{file}' has {size:,} bytes, and '{graph}' reads {needed:,} of it: it is cut off")
    return tuple(files.values())


def model_kind(path: str | Path) -> Kind:
    """What `path` holds: "onnx" for what `locate` takes, "hf" for config.json with weights and for a hub name.

    A Hugging Face folder with ONNX files only in a sub-folder is "hf", which is said once. Raises `ModelError` for
    anything else.
    """
    if is_hub_name(str(path), needs_owner=True):
        return "hf"
    root = real_path(path)
    if root.is_file():
        _refuse_others(root)
        return "onnx"
    if is_package(root) or (root / GENAI_CONFIG).is_file() or any(root.glob("*.onnx")):
        return "onnx"
    kind, record = olive_record(root)
    if kind == "onnxmodel":
        return "onnx"
    graphs = sorted(root.glob("*/*.onnx"))
    if (root / "config.json").is_file() and hf_weights(root):
        if graphs:
            warn_ignored(f"'{graphs[0]}', because '{root}' holds weights of Hugging Face: name the graph to run it")
        return "hf"
    if graphs:
        return "onnx"
    hint = f"; its {OLIVE_RECORD} names the model '{record['model_path']}'" if record.get("model_path") else ""
    raise ModelError(f"'{root}' is neither an ONNX nor a Hugging Face model: {contents(root)}{hint if kind else ''}")


def _find_decoder(
    root: Path, onnx_file_name: str | None, component: NamedGraph | None, overlaid: Mapping[str, Any] | None
) -> NamedGraph:
    if component is not None:
        if onnx_file_name is not None and component[0] != root / onnx_file_name:
            raise MismatchError(f"{_BY_USER} has the decoder '{component[0]}'", "onnx_file_name", onnx_file_name)
        return component
    if root.is_file():
        _refuse_others(root)
        if onnx_file_name and Path(onnx_file_name).name != root.name:
            raise MismatchError(f"the model path is the file '{root}'", "onnx_file_name", onnx_file_name)
        return root, "the model path"
    if onnx_file_name:
        if not (root / onnx_file_name).is_file():
            raise NotFoundError(f"it is not in '{root}': {contents(root)}", "onnx_file_name", onnx_file_name)
        return root / onnx_file_name, "the setting 'onnx_file_name'"
    named, rule = _genai_decoder(root, overlaid)
    if named is not None:
        return named, rule
    if recorded := _olive_decoder(root):
        return recorded, f"Olive's {OLIVE_RECORD}"
    if rule:
        raise ModelError(f"{rule}; set 'onnx_file_name'", "onnx_file_name", code="missing")
    return _only_decoder(root)


def _genai_decoder(root: Path, overlaid: Mapping[str, Any] | None) -> tuple[Path | None, str]:
    """The decoder that genai_config.json of `root` names and the key that names it, or none and the reason."""
    file = root / (GENAI_CONFIG if overlaid is None else OVERLAY)
    if not file.is_file():
        return None, ""
    config = read_json(file, GenaiConfig) if overlaid is None else overlaid
    model = config.get("model", {})
    if "decoder" not in model:
        raise ModelError(f"'{file}' describes no text decoder (model type '{model.get('type')}')")
    if stages := _stages(root, config):
        problem = _missing_stage(root, stages)
        rule = f"the first graph of {file.name}'s model.decoder.pipeline"
        return (None, problem) if problem else (next(iter(stages.values())), rule)
    name = model["decoder"].get("filename")
    if not name:
        return None, f"'{file}' names no model.decoder.filename"
    decoder = inside(root, name, "model.decoder.filename")
    if not decoder.is_file():
        return None, f"'{file}' names the decoder '{name}', which is not there: {contents(root)}"
    return decoder, f"{file.name}'s model.decoder.filename"


def _olive_decoder(root: Path) -> Path | None:
    """The file of the ONNXModel that is recorded in `root`. Olive writes absolute paths: in a folder that has been
    moved, they are tried relative to the record first."""
    kind, config = olive_record(root)
    if kind != "onnxmodel" or not isinstance(config.get("model_path"), str):
        return None
    recorded, name = Path(config["model_path"]), config.get("onnx_file_name")
    files = [root / name, recorded / name] if name else [root / recorded.name, recorded]
    graphs = (file for file in files if file.suffix.lower() == ".onnx" and file.is_file())
    return next((real_path(within(file)) for file in graphs), None)


def _only_decoder(root: Path) -> tuple[Path, str]:
    graphs = next(filter(None, (_graphs_below(root, pattern) for pattern in _GRAPHS)), [])
    names = ", ".join(str(graph.relative_to(root)) for graph in graphs)
    if not graphs:
        raise NotFoundError(f"no .onnx file in '{root}': {contents(root)}")
    if len(graphs) == 1:
        return graphs[0], "the only .onnx file"
    decoders = [graph for graph in graphs if (outline := _readable(graph)) is not None and outline.has_logits]
    if not decoders:
        raise ModelError(f"no text decoder in '{root}': none of {names} returns logits")
    if picked := pick_with_past(decoders):
        return picked
    if len(decoders) > 1:
        names = ", ".join(str(graph.relative_to(root)) for graph in decoders)
        raise ModelError(f"several decoders in '{root}': {names}; set 'onnx_file_name' to one", code="missing")
    return decoders[0], f"the only one of {names} that returns logits"


def pick_with_past(graphs: Sequence[Path]) -> tuple[Path, str] | None:
    """The decoder to run of an encoder-decoder exported by optimum, and why; None for other `graphs`.

    It is the decoder with a past, because that also runs with an empty past, and because its LM head is not hidden in a
    subgraph of an If node, as that of the merged decoder is.
    """
    by_name = {graph.stem: graph for graph in graphs if (graph.parent / f"{_ENCODER}.onnx").is_file()}
    if _WITH_PAST in by_name and _WITHOUT_PAST in by_name:
        return by_name[_WITH_PAST], "the decoder with a past; the one without computes the cross-attention KV"
    if _MERGED in by_name:
        return by_name[_MERGED], "the decoder with both branches"
    return None


def _readable(graph: Path) -> Outline | None:
    try:
        return read_outline(graph)
    except ModelError:
        return None


def _upwards(folder: Path) -> Iterator[tuple[Path, str]]:
    """The model's `folder` and the three folders above it, each with a description of its place."""
    yield folder, "beside the model"
    for level, above in enumerate(folder.parents[:_LEVELS_UP], start=1):
        yield above, f"{counted(level, 'folder')} above the model"


def _find_genai_config(root: Path, decoder: Path) -> tuple[Path | None, str]:
    for folder, rule in ((root, "in the folder asked for"), *_upwards(decoder.parent)):
        config = folder / GENAI_CONFIG
        if config.is_file() and (folder in (root, decoder.parent) or _names(config, decoder)):
            return config, rule
    return None, "none found"


def _names(config: Path, decoder: Path) -> bool:
    try:
        written = read_json(config, GenaiConfig)
    except ModelError:
        return False  # another model's
    name = written.get("model", {}).get("decoder", {}).get("filename", "")
    files = (config.parent / name, *_stages(config.parent, written).values())
    return any(file.is_file() and file.samefile(decoder) for file in files)


def _stages(folder: Path, genai_config: Mapping[str, Any]) -> dict[str, Path]:
    """The decoder's pipeline: stage -> file in `folder`, in the order in which they run; empty where there is none.

    The stages are written as one object or as one object each; several may share a file. A stage without a filename
    gets the folder itself. Nothing is looked up.
    """
    written = genai_config.get("model", {}).get("decoder", {}).get("pipeline", ())
    stages = [(name, stage) for part in written for name, stage in part.items()]
    return {name: inside(folder, stage.get("filename") or "", f"the stage '{name}'") for name, stage in stages}


def _missing_stage(folder: Path, stages: Mapping[str, Path]) -> str:
    """A sentence on the first stage whose file is missing; empty where all exist."""
    for name, file in stages.items():
        if not file.is_file():
            written = "no file" if file == folder else f"the file '{file.name}', which is not there: {contents(folder)}"
            return f"'{folder / GENAI_CONFIG}' names for the pipeline's stage '{name}' {written}"
    return ""


def find_companions(
    decoder: Path, directory: Path, genai_config: Mapping[str, Any], stated: Collection[str] = ()
) -> dict[str, NamedGraph]:
    """The graphs beside `decoder` by what they do, each with the rule that found it. `directory` has genai_config.json.

    "embedding": takes ids where the decoder takes embeddings. "encoder": takes the source of an encoder-decoder.
    "first_step": a decoder without a past, which computes the cross-attention KV. "vision" and "audio": encoders whose
    features the embedding graph puts among the embeddings; if they are missing, only pictures and sound cannot be used.
    Raises `ModelError` for another graph that genai_config.json names and that does not exist, except those `stated`.
    """
    graphs = _by_name(decoder)
    for section, part in {**MEDIA_SECTIONS, **_TEXT_SECTIONS}.items():
        name = (genai_config.get("model", {}).get(section) or {}).get("filename")
        key = f"model.{section}.filename"
        file = inside(directory, name, key) if name else None
        if file is not None and file.is_file():
            graphs[part] = (file, f"{GENAI_CONFIG}'s {key}")
        elif file is not None and section in _TEXT_SECTIONS and part not in stated:
            raise NotFoundError(f"{GENAI_CONFIG} names '{name}' for {key}; '{file}' does not exist")
    return graphs


def _by_name(decoder: Path) -> dict[str, NamedGraph]:
    folder = decoder.parent
    named: dict[str, NamedGraph] = {}
    stem = next((stem for stem in (_WITH_PAST, _MERGED, _WITHOUT_PAST) if decoder.stem.startswith(stem)), None)
    if stem is not None:
        wanted = {"encoder": _ENCODER, **({"first_step": _WITHOUT_PAST} if stem == _WITH_PAST else {})}
        rule = f"optimum's name, beside '{decoder.name}'"
        named = {part: (decoder.with_stem(decoder.stem.replace(stem, name, 1)), rule) for part, name in wanted.items()}
    elif folder.name == "decoder":
        folder = folder.parent
        for sibling, part in _SIBLINGS.items():
            named[part] = folder / sibling / decoder.name, f"the folder '{sibling}' beside the decoder's"
    return {part: (within(file, folder), rule) for part, (file, rule) in named.items() if file.is_file()}


def _find_tokenizer(
    model_folder: Path, option: str | None, genai_config: Mapping[str, Any], candidates: Sequence[tuple[str, str]]
) -> tuple[str, str]:
    """Folder or hub name of the tokenizer, and the rule that found it: the option, genai_config's `tokenizer_dir`, the
    model's folder and the three above, then `candidates` (folder, file or hub name; where it comes from) in order.
    Raises `ModelError` that lists the folders searched."""
    if option is not None:
        path = Path(option).expanduser()
        if folder := _tokenizer_folder(path):
            return str(folder), "the setting 'tokenizer'"
        if path.exists():
            raise NotFoundError(f"'tokenizer' = '{option}' has none of {', '.join(_MARKS)}", "tokenizer", option)
        if is_hub_name(option):
            return option, "the setting 'tokenizer' (a hub name)"
        raise NotFoundError(f"'tokenizer' = '{option}' does not exist", "tokenizer", option)
    locations = [(str(folder), origin) for folder, origin in _upwards(model_folder)]
    if tokenizer_dir := genai_config.get("model", {}).get("tokenizer_dir"):
        key, is_asset = "model.tokenizer_dir", tokenizer_dir.startswith(ASSET)
        first = asset(model_folder, tokenizer_dir, key) if is_asset else inside(model_folder, tokenizer_dir, key)
        locations.insert(0, (str(first), f"{GENAI_CONFIG}'s model.tokenizer_dir"))
    locations += candidates
    for location, origin in locations:
        if folder := _tokenizer_folder(Path(location)):
            return str(folder), origin
    for name, origin in candidates:
        if is_hub_name(name, needs_owner=True):
            return name, f"{origin} (a hub name)"
    looked = ", ".join(dict.fromkeys(f"'{location}'" for location, _ in locations))
    problem = f"no tokenizer found: none of {', '.join(_MARKS)} is in {looked}; set 'tokenizer'"
    raise NotFoundError(problem).about("tokenizer")


def _tokenizer_folder(path: Path) -> Path | None:
    folder = path.parent if path.is_file() else path
    return folder.resolve() if any((folder / mark).is_file() for mark in _MARKS) else None


def _tokenizer_candidates(more: Sequence[str | Path], root: Path, decoder: Path) -> Iterator[tuple[str, str]]:
    """Folders, files and hub names that are tried after the model's own folders, and where each comes from."""
    if decoder.is_symlink():
        yield str(decoder.resolve().parent), "beside the file that the model's link leads to"
    yield from ((str(location), "an additional candidate") for location in more)
    for folder in dict.fromkeys((root, decoder.parent)):
        attributes = olive_record(folder)[1].get("model_attributes") or {}
        for file in attributes.get("additional_files") or ():
            yield str(Path(file).parent), f"additional_files in Olive's {OLIVE_RECORD}"
        if name := attributes.get("_name_or_path"):
            yield str(name), f"_name_or_path in Olive's {OLIVE_RECORD}"


def _graphs_below(root: Path, pattern: str) -> list[Path]:
    """The .onnx files of `root` that match a pattern, each of which must be the folder's own."""
    return [within(file, root) for file in sorted(root.glob(pattern)) if file.exists()]


def _refuse_others(path: Path) -> None:
    if path.suffix.lower() != ".onnx":
        raise ModelError(f"'{path}' is not an .onnx file")

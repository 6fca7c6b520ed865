"""From a path that a user wrote to the files of one decoder. Opens no session and knows no Olive beyond the
model_config.json it leaves in an output folder."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from olive_ext.errors import MismatchError, ModelError, NotFoundError, listed
from olive_ext.model.files import folders
from olive_ext.model.files.content import hf_weights, read_outline, refuse_short, weight_files
from olive_ext.model.files.folders import GENAI_CONFIG, OLIVE_RECORD
from olive_ext.model.files.package_config import GenaiConfig, HfConfig, read_json
from olive_ext.model.files.package_files import inside, refuse_names_outside, within
from olive_ext.model.spec.tensor_names import EMBEDDING_NAMES, Outline
from olive_ext.model.types import GraphFiles, ModelFiles

if TYPE_CHECKING:
    from olive_ext.model.spec.encoder_spec import Named

logger = logging.getLogger(__name__)

Kind = Literal["onnx", "hf"]

_BY_USER = "the setting 'components'"
_GRAPHS = ("*.onnx", "*/*.onnx")


def locate(
    path: str | Path,
    onnx_file_name: str | None = None,
    tokenizer: str | None = None,
    extra_tokenizer_candidates: Sequence[str | Path] = (),
    components: Mapping[str, str] | None = None,
) -> ModelFiles:
    """The files of the model at `path`: an .onnx file, a folder with one or several, a genai package, or Olive's output
    folder. `extra_tokenizer_candidates` (folders, files or a hub name) are tried after the model's own folders.
    `components` are graphs by what they do, relative to `path`.

    The origins have the keys "decoder", "genai_config" and "tokenizer". Raises `ModelError`.
    """
    root = folders.real_path(path)
    logger.debug("looking for the files of '%s'", path)
    given = {part: _component(root, part, name) for part, name in (components or {}).items()}
    decoder, rule = _find_decoder(root, onnx_file_name, given.pop("decoder", None))
    outline = read_outline(decoder)
    weights = _weights(decoder, outline)
    config_file, config_rule = _find_genai_config(root, decoder)
    genai_config = read_json(config_file, GenaiConfig) if config_file else {}
    stages = folders.find_pipeline(config_file.parent, genai_config, decoder) if config_file else {}
    for graph in dict.fromkeys(file for file in stages.values() if not file.samefile(decoder)):
        weights += (graph, *_weights(graph, read_outline(graph)))
    candidates = _tokenizer_candidates(extra_tokenizer_candidates, root, decoder)
    tokenizer_place, tokenizer_rule = folders.find_tokenizer(decoder.parent, tokenizer, genai_config, candidates)
    directory = config_file.parent if config_file else decoder.parent
    companions = _companions(
        root, decoder, outline, {**folders.find_companions(decoder, directory, genai_config), **given}
    )
    folders.refuse_strangers_in(Path(tokenizer_place), *([directory] if config_file else []))
    refuse_names_outside(directory, genai_config)
    own = (decoder.parent, directory, *([Path(tokenizer_place)] if companions else []))
    return ModelFiles(
        decoder=decoder,
        directory=directory,
        genai_config=genai_config,
        hf_config=_hf_config(*own),
        tokenizer=tokenizer_place,
        origins={"decoder": rule, "genai_config": config_rule, "tokenizer": tokenizer_rule}
        | {part: found_by for part, (_, _, found_by) in companions.items()},
        weights=weights,
        pipeline=tuple(stages),
        companions={part: GraphFiles(file, _weights(file, graph)) for part, (file, graph, _) in companions.items()},
    )


def locate_hf(path: str, tokenizer: str | None = None) -> ModelFiles:
    """The files of the Hugging Face model in the folder, or under the hub name, `path`; nothing is looked up."""
    origin = "the model's own" if tokenizer is None else "the setting 'tokenizer'"
    folder = Path(path)
    folders.refuse_strangers_in(folder, *([Path(tokenizer)] if tokenizer else []))
    weights = tuple(hf_weights(folder))
    return ModelFiles(folder, folder, {}, _hf_config(folder), tokenizer or path, {"tokenizer": origin}, weights)


def _hf_config(*candidates: Path) -> Mapping[str, Any]:
    config_file = next((file for folder in candidates if (file := folder / "config.json").is_file()), None)
    return read_json(config_file, HfConfig) if config_file else {}


def _companions(
    root: Path, decoder: Path, outline: Outline, named: Mapping[str, Named]
) -> dict[str, tuple[Path, Outline, str]]:
    """The other graphs by part, each with its interface and the rule that found it. Where nothing names the graph that
    makes what the decoder takes in place of tokens, all graphs of the folder `root` are looked at."""
    from olive_ext.model.spec.encoder_spec import find_parts, settle  # imported here: it brings onnx along

    graphs = {file: read_outline(file) for file, _ in named.values()}
    if (made := sorted(EMBEDDING_NAMES & outline.outputs.keys())) and not outline.has_logits:
        raise MismatchError(f"'{decoder}' is to be the decoder; it is the embedding, because it returns '{made[0]}'")
    takes = min(EMBEDDING_NAMES & outline.inputs.keys(), default=None)
    if takes and "embedding" not in named and root.is_dir():
        others = (file for pattern in _GRAPHS for file in folders.graphs_below(root, pattern) if file != decoder)
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


def _component(root: Path, part: str, name: str) -> Named:
    folder = root.parent if root.is_file() else root
    file = folder / name
    if not file.is_file():
        raise NotFoundError(f"it is not in '{folder}': {folders.contents(folder)}", f"components.{part}", name)
    return folders.real_path(file), _BY_USER


def _weights(graph: Path, outline: Outline) -> tuple[Path, ...]:
    locations = outline.locations
    files = weight_files(graph, locations)
    for location, file in files.items():
        refuse_short(graph, file, locations[location])
    return tuple(files.values())


def model_kind(path: str | Path) -> Kind:
    """What `path` holds: "onnx" for what `locate` takes, "hf" for config.json with weights and for a hub name.

    A Hugging Face folder with ONNX files only in a sub-folder is "hf". Raises `ModelError` for anything else.
    """
    if folders.is_hub_name(str(path), needs_owner=True):
        return "hf"
    root = folders.real_path(path)
    if root.is_file():
        _refuse_others(root)
        return "onnx"
    if (root / GENAI_CONFIG).is_file() or any(root.glob("*.onnx")) or folders.olive_record(root)[0] == "onnxmodel":
        return "onnx"
    if (root / "config.json").is_file() and hf_weights(root):
        return "hf"
    if any(root.glob("*/*.onnx")):
        return "onnx"
    kind, record = folders.olive_record(root)
    hint = f"; its {OLIVE_RECORD} names the model '{record['model_path']}'" if record.get("model_path") else ""
    raise ModelError(
        f"'{root}' is neither an ONNX nor a Hugging Face model: {folders.contents(root)}{hint if kind else ''}"
    )


def _find_decoder(root: Path, onnx_file_name: str | None, component: Named | None) -> Named:
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
            raise NotFoundError(f"it is not in '{root}': {folders.contents(root)}", "onnx_file_name", onnx_file_name)
        return root / onnx_file_name, "the setting 'onnx_file_name'"
    named, rule = _genai_decoder(root)
    if named is not None:
        return named, rule
    if recorded := _olive_decoder(root):
        return recorded, f"Olive's {OLIVE_RECORD}"
    if rule:
        raise ModelError(f"{rule}; set 'onnx_file_name'", "onnx_file_name", code="missing")
    return _only_decoder(root)


def _genai_decoder(root: Path) -> tuple[Path | None, str]:
    """The decoder that `root`'s genai_config.json names and by which key, or none and the reason why."""
    if not (root / GENAI_CONFIG).is_file():
        return None, ""
    config = read_json(root / GENAI_CONFIG, GenaiConfig)
    model = config.get("model") or {}
    decoder = model.get("decoder")
    if not isinstance(decoder, Mapping):
        raise ModelError(f"'{root / GENAI_CONFIG}' describes no text decoder (model type '{model.get('type')}')")
    if stages := folders.pipeline_stages(root, config):
        problem = folders.missing_stage(root, stages)
        rule = f"the first graph of {GENAI_CONFIG}'s model.decoder.pipeline"
        return (None, problem) if problem else (next(iter(stages.values())), rule)
    name = decoder.get("filename")
    if not name:
        return None, f"'{root / GENAI_CONFIG}' names no model.decoder.filename"
    if not inside(root, name, "model.decoder.filename").is_file():
        return None, f"'{root / GENAI_CONFIG}' names the decoder '{name}', which is not there: {folders.contents(root)}"
    return root / name, f"{GENAI_CONFIG}'s model.decoder.filename"


def _olive_decoder(root: Path) -> Path | None:
    """The file of the ONNXModel recorded in `root`. Olive writes absolute paths: those of a folder that was moved since
    are taken relative to the record first."""
    kind, config = folders.olive_record(root)
    if kind != "onnxmodel" or not isinstance(config.get("model_path"), str):
        return None
    recorded, name = Path(config["model_path"]), config.get("onnx_file_name")
    files = [root / name, recorded / name] if name else [root / recorded.name, recorded]
    return next((folders.real_path(within(file)) for file in files if _is_onnx_name(file) and file.is_file()), None)


def _only_decoder(root: Path) -> tuple[Path, str]:
    graphs = next(filter(None, (folders.graphs_below(root, pattern) for pattern in _GRAPHS)), [])
    names = ", ".join(str(graph.relative_to(root)) for graph in graphs)
    if not graphs:
        raise NotFoundError(f"no .onnx file in '{root}': {folders.contents(root)}")
    if len(graphs) == 1:
        return graphs[0], "the only .onnx file"
    decoders = [graph for graph in graphs if (outline := _readable(graph)) is not None and outline.has_logits]
    if not decoders:
        raise ModelError(f"no text decoder in '{root}': none of {names} returns logits")
    if picked := folders.pick_with_past(decoders):
        return picked
    if len(decoders) > 1:
        names = ", ".join(str(graph.relative_to(root)) for graph in decoders)
        raise ModelError(f"several decoders in '{root}': {names}; set 'onnx_file_name' to one", code="missing")
    return decoders[0], f"the only one of {names} that returns logits"


def _readable(graph: Path) -> Outline | None:
    try:
        return read_outline(graph)
    except ModelError:
        return None


def _find_genai_config(root: Path, decoder: Path) -> tuple[Path | None, str]:
    """The genai_config.json of `root` or of the decoder's folder, else one above that names this decoder."""
    if (root / GENAI_CONFIG).is_file():
        return root / GENAI_CONFIG, "in the folder asked for"
    for folder, rule in folders.upwards(decoder.parent):
        config = folder / GENAI_CONFIG
        if config.is_file() and (folder == decoder.parent or _names(config, decoder)):
            return config, rule
    return None, "none found"


def _names(config: Path, decoder: Path) -> bool:
    try:
        written = read_json(config, GenaiConfig)
    except ModelError:
        return False  # another model's
    section = (written.get("model") or {}).get("decoder") or {}
    named = config.parent / str(section.get("filename") or "")
    files = (named, *folders.pipeline_stages(config.parent, written).values())
    return any(file.is_file() and file.samefile(decoder) for file in files)


def _tokenizer_candidates(given: Sequence[str | Path], root: Path, decoder: Path) -> list[tuple[str, str]]:
    linked = [(str(decoder.resolve().parent), "beside the file that the model's link leads to")]
    candidates = linked if decoder.is_symlink() else []
    candidates += [(str(location), "an additional candidate") for location in given]
    own = dict.fromkeys((root, decoder.parent))
    return [*candidates, *(candidate for folder in own for candidate in _olive_tokenizers(folder))]


def _olive_tokenizers(folder: Path) -> list[tuple[str, str]]:
    _, config = folders.olive_record(folder)
    attributes = config.get("model_attributes") or {}
    files = attributes.get("additional_files") or []
    named = [(str(Path(file).parent), f"additional_files in Olive's {OLIVE_RECORD}") for file in files]
    name = attributes.get("_name_or_path")
    return named + ([(str(name), f"_name_or_path in Olive's {OLIVE_RECORD}")] if name else [])


def _is_onnx_name(path: Path) -> bool:
    return path.suffix.lower() == ".onnx"


def _refuse_others(path: Path) -> None:
    if not _is_onnx_name(path):
        raise ModelError(f"'{path}' is not an .onnx file")

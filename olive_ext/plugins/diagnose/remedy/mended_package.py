"""A package with mended graphs, on disk: the quantized package's files under their names, all of it or nothing.

Knows files and graphs; not which weights are changed, or why.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from olive_ext.errors import ConfigError, RunError
from olive_ext.graph.nodes import external_locations
from olive_ext.model import ResolvedModel
from olive_ext.model.files.constants import Constants
from olive_ext.model.files.content import load_graph, weight_files
from olive_ext.model.files.package_config import OLIVE_RECORD, real_path
from olive_ext.plugins.diagnose.remedy.mended_graph import GraphFile, Mending
from olive_ext.plugins.diagnose.remedy.pairing import Sources, Target
from olive_ext.plugins.diagnose.remedy.weights import Precision
from olive_ext.report.numbers import size
from olive_ext.report.report_files import refuse_filled, whole_folder

LARGEST_GRAPH = 1 << 30
"""Up to so many bytes, a package without external weights gets none: a protobuf holds twice as many."""

_RECORDS = re.compile(
    rf"{re.escape(OLIVE_RECORD)}|(input_model_)?metrics\.json|(output_)?footprint\.json|run_history\.txt|"
    r"(report|eval_results)(-\d+)?\.(json|md|html|yaml)|chain\.(json|md)"
)
"""What is written beside a model about that model alone, by Olive and by a pass that measures."""


@dataclass(frozen=True)
class Package:
    """Mended graphs and the other files of the quantized package: what is written."""

    graphs: tuple[GraphFile, ...]
    root: Path
    """The quantized package's folder, which the graphs are in."""

    kept: tuple[Path, ...]
    """The files of graphs in which nothing is changed, and their weights: they are copied."""

    others: tuple[Path, ...]

    @property
    def num_bytes(self) -> int:
        """The bytes of all files."""
        return self.graph_bytes + sum(path.stat().st_size for path in self.others)

    @property
    def graph_bytes(self) -> int:
        """The bytes of graphs and weights."""
        return sum(graph.num_bytes for graph in self.graphs) + sum(path.stat().st_size for path in self.kept)

    def write(self, output: Path) -> None:
        """Writes everything into a new folder. Raises `ConfigError` for one that has files, `RunError` where the disk
        has no room or fails; then nothing is left behind."""
        refuse_filled(output)
        output = output.absolute()
        free = shutil.disk_usage(next(folder for folder in (output, *output.parents) if folder.exists())).free
        if free < self.num_bytes:
            raise RunError(f"the mended model takes {size(self.num_bytes)}: '{output}' has {size(free)} left")
        try:
            with whole_folder(output) as folder:
                for path in (*self.others, *self.kept):
                    target = folder / path.relative_to(self.root)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, target)
                for graph in self.graphs:
                    graph.write(folder / graph.path.relative_to(self.root))
        except OSError as error:
            raise RunError(f"cannot write the mended model to '{output}': {error.strerror or error}") from error


def mended(model: ResolvedModel, sources: Mapping[str, Sources], choices: Mapping[Target, Precision]) -> Package:
    """The package of `model` with the targets in other precisions; `sources` by part of those that may change, of the
    decoder those of "". Raises `ModelError` where a precision cannot be had."""
    root, files = root_of(model), model.files
    package = _package_files(model)
    paths = {"": files.decoder, **{part: one.graph for part, one in files.companions.items()}}
    loaded = {part: load_graph(path) for part, path in paths.items() if path.is_relative_to(root)}
    weights = {part: weight_files(paths[part], external_locations(graph)) for part, graph in loaded.items()}
    changed = {target.part for target in choices}
    written = [
        part
        for part in loaded
        if part in changed or not all(path.is_relative_to(root) for path in weights[part].values())
    ]
    rewritten = {paths[part] for part in written}  # by name: a file that is a link to one of them stays what it is
    strangers = {path for path in package if path.suffix == ".onnx"} - rewritten
    taken = {path for other in strangers for path in _weights(other)}  # stays for those that are copied
    replaced, graphs = set(rewritten), []
    for part in written:
        own = {location: path for location, path in weights[part].items() if path not in taken}
        chosen = {target: precision for target, precision in choices.items() if target.part == part}
        new, constants = {}, Constants(loaded[part], paths[part])
        if chosen:
            mending = Mending(loaded[part], sources[part])
            mending.apply(chosen)
            new = mending.tensors
        data = None  # the file for its weights, under the name of one that no other graph has
        num_bytes = loaded[part].ByteSize() + sum(tensor.num_bytes for tensor in new.values())
        if weights[part] or num_bytes > LARGEST_GRAPH:
            made_up = f"{paths[part].stem}.mended.data" if weights[part] else f"{paths[part].name}.data"
            data = Path(next(iter(own), made_up))
        graphs.append(GraphFile(loaded[part], constants, new, paths[part], data))
        replaced |= {*own.values()}
        taken |= replaced
    left = [path for path in package if path not in replaced]
    models = {path for part in loaded for path in (paths[part], *weights[part].values())}
    kept, others = (tuple(path for path in left if (path in models) is wanted) for wanted in (True, False))
    return Package(tuple(graphs), root, kept, others)


def root_of(model: ResolvedModel) -> Path:
    """The folder that is copied as a whole; of a named file its folder, from which only its own files are copied."""
    return _named(model) if _named(model).is_dir() else model.files.decoder.parent


def copy_of(model: ResolvedModel, folder: Path) -> ResolvedModel:
    """The model in a copy of its package, found there by the settings that found the original."""
    place = folder if _named(model).is_dir() else folder / model.files.decoder.relative_to(root_of(model))
    return model.patched({"model": str(place), "tokenizer": model.files.tokenizer})


def refuse_inside(model: ResolvedModel, output: Path, why: str = "which is copied as a whole") -> None:
    """Raises `ConfigError` for a place in the model's folder."""
    if _named(model).is_dir() and output.resolve().is_relative_to(_named(model).resolve()):
        raise ConfigError(f"lies in the model's folder, {why}", "output_dir", output)


def _named(model: ResolvedModel) -> Path:
    return real_path(str(model.settings.model))


def _package_files(model: ResolvedModel) -> list[Path]:
    """The files of a package: all of a named folder; for a named file the files beside it that belong to no other
    model, and the graphs that it works with."""
    root, files = root_of(model), model.files
    if _named(model).is_dir():
        linked = (one for one in root.rglob("*") if one.is_symlink() and one.resolve().is_relative_to(root))
        below = {path for folder in (root, *linked) if folder.is_dir() for path in folder.rglob("*")}
        return [path for path in sorted(below) if path.is_file() and not _RECORDS.fullmatch(path.name)]
    companions = (path for part in files.companions.values() for path in (part.graph, *part.weights))
    paths = {path for path in (files.decoder, *files.weights, *companions) if path.is_relative_to(root)}
    graphs = {path for path in root.glob("*.onnx") if path not in paths}
    strangers = {path for graph in graphs for path in (graph, *_weights(graph))} - paths
    beside = {path for path in root.iterdir() if path.is_file() and not _RECORDS.fullmatch(path.name)}
    return sorted(paths | {path for path in beside if path not in strangers})


def _weights(graph: Path) -> set[Path]:
    """The files of a graph's weights."""
    return {*weight_files(graph, external_locations(load_graph(graph))).values()}

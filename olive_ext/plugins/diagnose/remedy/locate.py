"""`locate`: which weights of a quantized model its loss comes from, measured in the graph of the float model.

The tasks' documents are asked as in an evaluation; the float model's own answers are the targets of what is generated.
Each weight alone is given its quantized numbers, and those of the others stay.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

from olive_ext.backends.progress import progress_bar
from olive_ext.backends.task_files import refuse_unknown, task_folders
from olive_ext.config.base import takes
from olive_ext.errors import ConfigError, ContradictionError, ModelError, NotComparableError
from olive_ext.graph.nodes import quantizing_operator
from olive_ext.model import ResolvedModel
from olive_ext.model.files.constants import plain_name
from olive_ext.model.files.hub import offline_if_unreachable
from olive_ext.model.types import MEDIA_PARTS
from olive_ext.package_versions import runtimes
from olive_ext.plugins.diagnose.remedy.documents import answered
from olive_ext.plugins.diagnose.remedy.loss_map import Entry, LossMap, write_loss_map
from olive_ext.plugins.diagnose.remedy.mended_package import refuse_inside
from olive_ext.plugins.diagnose.remedy.pairing import (
    Pairing,
    Sources,
    Target,
    pair,
    refuse_nothing,
    whole_experts,
    with_tables,
)
from olive_ext.plugins.diagnose.remedy.race import Race, estimate
from olive_ext.plugins.diagnose.remedy.roundings import OUTPUT, Rounding, Site, quantized_caches
from olive_ext.plugins.diagnose.remedy.variants import Material, Variants, grouped
from olive_ext.plugins.diagnose.remedy.weights import GraphWeights, WeightUse
from olive_ext.plugins.diagnose.settings import LocationConfig
from olive_ext.records.journal import Journal, facts_key
from olive_ext.report.report_files import check_writable
from olive_ext.run.models import Models

EMBEDDING = "embedding"
"""The part of a package that embeds tokens."""


@takes(LocationConfig)
def locate(
    config: LocationConfig | Mapping[str, Any] | str | Path, *, progress: bool | None = None, **settings: Any
) -> LossMap:
    """The loss map of a quantized model; written where `config` names a folder.

    `config` is the model's path with the other keys as keywords (`locate("int4", reference="float", tasks=["mmlu"])`),
    a mapping of all keys, or a `LocationConfig`; keywords are laid over the last two. `progress` shows bars on a
    terminal, else a line a minute on stderr; None shows it on a terminal only. Every failure but an interruption is an
    `OliveExtError`. With a folder an interrupted call goes on where it was.
    """
    config = LocationConfig.of(config, settings) if settings or not isinstance(config, LocationConfig) else config
    with opened_location(config, progress) as location:
        if config.output_dir is not None:
            refuse_inside(location.model, Path(config.output_dir), "which stays as it is; give another one")
        with location.with_more().measuring() as material:
            loss_map = location.map(material)
    if config.output_dir is not None:
        write_loss_map(loss_map, config.output_dir)
    return loss_map


@contextmanager
def opened_location(config: LocationConfig, progress: bool | None) -> Iterator[Location]:
    """The models of a configuration, found and paired. Raises `OliveExtError`."""
    refuse_unknown(config.tasks, task_folders(config.include_path))
    if config.output_dir is not None:
        check_writable(config.output_dir)
    models = Models(config.evaluation(), progress)
    models.refuse_providers()
    with models.clock.reporting(models.progress), offline_if_unreachable(models.names()):
        yield Location(config, models)


class Location:
    """A quantized model and the float one, with their weights in pairs."""

    def __init__(self, config: LocationConfig, models: Models) -> None:
        """Raises `ConfigError` for models that are not comparable."""
        self._config = config
        self._models = models
        self.model, self.reference = _comparable(models)
        decoders = Sources.of(self.reference.files.decoder, self.model.files.decoder)
        if operator := quantizing_operator(decoders.floats.model):
            given = f"'reference' = '{self.reference.name}'"
            raise ConfigError(f"{given} is quantized itself ({operator}): give the float model")
        self.floats, self.quantized = decoders.floats, decoders.quantized
        self.pairing: Pairing = pair(self.floats, self.quantized)
        if self.pairing.damaged:  # a constant may be NaN
            self.model, self.reference = (one.patched({"non_finite": "report"}) for one in (self.model, self.reference))
        self.sources = {"": decoders}
        """By part of the package."""

        self.tables: dict[Target, Target] = {}
        """Heads whose table is stored apart, each with it."""

        self.targets = list(self.pairing.targets)
        self._roundings: list[Rounding] = []

    def with_parts(self) -> Location:
        """Takes the weights of encoders of pictures and sound and of the embedding graph as targets, too."""
        for part in (*MEDIA_PARTS, EMBEDDING) if self.reference.media is not None else ():
            self._pair_part(part)
        return self

    def with_whole_experts(self) -> Location:
        """As `with_parts`, with a node's experts as one target, which have one number of bits; and `tables`."""
        self.targets = whole_experts(self.with_parts().targets)
        self.tables = with_tables(self.targets, self.sources)
        return self

    def with_more(self) -> Location:
        """As `with_parts`, with activations that the graph rounds; a quantized KV cache is named as not compared."""
        self.with_parts()
        self.pairing.unpaired |= quantized_caches(self.floats, self.quantized)
        self._roundings = list(static_roundings(self.pairing, self.floats, self.quantized))
        return self

    def _pair_part(self, part: str) -> None:
        companions = [model.files.companions.get(part) for model in (self.reference, self.model)]
        files = [companion.graph for companion in companions if companion is not None]
        if len(files) < len(companions):
            return
        try:
            sources = Sources.of(*files)
        except ModelError as error:
            self.pairing.unpaired[part] = str(error)
            return
        pairing = pair(sources.floats, sources.quantized, part)
        self.sources[part] = sources
        self.targets += pairing.targets
        self.pairing.add(pairing, part)

    @contextmanager
    def measuring(self) -> Iterator[Material]:
        """Asks the float model everything, and keeps its distributions. Raises `ModelError` if nothing can be
        compared."""
        from olive_ext.run.evaluation import load_requested_tasks

        if not self.targets and not self._roundings:
            refuse_nothing(self.pairing, len(self.quantized.uses))
        tasks = load_requested_tasks(self._models, None)
        assert tasks is not None  # a loss is measured on tasks
        with ExitStack() as stack:
            folder = self._config.output_dir and Path(self._config.output_dir, "journal")
            folder = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="olive_ext_records_")))
            settings = self._config.reference
            record_to = {"folder": str(folder), "top": settings.top, "drawn": settings.drawn}
            variants = Variants(self.reference, self.sources, self.targets, self._roundings, record_to)
            stack.enter_context(variants)
            why = "the engine's form of the float graph has no node that reads it"
            self.pairing.unpaired |= {node: why for rounding in variants.missing for node in rounding.nodes}
            stem = folder / "answers" if self._config.output_dir is not None else None  # the folder stays
            variants.recorder.keep_answers(stem, resume=self._config.resume)
            asked = answered(variants.recorder, self._models.config, tasks, progress=self._models.progress)
            documents = list(asked.values())
            journal = None
            if stem is not None:
                facts = {**variants.describe(), "quantized": self.model.digest, "versions": runtimes()}
                file = folder / f"losses_{facts_key(facts)}.jsonl"
                journal = stack.enter_context(closing(Journal(file, facts, resume=self._config.resume)))
            names = [task for task, _ in asked]
            yield Material(variants, documents, names, variants.record(documents), journal)

    def map(self, material: Material, *, with_gains: bool = True) -> LossMap:
        """The loss of each weight on these documents; `with_gains` also the gain of keeping each certain one float."""
        variants, documents, positions = material.variants, material.documents, material.positions
        targets = variants.targets
        groups = grouped(targets, self._config.by)
        race = Race(
            len(groups),
            positions,
            lambda group, numbers: material.kl(groups[group].targets, numbers),
            self._config.seed or 0,
        )
        certain = race.run(self._config.top, lambda quantities, many: self._with_progress(quantities, many, variants))
        order = race.order.tolist()
        positions_N = np.asarray(positions, np.float64)[order]
        total = material.kl(targets, order)
        gained = {}
        for number in sorted(certain) if with_gains else ():
            rest = [target for target in targets if target not in groups[number].targets]
            gained[number] = float((total - material.kl(rest, order)).sum()) / float(positions_N.sum())
        whole = variants.compared(self.model, [documents[number] for number in order])
        known = self.pairing.damaged
        damaged = {group.name for group in groups if any(target.name in known for target in group.targets)}
        entries = [
            Entry(
                name=group.name,
                layer=group.layer,
                kind=group.kind,
                nodes=tuple(node for target in group.targets for node in target.nodes),
                kl=loss.mean,
                low=loss.low,
                high=loss.high,
                num_documents=loss.num_documents,
                is_certain=number in certain,
                gained=gained.get(number),
                float_bytes=sum(target.float_bytes for target in group.targets),
                bytes=sum(target.bytes for target in group.targets),
            )
            for number, (group, loss) in enumerate(zip(groups, map(race.estimate, range(len(groups))), strict=True))
        ]
        return LossMap(
            model=self.model.name,
            reference=self.reference.name,
            tasks=tuple(str(task) for task in self._config.tasks),
            by=self._config.by,
            num_documents=len(documents),
            num_positions=int(positions_N.sum()),
            num_largest=self._config.top,
            entries=tuple(sorted(entries, key=lambda entry: (entry.name not in damaged, -entry.kl))),
            total=estimate(total, positions_N),
            sum=race.estimate_sum(),
            model_kl=estimate(whole, positions_N),
            kernels=estimate(whole - total, positions_N),
            unpaired=self.pairing.unpaired,
            beyond_rounding=self.pairing.shares,
            damaged=self.pairing.damaged,
            passes=race.num_passes,
        )

    def _with_progress(self, quantities: Sequence[int], many: int, variants: Variants) -> Iterator[int]:
        from olive_ext.backends.lm_eval_patches import quiet_bars

        doing, fed = f"Quantized one by one, {many} documents", lambda: variants.tokens_fed
        with (
            quiet_bars(self._models.progress),
            progress_bar(doing, len(quantities), fed, False, unit="weights") as advance,
        ):
            for quantity in quantities:
                yield quantity
                advance(1)


def _comparable(models: Models) -> tuple[ResolvedModel, ResolvedModel]:
    """The quantized model and the float one, with one tokenizer and one context length. Raises `ConfigError`."""
    quantized, other = models.given_candidate, models.given_reference
    if quantized.kind != "onnx" or not quantized.runtime.runs_graph:
        raise ConfigError("a loss is located in a quantized ONNX model", "model", quantized.settings.model)
    other = models.reference
    if not other.runtime.runs_graph:
        note = models.export_note(other.settings.model).get("export", "is run by another library than ONNX Runtime")
        raise ConfigError(f"{note}; give the float ONNX model", "reference", other.settings.model)
    if quantized.digest == other.digest:
        raise ContradictionError(f"'reference' = '{other.settings.model}' is the model itself: give the float model")
    tokenizer = {} if models.prompt_diff is None else {"tokenizer": quantized.files.tokenizer}
    if quantized.spec.vocab_size != other.spec.vocab_size:
        raise NotComparableError(
            f"the reference has {other.spec.vocab_size} tokens, the model {quantized.spec.vocab_size}"
        )
    length = {"max_length": min(quantized.spec.context_length, other.spec.context_length)}
    return quantized.patched(length), other.patched({**tokenizer, **length})


def static_roundings(pairing: Pairing, floats: GraphWeights, quantized: GraphWeights) -> Iterator[Rounding]:
    """The pairs of QuantizeLinear and DequantizeLinear of which both graphs have the nodes. The others are named in
    `pairing`."""
    nodes = quantized.model.graph.node
    for first in (node for node in nodes if node.op_type == "QuantizeLinear"):
        seconds = [one for one in nodes if one.op_type == "DequantizeLinear" and one.input[0] == first.output[0]]
        rounding = _static(first, seconds, floats, quantized)
        if isinstance(rounding, Rounding):
            yield rounding
        else:
            pairing.unpaired[first.name] = rounding


def _static(
    first: onnx.NodeProto, seconds: Sequence[onnx.NodeProto], floats: GraphWeights, quantized: GraphWeights
) -> Rounding | str:
    """The rounding that a pair is in the float graph, or why it is none there."""
    names = {name for node in (first, *seconds) for name in node.input[1:] if name}
    if not seconds or not names <= quantized.initializers.keys():
        return "its scale is not a constant, or integers are computed with"
    uses = {use.node.name: use for use in floats.uses.values() if use.inputs[0] == 1}
    sites = _output_site(first, quantized, uses) or _input_sites(seconds, floats, quantized, uses)
    if isinstance(sites, str):
        return sites
    tensors = tuple(quantized.tensor(name) for name in sorted(names))
    scale_type = quantized.initializers[first.input[1]].data_type
    weighed = [uses[site.node] for site in sites if site.weight]
    index = sites[0].index
    which = ", output" if index == OUTPUT else f", input {index}" if index else ""
    return Rounding(
        f"{plain_name(sites[0].node)}{which}",
        tuple(node.name for node in (first, *seconds)),
        tuple(sites),
        (first, seconds[0]),
        tensors,
        elem_type=helper.np_dtype_to_tensor_dtype(floats.matrix(weighed[0]).dtype) if weighed else scale_type,
        scale_type=scale_type,
    )


def _output_site(first: onnx.NodeProto, quantized: GraphWeights, uses: Mapping[str, WeightUse]) -> list[Site]:
    """The float graph's product whose output is rounded for all that read it; none where it is another value."""
    value, maker = first.input[0], quantized.maker.get(first.input[0])
    wanted = None if maker is None else plain_name(maker.name)
    float_use = next((use for name, use in uses.items() if plain_name(name) == wanted), None)
    graph = quantized.model.graph
    is_read = any(value in node.input for node in graph.node if node is not first)
    if float_use is None or is_read or any(value == output.name for output in graph.output):
        return []
    return [Site(float_use.node.name, OUTPUT, float_use.value)]


def _input_sites(
    seconds: Sequence[onnx.NodeProto], floats: GraphWeights, quantized: GraphWeights, uses: Mapping[str, WeightUse]
) -> list[Site] | str:
    """The inputs of the float graph's nodes that are rounded, or why they are not known."""
    own_names: dict[str, list[onnx.NodeProto]] = {}
    for node in floats.model.graph.node:
        own_names.setdefault(plain_name(node.name), []).append(node)
    outputs, sites = {node.output[0] for node in seconds}, []
    for node in quantized.model.graph.node:
        for index in (n for n, name in enumerate(node.input) if name in outputs):
            readers = own_names.get(plain_name(node.name), [])
            if len(readers) != 1 or len(readers[0].input) <= index:
                return f"the float graph has no node '{node.name}' that reads it"
            use = None if index else uses.get(readers[0].name)
            sites.append(Site(readers[0].name, index, use.value if use is not None else ""))
    return sites or "no node reads it"

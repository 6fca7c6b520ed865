"""`locate`: which weights of a quantized model its loss comes from, measured in the graph of the float model.

The tasks' documents are asked as in an evaluation; the float model's own answers are the targets of what is generated.
Each weight alone is given its quantized numbers, and those of the others stay.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from olive_ext.backends.package_versions import runtimes
from olive_ext.backends.progress import progress_bar
from olive_ext.backends.task_names import refuse_unknown, task_folders
from olive_ext.errors import ConfigError, ContradictionError, ModelError, NotComparableError
from olive_ext.graph.nodes import quantizing_operator
from olive_ext.model import ResolvedModel
from olive_ext.model.files.hub import asked_where_it_answers
from olive_ext.model.spec.media_types import MEDIA_PARTS
from olive_ext.plugins.diagnose.remedy.activations import kernels_roundings, static_roundings
from olive_ext.plugins.diagnose.remedy.documents import answered
from olive_ext.plugins.diagnose.remedy.loss_map import Entry, LossMap
from olive_ext.plugins.diagnose.remedy.mended_package import refuse_inside
from olive_ext.plugins.diagnose.remedy.page import write_loss_map
from olive_ext.plugins.diagnose.remedy.pairing import Pairing, Target, pair, refuse_nothing
from olive_ext.plugins.diagnose.remedy.race import Floats, Race, estimate
from olive_ext.plugins.diagnose.remedy.roundings import AnyTarget, QuantizedCache, Rounding, quantized_cache, with_cache
from olive_ext.plugins.diagnose.remedy.sources import Sources, whole_experts, with_tables
from olive_ext.plugins.diagnose.remedy.variants import (
    Group,
    Material,
    Measurements,
    Variants,
    grouped,
    nats_by_document,
)
from olive_ext.plugins.diagnose.remedy.weights import HOST
from olive_ext.plugins.diagnose.settings import LocationConfig
from olive_ext.records.journal import Journal, facts_key
from olive_ext.report.report_files import check_writable
from olive_ext.run.models import Models
from olive_ext.run.task_fit import refuse_generations, refuse_misfits
from olive_ext.stats.distances import measure_divergence

EMBEDDING = "embedding"
"""The part of a package that embeds tokens."""


def locate(
    config: LocationConfig | Mapping[str, Any] | str | Path, *, progress: bool = False, **settings: Any
) -> LossMap:
    """The loss map of a quantized model; written where `config` names a folder.

    `config` is the model's path with the other keys as keywords (`locate("int4", reference="float", tasks=["mmlu"])`),
    a mapping of all keys, or a `LocationConfig`; keywords are laid over the last two. `progress` shows bars on a
    terminal, else a line a minute on stderr. Every failure but an interruption is an `OliveExtError`. With a folder
    an interrupted call goes on where it was.
    """
    config = LocationConfig.of(config, settings) if settings or not isinstance(config, LocationConfig) else config
    with opened_location(config, progress) as location:
        if config.output_dir is not None:
            refuse_inside(location.model, Path(config.output_dir), "which stays as it is; give another one")
            check_writable(config.output_dir)
        with location.with_more().measuring() as material:
            loss_map = location.map(material)
    if config.output_dir is not None:
        write_loss_map(loss_map, config.output_dir)
    return loss_map


@contextmanager
def opened_location(config: LocationConfig, progress: bool) -> Iterator[Location]:
    """The models of a configuration, found and paired. Raises `OliveExtError`."""
    refuse_unknown(config.tasks, task_folders(config.include_path))
    models = Models(config.evaluation(), progress)
    with models.clock.told(progress), asked_where_it_answers(models.names()):
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
        self._cache: QuantizedCache | None = None

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
        """As `with_parts`, with all else that is rounded: activations, and the KV cache."""
        self.with_parts()
        self._cache = quantized_cache(self.floats, self.quantized, self.pairing.unpaired)
        self._roundings = list(static_roundings(self.pairing, self.floats, self.quantized))
        if self.model.providers[0].name == HOST.name:
            self._roundings += kernels_roundings(self.pairing.targets, self.floats, self.quantized)
        return self

    def _pair_part(self, part: str) -> None:
        companions = [model.files.companions.get(part) for model in (self.reference, self.model)]
        files = [companion.graph for companion in companions if companion is not None]
        if len(files) < len(companions):
            return
        try:
            own = Sources.of(*files)
        except ModelError as error:
            self.pairing.unpaired[part] = str(error)
            return
        pairing = pair(own.floats, own.quantized, part)
        self.sources[part] = own
        self.targets += pairing.targets
        self.pairing.add(pairing, part)

    @contextmanager
    def measuring(self) -> Iterator[Material]:
        """Asks the float model everything, and keeps its distributions. Raises `ModelError` where nothing can be
        compared."""
        from olive_ext.backends.task_checks import refuse_shots
        from olive_ext.backends.task_loading import Seeds, load_tasks
        from olive_ext.run.task_fit import loaded_inputs

        if not self.targets and not self._roundings and self._cache is None:
            refuse_nothing(self.pairing, len(self.quantized.uses))
        evaluation, seeds = self._models.config, Seeds.of(self._config.seed)
        runs_code = evaluation.confirm_run_unsafe_code
        tasks = load_tasks(evaluation.tasks, evaluation.include_path, seeds, evaluation.metadata, runs_code=runs_code)
        inputs = loaded_inputs(tasks)
        refuse_shots(tasks.tasks, evaluation.num_fewshot)
        refuse_misfits(self.model, inputs)
        refuse_generations(inputs, evaluation.gen_kwargs, self.model)
        with ExitStack() as stack:
            folder = self._config.output_dir and Path(self._config.output_dir, "journal")
            folder = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="olive_ext_records_")))
            variants = stack.enter_context(self._variants(folder))
            asked = answered(variants.recorder, evaluation, tasks, seeds, progress=self._models.progress)
            documents = list(asked.values())
            journal = stack.enter_context(self._journal(variants, folder))
            names = [task for task, _ in asked]
            yield Material(variants, documents, names, variants.record(documents), journal)

    def _variants(self, folder: Path) -> Variants:
        settings = self._config.reference
        record_to = {"folder": str(folder), "top": settings.top, "drawn": settings.drawn}
        variants = Variants(self.reference, self.sources, self.targets, self._roundings, record_to)
        if self._cache is not None:
            variants.add_cache(self._cache, with_cache(self.reference, self._cache, self.quantized))
        why = "the engine's form of the float graph has no node that reads it"
        self.pairing.unpaired |= {node: why for rounding in variants.missing for node in rounding.nodes}
        variants.recorder.keep_answers(folder / "answers", resume=self._config.resume, facts={"versions": runtimes()})
        return variants

    def _journal(self, variants: Variants, folder: Path) -> Any:
        """The measurements' journal, in a folder that stays."""
        if self._config.output_dir is None:
            return nullcontext()
        facts = {**variants.describe(), "quantized": self.model.digest, "versions": runtimes()}
        return Journal(folder / f"losses_{facts_key(facts)}.jsonl", facts, resume=self._config.resume)

    def map(self, material: Material, *, with_gains: bool = True) -> LossMap:
        """What the weights lose on these documents; `with_gains` also what keeping the certain ones float gains."""
        variants, documents, positions = material.variants, material.documents, material.positions
        targets, measurements = variants.targets, Measurements(variants, documents, material.journal)
        groups = grouped(targets, self._config.by)
        groups.sort(key=lambda group: variants.share(group.targets))  # those above leave states for those below
        race = Race(
            len(groups),
            positions,
            lambda group, numbers: measurements.kl(groups[group].targets, numbers),
            self._config.seed or 0,
        )
        before = variants.work
        certain = race.run(self._config.top, lambda quantities, many: self._told(quantities, many, variants))
        share = variants.computed_share(before)
        order = race.order.tolist()
        positions_N = np.asarray(positions, np.float64)[order]
        total = measurements.kl(targets, order)
        kept = {number: groups[number] for number in sorted(certain)} if with_gains else {}
        gained = _gained(measurements, kept, targets, total, order)
        compared = variants.compared(self.model, [documents[number] for number in order])
        own = nats_by_document(compared, len(order))
        divergence = measure_divergence("all", compared)
        per_position = {number: nats / float(positions_N.sum()) for number, nats in gained.items()}
        damaged = {group.name for group in groups if any(one.name in self.pairing.damaged for one in group.targets)}
        entries = [_entry(number, group, race, certain, per_position) for number, group in enumerate(groups)]
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
            model_kl=estimate(own, positions_N),
            kernels=estimate(own - total, positions_N),
            by_position=() if divergence is None else divergence.by_position,
            by_class=() if divergence is None else divergence.by_class,
            unpaired=self.pairing.unpaired,
            beyond_rounding=self.pairing.shares,
            damaged=self.pairing.damaged,
            passes=race.num_passes,
            computed_passes=race.num_passes * share,
        )

    def _told(self, quantities: Sequence[int], many: int, variants: Variants) -> Iterator[int]:
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
    own, other = models.given, models.given_reference
    if own.kind != "onnx" or not own.runtime.runs_graph:
        raise ConfigError("a loss is located in a quantized ONNX model", "model", own.settings.model)
    other = models.other
    if not other.runtime.runs_graph:
        note = models.export_note(other.settings.model).get("export", "is run by another library than ONNX Runtime")
        raise ConfigError(f"{note}; give the float ONNX model", "reference", other.settings.model)
    if own.digest == other.digest:
        raise ContradictionError(f"'reference' = '{other.settings.model}' is the model itself: give the float model")
    tokenizer = {} if models.asked_otherwise is None else {"tokenizer": own.files.tokenizer}
    if own.spec.vocab_size != other.spec.vocab_size:
        raise NotComparableError(
            f"the reference has logits for {other.spec.vocab_size} tokens and the model for {own.spec.vocab_size}: "
            "they are not comparable"
        )
    length = {"max_length": min(own.spec.context_length, other.spec.context_length)}
    return own.patched(length), other.patched({**tokenizer, **length})


def _gained(
    measurements: Measurements, kept: Mapping[int, Group], targets: Sequence[AnyTarget], total: Floats, order: list[int]
) -> dict[int, float]:
    """By the numbers of groups how much less is lost, in nats over all positions, where they alone are kept float."""
    others = {number: [one for one in targets if one not in group.targets] for number, group in kept.items()}
    return {number: float((total - measurements.kl(rest, order)).sum()) for number, rest in others.items()}


def _entry(number: int, group: Group, race: Race, certain: frozenset[int], gained: Mapping[int, float]) -> Entry:
    loss = race.estimate(number)
    return Entry(
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

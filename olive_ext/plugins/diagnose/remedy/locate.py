"""`locate`: which weights of a quantized model its loss comes from, measured in the graph of the float model.

The tasks' documents are asked as in an evaluation; the float model's own answers are the targets of what is generated.
Each weight alone is given its quantized numbers, and those of the others stay. All are measured on a first part of the
documents, and those that may be among the largest on more, until it is certain which these are (`Race`). Axes: Q
quantities, N documents.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import stats

from olive_ext.backends.progress import progress_bar
from olive_ext.backends.task_files import refuse_unknown, task_folders
from olive_ext.config.base import takes
from olive_ext.errors import ConfigError, ContradictionError, ModelError, NotComparableError
from olive_ext.graph.nodes import quantizing_operator
from olive_ext.model import ResolvedModel
from olive_ext.model.files.hub import offline_if_unreachable
from olive_ext.model.types import MEDIA_PARTS
from olive_ext.package_versions import runtimes
from olive_ext.plugins.diagnose.remedy.mended_package import refuse_inside
from olive_ext.plugins.diagnose.remedy.pages import Entry, Estimate, LossMap, write_loss_map
from olive_ext.plugins.diagnose.remedy.pairing import Sources, Target, pair, refuse_nothing, whole_experts, with_tables
from olive_ext.plugins.diagnose.remedy.variants import Material, Variants, answered, rounded_inside
from olive_ext.plugins.diagnose.settings import LocationConfig
from olive_ext.records.journal import Journal, facts_key
from olive_ext.report.report_files import check_writable
from olive_ext.run.models import Models

Floats: TypeAlias = npt.NDArray[np.float64]

CONFIDENCE = 0.95

FIRST_SHARE = 32
"""All quantities are measured on this part of the documents (one of so many), and at least on `LEAST`."""

LEAST = 24
"""Documents from which on Student's quantiles at the chances of many pairs are near the normal distribution's."""

Measure: TypeAlias = Callable[[int, Sequence[int]], Floats]
"""From a quantity and the numbers of documents to the sum over each document's positions [N]."""

Progress: TypeAlias = Callable[[Sequence[int], int], Iterable[int]]
"""Yields the quantities that are measured on so many documents next, each when the one before it is measured."""


class Race:
    """Measurements of Q quantities, each on the first of the documents in one random order."""

    def __init__(self, num_quantities: int, num_positions: npt.ArrayLike, measure: Measure, seed: int = 0) -> None:
        """`num_positions` [N]: the positions of each document, over which a mean is."""
        self._positions_N = np.asarray(num_positions, np.float64)
        self.order = np.random.default_rng(seed).permutation(len(self._positions_N))
        """The numbers of the documents [N], in the order in which they are measured."""

        self._positions_N = self._positions_N[self.order]
        self._sums_QN = np.zeros((num_quantities, len(self.order)))
        self._counts_Q = np.zeros(num_quantities, np.int64)
        self._measure = measure
        self.num_passes = 0.0
        """Measured positions, in passes over all documents."""

    def run(self, num_largest: int, progress: Progress = lambda quantities, many: quantities) -> frozenset[int]:
        """Measures until the `num_largest` largest quantities are certain, or every document is measured; the numbers
        of those that are certain to be among them.

        What is called certain is wrong in at most 5 % of races. A mistake calls a quantity certain that is none of the
        largest, or gives up one that is. It needs one that is not among the largest to be measured larger than one that
        is, so the chance is divided by the number of such pairs and of looks (Bonferroni).
        """
        total = len(self.order)
        looks = [min(total, max(LEAST, math.ceil(total / FIRST_SHARE)))]
        while looks[-1] < total:
            looks.append(min(total, 2 * looks[-1]))
        contested = list(range(len(self._counts_Q)))
        for many in looks:
            for quantity in progress(contested, many):
                self.extend(quantity, many)
            others = len(self._counts_Q) - num_largest
            if others <= 0:
                return frozenset(contested)
            # Out where `num_largest` others are larger, certain where all but `num_largest` - 1 are out or smaller.
            larger_QQ = self._larger((1 - CONFIDENCE) / len(looks) / (num_largest * others))
            is_out_Q = larger_QQ.sum(0) >= num_largest
            is_certain_Q = ~is_out_Q & ((larger_QQ | is_out_Q).sum(1) >= others)
            contested = np.flatnonzero(~is_certain_Q & ~is_out_Q).tolist()
            if not contested:
                break
        return frozenset(np.flatnonzero(is_certain_Q).tolist())

    def extend(self, quantity: int, many: int) -> None:
        """Measures a quantity on the first `many` documents, as far as it has not been measured."""
        start = int(self._counts_Q[quantity])
        if many > start:
            self._sums_QN[quantity, start:many] = self._measure(quantity, self.order[start:many].tolist())
            self._counts_Q[quantity] = many
            self.num_passes += float(self._positions_N[start:many].sum() / self._positions_N.sum())

    def estimate(self, quantity: int) -> Estimate:
        """The mean of a quantity on the documents that it was measured on."""
        many = int(self._counts_Q[quantity])
        return estimate(self._sums_QN[quantity, :many], self._positions_N[:many])

    def estimate_sum(self) -> Estimate:
        """The mean of the sum of all quantities, on the documents on which all were measured."""
        many = int(self._counts_Q.min())
        return estimate(self._sums_QN[:, :many].sum(0), self._positions_N[:many])

    def _larger(self, alpha: float) -> npt.NDArray[np.bool_]:
        """[Q, Q]: where the first quantity of a pair is larger than the second with an error of at most `alpha`, by
        their differences on the documents that both have seen."""
        larger_QQ = np.zeros((len(self._counts_Q),) * 2, np.bool_)
        for many in np.unique(self._counts_Q).tolist():
            if many < 2:
                continue
            quantities = np.flatnonzero(self._counts_Q >= many)
            sums_QN, positions_N = self._sums_QN[quantities, :many], self._positions_N[:many]
            means_Q = sums_QN.sum(1) / positions_N.sum()
            residuals_QN = sums_QN - means_Q[:, None] * positions_N
            products_QQ = residuals_QN @ residuals_QN.T
            own_Q = np.diag(products_QQ)
            variance_QQ = np.maximum(own_Q[:, None] + own_Q - 2 * products_QQ, 0) * many / (many - 1)
            bound_QQ = np.sqrt(variance_QQ) / positions_N.sum() * stats.t.isf(alpha, many - 1)
            is_pair_QQ = np.minimum.outer(self._counts_Q[quantities], self._counts_Q[quantities]) == many
            difference_QQ = means_Q[:, None] - means_Q
            larger_QQ[np.ix_(quantities, quantities)] |= is_pair_QQ & (difference_QQ > bound_QQ) & (difference_QQ > 0)
        return larger_QQ


def estimate(sums_N: Floats, positions_N: Floats) -> Estimate:
    """The mean over positions of sums by document, with a 95 % interval; documents are drawn, so the mean is a
    ratio of two totals (Cochran 1977, Sampling Techniques, eq. 6.13). One document has no interval.

    Losses are skewed, a few documents have most of them: Student's interval holds in 86 % of draws of 30 documents of
    the quickstart's, and 93 % of 240. Without the skewness (Hall 1992, On the Removal of Skewness by Transformation)
    it is 94 and 95 % (docs/benchmarks/loss_intervals.py).
    """
    count, total = len(sums_N), float(positions_N.sum())
    mean = float(sums_N.sum()) / total
    if count < 2:
        return Estimate(mean, -math.inf, math.inf, count)
    residuals_N = sums_N - mean * positions_N
    squares = float(residuals_N @ residuals_N)
    stderr = math.sqrt(squares * count / (count - 1)) / total
    skewness = float((residuals_N**3).mean()) / (squares / count) ** 1.5 if squares else 0.0
    quantile = float(stats.t.isf((1 - CONFIDENCE) / 2, count - 1))
    sides = [quantile, -quantile]
    if abs(skewness) >= 1e-6:  # the quantiles of a skewed mean's error: the inverse of Hall's cubic
        inner = [1 + skewness * (side / math.sqrt(count) - skewness / (6 * count)) for side in sides]
        sides = [math.sqrt(count) * 3 / skewness * (float(np.cbrt(one)) - 1) for one in inner]
    return Estimate(mean, mean - stderr * sides[0], mean - stderr * sides[1], count)


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
        with location.measuring() as material:
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
    """A quantized model and the float one, with their weights in pairs, those of other graphs than the decoder, too."""

    def __init__(self, config: LocationConfig, models: Models) -> None:
        """Raises `ConfigError` for models that are not comparable."""
        self._config = config
        self._models = models
        self.model, self.reference = _comparable(models)
        decoders = Sources.of(self.reference.files.decoder, self.model.files.decoder)
        if operator := quantizing_operator(decoders.floats.model):
            given = f"'reference' = '{self.reference.name}'"
            raise ConfigError(f"{given} is quantized itself ({operator}): give the float model")
        self.pairing = pair(decoders.floats, decoders.quantized)
        self.pairing.unpaired |= rounded_inside(decoders.floats, decoders.quantized)
        if self.pairing.damaged:  # a constant may be NaN
            self.model, self.reference = (one.patched({"non_finite": "report"}) for one in (self.model, self.reference))
        self.sources = {"": decoders}
        """By part of the package."""

        self.tables: dict[Target, Target] = {}
        """Heads whose table is stored apart, each with it."""

        self.targets = list(self.pairing.targets)
        for part in (*MEDIA_PARTS, "embedding") if self.reference.media is not None else ():
            companions = [model.files.companions.get(part) for model in (self.reference, self.model)]
            files = [companion.graph for companion in companions if companion is not None]
            if len(files) < len(companions):
                continue
            try:
                sources = Sources.of(*files)
            except ModelError as error:
                self.pairing.unpaired[part] = str(error)
                continue
            pairing = pair(sources.floats, sources.quantized, part)
            self.sources[part] = sources
            self.targets += pairing.targets
            self.pairing.unpaired |= pairing.unpaired
            self.pairing.damaged |= pairing.damaged
            self.pairing.shares |= pairing.shares

    def with_whole_experts(self) -> Location:
        """Takes a node's experts as one target, which have one number of bits, and fills `tables`."""
        self.targets = whole_experts(self.targets)
        self.tables = with_tables(self.targets, self.sources)
        return self

    @contextmanager
    def measuring(self) -> Iterator[Material]:
        """Asks the float model everything, and keeps its distributions. Raises `ModelError` if nothing can be
        compared."""
        from olive_ext.run.evaluation import load_requested_tasks

        if not self.targets:
            refuse_nothing(self.pairing, len(self.sources[""].quantized.uses))
        tasks = load_requested_tasks(self._models, None)
        assert tasks is not None  # a loss is measured on tasks
        with ExitStack() as stack:
            folder = self._config.output_dir and Path(self._config.output_dir, "journal")
            folder = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="olive_ext_records_")))
            settings = self._config.reference
            record_to = {"folder": str(folder), "top": settings.top, "drawn": settings.drawn}
            variants = Variants(self.reference, self.sources, self.targets, record_to)
            stack.enter_context(variants)
            stem = folder / "answers" if self._config.output_dir is not None else None  # the folder stays
            variants.recorder.keep_answers(stem, resume=self._config.resume)
            asked = answered(variants.recorder, self._models.config, tasks, progress=self._models.progress)
            documents = list(asked.values())
            facts = {**variants.facts, "quantized": self.model.digest, "versions": runtimes()}
            file = folder / f"losses_{facts_key(facts)}.jsonl"
            journal = stack.enter_context(closing(Journal(file, facts, resume=self._config.resume)))
            names = [task for task, _ in asked]
            yield Material(variants, documents, names, variants.record(documents), journal)

    def map(self, material: Material) -> LossMap:
        """The loss of each weight on these documents."""
        variants, documents, positions = material.variants, material.documents, material.positions
        targets, seed = self.targets, self._config.seed or 0
        race = Race(len(targets), positions, lambda number, some: material.kl([targets[number]], some), seed)
        certain = race.run(self._config.top, lambda quantities, many: self._with_progress(quantities, many, variants))
        order = race.order.tolist()
        positions_N = np.asarray(positions, np.float64)[order]
        total = material.kl(targets, order)
        whole = variants.compared(self.model, [documents[number] for number in order])
        damaged = variants.cache_damage | self.pairing.damaged
        entries = []
        for number, target in enumerate(targets):
            loss = race.estimate(number)
            entry = Entry(
                name=target.name,
                layer=target.layer,
                kind=target.kind,
                nodes=target.nodes,
                kl=loss.mean,
                low=loss.low,
                high=loss.high,
                num_documents=loss.num_documents,
                is_certain=number in certain,
                float_bytes=target.float_bytes,
                bytes=target.bytes,
            )
            entries.append(entry)
        return LossMap(
            model=self.model.name,
            reference=self.reference.name,
            tasks=tuple(str(task) for task in self._config.tasks),
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
            damaged=damaged,
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

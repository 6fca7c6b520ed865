"""Compares a model with a reference while it is scored. The tap of an engine gets every scored step with its output,
and returns notes on the step's targets; graphs compare the rows of logits.

`ResidentTap` runs a reference on the same steps. `WritingTap` writes a reference's distributions into the reference
log-prob cache, and `ReadingTap` compares with them. Knows no tokenizer and no scheduler.

Axes: R logits rows of a step, T targets, V vocabulary, N tokens of a record.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from typing_extensions import override

from olive_ext.engine.requests import KeyedRequest, Notes, Request, Result, source_key
from olive_ext.engine.runners.runner import OpenedRunner, Runner, Traits, joined
from olive_ext.engine.step import UNLIMITED, IntArray, LogitsRow, Row, Step, StepOutput
from olive_ext.errors import NotComparableError, RecordsError, UnsupportedError
from olive_ext.graph.row_comparison import divergence_graph, record_graph, recorded_graph
from olive_ext.media.items import Array, Arrays, Media, MediaItem, Source, media_key
from olive_ext.model.providers.bindings import InputFeed, named_ort_failures
from olive_ext.model.providers.devices import Device
from olive_ext.model.providers.ort_session import open_session
from olive_ext.model.providers.resolution import resolve_providers
from olive_ext.model.types import SourceKind
from olive_ext.records import Form, Records, request_key, scored_targets
from olive_ext.stats.compared_fields import COMPARED

LogitRows: TypeAlias = "ort.OrtValue | npt.NDArray[np.float32]"
OpenGraph: TypeAlias = Callable[[bytes], ort.InferenceSession]

_FLOAT = 1
CPU_BYTES = 1 << 22
"""The most logits that one run of a graph takes on the CPU: intermediate values then stay in the processor's cache."""

DEVICE_BYTES = 1 << 28
"""The most bytes of logits that one run of a graph takes on other devices, to bound the memory."""


class DivergenceKernels:
    """Compares distributions by graphs that are opened on `device` at first use; one that fails raises `RunError`. Two
    models are compared on ids below `num_tokens`, because no token has others."""

    def __init__(self, open_graph: OpenGraph, device: Device, num_tokens: int | None = None) -> None:
        self.host_bytes = 0
        self.num_tokens = num_tokens
        self._open_graph = open_graph
        self._device = device
        self._graphs: dict[tuple[object, ...], InputFeed] = {}

    @classmethod
    def at(cls, runner: Runner, num_tokens: int | None = None) -> DivergenceKernels:
        """Graphs on the device where the runner leaves its logits rows; on the CPU if it returns them to the host."""
        if runner.open_graph is not None:
            return cls(runner.open_graph, runner.device, num_tokens)
        providers = resolve_providers("cpu", None)
        return cls(partial(open_session, providers=providers, label="divergence"), Device("cpu"), num_tokens)

    def compare(self, reference: LogitRows, candidate: LogitRows, reference_ids: Array, ids: Array) -> dict[str, Array]:
        """The outputs of `divergence_graph`, [R] each. `ids`: the rows' argmax. `ConfigError` for two vocabularies."""
        sizes = shape_of(candidate)[1], shape_of(reference)[1]
        graph = self._graph(divergence_graph, *sizes, comparable_tokens(*sizes, self.num_tokens))
        rows = {"reference_logits": reference, "logits": candidate}
        return self._run(graph, rows, {"reference_ids": reference_ids[:, None], "ids": ids[:, None]})

    def record(self, logits: LogitRows, form: Form, rng: np.random.Generator) -> npt.NDArray[np.void]:
        """Records of the rows: `form.dtype`[R]."""
        num_rows, vocab_size = shape_of(logits)
        records_R = np.empty(num_rows, form.dtype)
        if form.is_whole:
            host_RV = to_host(logits)
            self.host_bytes += host_RV.nbytes
            records_R["logits"] = host_RV - host_RV.max(-1, keepdims=True)
            return records_R
        spread = np.arange(form.drawn) + rng.random((num_rows, form.drawn))
        graph = self._graph(record_graph, vocab_size, form.top, form.drawn)
        outputs = self._run(graph, {"logits": logits}, {"uniforms": (spread / form.drawn).astype(np.float32)})
        for name, values in outputs.items():
            records_R[name] = values
        return records_R

    def compare_recorded(
        self, records_R: npt.NDArray[np.void], form: Form, logits: LogitRows, ids: Array
    ) -> dict[str, Array]:
        """As `compare`, [R] each, with the outputs of `recorded_graph` too, against records of the form."""
        vocab_size = shape_of(logits)[1]
        num_tokens = comparable_tokens(vocab_size, form.vocab_size, self.num_tokens)
        beyond = () if num_tokens == max(vocab_size, form.vocab_size) else (num_tokens,)
        if form.is_whole:
            kept = np.ascontiguousarray(records_R["logits"])
            return self.compare(kept, logits, kept.argmax(-1), ids)
        graph = self._graph(recorded_graph, vocab_size, form.top, form.drawn, *beyond)
        record = {
            "ids": ids[:, None],
            "record_ids": records_R["ids"].astype(np.int64),
            "record_logprobs": np.ascontiguousarray(records_R["logprobs"]),
            "tail": np.ascontiguousarray(records_R["tail"][:, None]),
        }
        outputs = self._run(graph, {"logits": logits}, record)
        return {**outputs, "reference_top_logprobs": record["record_logprobs"][:, 0]}

    def _graph(self, build: Callable[..., bytes], *sizes: int) -> InputFeed:
        key = (build, *sizes)
        if key not in self._graphs:
            self._graphs[key] = InputFeed(self._open_graph(build(*sizes)), self._device)
        return self._graphs[key]

    def _run(self, graph: InputFeed, rows: Mapping[str, LogitRows], arrays: Arrays) -> dict[str, Array]:
        """All outputs of a graph over rows of logits and small arrays with as many rows, on the host. It is run on some
        rows at a time."""
        placed = {name: self._place(value) for name, value in rows.items()}
        num_rows, vocab_size = shape_of(next(iter(placed.values())))
        most = CPU_BYTES if self._device.kind == "cpu" else DEVICE_BYTES
        step = max(1, most // (4 * vocab_size)) if self._device.has_pointers else num_rows
        names = [output.name for output in graph.session.get_outputs()]
        parts = []
        with named_ort_failures(f"to compare {num_rows} rows of {vocab_size} logits"):
            for start in range(0, num_rows, step):
                stop = min(num_rows, start + step)
                binding = graph.session.io_binding()
                for name, value in placed.items():
                    self._bind_rows(binding, name, value, start, stop)
                for name, array in arrays.items():
                    graph.bind(binding, name, np.ascontiguousarray(array[start:stop]))
                for name in names:
                    binding.bind_output(name)
                graph.session.run_with_iobinding(binding)
                parts.append([value.numpy() for value in binding.get_outputs()])
        outputs = {name: np.concatenate(column) for name, column in zip(names, zip(*parts, strict=True), strict=True)}
        self.host_bytes += sum(array.nbytes for array in outputs.values())
        return outputs

    def _place(self, rows: LogitRows) -> LogitRows:
        if isinstance(rows, ort.OrtValue) and rows.device_name() == self._device.kind:
            return rows
        host = to_host(rows)
        if self._device.kind == "cpu":
            return host
        return ort.OrtValue.ortvalue_from_numpy(host, self._device.kind, self._device.index)

    def _bind_rows(self, binding: ort.IOBinding, name: str, rows: LogitRows, start: int, stop: int) -> None:
        if not isinstance(rows, ort.OrtValue):
            binding.bind_cpu_input(name, rows[start:stop])
        elif not self._device.has_pointers:
            binding.bind_ortvalue_input(name, rows)
        else:
            _, vocab_size = shape_of(rows)
            address = rows.data_ptr() + start * vocab_size * 4
            shape = [stop - start, vocab_size]
            binding.bind_input(name, self._device.kind, self._device.index, _FLOAT, shape, address)


def comparable_tokens(candidate: int, reference: int, num_tokens: int | None) -> int:
    """The number of ids on which two models are compared. Raises `ConfigError` for logits of two sizes, where one has
    more than the ids that belong to no token among `num_tokens`."""
    if reference != candidate and (num_tokens is None or num_tokens > min(reference, candidate)):
        raise NotComparableError(
            f"the reference has logits for {reference} tokens and the model for {candidate}: they are not comparable"
        )
    return min(candidate, reference, num_tokens or candidate)


def shape_of(rows: LogitRows) -> tuple[int, int]:
    """(R, V)."""
    shape = rows.shape() if isinstance(rows, ort.OrtValue) else rows.shape
    return int(shape[0]), int(shape[1])


def to_host(rows: LogitRows) -> npt.NDArray[np.float32]:
    """The rows [R, V] in the host's memory."""
    array: npt.NDArray[np.float32] = rows.numpy() if isinstance(rows, ort.OrtValue) else np.ascontiguousarray(rows)
    return array


def vocab_size_of(runner: Runner) -> int:
    """The number of logits of the model. A step of one token finds it, and that token is resident afterwards. After an
    encoder of features, of which there are none to try, the graph or its configuration names it."""
    encoder, known = runner.encoder, runner.vocab_size
    if encoder is not None and encoder.kind is SourceKind.FEATURES and known is not None:
        return known
    runner.reserve(1)
    source = Source(np.zeros(1, np.int64)) if encoder is not None else None
    output = runner.run(Step((Row(0, 0, (0,), source=source),), (LogitsRow(0, 0),)))
    return shape_of(output.logits_RV)[1]


logger = logging.getLogger(__name__)

KEPT_ITEMS = 64
"""A resident reference remembers how it prepares so many pictures: those of the steps in progress."""

Items = Sequence[KeyedRequest]


class Tap:
    """Gets the steps of requests that are only scored; generated text does not come here. This one notes nothing, and
    leaves the traits of the steps as they are."""

    longest_step = UNLIMITED
    """The most tokens of a prompt in one step."""

    runners: tuple[Runner, ...] = ()
    """Models of the tap's own: they have the room of the engine's runner, and end with it."""

    kernels: DivergenceKernels | None = None
    """The kernels that compare rows of logits, or make records of them."""

    @property
    def host_bytes(self) -> int:
        """Bytes that were copied from the device to the host for the notes."""
        return sum(part.host_bytes for part in (*self.runners, self.kernels) if part is not None)

    def note(self, step: Step, output: StepOutput) -> Notes | None:
        """Notes [T] on the step's targets. Raises `MemoryShortageError` where memory does not suffice for the step."""
        return None

    def traits(self, runner: Runner) -> Traits:
        """What noted steps of `runner` can do: all but overlap, since a step is noted before the next one runs."""
        return runner.traits if type(self) is Tap else replace(runner.traits, overlaps_steps=False)

    def own_media(self, media: Media) -> Media:
        """The pictures and sounds of a request as the tap's `runners` take them."""
        return media

    def prepare(self, items: Items) -> tuple[Mapping[Hashable, Result], Items]:
        """The results that are known without running their requests, and what is to be run."""
        return {}, items

    def finish(self, key: Hashable, result: Result) -> Result:
        """The complete `result` of the request with this key of those that were prepared last."""
        return result

    def flush(self) -> None:
        """The run has ended, however it did: what is complete is kept."""

    def describe(self) -> Mapping[str, Any]:
        """Facts for `describe_execution`."""
        return {}


class ResidentTap(Tap):
    """Runs every step on a reference, too, and compares both models' distributions. Notes are `COMPARED`.

    Both runners return their logits rows. Steps use what both runners can do: the candidate may have more slots than
    its scheduler sees, and so may the reference.
    """

    kernels: DivergenceKernels

    def __init__(
        self,
        candidate: OpenedRunner,
        reference: OpenedRunner,
        kernels: DivergenceKernels,
        own_item: Callable[[MediaItem], MediaItem] = lambda item: item,
    ) -> None:
        """`own_item`: prepares a picture as the reference does. Raises `ConfigError` for models of different kinds, and
        where one takes one token a step and the other only whole texts."""
        self._reference, self.longest_step = reference
        runners = self._reference, candidate.runner
        names = [runner.encoder.kind.value if runner.encoder else "none" for runner in runners]
        if names[0] != names[1]:
            raise NotComparableError(f"the reference's encoder takes {names[0]} and the model's {names[1]}")
        if 1 in (candidate.chunk_size, self.longest_step) and not all(one.traits.chunked_prefill for one in runners):
            problem = "one of the models takes one token a step and the other only whole texts: set it to 'recorded'"
            raise UnsupportedError(problem, "reference.mode", "resident")
        self._reference.residency = candidate.runner.residency
        self.runners, self.kernels = (self._reference,), kernels
        self._own_item = lru_cache(maxsize=KEPT_ITEMS)(own_item)
        self._has_warned = False
        self._seconds = 0.0

    @override
    def traits(self, runner: Runner) -> Traits:
        candidate, reference = runner.traits, self._reference.traits
        counts = runner.capacity.num_slots, self._reference.capacity.num_slots
        return Traits(
            context_length=min(candidate.context_length, reference.context_length),
            form=joined(candidate.form, reference.form, counts),
            tree_batches=candidate.tree_batches and reference.tree_batches,
            can_rewind=candidate.can_rewind and reference.can_rewind,
            chunked_prefill=candidate.chunked_prefill and reference.chunked_prefill,
            row_group=max(candidate.row_group, reference.row_group),
            item_limit=candidate.item_limit.both(reference.item_limit),
            lengths=tuple(sorted({*candidate.lengths, *reference.lengths})),
        )

    @override
    def note(self, step: Step, output: StepOutput) -> Notes:
        begin = time.perf_counter()
        rows = tuple(row._replace(media=self.own_media(row.media)) if row.media else row for row in step.rows)
        reference = self._reference.run(replace(step, rows=rows))
        self._seconds += time.perf_counter() - begin
        notes_T = np.zeros(len(step.targets), COMPARED)
        if not step.targets:
            return notes_T
        both = (reference.logits_RV, output.logits_RV, reference.greedy_ids, output.greedy_ids)
        rows_T, tokens_T = target_arrays(step)
        for name, values_R in self.kernels.compare(*both).items():
            notes_T[name] = values_R[rows_T]
        notes_T["kl_lower"] = notes_T["kl"]
        notes_T["reference_logprobs"] = reference.target_logprobs
        notes_T["reference_is_greedy"] = reference.greedy_ids[rows_T] == tokens_T
        notes_T["same_top"] = (reference.greedy_ids == output.greedy_ids)[rows_T]
        return notes_T

    @override
    def own_media(self, media: Media) -> Media:
        prepared: Media = ()
        for run in media:
            with run.item.or_lost():
                prepared = (*prepared, replace(run, item=self._own_item(run.item)))
        if not self._has_warned and media != prepared:
            self._has_warned = True
            logger.warning("the reference prepares pictures otherwise than the model: that is compared, too")
        return prepared

    @override
    def describe(self) -> Mapping[str, Any]:
        return {"reference": {"mode": "resident", "seconds": self._seconds, **self._reference.describe()}}


def target_arrays(step: Step) -> tuple[IntArray, IntArray]:
    """The logits row and the token of each target; [T] each."""
    pairs_T2 = np.array(step.targets, np.int64).reshape(-1, 2)
    return pairs_T2[:, 0], pairs_T2[:, 1]


RECORDED = np.dtype([("record", "<i8")])
"""The note of a `WritingTap` on a target: the number of the record of the distribution that scored it."""


class RecordsTap(Tap):
    """The base of taps on the records of a reference."""

    kernels: DivergenceKernels

    def __init__(self, records: Records, kernels: DivergenceKernels) -> None:
        self._records, self.kernels = records, kernels


class WritingTap(RecordsTap):
    """Records the distributions that targets are scored with, each once. Requests that are recorded are not run."""

    @override
    def prepare(self, items: Items) -> tuple[Mapping[Hashable, Result], Items]:
        self._digests = {key: key_of(request) for key, request in items}
        content = zlib.crc32(b"".join(sorted(self._digests.values())))
        self._rng = np.random.default_rng([self._records.form.seed, content])  # the same requests, the same tokens
        recorded = {key: known_result(self._records, digest) for key, digest in self._digests.items()}
        known = {key: result for key, result in recorded.items() if result is not None}
        return known, [item for item in items if item[0] not in known]

    @override
    def note(self, step: Step, output: StepOutput) -> Notes:
        notes_T = np.zeros(len(step.targets), RECORDED)
        if step.targets:
            rows_T, _ = target_arrays(step)
            wanted, places_T = np.unique(rows_T, return_inverse=True)
            records_R = self.kernels.record(output.logits_RV, self._records.form, self._rng)
            notes_T["record"] = self._records.append(records_R[wanted])[places_T]
        return notes_T

    def finish(self, key: Hashable, result: Result) -> Result:
        """Keeps the request's scores. The result goes on without notes: it was not compared with anything."""
        assert result.notes is not None
        targets = scored_targets(result.notes["record"], result.logprobs, result.is_greedy)
        self._records.put(self._digests[key], targets)
        return replace(result, notes=None)

    @override
    def flush(self) -> None:
        self._records.flush()

    @override
    def describe(self) -> Mapping[str, Any]:
        return {"records": self._records.describe()}


class ReadingTap(RecordsTap):
    """Compares with the records of a reference. Notes are `COMPARED`.

    The logits rows name the numbers of their records. What depends on the target alone (its log-probability under the
    reference) is not noted of a step: the records have it by request.
    """

    def traits(self, runner: Runner) -> Traits:
        """The traits of any tap, with the reference's sides too: a row of logits is compared with one record."""
        traits = super().traits(runner)
        lengths = {*traits.lengths, *self._records.facts.get("lengths", ())}
        return replace(traits, lengths=tuple(sorted(lengths)))

    def prepare(self, items: Items) -> tuple[Mapping[Hashable, Result], Items]:
        """The requests with the numbers of their records. Raises `RecordsError` for one that is not recorded."""
        records = {key: self._records.find(key_of(request)) for key, request in items}
        self._scored = {key: scored for key, scored in records.items() if scored is not None}
        if missing := len(records) - len(self._scored):
            raise RecordsError(
                f"the records in '{self._records.folder}' hold nothing of {missing} of {len(records)} requests: record "
                "the reference on the same tasks, with the same limit, template, max_length and image processor"
            )
        numbers = {key: tuple(scored["record"].tolist()) for key, scored in self._scored.items()}
        return {}, [(key, replace(request, records=numbers[key])) for key, request in items]

    @override
    def note(self, step: Step, output: StepOutput) -> Notes:
        notes_T = np.zeros(len(step.targets), COMPARED)
        if not step.targets:
            return notes_T
        assert len(step.logits_rows) == shape_of(output.logits_RV)[0]
        form = self._records.form
        records_R = self._records.get(np.array([max(row.record, 0) for row in step.logits_rows]))
        compared = self.kernels.compare_recorded(records_R, form, output.logits_RV, output.greedy_ids)
        rows_T, _ = target_arrays(step)
        for name, values_R in compared.items():
            notes_T[name] = values_R[rows_T]
        if form.is_whole:
            top_R = records_R["logits"].argmax(-1)
            notes_T["kl_lower"] = notes_T["kl"]
        else:
            top_R = records_R["ids"][:, 0]
            notes_T["tail_mass"] = records_R["tail"][rows_T]
            notes_T["kl_reverse"] = np.nan
        notes_T["same_top"] = (top_R == output.greedy_ids)[rows_T]
        return notes_T

    @override
    def finish(self, key: Hashable, result: Result) -> Result:
        assert result.notes is not None
        result.notes["reference_logprobs"] = self._scored[key]["logprob"]
        result.notes["reference_is_greedy"] = self._scored[key]["is_greedy"]
        return result

    @override
    def describe(self) -> Mapping[str, Any]:
        return {"reference": {"mode": "recorded", **self._records.describe()}}


def known_result(records: Records, key: bytes) -> Result | None:
    """The recorded scores of the request with this key."""
    scored = records.find(key)
    return None if scored is None else Result(tuple(scored["logprob"].tolist()), tuple(scored["is_greedy"].tolist()))


def key_of(request: Request) -> bytes:
    """The key of a request in the reference log-prob cache."""
    return request_key(request.tokens.array, request.num_targets, source_key(request.source) + media_key(request.media))

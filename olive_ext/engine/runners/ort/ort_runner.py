"""Runs a decoder's graph in sessions of ONNX Runtime: once over a text without a past, also returning values of nodes;
or steps, by bindings alone. The scoring head binds a step's row indices, and reads the few numbers that are copied to
the host. Knows graphs and devices, but no requests.

Axes: B rows, S tokens of a row, R logits rows, T targets, K sampled rows, N rows of beams, C candidates, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from typing_extensions import override

from olive_ext.engine.forms.buckets import NOT_CAPTURED, Capture, Captured, run_options
from olive_ext.engine.forms.kv_store import KvPlace, KvStore
from olive_ext.engine.requests import integers
from olive_ext.engine.runners.ort.inputs import Adapters, BoundWeights, Layout
from olive_ext.engine.runners.runner import Runner, Traits
from olive_ext.engine.step import UNLIMITED, Candidates, Capacity, IntArray, LogitsRow, Row, Step, StepOutput
from olive_ext.errors import MemoryShortageError, ModelError, first_line, reading
from olive_ext.graph.edits import with_full_length_kv
from olive_ext.graph.head_pattern import PickedRows
from olive_ext.graph.nodes import ModelProto, weights_of, with_outputs
from olive_ext.graph.scoring_head import BANNED, SCORES_ONLY, HeadOutputs, add_scoring_head
from olive_ext.graph.standalone_graphs import CANDIDATE_OUTPUTS, candidates_graph
from olive_ext.media.encoder import Embedding
from olive_ext.media.source_encoder import SourceEncoder
from olive_ext.model import ResolvedModel
from olive_ext.model.files.constants import graph_nodes
from olive_ext.model.files.content import load_graph, relocated
from olive_ext.model.providers.bindings import InputFeed, is_memory_error, named_failure, run_graph, zeros
from olive_ext.model.providers.compiled import Compiled
from olive_ext.model.providers.devices import Device
from olive_ext.model.providers.ort_session import open_session
from olive_ext.model.spec.role_inputs import input_array
from olive_ext.model.types import DecoderSpec


class PlainGraph:
    """The decoder's file with more outputs and KV caches of full length; products of 4 and 8 bits do not round their
    activations."""

    def __init__(self, model: ResolvedModel, values: Collection[str] | None = None) -> None:
        """`values` are returned beside the graph's own outputs; all nodes' outputs where it is None. Raises
        `ModelError` where the decoder takes more than tokens, or ONNX Runtime does not open the edited graph."""
        refuse_more_than_tokens(model, "which layer it is cannot be found")
        file = model.files.decoder
        proto = with_outputs(with_full_length_kv(load_graph(file)), values)
        for entry in (entry for node in graph_nodes(proto) for entry in node.attribute):
            if entry.name == "accuracy_level":
                entry.i = 0
        self.folder, self.proto = relocated(file, proto)
        self._spec = model.spec
        self._session = open_session(
            self.proto.SerializeToString(),
            model.providers,
            model.settings,
            external_data_folder=self.folder,
            label=str(file),
            level="basic",  # above, ONNX Runtime fuses DequantizeLinear with products, which round what they multiply
        )

    def run(self, tokens: Sequence[int]) -> Mapping[str, npt.NDArray[Any]]:
        """What the graph returns for `tokens`, by name, in the order of the nodes. Raises `ModelError` if it fails."""
        return run_plainly(self._session, plain_inputs(self._spec, tokens))

    def logprobs(self, tokens: Sequence[int], num_ids: int) -> npt.NDArray[np.float64]:
        """As `PlainPass.logprobs`."""
        logits_SV = self.run(tokens)[self._spec.logits.name][0, :-1, :num_ids]
        whole_S: npt.NDArray[np.float64] = np.logaddexp.reduce(logits_SV, 1, np.float64)
        return logits_SV[range(len(tokens) - 1), tokens[1:]] - whole_S


def refuse_more_than_tokens(model: ResolvedModel, finding: str) -> None:
    """Raises `ModelError`, which begins with `finding`, where the decoder is not one graph that takes tokens alone."""
    spec = model.spec
    if spec.embeddings or spec.cross or spec.is_paged or model.files.pipeline:
        raise ModelError(f"{finding}: the decoder takes more than tokens")


def plain_inputs(spec: DecoderSpec, tokens: Sequence[int]) -> dict[str, ort.OrtValue]:
    """All inputs of a decoder that takes `tokens` without a past, by name, in the host's memory."""
    layout = Layout.of(Step((Row(0, 0, tuple(tokens)),)))
    arrays = {entry.tensor.name: input_array(entry, layout) for entry in spec.inputs}
    values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in arrays.items()}
    for cache in spec.caches:
        values[cache.past] = zeros(cache.shape(1, 0), cache.elem_type)
    return values


def run_plainly(session: ort.InferenceSession, inputs: Mapping[str, ort.OrtValue]) -> Mapping[str, npt.NDArray[Any]]:
    """The tensors that a session returns for those of `inputs` that it has, by name. Raises `ModelError` if it fails.

    ONNX Runtime 1.27 makes no tensor for some outputs of nodes that it optimizes away, as in exports by mobius.
    """
    taken = {value.name: inputs[value.name] for value in session.get_inputs()}
    names = [output.name for output in session.get_outputs()]
    try:
        values = run_graph(session, taken, names, Device("cpu"))
    except RuntimeError as error:
        raise ModelError(f"the graph does not run over a whole text: {first_line(error)}") from error
    return {name: value.numpy() for name, value in values.items() if value.has_value() and value.is_tensor()}


def first_non_finite(model: ResolvedModel, tokens: Sequence[int]) -> str | None:
    """A sentence on the first node, in the graph's order, whose output has NaN or +inf where the decoder is fed
    `tokens` without a past, and on its weight if that has them already; None where there is no such node. -inf is
    valid, because masks have it. Raises `ModelError` where the decoder takes more than tokens, or ONNX Runtime does not
    open the edited graph."""
    graph = PlainGraph(model)
    wrong = {name for name, value in graph.run(tokens).items() if _is_wrong(value)}
    for node in graph.proto.graph.node:
        if output := next((name for name in node.output if name in wrong), None):
            finding = f"the first output that is not finite is '{output}' of the node '{node.name}' ({node.op_type})"
            weights = [name for name, values in weights_of(graph.proto, node, graph.folder) if _is_wrong(values)]
            return f"{finding}, whose weight '{weights[0]}' is not finite" if weights else finding
    return None


def _is_wrong(values: npt.NDArray[np.generic]) -> bool:
    return values.dtype.kind == "f" and not bool(np.less(values, np.inf).all())


OUTPUTS = ("target_logprobs", "greedy_ids", "sample_logits")
ROWS_OUTPUT = "score_logits"


def with_head(
    proto: ModelProto, spec: DecoderSpec, outputs: HeadOutputs = SCORES_ONLY
) -> tuple[ModelProto, PickedRows]:
    """The decoder with the scoring head, and the rows that it picks. Raises `ModelError` where it cannot be scored."""
    keeps = "few rows take other kernels, which the rounding of activations would show" if spec.rounds_rows else ""
    with reading(proto.graph.name or "the decoder"):
        return add_scoring_head(proto, spec.logits.name, outputs, keeps_layers=keeps)


@dataclass
class ScoringHead:
    """Computes a step's scores on the device, in the decoder's graph. Rows to sample from stay there unread."""

    open_graph: Callable[[bytes], ort.InferenceSession]
    """Opens the small graph that reads candidates of beams."""

    exposes_rows: bool
    """Whether the logits rows are left on the device."""

    has_bans: bool
    """Whether the graph takes, for each row, the number of its list of tokens that are not allowed."""

    device: Device
    kind: str = "untouched"
    reason: str = "the graph runs as it is; its logits feed a second graph"
    products: Sequence[tuple[int, int]] = ()
    """(inner size, columns) of the products besides the head's that run on scored rows only."""

    _beams_session: ort.InferenceSession | None = None
    """Reads candidates of beams. It is opened when the first beam search needs it."""

    def bind(self, binding: ort.IOBinding, feed: InputFeed, step: Step) -> None:
        """Binds the inputs and outputs that the head adds to the decoder's session, to which `feed` belongs. Row
        indices go in, and scores come out to the host: `score_rows`[R] of B*S, `target_rows`[T] and `sample_rows`[K] of
        R."""
        device, whole_rows = self.device, step.whole_rows
        rows_R, offsets_R, _, bans_R = _columns(step.logits_rows, 4)
        target_rows_T, target_ids_T = _columns(step.targets, 2)
        num_idle = output_rows(step)["sample_logits"] - len(whole_rows)
        indices = {
            "score_rows": step.columns.starts_B[rows_R] + offsets_R,
            "target_rows": target_rows_T,
            "target_ids": target_ids_T,
            "sample_rows": integers([*whole_rows, *[0] * num_idle]),
        }
        if self.has_bans:
            indices["score_bans"] = bans_R if len(bans_R) else integers([0])
        for name, values in indices.items():
            feed.bind(binding, name, values)
        for name in OUTPUTS:
            is_read = name != "sample_logits" or bool(step.samples and not step.beams)
            binding.bind_output(name, *(() if is_read else (device.kind, device.index)))
        if self.exposes_rows:
            binding.bind_output(ROWS_OUTPUT, device.kind, device.index)

    def read(self, outputs: Sequence[ort.OrtValue], step: Step) -> StepOutput:
        """The scores of a step that has run, without those of its padding."""
        logprobs_T, greedy_R, samples_KV = outputs[: len(OUTPUTS)]
        num_sampled = len(step.samples)
        read_T = logprobs_T.numpy()[: len(step.targets)] if step.targets else np.zeros(0, np.float32)
        empty_KV = np.zeros((0, samples_KV.shape()[1]), np.float32)
        sampled_KV = samples_KV.numpy()[:num_sampled] if step.samples else empty_KV
        output = StepOutput(read_T, greedy_R.numpy()[: len(step.logits_rows)], sampled_KV)
        if step.beams:
            rows = range(num_sampled, num_sampled + len(step.beams))
            output = replace(output, candidates=self._candidates(samples_KV, rows, step.num_candidates))
        rest = outputs[len(OUTPUTS) :]
        return replace(output, logits_RV=rest[0]) if rest else output

    def _candidates(self, logits_KV: ort.OrtValue, rows: range, count: int) -> Candidates:
        """The candidates of `rows`: `count` of each, or the whole vocabulary. Tokens that are not allowed have -inf."""
        vocab_size = logits_KV.shape()[1]
        if self._beams_session is None:
            self._beams_session = self.open_graph(candidates_graph(vocab_size))
        numbers = {"first": rows.start, "stop": rows.stop, "count": min(count, vocab_size)}
        inputs = {"logits": logits_KV, **{name: np.array([number], np.int64) for name, number in numbers.items()}}
        logprobs, ids = run_graph(self._beams_session, inputs, CANDIDATE_OUTPUTS, Device("cpu")).values()
        logprobs_NC = logprobs.numpy()
        return Candidates(np.where(logprobs_NC > BANNED / 2, logprobs_NC, np.float32(-np.inf)), ids.numpy())

    def describe(self) -> Mapping[str, Any]:
        """Where the head picks rows, why, and the products that run on scored rows."""
        return {
            "scoring_head": self.kind,
            "scoring_head_reason": self.reason,
            "scored_row_products": [list(sizes) for sizes in self.products],
        }


@dataclass(kw_only=True)
class SeparateHead(ScoringHead):
    """The decoder's graph is unchanged: its `logits` stay on the device and feed a second session."""

    second: InputFeed
    logits: str

    @override
    def bind(self, binding: ort.IOBinding, feed: InputFeed, step: Step) -> None:
        binding.bind_output(self.logits, self.device.kind, self.device.index)

    @override
    def read(self, outputs: Sequence[ort.OrtValue], step: Step) -> StepOutput:
        (logits,) = outputs
        binding = self.second.session.io_binding()
        binding.bind_ortvalue_input("logits", logits)
        super().bind(binding, self.second, step)
        self.second.session.run_with_iobinding(binding)
        return super().read(binding.get_outputs(), step)


def _columns(items: Sequence[tuple[int, ...]], width: int) -> list[IntArray]:
    """The numbers of each place in the items, of which there may be none."""
    return [integers(column) for column in zip(*items, strict=True)] or [integers(())] * width


def output_rows(step: Step) -> dict[str, int]:
    """Rows of each output of the scoring head; none is empty where a step has a `width`, as some providers need."""
    num_samples = max(1, len(step.whole_rows)) if step.width is not None else len(step.whole_rows)
    return dict(zip(OUTPUTS, (len(step.targets), len(step.logits_rows), num_samples), strict=True))


logger = logging.getLogger(__name__)

CAPACITY_STEP = 64
"""Slots grow by multiples of this many positions, so that a slightly longer request does not allocate anew."""

ARENA_SHRINKAGE = "memory.enable_memory_arena_shrinkage"
"""ONNX Runtime's run option that names the arenas to shrink after the run."""


@dataclass(frozen=True)
class OrtParts:
    """What some decoders have besides a session, a cache and a scoring head."""

    compiled: Compiled
    embedding: Embedding | None = None
    encoder: SourceEncoder | None = None
    adapters: Adapters | None = None
    weights: BoundWeights | None = None
    capture: Capture | None = None
    overlaps_steps: bool = False

    def forget(self) -> None:
        """Frees captured steps and the encoders' features."""
        if self.capture is not None:
            self.capture.forget()
        for encoded in (self.embedding, self.encoder):
            if encoded is not None:
                encoded.close()

    def describe(self) -> Mapping[str, Any]:
        """The facts that the parts report."""
        described = [part.describe() for part in (self.encoder, self.embedding, self.capture) if part is not None]
        described.append(self.compiled.describe())
        return {name: value for facts in described for name, value in facts.items()}


class OrtRunner(Runner):
    """A decoder session, its KV store and its scoring head."""

    host_bytes = 0
    _is_closed = False
    open_graph: Callable[[bytes], ort.InferenceSession]

    def __init__(
        self, place: KvPlace, kv: KvStore, head: ScoringHead, facts: Mapping[str, Any], parts: OrtParts
    ) -> None:
        spec, encoder = place.spec, parts.encoder
        length, lengths = spec.context_length, spec.choices.lengths
        traits = Traits(length, kv.form, kv.has_cells, not spec.states, lengths=lengths)
        traits = replace(traits, overlaps_steps=parts.overlaps_steps)
        if encoder is not None or spec.alone:
            traits = replace(traits.one_by_one(), chunked_prefill=not spec.alone)
        super().__init__(traits)
        self.encoder, self.embedding = encoder, parts.embedding
        self.device = place.device
        self.open_graph = place.open_graph
        self._spec = spec
        self._kv = kv
        self._head = head
        self._facts = facts
        self._parts = parts
        self._feed = InputFeed(place.session, place.device)
        self._greedy_ids: IntArray = np.zeros(0, np.int64)
        """The greedy tokens of the step that ran last."""

        self._run_options = run_options(NOT_CAPTURED) if parts.capture is not None else None

    @property
    @override
    def vocab_size(self) -> int:
        return self._spec.vocab_size

    @property
    @override
    def capacity(self) -> Capacity:
        return self._kv.capacity

    def reserve(self, positions: int, cells: int = 0) -> None:
        """Grows slots to `positions`, the shared-prefix cache to `cells`, by a quarter or more; never shrinks them."""
        capacity = self.capacity
        if positions > capacity.positions:
            fixed = next((tensor.capacity for tensor in self._spec.kv if tensor.capacity is not None), None)
            grown = min(_grown(capacity.positions, positions), self.traits.context_length)
            self._reserve_slots(fixed or grown)
        if cells > capacity.cells:
            self._kv.reserve_cells(_grown(capacity.cells, cells))

    @override
    def renew(self, num_slots: int, positions: int) -> bool:
        held = self.capacity.positions
        if has_outgrown := held > 0 and self._kv.has_outgrown(num_slots, positions):
            self._reserve_slots(held)
            self._kv.touched = num_slots, positions
        return has_outgrown

    def run(self, step: Step) -> StepOutput:
        """Raises `RunError` with the step and ONNX Runtime's reason when the device fails."""
        try:
            has_blocks = self.capacity.blocks.number > 0
            if copies := [copy for copy in step.copies if copy.length or has_blocks]:
                self._kv.copy(copies)
            for move in step.moves:
                self._kv.move(move)
            return self._run(step)
        except Exception as error:
            row, many = step.rows[0], len(step.rows)
            what = f"on a step of {many} x {len(row.tokens)} tokens after {row.past} positions"
            raise named_failure(error, what) from error

    def release_memory(self) -> None:
        """Frees slots and shared prefix, captured steps and kept encoder outputs, and shrinks the decoder's arena."""
        self._parts.forget()
        self._kv.release_memory()
        if self.encoder is not None or (arena := self.device.arena) is None:
            return
        self.reserve(1)  # a token in the smallest slots: ONNX Runtime shrinks an arena after a run
        normal, self._run_options = self._run_options, run_options(NOT_CAPTURED)
        self._run_options.add_run_config_entry(ARENA_SHRINKAGE, arena)
        try:
            self.run(Step((Row(0, 0, (0,)),), (LogitsRow(0, 0),)))
        finally:
            self._run_options = normal
        self._kv.release_memory()

    @override
    def describe(self) -> Mapping[str, Any]:
        return {
            **self._facts,
            "num_slots": self.capacity.num_slots,
            **({"slot_positions": most} if (most := self.capacity.most_positions) < UNLIMITED else {}),
            "providers": self._feed.session.get_providers(),
            **super().describe(),
            "row_group": self.traits.row_group,
            **self._kv.describe(),
            **self._head.describe(),
            **self._parts.describe(),
        }

    @override
    def close(self) -> None:
        if not self._is_closed:  # two engines may share the runner
            self._is_closed = True
            self._kv.close()
            self._parts.forget()
            del self._kv, self._head, self._feed, self._parts, self.encoder, self.embedding  # all that holds a session

    def _reserve_slots(self, capacity: int) -> None:
        """Allocates the slots; where there is no memory for them, half as many, or half as many blocks."""
        if self._parts.capture is not None:
            self._parts.capture.forget()
        self._kv.touched = 0, 0
        try:
            self._kv.reserve(capacity)
        except Exception as error:
            if not is_memory_error(error):
                raise
            slots, blocks = self.capacity.num_slots, self.capacity.blocks.number
            if not self._kv.halve():
                raise MemoryShortageError(
                    f"no memory for a KV cache of {capacity} positions ({first_line(error)}): lower 'max_length'"
                ) from error
            what = f"{blocks} blocks of the KV cache" if blocks else f"{slots} KV slots of {capacity} positions"
            logger.warning("no memory for %s, half as many now", what)
            self._reserve_slots(capacity)

    def _run(self, step: Step) -> StepOutput:
        padded, is_captured, capture = step, False, self._parts.capture
        if capture is not None:
            padded, is_captured = capture.prepared(step, self.capacity.num_slots)
        layout = Layout.of(padded, self._kv.pads_in_front, self._greedy_ids)
        binding = self._kv.bind(step.rows)
        if capture is not None and is_captured:
            captured = capture.captured(padded, partial(self._kv.bind_anew, step.rows), output_rows(padded))
            self._bind(captured, captured.feed, layout, padded)
            outputs = capture.run(captured)
        else:
            self._bind(binding, self._feed, layout, padded)
            self._feed.session.run_with_iobinding(binding, self._run_options)
            num_caches = len(self._spec.caches)
            values = binding.get_outputs_as_ortvaluevector()
            if not self._kv.is_in_place:
                self._kv.collect(padded.rows, [ort.OrtValue(values[i]) for i in range(num_caches)])
            outputs = [ort.OrtValue(values[i]) for i in range(num_caches, len(values))]
        output = self._head.read(outputs, step)
        read = output.target_logprobs, output.greedy_ids, output.sample_logits_KV, *output.candidates
        self.host_bytes += sum([array.nbytes for array in read])
        self._greedy_ids = output.greedy_ids
        return output

    def _bind(self, binding: ort.IOBinding | Captured, feed: InputFeed, layout: Layout, step: Step) -> None:
        """Binds every input but the caches, and the outputs of the scoring head."""
        feed.bind_inputs(binding, self._spec.inputs, layout)
        self._kv.bind_masks(partial(feed.bind, binding), step)
        if self.embedding is not None:
            self.embedding.bind(layout, layout.items, binding)
        if self.encoder is not None:
            self.encoder.bind([row.source for row in step.rows], binding)
        for values in (self._parts.adapters, self._parts.weights):
            if values is not None:
                values.bind(binding)
        self._head.bind(binding, feed, step)


def _grown(capacity: int, wanted: int) -> int:
    """The new size: at least `wanted`, and at least a quarter more than the present one, in whole steps. It does not
    grow faster, because with huge pages all of the new memory is filled with zeros."""
    return -(-max(wanted, capacity * 5 // 4) // CAPACITY_STEP) * CAPACITY_STEP

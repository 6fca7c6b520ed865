"""Opens a runner on ONNX Runtime: chooses the form of its steps, rewrites the graph, opens the session, allocates the
slots, and tries what shows on an open session only. Knows no text.

First, where ONNX Runtime runs the nodes of a session and keeps its values, compared with the chosen device. Only nodes
with large values count: values that grow with the text, or are as wide as the vocabulary. A node for which a provider
has no kernel falls to the CPU silently. Its inputs and outputs are then copied between host and device in every step. A
cache that such a node owns lies in the host's memory: device memory that is bound to it is copied once, at binding, so
later steps would read a stale past.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort

from olive_ext.engine.forms.buckets import Capture, NotCapturedError
from olive_ext.engine.forms.kv_store import ONE_BY_ONE, GraphForm, KvPlace, OpenedDecoder, decoder_graph
from olive_ext.engine.forms.packed import PackedCapture
from olive_ext.engine.forms.paged_attention import KERNELS, pack_inputs
from olive_ext.engine.forms.registry import choose
from olive_ext.engine.runners.ort.inputs import Adapters, BoundWeights
from olive_ext.engine.runners.ort.ort_runner import OrtParts, OrtRunner, ScoringHead, SeparateHead, with_head
from olive_ext.engine.runners.runner import NotFittingError, OpenedRunner, PartsDifferError
from olive_ext.engine.runners.trials import affordable, check_steps, fitting_attention, group_rows
from olive_ext.errors import ModelError, ProviderError, listed, reading
from olive_ext.graph.edits import NUM_ROWS, clips_as_max, cross_graph, drop_shape_hints, pad_rows, with_attention_bias
from olive_ext.graph.nodes import ModelProto, attribute, external_locations
from olive_ext.graph.scoring_head import HeadOutputs, scoring_graph
from olive_ext.graph.value_shapes import Shapes
from olive_ext.media.encoder import Embedding, MediaEncoder
from olive_ext.media.graphs import ItemGraphs, ShapeCount
from olive_ext.media.source_encoder import SourceEncoder
from olive_ext.model import ResolvedModel
from olive_ext.model.decisions import choose_encoder_rows, choose_num_slots, shared_positions
from olive_ext.model.files.content import load_graph, relocated
from olive_ext.model.files.package_config import read_suppressed
from olive_ext.model.providers.bindings import InputFeed
from olive_ext.model.providers.compiled import Compiled
from olive_ext.model.providers.devices import Device
from olive_ext.model.providers.ort_session import open_session
from olive_ext.model.providers.table import CPU
from olive_ext.model.spec.decoder_spec import read_embedding
from olive_ext.model.spec.encoder_spec import read_encoder
from olive_ext.model.types import DecoderSpec, MediaEncoderSpec, Role, TensorSpec

SMALL = 64
"""The most elements of a value that is small for any text: lengths, shapes, one position."""

_FLOAT = onnx.TensorProto.FLOAT
_FLOATS: dict[int, str] = {
    _FLOAT: "float32",
    onnx.TensorProto.FLOAT16: "float16",
    onnx.TensorProto.BFLOAT16: "bfloat16",
}
_LENGTHS = frozenset({"ArgMax", "ArgMin", "NonZero", "Shape", "Size"})
"""Operators that return int64, whatever they take."""

_TRUTHS = frozenset({"And", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Not", "Or", "Xor"})


def large_nodes(model: onnx.ModelProto, *, floats_only: bool = False) -> dict[str, str]:
    """Node name -> a description ("GroupQueryAttention '/layers.0/attn' of float32"), for every node with a large
    output. Nodes without a name are left out.

    An output is small where it is known to have at most `SMALL` elements. So is one of integers or truth values with at
    most two axes, besides axes of few elements: token ids, masks and positions come from the host in each step. With
    `floats_only`, integers and truth values are always small: an encoder's, which runs once for a picture.
    """
    shapes, types = Shapes(model.graph), _types(model.graph)
    described = {}
    for node in model.graph.node:
        values = [value for value in node.output if value]
        if floats_only:
            values = [value for value in values if types.get(value, _FLOAT) in _FLOATS]
        if node.name and any(_is_large(shapes.of.get(value), types.get(value)) for value in values):
            dtype = next((_FLOATS[types[value]] for value in node.input if types.get(value) in _FLOATS), None)
            described[node.name] = f"{node.op_type} '{node.name}'" + (f" of {dtype}" if dtype else "")
    return described


def _is_large(shape: tuple[int | str | None, ...] | None, elem_type: int | None) -> bool:
    if shape is None:
        return True
    sizes = [axis for axis in shape if isinstance(axis, int)]
    if elem_type is not None and elem_type not in _FLOATS and len(shape) - len(sizes) <= 2:
        return len(shape) > 2 and math.prod(sizes) > SMALL
    return len(sizes) < len(shape) or math.prod(sizes) > SMALL


def _types(graph: onnx.GraphProto) -> dict[str, int]:
    """ONNX element types of values, as far as inputs, weights, annotations and operators determine them."""
    types = {tensor.name: int(tensor.data_type) for tensor in graph.initializer}
    types |= {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.value_info)}
    for node in graph.node:
        elem_type = _type_of(node, types)
        if elem_type is not None:
            types |= {value: elem_type for value in node.output if value not in types}
    return types


def _type_of(node: onnx.NodeProto, types: dict[str, int]) -> int | None:
    """The type of the first output; None where it is not known."""
    if node.op_type == "Cast":
        return int(attribute(node, "to", _FLOAT))
    if node.op_type in _LENGTHS:
        return int(onnx.TensorProto.INT64)
    if node.op_type in _TRUTHS:
        return int(onnx.TensorProto.BOOL)
    if node.op_type in ("Constant", "ConstantOfShape"):
        value = attribute(node, "value", None)
        return int(value.data_type) if value is not None else None
    first = 1 if node.op_type == "Where" else 0
    return next((types[value] for value in node.input[first:] if value in types), None)


_CUDA_FLOATS = frozenset({"float16", "bfloat16"})
_KERNELS: Mapping[tuple[str, str], tuple[frozenset[str], str]] = {
    ("cuda", "GroupQueryAttention"): (_CUDA_FLOATS, "CUDA's GroupQueryAttention takes float16 and bfloat16"),
    ("webgpu", "Attention"): (
        frozenset(),
        "WebGPU has no Attention of opset 23 and later: export with GroupQueryAttention",
    ),
    **{
        (device, "PagedAttention"): (
            frozenset(kernel.floats),
            f"{kernel.provider}'s PagedAttention takes {' and '.join(kernel.floats)}",
        )
        for device, kernel in KERNELS.items()
    },
}
"""By device and operator, the types that the provider has kernels for, as numbers and as words (ONNX Runtime 1.31.1,
docs/OperatorKernels.md)."""

_HEAVY = frozenset({"Conv", "EPContext", "FusedMatMul", "Gemm", "MatMul", "MatMulBnb4", "MatMulInteger", "MatMulNBits"})
"""Where a model's arithmetic runs, and what a provider has compiled."""


class MisplacedError(ProviderError):
    """A session would partly run on another device than the chosen one."""


def misplaced(
    session: ort.InferenceSession,
    model: ModelProto,
    device: str,
    caches: Iterable[str] = (),
    *,
    floats_only: bool = False,
) -> str | None:
    """What `session`, opened on `model`, runs or keeps on another device than `device` (ONNX Runtime's name); None
    where all is well. `caches` are names of inputs and outputs that must lie on the device.

    A graph may leave arithmetic on lengths to the CPU, and with `floats_only` all arithmetic on integers; nodes with
    large values must not run there.
    """
    if device == "cpu":
        return None
    large = large_nodes(model, floats_only=floats_only)
    on_cpu = [large[node.name] for name, node in _assigned(session) if name == CPU and node.name in large]
    on_host = _on_host(session, caches)
    parts = []
    if on_cpu:
        parts.append(f"ONNX Runtime would run {listed(on_cpu, 3)} on the CPU")
    if on_host:
        parts.append(f"{listed(on_host, 3)} would lie in the host's memory")
    return "; ".join([*parts, *_hints(device, on_cpu)]) if parts else None


def untaken(session: ort.InferenceSession, provider: str) -> str | None:
    """The sentence that `provider` runs none of the session's products. None where it runs some, or a part that it has
    compiled, where there are no products, or where that is not recorded."""
    names = {name for name, node in _assigned(session) if node.op_type in _HEAVY}
    if not names or provider in names:
        return None
    return f"{provider} takes none of its products, which {' and '.join(sorted(names))} would run"


def predict_misplaced(model: ModelProto, device: str) -> str | None:
    """The same without a session, as far as the types of attention nodes predict it; None where they do not."""
    words = [
        node
        for node in large_nodes(model).values()
        if (kernel := _KERNELS.get((device, _operator(node)))) and node.rpartition(" of ")[2] not in kernel[0]
    ]
    if not words:
        return None
    return "; ".join([f"{listed(words, 3)} would run on the CPU", *_hints(device, words)])


def _operator(words: str) -> str:
    return words.partition(" ")[0]


def _hints(device: str, words: Iterable[str]) -> list[str]:
    operators = dict.fromkeys(map(_operator, words))
    return [_KERNELS[device, operator][1] for operator in operators if (device, operator) in _KERNELS]


def _assigned(session: ort.InferenceSession) -> Iterator[tuple[str, Any]]:
    """Every node that runs, with its provider's name; releases before 1.24 keep no record."""
    for part in getattr(session, "get_provider_graph_assignment_info", list)():
        yield from ((part.ep_name, node) for node in part.get_nodes())


def _on_host(session: ort.InferenceSession, names: Iterable[str]) -> list[str]:
    if not hasattr(session, "get_input_memory_infos"):  # releases before 1.24
        return []
    infos = [*session.get_input_memory_infos(), *session.get_output_memory_infos()]
    values, wanted = zip([*session.get_inputs(), *session.get_outputs()], infos, strict=True), set(names)
    return [value.name for value, info in values if value.name in wanted and info.name == "Cpu"]


logger = logging.getLogger(__name__)


def open_ort_runner(model: ResolvedModel, weights: Mapping[Path, BoundWeights] | None = None) -> OpenedRunner:
    """A runner of the model's graphs in sessions of ONNX Runtime. Raises `ModelError` for a graph that cannot be scored
    or run, and `ProviderError` where a provider does not come up or has no kernel for nodes with large values.
    `weights` are bound to the runs of the graphs in these files."""
    if weights:  # a captured step reads the same ones ever after
        model = _plain(model)
    with reading(model.files.decoder):
        return _open(Sessions(model, Compiled(model.settings.engine), weights or {}))


def _open(sessions: Sessions) -> OpenedRunner:
    """Opens the decoder in one form after the other, until one holds what it promises."""
    problems: dict[str, str] = {}
    not_captured = ""
    while True:
        model = sessions.model
        form, decision = choose(model, problems)
        notes = [f"{ONE_BY_ONE}: {problem}" for problem in problems.values()]
        if not notes and decision.reason.startswith(ONE_BY_ONE):
            notes = [decision.reason]
        if not_captured:
            notes.append(f"steps are not captured: {not_captured}")
        try:
            return _open_in(form, sessions, tuple(notes))
        except NotFittingError as error:
            logger.warning("%s: %s", ONE_BY_ONE, error)
            problems[form.name] = str(error)
            not_captured = "" if not_captured in str(error) else not_captured
        except PartsDifferError as error:
            logger.warning("each request is fed whole and alone: %s", error)
            sessions = replace(sessions, model=replace(model, parts_failure=str(error)))
        except NotCapturedError as error:
            logger.warning("steps are not captured: %s", error)
            sessions, not_captured = replace(sessions, model=_plain(model)), str(error)
        except MisplacedError as error:
            if not model.settings.allow_cpu_fallback or model.providers[-1].device != "cpu":
                raise ProviderError(f"{error}; 'allow_cpu_fallback' would run the whole model on the CPU") from error
            logger.warning("%s; running the whole model on the CPU", error)
            sessions = replace(sessions, model=replace(model, session_providers=model.providers[-1:]))
            problems, not_captured = {}, ""


def _plain(model: ResolvedModel) -> ResolvedModel:
    """The model without captured steps, where nobody demands these."""
    engine = model.settings.engine
    is_tried = engine.graph_capture == "auto"
    return model.patched({"engine": engine.model_copy(update={"graph_capture": False})}) if is_tried else model


def _open_in(form: GraphForm, sessions: Sessions, notes: tuple[str, ...]) -> OpenedRunner:
    """The decoder in this form. Raises what `_open` goes on from: another form, or another opening."""
    model = sessions.model
    adapters = Adapters(model.settings.engine.adapters)
    original, spec = decoder_graph(model, notes)
    is_doubted = bool(spec.alone) and spec.alone == spec.choices.leak
    if is_doubted:  # by its graph, which does not say how far its numbers are off: the trial does
        spec = replace(spec, alone="")
    proto, spec = form.rewrite(original, spec)
    is_rewritten = proto is not original
    del original  # inline weights would stay in memory twice
    try:
        session, head = sessions.decoder(proto, spec)
    except (ModelError, ProviderError) as error:
        if model.capture(spec).is_tried:
            raise NotCapturedError(str(error)) from error
        if is_rewritten:  # a release may lack what the form's operators take; what else is wrong, the next form meets
            raise NotFittingError(f"ONNX Runtime {ort.__version__} refuses the rewritten graph: {error}") from error
        raise
    del proto
    if sessions.device(session).kind != model.device.kind:
        if model.capture(spec).is_tried:
            raise NotCapturedError("ONNX Runtime falls back to the CPU")
        raise MisplacedError("ONNX Runtime falls back to the CPU")
    adapters.attach(session, sessions.device(session))
    decoder = _decoder(form, sessions, (session, head, spec), adapters)
    try:
        form.trial(decoder)
        group_rows(decoder.runner, spec, model.device, decoder.chunk_size, decoder.notes)
        form.finish(decoder)
        if not model.parts_failure:
            is_open = model.device.kind == "cpu" and model.settings.engine.chunk_size == "auto"
            is_limited = not is_open or decoder.chunk_size < model.chunk_size[0] or model.buckets.steps != "none"
            longest = decoder.chunk_size if is_limited else spec.context_length
            most = affordable(model.size)
            numbers, is_scaled = spec.choices.numbers, spec.alone != ""
            if problem := check_steps(decoder.runner, spec.num_ids, longest, numbers, most, is_step_scaled=is_scaled):
                raise PartsDifferError(problem)
        if is_doubted:
            decoder.runner.traits = replace(decoder.runner.traits.one_by_one(), row_group=1)
    except (NotFittingError, NotCapturedError, PartsDifferError, ProviderError):
        decoder.runner.close()
        raise
    return OpenedRunner(decoder.runner, decoder.chunk_size)


def _decoder(
    form: GraphForm,
    sessions: Sessions,
    opened: tuple[ort.InferenceSession, ScoringHead, DecoderSpec],
    adapters: Adapters,
) -> OpenedDecoder:
    """The runner of an open session, before it is tried, with steps that the device attends to rightly. Raises
    `ProviderError` where these are too short for a model that takes its input whole."""
    (session, head, spec), model = opened, sessions.model
    device = sessions.device(session)
    num_slots, origin = choose_num_slots(model.settings, spec, device)
    place = KvPlace(session, spec, num_slots, device, sessions.helper, shared_positions(model.settings, spec, device))
    store = form.allocate(place)
    chunk_size = model.chunk_size[0]
    longest = spec.context_length if model.spec.alone else chunk_size
    fitting, cut = fitting_attention(longest, model.device, spec, sessions.helper)
    if cut and (spec.cross or model.spec.alone):
        raise ProviderError(f"{cut[0]}, and this model takes its input whole: use another provider")
    notes = [*spec.notes, *cut]
    if reason := model.capture(spec).reason:
        notes.append(f"steps are not captured: {reason}")
    captured_by = PackedCapture if spec.is_paged else Capture
    facts = {
        "model": str(model.files.decoder),
        "runtime": model.runtime.name,
        "runtime_origin": model.runtime_reason,
        **dict(zip(("overlaps_steps", "overlaps_steps_reason"), model.overlaps_steps, strict=True)),
        "num_slots_origin": origin,
        "notes": notes,
        **({"parts_failure": model.parts_failure} if model.parts_failure else {}),
        **adapters.describe(),
    }
    parts = OrtParts(
        compiled=sessions.compiled,
        embedding=sessions.embedding(spec, device) if spec.embeddings else None,
        encoder=sessions.encoder(spec, device, num_slots) if spec.cross else None,
        adapters=adapters,
        weights=sessions.weights.get(model.files.decoder),
        capture=captured_by(session, device) if model.capture(spec).is_captured else None,
        overlaps_steps=model.overlaps_steps[0] and (spec.is_paged or model.buckets.steps == "none"),
    )
    return OpenedDecoder(spec, OrtRunner(place, store, head, facts, parts), min(chunk_size, fitting), notes)


_STOPS_SPINNING = {"session.force_spinning_stop": "1"}
"""For a model of several graphs, or beside another model: each session has threads of its own, and those that spin
after a run take the processors of the next session's. By hand, on a busy machine of 2 cores, the tiny Whisper heard
1.3 to 1.7 times as fast in first runs, 2.6 to 4.8 times in later ones; two resident models of 135M parameters took 1.35
times the processor's seconds of both alone, and 1.04 times without (40 documents of each quickstart task)."""


@dataclass(frozen=True)
class Sessions:
    """Opens the graphs of one engine: the decoder and its small helpers, on the same providers."""

    model: ResolvedModel
    compiled: Compiled
    """What providers compile of the graphs that are opened."""

    weights: Mapping[Path, BoundWeights] = field(default_factory=dict)
    """By the files of graphs (decoder, embedding, encoders of pictures and sound) the weights that their runs bind."""

    def decoder(self, proto: ModelProto, spec: DecoderSpec) -> tuple[ort.InferenceSession, ScoringHead]:
        """The decoder's session and the scoring head, which has a graph of its own where the decoder's is untouched."""
        if not spec.is_kv_in_place:
            drop_shape_hints(proto.graph)
        exposes_rows = self.model.is_compared
        bans = read_suppressed(self.model.files).bans if spec.cross else ()
        outputs = HeadOutputs(exposes_rows, bans=bans)
        logits, caches = spec.logits, [name for tensor in spec.caches for name in (tensor.past, tensor.present)]
        facts = self.helper, exposes_rows, bool(bans)
        if self.model.settings.engine.graph == "untouched":
            session = self._opened(proto, self.model.files.decoder, caches=caches)
            graph = scoring_graph(logits.elem_type, spec.vocab_size, len(logits.shape), outputs)
            device = self.device(session)
            second = InputFeed(self.helper(graph.SerializeToString()), device)
            return session, SeparateHead(*facts, device, second=second, logits=logits.name)
        is_captured = self.model.capture(spec).is_captured
        scored, rows = with_head(proto, spec, replace(outputs, has_rows=is_captured))
        session = self._opened(scored, self.model.files.decoder, caches=caches, is_captured=is_captured)
        return session, ScoringHead(*facts, self.device(session), rows.kind, rows.reason, rows.products)

    def _opened(self, proto: ModelProto, file: Path, *, multiplies: bool = True, **how: Any) -> ort.InferenceSession:
        """As `_from_memory`, with the weights of `file` that are bound as inputs. Raises `MisplacedError` where the
        first provider, whose numbers are asked for, runs no product of a graph that `multiplies`, too: QNN's takes none
        of a decoder in float32, and says nothing."""
        weights = self.weights.get(file)
        if weights is not None:
            weights.edit(proto)  # last: what rewrites a graph looks at constants
        session = self._from_memory(proto, file, **how)
        if weights is not None:
            weights.attach(self.device(session))
        if multiplies and (problem := untaken(session, self.model.providers[0].name)):
            raise MisplacedError(f"'{file}': {problem}")
        return session

    def embedding(self, spec: DecoderSpec, device: Device) -> Embedding:
        """The graph that embeds tokens, with the encoders of pictures and sound; `device` is the decoder's."""
        companion = self.model.files.companions.get("embedding")
        if companion is None:
            raise ModelError(
                f"no genai_config.json names the graph of '{spec.embeddings[0]}' (model.embedding.filename)"
            )
        file, proto = companion.graph, load_graph(companion.graph)
        clips_as_max(proto.graph)
        read = read_embedding(proto, spec.embeddings)
        if spec.is_paged:
            inputs = [replace(entry, tensor=replace(entry.tensor, shape=("N",))) for entry in read.inputs]
            pack_inputs(proto.graph, [entry.tensor.name for entry in inputs])
            read = replace(read, inputs=tuple(inputs))
        encoders = self.model.media.encoders if self.model.media is not None else ()
        graphs = self._item_graphs(device)
        opened = [self._media_encoder(encoder, graphs) for encoder in encoders]
        return Embedding(self._opened(proto, file, multiplies=False), read, opened, graphs, self._bind_weights(file))

    def _item_graphs(self, device: Device) -> ItemGraphs:
        count = ShapeCount(is_strict=self.model.settings.engine.strict_shapes)
        return ItemGraphs(device, self.helper, count, self.model.warms_encoders)

    def _media_encoder(self, spec: MediaEncoderSpec, graphs: ItemGraphs) -> MediaEncoder:
        """An encoder of pictures or sound, which may have providers of its own; `graphs` are the embedding's."""
        opener, providers = self, self.model.providers_of(spec)
        if providers != self.model.providers:
            opener = replace(self, model=replace(self.model, session_providers=providers))
            graphs = replace(graphs, device=opener.model.device, open_graph=opener.helper)
        open_session, max_rows = partial(opener.media, spec), choose_encoder_rows(self.model.settings, graphs.device)
        if graphs.is_bucketed and spec.has_own_rows:
            spec = replace(spec, real_rows=TensorSpec(NUM_ROWS, 7, (1,)))
        return MediaEncoder(spec, open_session, graphs, max_rows, self._bind_weights(spec.files.graph))

    def _bind_weights(self, file: Path) -> Callable[[ort.IOBinding], None]:
        return self.weights.get(file, BoundWeights({})).bind

    def media(self, spec: MediaEncoderSpec) -> ort.InferenceSession:
        """The session of an encoder. Raises `ProviderError` where its provider cannot run it, or not all of it."""
        try:
            proto = load_graph(spec.files.graph)
            if self.model.warms_encoders and spec.has_own_rows:
                pad_rows(proto, spec.inputs[0].name, [output.name for output in spec.outputs])
            return self._opened(proto, spec.files.graph, floats_only=True)
        except ProviderError as error:
            raise ProviderError(f"{error}; 'engine.encoder_provider' = 'cpu' would run the encoder there") from error

    def encoder(self, spec: DecoderSpec, device: Device, num_kept: int) -> SourceEncoder:
        """The encoder of an encoder-decoder, which keeps what its last `num_kept` sources gave."""
        companion = self.model.files.companions.get("encoder")
        if companion is None:
            raise ModelError(
                f"'{self.model.files.decoder}' takes '{min(spec.cross.names)}' of an encoder, and none was found: "
                "neither a genai_config.json names it (model.encoder.filename), nor is 'encoder_model.onnx' beside the "
                "decoder"
            )
        proto = with_attention_bias(load_graph(companion.graph))
        file, first_step = self._first_step(spec)
        encoder = read_encoder(proto, spec.cross, self.model.files.genai_config.get("model", {}), first_step)
        cross = self._from_memory(first_step, file) if encoder.first_step and first_step is not None else None
        session = self._opened(proto, companion.graph)
        return SourceEncoder(session, cross, encoder, self._item_graphs(device), num_kept)

    def _first_step(self, spec: DecoderSpec) -> tuple[Path, ModelProto | None]:
        """The file of the decoder that returns cross-attention KV, and what computes them, cut out of it."""
        companion = self.model.files.companions.get("first_step")
        file = companion.graph if companion else self.model.files.decoder
        if companion is None and not any(entry.role is Role.USE_CACHE_BRANCH for entry in spec.inputs):
            return file, None
        return file, cross_graph(load_graph(file), spec.cross.kv)

    def helper(self, graph: bytes) -> ort.InferenceSession:
        """A session for a graph without weights."""
        return self._open(graph, self.model.files.decoder)

    def device(self, session: ort.InferenceSession) -> Device:
        """The device where the first provider that the session really uses keeps its values."""
        used = session.get_providers()
        return next(provider.location for provider in self.model.providers if provider.name in used)

    def _from_memory(
        self,
        proto: ModelProto,
        file: Path,
        *,
        caches: Sequence[str] = (),
        is_captured: bool = False,
        floats_only: bool = False,
    ) -> ort.InferenceSession:
        """Opens `proto` from memory; its external weights stay in the folder of `file`, symbolic links followed. Raises
        `MisplacedError` where nodes with large values (`floats_only`: with floats), or inputs and outputs named in
        `caches`, would not be on the device."""
        folder, proto = relocated(file, proto)
        weights = [folder / name for name in sorted(external_locations(proto))]
        places = {"external_data_folder": folder, "weights": weights}
        session = self._open(proto.SerializeToString(), file, is_captured=is_captured, **places)
        device = self.device(session).kind
        if problem := misplaced(session, proto, device, caches, floats_only=floats_only):
            raise MisplacedError(f"'{file}' cannot run on the {device} device alone: {problem}")
        return session

    def _open(self, graph: bytes, file: Path, *, is_captured: bool = False, **places: Any) -> ort.InferenceSession:
        providers = self.model.providers
        if is_captured and (option := providers[0].capture_option):
            first = replace(providers[0], options={**providers[0].options, option: "1"})
            providers = (first, *providers[1:])
        places.update(custom_operators=self.model.custom_operators, compiled=self.compiled)
        settings, engine = self.model.settings, self.model.settings.engine
        if self.model.files.companions or self.model.is_compared:
            options = {**_STOPS_SPINNING, **engine.session_options}
            settings = settings.model_copy(update={"engine": engine.model_copy(update={"session_options": options})})
        return open_session(graph, providers, settings, label=str(file), **places)

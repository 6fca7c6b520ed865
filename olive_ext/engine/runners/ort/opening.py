"""Opens a runner on ONNX Runtime: reads the graph, puts the head in, opens the session, allocates the slots.

Takes the decisions of the resolved model; tries out what shows on an open session only. Knows no text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime as ort

from olive_ext.engine.runners.ort.capture import Capture
from olive_ext.engine.runners.ort.companion_inputs import Adapters, Embedding, Encoder
from olive_ext.engine.runners.ort.head import Head, SeparateHead, with_head
from olive_ext.engine.runners.ort.kv.in_place import ViewKv
from olive_ext.engine.runners.ort.kv.kv_store import Device, KvPlace, KvStore
from olive_ext.engine.runners.ort.kv.paged import PagedKv
from olive_ext.engine.runners.ort.kv.returned import ReturnedKv
from olive_ext.engine.runners.ort.kv.staged import StagedKv
from olive_ext.engine.runners.ort.media_encoder import MediaEncoder
from olive_ext.engine.runners.ort.ort_runner import OrtParts, OrtRunner, SharedPrefixKv
from olive_ext.engine.runners.ort.placement import MisplacedError, misplaced
from olive_ext.engine.runners.runner import OpenedRunner
from olive_ext.engine.runners.trials import check_tree_batches, fitting_attention, fitting_chunk_size, with_buckets
from olive_ext.errors import ModelError, ProviderError
from olive_ext.graph.attention_rewrites import cross_graph, with_attention_bias, with_full_length_kv
from olive_ext.graph.nodes import drop_shape_hints
from olive_ext.graph.onnx_file import ModelProto, external_locations, load_graph, relocate
from olive_ext.graph.scoring_head import HeadOutputs, TokenForm, check_scoring, scoring_graph
from olive_ext.graph.tree_attention import NoTreeAttentionError, TreeAttentionGraph, with_tree_attention
from olive_ext.model import ResolvedModel, external_data_plan, open_session
from olive_ext.model.decisions import ONE_BY_ONE, choose_chunk_size, choose_num_slots, suggest_genai
from olive_ext.model.decoder_spec import read_embedding
from olive_ext.model.encoder_spec import read_encoder
from olive_ext.model.media_types import MediaEncoderSpec
from olive_ext.model.types import DecoderSpec, EmbeddingSpec, InputSpec, Provider, Role, TensorSpec

logger = logging.getLogger(__name__)


def open_ort_runner(model: ResolvedModel, profile_prefix: Path | None = None) -> OpenedRunner:
    """A runner of the model's graphs in sessions of ONNX Runtime.

    Raises `ModelError` for a graph that cannot be scored or run, and `ProviderError` for a provider that does not come
    up or has no kernel for nodes with large values. `profile_prefix` makes ONNX Runtime write a profile.
    """
    try:
        return _open(_Opener(model, profile_prefix))
    except MisplacedError as error:
        host = model.providers[-1:]
        if not model.settings.allow_cpu_fallback or host[0].device != "cpu":
            raise ProviderError(f"{error}; 'allow_cpu_fallback' would run the whole model on the CPU") from error
        logger.warning("%s; running the whole model on the CPU", error)
        return _open(_Opener(replace(model, came_up=host), profile_prefix))


def _open(opener: _Opener) -> OpenedRunner:
    model = opener.model
    adapters = Adapters(model.settings.engine.adapters)
    spec = replace(model.spec, notes=model.notes)
    proto = load_graph(model.files.decoder)
    try:
        check_scoring(proto, spec.logits.name)
    except ModelError as error:
        raise suggest_genai(error, model.files) from error
    proto, spec, tree = opener.tree_attention(with_full_length_kv(proto), spec)
    session, head = opener.decoder(proto, spec)
    if opener.device(session).kind != model.device.kind:  # it fell back to the CPU: all is chosen anew
        return _open(replace(opener, model=replace(model, came_up=model.providers[-1:])))
    del proto  # inline weights would stay in memory twice
    adapters.attach(session, opener.device(session))
    return _runner(opener, session, head, spec, adapters, tree)


def _runner(
    opener: _Opener,
    session: ort.InferenceSession,
    head: Head,
    spec: DecoderSpec,
    adapters: Adapters,
    tree: TreeAttentionGraph | None,
) -> OpenedRunner:
    """The runner of an opened decoder, and the longest step that trials leave it."""
    model, device = opener.model, opener.device(session)
    config = model.settings.engine
    num_slots, origin = choose_num_slots(model.settings, spec, device)
    place = KvPlace(session, spec, num_slots, device, opener.helper)
    kv = _kv_form(spec, device)(place)
    chunk_size, notes = fitting_attention(choose_chunk_size(config)[0], device, spec, opener.helper)
    if notes and spec.cross:
        raise ProviderError(f"{notes[0]}, and an encoder takes its input whole: use another provider")
    notes = [*spec.notes, *notes]
    facts = {
        "model": str(model.files.decoder),
        **dict(zip(("runtime", "runtime_origin"), model.runtime, strict=True)),
        "num_slots": num_slots,
        "num_slots_origin": origin,
        **dict(zip(("decode_ahead", "decode_ahead_reason"), model.overlap, strict=True)),
        "notes": notes,
        **adapters.describe(),
    }
    parts = OrtParts(
        embedding=opener.embedding(spec, device) if spec.embeddings else None,
        encoder=opener.encoder(spec, device, num_slots) if spec.cross else None,
        adapters=adapters,
        shared_prefix=SharedPrefixKv(ViewKv(replace(place, num_slots=1)), tree.biases) if tree else None,
        capture=Capture(session, device) if model.buckets.is_captured else None,
    )
    runner = OrtRunner(place, kv, head, facts, parts)
    if isinstance(kv, ReturnedKv) and parts.encoder is None:
        chunk_size = fitting_chunk_size(chunk_size, runner, notes)
    if tree and (problem := check_tree_batches(runner, spec.vocab_size)):
        runner.traits = replace(runner.traits, tree_batches=False)
        notes.append(f"{ONE_BY_ONE}: {problem}")
    return OpenedRunner(with_buckets(runner, spec.vocab_size, chunk_size, model.buckets, notes), chunk_size)


def _kv_form(spec: DecoderSpec, device: Device) -> Callable[[KvPlace], KvStore]:
    if spec.is_paged:
        return PagedKv
    if not spec.is_kv_in_place:
        return ReturnedKv
    return ViewKv if device.has_pointers else StagedKv


def _cache_names(spec: DecoderSpec) -> list[str]:
    """Inputs and outputs that carry what is resident."""
    return [name for tensor in spec.caches for name in (tensor.past, tensor.present)]


def _capturing(providers: tuple[Provider, ...]) -> tuple[Provider, ...]:
    """The first one with the option that has runs captured."""
    first, *others = providers
    assert first.capture_option is not None
    return replace(first, options={**first.options, first.capture_option: "1"}), *others


@dataclass(frozen=True)
class _Opener:
    """Opens the graphs of one engine: the decoder and its small helpers, on the same providers."""

    model: ResolvedModel
    profile_prefix: Path | None

    def tree_attention(
        self, proto: ModelProto, spec: DecoderSpec
    ) -> tuple[ModelProto, DecoderSpec, TreeAttentionGraph | None]:
        """The graph with inputs for tree batches, the spec with them, and what they are; None where the model has no
        use for them, with a note where it is the graph that cannot take them."""
        if self.model.scoring.value == "rows":
            return proto, spec, None
        has_positions = any(found.role is Role.POSITION_IDS for found in spec.inputs)
        try:
            graph = with_tree_attention(proto, [tensor.past for tensor in spec.kv], has_positions)
        except NoTreeAttentionError as error:
            return proto, replace(spec, notes=(*spec.notes, f"{ONE_BY_ONE}: {error}")), None
        if graph.positions is not None:
            positions = InputSpec(Role.POSITION_IDS, TensorSpec(graph.positions, 7, ("B", "S")))
            spec = replace(spec, inputs=(*spec.inputs, positions))
        return graph.model, spec, graph

    def decoder(self, proto: ModelProto, spec: DecoderSpec) -> tuple[ort.InferenceSession, Head]:
        if not spec.is_kv_in_place:
            drop_shape_hints(proto.graph)
        exposes_rows, (async_decode, _) = self.model.is_compared, self.model.overlap
        outputs = HeadOutputs(exposes_rows, tokens=self._token_form(spec) if async_decode else None)
        logits = spec.logits
        if self.model.settings.engine.graph == "untouched":
            session = self._from_memory(proto, self.model.files.decoder, caches=_cache_names(spec))
            place, rank = self.device(session), len(logits.shape)
            graph = scoring_graph(logits.elem_type, spec.vocab_size, rank, outputs)
            head = self.helper(graph.SerializeToString())
            asked = {"exposes_rows": exposes_rows, "async_decode": async_decode}
            return session, SeparateHead(head, logits.name, place, **asked)
        is_captured = self.model.buckets.is_captured
        scoring = with_head(proto, spec, replace(outputs, has_rows=is_captured))
        caches = _cache_names(spec)
        session = self._from_memory(scoring.model, self.model.files.decoder, caches=caches, is_captured=is_captured)
        place = self.device(session)
        exposed, kept = (place if exposes_rows else None), (place if async_decode else None)
        return session, Head(scoring.kind, scoring.reason, exposed, kept, scoring.late_products)

    def _token_form(self, spec: DecoderSpec) -> TokenForm:
        """How token ids are taken, by the decoder or by the graph that embeds them."""
        inputs = self._embedding_graph(spec)[2].inputs if spec.embeddings else spec.inputs
        tensor = next(found.tensor for found in inputs if found.role is Role.INPUT_IDS)
        return TokenForm(tensor.elem_type, len(tensor.shape))

    def embedding(self, spec: DecoderSpec, device: Device) -> Embedding:
        proto, file, read = self._embedding_graph(spec)
        encoders = self.model.media.encoders if self.model.media is not None else ()
        opened = [MediaEncoder(found, device, partial(self._media, found), self.helper) for found in encoders]
        return Embedding(self._from_memory(proto, file), read, device, opened)

    def _media(self, spec: MediaEncoderSpec) -> ort.InferenceSession:
        return self._from_memory(load_graph(spec.files.graph), spec.files.graph)

    def _embedding_graph(self, spec: DecoderSpec) -> tuple[ModelProto, Path, EmbeddingSpec]:
        companion = self.model.files.companions.get("embedding")
        if companion is None:
            raise ModelError(
                f"'{self.model.files.decoder}' takes '{spec.embeddings[0]}' instead of token ids, and no "
                "genai_config.json names the graph that computes it (model.embedding.filename)"
            )
        proto = load_graph(companion.graph)
        return proto, companion.graph, read_embedding(proto, spec.embeddings)

    def encoder(self, spec: DecoderSpec, device: Device, num_kept: int) -> Encoder:
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
        return Encoder(self._from_memory(proto, companion.graph), cross, encoder, device, num_kept)

    def _first_step(self, spec: DecoderSpec) -> tuple[Path, ModelProto | None]:
        """The file of the decoder that returns cross-attention KV, and what computes them, cut out of it."""
        companion = self.model.files.companions.get("first_step")
        file = companion.graph if companion else self.model.files.decoder
        if companion is None and not any(found.role is Role.USE_CACHE_BRANCH for found in spec.inputs):
            return file, None
        return file, cross_graph(load_graph(file), spec.cross.kv)

    def helper(self, graph: bytes) -> ort.InferenceSession:
        """A session for a graph without weights."""
        return self._open(graph, self.model.files.decoder)

    def device(self, session: ort.InferenceSession) -> Device:
        """The device where the first provider that the session really uses keeps its values."""
        used = session.get_providers()
        return next(provider.place for provider in self.model.providers if provider.name in used)

    def _from_memory(
        self, proto: ModelProto, file: Path, *, caches: Sequence[str] = (), is_captured: bool = False
    ) -> ort.InferenceSession:
        """Opens `proto` from memory; its external weights stay in the folder of `file`, symbolic links followed.

        Raises `MisplacedError` where nodes with large values, or inputs and outputs named in `caches`, would not be on
        the device.
        """
        folder, renames = external_data_plan(file, external_locations(proto))
        serialized = relocate(proto, renames).SerializeToString()
        places = {"external_data_folder": folder, "profile_prefix": self.profile_prefix}
        session = self._open(serialized, file, is_captured=is_captured, **places)
        device = self.device(session).kind
        if problem := misplaced(session, proto, device, caches):
            raise MisplacedError(f"'{file}' cannot run on the {device} device alone: {problem}")
        return session

    def _open(self, graph: bytes, file: Path, *, is_captured: bool = False, **places: Any) -> ort.InferenceSession:
        providers = _capturing(self.model.providers) if is_captured else self.model.providers
        places["custom_operators"] = self.model.custom_operators
        return open_session(graph, providers, self.model.settings, label=str(file), **places)

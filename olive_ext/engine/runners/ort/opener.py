"""Opens the graphs of one engine: the decoder with its head, and its small helpers, on the same providers. Knows no
slots.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime as ort

from olive_ext.engine.runners.ort.companion_inputs import Encoder
from olive_ext.engine.runners.ort.counted_session import ShapeCount
from olive_ext.engine.runners.ort.embedding import Embedding
from olive_ext.engine.runners.ort.encoder_batches import EncoderBatches
from olive_ext.engine.runners.ort.encoder_shapes import EncoderShapes
from olive_ext.engine.runners.ort.head import Head, SeparateHead, with_head
from olive_ext.engine.runners.ort.kv.kv_store import Device
from olive_ext.engine.runners.ort.media_encoder import MediaEncoder
from olive_ext.engine.runners.ort.packing import packed_embedding
from olive_ext.engine.runners.ort.placement import MisplacedError, misplaced
from olive_ext.errors import ConfigError, ModelError, ProviderError
from olive_ext.graph.attention_rewrites import cross_graph, with_attention_bias
from olive_ext.graph.nodes import clips_as_max, drop_shape_hints
from olive_ext.graph.onnx_file import ModelProto, external_locations, load_graph, relocate
from olive_ext.graph.padded_rows import NUM_ROWS, pad_rows
from olive_ext.graph.scoring_head import HeadOutputs, TokenForm, scoring_graph
from olive_ext.graph.tree_attention import NoTreeAttentionError, TreeAttentionGraph, with_tree_attention
from olive_ext.model import ResolvedModel, external_data_plan, open_session
from olive_ext.model.compiled import Compiled
from olive_ext.model.decisions import ONE_BY_ONE, choose_encoder_rows
from olive_ext.model.decoder_spec import read_embedding
from olive_ext.model.encoder_spec import read_encoder
from olive_ext.model.generation_config import read_suppressed
from olive_ext.model.media_types import EmbeddingSpec, MediaEncoderSpec
from olive_ext.model.types import DecoderSpec, InputSpec, Provider, Role, TensorSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Opener:
    """Opens the graphs of one engine: the decoder and its small helpers, on the same providers."""

    model: ResolvedModel
    profile_prefix: Path | None
    compiled: Compiled
    """What providers compile of the graphs that are opened."""

    against_packing: str = ""
    """What packed steps failed at."""

    @property
    def form(self) -> str:
        """How texts that are scored share steps, as far as this opening has found out."""
        if self.against_packing:
            return str(self.model.scored_one_by_one(self.against_packing).value)
        return str(self.model.scoring.value)

    @property
    def notes(self) -> tuple[str, ...]:
        return (*self.model.notes, *([f"{ONE_BY_ONE}: {self.against_packing}"] if self.against_packing else []))

    def by_rows(self, problem: str) -> Opener:
        """An opener that makes no packed steps. Raises `ConfigError` where these are mandatory."""
        if self.model.settings.engine.scoring == "packed":
            raise ConfigError(f"'engine.scoring' = \"packed\": {problem}")
        logger.warning("%s: %s", ONE_BY_ONE, problem)
        return replace(self, against_packing=problem)

    def fed_whole(self, problem: str) -> Opener:
        """An opener of a decoder that is fed with one request at a time, each whole."""
        logger.warning("each request is fed whole and alone: %s", problem)
        return replace(self, model=replace(self.model, against_parts=problem))

    def tree_attention(
        self, proto: ModelProto, spec: DecoderSpec
    ) -> tuple[ModelProto, DecoderSpec, TreeAttentionGraph | None]:
        """The graph with inputs for tree batches, the spec with them, and what they are; None where the model has no
        use for them, with a note where it is the graph that cannot take them."""
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
        bans = read_suppressed(self.model.files).bans if spec.cross else ()
        outputs = HeadOutputs(exposes_rows, tokens=self._token_form(spec) if async_decode else None, bans=bans)
        logits = spec.logits
        if self.model.settings.engine.graph == "untouched":
            session = self._from_memory(proto, self.model.files.decoder, caches=_cache_names(spec))
            place, rank = self.device(session), len(logits.shape)
            graph = scoring_graph(logits.elem_type, spec.vocab_size, rank, outputs)
            head = self.helper(graph.SerializeToString())
            asked = {"exposes_rows": exposes_rows, "async_decode": async_decode, "has_bans": bool(bans)}
            return session, SeparateHead(head, logits.name, place, self.helper, **asked)
        is_captured = self.model.buckets.is_captured
        scoring = with_head(proto, spec, replace(outputs, has_rows=is_captured))
        caches = _cache_names(spec)
        session = self._from_memory(scoring.model, self.model.files.decoder, caches=caches, is_captured=is_captured)
        place = self.device(session)
        exposed, kept = (place if exposes_rows else None), (place if async_decode else None)
        said = scoring.kind, scoring.reason, place, self.helper
        return session, Head(*said, exposed, kept, scoring.late_products, has_bans=bool(bans))

    def _token_form(self, spec: DecoderSpec) -> TokenForm:
        """How token ids are taken, by the decoder or by the graph that embeds them."""
        inputs = self._embedding_graph(spec)[2].inputs if spec.embeddings else spec.inputs
        tensor = next(found.tensor for found in inputs if found.role is Role.INPUT_IDS)
        return TokenForm(tensor.elem_type, len(tensor.shape))

    def embedding(self, spec: DecoderSpec, device: Device) -> Embedding:
        proto, file, read = self._embedding_graph(spec)
        encoders = self.model.media.encoders if self.model.media is not None else ()
        count = self._shape_count()
        opened = [self._media_encoder(found, device, count) for found in encoders]
        session, is_bucketed = self._from_memory(proto, file), self.model.warms_encoders
        return Embedding(session, read, device, opened, self.helper, count, is_bucketed=is_bucketed)

    def _media_encoder(self, spec: MediaEncoderSpec, device: Device, count: ShapeCount) -> MediaEncoder:
        """An encoder of pictures or sound, which may have providers of its own; `device` is the decoder's."""
        providers = self.model.providers_of(spec)
        is_alike = providers == self.model.providers
        there = self if is_alike else replace(self, model=replace(self.model, came_up=providers))
        is_bucketed = self.model.warms_encoders
        shapes = EncoderShapes(spec, is_bucketed=is_bucketed)
        place = device if is_alike else there.model.device
        batches = EncoderBatches(spec, choose_encoder_rows(self.model.settings, place), is_bucketed=is_bucketed)
        sessions = partial(there.media, spec), there.helper
        if is_bucketed and spec.has_own_rows:
            spec = replace(spec, real_rows=TensorSpec(NUM_ROWS, 7, (1,)))
        return MediaEncoder(spec, place, *sessions, shapes, batches=batches, bucket=self.compiled.bucket, count=count)

    def media(self, spec: MediaEncoderSpec) -> ort.InferenceSession:
        """The session of an encoder. Raises `ProviderError` where its provider cannot run it, or not all of it."""
        try:
            proto = load_graph(spec.files.graph)
            if self.model.warms_encoders and spec.has_own_rows:
                pad_rows(proto, spec.inputs[0].name, [output.name for output in spec.outputs])
            return self._from_memory(proto, spec.files.graph, floats_only=True)
        except ProviderError as error:
            raise ProviderError(f"{error}; 'engine.encoder_provider' = 'cpu' would run the encoder there") from error

    def _embedding_graph(self, spec: DecoderSpec) -> tuple[ModelProto, Path, EmbeddingSpec]:
        companion = self.model.files.companions.get("embedding")
        if companion is None:
            raise ModelError(
                f"'{self.model.files.decoder}' takes '{spec.embeddings[0]}' instead of token ids, and no "
                "genai_config.json names the graph that computes it (model.embedding.filename)"
            )
        proto = load_graph(companion.graph)
        clips_as_max(proto.graph)
        read = read_embedding(proto, spec.embeddings)
        if spec.is_paged:
            proto, read = packed_embedding(proto, read)
        return proto, companion.graph, read

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
        session, count = self._from_memory(proto, companion.graph), self._shape_count()
        return Encoder(session, cross, encoder, device, num_kept, self.helper, count)

    def _shape_count(self) -> ShapeCount:
        return ShapeCount(is_strict=self.model.settings.engine.strict_shapes)

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
        self,
        proto: ModelProto,
        file: Path,
        *,
        caches: Sequence[str] = (),
        is_captured: bool = False,
        floats_only: bool = False,
    ) -> ort.InferenceSession:
        """Opens `proto` from memory; its external weights stay in the folder of `file`, symbolic links followed.

        Raises `MisplacedError` where nodes with large values (`floats_only`: with floats), or inputs and outputs named
        in `caches`, would not be on the device.
        """
        folder, renames = external_data_plan(file, external_locations(proto))
        proto = relocate(proto, renames)
        serialized = proto.SerializeToString()
        weights = [folder / name for name in sorted(external_locations(proto))]
        places = {"external_data_folder": folder, "weights": weights, "profile_prefix": self.profile_prefix}
        session = self._open(serialized, file, is_captured=is_captured, **places)
        device = self.device(session).kind
        if problem := misplaced(session, proto, device, caches, floats_only=floats_only):
            raise MisplacedError(f"'{file}' cannot run on the {device} device alone: {problem}")
        return session

    def _open(self, graph: bytes, file: Path, *, is_captured: bool = False, **places: Any) -> ort.InferenceSession:
        providers = _capturing(self.model.providers) if is_captured else self.model.providers
        places.update(custom_operators=self.model.custom_operators, compiled=self.compiled)
        return open_session(graph, providers, self.model.settings, label=str(file), **places)


def _cache_names(spec: DecoderSpec) -> list[str]:
    """Inputs and outputs that carry what is resident."""
    return [name for tensor in spec.caches for name in (tensor.past, tensor.present)]


def _capturing(providers: tuple[Provider, ...]) -> tuple[Provider, ...]:
    """The first one with the option that has runs captured."""
    first, *others = providers
    assert first.capture_option is not None
    return replace(first, options={**first.options, first.capture_option: "1"}), *others

"""Opens the graphs of one engine: the decoder with its head, and its small helpers, on the same providers. Knows no
slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime as ort

from olive_ext.engine.forms.packed.graph import packed_embedding
from olive_ext.engine.media.embedding import Embedding
from olive_ext.engine.media.encoder import MediaEncoder
from olive_ext.engine.media.graphs import ItemGraphs, ShapeCount
from olive_ext.engine.media.source_encoder import SourceEncoder
from olive_ext.engine.runners.ort.bound_weights import BoundWeights
from olive_ext.engine.runners.ort.head import HeadPlan, ScoringHead, SeparateHead, with_head
from olive_ext.engine.runners.ort.placement import MisplacedError, misplaced, untaken
from olive_ext.errors import ModelError, ProviderError
from olive_ext.graph.edits import NUM_ROWS, clips_as_max, cross_graph, drop_shape_hints, pad_rows, with_attention_bias
from olive_ext.graph.onnx_file import ModelProto, external_locations, relocate
from olive_ext.graph.scoring_head import HeadOutputs, TokenForm, scoring_graph
from olive_ext.model import ResolvedModel
from olive_ext.model.decisions import choose_encoder_rows
from olive_ext.model.files.content import external_data_plan, load_graph
from olive_ext.model.files.package_config import read_suppressed
from olive_ext.model.providers.compiled import Compiled
from olive_ext.model.providers.devices import Device, Provider
from olive_ext.model.providers.ort_session import open_session
from olive_ext.model.spec.decoder_spec import read_embedding
from olive_ext.model.spec.encoder_spec import read_encoder
from olive_ext.model.spec.media_types import EmbeddingSpec, MediaEncoderSpec
from olive_ext.model.types import DecoderSpec, Role, TensorSpec

_STOPS_SPINNING = {"session.force_spinning_stop": "1"}
"""Of a model of several graphs, or beside another model: each session has threads of its own, and those that spin
behind a run take the processors of the next session's. By hand, on a busy machine of 2 cores, the tiny Whisper heard
1.3 to 1.7 times as fast in first runs, 2.6 to 4.8 times in later ones; two resident models of 135M parameters took 1.35
times the processor's seconds of both alone, and 1.04 times without (40 documents of each quickstart task)."""


@dataclass(frozen=True)
class Sessions:
    """Opens the graphs of one engine: the decoder and its small helpers, on the same providers."""

    model: ResolvedModel
    profile_prefix: Path | None
    compiled: Compiled
    """What providers compile of the graphs that are opened."""

    weights: Mapping[Path, BoundWeights] = field(default_factory=dict)
    """By the files of graphs (decoder, embedding, encoders of pictures and sound) the weights that their runs bind."""

    def decoder(self, proto: ModelProto, spec: DecoderSpec) -> tuple[ort.InferenceSession, ScoringHead]:
        """The decoder's session and the scoring head, which has a graph of its own where the decoder's is untouched."""
        if not spec.is_kv_in_place:
            drop_shape_hints(proto.graph)
        exposes_rows, is_plain = self.model.is_compared, spec.is_paged or self.model.buckets.steps == "none"
        overlaps_steps = self.model.overlapped_steps[0] and is_plain
        bans = read_suppressed(self.model.files).bans if spec.cross else ()
        outputs = HeadOutputs(exposes_rows, tokens=self._token_form(spec) if overlaps_steps else None, bans=bans)
        logits, caches = spec.logits, [name for tensor in spec.caches for name in (tensor.past, tensor.present)]
        plan = partial(HeadPlan, self.helper, exposes_rows, overlaps_steps, bool(bans))
        if self.model.settings.engine.graph == "untouched":
            session = self._opened(proto, self.model.files.decoder, caches=caches)
            graph = scoring_graph(logits.elem_type, spec.vocab_size, len(logits.shape), outputs)
            head = self.helper(graph.SerializeToString())
            return session, SeparateHead(head, logits.name, plan(self.device(session)))
        is_captured = self.model.capture(spec).is_captured
        scoring = with_head(proto, spec, replace(outputs, has_rows=is_captured))
        session = self._opened(scoring.model, self.model.files.decoder, caches=caches, is_captured=is_captured)
        graph_facts = scoring.kind, scoring.reason, scoring.late_products
        return session, ScoringHead(plan(self.device(session), *graph_facts))

    def _opened(self, proto: ModelProto, file: Path, **how: Any) -> ort.InferenceSession:
        """As `_bound`. Raises `MisplacedError` where the first provider, whose numbers are asked for, runs no product
        of it, too: QNN's takes none of a decoder in float32, and says nothing."""
        session = self._bound(proto, file, **how)
        if problem := untaken(session, self.model.providers[0].name):
            raise MisplacedError(f"'{file}': {problem}")
        return session

    def part(self, proto: ModelProto) -> ort.InferenceSession:
        """A session of a part of the decoder's graph as that is open."""
        return self._from_memory(proto, self.model.files.decoder)

    def _bound(self, proto: ModelProto, file: Path, **how: Any) -> ort.InferenceSession:
        """As `_from_memory`, with the weights of `file` that are bound as inputs."""
        weights = self.weights.get(file)
        if weights is not None:
            weights.edit(proto)  # last: what rewrites a graph looks at constants
        session = self._from_memory(proto, file, **how)
        if weights is not None:
            weights.attach(self.device(session))
        return session

    def _token_form(self, spec: DecoderSpec) -> TokenForm:
        inputs = self._embedding_graph(spec)[2].inputs if spec.embeddings else spec.inputs
        tensor = next(found.tensor for found in inputs if found.role is Role.INPUT_IDS)
        return TokenForm(tensor.elem_type, len(tensor.shape))

    def embedding(self, spec: DecoderSpec, device: Device) -> Embedding:
        """The graph that embeds tokens, with the encoders of pictures and sound; `device` is the decoder's."""
        proto, file, read = self._embedding_graph(spec)
        encoders = self.model.media.encoders if self.model.media is not None else ()
        graphs = self._item_graphs(device)
        opened = [self._media_encoder(found, graphs) for found in encoders]
        return Embedding(self._bound(proto, file), read, opened, graphs, self.weights.get(file))

    def _item_graphs(self, device: Device) -> ItemGraphs:
        count = ShapeCount(is_strict=self.model.settings.engine.strict_shapes)
        return ItemGraphs(device, self.helper, count, self.model.warms_encoders, self.compiled.bucket)

    def _media_encoder(self, spec: MediaEncoderSpec, graphs: ItemGraphs) -> MediaEncoder:
        """An encoder of pictures or sound, which may have providers of its own; `graphs` are the embedding's."""
        opener, providers = self, self.model.providers_of(spec)
        if providers != self.model.providers:
            opener = replace(self, model=replace(self.model, session_providers=providers))
            graphs = replace(graphs, device=opener.model.device, open_graph=opener.helper)
        open_session, max_rows = partial(opener.media, spec), choose_encoder_rows(self.model.settings, graphs.device)
        if graphs.is_bucketed and spec.has_own_rows:
            spec = replace(spec, real_rows=TensorSpec(NUM_ROWS, 7, (1,)))
        return MediaEncoder(spec, open_session, graphs, max_rows, self.weights.get(spec.files.graph))

    def media(self, spec: MediaEncoderSpec) -> ort.InferenceSession:
        """The session of an encoder. Raises `ProviderError` where its provider cannot run it, or not all of it."""
        try:
            proto = load_graph(spec.files.graph)
            if self.model.warms_encoders and spec.has_own_rows:
                pad_rows(proto, spec.inputs[0].name, [output.name for output in spec.outputs])
            return self._opened(proto, spec.files.graph, floats_only=True)
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
        if companion is None and not any(found.role is Role.USE_CACHE_BRANCH for found in spec.inputs):
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
        settings, engine = self.model.settings, self.model.settings.engine
        if self.model.files.companions or self.model.is_compared:
            options = {**_STOPS_SPINNING, **engine.session_options}
            settings = settings.model_copy(update={"engine": engine.model_copy(update={"session_options": options})})
        return open_session(graph, providers, settings, label=str(file), **places)


def _capturing(providers: tuple[Provider, ...]) -> tuple[Provider, ...]:
    first, *others = providers
    assert first.capture_option is not None
    return replace(first, options={**first.options, first.capture_option: "1"}), *others

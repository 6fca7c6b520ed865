"""Opens an engine on a model's files: reads the graph, puts the head in, opens the session, allocates the slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime as ort

from olive_ext.config import EngineConfig
from olive_ext.engine.engine import Engine
from olive_ext.engine.runners.bucket_trial import Wanted, against, with_buckets
from olive_ext.engine.runners.num_slots import choose_num_slots
from olive_ext.engine.runners.ort.adapters import Adapters
from olive_ext.engine.runners.ort.attention_trial import choose_chunk_size
from olive_ext.engine.runners.ort.capture import Capture
from olive_ext.engine.runners.ort.embedding import Embedding
from olive_ext.engine.runners.ort.encoder import Encoder
from olive_ext.engine.runners.ort.head import GraphHead, Head, SeparateHead, with_head
from olive_ext.engine.runners.ort.kv.base import Device, KvPlace, KvStore
from olive_ext.engine.runners.ort.kv.in_place import ViewKv
from olive_ext.engine.runners.ort.kv.paged import PagedKv
from olive_ext.engine.runners.ort.kv.returned import ReturnedKv
from olive_ext.engine.runners.ort.kv.staged import StagedKv
from olive_ext.engine.runners.ort.kv.tree_cells import Bias, SharedPrefixKv
from olive_ext.engine.runners.ort.ort_runner import OrtRunner
from olive_ext.engine.runners.runtime import choose_runtime, suggest_genai
from olive_ext.engine.runners.tree_batch_trial import check_tree_batches
from olive_ext.engine.runners.trials import fitting_chunk_size
from olive_ext.engine.scheduling.overlapped_steps import choose_overlap
from olive_ext.engine.scheduling.scoring_form import ScoringSteps, longest_step, pinned_size
from olive_ext.errors import ModelError, ProviderError
from olive_ext.graph.attention_rewrites import with_attention_bias, with_full_length_kv
from olive_ext.graph.cross_attention import cross_graph
from olive_ext.graph.nodes import drop_shape_hints
from olive_ext.graph.onnx_file import ModelProto, external_locations, load_graph, relocate
from olive_ext.graph.scoring_head import TokenForm, check_scoring, scoring_graph
from olive_ext.graph.tree_attention import NoTreeAttentionError, TreeAttentionGraph, with_tree_attention
from olive_ext.model import external_data_plan, open_session
from olive_ext.model.decoder_spec import read_embedding, read_spec
from olive_ext.model.encoder_spec import read_encoder
from olive_ext.model.types import DecoderSpec, EmbeddingSpec, InputSpec, ModelFiles, Provider, Role, TensorSpec


def open_engine(
    files: ModelFiles,
    providers: tuple[Provider, ...],
    config: EngineConfig,
    *,
    max_length: int | None = None,
    batch_size: int | None = None,
    allow_cpu_fallback: bool = False,
    profile_prefix: Path | None = None,
    exposes_rows: bool = False,
) -> Engine:
    """An engine for the decoder in `files`; with `exposes_rows` its runner leaves the rows of logits on the device, for
    a comparison. Raises `ModelError` for a graph that cannot be scored or run, and
    `ProviderError` for a provider that does not come up. `profile_prefix` makes ONNX Runtime write a profile."""
    runtime, reason = choose_runtime(config, files)
    chosen = {"runtime": runtime, "runtime_origin": reason}
    if runtime == "genai":
        from olive_ext.engine.runners.genai.genai_model import open_genai_engine  # imported here: few models need it

        return open_genai_engine(
            files,
            providers,
            config,
            chosen,
            max_length=max_length,
            allow_cpu_fallback=allow_cpu_fallback,
            profile_prefix=profile_prefix,
        )
    opener = _Opener(files, providers, config, allow_cpu_fallback, profile_prefix, exposes_rows)
    return _open_ort(opener, chosen, max_length, batch_size)


def _open_ort(opener: _Opener, chosen: Mapping[str, Any], max_length: int | None, batch_size: int | None) -> Engine:
    adapters = Adapters(opener.config.adapters)
    proto, spec = _read(opener.files, max_length, adapters)
    shapes = Wanted.of(opener.config, opener.providers[0], spec, exposes_rows=opener.exposes_rows)
    spec = replace(spec, notes=(*spec.notes, shapes.note)) if shapes.note else spec
    opener = replace(opener, shapes=shapes)
    proto, spec, branches = opener.branches(with_full_length_kv(proto), spec)
    session, head = opener.decoder(proto, spec)
    if opener.device(session).kind != opener.providers[0].device:  # it fell back to the CPU: all is chosen anew
        return _open_ort(replace(opener, providers=opener.providers[-1:]), chosen, max_length, batch_size)
    del proto  # inline weights would stay in memory twice
    adapters.attach(session, opener.device(session))
    return _engine(opener, session, head, spec, adapters, batch_size, chosen, branches)


def _engine(
    opener: _Opener,
    session: ort.InferenceSession,
    head: Head,
    spec: DecoderSpec,
    adapters: Adapters,
    batch_size: int | None,
    chosen: Mapping[str, Any],
    branches: TreeAttentionGraph | None,
) -> Engine:
    """The engine around an opened decoder."""
    config, device = opener.config, opener.device(session)
    num_slots, origin = choose_num_slots(config, batch_size, spec, device)
    kv = _kv_form(spec, device)(KvPlace(session, spec, num_slots, device, opener.helper))
    slots = {"num_slots": num_slots, "num_slots_origin": origin}
    chunk_size, notes = choose_chunk_size(longest_step(config), device, spec, opener.helper)
    if notes and spec.cross:
        raise ProviderError(f"{notes[0]}, and an encoder takes its input whole: use another provider")
    notes = [*spec.notes, *notes]
    is_ahead, why = opener.ahead
    ahead = {"decode_ahead": is_ahead, "decode_ahead_reason": why}
    facts = {"model": str(opener.files.decoder), **chosen, **slots, **ahead, "notes": notes, **adapters.describe()}
    embedding = opener.embedding(spec, device) if spec.embeddings else None
    encoder = opener.encoder(spec, device, num_slots) if spec.cross else None
    trunk = (
        SharedPrefixKv(ViewKv(KvPlace(session, spec, 1, device, opener.helper)), Bias(branches.biases))
        if branches
        else None
    )
    capture = Capture(session, device) if opener.shapes.is_captured else None
    parts = (embedding, encoder, adapters, trunk, capture)
    runner = OrtRunner(session, spec, kv, head, facts, device, opener.helper, *parts)
    if isinstance(kv, ReturnedKv) and encoder is None:
        chunk_size = fitting_chunk_size(chunk_size, runner, notes)
    if trunk is not None and (problem := check_tree_batches(runner, spec.vocab_size)):
        trunk.is_used = False
        notes.append(f"texts are scored one after the other: {problem}")
    shaped = with_buckets(runner, spec.vocab_size, chunk_size, opener.shapes, notes)
    return Engine(shaped, chunk_size, ScoringSteps(shaped, pinned_size(config, chunk_size)))


def _read(files: ModelFiles, max_length: int | None, adapters: Adapters) -> tuple[ModelProto, DecoderSpec]:
    proto = load_graph(files.decoder)
    try:
        spec = read_spec(proto, files.genai_config, max_length, files.hf_config, adapters.names)
        check_scoring(proto, spec.logits.name)
    except ModelError as error:
        raise suggest_genai(error, files) from error
    return proto, spec


def _kv_form(spec: DecoderSpec, device: Device) -> Callable[[KvPlace], KvStore]:
    if spec.is_paged:
        return PagedKv
    if not spec.is_kv_in_place:
        return ReturnedKv
    return ViewKv if device.has_pointers else StagedKv


def _capturing(providers: tuple[Provider, ...]) -> tuple[Provider, ...]:
    """The first one with the option that has runs captured."""
    first, *others = providers
    assert first.capture_option is not None
    return replace(first, options={**first.options, first.capture_option: "1"}), *others


@dataclass(frozen=True)
class _Opener:
    """Opens the graphs of one engine: the decoder and its small helpers, on the same providers."""

    files: ModelFiles
    providers: tuple[Provider, ...]
    config: EngineConfig
    allow_cpu_fallback: bool
    profile_prefix: Path | None
    exposes_rows: bool
    shapes: Wanted = field(default_factory=partial(Wanted, "none"))

    def branches(
        self, proto: ModelProto, spec: DecoderSpec
    ) -> tuple[ModelProto, DecoderSpec, TreeAttentionGraph | None]:
        """The graph with inputs for branches, the spec with them, and what they are; None and a note where the graph or
        the provider has no use for them."""
        if self.config.scoring == "rows" or self.shapes.steps != "none" or against(spec):
            return proto, spec, None
        if reason := self._against_tree_batches(spec):
            return proto, replace(spec, notes=(*spec.notes, f"texts are scored one after the other: {reason}")), None
        has_positions = any(found.role is Role.POSITION_IDS for found in spec.inputs)
        try:
            graph = with_tree_attention(proto, [tensor.past for tensor in spec.kv], has_positions)
        except NoTreeAttentionError as error:
            note = f"texts are scored one after the other: {error}"
            return proto, replace(spec, notes=(*spec.notes, note)), None
        if graph.positions is not None:
            positions = InputSpec(Role.POSITION_IDS, TensorSpec(graph.positions, 7, ("B", "S")))
            spec = replace(spec, inputs=(*spec.inputs, positions))
        return graph.model, spec, graph

    def _against_tree_batches(self, spec: DecoderSpec) -> str | None:
        """Why there are no branches; the user may want them in spite of rounding."""
        if self.providers[0].device != "cpu":
            return "the cells of branches are moved in the host's memory, and this model's cache is not there"
        if self.config.scoring == "auto" and spec.rounds_rows:
            return "branches add up in another order, which the rounding of activations would show (engine.scoring)"
        return None

    def decoder(self, proto: ModelProto, spec: DecoderSpec) -> tuple[ort.InferenceSession, Head]:
        if not spec.is_kv_in_place:
            drop_shape_hints(proto.graph)
        exposes_rows, (async_decode, _) = self.exposes_rows, self.ahead
        tokens = self._token_form(spec) if async_decode else None
        logits = spec.logits
        if self.config.graph == "untouched":
            session = self._from_memory(proto, self.files.decoder)
            place, rank = self.device(session), len(logits.shape)
            graph = scoring_graph(logits.elem_type, spec.vocab_size, rank, exposes_rows=exposes_rows, tokens=tokens)
            head = self.helper(graph.SerializeToString())
            asked = {"exposes_rows": exposes_rows, "async_decode": async_decode}
            return session, SeparateHead(head, logits.name, place, **asked)
        is_captured = self.shapes.is_captured
        scoring = with_head(proto, spec, exposes_rows=exposes_rows, has_rows=is_captured, tokens=tokens)
        providers = _capturing(self.providers) if is_captured else self.providers
        session = replace(self, providers=providers)._from_memory(scoring.model, self.files.decoder)
        place = self.device(session)
        exposed, kept = (place if exposes_rows else None), (place if async_decode else None)
        return session, GraphHead(scoring.kind, scoring.reason, exposed, kept, scoring.late_products)

    @property
    def ahead(self) -> tuple[bool, str]:
        """Whether steps begin ahead, and why."""
        return choose_overlap(self.config, self.providers[0].device, has_any_shape=self.shapes.steps == "none")

    def _token_form(self, spec: DecoderSpec) -> TokenForm:
        """How token ids are taken, by the decoder or by the graph that embeds them."""
        inputs = self._embedding_graph(spec)[2].inputs if spec.embeddings else spec.inputs
        tensor = next(found.tensor for found in inputs if found.role is Role.INPUT_IDS)
        return TokenForm(tensor.elem_type, len(tensor.shape))

    def embedding(self, spec: DecoderSpec, device: Device) -> Embedding:
        proto, file, read = self._embedding_graph(spec)
        return Embedding(self._from_memory(proto, file), read, device)

    def _embedding_graph(self, spec: DecoderSpec) -> tuple[ModelProto, Path, EmbeddingSpec]:
        companion = self.files.companions.get("embedding")
        if companion is None:
            raise ModelError(
                f"'{self.files.decoder}' takes '{spec.embeddings[0]}' instead of token ids, and no genai_config.json "
                "names the graph that computes it (model.embedding.filename)"
            )
        proto = load_graph(companion.graph)
        return proto, companion.graph, read_embedding(proto, spec.embeddings)

    def encoder(self, spec: DecoderSpec, device: Device, num_kept: int) -> Encoder:
        companion = self.files.companions.get("encoder")
        if companion is None:
            raise ModelError(
                f"'{self.files.decoder}' takes '{min(spec.cross.names)}' of an encoder, and none was found: neither a "
                "genai_config.json names it (model.encoder.filename), nor is 'encoder_model.onnx' beside the decoder"
            )
        proto = with_attention_bias(load_graph(companion.graph))
        file, first_step = self._first_step(spec)
        encoder = read_encoder(proto, spec.cross, self.files.genai_config.get("model", {}), first_step)
        cross = self._from_memory(first_step, file) if encoder.first_step and first_step is not None else None
        return Encoder(self._from_memory(proto, companion.graph), cross, encoder, device, num_kept)

    def _first_step(self, spec: DecoderSpec) -> tuple[Path, ModelProto | None]:
        """The file of the decoder that returns cross-attention KV, and what computes them, cut out of it."""
        companion = self.files.companions.get("first_step")
        file = companion.graph if companion else self.files.decoder
        if companion is None and not any(found.role is Role.USE_CACHE_BRANCH for found in spec.inputs):
            return file, None
        return file, cross_graph(load_graph(file), spec.cross.kv)

    def helper(self, graph: bytes) -> ort.InferenceSession:
        """A session for a graph without weights."""
        return self._open(graph, self.files.decoder)

    def device(self, session: ort.InferenceSession) -> Device:
        """Where the first provider that the session really uses keeps its values."""
        used = session.get_providers()
        first = next(provider for provider in self.providers if provider.name in used)
        return Device(first.device, int(first.options.get("device_id", 0)))

    def _from_memory(self, proto: ModelProto, file: Path) -> ort.InferenceSession:
        """External weights stay where they are, beside `file`, symbolic links followed."""
        folder, renames = external_data_plan(file, external_locations(proto))
        model = relocate(proto, renames).SerializeToString()
        return self._open(model, file, external_data_folder=folder, profile_prefix=self.profile_prefix)

    def _open(self, model: bytes, file: Path, **arguments: Any) -> ort.InferenceSession:
        threads = self.config.num_threads
        return open_session(
            model,
            self.providers,
            session_options=self.config.session_options,
            num_threads=None if threads == "auto" else threads,
            allow_cpu_fallback=self.allow_cpu_fallback,
            label=str(file),
            **arguments,
        )

"""From the settings of opening a model to everything that can be known of it before a session is open: `open`, `check`,
the comparison's mode, the keys of caches and the costs read one `ResolvedModel`. Knows no session and no engine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from olive_ext.config import ModelSettings
from olive_ext.errors import ConfigError, ModelError, understood
from olive_ext.model import checkpoint, decisions
from olive_ext.model.content import content_hash, hf_content_hash, size_on_disk
from olive_ext.model.decisions import BucketPlan, Decision, Runtime, State
from olive_ext.model.folders import GENAI_CONFIG, MEDIA_SECTIONS, missing_encoder
from olive_ext.model.locate import Kind, locate, locate_hf, model_kind
from olive_ext.model.media_types import MEDIA_PARTS, MediaEncoderSpec, MediaSpec
from olive_ext.model.ort_session import read_adapter
from olive_ext.model.outline import read_graph
from olive_ext.model.package_files import inside
from olive_ext.model.package_trust import custom_operators_of, refuse_untrusted
from olive_ext.model.providers import check_distributions, register_libraries, resolve_providers
from olive_ext.model.types import DecoderSpec, Device, ModelFiles, Provider, SourceKind, TensorSpec

_KV_NOTES = ("past and present KV", "KV is returned grown")  # begin the spec's note on the form of the cache


def resolve(
    settings: ModelSettings, *, tokenizer_candidates: Sequence[str | Path] = (), handed_over: Any = None
) -> ResolvedModel:
    """The model that `settings` name, its files found.

    `tokenizer_candidates` are tried after the model's own folders; `handed_over` is the provider that Olive's
    accelerator names. Raises `ModelError` where there is no such model, or none of its kind."""
    threads, processors = settings.engine.num_threads, os.cpu_count()
    if threads != "auto" and processors is not None and threads > processors:
        raise ConfigError(f"'engine.num_threads' = {threads}: this machine has {processors} processors")
    path, written, name, tokenizer, components = settings.place
    kind, reason = (model_kind(path), "by the files") if written == "auto" else (written, "the setting 'kind'")
    if kind == "hf":
        files = locate_hf(path, tokenizer)
    else:
        files = locate(path, name, tokenizer, tokenizer_candidates, dict(components))
    model = ResolvedModel(settings, kind, reason, files, handed_over=handed_over)
    _ = model.custom_operators
    return model


@dataclass(frozen=True)
class ResolvedModel:
    """A model as it will be opened: no "auto" is left that can be decided without a session.

    What costs time is found when it is first read: providers (`ProviderError`), the spec (`ModelError`, the graph is
    read and dropped), the digest (about 1 s/GB).
    """

    settings: ModelSettings
    kind: Kind
    kind_reason: str
    files: ModelFiles
    is_compared: bool = False
    """Whether it is one of two models, whose rows of logits are left where they were computed."""

    handed_over: Any = None
    came_up: tuple[Provider, ...] = ()
    """The providers that a session came up on, where these are not those of the settings."""

    against_parts: str = ""
    """What texts fed in parts failed at."""

    def patched(self, changes: Mapping[str, Any]) -> ResolvedModel:
        """The model with other settings, which are validated already; looked for anew only where they name another."""
        settings = self.settings.model_copy(update=changes)
        if settings.place != self.settings.place:
            return replace(resolve(settings, handed_over=self.handed_over), is_compared=self.is_compared)
        return self if settings == self.settings else replace(self, settings=settings)

    @cached_property
    def providers(self) -> tuple[Provider, ...]:
        """The providers in order of preference; plugin libraries are registered first."""
        if self.came_up:
            return self.came_up
        check_distributions()
        register_libraries(self.settings.provider_libraries)
        return resolve_providers(
            self.settings.execution_provider,
            self.settings.provider_options,
            handed_over=self.handed_over,
            genai_config=self.files.genai_config,
            allow_cpu_fallback=self.settings.allow_cpu_fallback,
        )

    def providers_of(self, encoder: MediaEncoderSpec) -> tuple[Provider, ...]:
        """The providers of an encoder: those that `engine.encoder_provider` names for it; where nobody has named the
        model's, those of its own section in genai_config.json; else the decoder's."""
        asked: Any = self.settings.engine.encoder_provider
        if isinstance(asked, Mapping):
            asked = asked.get(encoder.part)
        section = next(section for section, part in MEDIA_SECTIONS.items() if part == encoder.part)
        is_free = not self.came_up and self.providers[0].origin in (GENAI_CONFIG, "default")
        own = resolve_providers(
            asked,
            genai_config=self.files.genai_config if is_free else None,
            allow_cpu_fallback=self.settings.allow_cpu_fallback,
            setting="engine.encoder_provider",
            section=section,
        )
        return self.providers if own[0].origin == "default" else own

    @cached_property
    def custom_operators(self) -> Path | None:
        """The library of operators that genai_config.json names, which is native code. Raises `ModelError` for it, and
        for other settings like it, unless the package is trusted."""
        if not self.settings.trust_remote_code:
            refuse_untrusted(self.files.genai_config, self.files.directory / GENAI_CONFIG)
        name = custom_operators_of(self.files.genai_config)
        return None if name is None else inside(self.files.directory, name, "custom_ops_library")

    @property
    def device(self) -> Device:
        """The device where the first provider keeps its values."""
        return self.providers[0].place

    @cached_property
    def runtime(self) -> tuple[Runtime, str]:
        """The library that runs the model, and which rule chose it."""
        if self.kind == "hf":
            return "transformers", f"kind: {self.kind_reason}"
        return decisions.choose_runtime(self.settings.engine, self.files)

    @cached_property
    def spec(self) -> DecoderSpec:
        """The decoder's interface, with a note for each decision of which a user may have expected another one."""
        return self.spec_of(read_graph(self.files.decoder))

    def spec_of(self, graph: Any) -> DecoderSpec:
        """The interface of `graph` (onnx.ModelProto), the decoder's or one that was made of it."""
        from olive_ext.model.decoder_spec import read_spec  # imported here: it brings onnx along
        from olive_ext.model.step_choices import as_opened

        files, settings = self.files, self.settings
        provided = {name for path in settings.engine.adapters for name in read_adapter(path).get_parameters()}
        try:
            with understood(files.decoder):
                found = read_spec(graph, files.genai_config, settings.max_length, files.hf_config, provided)
                return as_opened(found, self)
        except ModelError as error:
            raise decisions.suggest_genai(error, files) from error

    @cached_property
    def processor_files(self) -> ModelFiles:
        """The files by which texts, pictures and sound are prepared: those of a checkpoint on the hub are fetched."""
        return self.files if self.kind == "onnx" else checkpoint.with_configs(self.files)

    @cached_property
    def media(self) -> MediaSpec | None:
        """What a multimodal model takes besides text; None for others. Encoders not understood are its `problem`."""
        if self.kind == "hf":
            return checkpoint.read_media(self.processor_files.hf_config)
        companions, missing = self.files.companions, missing_encoder(self.files)
        parts = {part: companions[part] for part in MEDIA_PARTS if part in companions}
        if self.runtime[0] != "onnxruntime" or "embedding" not in companions or not (parts or missing):
            return None
        from olive_ext.model.decoder_spec import read_embedding
        from olive_ext.model.media_spec import read_media

        embedding = read_graph(companions["embedding"].graph)
        taken = embedding, read_embedding(embedding, self.spec.embeddings)
        configs = self.files.genai_config.get("model", {}), self.files.hf_config
        try:
            encoders = {part: (files, read_graph(files.graph)) for part, files in parts.items()}
            return replace(read_media(self.spec, taken, encoders, configs), problem=missing)
        except ModelError as error:
            return MediaSpec((), problem=str(error))

    @cached_property
    def source(self) -> tuple[SourceKind, TensorSpec] | None:
        """What the encoder of an encoder-decoder takes, and its input; None for other models."""
        if self.kind == "hf":
            return checkpoint.read_source(self.processor_files.hf_config)
        if (encoder := self.files.companions.get("encoder")) is None:
            return None
        from olive_ext.model.encoder_spec import read_source

        return read_source(read_graph(encoder.graph), self.files.genai_config.get("model", {}))

    @cached_property
    def warms_encoders(self) -> bool:
        """Whether encoders of pictures and sound, and the graphs around them, have few shapes, all run beforehand."""
        encoders = self.media.encoders if self.media is not None else ()
        is_speech = self.kind == "onnx" and self.source is not None and self.source[0] is SourceKind.FEATURES
        firsts = [self.providers[0], *(self.providers_of(found)[0] for found in encoders)]
        return (bool(encoders) or is_speech) and decisions.wants_few_shapes(self.settings.engine, firsts)

    @cached_property
    def context_length(self) -> int | None:
        """The longest context in tokens; None where the model's files do not give it."""
        if self.kind == "hf":
            return self.settings.max_length or checkpoint.read_length(self.processor_files.hf_config)
        try:
            return self.spec.context_length
        except ModelError:
            return None

    @cached_property
    def buckets(self) -> BucketPlan:
        """Which steps are padded to shape buckets. Raises `ConfigError` where settings demand it in vain."""
        return BucketPlan.of(self.settings.engine, self.providers[0], self.spec, self.is_compared, self.warms_encoders)

    @property
    def chunk_size(self) -> tuple[int, str]:
        """The most tokens of a prompt's step, before the device and the graph are tried, and why."""
        is_any = self.buckets.steps == "none"
        return decisions.choose_chunk_size(self.settings.engine, self.device.kind, has_any_shape=is_any)

    @cached_property
    def overlap(self) -> tuple[bool, str]:
        """Whether decoding steps overlap, and why."""
        has_any_shape = self.buckets.steps == "none" and not (self.spec.embeddings and self.warms_encoders)
        return decisions.choose_overlap(self.settings.engine, self.device.kind, has_any_shape=has_any_shape)

    @cached_property
    def scoring(self) -> Decision:
        """How texts that are scored share steps."""
        return decisions.choose_scoring(self.settings.engine, self.device.kind, self.spec, self.buckets)

    def scored_one_by_one(self, problem: str) -> Decision:
        """How texts are scored where `problem` speaks against packed steps."""
        about = self.settings.engine, self.device.kind, self.spec, self.buckets
        return decisions.one_by_one(*about, f"{decisions.ONE_BY_ONE}: {problem}")

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on what is not obvious: the spec's, then why there are no buckets and no tree batches."""
        scoring = self.scoring.reason if self.scoring.reason.startswith(decisions.ONE_BY_ONE) else ""
        media = self.media.notes if self.media is not None else ()
        return (*self.spec.notes, *media, *filter(None, (self.buckets.note, scoring)))

    @cached_property
    def digest(self) -> str | None:
        """Digest of all files that decide the model's numbers; None for a name on the hub."""
        if self.kind == "onnx":
            return content_hash(self.files)
        return hf_content_hash(self.files.directory) if self.files.directory.is_dir() else None

    @cached_property
    def size(self) -> int | None:
        """Bytes on disk of the graphs and the weights; None for a name on the hub."""
        if self.kind == "onnx":
            return size_on_disk(self.files)
        return sum(file.stat().st_size for file in self.files.weights) or None

    @cached_property
    def decisions(self) -> tuple[Decision, ...]:
        """Every choice that opening the model takes, named as in `describe_execution`."""
        origins, (runtime, reason) = self.files.origins, self.runtime
        found = [Decision("kind", self.kind, self.kind_reason), Decision("runtime", runtime, reason)]
        found += [Decision("model", self.name, origins.get("decoder", ""))]
        found += [Decision("tokenizer", self.files.tokenizer, origins.get("tokenizer", ""))]
        if runtime == "onnxruntime":
            return (*found, *self._of_graph())
        if runtime == "genai":
            found += [Decision("num_slots", 1, "onnxruntime-genai runs one sequence at a time")]
        return (*found, Decision("chunk_size", *decisions.choose_chunk_size(self.settings.engine)))

    @property
    def name(self) -> str:
        """The decoder's file; a Hugging Face model as the user named it."""
        return str(self.files.decoder) if self.kind == "onnx" else self.settings.model

    def _of_graph(self) -> Iterator[Decision]:
        engine, spec = self.settings.engine, self.spec
        names = [provider.name for provider in self.providers]
        yield Decision("providers", names, self.providers[0].origin, _tried(len(names) > 1))
        yield Decision("context_length", spec.context_length, "max_length" if self.settings.max_length else "")
        kv_cache = "in_place" if spec.is_kv_in_place else "returned"
        reasons = (note for note in spec.notes if note.startswith(_KV_NOTES))
        yield Decision("kv_cache", kv_cache, next(reasons, ""))
        windows = sum(tensor.window is not None for tensor in spec.kv)
        yield Decision("full_length_kv", windows, f"of {len(spec.kv)} KV tensors drop old positions in the file")
        yield Decision("graph", engine.graph, "engine.graph")
        yield Decision("num_slots", *decisions.choose_num_slots(self.settings, spec, self.device), "predicted")
        size, why = self.chunk_size
        is_tried = not spec.is_kv_in_place and not spec.cross
        is_tried |= decisions.is_attention_at_risk(size, self.device, spec)
        yield Decision("chunk_size", size, why, _tried(is_tried))
        threads = "ONNX Runtime's default" if engine.num_threads == "auto" else engine.num_threads
        yield Decision("num_threads", threads, "engine.num_threads")
        buckets = self.buckets
        state = _tried(buckets.steps != "none")
        yield Decision("shapes", decisions.BUCKET_FORMS[buckets.steps], buckets.note or "engine.shapes", state)
        yield self.scoring
        yield Decision("decode_ahead", *self.overlap)


def _tried(is_tried: bool) -> State:
    return "tried" if is_tried else "decided"

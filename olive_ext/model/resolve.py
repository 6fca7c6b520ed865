"""From the settings of a model to everything that can be known of it before a session is open: `open`, `check`, the
comparison's mode, the keys of caches and the costs all read one `ResolvedModel`. Knows no session and no engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from olive_ext.config import ModelSettings, ReferenceConfig
from olive_ext.errors import ConfigError, MismatchError, ModelError, reading
from olive_ext.model import decisions, runtimes
from olive_ext.model.decisions import BucketPlan, CapturePlan, Decision, against_capture
from olive_ext.model.files.content import load_graph, model_digest, size_on_disk
from olive_ext.model.files.hub import with_configs
from olive_ext.model.files.locate import Kind, locate, locate_hf, model_kind
from olive_ext.model.files.package_config import GENAI_CONFIG, MEDIA_SECTIONS, inside, missing_encoder
from olive_ext.model.providers.devices import Device, Provider
from olive_ext.model.providers.ort_session import read_adapter
from olive_ext.model.providers.resolution import (
    check_distributions,
    first_name,
    operators_library,
    register_libraries,
    resolve_providers,
)
from olive_ext.model.providers.table import CPU
from olive_ext.model.runtimes import Runtime
from olive_ext.model.spec import checkpoint
from olive_ext.model.types import (
    MEDIA_PARTS,
    DecoderSpec,
    MediaEncoderSpec,
    MediaSpec,
    ModelFiles,
    SourceKind,
    TensorSpec,
)
from olive_ext.registry import hooks


def resolve(
    settings: ModelSettings, *, tokenizer_candidates: Sequence[str | Path] = (), key: str = "model"
) -> ResolvedModel:
    """The model that `settings` name, with its files found.

    `tokenizer_candidates` are tried after the model's own folders. Raises `ModelError` where there is no such model, or
    none of its kind. `key` is the setting that names the model, and precedes a reference's own keys.
    """
    try:
        threads, processors = settings.engine.num_threads, os.cpu_count()
        if threads != "auto" and processors is not None and threads > processors:
            raise ConfigError(f"this machine has {processors} processors", "engine.num_threads", threads)
        path, tokenizer = settings.model, settings.tokenizer
        kind, reason = settings.kind, "the setting 'kind'"
        if kind == "auto":
            kind, reason = model_kind(path), "by the files"
        prefix = "reference." if key == "reference" else ""
        if kind == "hf":
            if settings.variant is not None:
                raise MismatchError(f"'{path}' is no model package", "variant", settings.variant)
            return ResolvedModel(settings, kind, reason, locate_hf(path, tokenizer), prefix=prefix)
        components = {str(part): name for part, name in settings.components.items()}
        which = settings.variant, first_name(settings.execution_provider)
        files = locate(path, settings.onnx_file_name, tokenizer, tokenizer_candidates, components, *which)
        config, file = files.genai_config, files.directory / GENAI_CONFIG
        library = operators_library(config, file, is_trusted=settings.trust_remote_code)
        operators = None if library is None else inside(files.directory, library, "custom_ops_library")
        return ResolvedModel(settings, kind, reason, files, operators, prefix=prefix)
    except ModelError as error:
        is_of_reference = key == "reference" and error.field.partition(".")[0] in ReferenceConfig.model_fields
        if key == "model" or not (is_of_reference or error.field in ("model", "variant")):
            raise
        field = f"{key}.{error.field}" if is_of_reference else key
        text = str(error).replace(f"'{error.field}'", f"'{field}'", 1).replace("model path", f"'{key}':", 1)
        raise error.saying(text).about(field, error.value) from error


@dataclass(frozen=True)
class ResolvedModel:
    """A model as it will be opened: no "auto" is left that can be decided without a session.

    What takes time is computed when it is first read: providers (`ProviderError`), the spec (`ModelError`; the graph is
    read and dropped), the digest (about 1 s/GB).
    """

    settings: ModelSettings
    kind: Kind
    kind_reason: str
    files: ModelFiles
    custom_operators: Path | None = None
    """The library of operators that genai_config.json names: native code, of a package that is trusted."""

    prefix: str = ""
    """What precedes the keys of its settings in messages: "reference." for a reference."""

    is_compared: bool = False
    """Whether it is one of two compared models, whose rows of logits stay where they were computed."""

    session_providers: tuple[Provider, ...] = ()
    """The providers that a session was opened on, if not those of the settings."""

    parts_failure: str = ""
    """Why the trial of texts that are fed in parts failed; empty where it did not."""

    stands_for: ModelFiles | None = None
    """For an export that stands for a checkpoint, the checkpoint's files: they say how answers are searched and end."""

    edit_graph: Callable[[Any], None] | None = None
    """Edits the decoder's graph (onnx.ModelProto) in place whenever it is read; None leaves it unchanged."""

    def decoder_graph(self) -> Any:
        """The decoder's graph (onnx.ModelProto), its external weights on disk. Raises `ModelError`."""
        graph = load_graph(self.files.decoder)
        if self.edit_graph is not None:
            self.edit_graph(graph)
        return graph

    @property
    def place(self) -> tuple[Any, ...]:
        """What runs the model, and how."""
        if self.kind != "onnx":
            return (self.settings.model_dump(),)
        providers = [(provider.name, dict(provider.options)) for provider in self.providers]
        settings = self.settings.model_dump(exclude={"execution_provider", "provider_options", "variant"})
        return settings, self.files.variant, providers

    def patched(self, changes: Mapping[str, Any]) -> ResolvedModel:
        """The model with other, validated settings. Its files are searched again only where they name another model."""
        settings: ModelSettings = self.settings.model_copy(update=changes)
        if settings.location != self.settings.location:
            return replace(resolve(settings), prefix=self.prefix, is_compared=self.is_compared)
        return self if settings == self.settings else replace(self, settings=settings)

    @cached_property
    def providers(self) -> tuple[Provider, ...]:
        """The providers in order of preference; plugin libraries are registered first."""
        if self.session_providers:
            return self.session_providers
        check_distributions()
        register_libraries(self.settings.provider_libraries)
        return resolve_providers(
            self.settings.execution_provider,
            self.settings.provider_options,
            genai_config=self.files.genai_config,
            allow_cpu_fallback=self.settings.allow_cpu_fallback,
            setting=f"{self.prefix}execution_provider",
            variant=self.files.variant_provider,
        )

    def providers_of(self, encoder: MediaEncoderSpec) -> tuple[Provider, ...]:
        """The providers of an encoder: those that `engine.encoder_provider` names for it; else, unless the user has
        named the model's, those of its section in genai_config.json or its own in a package; else the decoder's."""
        asked: Any = self.settings.engine.encoder_provider
        if isinstance(asked, Mapping):
            asked = asked.get(encoder.part)
        section = next(section for section, part in MEDIA_SECTIONS.items() if part == encoder.part)
        is_free = not self.session_providers and self.settings.execution_provider is None
        ep = encoder.files.provider if is_free else ""
        own = resolve_providers(
            asked,
            genai_config=self.files.genai_config if is_free else None,
            allow_cpu_fallback=self.settings.allow_cpu_fallback,
            setting="engine.encoder_provider",
            section=section,
            variant=ep,
        )
        return self.providers if own[0].origin == "default" and ep != CPU else own

    @property
    def device(self) -> Device:
        """The device where the first provider keeps its values."""
        return self.providers[0].location

    @property
    def runtime(self) -> Runtime:
        """The library that runs the model."""
        return self._chosen_runtime[0]

    @property
    def runtime_reason(self) -> str:
        """Which rule chose the runtime."""
        return self._chosen_runtime[1]

    @cached_property
    def _chosen_runtime(self) -> tuple[Runtime, str]:
        return runtimes.choose(self)

    @cached_property
    def spec(self) -> DecoderSpec:
        """The decoder's interface, with a note on each decision that a user may not have expected."""
        return self.spec_of(self.decoder_graph())

    def spec_of(self, graph: Any) -> DecoderSpec:
        """The interface of `graph` (onnx.ModelProto), the decoder's or one that was made of it."""
        from olive_ext.model.spec.decoder_spec import read_spec  # imported here: it brings onnx along
        from olive_ext.model.spec.step_choices import as_opened, table_offset

        files, settings = self.files, self.settings
        for refuse in hooks("refuse_package").values():
            refuse(files.genai_config, files.directory)
        provided = {name for path in settings.engine.adapters for name in read_adapter(path).get_parameters()}
        try:
            with reading(files.decoder):
                spec = read_spec(graph, files.genai_config, settings.max_length, files.hf_config, provided)
                written = files.genai_config.get("model", {}).get("decoder", {}).get("session_options")
                sources = [written, settings.provider_options, settings.execution_provider]
                used = [dict(entry.options) for entry in self.providers] if table_offset(sources) is not None else []
                failure = self.parts_failure
                if spec.choices.lengths and settings.engine.graph == "untouched":
                    failure = "the graph, left as it is, takes a step's length for the text's"
                return as_opened(spec, failure, table_offset(used), table_offset(written))
        except ModelError as error:
            raise runtimes.with_alternative(error, files) from error

    @cached_property
    def processor_files(self) -> ModelFiles:
        """The files that prepare texts, pictures and sound. Those of a checkpoint on the hub are fetched."""
        return self.stands_for or (self.files if self.kind == "onnx" else with_configs(self.files))

    @cached_property
    def media(self) -> MediaSpec | None:
        """What a multimodal model takes besides text, else None. Encoders that are not understood are its `problem`."""
        if self.kind == "hf":
            return checkpoint.read_media(self.processor_files.hf_config)
        companions, missing = self.files.companions, missing_encoder(self.files)
        parts = {part: companions[part] for part in MEDIA_PARTS if part in companions}
        if not self.runtime.runs_graph or "embedding" not in companions or not (parts or missing):
            return None
        from olive_ext.model.spec.decoder_spec import read_embedding
        from olive_ext.model.spec.media_spec import read_media

        embedding = load_graph(companions["embedding"].graph)
        taken = embedding, read_embedding(embedding, self.spec.embeddings)
        configs = self.files.genai_config.get("model", {}), self.files.hf_config
        try:
            encoders = {part: (files, load_graph(files.graph)) for part, files in parts.items()}
            return replace(read_media(self.spec, taken, encoders, configs), problem=missing)
        except ModelError as error:
            return MediaSpec((), problem=str(error))

    @cached_property
    def source(self) -> tuple[SourceKind, TensorSpec] | None:
        """What an encoder-decoder's encoder takes, and its input; None for other models and whole packages."""
        if self.kind == "hf":
            return checkpoint.read_source(self.processor_files.hf_config)
        encoder = self.files.companions.get("encoder")
        if encoder is None or not self.runtime.runs_graph:
            return None
        from olive_ext.model.spec.encoder_spec import read_source

        return read_source(load_graph(encoder.graph), self.files.genai_config.get("model", {}))

    @cached_property
    def warms_encoders(self) -> bool:
        """Whether encoders of pictures and sound, and graphs around them, have few shapes, all run beforehand."""
        encoders = self.media.encoders if self.media is not None else ()
        is_speech = self.kind == "onnx" and self.source is not None and self.source[0] is SourceKind.FEATURES
        firsts = [self.providers[0], *(self.providers_of(encoder)[0] for encoder in encoders)]
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
        """The most tokens of a prompt in one step, before the device and the graph are tried, and why."""
        return decisions.choose_chunk_size(self.settings.engine, self.device.kind, self.buckets.steps != "all")

    def capture(self, spec: DecoderSpec) -> CapturePlan:
        """Whether decoding steps of `spec`, this model's as a form has changed it, are captured."""
        engine = self.settings.engine
        if engine.graph_capture != "auto" or not spec.is_paged or self.device.kind != "cuda":
            return CapturePlan(self.buckets.is_captured)
        problem = against_capture(spec) or ""
        if engine.graph == "untouched":
            problem = "the graph is to run as it is"
        elif self.is_compared:
            problem = "beside a reference, steps have any shape"
        return CapturePlan(not problem, not problem, problem)

    @cached_property
    def overlaps_steps(self) -> tuple[bool, str]:
        """Whether a decoding step begins before the last one is read on a device (ONNX Runtime's name), and why."""
        if self.buckets.steps == "all" or (self.spec.embeddings and self.warms_encoders):
            return False, "steps of few shapes take their tokens from the host"
        if self.settings.engine.overlaps_steps != "auto":
            return self.settings.engine.overlaps_steps, "engine.overlaps_steps"
        if self.device.kind == "cpu":
            return False, "auto: the host's work and the steps would share the CPU's cores"
        return True, f"auto: the {self.device.kind} device would wait while the host reads and plans"

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on what is not obvious: those of the spec, those on media, then why there are no buckets."""
        media = self.media.notes if self.media is not None else ()
        return (*self.spec.notes, *media, *filter(None, (self.buckets.note,)))

    @cached_property
    def digest(self) -> str | None:
        """Digest of all files that opening the model reads, LoRA adapters too; None for a name on the hub."""
        more = (self.custom_operators, *map(Path, self.settings.engine.adapters))
        read = [file for file in more if file is not None and file.is_file()]  # opening it says which is missing
        return model_digest(self.files, *read) if self.files.directory.is_dir() else None

    @cached_property
    def size(self) -> int | None:
        """Bytes on disk of the graphs and the weights; None for a name on the hub."""
        if self.kind == "onnx":
            return size_on_disk(self.files)
        return sum(file.stat().st_size for file in self.files.weights) or None

    @cached_property
    def decisions(self) -> tuple[Decision, ...]:
        """Every choice that opening the model takes, named as in `describe_execution`."""
        origins, runtime = self.files.origins, self.runtime
        with runtimes.failures_named(runtime, "decisions"):
            choices = tuple(runtime.decisions(self))
        return (
            Decision("kind", self.kind, self.kind_reason),
            Decision("runtime", runtime.name, self.runtime_reason),
            Decision("model", self.name, origins.get("decoder", "")),
            *([Decision("variant", self.files.variant, origins["variant"])] if "variant" in origins else ()),
            Decision("tokenizer", self.files.tokenizer, origins.get("tokenizer", "")),
            *choices,
        )

    @property
    def name(self) -> str:
        """The decoder's file; a Hugging Face model as the user named it."""
        return str(self.files.decoder) if self.kind == "onnx" else self.settings.model

"""Resolves one model as an evaluation would, and notes each decision with its reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from olive_ext.check.findings import Findings, Section
from olive_ext.check.verify import verify_graphs
from olive_ext.config import EvaluationConfig

if TYPE_CHECKING:
    from olive_ext.model import DecoderSpec, KvTensor, ModelFiles, Provider

# ONNX's numbers of element types that caches and logits come in (onnx.TensorProto.DataType).
_ELEM_TYPES = {1: "float32", 2: "uint8", 3: "int8", 10: "float16", 16: "bfloat16", 17: "float8e4m3fn"}


def check_model(config: EvaluationConfig, *, verify: bool = False, handed_over: Any = None) -> Findings:
    """Files, providers, KV layout, tokenizer, scoring head and what "auto" became; what goes wrong is a problem.

    `handed_over` is the provider that Olive's accelerator names. With `verify` the model is also run, see
    `verify_graphs`. The tasks are not looked at.
    """
    findings = Findings()
    files: ModelFiles | None = None
    with findings.noting_problems():
        files = _check_files(config, findings.section("Model"))
    providers: tuple[Provider, ...] = ()
    with findings.noting_problems():
        providers = _check_providers(config, files, handed_over, findings.section("Providers"))
    if files is None:
        if verify and not findings.problems:
            findings.problems.append("there is nothing to verify: a Hugging Face model has no ONNX graph")
        return findings
    spec: DecoderSpec | None = None
    if _check_runtime(config, files, findings.section("Runtime")):
        if verify:
            findings.problems.append("there is nothing to verify: onnxruntime-genai runs the graphs as they are")
    else:
        with findings.noting_problems():
            spec = _check_decoder(config, files, findings)
    with findings.noting_problems():
        _check_tokenizer(files, findings.section("Tokenizer"))
    if spec is not None and providers:
        with findings.noting_problems():
            _check_autos(config, spec, providers, findings.section("Engine"))
    if verify and not findings.problems:
        with findings.noting_problems():
            verify_graphs(config, findings.section("Verification"))
    return findings


def _check_files(config: EvaluationConfig, section: Section) -> ModelFiles | None:
    """None for a Hugging Face model, which transformers resolves by itself."""
    from olive_ext.model import locate, size_on_disk

    written = config.model
    kind, rule = _kind(config)
    section.add("kind", kind, rule)
    if kind == "hf":
        section.add("path", written.path, "runs through lm-eval's Hugging Face backend")
        return None
    files = locate(written.path, written.onnx_file_name, config.tokenizer)
    section.add("decoder", files.decoder, files.origins.get("decoder", ""))
    section.add("directory", files.directory)
    section.add("genai_config", "found" if files.genai_config else "none", files.origins.get("genai_config", ""))
    section.add("size on disk", f"{size_on_disk(files) / 2**20:.1f} MiB")
    return files


def _kind(config: EvaluationConfig) -> tuple[str, str]:
    """ "onnx" or "hf", and which setting said so."""
    from olive_ext.model import model_kind

    if config.model.kind != "auto":
        return config.model.kind, "model.kind"
    if config.model_class is not None:
        return "hf" if config.model_class == "hf" else "onnx", "model_class"
    return model_kind(config.model.path), "told by the files"


def _check_providers(
    config: EvaluationConfig, files: ModelFiles | None, handed_over: Any, section: Section
) -> tuple[Provider, ...]:
    from olive_ext.model import check_distributions, register_libraries, resolve_providers

    check_distributions()
    register_libraries(config.provider_libraries)
    providers = resolve_providers(
        config.execution_provider,
        config.provider_options,
        handed_over=handed_over,
        genai_config=files.genai_config if files else None,
        allow_cpu_fallback=config.allow_cpu_fallback,
    )
    for provider in providers:
        options = ", ".join(f"{key}={value}" for key, value in provider.options.items())
        section.add(provider.name, f"memory: {provider.device}{f'; {options}' if options else ''}", provider.origin)
    return providers


def _check_runtime(config: EvaluationConfig, files: ModelFiles, section: Section) -> bool:
    """Whether onnxruntime-genai runs the model: then its graphs are not ours to read."""
    from olive_ext.engine.runners.runtime import choose_runtime

    runtime, origin = choose_runtime(config.engine, files)
    section.add("runtime", runtime, origin)
    return runtime == "genai"


def _check_decoder(config: EvaluationConfig, files: ModelFiles, findings: Findings) -> DecoderSpec:
    from olive_ext.engine.runners.ort.adapters import Adapters
    from olive_ext.engine.runners.ort.head import with_head
    from olive_ext.graph.onnx_file import load_graph
    from olive_ext.model.decoder_spec import read_spec

    graph = load_graph(files.decoder)
    adapters = Adapters(config.engine.adapters)
    spec = read_spec(graph, files.genai_config, config.max_length, files.hf_config, adapters.names)
    section = findings.section("Decoder")
    section.add("context length", spec.context_length, "max_length" if config.max_length else "")
    section.add("vocabulary", spec.vocab_size)
    section.add("logits", f"{spec.logits.name}, {_elem_type(spec.logits.elem_type)}")
    for name, layout in kv_layout(spec.kv):
        section.add(name, layout)
    section.add("KV cache", "updated in place" if spec.is_kv_in_place else "returned grown at every step")
    for note in spec.notes:
        section.add("note", note)
    head = with_head(graph, spec)
    section = findings.section("Scoring head")
    is_untouched = config.engine.graph == "untouched"
    section.add("graph", config.engine.graph, "engine.graph")
    section.add("kind", head.kind, head.reason if not is_untouched else f"not in use; {head.reason}")
    return spec


def kv_layout(kv: Sequence[KvTensor]) -> Iterator[tuple[str, str]]:
    """(which layers, their layout), one entry for neighbouring layers that are alike. Keys and values alternate."""
    layers = [(index // 2, _kv_tensor(tensor)) for index, tensor in enumerate(kv)]
    per_layer = [(layer, " / ".join(dict.fromkeys(text for _, text in group))) for layer, group in _by_layer(layers)]
    for layout, run in groupby(per_layer, key=lambda item: item[1]):
        numbers = [layer for layer, _ in run]
        name = f"layer {numbers[0]}" if len(numbers) == 1 else f"layers {numbers[0]}-{numbers[-1]}"
        yield name, layout


def _by_layer(layers: list[tuple[int, str]]) -> Iterator[tuple[int, list[tuple[int, str]]]]:
    for layer, group in groupby(layers, key=lambda item: item[0]):
        yield layer, list(group)


def _kv_tensor(tensor: KvTensor) -> str:
    return f"{tensor.heads} heads x {tensor.head_size}, {_elem_type(tensor.elem_type)}"


def _elem_type(number: int) -> str:
    return _ELEM_TYPES.get(number, f"ONNX element type {number}")


def _check_tokenizer(files: ModelFiles, section: Section) -> None:
    from olive_ext.text.tokenizer import load_tokenizer

    section.add("place", files.tokenizer, files.origins.get("tokenizer", ""))
    tokenizer = load_tokenizer(files.tokenizer)
    section.add("class", type(tokenizer.hf).__name__)
    section.add("tokens", len(tokenizer.hf))
    section.add("BOS, EOS", f"{tokenizer.bos_token_id}, {tokenizer.eos_token_id}")
    section.add("chat template", "yes" if getattr(tokenizer.hf, "chat_template", None) else "no")


def _check_autos(config: EvaluationConfig, spec: DecoderSpec, providers: Sequence[Provider], section: Section) -> None:
    """What the engine would choose now, on this machine."""
    from olive_ext.engine.runners.bucket_trial import Wanted
    from olive_ext.engine.runners.num_slots import choose_num_slots
    from olive_ext.engine.runners.ort.kv.base import Device
    from olive_ext.engine.runners.shape_buckets import FORMS
    from olive_ext.engine.scheduling.overlapped_steps import choose_overlap

    engine = config.engine
    batch_size = config.batch_size if isinstance(config.batch_size, int) else None
    device = Device(providers[0].device, int(providers[0].options.get("device_id", 0)))
    num_slots, origin = choose_num_slots(engine, batch_size, spec, device)
    section.add("num_slots", num_slots, origin)
    section.add("chunk_size", engine.chunk_size, "engine.chunk_size")
    is_auto = engine.num_threads == "auto"
    section.add("num_threads", "ONNX Runtime's default" if is_auto else engine.num_threads, "engine.num_threads")
    shapes = Wanted.of(engine, providers[0], spec, exposes_rows=config.reference is not None)
    section.add("shapes of steps", FORMS[shapes.steps], shapes.note or "engine.shapes")
    is_ahead, why = choose_overlap(engine, providers[0].device, has_any_shape=shapes.steps == "none")
    section.add("decode_ahead", is_ahead, why)

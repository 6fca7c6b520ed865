"""What a multimodal package takes besides text: encoders, features, placeholders, processors, positions and budgets.

Knows no session.
"""

from __future__ import annotations

from collections.abc import Callable

from olive_ext.engine.opening import item_limit
from olive_ext.engine.runners.ort.media_encoder import FEATURE_BYTES
from olive_ext.media import MediaProcessor
from olive_ext.model import ResolvedModel
from olive_ext.model.decisions import choose_encoder_rows
from olive_ext.model.media_types import MediaEncoderSpec
from olive_ext.text.tokenizer import Tokenizer


def add_media(model: ResolvedModel, tokenizer: Tokenizer | None, add: Callable[..., None]) -> None:
    """Adds what is known, and what the export computes otherwise than its original. Without a `tokenizer`, where it
    cannot be loaded, the texts of placeholders are left out. Raises `ModelError` for an encoder
    without a processor, and `ConfigError` for settings that allow no item."""
    media = model.media
    if media is None:
        return
    if media.problem:
        add("refused", media.problem, "text runs without encoders")
    processors = MediaProcessor(media, model.files)
    for encoder in media.encoders:
        _add_encoder(model, encoder, processors, tokenizer, add)
    limit = item_limit(model, model.chunk_size[0])
    if problem := processors.problem_of(limit):
        add("refused", problem, "text needs no such step")
    processors.check_fixed(limit)
    add("tokens of an item", limit.tokens or "any number", limit.reason)
    if media.encoders:
        add("positions", "time, height, width" if media.has_rotary_grid else "one number for each token")
        add("per-layer inputs", "yes" if "per_layer_inputs" in model.spec.embeddings else "no")
        add("features kept", f"{FEATURE_BYTES >> 20} MiB on the device")
    for note in media.notes:
        add("note", note)


def _add_encoder(
    model: ResolvedModel,
    encoder: MediaEncoderSpec,
    processors: MediaProcessor,
    tokenizer: Tokenizer | None,
    add: Callable[..., None],
) -> None:
    name, provider, real = encoder.modality.value, model.providers_of(encoder)[0], encoder.real_rows
    add(f"{name} encoder", encoder.files.graph, model.files.origins.get(encoder.part, ""))
    add(f"{name} provider", provider.name, provider.origin)
    inputs = ", ".join(f"{tensor.name} {list(tensor.shape)}" for tensor in encoder.inputs)
    add(f"{name} inputs", inputs)
    add(f"{name}s in a run", *_in_a_run(model, encoder))
    shown = ", ".join(f"{output.name} {list(output.shape)}" for output in encoder.outputs)
    add(f"{name} features", shown, f"their rows are cut by '{real.name}'" if real is not None else "")
    text = "" if tokenizer is None else f" {tokenizer.token_text(encoder.placeholder)!r}"
    add(f"{name} placeholder", f"{encoder.placeholder}{text}")
    processor, file = processors.processor_of(encoder.modality)
    add(f"{name} processor", type(processor).__name__, str(file))


def _in_a_run(model: ResolvedModel, encoder: MediaEncoderSpec) -> tuple[str, str]:
    """How many items the encoder is given together, and why."""
    rows = choose_encoder_rows(model.settings, model.providers_of(encoder)[0].place)
    if encoder.one_by_one or rows == 1:
        return "one", encoder.one_by_one or "on the CPU, or 'deterministic': 'engine.encoder_batch_rows' asks for more"
    return f"up to {rows} rows of features", "where several, tried when the second comes, are what each is alone"

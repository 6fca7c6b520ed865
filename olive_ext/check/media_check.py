"""What a model takes besides text: encoders with their features, processors and budgets, and of an encoder-decoder what
its decoder begins with. Knows no session.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from olive_ext.errors import listed
from olive_ext.model import ResolvedModel
from olive_ext.model.decisions import choose_encoder_rows
from olive_ext.model.files.package_config import named_ids
from olive_ext.model.spec.media_types import MediaEncoderSpec
from olive_ext.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from olive_ext.media import MediaProcessor
    from olive_ext.session.texts import Texts


def add_media(model: ResolvedModel, tokenizer: Tokenizer | None, add: Callable[..., None]) -> None:
    """Adds what is known, and what the export computes otherwise than its original. Without a `tokenizer`, where it
    cannot be loaded, the texts of placeholders are left out. Raises `ModelError` for an encoder
    without a processor, and `ConfigError` for settings that allow no item."""
    media = model.media
    if media is None:
        return
    from olive_ext.engine.media.encoder import FEATURE_BYTES
    from olive_ext.engine.opening import item_limit
    from olive_ext.media import MediaProcessor

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
    rows = choose_encoder_rows(model.settings, model.providers_of(encoder)[0].location)
    if encoder.one_by_one or rows == 1:
        return "one", encoder.one_by_one or "on the CPU, or 'deterministic': 'engine.encoder_batch_rows' asks for more"
    return f"up to {rows} rows of features", "where several, tried when the second comes, are what each is alone"


def add_source(texts: Texts, add: Callable[..., None]) -> None:
    """Adds what an encoder-decoder's decoder begins with, and of a model of speech windows of sound, languages and what
    is never said. Raises `ModelError` for an extractor that does not fit, and `ConfigError` for a language or a
    task that the model does not have, and where no configuration says what its decoder begins with."""
    encoding = texts.encoding
    if encoding is None:
        return
    if (sound := encoding.sound) is not None:
        files = texts.model.processor_files
        add("sound", f"{sound.rate:,} samples a second", "WAV files, or samples at that rate")
        add("windows", f"{sound.seconds:g} s", "longer sound is answered in windows, and not scored")
        add("languages", listed(named_ids("lang_to_id", files)) or "none named", "'language'")
        add("tasks", listed(named_ids("task_to_id", files)) or "none named", "'speech_task'")
        suppressed = encoding.suppressed
        never = f"{len(suppressed.everywhere)} tokens, {len(suppressed.at_first)} more as the first"
        add("never generated", never, "suppress_tokens, begin_suppress_tokens")
    begins = texts.tokenizer.decode(encoding.begin(), skip_special_tokens=False)
    add("decoder begins with", begins, "then comes a task's text")

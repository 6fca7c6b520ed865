"""What a user of an encoder-decoder must know: what the decoder begins with, and of a model of speech windows of sound,
languages and what is never said. Knows no session.
"""

from __future__ import annotations

from collections.abc import Callable

from olive_ext.errors import listed
from olive_ext.model import ResolvedModel
from olive_ext.model.generation_config import named_ids
from olive_ext.text.encoder_decoder import read_encoding
from olive_ext.text.tokenizer import Tokenizer


def add_source(model: ResolvedModel, tokenizer: Tokenizer, add: Callable[..., None]) -> None:
    """Adds what is known. Raises `ModelError` for an extractor that does not fit, and `ConfigError` for a language or a
    task that the model does not have, and where no configuration says what its decoder begins with."""
    encoding = None if model.source is None else read_encoding(tokenizer, model, model.source)
    if encoding is None:
        return
    if (sound := encoding.sound) is not None:
        files = model.processor_files
        add("sound", f"{sound.rate:,} samples a second", "WAV files, or samples at that rate")
        add("windows", f"{sound.seconds:g} s", "longer sound is answered in windows, and not scored")
        add("languages", listed(named_ids("lang_to_id", files)) or "none named", "'language'")
        add("tasks", listed(named_ids("task_to_id", files)) or "none named", "'speech_task'")
        suppressed = encoding.suppressed
        never = f"{len(suppressed.everywhere)} tokens, {len(suppressed.at_first)} more as the first"
        add("never generated", never, "suppress_tokens, begin_suppress_tokens")
    begins = tokenizer.decode(encoding.begin(), skip_special_tokens=False)
    add("decoder begins with", begins, "then comes a task's text")


def refuse_texts(model: ResolvedModel, tokenizer: Tokenizer) -> None:
    """Raises where the configurations of a generation, or the chat template, are wrong."""
    from olive_ext.text.bounded_templates import refuse_template
    from olive_ext.text.generation_bounds import read_stop_ids

    read_stop_ids(tokenizer, model.processor_files)
    if isinstance(tokenizer.hf.chat_template, str) and tokenizer.has_chat_template:
        refuse_template(tokenizer)

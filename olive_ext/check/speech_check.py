"""What a user of a model of speech must know: windows of sound, what the decoder begins with, what is never said. Knows
no session.
"""

from __future__ import annotations

from collections.abc import Callable

from olive_ext.errors import listed
from olive_ext.media.sound import SoundProcessor
from olive_ext.model import ResolvedModel
from olive_ext.model.generation_config import named_ids, read_suppressed
from olive_ext.model.types import SourceKind
from olive_ext.text.generation_bounds import read_start
from olive_ext.text.tokenizer import Tokenizer


def add_speech(model: ResolvedModel, tokenizer: Tokenizer, add: Callable[..., None]) -> None:
    """Adds what is known. Raises `ModelError` for an extractor that does not fit, and `ConfigError` for a language or a
    task that the model does not have."""
    if model.source is None or model.source[0] is not SourceKind.FEATURES:
        return
    files, settings = model.processor_files, model.settings
    sound = SoundProcessor(files, model.source[1])
    add("sound", f"{sound.rate:,} samples a second", "WAV files, or samples at that rate")
    add("windows", f"{sound.seconds:g} s", "longer sound is answered in windows, and not scored")
    start = read_start(tokenizer, files, settings.language, settings.speech_task)
    begins = tokenizer.decode(start, skip_special_tokens=False) or "nothing: give the first tokens as ids"
    add("decoder begins with", begins, "then comes a task's text")
    add("languages", listed(named_ids("lang_to_id", files)) or "none named", "'language'")
    add("tasks", listed(named_ids("task_to_id", files)) or "none named", "'speech_task'")
    suppressed = read_suppressed(files)
    never = f"{len(suppressed.everywhere)} tokens, {len(suppressed.at_first)} more as the first"
    add("never generated", never, "suppress_tokens, begin_suppress_tokens")

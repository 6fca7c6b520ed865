"""Where a generation begins and ends: a decoder's first tokens, the model's stop ids, the request's stop strings. Also
the text of an answer while it grows: the part that no later token changes and no stop removes.

A stop string may begin and end inside tokens. Special tokens count while stops are searched ("<|im_end|>" may be a
stop), and are left out of the returned text. Knows no engine.
"""

from __future__ import annotations

import logging
import math
import re
import sys
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from olive_ext.errors import ConfigError, UnsupportedError, listed
from olive_ext.model.files.package_config import (
    GenerationConfig,
    first_named,
    generation_files,
    is_same,
    named_ends,
    named_ids,
    read_json,
)
from olive_ext.model.spec.checkpoint import read_length
from olive_ext.model.types import ModelFiles
from olive_ext.session.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

INCOMPLETE = "\ufffd"
"""What a tokenizer gives for bytes that are not a whole character; at the end of a text the rest may follow."""

_MAX_HELD = 16
"""More held tokens than any character has: their bytes will never become one."""


def too_long(setting: str, value: int, max_length: int) -> str:
    """Why `value` new tokens, which `setting` asks for, do not leave room for a prompt in a context of `max_length`;
    empty where they do. All entries use these words."""
    if 0 < value < max_length:
        return ""
    bounds = "must be positive and" if value < 1 else "must be"
    return (
        f"'{setting}' = {value} leaves no room for a prompt: it {bounds} below the model's max_length of {max_length}"
    )


@dataclass(frozen=True)
class StopIds:
    """The token ids that end every generation of a model, the file that names them, and its settings of search."""

    ids: frozenset[int]
    file: str
    search: Mapping[str, Any]
    """As `read_search`."""

    unused: Mapping[int, str]
    """Ids that only other files of the folder, or its tokenizer, name as ends, each with the first that names it."""

    @property
    def facts(self) -> dict[str, Any]:
        """JSON-ready, for the facts of an execution."""
        ids = {"stop_ids": sorted(self.ids), "unused_stop_ids": sorted(self.unused)}
        return {**ids, "stop_ids_file": self.file, "search": self.search}

    def described(self, tokenizer: Tokenizer, ids: frozenset[int] | None = None) -> str:
        """The ids, or some of them, with their texts: "2 '</s>'"."""
        shown = sorted(self.ids if ids is None else ids)
        return listed(f"{number} {tokenizer.token_text(number)!r}" for number in shown) or "no token"


def read_stop_ids(files: ModelFiles, eos: int | None, start: Sequence[int] = ()) -> StopIds:
    """The ids at which the model's own runtime stops. onnxruntime-genai reads genai_config.json alone; transformers
    reads generation_config.json, else config.json. Where the file names none, it is `eos`, the tokenizer's. `start`:
    an encoder-decoder's, by `read_start`."""
    ends = {**named_ends(files), "the tokenizer": () if eos is None else (eos,)}
    file, ids = next(iter(ends.items()))
    named = {token: other for other in reversed(ends) for token in ends[other] if token not in ids}
    search = {**read_search(files), **({DECODER_START: [*start]} if start else {})}
    return StopIds(frozenset(ids), file, search, named)


_SEARCH = {
    "repetition_penalty": 1.0, "min_length": 0, "no_repeat_ngram_size": 0, "num_beams": 1, "guidance_scale": 1.0,
    "encoder_repetition_penalty": 1.0,
}  # fmt: skip

_DRAWS = {
    "temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0, "top_h": 1.0,
}  # fmt: skip
"""How tokens are drawn, with the defaults of transformers and onnxruntime-genai. `top_k` 0 draws from all tokens."""

_BEAMS = {"length_penalty": 1.0, "early_stopping": False, "num_beam_groups": 1, "diversity_penalty": 0.0}
"""How beams are ranked, with transformers' defaults; onnxruntime-genai's `early_stopping` is true by default."""

_TRANSFORMERS_SEARCH = (
    "suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias", "forced_bos_token_id",
    "forced_eos_token_id", "min_new_tokens", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty",
    "penalty_alpha", "watermarking_config", "stop_strings", "token_healing", "dola_layers", "force_words_ids",
    "constraints",
)  # fmt: skip
"""Keys of generation_config.json that change greedy answers by being there at all."""

_LIMITS = ("max_length", "max_new_tokens", "max_time")
"""What only ends answers: more, or none, is no difference."""

_OF_ANY_FILE = ("suppress_tokens", "begin_suppress_tokens")
"""Keys of any configuration that decide which tokens an encoder-decoder's answers have."""

DECODER_START = "decoder_input_ids"
"""The first tokens of an encoder-decoder's answers, by transformers' name."""


def read_search(files: ModelFiles) -> dict[str, Any]:
    """How a model's own runtime searches answers, beside its stop ids, by genai_config.json, else by
    generation_config.json, else (as transformers) by config.json: penalties, beams, whether tokens are drawn,
    suppressed tokens, the context, and a `max_length` that is not the context (onnxruntime-genai 0.14 refuses a longer
    one, and takes 0 for the context; transformers goes by `max_new_tokens` where there is one)."""
    config = next(iter(() if files.genai_config else generation_files(files)), None)
    written = {} if config is None else read_json(config, GenerationConfig)
    section, model = files.genai_config.get("search") or written, files.genai_config.get("model") or {}
    context = model.get("context_length") or read_length(files.hf_config)
    longest = None if "max_new_tokens" in written else section.get("max_length")
    if longest and context and not files.genai_config:
        longest = min(longest, context)
    has_encoder = bool(files.hf_config.get("is_encoder_decoder") or model.get("encoder"))
    is_drawn = bool(section.get("do_sample")) and section.get("top_k") != 1 and section.get("temperature") != 0
    draws = _DRAWS if is_drawn else {}
    search = {name: section.get(name, default) for name, default in _SEARCH.items()}
    beams = {**_BEAMS, "early_stopping": bool(files.genai_config)} if search["num_beams"] != 1 else {}
    named = {name: value for name, value in written.items() if value or name.startswith("forced_")}  # 0 is a token
    named |= {name: sorted(named[name]) for name in _OF_ANY_FILE if name in named}
    return {
        **search,
        **{name: section.get(name, default) for name, default in beams.items()},
        "do_sample": is_drawn,
        **{name: default if section.get(name) is None else section[name] for name, default in draws.items()},
        "context_length": context,
        **{name: named[name] for name in (*_TRANSFORMERS_SEARCH, *_LIMITS) if name in named},
        "max_length": None if longest in (0, context) else longest,
        **{name: sorted(ids) for name in _OF_ANY_FILE if has_encoder and (ids := first_named(name, files))},
        **{name: value for name, value in written.items() if (name, value) == ("cache_implementation", "quantized")},
    }


def other_search(reference: Mapping[str, Any], candidate: Mapping[str, Any]) -> tuple[str, ...]:
    """How a candidate's runtime searches otherwise than its reference's, by `read_search`, where answers change. It may
    allow longer answers and draw no tokens; a shorter context is a finding of its own."""
    written = {name: value for name, value in reference.items() if value is not None}
    context = {"max_length": written["context_length"]} if "context_length" in written else {}
    known = {**_SEARCH, **context, **written}  # records and baselines of earlier versions have fewer
    most = dict.fromkeys(_LIMITS, math.inf) | {"max_length": candidate.get("context_length") or math.inf}

    def is_other(name: str) -> bool:
        value, other = candidate.get(name), known.get(name)
        if name in (*_DRAWS, *_BEAMS, DECODER_START) and name not in reference:
            return False
        if name not in candidate:  # an encoder-decoder's answers show which tokens it lacks
            return name not in _OF_ANY_FILE or DECODER_START not in candidate
        if name in most and value is not None and known.get(name, math.inf) <= value <= most[name]:
            return False
        if name == "max_new_tokens" and value is not None and value >= most["max_length"]:
            return False
        return value is not None and (name, value) != ("do_sample", False) and not is_same(value, other)

    lost = [name for name in _TRANSFORMERS_SEARCH if name in written and name not in candidate]
    others = [name for name in (*candidate, *lost) if name != "context_length" and is_other(name)]
    return tuple(f"{name} {candidate.get(name, 'none')} for {known.get(name, 'none')}" for name in others)


WHISPER_START = "<|startoftranscript|>"


def read_start(
    tokenizer: Tokenizer, files: ModelFiles, language: str | None = None, task: str | None = None
) -> tuple[int, ...]:
    """The tokens with which an encoder-decoder's decoder begins: `decoder_start_token_id` of its configurations (of
    Whisper, whose packages may lack it, the tokenizer's own), then those of a `language` and a `task`, else those that
    `forced_decoder_ids` names for the first places, without a gap. Raises `ConfigError` for a language or a task that
    the model does not name."""
    start = list(first_named("decoder_start_token_id", files))
    if not start and WHISPER_START in tokenizer.hf.get_vocab():
        start = [tokenizer.hf.convert_tokens_to_ids(WHISPER_START)]
    if language is not None or task is not None:
        return (*start[:1], *_spoken_tokens(files, language, task or "transcribe"))
    forced = {int(position): token for position, token in first_named("forced_decoder_ids", files)}
    while start and isinstance(token := forced.get(len(start)), int):
        start.append(token)
    if len(start) == 1 and named_ids("lang_to_id", files):
        logger.warning("the model knows several languages, and none is given: it says the language itself ('language')")
    return tuple(start)


def _spoken_tokens(files: ModelFiles, language: str | None, task: str) -> list[int]:
    """Whisper's tokens for a language and a task, and for an answer without timestamps, as transformers' `generate`
    puts them."""
    languages, tasks = named_ids("lang_to_id", files), named_ids("task_to_id", files)
    if not languages:
        raise UnsupportedError("it is for models whose generation_config.json has 'lang_to_id'", "language")
    names = {name.strip("<|>"): token for name, token in languages.items()}
    if language is None or language.strip("<|>").lower() not in names:
        raise ConfigError(f"give one of {listed(names, 120)}", "language", language)
    if task not in tasks:
        raise ConfigError(f"this model names {listed(tasks) or 'none'}", "speech_task", task)
    return [names[language.strip("<|>").lower()], tasks[task], *first_named("no_timestamps_token_id", files)]


class StopChecker:
    """Searches one growing list of tokens for `stops`; serves as `Generation.is_finished`.

    Each call decodes only the tokens since the last whole character and the few before them that give the decoder its
    context, so that n tokens cost O(n).

        tokens    ... [context][fresh]           window: both, decoded together
        text      tail ........[stable][held]    held: an unfinished character, seen again with the next token
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self.stops = tuple(stops)
        self._tail_length = max((len(stop) for stop in stops), default=1) - 1
        self._restart()

    def _restart(self) -> None:
        self._begin = 0  # of the window
        self._read = 0  # tokens whose text is in the tail
        self._context = ""  # text of tokens[begin:read]
        self._tail = ""

    def __call__(self, tokens: Sequence[int]) -> bool:
        """Whether the text of `tokens` contains a stop. To be called after each token."""
        if len(tokens) < self._read:  # another sequence, or this one generated anew
            self._restart()
        fresh = self._decode(tokens[self._begin :])[len(self._context) :]
        stable = fresh.rstrip(INCOMPLETE)
        searched = self._tail + stable
        if any(stop in searched for stop in self.stops):
            return True
        if stable == fresh or len(tokens) - self._read > _MAX_HELD:
            self._begin, self._read = self._read, len(tokens)
            self._context = self._decode(tokens[self._begin : self._read]).rstrip(INCOMPLETE)
            self._tail = searched[len(searched) - min(len(searched), self._tail_length) :]
        return False

    def text(self, tokens: Sequence[int]) -> str:
        """The text of `tokens` without special tokens, cut exactly before the first stop."""
        text, rest = self._decode(tokens), ""
        cut = self._find(text)
        if cut < len(text):
            tokens, rest = self._split(tokens, text, cut)
        shown = self._tokenizer.decode(tokens) + rest
        return shown[: self._find(shown)]

    def _split(self, tokens: Sequence[int], text: str, cut: int) -> tuple[Sequence[int], str]:
        """The tokens whose text ends at or before `cut`, and the text between their end and `cut`."""
        counts = range(len(tokens) + 1)
        count = bisect_right(counts, cut, key=lambda number: len(self._decode(tokens[:number]))) - 1
        begun = self._decode(tokens[:count])
        while count and not text.startswith(begun):  # it ends within a character
            count -= 1
            begun = self._decode(tokens[:count])
        is_special = count < len(tokens) and tokens[count] in self._tokenizer.special_ids
        return tokens[:count], "" if is_special else text[len(begun) : cut]

    def _find(self, text: str) -> int:
        return min((at for at in map(text.find, self.stops) if at >= 0), default=len(text))

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""A token that is one byte: the decoder takes a run of these for characters only where the whole run is valid."""


class TextStream:
    """Gives the pieces of one growing list of tokens; all of them are the beginning of `StopChecker.text`.

    tokens    ... [context][held]     decoded together, for what the held ones alone would lose; they are held while
                                      their text may begin a stop, has one, or ends with a part of a character

    What is held is decoded again when an eighth more is held, so that n tokens cost O(n) where most are held for long.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._begin = 0  # of the context
        self._read = 0  # tokens whose text was given
        self._next = 0 if tokenizer.has_stable_text else sys.maxsize  # tokens at which it is tried again

    def piece(self, tokens: Sequence[int]) -> str:
        """The part of the text of `tokens` that is certain and was not given before. To be called after each token."""
        if len(tokens) < self._next:
            return ""
        window = tokens[self._begin :]
        text = self._held(window, skips=True)
        searched = (text, self._held(window, skips=False)) if self._stops else (text,)
        is_open = any(held.endswith(INCOMPLETE) or self._may_stop(held) for held in searched)
        if not text or is_open or self._ends_in_bytes(window):
            text = ""
        else:
            self._begin, self._read = self._read, len(tokens)
        self._next = len(tokens) + 1 + (len(tokens) - self._read) // 8
        return text

    def _held(self, window: Sequence[int], *, skips: bool) -> str:
        decode = partial(self._tokenizer.decode, skip_special_tokens=skips)
        return decode(window)[len(decode(window[: self._read - self._begin])) :]

    def _may_stop(self, text: str) -> bool:
        """Whether a stop is in the text, or may begin at its end."""
        ends = [(stop, range(max(0, len(text) - len(stop) + 1), len(text))) for stop in self._stops]
        return any(stop in text or any(stop.startswith(text[at:]) for at in begins) for stop, begins in ends)

    def _ends_in_bytes(self, tokens: Sequence[int]) -> bool:
        tokenizer = self._tokenizer
        last = next((token for token in reversed(tokens) if token not in tokenizer.special_ids), None)
        return last is not None and _BYTE.fullmatch(str(tokenizer.hf.convert_ids_to_tokens(last))) is not None

"""The only door to transformers' tokenizers: text to token ids and back, chat templates, special ids; and bounds: of
files, texts and ids, and how many tokens a model has rows for.

Follows lm-eval's HFLM in when special tokens are added. Knows no request and no engine.
"""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from olive_ext.engine.requests import Ids
from olive_ext.errors import (
    ANY_FAILURE,
    ConfigError,
    ModelError,
    TaskError,
    UnsupportedError,
    one_line,
    panics_as_errors,
    special_kind,
    why_not_loaded,
)
from olive_ext.model import ResolvedModel
from olive_ext.model.files.content import load_graph

logger = logging.getLogger(__name__)

_TOGETHER = 256
"""Texts that are encoded at once: enough for all cores, few enough for what the library notes of each token."""

LONGEST_TEXT = 2**24
"""Characters of a text: some four million tokens, which take a tokenizer gigabytes."""

LARGEST_ID = 2**22 - 1
"""The largest id of a token in a tokenizer's files; the largest vocabulary that is published has a million."""

LARGEST_FILE = 2**28
"""Bytes of a file of a tokenizer; the largest that are published have 35 million."""

_FILES = (".json", ".jinja", ".model", ".txt")


def _refuse_files(folder: Path) -> None:
    """Raises `ModelError` for a file of a tokenizer in `folder` that is a pipe or a device, or too large."""
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        if file.suffix not in _FILES or file.is_dir():
            continue
        if kind := special_kind(file):
            raise ModelError(f"'{file}' is {kind}: a tokenizer consists of files", code="no_access")
        if file.is_file() and file.stat().st_size > LARGEST_FILE:
            raise ModelError(
                f"'{file}' has {file.stat().st_size:,} bytes: at most {LARGEST_FILE:,} (LARGEST_FILE)", code="too_large"
            )


class Rows(NamedTuple):
    """How many tokens a model has a row for, where that is known."""

    embedding: int | None = None
    vocabulary: int | None = None
    """The number of the model's logits."""

    @classmethod
    def of(cls, model: ResolvedModel) -> Rows:
        """As the graphs show it; of a model that another library runs, as its configuration says."""
        if not model.runtime.runs_graph:
            config = model.files.genai_config.get("model", {}) if model.kind == "onnx" else model.files.hf_config
            size = config.get("text_config", config).get("vocab_size")
            return cls(size, size)
        spec, companions = model.spec, model.files.companions
        rows = spec.embedding_rows
        if spec.embeddings and "embedding" in companions:
            from olive_ext.model.spec.attention import embedding_rows
            from olive_ext.model.spec.decoder_spec import read_embedding

            graph = load_graph(companions["embedding"].graph)
            tokens = read_embedding(graph, spec.embeddings).inputs[0]
            rows = embedding_rows(graph.graph, tokens.tensor.name)
        return cls(rows or spec.vocab_size, spec.vocab_size)


def refuse_named(ids: Iterable[int], rows: int | None, key: str) -> None:
    """Raises `ModelError` for an id under `key` of a configuration that is none of the model's `rows`."""
    last = LARGEST_ID if rows is None else rows - 1
    for number in ids:
        if not 0 <= number <= last:
            raise ModelError(f"'{key}' names the token {number}: give one from 0 to {last}")


def load_tokenizer(
    where: str,
    *,
    add_bos_token: bool | None = None,
    prefix_token_id: int | None = None,
    trust_remote_code: bool = False,
) -> Tokenizer:
    """The tokenizer in folder (or hub name) `where`. Raises `ModelError` where it cannot be loaded or brings code."""
    loaded = {} if (known := _loaded.get()) is None else known
    key = where, trust_remote_code
    if key not in loaded:
        loaded[key] = _load(where, trust_remote_code)
    hf = copy.copy(loaded[key])  # each has a chat template of its own
    return Tokenizer(hf, where, add_bos_token=add_bos_token, prefix_token_id=prefix_token_id)


_loaded: ContextVar[dict[tuple[str, bool], Any] | None] = ContextVar("loaded", default=None)


@contextmanager
def each_loaded_once() -> Iterator[None]:
    """Within it no tokenizer is read from its files twice: one of 128,000 tokens takes 0.7 s."""
    token = _loaded.set(_loaded.get() or {})
    try:
        yield
    finally:
        _loaded.reset(token)


def _load(where: str, trust_remote_code: bool) -> Any:
    _refuse_files(Path(where))
    try:
        with panics_as_errors(), activations_when_used():
            from transformers import AutoTokenizer

            load: Any = AutoTokenizer.from_pretrained
            hf = load(where, trust_remote_code=trust_remote_code)
            hf.encode("a")  # some files can be loaded, and not be used
        if not hf.vocab_size:
            raise ValueError("its vocabulary is empty")
        vocabulary = hf.get_vocab()
        last = max(vocabulary, key=vocabulary.__getitem__)
        if vocabulary[last] > LARGEST_ID:  # of so many ids the library makes an array where it copies itself
            raise ValueError(f"the token {last!r} has the id {vocabulary[last]}: at most {LARGEST_ID} (LARGEST_ID)")
    except ANY_FAILURE as error:
        raise ModelError(f"no tokenizer can be loaded from '{where}': {why_not_loaded(error)}") from error
    return hf


class _Activations(ModuleType, Mapping[str, Any]):
    """Stands in for `transformers.activations`, and for its table `ACT2FN`, until a name of theirs is asked for."""

    @property
    def ACT2FN(self) -> Mapping[str, Any]:
        """The table."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # those of every module, which the import system asks for
            raise AttributeError(name)
        return getattr(self._loaded(), name)

    def __getitem__(self, key: str) -> Any:
        return self._loaded().ACT2FN[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaded().ACT2FN)

    def __len__(self) -> int:
        return len(self._loaded().ACT2FN)

    def _loaded(self) -> Any:
        self.leave()
        return importlib.import_module(self.__name__)

    def leave(self) -> None:
        """Lets the next import find transformers' own module."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]


@contextmanager
def activations_when_used() -> Iterator[None]:
    """Has transformers' configurations, which validate the names of activations, import these when there is a name:
    they bring torch's compilers and its distributed tensors, 1.7 s of the processor in every process."""
    stand_in = _Activations("transformers.activations")
    sys.modules.setdefault(stand_in.__name__, stand_in)
    try:
        yield
    finally:
        stand_in.leave()


def tokenizer_file(where: str, name: str) -> Path | None:
    """The file of that name in a tokenizer's folder, or of a hub name in the cache; None where there is none."""
    from transformers.utils.hub import cached_file

    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    file = cached_file(where, name, **quiet)
    return None if file is None else Path(file)


class Tokenizer:
    """A Hugging Face tokenizer `hf`, loaded from `where`.

    `add_bos_token` overrides whether special tokens, BOS at least, are added by default (HFLM's argument of that name).
    `prefix_token_id` overrides the token that stands for an empty context.
    """

    def __init__(
        self, hf: Any, where: str, *, add_bos_token: bool | None = None, prefix_token_id: int | None = None
    ) -> None:
        self.hf = hf
        self.where = where
        self._add_special = True if add_bos_token is None else add_bos_token
        self._forces_bos = add_bos_token is True
        self._prefix_token_id = prefix_token_id
        self.special_ids = frozenset(
            {*hf.all_special_ids, *(number for number, token in hf.added_tokens_decoder.items() if token.special)}
        )
        """Ids that `decode` leaves out."""

        self.rows = Rows()
        """How many tokens the model knows; set by who opens both."""

        self.note = ""
        """What is encoded otherwise than the files say, as `hold_to_files` returns it."""

        self.opening: str | None = hf.bos_token
        """No special tokens are added to a text that begins with this one."""

        self.bos_token_id: int | None = hf.bos_token_id
        self.eos_token_id: int | None = hf.eos_token_id

    @property
    def pad_token_id(self) -> int | None:
        """The padding token as it is now: lm-eval gives a tokenizer without one another token's."""
        number: int | None = self.hf.pad_token_id
        return number

    @property
    def prefix_token_id(self) -> int:
        """The token that stands for an empty context: the custom id, else BOS, else EOS; `TaskError` without any."""
        for candidate in (self._prefix_token_id, self.bos_token_id, self.eos_token_id):
            if candidate is not None:
                return candidate
        missing = "neither BOS nor EOS to put before the first token"
        raise TaskError(f"the tokenizer in '{self.where}' has {missing}: give a prefix id")

    def encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Token ids of `text`.

        None adds the tokenizer's special tokens by its own default, and none where `text` already starts with the BOS
        text (HFLM.tok_encode). With `add_bos_token` BOS then comes from here where the tokenizer does not add it.
        """
        adds, forces_bos = self._specials(text, add_special_tokens)
        # Not verbose: a text longer than the tokenizer's model_max_length is valid here, it is cut or windowed later.
        return self._with_bos(list(self.hf.encode(text, add_special_tokens=adds, verbose=False)), forces_bos)

    def encode_many(self, texts: Iterable[str]) -> dict[str, Ids]:
        """`encode` of each text, by text; a fast tokenizer does it on all cores."""
        kinds: dict[tuple[bool, bool], list[str]] = {}
        for text in dict.fromkeys(texts):
            kinds.setdefault(self._specials(text, None), []).append(text)
        ids_of: dict[str, Ids] = {}
        for (adds, forces_bos), alike in kinds.items():
            encoded = (Ids(self._with_bos(ids, forces_bos)) for ids in self._encode_alike(alike, adds))
            ids_of.update(zip(alike, encoded, strict=True))
        return ids_of

    def _encode_alike(self, texts: list[str], adds: bool) -> Iterator[list[int]]:
        """Token ids of each text. Where the tokenizer's class leaves the encoding to the library of fast tokenizers,
        all texts but the first are passed to the library directly, because the offsets and masks that the class would
        add are not used. Encoding the first makes the class set the library to neither cut nor pad."""
        direct = len(texts) - 1 if _is_fast(self.hf) else 0
        first = texts[: len(texts) - direct]
        yield from self.hf(first, add_special_tokens=adds, return_attention_mask=False, verbose=False)["input_ids"]
        for begin in range(len(first), len(texts), _TOGETHER):
            encode = self.hf.backend_tokenizer.encode_batch_fast
            for encoding in encode(texts[begin : begin + _TOGETHER], add_special_tokens=adds):
                yield encoding.ids

    @functools.cached_property
    def num_ids(self) -> int:
        """One more than the largest id of a token."""
        return 1 + int(max((*self.hf.get_vocab().values(), *self.hf.added_tokens_decoder)))

    def _specials(self, text: str, add_special_tokens: bool | None) -> tuple[bool, bool]:
        """Whether the tokenizer adds its special tokens, and whether BOS is to be put in front where it does not."""
        if add_special_tokens is not None:
            return add_special_tokens, False
        adds = self._add_special and not (self.opening and text.startswith(self.opening))
        return adds, self._forces_bos and adds

    def _with_bos(self, ids: list[int], forces_bos: bool) -> list[int]:
        bos_id = self.bos_token_id
        return [bos_id, *ids] if forces_bos and bos_id is not None and ids[:1] != [bos_id] else ids

    def encode_target(self, text: str) -> list[int]:
        """Token ids of a text for an encoder-decoder's decoder, without special tokens: some tokenizers (Marian's) have
        a vocabulary of their own for it."""
        return list(self.hf(text_target=text, add_special_tokens=False, verbose=False)["input_ids"])

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids, by default without special tokens.

        The library of fast tokenizers does it alone where transformers' class would add nothing but a look at every id,
        as the search for stop strings asks twice a token (of 256 rows: 1.4 ms a step, 0.7 so).
        """
        if self._decodes_alone and not self.hf.clean_up_tokenization_spaces:
            return str(self.hf.backend_tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))
        return str(self.hf.decode(list(ids), skip_special_tokens=skip_special_tokens))

    @functools.cached_property
    def has_stable_text(self) -> bool:
        """Whether tokens change no text in front of them, but for a character that they complete: what cleans up spaces
        does (transformers does not for BPE), and of tokenizers in Python it is not known."""
        cleans = getattr(self.hf, "clean_up_tokenization_spaces", False)
        is_fast = bool(getattr(self.hf, "is_fast", False))
        return is_fast and (not cleans or type(self.hf.backend_tokenizer.model).__name__ == "BPE")

    @functools.cached_property
    def _decodes_alone(self) -> bool:
        return _is_fast(self.hf, ("decode", "_decode"))

    def for_worker(self, traits: Mapping[str, Any]) -> Tokenizer | None:
        """A copy that only decodes, with what `tokenizer_traits` says: a process that gets ids needs no more, and
        transformers would take 2 s to load it anew. None where more than the library of fast tokenizers decodes."""
        if not self._decodes_alone or self.hf.clean_up_tokenization_spaces:
            return None
        made, hf = copy.copy(self), SimpleNamespace(clean_up_tokenization_spaces=False)
        hf.backend_tokenizer = self.hf.backend_tokenizer
        vars(made).update(hf=hf, num_ids=self.num_ids, traits=traits)
        return made

    def token_text(self, number: int) -> str:
        """The text of one token by itself, with the white space in front that belongs to it; "" where there is none."""
        token = self.hf.convert_ids_to_tokens(number) if 0 <= number < 1 << 32 else None  # what the library takes
        if token is None:
            return ""
        text = str(self.hf.convert_tokens_to_string([token]))
        # SentencePiece's decoders drop the first token's space: they take it for the one they put before every text.
        return f" {text}" if token.startswith("\u2581") and not text.startswith(" ") else text

    def encode_pair(self, context: str, target: str) -> tuple[list[int], list[int]]:
        """(context ids, target ids), neither empty, which together are the tokens of the joint text.

        As in lm-eval's TemplateLM: white space at the context's end goes to the target, both are encoded jointly, and
        an empty context becomes `prefix_token_id`. Where a token spans the join, the cut is made before it, because
        only then the tokens spell the text and every character of the target is scored (lm-eval would cut it off, or
        leave an empty target). Raises `TaskError` for an empty target.

            context "a b", target "c d"     joint    [a][ bc][ d]
                                            context  [a][ b]
                                            cut         ^
        """
        if not target:
            raise TaskError("the target is empty: there is nothing to score")
        stripped = context.rstrip()
        context, target = stripped, context[len(stripped) :] + target
        if not context:
            return self.after_prefix(self.encode(target, add_special_tokens=False))
        joint, alone = self.encode(context + target), self.encode(context)
        cut = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(joint, alone, strict=False)))
        cut = min(cut, len(joint) - 1)
        return (joint[:cut], joint[cut:]) if cut > 0 else self.after_prefix(joint)

    def after_prefix(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """`ids` as a target after the prefix token, which is not doubled where `ids` already start with it."""
        if not ids:
            raise TaskError("the target has no tokens: there is nothing to score")
        prefix = self.prefix_token_id
        if ids[0] == prefix and len(ids) > 1:
            return list(ids[:1]), list(ids[1:])
        return [prefix], list(ids)

    def encode_rolling(self, text: str, prefix: int) -> list[int]:
        """Tokens of `text` to be scored after `prefix`, without the BOS where that is the same token.

        HFLM scores that BOS as well, after another one.
        """
        ids = self.encode(text)
        return ids[1:] if ids and ids[0] == prefix else ids

    @functools.cached_property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer's files have a chat template, with a name or without."""
        return bool(self.hf.chat_template)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The prompt text of a conversation. Without `add_generation_prompt` the last message is left open.

        `kwargs` reach the template. A template that refuses the conversation is tried again without system messages,
        as HFLM does. Raises `ConfigError` where there is no template, or it refuses that as well.
        """
        from jinja2.exceptions import TemplateError

        if not self.has_chat_template and "chat_template" not in kwargs:
            raise UnsupportedError(f"the tokenizer in '{self.where}' has no chat template: give the prompt as text")
        options = {
            "tokenize": False,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": not add_generation_prompt,
            **kwargs,
        }
        template = f"the chat template of '{self.where}'"
        without_system = [message for message in messages if message.get("role") != "system"]
        try:
            text = str(self.hf.apply_chat_template([dict(message) for message in messages], **options))
            refuse_odd(text)
        except TemplateError as error:
            if len(without_system) in (0, len(messages)):
                raise ConfigError(f"{template} refuses the messages: {error}") from error
            logger.warning("%s refuses the messages (%s); rendering them without the system role", template, error)
        except ANY_FAILURE as error:
            raise ConfigError(f"{template} cannot render the messages: {one_line(error)}") from error
        else:
            return text
        return self.render_chat(without_system, add_generation_prompt, **kwargs)


def refuse_odd(text: str) -> None:
    """Raises `ValueError` for a text beyond `LONGEST_TEXT`, and for half of a surrogate pair, which has no bytes."""
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"a text has {len(text):,} characters: at most {LONGEST_TEXT:,} (LONGEST_TEXT)")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a text has half of a surrogate pair at character {error.start}") from error


def _is_fast(hf: Any, methods: Sequence[str] = ("__call__", "_encode_plus", "_batch_encode_plus")) -> bool:
    """Whether `methods`, those that encode, are of transformers' class for fast tokenizers, not of a subclass."""
    from transformers import PreTrainedTokenizerFast as Fast

    return isinstance(hf, Fast) and all(getattr(type(hf), name, None) is getattr(Fast, name, None) for name in methods)

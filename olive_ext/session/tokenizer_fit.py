"""What is held against a tokenizer: the model's vocabulary, the reference's tokenizer, its own chat template. Knows no
file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.metadata import version
from itertools import zip_longest
from operator import eq
from pathlib import Path
from typing import Any
from unicodedata import normalize

from typing_extensions import Self

from olive_ext.engine.requests import Request
from olive_ext.errors import (
    ConfigError,
    DamagedError,
    MismatchError,
    ModelError,
    NotComparableError,
    TaskError,
    UnsupportedError,
    first_line,
    panics_as_errors,
)
from olive_ext.session.tokenizer import Tokenizer, tokenizer_file

Traits = Mapping[str, Any]

_PROBES = (
    "The quick brown fox jumps over the lazy dog.",
    "  leading, double  and trailing spaces  ",
    "tabs\tand\n\nlines\r\n",
    "don't we'll I'VE",
    "3.14159 1,234,567 0x7f 2024-06-30",
    "Ünïcödé naïve café e\u0301 ﬁ Å ½ Ⅷ",
    "漢字かな交じり文 한국어 русский العربية हिन्दी",
    "🙂👩‍👩‍👧 ∑∞≠ €",
    "def f(x):\n    return x**2  # comment\n",
    "https://example.com/a?b=c&d=%20 user@example.com",
    "<|endoftext|></s>[INST]<unk>",
)
"""Texts on which normalizers and pre-tokenizers show."""


def hold_to_files(tokenizer: Tokenizer, add_bos_token: bool | None = None) -> str:
    """A sentence where transformers encode otherwise than tokenizer.json run by the library of fast tokenizers alone;
    empty where they do not, and where there is no such file.

    Raises `ModelError` where the tokens spell other words (until 5.22 transformers' class LlamaTokenizer dropped the
    spaces of a byte-level tokenizer.json), and, without the setting `add_bos_token`, where no BOS is added though
    tokenizer_config.json asks for it (5.23 adds it by tokenizer.json's post-processor alone).
    """
    from tokenizers import Tokenizer as Core

    file, config = (tokenizer_file(tokenizer.where, name) for name in ("tokenizer.json", "tokenizer_config.json"))
    if file is None:
        return ""
    by = f"transformers {version('transformers')} ({type(tokenizer.hf).__name__})"
    try:
        with panics_as_errors():
            core = Core.from_file(str(file))
    except Exception as error:
        raise DamagedError(f"'{file}' is not readable by tokenizers alone: {first_line(error)}") from error
    core.no_truncation()
    core.no_padding()
    asked = config is not None and json.loads(config.read_text(encoding="utf-8-sig")).get("add_bos_token") is True
    if add_bos_token is None and asked and tokenizer.bos_token_id not in tokenizer.encode("a"):
        raise MismatchError(
            f"'{config}' says add_bos_token = true, and {by} adds no BOS: set 'add_bos_token' to true or false"
        )
    for text in _PROBES[:-1]:  # the last one's special tokens may be in tokenizer_config.json alone
        ids, alone = tokenizer.encode(text, add_special_tokens=False), core.encode(text, add_special_tokens=False).ids
        if ids == alone:
            continue
        read, spelt = core.decode(ids, skip_special_tokens=False), core.decode(alone, skip_special_tokens=False)
        problem = f"{by} makes {len(ids)} tokens of {text!r}, '{file}' alone {len(alone)}"
        if normalize("NFC", read).split() == normalize("NFC", spelt).split():  # Llama's class adds no space in front
            return problem
        cure = 'take another version, or write "tokenizer_class": "PreTrainedTokenizerFast" into tokenizer_config.json'
        raise ModelError(f"{problem}; they spell {read!r} and {spelt!r}: {cure}")
    return ""


def unwritten_specials(tokenizer: Tokenizer) -> list[str]:
    """Special tokens that tokenizer_config.json's `extra_special_tokens` alone has, and neither tokenizer.json nor
    `added_tokens_decoder`: transformers add them, onnxruntime-genai (0.18) does not."""
    files = (tokenizer_file(tokenizer.where, name) for name in ("tokenizer.json", "tokenizer_config.json"))
    core, config = ({} if file is None else json.loads(file.read_text(encoding="utf-8-sig")) for file in files)
    added = (*core.get("added_tokens", ()), *config.get("added_tokens_decoder", {}).values())
    known = {one["content"] for one in added}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    texts = extra.values() if isinstance(extra, Mapping) else extra
    return sorted({text for text in texts if isinstance(text, str)} - known) if core else []


def refuse_smaller_vocabulary(tokenizer: Tokenizer, vocab_size: int, model: str) -> None:
    """Raises `ModelError` where a text may have tokens that the model does not know. Added tokens, which texts have
    where they are written out only, may lie beyond: some published models have such."""
    added = tokenizer.hf.added_tokens_decoder.keys()
    beyond = [number for number in tokenizer.hf.get_vocab().values() if number >= vocab_size and number not in added]
    if beyond:
        raise MismatchError(
            f"the tokenizer in '{tokenizer.where}' has tokens up to {max(beyond)}, and '{model}' has a vocabulary of "
            f"{vocab_size}: they do not belong together; set 'tokenizer' to the model's own"
        )


def refuse_unknown(request: Request, tokenizer: Tokenizer, placeholders: Container[int] = ()) -> None:
    """Raises `TaskError`, with its number and text, for a token of a request that the tokenizer's model has no row for.
    `placeholders` of pictures and sounds are not looked up."""
    rows = tokenizer.rows
    given, first = request.tokens.array, len(request.tokens) - request.num_targets
    for tokens, size, what in ((given, rows.embedding, "embedding"), (given[first:], rows.vocabulary, "vocabulary")):
        if size is None or tokens.max(initial=0) < size:
            continue
        unknown = next((token for token in tokens.tolist() if token >= size and token not in placeholders), None)
        if unknown is not None:
            text = tokenizer.token_text(unknown)
            raise TaskError(f"token {unknown} ({text!r}) is beyond the model's {what} of {size}", code="contradiction")


@contextmanager
def chosen_template(tokenizer: Any, name: bool | str) -> Iterator[None]:
    """Selects the chat template `name` of a tokenizer that has several: lm-eval only reports the name, and transformers
    uses an unknown name as the template itself. Raises `ConfigError` for a name that the tokenizer lacks."""
    written: Any = getattr(tokenizer, "chat_template", None)
    if isinstance(name, bool):
        if name and tokenizer is not None and not written:
            folder = getattr(tokenizer, "name_or_path", "")
            raise UnsupportedError(f"the tokenizer in '{folder}' has no chat template", "apply_chat_template")
        yield
        return
    templates: dict[str, str] = written if isinstance(written, dict) else {}
    names = sorted(templates)
    if tokenizer is None or name not in names:
        known = f"one of {names}, or true" if names else "true: the tokenizer has no templates with names"
        raise ConfigError(f"give {known}", "apply_chat_template", name)
    tokenizer.chat_template = templates[name]
    try:
        yield
    finally:
        tokenizer.chat_template = written


def refuse_template(tokenizer: Tokenizer, **kwargs: Any) -> None:
    """Raises `ConfigError` where a chat template renders no message of a user, be it a text or a list of parts."""
    try:
        tokenizer.render_chat([{"role": "user", "content": "a"}], **kwargs)
    except ConfigError:
        with suppress(ConfigError, TypeError):
            tokenizer.render_chat([{"role": "user", "content": [{"type": "text", "text": "a"}]}], **kwargs)
            return
        raise


def tokenizer_traits(tokenizer: Tokenizer) -> dict[str, Any]:
    """Everything that decides a tokenizer's ids, JSON-ready by name: digests, added tokens by their ids, and the ids of
    those that its chat template or a role has. Special tokens that begin or end a text are left out, since both models
    get the ids of one tokenizer."""
    known: dict[str, Any] | None = vars(tokenizer).get("traits")
    return known or _traits(tokenizer, _written(tokenizer))


def _written(tokenizer: Tokenizer) -> dict[str, Any]:
    """tokenizer.json as the library of fast tokenizers writes it; empty for others."""
    backend = getattr(tokenizer.hf, "backend_tokenizer", None)
    return dict(json.loads(backend.to_str())) if backend is not None else {}


def _traits(tokenizer: Tokenizer, written: Mapping[str, Any]) -> dict[str, Any]:
    merges = written.get("model", {}).get("merges")  # there are none where they are not exposed
    vocabulary, added = tokenizer.hf.get_vocab(), {id_: str(t) for id_, t in tokenizer.hf.added_tokens_decoder.items()}
    template, special = str(tokenizer.hf.chat_template), tokenizer.hf.special_tokens_map
    roles = {str(text) for role, text in special.items() if role != "pad_token"}  # which stands in no text
    return {
        "num_tokens": len(vocabulary),
        "vocabulary": _digest(sorted((text, id_) for text, id_ in vocabulary.items() if id_ not in added)),
        "merges": _digest(merges),
        "added tokens": {str(id_): text for id_, text in sorted(added.items())},
        "used": sorted(id_ for id_, text in added.items() if text in template or text in roles),
        "encoding": _digest([tokenizer.encode(text, add_special_tokens=False) for text in _PROBES]),
    }


_CHAT = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"})
_SHOWN = 60
"""Characters of two texts that are shown in front of their difference, and after it."""

_SPECIALS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
TEMPLATE = "chat template"
_ASKS = {
    "special tokens around a text": _SPECIALS,
    "token for an empty context": _SPECIALS,
    "text of tokens": _SPECIALS,
    "texts of all tokens": ("tokenizer.json",),
    "tokens of these texts": ("tokenizer.json",),
    "tokens of single characters": ("tokenizer.json",),
    "tokens of a chat": _SPECIALS,
}
"""What `PromptFormat.asks` holds, and patterns of the files that decide it. None stands for a token for an empty
context that the files do not name: tasks that need one end in an error; and for the digests where not every token was
read."""

_DIGESTS = ("texts of all tokens", "tokens of these texts", "tokens of single characters")
_FILES = {**_ASKS, TEMPLATE: ("chat_template*", "additional_chat_templates/*", "tokenizer_config.json")}


@dataclass(frozen=True)
class PromptFormat:
    """How a model is asked and its answers are read; JSON-ready."""

    ids: Traits
    """`tokenizer_traits`."""

    asks: Traits
    """What these leave out, by the names of `_ASKS`."""

    files: Mapping[str, str]
    """Digests of the tokenizer's files that decide `asks`."""

    steps: str = ""
    """Digest of what tokenizer.json says beside vocabulary, merges and special tokens around a text: the added tokens,
    the scores of Unigram's pieces, and the steps from text to tokens and back. Where two are equal, all tokens are read
    alike."""

    template: str = ""
    """Digest of the chat template's text but for white space; empty where none is used."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, template: Mapping[str, Any] | None, *, reads_all: bool = False) -> Self:
        """`template` has the variables of the chat template; None where none is used. `reads_all`: whether every token
        is read, too (150,000 tokens: 3 s)."""
        prefix = None
        with suppress(TaskError):  # tasks that need one say so
            prefix = tokenizer.prefix_token_id
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in _PROBES]
        text, chat = "", dict[str, list[int]]()
        if template is not None and tokenizer.has_chat_template:
            text = tokenizer.hf.get_chat_template(template.get("chat_template"))
            with suppress(ConfigError):  # it says so when it is asked
                chat = {(shown := tokenizer.render_chat(_CHAT, **template)): tokenizer.encode(shown)}
        texts = [tokenizer.decode(one) for one in ids]
        around = "".join(map(str, tokenizer.hf.convert_ids_to_tokens(tokenizer.encode("a"))))
        folder, patterns = Path(tokenizer.where), dict.fromkeys(each for own in _FILES.values() for each in own)
        files = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
        digests = {path.relative_to(folder).as_posix(): _digest(path.read_bytes().hex()) for path in sorted(files)}
        every = _vocabulary_read(tokenizer) if reads_all else [None] * len(_DIGESTS)
        asks = dict(zip(_ASKS, (around, prefix, texts, *every, chat), strict=True))
        written = _written(tokenizer)
        traits, model = _traits(tokenizer, written), written.get("model", {})
        known = {"merges"} if isinstance(model.get("vocab"), list) else {"merges", "vocab"}  # Unigram's has scores
        rest = {name: part for name, part in model.items() if name not in known}
        steps = {**{name: written.get(name) for name in _STEPS}, "model": rest}
        return cls(traits, asks, digests, _digest(steps) if written else "", text and _digest(text.split()))

    def differing(self, other: PromptFormat) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, str]]:
        """What `asks` differ in; the files that may decide it and are not the same; and what the first is of both, of
        several texts one that differs; of digests nothing."""
        both = {name: (self.asks[name], other.asks[name]) for name in self.asks.keys() & other.asks.keys()}
        names = (name for name in _ASKS if name in both and None not in both[name])
        what = tuple(name for name in names if not _is_alike(*both[name]))
        one, two = both[what[0]] if what else ("", "")
        if isinstance(one, list) and isinstance(two, list):
            one, two = next(pair for pair in zip(one, two, strict=False) if pair[0] != pair[1])
        shown = ("", "") if what and what[0] in _DIGESTS else excerpts(str(one), str(two))
        return what, self.changed_files(other, what), shown

    def changed_files(self, other: PromptFormat, what: Sequence[str]) -> tuple[str, ...]:
        """The files that may decide `what` and are not the same."""
        patterns = {pattern for name in what for pattern in _FILES[name]}
        changed = sorted({name for name, _ in self.files.items() ^ other.files.items()})
        return tuple(name for name in changed if any(fnmatch(name, pattern) for pattern in patterns))


def excerpts(one: str, two: str) -> tuple[str, str]:
    """Both texts around their first difference."""
    first = next((at for at, pair in enumerate(zip_longest(one, two)) if len({*pair}) > 1), 0)
    first = max(0, first - _SHOWN)
    return one[first:][: 2 * _SHOWN], two[first:][: 2 * _SHOWN]


def _is_alike(one: Any, other: Any) -> bool:
    """Whether what two records or models are asked is equal, as far as both say it."""
    if isinstance(one, Mapping):
        return all(one[text] == other[text] for text in one.keys() & other.keys())
    if isinstance(one, list) and isinstance(other, list):
        return all(map(eq, one, other))
    return bool(one == other)


_CHARACTERS = (*range(0x20, 0x3100), *range(0xF900, 0xFB50), *range(0xFE30, 0xFFF0))
"""Code points up to Japanese's syllables, and the forms that normalizers replace."""

_STEPS = ("added_tokens", "normalizer", "pre_tokenizer", "decoder")


def _vocabulary_read(tokenizer: Tokenizer) -> Sequence[str | None]:
    """The `_DIGESTS`: of the text of every token but the added ones, of the ids of these texts, and of those of each
    character of alphabets and punctuation. A normalizer or a decoder that changes what the probes do not hold shows
    there."""
    backend = getattr(tokenizer.hf, "backend_tokenizer", None)
    if backend is None:
        return [None] * len(_DIGESTS)
    ids = sorted({*tokenizer.hf.get_vocab().values()} - {*tokenizer.hf.added_tokens_decoder})
    texts = backend.decode_batch([[token] for token in ids], skip_special_tokens=False)
    encoded = (backend.encode_batch_fast(some, add_special_tokens=False) for some in (texts, [*map(chr, _CHARACTERS)]))
    return _digest(texts), *(_digest([one.ids for one in some]) for some in encoded)


def refuse_other_tokenizer(reference: Traits, candidate: Traits, reference_name: str, own_name: str) -> None:
    """Raises `ConfigError` that names what differs between the traits of two tokenizers. The second may have more added
    tokens than the reference's, which no template and no role uses: then all texts without them are the same ids."""
    differing = [
        name for name in candidate if name not in ("num_tokens", "used") and reference.get(name) != candidate[name]
    ]
    before, after = (traits.get("added tokens") for traits in (reference, candidate))
    if isinstance(before, Mapping) and isinstance(after, Mapping) and before.items() <= after.items():
        more = after.keys() - before.keys()
        differing = [
            name for name in differing if name != "added tokens" or not more.isdisjoint(map(str, candidate["used"]))
        ]
    if not differing:
        return
    sizes = ""
    if reference.get("num_tokens") != candidate["num_tokens"]:
        sizes = f" ({reference.get('num_tokens')} and {candidate['num_tokens']} tokens)"
    raise NotComparableError(
        f"the tokenizer of the reference '{reference_name}' differs from that of '{own_name}' in its "
        f"{', '.join(differing)}{sizes}: their distributions are over different tokens and cannot be compared"
    )


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]

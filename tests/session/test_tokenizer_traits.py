"""Tokenizers that spell alike are taken for the same, and others are refused by what differs; each is held to its
files."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest
from tokenizers import AddedToken, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Core
from transformers import PreTrainedTokenizerFast

from olive_ext.errors import ConfigError, ModelError
from olive_ext.session.tokenizer import Tokenizer, load_tokenizer
from olive_ext.session.tokenizer_fit import Asking, hold_to_files, refuse_other_tokenizer, tokenizer_traits
from tests.refusals import refused
from tests.session.tiny import TEMPLATE, byte_fallback, byte_level


def changed(path: list[object], value: object) -> Tokenizer:
    """`byte_level` with one value of its JSON replaced."""
    content = json.loads(byte_level().hf.backend_tokenizer.to_str())
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=Core.from_str(json.dumps(content))), "changed")


def refusal(reference: Tokenizer, own: Tokenizer) -> str:
    with pytest.raises(ConfigError) as caught:
        refuse_other_tokenizer(tokenizer_traits(reference), tokenizer_traits(own), "ref", "own")
    return str(caught.value)


def test_same_tokenizers_pass_whatever_their_template_and_begin() -> None:
    for other in (byte_level(), byte_level(template=TEMPLATE), byte_level(has_bos=False)):
        refuse_other_tokenizer(tokenizer_traits(other), tokenizer_traits(byte_level()), "ref", "own")
    assert json.loads(json.dumps(tokenizer_traits(byte_level()))) == tokenizer_traits(byte_level())


def test_another_vocabulary_is_refused_with_both_sizes() -> None:
    message = refusal(byte_fallback(), byte_level())
    assert message.startswith(
        "the tokenizer of the reference 'ref' differs from that of 'own' in its vocabulary, merges"
    )
    assert f"({len(byte_fallback().hf.get_vocab())} and {len(byte_level().hf.get_vocab())} tokens)" in message


def with_added(text: str, **kwargs: object) -> Tokenizer:
    more = copy.deepcopy(byte_level(**kwargs).hf)
    more.add_tokens([AddedToken(text, special=True)])
    return Tokenizer(more, "more")


def test_added_token_is_refused_where_it_is_used_or_lost() -> None:
    """One more that nothing uses makes no other tokenizer: it was refused as another model's."""
    unused, plain = with_added("<new>"), byte_level()
    refuse_other_tokenizer(tokenizer_traits(plain), tokenizer_traits(unused), "ref", "own")
    assert "in its added tokens (321 and 320 tokens)" in refusal(unused, plain), "lost"
    assert "added tokens" in refusal(with_added("<other>"), unused), "another in its place"
    assert "added tokens" in refusal(plain, with_added("<turn>", template="<turn>" + TEMPLATE)), "its template's"
    unused.hf.pad_token = "<new>"
    assert "added tokens" in refusal(plain, unused), "a role's"
    assert "encoding" in refusal(plain, with_added("fox")), "texts have it"


def test_other_merges_of_one_vocabulary_are_refused() -> None:
    merges = json.loads(byte_level().hf.backend_tokenizer.to_str())["model"]["merges"]
    assert "in its merges" in refusal(changed(["model", "merges"], merges[:-3]), byte_level())


def test_another_pre_tokenizer_is_refused_by_what_it_encodes() -> None:
    prefixing = json.loads(pre_tokenizers.ByteLevel(add_prefix_space=True).__getstate__())
    assert "in its encoding:" in refusal(changed(["pre_tokenizer"], prefixing), byte_level())


REPLACE = {"type": "Replace", "pattern": {"String": "8"}, "content": "3"}
DECODER = json.loads(byte_level().hf.backend_tokenizer.to_str())["decoder"]


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (lambda: changed(["decoder"], DECODER), ()),
        (lambda: with_added("<new>"), ()),
        (
            lambda: changed(["decoder"], {"type": "Sequence", "decoders": [DECODER, REPLACE]}),
            ("texts of all tokens", "tokens of these texts"),
        ),
        (lambda: changed(["normalizer"], REPLACE), ("tokens of these texts",)),
    ],
    ids=["same", "one more", "decoder", "normalizer"],
)
def test_what_reads_a_token_otherwise_is_named_though_no_probe_holds_it(other, what: tuple[str, ...]) -> None:
    asked = [Asking.of(one, None, reads_all=True) for one in (byte_level(), other())]
    quick = [Asking.of(one, None) for one in (byte_level(), other())]
    assert not {"texts of all tokens", "tokens of these texts"} & {*quick[0].differing(quick[1])[0]}
    assert quick[0].steps != quick[1].steps or not what, "else nobody reads them all"
    assert (
        tuple(name for name in asked[0].differing(asked[1])[0] if "around" not in name and "empty" not in name) == what
    )
    older = Asking(asked[1].ids, {name: asked[1].asks[name] for name in [*asked[1].asks][:3]}, {})
    assert not {"texts of all tokens", "tokens of these texts"} & {*asked[0].differing(older)[0]}


def put(folder: Path, tokenizer_class: str, **config: object) -> Tokenizer:
    """The byte-level tokenizer without a post-processor, saved as a checkpoint of that class and loaded again."""
    byte_level(has_bos=False).hf.backend_tokenizer.save(str(folder / "tokenizer.json"))
    written = {"tokenizer_class": tokenizer_class, "bos_token": "<bos>", "eos_token": "<eos>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(written), encoding="utf-8")
    return load_tokenizer(str(folder))


def test_tokenizer_that_encodes_as_its_files_say_is_not_named(tmp_path: Path) -> None:
    # Releases of transformers until 5.21 drop the spaces here.
    assert hold_to_files(put(tmp_path, "LlamaTokenizer")) == ""


def test_file_that_the_library_alone_cannot_read_is_named(tmp_path: Path) -> None:
    tokenizer = put(tmp_path, "LlamaTokenizer")
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ModelError, match=r"tokenizer.json' is not readable by tokenizers alone: "):
        hold_to_files(tokenizer)


def test_tokenizer_that_drops_spaces_is_refused_with_both_texts(tmp_path: Path) -> None:
    tokenizer = put(tmp_path, "PreTrainedTokenizerFast")
    core = Core.from_file(str(tmp_path / "tokenizer.json"))
    core.pre_tokenizer = pre_tokenizers.Sequence(  # what LlamaTokenizer of transformers 5.10 comes to
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.hf = PreTrainedTokenizerFast(tokenizer_object=core)
    with refused(ModelError, "unsupported", holds="tokenizer_class"):
        hold_to_files(tokenizer)


def test_tokenizer_that_leaves_spaces_at_the_ends_out_is_named(tmp_path: Path) -> None:
    """As transformers' class does with tokenizer.json of Llama 2, Phi-3 and Mistral: the words are the same."""
    tokenizer = put(tmp_path, "PreTrainedTokenizerFast")
    core = Core.from_file(str(tmp_path / "tokenizer.json"))
    core.normalizer = normalizers.Strip()
    tokenizer.hf = PreTrainedTokenizerFast(tokenizer_object=core)
    assert "tokens of '  leading" in hold_to_files(tokenizer)


def test_tokenizer_that_cuts_other_tokens_of_the_same_text_is_named(tmp_path: Path) -> None:
    told = hold_to_files(put(tmp_path, "Qwen2Tokenizer"))  # a class with a normalizer of its own
    assert re.search(r"^transformers [\d.]+ \(Qwen2Tokenizer\) makes \d+ tokens of '.*json' alone \d+$", told)


def test_bos_that_the_configuration_asks_for_and_that_is_not_added_is_refused_unless_the_setting_decides(
    tmp_path: Path,
) -> None:
    tokenizer = put(tmp_path, "PreTrainedTokenizerFast", add_bos_token=True)
    with refused(ModelError, "contradiction", holds=("add_bos_token", "BOS")):
        hold_to_files(tokenizer)
    assert hold_to_files(tokenizer, False) == ""

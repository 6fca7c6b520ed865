"""Tokenizers that spell alike are taken for the same, and others are refused by what differs."""

from __future__ import annotations

import copy
import json

import pytest
from tokenizers import AddedToken, pre_tokenizers
from tokenizers import Tokenizer as Core
from transformers import PreTrainedTokenizerFast

from olive_ext.errors import ConfigError
from olive_ext.text.tokenizer import Tokenizer
from olive_ext.text.tokenizer_fit import refuse_other_tokenizer, tokenizer_traits
from tests.text.tiny import TEMPLATE, byte_fallback, byte_level


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


def test_an_added_token_is_refused() -> None:
    more = copy.deepcopy(byte_level().hf)
    more.add_tokens([AddedToken("<new>", special=True)])
    assert "vocabulary, added tokens (321 and 320 tokens)" in refusal(Tokenizer(more, "more"), byte_level())


def test_other_merges_of_one_vocabulary_are_refused() -> None:
    merges = json.loads(byte_level().hf.backend_tokenizer.to_str())["model"]["merges"]
    assert "in its merges" in refusal(changed(["model", "merges"], merges[:-3]), byte_level())


def test_another_pre_tokenizer_is_refused_by_what_it_encodes() -> None:
    prefixing = json.loads(pre_tokenizers.ByteLevel(add_prefix_space=True).__getstate__())
    assert "in its encoding:" in refusal(changed(["pre_tokenizer"], prefixing), byte_level())

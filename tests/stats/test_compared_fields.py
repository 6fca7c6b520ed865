"""What kind of token a text is."""

from __future__ import annotations

import pytest

from olive_ext.stats.compared_fields import CLASSES, TokenClasses, token_class


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (" the", "word start"),
        ("\nThe", "word start"),
        ("ing", "inside of a word"),
        ("'s", "inside of a word"),
        ("\ufffd", "inside of a word"),
        (" 3rd", "word start"),
        ("1984", "number"),
        (" 3.5", "number"),
        ("50%", "number"),
        ("\u00bd", "number"),
        (".", "punctuation"),
        (" (", "punctuation"),
        ("\u20ac", "punctuation"),
        ("\n\n", "white space"),
        ("", "white space"),
        (" \u00fcber", "word start"),
        ("\u6f22\u5b57", "inside of a word"),
    ],
)
def test_class_of_a_token_by_itself(text: str, name: str) -> None:
    assert CLASSES[token_class(text)] == name


TEXTS = ["<s>", " the", "the", "ing", "(", " ", "42", "."]


def names(ids: list[int], previous: int | None = None) -> list[str]:
    return [CLASSES[item] for item in TokenClasses(TEXTS.__getitem__, {0}).of(ids, previous)]


def test_class_of_a_token_follows_what_stands_before_it() -> None:
    """A piece after a sign begins a word; special tokens are special whatever their text."""
    assert names([4, 2, 3, 7, 2]) == ["punctuation", "word start", "inside of a word", "punctuation", "word start"]
    assert names([5, 2, 0, 3]) == ["white space", "word start", "special", "word start"]
    assert names([3], previous=1) == ["inside of a word"]
    assert names([3], previous=7) == names([3]) == ["word start"]
    assert names([]) == []

"""Word error rate for lm-eval's tasks of speech: their `process_results` and `aggregation` (extra `speech`: jiwer).

Texts are compared as Whisper's multilingual normalizer leaves them (transformers' BasicTextNormalizer): lower case,
without punctuation and what stands in brackets, single spaces.
"""

from __future__ import annotations

from collections.abc import Iterable

from olive_ext.errors import TaskError

Pair = tuple[str, str]
"""What was said (the reference transcript), and what the model wrote (the hypothesis)."""


def normalized(reference: str, hypothesis: str) -> Pair:
    """Both texts as they are compared. Raises `TaskError` where nothing was said: there is no rate of that."""
    from transformers.models.whisper.english_normalizer import BasicTextNormalizer

    normalize = BasicTextNormalizer()
    pair = normalize(reference).strip(), normalize(hypothesis).strip()
    if not pair[0]:
        raise TaskError(f"the transcript {reference!r} has no words to compare with")
    return pair


def word_error_rate(pairs: Iterable[Pair]) -> float:
    """Substituted, deleted and inserted words of all pairs, by the number of words that were said."""
    counts = word_errors(pairs)
    return sum(errors for errors, _ in counts) / sum(words for _, words in counts)


def word_errors(pairs: Iterable[Pair]) -> list[tuple[int, int]]:
    """For each pair the words that were substituted, deleted and inserted, and those that were said."""
    try:
        from jiwer import process_words
    except ImportError as error:
        raise TaskError("word error rates need jiwer: pip install olive-ext[speech]", code="needs_package") from error
    found = (process_words(reference, hypothesis) for reference, hypothesis in pairs)
    return [
        (one.substitutions + one.deletions + one.insertions, one.hits + one.substitutions + one.deletions)
        for one in found
    ]

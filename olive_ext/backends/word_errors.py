"""Word error rate for lm-eval's tasks of speech: their `process_results` and `aggregation` (extra `speech`: jiwer).

Texts are compared after Whisper's multilingual normalizer (transformers' BasicTextNormalizer): lower case, without
punctuation and what is in brackets, with single spaces.
"""

from __future__ import annotations

from collections.abc import Iterable

from olive_ext.errors import TaskError

Pair = tuple[str, str]
"""The reference transcript, and the hypothesis, which the model wrote."""


def normalized(reference: str, hypothesis: str) -> Pair:
    """Both texts as they are compared. Raises `TaskError` for an empty reference, which has no rate."""
    from transformers.models.whisper.english_normalizer import BasicTextNormalizer

    normalize = BasicTextNormalizer()
    pair = normalize(reference).strip(), normalize(hypothesis).strip()
    if not pair[0]:
        raise TaskError(f"the transcript {reference!r} has no words to compare with")
    return pair


def word_error_rate(pairs: Iterable[Pair]) -> float:
    """Substituted, deleted and inserted words of all pairs, divided by the number of words of the references."""
    counts = word_errors(pairs)
    return sum(errors for errors, _ in counts) / sum(words for _, words in counts)


def word_errors(pairs: Iterable[Pair]) -> list[tuple[int, int]]:
    """For each pair the substituted, deleted and inserted words, and the words of the reference."""
    try:
        from jiwer import process_words
    except ImportError as error:
        problem = "word error rates need jiwer: install the extra 'speech' ('.[speech]' in a clone)"
        raise TaskError(problem, code="needs_package") from error
    alignments = (process_words(reference, hypothesis) for reference, hypothesis in pairs)
    return [
        (one.substitutions + one.deletions + one.insertions, one.hits + one.substitutions + one.deletions)
        for one in alignments
    ]

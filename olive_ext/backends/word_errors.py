"""Word error rate for lm-eval's tasks of speech: their `process_results` and `aggregation` (extra `speech`: jiwer).

Texts are compared as Whisper's multilingual normalizer leaves them (transformers' BasicTextNormalizer): lower case,
without punctuation and what stands in brackets, single spaces.
"""

from __future__ import annotations

from collections.abc import Iterable

from olive_ext.errors import TaskError

Pair = tuple[str, str]
"""What was said, and what the model wrote."""


def normalized(said: str, written: str) -> Pair:
    """Both texts as they are compared. Raises `TaskError` where nothing was said: there is no rate of that."""
    from transformers.models.whisper.english_normalizer import BasicTextNormalizer

    normalize = BasicTextNormalizer()
    pair = normalize(said).strip(), normalize(written).strip()
    if not pair[0]:
        raise TaskError(f"the transcript {said!r} has no words to compare with")
    return pair


def word_error_rate(pairs: Iterable[Pair]) -> float:
    """Substituted, deleted and inserted words of all pairs, by the number of words that were said."""
    try:
        from jiwer import wer
    except ImportError as error:
        raise TaskError("the word error rate needs jiwer: pip install olive-ext[speech]") from error
    said, written = zip(*pairs, strict=True)
    return float(wer(list(said), list(written)))

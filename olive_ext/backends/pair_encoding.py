"""The encoding of a context and its continuation: lm-eval's rule, and ours where that leaves a side without tokens.

Knows no model.
"""

from __future__ import annotations

from lm_eval.api.model import TemplateLM

from olive_ext.text.tokenizer import Tokenizer


class CompletePairs(TemplateLM):  # type: ignore[misc]
    """A mix-in for models of lm-eval; its `pair_tokenizer` follows the model's own settings."""

    @property
    def pair_tokenizer(self) -> Tokenizer:
        """The tokenizer that splits the pairs which lm-eval's rule cannot split."""
        raise NotImplementedError

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """HFLM's cut; where that leaves one side without tokens, a cut before the token that spans the join."""
        if context:
            pair: tuple[list[int], list[int]] = super()._encode_pair(context, continuation)
            if all(pair):
                return pair
        return self.pair_tokenizer.encode_pair(context, continuation)

"""How a context and its continuation become token ids: lm-eval's rule, completed where it has no answer."""

from __future__ import annotations

from lm_eval.api.model import TemplateLM

from olive_ext.text.tokenizer import Tokenizer


class CompletePairs(TemplateLM):  # type: ignore[misc]
    """Mixed into a model whose `pair_tokenizer` follows the model's own settings."""

    @property
    def pair_tokenizer(self) -> Tokenizer:
        """The tokenizer that cuts where lm-eval cannot."""
        raise NotImplementedError

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """HFLM's cut; where that leaves one side without tokens, the tokenizer's, before the token that spans it."""
        if context:
            pair: tuple[list[int], list[int]] = super()._encode_pair(context, continuation)
            if all(pair):
                return pair
        return self.pair_tokenizer.encode_pair(context, continuation)

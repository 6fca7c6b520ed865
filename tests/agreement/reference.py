"""The reference: Hugging Face transformers in fp32, one whole forward pass for each request, nothing shared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from olive_ext.session.requests import ScoringOutput

EOS = 1


class Reference:
    """Scores and generates with the Hugging Face model in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def score(self, context: Sequence[int], target: Sequence[int]) -> tuple[list[float], bool]:
        """Log-probabilities of the target's tokens, and whether each is the argmax.

        The last one is not fed: nothing follows it, and a model whose factors depend on the length would have others.
        """
        tokens = [*context, *target]
        with torch.inference_mode():
            logprobs_TV = self._model(torch.tensor([tokens[:-1]])).logits[0].double().log_softmax(-1)
        rows = range(len(context) - 1, len(tokens) - 1)
        greedy = all(int(logprobs_TV[row].argmax()) == tokens[row + 1] for row in rows)
        return [logprobs_TV[row, tokens[row + 1]].item() for row in rows], greedy

    def generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Greedy tokens up to the end-of-sequence token, which is left out."""
        with torch.inference_mode():
            output = self._model.generate(
                torch.tensor([list(prompt)]),
                max_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=EOS,
                eos_token_id=EOS,
            )
        tokens = output[0, len(prompt) :].tolist()
        return tokens[: tokens.index(EOS)] if EOS in tokens else tokens


def largest_difference(found: Sequence[ScoringOutput], expected: Sequence[Sequence[float]]) -> float:
    """Over every target token of every request, in nats."""
    return max(
        abs(ours - theirs)
        for output, logprobs in zip(found, expected, strict=True)
        for ours, theirs in zip(output.token_logprobs, logprobs, strict=True)
    )

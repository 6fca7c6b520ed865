"""The next token drawn from a row of logits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from olive_ext.engine.requests import Sampling


def drawn(logits_V: npt.NDArray[np.float32], sampling: Sampling, rng: np.random.Generator) -> int:
    """One token id, after temperature, top_k and top_p in the order of Hugging Face's logits processors.

    top_p keeps the smallest set of most probable tokens whose sum reaches it (Holtzman et al. 2020), never none.
    """
    scaled_V = logits_V.astype(np.float64) / sampling.temperature
    order_V = np.argsort(-scaled_V, kind="stable")
    if sampling.top_k:
        order_V = order_V[: sampling.top_k]
    probs_V = np.exp(scaled_V[order_V] - scaled_V[order_V[0]])
    probs_V /= probs_V.sum()
    if sampling.top_p < 1.0:
        before_V = np.cumsum(probs_V) - probs_V
        kept = max(1, int((before_V < sampling.top_p).sum()))
        order_V, probs_V = order_V[:kept], probs_V[:kept] / probs_V[:kept].sum()
    return int(rng.choice(order_V, p=probs_V))

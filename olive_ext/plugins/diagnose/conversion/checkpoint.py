"""An ONNX model held against the checkpoint it was made of, on random texts of growing length."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from olive_ext.engine.runners.hf.plain_pass import PlainPass
from olive_ext.errors import ModelError, UnsupportedError, first_line
from olive_ext.graph.nodes import half_type, quantizing_operator
from olive_ext.model import ResolvedModel
from olive_ext.model.files.content import load_graph
from olive_ext.plugins.diagnose.conversion.agreement import Agreement, Difference, Omission
from olive_ext.plugins.diagnose.conversion.hidden_states import (
    LARGEST_ERROR,
    MOST_TOKENS,
    first_state_difference,
    states_error,
)
from olive_ext.plugins.diagnose.conversion.omissions import hypotheses, near
from olive_ext.run.export import LARGEST_DIFFERENCE, logprobs

logger = logging.getLogger(__name__)

Text = tuple[int, ...]
Logprobs = npt.NDArray[np.float64]

ROUNDING_FACTOR = 4.0
"""How much farther from transformers in fp32 a graph may be than transformers in the graph's own precision are, or in
fp64 where that is fp32."""

EXPLAINED = 100.0
"""How much nearer to the graph transformers come by what explains the difference."""

SHARP = 10.0
"""How much larger the largest difference is than all before the length at which texts are said to part."""

SHORTEST, LONGEST = 4, 1024
"""Tokens of the shortest text, and of the longest where `max_length` does not say."""


@dataclass(frozen=True)
class _Scored:
    """The same texts by both."""

    plain: PlainPass
    texts: list[Text]
    expected: list[Logprobs]
    given: list[Logprobs]

    @classmethod
    def by(cls, model: ResolvedModel, checkpoint: ResolvedModel) -> _Scored:
        """Raises `ModelError` for other vocabularies."""
        plain = PlainPass(checkpoint)
        if plain.vocab_size != model.spec.vocab_size:
            raise ModelError(
                f"'{model.name}' has {model.spec.vocab_size} tokens and '{checkpoint.name}' {plain.vocab_size}: it was "
                "not made of this checkpoint"
            )
        texts = _texts(model, checkpoint, plain)
        return cls(plain, texts, [plain.logprobs(text) for text in texts], logprobs(model, texts))

    @cached_property
    def apart(self) -> list[Logprobs]:
        """Nats of each text's tokens."""
        return [_apart(one, other) for one, other in zip(self.given, self.expected, strict=True)]

    def farthest_from(self, other: PlainPass, rows: Sequence[Logprobs], limit: float = np.inf) -> float:
        """The largest difference between `rows` and `other`; the first above `limit` ends it."""
        largest = 0.0
        for text, row in zip(self.texts, rows, strict=True):
            largest = max(largest, float(_apart(other.logprobs(text), row).max()))
            if not largest <= limit:
                break
        return largest


def hold_against(model: ResolvedModel, checkpoint: ResolvedModel) -> Agreement:
    """How far `model`, an ONNX one, is from `checkpoint`, a Hugging Face one.

    Raises `ConfigError` for models that are not such, `ModelError` for those that do not take text alone or have other
    vocabularies.
    """
    _refuse(model, checkpoint)
    graph, scored = load_graph(model.files.decoder), _Scored.by(model, checkpoint)
    lengths = scored.plain.lengths
    agreement = Agreement(
        checkpoint=checkpoint.name,
        texts=tuple(Difference(len(row) + 1, float(row.max())) for row in scored.apart),
        bound=LARGEST_DIFFERENCE,
        bound_reason="rounding in fp32",
        quantized_by=quantizing_operator(graph),
        unseen={name: number for name, number in lengths.items() if number + 2 > len(scored.texts[-1])},
    )
    states_bound = LARGEST_ERROR
    if not agreement.nats <= agreement.bound and not agreement.quantized_by:
        other = half_type(graph) or "float64"
        nats, error = _rounding(checkpoint, other, scored)
        if ROUNDING_FACTOR * nats > agreement.bound:
            reason = f"{ROUNDING_FACTOR:g} times the distance of transformers in {other}"
            agreement = replace(agreement, bound=ROUNDING_FACTOR * nats, bound_reason=reason)
        states_bound += ROUNDING_FACTOR * error
    first = next((place for place, text in enumerate(agreement.texts) if not text.nats <= agreement.bound), None)
    if first is None:
        return agreement
    agreement = _placed(agreement, scored, first)
    agreement = replace(agreement, near=near(lengths, agreement.equal_up_to or 0))
    if agreement.quantized_by:
        return agreement
    agreement = replace(agreement, omission=_omission(checkpoint, scored, agreement))
    shown = next((text for text in reversed(scored.texts[first:]) if len(text) <= MOST_TOKENS), scored.texts[first])
    try:
        state_difference = first_state_difference(scored.plain, model, shown, states_bound)
    except ModelError as error:
        return replace(agreement, states_note=str(error))
    note = "hidden states are equal: the LM head, its weights, scale or cap, is not"
    return replace(agreement, state_difference=state_difference, states_note="" if state_difference else note)


def _rounding(checkpoint: ResolvedModel, dtype: str, scored: _Scored) -> tuple[float, float]:
    """How far transformers in that precision are: in nats, and in states. Nothing where they cannot compute in it, as
    experts in fp64 and large states in fp16, which overflow."""
    other, text = PlainPass(checkpoint, dtype), scored.texts[0]
    try:
        states = states_error(scored.plain.states(text), other.states(text))
        nats = scored.farthest_from(other, scored.expected)
    except RuntimeError:
        return 0.0, 0.0
    return (nats, states) if np.isfinite(nats) else (0.0, 0.0)


def _placed(agreement: Agreement, scored: _Scored, first: int) -> Agreement:
    """With the number of tokens that are equal; `first` is the first text that differs. Where what is before comes near
    the bound, a small difference is everywhere, and no length makes it."""
    wrong = int(np.argmax(~(scored.apart[first] <= agreement.bound))) + 1
    before = len(scored.texts[first - 1]) if first else 0
    equal = [*scored.apart[:first], scored.apart[first][: wrong - 1]]
    if max((float(row.max()) for row in equal if len(row)), default=0.0) > agreement.nats / SHARP:
        return replace(agreement, equal_up_to=0)
    if wrong < before:
        return replace(agreement, equal_up_to=before, is_by_text=True)
    return replace(agreement, equal_up_to=wrong if wrong >= SHORTEST else 0)


def _refuse(model: ResolvedModel, checkpoint: ResolvedModel) -> None:
    if checkpoint.kind != "hf":
        raise UnsupportedError(
            f"'{checkpoint.settings.model}' is no checkpoint: give a Hugging Face model, in a folder or by name"
        )
    if model.kind != "onnx" or not model.runtime.runs_graph:
        raise UnsupportedError(f"'{model.settings.model}': only an ONNX model can be held against a checkpoint")
    if model.source is not None or checkpoint.source is not None:
        raise ModelError(
            f"'{model.name}' cannot be held against a checkpoint: only models of text alone can, and its "
            "decoder is fed by an encoder"
        )


def _texts(model: ResolvedModel, checkpoint: ResolvedModel, plain: PlainPass) -> list[Text]:
    """Random ones of growing length, among them one beyond each number of tokens in the checkpoint's configuration.
    Tokens that stand for pictures and sounds are not among theirs."""
    context = min(plain.context_length, model.spec.context_length)
    longest = min(context, model.settings.max_length or LONGEST)
    doubled = [SHORTEST << power for power in range(longest.bit_length())]
    lengths = sorted({min(number, longest) for number in (*doubled, *plain.lengths_beyond)})
    media = {entry.placeholder for entry in checkpoint.media.inputs} if checkpoint.media is not None else set()
    random, ids = np.random.default_rng(0), [token for token in range(plain.vocab_size) if token not in media]
    return [tuple(random.choice(ids, length).tolist()) for length in lengths]


def _apart(one: Logprobs, other: Logprobs) -> Logprobs:
    """Nats of each token; infinite where one is no number."""
    return np.nan_to_num(np.abs(one - other), nan=np.inf)


def _omission(checkpoint: ResolvedModel, scored: _Scored, agreement: Agreement) -> Omission | None:
    """Quietly, as transformers warn of weights that a shorter configuration leaves over: see `_explanation`."""
    disabled = logging.root.manager.disable
    logging.disable(max(disabled, logging.WARNING))
    try:
        return _explanation(checkpoint, scored, agreement)
    finally:
        logging.disable(disabled)


def _explanation(checkpoint: ResolvedModel, scored: _Scored, agreement: Agreement) -> Omission | None:
    """The first hypothesis by which transformers equal the graph on all texts; else the best by which they come
    `EXPLAINED` times as near."""
    best, limit = None, agreement.nats / EXPLAINED
    for one in hypotheses(scored.plain.config):
        try:
            changed = PlainPass(checkpoint, changes=one.changes)
            if one.rotated is not None:
                changed.regroup(one.rotated)
            nats = scored.farthest_from(changed, scored.given, limit)
        except Exception as error:  # noqa: BLE001 - whatever transformers raise for what nobody has configured
            logger.debug("'%s' cannot be tried: %s", one.text, first_line(error))
            continue
        if nats <= limit:
            best, limit = Omission(one.text, nats), nats
        if limit <= agreement.bound and best is not None:
            break
    return best

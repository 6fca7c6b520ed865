"""What came of holding an ONNX model against its checkpoint: plain data, and its sentence. Knows no model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Difference:
    """Of one text."""

    num_tokens: int
    nats: float
    """The largest difference of a token's log-probability."""


@dataclass(frozen=True)
class Omission:
    """What was changed in transformers for them to compute what the graph computes."""

    text: str
    """ "a sliding window of 16 is missing"."""

    nats: float
    """How far transformers are from the graph then."""

    def sentence(self) -> str:
        """The text and its proof."""
        return f"{self.text} (so changed, transformers are within {self.nats:.2g} nats)"


@dataclass(frozen=True)
class StateDifference:
    """Where hidden states part: the first value of transformers that is nowhere in the graph."""

    place: str
    """ "layer 3", "the embeddings", "the last norm" or "the LM head"."""

    part: str
    """The layer's module whose output is the first that differs; empty where none is told apart."""

    behind: str
    """The last module whose output is still in the graph; empty where there is none."""

    token: int
    """The first token whose state differs, counted from 1."""

    error: float
    """The largest error of a token's state, relative to its length."""

    def sentence(self) -> str:
        """ "hidden states part in layer 0 (self_attn), from token 17 on"."""
        part = f" ({self.part})" if self.part else ""
        behind = f"; '{self.behind}' is still equal" if self.behind else ""
        error = f"by {self.error:.2g} of their size"
        return f"hidden states part in {self.place}{part}, from token {self.token} on, {error}{behind}"


@dataclass(frozen=True)
class Agreement:
    """How far an ONNX model and its checkpoint are apart, and where that begins."""

    checkpoint: str
    texts: tuple[Difference, ...]
    """From short to long."""

    bound: float
    """Nats that are rounding."""

    bound_reason: str
    """Why `bound` is no smaller."""

    equal_up_to: int | None = None
    """Tokens of a text that are equal, counted from its first; None where all texts are."""

    is_by_text: bool = False
    """Whether a text differs from its first tokens on as soon as it is longer than `equal_up_to`."""

    quantized_by: str = ""
    """An operator by which the model is quantized; empty of a float model."""

    unseen: Mapping[str, int] = field(default_factory=dict)
    """Numbers of tokens in the checkpoint's configuration that no text reached."""

    near: str = ""
    """The configuration's value that begins to count where texts begin to differ."""

    state_difference: StateDifference | None = None
    states_note: str = ""
    """Why no layer is named."""

    omission: Omission | None = None

    @property
    def reason(self) -> str:
        """What counts as equal, and why."""
        return f"at most {self.bound:.2g} is {self.bound_reason}"

    @property
    def is_equal(self) -> bool:
        """Whether all texts are."""
        return self.equal_up_to is None

    @property
    def nats(self) -> float:
        """The largest difference of all texts."""
        return max(text.nats for text in self.texts)

    def sentence(self) -> str:
        """The result in one sentence."""
        apart = f"up to {self.nats:.2g} nats apart on texts of up to {self.texts[-1].num_tokens} tokens"
        if self.is_equal:
            short = [f"no text reached '{name}' of {number}" for name, number in self.unseen.items()]
            return "; ".join([f"equal to the checkpoint: {apart}", *short])
        if self.quantized_by:
            return (
                f"{apart}; the model is quantized ({self.quantized_by}): quantization and conversion cannot be told "
                "apart without the float model, which can be held against the checkpoint in the same way"
            )
        where = self._where() + (f": {self.omission.sentence()}" if self.omission is not None else self.near)
        layer = self.state_difference.sentence() if self.state_difference is not None else self.states_note
        return "; ".join(filter(None, (f"differs from '{self.checkpoint}', {apart}", where, layer)))

    def _where(self) -> str:
        if not self.equal_up_to:
            return "at every length"
        if self.is_by_text:
            return f"texts of up to {self.equal_up_to} tokens are equal, longer ones differ from their first tokens on"
        return f"equal up to {self.equal_up_to} tokens, not behind"

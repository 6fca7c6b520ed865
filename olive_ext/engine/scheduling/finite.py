"""Finds outputs that no working model has, before they look like scores. Knows no runner.

Lawful are a log-probability of -inf (a suppressed token) and -inf among the logits of a row. Axes: T targets, K sampled
rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from olive_ext.engine.scheduling.planned_step import PlannedStep
from olive_ext.engine.step import StepOutput
from olive_ext.errors import NonFiniteError

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class NonFinite:
    """What is wrong in a step's output: the targets whose log-probability is NaN or +inf, or whose KL divergence from a
    reference is not finite (it is infinite where the model gives a token no probability at all that the reference gives
    one), and the rows to sample from that hold NaN or +inf."""

    targets_T: BoolArray
    samples_K: BoolArray

    @classmethod
    def of(cls, output: StepOutput) -> NonFinite:
        targets_T: BoolArray = ~(output.target_logprobs < np.inf)
        if output.notes_T is not None and "kl" in (output.notes_T.dtype.names or ()):
            targets_T |= ~np.isfinite(output.notes_T["kl"])
        samples_K = np.logical_not((output.sample_logits_KV < np.inf).all(-1))
        return cls(targets_T, samples_K)

    def refuse(self, planned: PlannedStep, output: StepOutput, num_steps: int) -> None:
        """Raises `NonFiniteError` where anything is wrong, which names the first such request and position; `num_steps`
        is the step's number."""
        if self.targets_T.any():
            place = int(self.targets_T.argmax())
            index, token = planned.step.targets[place]
            logprob = f"log-probability of token {token}: {output.target_logprobs[place]}"
            kl = "" if output.notes_T is None else f", KL divergence from the reference: {output.notes_T['kl'][place]}"
            raise _error(planned, index, f"{logprob}{kl}, step {num_steps}")
        if self.samples_K.any():
            index = planned.step.samples[int(self.samples_K.argmax())]
            raise _error(planned, index, f"a logit is NaN or infinite, step {num_steps}")


def _error(planned: PlannedStep, index: int, found: str) -> NonFiniteError:
    """The error about logits row `index` of a step."""
    logits_row = planned.step.logits_rows[index]
    row, sequence = planned.step.rows[logits_row.row], planned.sequences[logits_row.row]
    position = row.past + logits_row.offset
    assert sequence is not None
    reads = sequence.reads.get(position, ())
    answer = reads[0].answer if reads else sequence.answer
    key = answer.key if answer is not None else "?"
    return NonFiniteError(
        f"request {key!r}: the model's output behind {position + 1} tokens is not finite ({found}): its weights, its "
        "data type or the execution provider give NaN or infinity",
        " (`olive-ext check MODEL --verify` finds the layer; 'non_finite' = \"report\" counts such requests instead)",
    )

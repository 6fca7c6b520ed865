"""How many numbers of a quantized model are farther from the float model's than rounding puts them.

Another checkpoint's are, and those of algorithms that change weights beforehand. Knows MatMulNBits alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import onnx.numpy_helper

from olive_ext.graph.nodes import attribute
from olive_ext.remedy.pairing import Target
from olive_ext.remedy.sources import Sources
from olive_ext.remedy.weights import GraphWeights, Matrix

MOST_WEIGHTS = 16
"""Weights that are looked at, evenly among all."""

TOLD = 0.01
"""Share from which on it is told."""

_SLACK = 1.01
"""Scales in half precision are not exactly those that were rounded by."""


def share_beyond(targets: Iterable[Target], sources: Mapping[str, Sources]) -> float:
    """The share of the numbers in blocks that lie more than a step of their block's grid from the float ones: none does
    that was rounded to nearest, half a step away, or a whole one at an end of the grid."""
    known = [one for one in targets if not one.is_joined and one.quantized[0].node.op_type == "MatMulNBits"]
    beyond = count = 0
    for target in known[:: -(-len(known) // MOST_WEIGHTS) or 1]:
        of_part, own, use = sources[target.part], target.floats[0], target.quantized[0]
        numbers, wanted = of_part.quantized.matrix(use), of_part.floats.matrix(own)
        difference = np.abs((wanted.T if own.is_transposed else wanted) - numbers)
        beyond += int((difference > _SLACK * _steps(of_part.quantized, use.node, *numbers.shape)).sum())
        count += difference.size
    return beyond / count if count else 0.0


def _steps(weights: GraphWeights, node: onnx.NodeProto, num_inputs: int, num_outputs: int) -> Matrix:
    """The distance of neighbours on each number's grid [K, N]."""
    scales = onnx.numpy_helper.to_array(weights.tensor(node.input[2])).astype(np.float32)
    blocks = np.abs(scales.reshape(num_outputs, -1))
    steps: Matrix = np.repeat(blocks, int(attribute(node, "block_size", 32)), axis=1)[:, :num_inputs].T
    return steps


def doubt(share: float) -> tuple[str, ...]:
    """One sentence where so large a share is no rounding."""
    if share <= TOLD:
        return ()
    return (
        f"{100 * share:.0f} % of the numbers lie farther from the float model's than rounding to blocks puts any: "
        "it is of another checkpoint, or weights were changed before they were rounded (AWQ, GPTQ).",
    )

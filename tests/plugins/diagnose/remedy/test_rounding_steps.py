"""What rounding does is told from another checkpoint's weights."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer

from olive_ext.model.files.constants import Array, distances
from olive_ext.plugins.diagnose.remedy.loss_map import doubt
from olive_ext.plugins.diagnose.remedy.weights import GraphWeights
from tests.graph import quantized as graphs


def rounded(matrix: Array, bits: int, *, is_symmetric: bool) -> onnx.ModelProto:
    config = DefaultWeightOnlyQuantConfig(block_size=32, is_symmetric=is_symmetric, bits=bits)
    quantizer = MatMulNBitsQuantizer(graphs.plain(matrix), algo_config=config)
    quantizer.process()
    model: onnx.ModelProto = quantizer.model.model
    return model


def share(floats: Array, others: Array, bits: int, *, is_symmetric: bool = True) -> float:
    of_graph = (
        GraphWeights(graphs.plain(floats), Path()),
        GraphWeights(rounded(others, bits, is_symmetric=is_symmetric), Path()),
    )
    (distance,) = distances(*of_graph).values()
    return distance.share


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("is_symmetric", [True, False])
def test_rounding_moves_no_number_by_more_than_a_step(bits: int, is_symmetric: bool) -> None:
    weight = graphs.random_weight(1)
    assert share(weight, weight, bits, is_symmetric=is_symmetric) == 0
    assert not doubt({}, {"w": 0.0})


@pytest.mark.parametrize(("bits", "noise"), [(4, 0.3), (8, 0.05)])
def test_another_checkpoint_is_told(bits: int, noise: float) -> None:
    weight = graphs.random_weight(1)
    found = share(weight, weight + noise * graphs.random_weight(2), bits)
    assert 0.05 < found < 1
    (told,) = doubt({}, {"w": found})
    assert told.startswith(f"{100 * found:.0f} % of the numbers, and {100 * found:.0f} % of those of 'w', lie farther")

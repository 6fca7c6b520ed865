"""The precisions that a weight may have in a mended model, and a weight's numbers in them, a slab of columns at a time.

The room's only door to ONNX Runtime's quantizer. Knows weights as matrices, no graph. Axes: K inputs and N outputs of a
product, B blocks of K.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

SLAB_BYTES = 1 << 26
"""Float numbers that are in memory at a time while a weight is quantized."""


@dataclass(frozen=True)
class Precision:
    """How the numbers of a weight are stored: floating point as in the rest of the graph, or integers in blocks."""

    bits: int = 0
    """The bits of the integers; 0 for floating point."""

    block_size: int = 0

    @property
    def name(self) -> str:
        """ "float", or e.g. "int8 in blocks of 32"."""
        return f"int{self.bits} in blocks of {self.block_size}" if self.bits else "float"


FLOAT = Precision()


class PackedWeight:
    """A weight [K, N] as MatMulNBits takes it, by ONNX Runtime's own tool: each column in blocks along K."""

    def __init__(
        self, weight: Callable[[], Array], dtype: np.dtype[Any], precision: Precision, *, is_symmetric: bool
    ) -> None:
        """`weight` gives the matrix, as a view on a file where it is large; `dtype` is that of the scales."""
        self._weight, self._dtype, self._precision, self._is_symmetric = weight, dtype, precision, is_symmetric
        self._num_inputs, self._num_outputs = num_inputs, num_outputs = weight().shape
        blocks, bits = -(-num_inputs // precision.block_size), precision.bits
        self.packed_shape = (num_outputs, blocks, precision.block_size * bits // 8)
        self.scales_shape = (num_outputs, blocks)
        self.zeros_shape = (num_outputs, -(-blocks * bits // 8))
        self._scales: list[Array] = []
        self._zeros: list[Array] = []

    def packed(self) -> Iterator[Array]:
        """The integers [N, B, bytes of a block], by rows; scales and zero points are kept for after them."""
        self._scales, self._zeros = [], []
        for packed, scales, zeros in self._slabs():
            self._scales.append(scales.astype(self._dtype))
            self._zeros.append(zeros)
            yield packed

    def scales(self) -> Iterator[Array]:
        """[N, B]."""
        self._finish()
        yield from self._scales

    def zeros(self) -> Iterator[Array]:
        """Zero points [N, bytes of B of them], uint8."""
        self._finish()
        yield from self._zeros

    def _finish(self) -> None:
        if sum(len(slab) for slab in self._scales) < self._num_outputs:
            for _ in self.packed():
                pass

    def _slabs(self) -> Iterator[tuple[Array, Array, Array]]:
        from onnxruntime.quantization import matmul_nbits_quantizer as nbits  # imported here: it takes seconds

        config = nbits.DefaultWeightOnlyQuantConfig(
            block_size=self._precision.block_size, is_symmetric=self._is_symmetric, bits=self._precision.bits
        )
        quantizer = nbits.DefaultWeightOnlyQuantizer(config)
        in_tool = self._dtype if self._dtype in (np.float32, np.float16) else np.dtype(np.float32)
        columns = max(1, SLAB_BYTES // (self._num_inputs * in_tool.itemsize))
        for first in range(0, self._num_outputs, columns):
            slab = self._weight()[:, first : first + columns]
            yield quantizer.qbits_block_quant(np.ascontiguousarray(slab.astype(self._dtype).astype(in_tool)))

"""Graphs as Olive's quantization passes and surgeries leave them: scored as they are, under their own names."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

from olive_ext.graph.scoring_head import add_scoring_head
from olive_ext.model.spec.attention import rounding_notes
from tests.graph import heads
from tests.graph.heads import WEIGHT, H, Parts, V, decoder
from tests.graph.test_scoring_head import OUTPUTS, assert_scores, feeds, picks, session

BLOCK = 16
BLOCKS = H // BLOCK
SCALE = np.float32(0.03)
_RNG = np.random.default_rng(11)


def packed(bits: int) -> np.ndarray:
    """A weight as MatMulNBits stores it: uint8[V, blocks, bytes of a block]."""
    return _RNG.integers(0, 256, (V, BLOCKS, BLOCK * bits // 8), dtype=np.uint8)


def nbits(p: Parts, bits: int, weight: str, *, level: int | None = None, out: str = "logits") -> None:
    scales = p.weight("scales", np.full((V, BLOCKS), SCALE / bits))
    zeros = p.weight("zeros", np.full((V, BLOCKS * bits // 8), 0x88 if bits == 4 else 0x80, np.uint8))
    attributes = {"K": H, "N": V, "bits": bits, "block_size": BLOCK}
    if level is not None:
        attributes["accuracy_level"] = level
    p.node("MatMulNBits", ["h", weight, scales, zeros], out, domain="com.microsoft", **attributes)


def at_level(bits: int, level: int | None):
    return lambda p: nbits(p, bits, p.weight("w", packed(bits)), level=level)


def tied_quantized(p: Parts, bits: int) -> None:
    """TieWordEmbeddings and ShareEmbeddingLmHead: the head reshapes the table that GatherBlockQuantized reads."""
    table = p.weight("embed", packed(bits).reshape(V, -1))
    p.node("Reshape", [table, p.weight("shape", [V, BLOCKS, -1], np.int64)], "w")
    nbits(p, bits, "w", level=4)
    ids = p.weight("ids", np.zeros((1, 1)), np.int64)
    attributes = {"bits": bits, "block_size": BLOCK, "gather_axis": 0, "quantize_axis": 1}
    p.node("GatherBlockQuantized", [table, ids, "scales", "zeros"], "e", domain="com.microsoft", **attributes)


def tied_float(p: Parts) -> None:
    """TieWordEmbeddings on floats: Gemm over flattened rows, the shape cut and put together again."""
    p.node("Reshape", ["h", p.weight("flat", [-1, H], np.int64)], "h2")
    p.node("Gemm", ["h2", p.weight("embed", WEIGHT.T)], "flat_logits", alpha=1.0, beta=1.0, transA=0, transB=1)
    p.node("Shape", ["h"], "shape")
    bounds = [p.weight(name, [value], np.int64) for name, value in (("start", 0), ("end", -1), ("axis", 0), ("by", 1))]
    p.node("Slice", ["shape", *bounds], "lead")
    p.node("Concat", ["lead", p.weight("width", [V], np.int64)], "full", axis=0)
    p.node("Reshape", ["flat_logits", "full"], "logits")


def block_qdq(p: Parts) -> None:
    """MatMulNBitsToQDQ and the builder's use_qdq: a 4-bit weight dequantized by blocks."""
    integers = _RNG.integers(-8, 8, H * V)
    p.weights.append(helper.make_tensor("w", TensorProto.INT4, [H, V], integers))
    p.weights.append(helper.make_tensor("zeros", TensorProto.INT4, [BLOCKS, V], np.zeros(BLOCKS * V, np.int64)))
    scales = p.weight("scales", np.full((BLOCKS, V), SCALE))
    p.node("DequantizeLinear", ["w", scales, "zeros"], "w32", axis=0, block_size=BLOCK)
    p.node("MatMul", ["h", "w32"], "logits")


def bnb4(p: Parts) -> None:
    weight = p.weight("w", _RNG.integers(0, 256, H * V // 2, dtype=np.uint8))
    largest = p.weight("absmax", np.full(H * V // BLOCK, 0.3, np.float32))
    attributes = {"K": H, "N": V, "block_size": BLOCK, "quant_type": 1}
    p.node("MatMulBnb4", ["h", weight, largest], "logits", domain="com.microsoft", **attributes)


GRAPHS = {
    **{f"int{bits}_level_{level}": at_level(bits, level) for bits in (4, 8) for level in (None, 0, 1, 2, 3, 4)},
    "tied_int4": lambda p: tied_quantized(p, 4),
    "tied_int8": lambda p: tied_quantized(p, 8),
    "tied_float": tied_float,
    "block_qdq": block_qdq,
    "bnb4": bnb4,
}


@pytest.mark.parametrize("name", GRAPHS)
def test_rows_are_picked_before_the_product_and_score_as_the_untouched_logits(name: str) -> None:
    model = decoder(GRAPHS[name])
    scoring = add_scoring_head(model, "logits")
    assert scoring.kind == "hidden", scoring.reason
    logits = session(model).run(["logits"], feeds(model))[0]
    chosen = picks(6, 9, 2)

    outputs = session(scoring.model).run(OUTPUTS, {**feeds(model), **chosen})

    assert np.ptp(logits) > 1
    assert_scores(outputs, logits, chosen)


@pytest.mark.parametrize(("bits", "name"), [(4, "logits_Q4"), (8, "logits_Q8")])
def test_head_takes_the_place_of_the_logits_that_a_pass_has_renamed(bits: int, name: str) -> None:
    model = decoder(lambda p: nbits(p, bits, p.weight("w", packed(bits)), out=name), logits=name)
    scoring = add_scoring_head(model, name)
    chosen = picks(4, 6, 2)

    outputs = session(scoring.model).run(OUTPUTS, {**feeds(model), **chosen})

    assert name not in {output.name for output in scoring.model.graph.output}
    assert_scores(outputs, session(model).run([name], feeds(model))[0], chosen)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("level", range(5))
def test_a_row_scores_alike_whatever_is_fed_beside_it(level: int, bits: int) -> None:
    """MatMulNBits rounds activations, where it does, for each row by itself."""
    model = decoder(at_level(bits, level))
    opened = session(model)
    hidden = feeds(model)["hidden"].reshape(1, -1, H)
    together = opened.run(["logits"], {"hidden": hidden})[0]

    alone = [opened.run(["logits"], {"hidden": hidden[:, i : i + 1]})[0] for i in range(hidden.shape[1])]

    np.testing.assert_allclose(np.concatenate(alone, axis=1), together, atol=2e-5)


def test_note_tells_of_scales_that_all_tokens_of_a_step_share() -> None:
    (note,) = rounding_notes(decoder(heads.dynamic_integer).graph.node)

    assert note.startswith("the activations of all tokens of a step are quantized with one scale (1 nodes)")


@pytest.mark.parametrize(
    ("build", "num_nodes"),
    [(at_level(4, 4), 1), (heads.qdq, 2), (block_qdq, 1)],
    ids=["accuracy_level_4", "QuantizeLinear", "fused"],
)
def test_note_tells_of_activations_rounded_row_by_row(build: heads.Build, num_nodes: int) -> None:
    (note,) = rounding_notes(decoder(build).graph.node)

    assert note.startswith(f"activations are rounded to few bits, each row by itself ({num_nodes} nodes")


@pytest.mark.parametrize("build", [heads.matmul, *(at_level(4, level) for level in (None, 0, 1, 2, 3))])
def test_no_note_where_nothing_is_rounded(build: heads.Build) -> None:
    assert rounding_notes(decoder(build).graph.node) == []

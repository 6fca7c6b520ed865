"""The scoring head against numpy's log-softmax over the logits of the untouched graph, for heads as exporters write
them and Olive's passes leave them, and for last layers that run on the scored rows only."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from olive_ext.errors import ModelError
from olive_ext.graph.scoring_head import HeadOutputs, add_scoring_head, check_scoring, scoring_graph
from olive_ext.model.spec.attention import rounding_notes, step_scale
from tests.graph import heads
from tests.graph.heads import H, V, decoder
from tests.graph.layers import FF, flat_layer, layer
from tests.refusals import refused, tells

pytestmark = pytest.mark.rounded

B, S = 2, 5
HALF_ATOL = 2e-2
"""On CPU, ONNX Runtime computes float16 in float32 and rounds or not, depending on what follows."""

LATE_ATOL = 2e-6

OUTPUTS = ["target_logprobs", "greedy_ids", "sample_logits"]


class Case(NamedTuple):
    """A graph, and how it is scored."""

    model: Callable[[], onnx.ModelProto]
    reason: str = ""
    kind: str = "hidden"
    products: tuple[tuple[int, int], ...] = ()
    """Sizes of the products before the head's that run on scored rows only."""

    atol: float = 2e-5


def head(name: str | heads.Head, reason: str = "", kind: str = "hidden", **more: Any) -> Case:
    return Case(partial(decoder, name, **more), reason, kind)


def late(name: str, *products: tuple[int, int], **form: Any) -> Case:
    reason = f"MultiHeadAttention: MatMul, {len(products)}"
    return Case(partial(layer, name, **form), reason, products=products, atol=LATE_ATOL)


def kept(name: str, reason: str, **form: Any) -> Case:
    return Case(partial(layer, name, **form), f"further {reason}")


IS_OLD_RUNTIME = tuple(map(int, ort.__version__.split(".")[:2])) < (1, 24)
OUT, UP, DOWN = (H, H), (H, FF), (FF, H)
UNKNOWN = "{} has values of which it is not known that they hold the positions"
OF_HEAD = (
    *("matmul", "matmul_transposed", "matmul_of_half_weight", "gemm", "bias", "softcap", "masked_tokens"),
    *("fused_matmul", "dequantized_weight", "qdq", "qlinear", "tied_float", "block_qdq", "bnb4"),
)
CASES: dict[str, Case] = {
    **{name: head(name) for name in OF_HEAD},
    "half": head("half")._replace(atol=HALF_ATOL),
    "half_logits": head("half_logits", elem_type=TensorProto.FLOAT16)._replace(atol=HALF_ATOL),
    **{f"int{bits}, level {at}": head(heads.nbits(bits, at)) for bits in (4, 8) for at in (None, 0, 1, 2, 3, 4)},
    **{f"tied_int{bits}": head(heads.tied_quantized(bits)) for bits in (4, 8)},
    **{
        f"{name}, opset {opset}": head(name, opset=opset)
        for name in ("matmul", "gemm", "softcap")
        for opset in (11, 12, 13, 17, 18, 21, *(() if IS_OLD_RUNTIME else (24,)))
    },
    "variable_weight": head("variable_weight", "'w_in'", "logits"),
    "adapter": head("adapter", "combines", "logits"),
    "unknown width": head("adapter", "combines", "logits", width="V"),
    "hidden width": head("gemm", "reshape", "logits", width="V"),
    "dynamic_integer": head("dynamic_integer", "combines", "logits"),
    "per_position_bias": head("per_position_bias", "differ", "logits"),
    "normalized": head("normalized", "row-wise", "logits"),
    "skip_norms": late("skip_norms", OUT, UP, UP, DOWN),
    "skip_layer_norms": late("skip_layer_norms", OUT, UP, DOWN),
    "written_out_norm": late("written_out_norm", OUT, UP, DOWN),
    "packed_mlp": late("packed_mlp", OUT, (H, 2 * FF), DOWN),
    "flattened_products": late("flattened_products", OUT, UP, DOWN),
    "parallel": late("parallel", OUT, UP, DOWN),
    "per_layer_embedding": late("per_layer_embedding", OUT, (H, 8), (8, H)),
    "packed_weights": late("packed_weights", OUT, (H, H)),
    "half layer": late("half", OUT, (H, H))._replace(atol=HALF_ATOL),
    "static_scales": late("static_scales", OUT, (H, H)),
    **{f"layer, opset {opset}": late("skip_norms", OUT, UP, UP, DOWN, opset=opset) for opset in (13, 17, 18, 21)},
    "fixed positions": late("skip_norms", OUT, UP, UP, DOWN, lead=(B, S))._replace(atol=2e-5),
    "no batch": Case(partial(flat_layer, "skip_norms"), "", "hidden", (OUT, UP, UP, DOWN), LATE_ATOL),
    "norms_only": kept("norms_only", "Softmax 'mixed'"),
    "one_scale": kept("one_scale", UNKNOWN.format("Mul 'scaled'")),
    "different_positions": kept("different_positions", "'out'"),
    "fixed different positions": kept("different_positions", "Add 'out' 'by_position'", lead=(B, S)),
    "mean_of_positions": kept("mean_of_positions", UNKNOWN.format("Sub 'out'")),
    "norm_of_positions": kept("norm_of_positions", "LayerNormalization 'out'"),
    "shared_skip": kept("shared_skip", UNKNOWN.format("SkipSimplifiedLayerNormalization 'out'")),
    "one_position": kept("one_position", UNKNOWN.format("Add 'out'")),
    "turned_positions": kept("turned_positions", "'out'"),
    "given_shape": kept("given_shape", "'out'"),
    "other_width": kept("other_width", "Reshape 'out'"),
}


def session(model: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def feeds(model: onnx.ModelProto, scale: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    sizes = {"B": B, "S": S, "N": B * S}
    arrays: dict[str, np.ndarray] = {"given": np.array([B, S, H])}
    for value in model.graph.input:
        shape = [sizes.get(dim.dim_param, dim.dim_value) for dim in value.type.tensor_type.shape.dim]
        arrays.setdefault(value.name, (scale * rng.standard_normal(shape)).astype(np.float32))
    return {value.name: arrays[value.name] for value in model.graph.input}


def picks(num_rows: int, num_targets: int, num_samples: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(num_rows)
    return {
        "score_rows": rng.integers(0, B * S, num_rows),
        "target_rows": rng.integers(0, max(num_rows, 1), num_targets),
        "target_ids": rng.integers(0, V, num_targets),
        "sample_rows": rng.integers(0, max(num_rows, 1), num_samples),
    }


PICKS = [
    picks(*counts) for counts in [(4, 6, 2), (B * S, 30, 0), (0, 0, 0), (3, 0, 0), (3, 2, 0), (3, 0, 2), (1, 1, 1)]
]


def expected(logits: np.ndarray, chosen: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows = logits.reshape(-1, logits.shape[-1]).astype(np.float64)[chosen["score_rows"]]
    largest = rows.max(-1, keepdims=True)
    logprobs = rows - largest - np.log(np.exp(rows - largest).sum(-1, keepdims=True))
    return logprobs[chosen["target_rows"], chosen["target_ids"]], rows.argmax(-1), logprobs[chosen["sample_rows"]]


def assert_scores(
    outputs: list[np.ndarray], logits: np.ndarray, chosen: dict[str, np.ndarray], atol: float = 2e-5
) -> None:
    logprobs, greedy, sample = expected(logits, chosen)
    assert [output.dtype for output in outputs] == [np.float32, np.int64, np.float32]
    assert [output.shape for output in outputs] == [logprobs.shape, greedy.shape, sample.shape]
    np.testing.assert_allclose(outputs[0], logprobs, atol=atol)
    np.testing.assert_array_equal(outputs[1], greedy)
    np.testing.assert_allclose(outputs[2], sample, atol=atol)


def check(scored: onnx.ModelProto) -> None:
    if scored.graph.node[0].op_type == "Add":  # of `decoder`: layers have operators that ONNX does not know
        onnx.checker.check_model(scored)


def assert_equal(
    model: onnx.ModelProto,
    scored: onnx.ModelProto,
    atol: float = 2e-5,
    more: tuple[str, ...] = (),
) -> None:
    """Scores, `present` to the last bit, and the outputs `more` are those of the untouched graph, however many rows,
    targets and samples there are."""
    check(scored)
    logits, present, *others = session(model).run(["logits", "present", *more], feeds(model))
    assert np.ptp(logits) > 0.9
    opened = session(scored)
    for chosen in PICKS:
        outputs = opened.run([*OUTPUTS, "present", *more], {**feeds(model), **chosen})
        assert_scores(outputs[:3], logits, chosen, atol)
        np.testing.assert_array_equal(outputs[3], present)
        for own, other in zip(outputs[4:], others, strict=True):
            np.testing.assert_allclose(own, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_head_equals_log_softmax_of_the_logits_and_says_where_rows_are_picked(name):
    case = CASES[name]
    model = case.model()
    before = model.SerializeToString(deterministic=True)
    edited, scoring = add_scoring_head(model, "logits")
    assert model.SerializeToString(deterministic=True) == before
    assert scoring.kind == case.kind, scoring.reason
    assert sorted(scoring.products) == sorted(case.products), scoring.reason
    assert tells(scoring.reason, case.reason)
    assert scoring.vocab_size == (None if "width" in name and case.kind == "logits" else V)
    assert_equal(model, edited, case.atol)


def test_no_node_computes_more_than_the_scored_rows():
    graph = add_scoring_head(decoder("gemm"), "logits")[0].graph
    assert not {"logits", "flat_logits", "full"} & {name for node in graph.node for name in node.output}
    assert [node.op_type for node in graph.node].count("Gemm") == 1
    assert "v" not in {tensor.name for tensor in graph.initializer}
    edited = add_scoring_head(layer("skip_norms"), "logits")[0]
    made = {name: node for node in edited.graph.node for name in node.output}
    assert {"q", "present", "a"} <= made.keys()
    assert not {"o", "m", "sum", "gate", "up", "act", "down", "f", "logits"} & made.keys()
    picks = [node for node in made.values() if node.op_type == "Gather" and made[node.input[0]].op_type == "Reshape"]
    assert {made[node.input[0]].input[0] for node in picks} >= {"a", "hidden"}


PEAK = helper.make_node("ReduceMax", ["logits"], ["peak"], keepdims=0)
_MOST = helper.make_graph(
    [helper.make_node("ReduceMax", ["up"], ["most"], keepdims=0)],
    "branch",
    [],
    [helper.make_tensor_value_info("most", TensorProto.FLOAT, [])],
)
INNER = helper.make_node("If", ["yes"], ["peak"], then_branch=_MOST, else_branch=_MOST)
ALSO_READ: dict[str, tuple[onnx.ModelProto, list[onnx.NodeProto], str, list[tuple[int, int]]]] = {
    "logits of a head": (decoder("bias"), [PEAK], "peak", []),
    "logits after a layer": (layer("skip_norms"), [PEAK], "peak", []),
    "a value in a subgraph": (layer("skip_norms"), [INNER], "peak", [UP, DOWN]),
    "a value that is an output": (layer("skip_norms"), [], "m", [UP, UP, DOWN]),
    "the last hidden states": (layer("skip_norms"), [], "f", []),
    "a value of the head that nothing else reads": (decoder("gemm"), [], "flat_logits", []),
}


@pytest.mark.parametrize("name", ALSO_READ)
def test_what_else_is_read_is_computed_whole(name):
    model, nodes, output, products = ALSO_READ[name]
    model.graph.initializer.append(helper.make_tensor("yes", TensorProto.BOOL, [], [True]))
    model.graph.node.extend(nodes)
    shape = {"peak": [], "flat_logits": ["N", V]}.get(output, ["B", "S", H])
    model.graph.output.append(helper.make_tensor_value_info(output, TensorProto.FLOAT, shape))
    edited, scoring = add_scoring_head(model, "logits")
    assert scoring.kind == "hidden"
    assert sorted(scoring.products) == sorted(products)
    assert output != "f" or "elsewhere" in scoring.reason
    assert_equal(model, edited, more=(output,))


def test_nothing_moves_where_nodes_are_out_of_order_or_the_caller_has_a_reason():
    model = layer("skip_norms")
    _, scoring = add_scoring_head(model, "logits", keeps_layers="rounding")
    assert (scoring.products, scoring.kind) == ((), "hidden")
    assert scoring.reason.endswith(": rounding")
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([nodes[1], nodes[0], *nodes[2:]])
    _, scoring = add_scoring_head(model, "logits")
    assert scoring.products == ()
    assert "before" in scoring.reason


def test_graph_that_can_have_no_head_is_refused():
    """A name of the head's is taken, the opset is too old, or the number of banned tokens is not known."""
    scored = add_scoring_head(decoder("matmul"), "logits")[0]
    scored.graph.output.append(helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["B", "S", V]))
    scored.graph.node.append(helper.make_node("MatMul", ["h", "w"], ["logits"]))
    with refused(ModelError, "unsupported", holds="score_rows"):
        add_scoring_head(scored, "logits")
    with refused(ModelError, "unsupported", holds=("10", "11")):
        add_scoring_head(decoder("matmul", opset=10), "logits")
    with refused(ModelError, "unsupported", holds="suppressed"):
        scoring_graph(TensorProto.FLOAT, None, outputs=HeadOutputs(bans=((), (1,), (1,))))


def test_logprobs_are_finite_when_logits_are_large():
    model = decoder("matmul")
    logits = session(model).run(["logits"], feeds(model, scale=300.0))[0]
    assert np.abs(logits).max() > 1000
    chosen = picks(B * S, 30, 0)
    scored = session(add_scoring_head(model, "logits")[0]).run(OUTPUTS, {**feeds(model, scale=300.0), **chosen})
    np.testing.assert_allclose(scored[0], expected(logits, chosen)[0], atol=1e-3)


@pytest.mark.parametrize("size", [151936, 128256, 50257])
def test_many_small_terms_are_not_lost_when_the_vocabulary_is_large(size):
    logits = np.full((1, 1, size), -17.5, np.float32)
    logits[0, 0, 5] = 0
    chosen = {"score_rows": [0], "target_rows": [0, 0], "target_ids": [5, 6], "sample_rows": []}
    chosen = {name: np.array(values, np.int64) for name, values in chosen.items()}
    logprobs = session(scoring_graph(TensorProto.FLOAT, size)).run(["target_logprobs"], {"logits": logits, **chosen})[0]
    np.testing.assert_allclose(logprobs, expected(logits, chosen)[0], atol=2e-5)


def test_own_graph_takes_bfloat16():
    opened = session(scoring_graph(TensorProto.BFLOAT16))
    assert opened.get_inputs()[0].type == "tensor(bfloat16)"
    assert [output.type for output in opened.get_outputs()] == ["tensor(float)", "tensor(int64)", "tensor(float)"]


def test_logits_that_are_pruned_or_missing_are_refused():
    picked = "last_h = Gather <axis = 1> (h, last) one_h = Unsqueeze (last_h, one)"
    model = decoder(f"{picked} logits = MatMul (one_h, w)")
    with refused(ModelError, "unsupported", holds="logits"):
        check_scoring(model, "logits")
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 1
    del model.graph.node[2:4]
    with refused(ModelError, "unsupported", holds="logits"):
        check_scoring(model, "logits")
    with refused(ModelError, "unsupported", holds="scores"):
        check_scoring(decoder("matmul"), "scores")


@pytest.mark.parametrize("name", ["gemm", "variable_weight", "half_logits", "skip_norms"])
def test_rows_of_logits_are_exposed_on_request(name):
    model, atol = CASES[name].model(), CASES[name].atol
    logits = session(model).run(["logits"], feeds(model))[0]
    edited, exposing = add_scoring_head(model, "logits", HeadOutputs(exposes_rows=True))
    assert len(exposing.products) == len(CASES[name].products)
    check(edited)
    names = [*OUTPUTS, "score_logits"]
    assert [output.name for output in edited.graph.output][-4:] == names
    opened = session(edited)
    for chosen in PICKS:
        *scores, rows = opened.run(names, {**feeds(model), **chosen})
        assert rows.dtype == np.float32
        wanted = chosen["score_rows"] if len(chosen["score_rows"]) else [0]
        np.testing.assert_allclose(rows, logits.reshape(-1, V)[wanted], atol=atol)
        assert_scores(scores, logits, chosen, atol)


@pytest.mark.parametrize("has_rows", [False, True])
def test_banned_tokens_are_neither_greedy_nor_sampled_and_other_numbers_stay(has_rows):
    model = decoder("gemm")
    logits = session(model).run(["logits"], feeds(model))[0]
    best = logits.reshape(-1, V).argmax(-1)
    bans = ((), tuple(sorted(set(best.tolist()))), (*range(V - 1), V + 5))
    edited = add_scoring_head(model, "logits", HeadOutputs(bans=bans, has_rows=has_rows))[0]
    onnx.checker.check_model(edited)
    opened = session(edited)
    for chosen in [chosen for chosen in PICKS if len(chosen["score_rows"]) or not has_rows]:
        row_bans = np.arange(max(len(chosen["score_rows"]), 1)) % 3
        logprobs, _, sample = expected(logits, chosen)
        found = opened.run(OUTPUTS, {**feeds(model), **chosen, "score_bans": row_bans})
        np.testing.assert_allclose(found[0], logprobs, atol=2e-5)
        rows = logits.reshape(-1, V)[chosen["score_rows"]].astype(np.float64)
        for row, number in zip(rows, row_bans, strict=False):
            row[[token for token in bans[number] if token < V]] = -np.inf
        assert found[1].tolist() == rows.argmax(-1).tolist()
        is_banned = ~np.isfinite(rows[chosen["sample_rows"]])
        assert (found[2][is_banned] < -1e29).all()
        np.testing.assert_allclose(found[2][~is_banned], sample[~is_banned], atol=2e-5)


BY_ROW = "activations are rounded to few bits, each row by itself ({} nodes"
NOTES: dict[str, str] = {
    "dynamic_integer": "the activations of all tokens of a step are quantized with one scale (1 nodes)",
    "int4, level 4": BY_ROW.format(1),
    "qdq": BY_ROW.format(2),
    "block_qdq": BY_ROW.format(1),
    **dict.fromkeys(("matmul", *(f"int4, level {level}" for level in (None, 0, 1, 2, 3))), ""),
}


@pytest.mark.parametrize("name", NOTES)
def test_note_says_how_activations_are_rounded(name):
    nodes = CASES[name].model().graph.node
    notes = [*filter(None, [step_scale(nodes)]), *rounding_notes(nodes)]
    assert len(notes) == bool(NOTES[name])
    assert all(note.startswith(NOTES[name]) for note in notes)

"""What follows the last attention runs on the scored rows only, and gives the same numbers as the untouched graph."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from olive_ext.graph.scoring_head import HeadOutputs, add_scoring_head
from tests.graph import layers
from tests.graph.heads import H, V
from tests.graph.layers import FF, flat_layer, layer
from tests.graph.test_scoring_head import COUNTS, HALF_ATOL, OUTPUTS, B, S, assert_scores, picks, session

pytestmark = pytest.mark.rounded

ATOL = 2e-6
OUT, UP, DOWN = (H, H), (H, FF), (FF, H)
MOVED = [
    (layers.skip_norms, [OUT, UP, UP, DOWN]),
    (layers.skip_layer_norms, [OUT, UP, DOWN]),
    (layers.written_out_norm, [OUT, UP, DOWN]),
    (layers.packed_mlp, [OUT, (H, 2 * FF), DOWN]),
    (layers.flattened_products, [OUT, UP, DOWN]),
    (layers.parallel, [OUT, UP, DOWN]),
    (layers.per_layer_embedding, [OUT, (H, 8), (8, H)]),
    (layers.packed_weights, [OUT, (H, H)]),
    (layers.half, [OUT, (H, H)]),
    (layers.static_scales, [OUT, (H, H)]),
]
REFUSED = [
    (layers.norms_only, "Softmax 'n5' is not known to treat positions one by one"),
    (layers.one_scale, "Mul 'n9' has values of which it is not known that they hold the positions"),
    (layers.different_positions, "the shape of 'out' is not known"),
    (layers.mean_of_positions, "Sub 'n6' has values of which it is not known that they hold the positions"),
    (layers.norm_of_positions, "LayerNormalization 'n5' does not only normalize the last axis"),
    (layers.shared_skip, "has values of which it is not known that they hold the positions"),
    (layers.one_position, "has values of which it is not known that they hold the positions"),
    (layers.turned_positions, "the shape of 'out' is not known"),
    (layers.given_shape, "the shape of 'out' is not known"),
    (layers.other_width, "Reshape 'n7' is not known to keep the rows"),
]


def feeds(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    sizes = {"B": B, "S": S, "N": B * S}
    arrays: dict[str, np.ndarray] = {"given": np.array([B, S, H])}
    for value in model.graph.input:
        shape = [sizes.get(dim.dim_param, dim.dim_value) for dim in value.type.tensor_type.shape.dim]
        arrays.setdefault(value.name, rng.standard_normal(shape).astype(np.float32))
    return {value.name: arrays[value.name] for value in model.graph.input}


def assert_equal(model: onnx.ModelProto, scored: onnx.ModelProto, counts: tuple[int, int, int], atol: float) -> None:
    """Scores and `present` are those of the untouched graph."""
    logits, present = session(model).run(["logits", "present"], feeds(model))
    chosen = picks(*counts)
    outputs = session(scored).run([*OUTPUTS, "present"], {**feeds(model), **chosen})
    assert_scores(outputs[:3], logits, chosen, atol)
    np.testing.assert_array_equal(outputs[3], present)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize(("build", "products"), MOVED, ids=lambda value: getattr(value, "__name__", ""))
def test_layer_behind_the_attention_runs_on_scored_rows(build, products, counts):
    model = layer(build)
    scoring = add_scoring_head(model, "logits")
    assert sorted(scoring.late_products) == sorted(products), scoring.reason
    assert "after the last MultiHeadAttention" in scoring.reason
    assert f"{len(products)} products run on scored rows only" in scoring.reason
    assert_equal(model, scoring.model, counts, HALF_ATOL if build is layers.half else ATOL)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize(("build", "reason"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_rows_are_picked_before_the_head_where_more_is_not_known_to_be_equal(build, reason, counts):
    model = layer(build)
    scoring = add_scoring_head(model, "logits")
    assert scoring.kind == "hidden"
    assert scoring.late_products == ()
    assert reason in scoring.reason.partition("and not further up: ")[2]
    assert_equal(model, scoring.model, counts, 2e-5)


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (layers.different_positions, "combines the rows with 'b', which may differ between rows"),
        (layers.skip_norms, ""),
    ],
)
def test_positions_of_a_fixed_number_are_rows_like_others(build, reason):
    model = layer(build, lead=(B, S))
    scoring = add_scoring_head(model, "logits")
    assert len(scoring.late_products) == (0 if reason else 4)
    assert reason in scoring.reason
    assert_equal(model, scoring.model, (4, 6, 2), 2e-5)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_rows_of_tokens_without_a_batch_are_picked(counts):
    model = flat_layer(layers.skip_norms)
    scoring = add_scoring_head(model, "logits")
    assert len(scoring.late_products) == 4, scoring.reason
    assert_equal(model, scoring.model, counts, ATOL)


def test_no_product_behind_the_attention_reads_more_than_the_scored_rows():
    scoring = add_scoring_head(layer(layers.skip_norms), "logits")
    made = {name: node for node in scoring.model.graph.node for name in node.output}
    assert {"q", "present", "a"} <= made.keys()
    assert not {"o", "m", "sum", "gate", "up", "act", "down", "f", "logits"} & made.keys()
    picks = [node for node in made.values() if node.op_type == "Gather" and made[node.input[0]].op_type == "Reshape"]
    assert {made[node.input[0]].input[0] for node in picks} >= {"a", "hidden"}


def test_value_that_is_also_an_output_is_computed_whole():
    model = layer(layers.skip_norms)
    model.graph.output.append(helper.make_tensor_value_info("m", TensorProto.FLOAT, ["B", "S", H]))
    scoring = add_scoring_head(model, "logits")
    assert sorted(scoring.late_products) == sorted([UP, UP, DOWN])
    chosen = picks(4, 6, 2)
    logits, m = session(model).run(["logits", "m"], feeds(model))
    outputs = session(scoring.model).run([*OUTPUTS, "m"], {**feeds(model), **chosen})
    assert_scores(outputs[:3], logits, chosen, ATOL)
    np.testing.assert_allclose(outputs[3], m, atol=1e-6)


def test_nothing_moves_where_the_last_hidden_states_are_an_output():
    model = layer(layers.skip_norms)
    model.graph.output.append(helper.make_tensor_value_info("f", TensorProto.FLOAT, ["B", "S", H]))
    scoring = add_scoring_head(model, "logits")
    assert scoring.late_products == ()
    assert "are needed elsewhere, too" in scoring.reason


def test_other_readers_of_the_logits_keep_all_rows():
    model = layer(layers.skip_norms)
    model.graph.node.append(helper.make_node("ReduceMax", ["logits"], ["peak"], keepdims=0))
    model.graph.output.append(helper.make_tensor_value_info("peak", TensorProto.FLOAT, []))
    scoring = add_scoring_head(model, "logits")
    assert scoring.late_products == ()
    expected = session(model).run(["peak"], feeds(model))[0]
    found = session(scoring.model).run(["peak"], {**feeds(model), **picks(3, 3, 1)})[0]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_value_read_inside_a_subgraph_is_computed_whole():
    model = layer(layers.skip_norms)
    branch = helper.make_graph(
        [helper.make_node("ReduceMax", ["up"], ["most"], keepdims=0)],
        "branch",
        [],
        [helper.make_tensor_value_info("most", TensorProto.FLOAT, [])],
    )
    condition = helper.make_tensor("yes", TensorProto.BOOL, [], [True])
    model.graph.initializer.append(condition)
    model.graph.node.append(helper.make_node("If", ["yes"], ["peak"], then_branch=branch, else_branch=branch))
    model.graph.output.append(helper.make_tensor_value_info("peak", TensorProto.FLOAT, []))
    scoring = add_scoring_head(model, "logits")
    assert sorted(scoring.late_products) == sorted([UP, DOWN])
    expected = session(model).run(["peak"], feeds(model))[0]
    outputs = session(scoring.model).run(["peak"], {**feeds(model), **picks(3, 3, 1)})
    np.testing.assert_allclose(outputs[0], expected, rtol=1e-6)


def test_nothing_moves_where_nodes_are_out_of_order():
    model = layer(layers.skip_norms)
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([nodes[1], nodes[0], *nodes[2:]])
    scoring = add_scoring_head(model, "logits")
    assert scoring.late_products == ()
    assert "stands before what it reads" in scoring.reason


def test_nothing_moves_where_the_caller_has_a_reason():
    scoring = add_scoring_head(layer(layers.skip_norms), "logits", keeps_layers="rounding")
    assert (scoring.late_products, scoring.kind) == ((), "hidden")
    assert scoring.reason.endswith("and not further up: rounding")


def test_rows_of_logits_are_exposed_behind_moved_layers():
    model = layer(layers.skip_norms)
    exposing = add_scoring_head(model, "logits", HeadOutputs(exposes_rows=True))
    assert len(exposing.late_products) == 4
    chosen = picks(4, 6, 2)
    logits = session(model).run(["logits"], feeds(model))[0]
    rows = session(exposing.model).run(["score_logits"], {**feeds(model), **chosen})[0]
    np.testing.assert_allclose(rows, logits.reshape(-1, V)[chosen["score_rows"]], atol=ATOL)


@pytest.mark.parametrize("opset", [13, 17, 18, 21])
def test_layer_runs_at_every_opset_of_the_exporters(opset):
    model = layer(layers.skip_norms, opset=opset)
    scoring = add_scoring_head(model, "logits")
    assert len(scoring.late_products) == 4
    assert_equal(model, scoring.model, (4, 6, 2), ATOL)


def test_input_model_is_left_unchanged():
    model = layer(layers.flattened_products)
    before = model.SerializeToString(deterministic=True)
    add_scoring_head(model, "logits")
    assert model.SerializeToString(deterministic=True) == before

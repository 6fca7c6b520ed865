"""The scoring head against numpy's log-softmax over the logits of the untouched graph."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from olive_ext.errors import ModelError
from olive_ext.graph.scoring_head import HeadOutputs, TokenForm, add_scoring_head, check_scoring, scoring_graph
from tests.graph import heads
from tests.graph.heads import H, V, decoder
from tests.refusals import refused

pytestmark = pytest.mark.rounded

B, S = 2, 5
HALF_ATOL = 2e-2
"""On CPU, ONNX Runtime computes float16 in float32 and rounds or not, depending on what follows."""

OUTPUTS = ["target_logprobs", "greedy_ids", "sample_logits"]

UNDERSTOOD = [
    heads.matmul,
    heads.matmul_transposed,
    heads.matmul_of_half_weight,
    heads.gemm,
    heads.bias,
    heads.softcap,
    heads.masked_tokens,
    heads.half,
    heads.fused_matmul,
    heads.matmul_nbits,
    heads.dequantized_weight,
    heads.qdq,
    heads.qlinear,
]
NOT_UNDERSTOOD = [
    (heads.variable_weight, "'w_in', which is not constant"),
    (heads.adapter, "combines several values that are not constant"),
    (heads.dynamic_integer, "quantizes all rows with one scale"),
    (heads.per_position_bias, "may differ between rows"),
    (heads.normalized, "neither row-wise nor a product"),
]
COUNTS = [(4, 6, 2), (B * S, 30, 0), (0, 0, 0), (3, 0, 0), (3, 2, 0), (3, 0, 2), (1, 1, 1)]


def session(model: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def feeds(model: onnx.ModelProto, scale: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    shapes = {"hidden": (B, S, H), "w_in": (H, V)}
    arrays = {name: (scale * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}
    return {value.name: arrays[value.name] for value in model.graph.input}


def picks(num_rows: int, num_targets: int, num_samples: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(num_rows)
    return {
        "score_rows": rng.integers(0, B * S, num_rows),
        "target_rows": rng.integers(0, max(num_rows, 1), num_targets),
        "target_ids": rng.integers(0, V, num_targets),
        "sample_rows": rng.integers(0, max(num_rows, 1), num_samples),
    }


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


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("build", UNDERSTOOD, ids=lambda build: build.__name__)
def test_head_equals_log_softmax_of_the_logits_when_pattern_is_understood(build, counts):
    model = decoder(build)
    scoring = add_scoring_head(model, "logits")
    assert scoring.kind == "hidden", scoring.reason
    assert scoring.vocab_size == V
    onnx.checker.check_model(scoring.model)
    logits = session(model).run(["logits"], feeds(model))[0]
    chosen = picks(*counts)
    outputs = session(scoring.model).run(OUTPUTS, {**feeds(model), **chosen})
    assert_scores(outputs, logits, chosen, HALF_ATOL if build is heads.half else 2e-5)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize(("build", "reason"), NOT_UNDERSTOOD, ids=lambda value: getattr(value, "__name__", ""))
def test_rows_are_picked_from_the_logits_when_pattern_is_not_understood(build, reason, counts):
    model = decoder(build)
    scoring = add_scoring_head(model, "logits")
    assert scoring.kind == "logits"
    assert reason in scoring.reason
    logits = session(model).run(["logits"], feeds(model))[0]
    chosen = picks(*counts)
    assert_scores(session(scoring.model).run(OUTPUTS, {**feeds(model), **chosen}), logits, chosen)


IS_OLD_RUNTIME = tuple(map(int, ort.__version__.split(".")[:2])) < (1, 24)
NEWEST = pytest.param(24, marks=pytest.mark.skipif(IS_OLD_RUNTIME, reason="ONNX Runtime 1.23 ends at opset 23"))


@pytest.mark.parametrize("opset", [11, 12, 13, 17, 18, 21, NEWEST])
@pytest.mark.parametrize("build", [heads.matmul, heads.gemm, heads.softcap], ids=lambda build: build.__name__)
def test_head_runs_at_every_opset_of_the_exporters(build, opset):
    model = decoder(build, opset=opset)
    scoring = add_scoring_head(model, "logits")
    onnx.checker.check_model(scoring.model)
    chosen = picks(4, 6, 2)
    logits = session(model).run(["logits"], feeds(model))[0]
    assert_scores(session(scoring.model).run(OUTPUTS, {**feeds(model), **chosen}), logits, chosen)


def test_opset_is_refused_when_older_than_eleven():
    with refused(ModelError, "unsupported", holds=("10", "11")):
        add_scoring_head(decoder(heads.matmul, opset=10), "logits")


def test_logits_are_scored_in_float32_when_the_model_returns_half():
    model = decoder(heads.half_logits, elem_type=TensorProto.FLOAT16)
    scoring = add_scoring_head(model, "logits")
    assert scoring.kind == "hidden"
    chosen = picks(4, 6, 2)
    logits = session(model).run(["logits"], feeds(model))[0]
    assert logits.dtype == np.float16
    outputs = session(scoring.model).run(OUTPUTS, {**feeds(model), **chosen})
    assert_scores(outputs, logits, chosen, HALF_ATOL)


def test_vocabulary_size_is_read_at_run_time_when_nothing_states_it():
    model = decoder(heads.adapter, width="V")
    scoring = add_scoring_head(model, "logits")
    assert scoring.vocab_size is None
    chosen = picks(4, 6, 2)
    logits = session(model).run(["logits"], feeds(model))[0]
    assert_scores(session(scoring.model).run(OUTPUTS, {**feeds(model), **chosen}), logits, chosen)


def test_rows_are_picked_from_the_logits_when_a_reshape_hides_the_vocabulary():
    scoring = add_scoring_head(decoder(heads.gemm, width="V"), "logits")
    assert scoring.kind == "logits"
    assert "reshape" in scoring.reason


def test_no_node_computes_logits_of_all_rows_when_pattern_is_understood():
    scoring = add_scoring_head(decoder(heads.gemm), "logits")
    graph = scoring.model.graph
    assert not {"logits", "flat_logits", "full"} & {name for node in graph.node for name in node.output}
    assert [node.op_type for node in graph.node].count("Gemm") == 1
    assert "v" not in {tensor.name for tensor in graph.initializer}


def test_input_model_is_left_unchanged():
    model = decoder(heads.softcap)
    before = model.SerializeToString(deterministic=True)
    add_scoring_head(model, "logits")
    assert model.SerializeToString(deterministic=True) == before


def test_other_outputs_and_other_readers_of_the_logits_keep_working():
    model = decoder(heads.bias)
    model.graph.node.append(helper.make_node("ReduceMax", ["logits"], ["peak"], keepdims=0))
    model.graph.output.append(helper.make_tensor_value_info("peak", TensorProto.FLOAT, []))
    scoring = add_scoring_head(model, "logits")
    assert scoring.kind == "hidden"
    logits, present, peak = session(model).run(["logits", "present", "peak"], feeds(model))
    chosen = picks(3, 3, 1)
    outputs = session(scoring.model).run([*OUTPUTS, "present", "peak"], {**feeds(model), **chosen})
    assert_scores(outputs[:3], logits, chosen)
    np.testing.assert_array_equal(outputs[3], present)
    np.testing.assert_allclose(outputs[4], peak, rtol=1e-6)


def test_names_do_not_collide_when_the_graph_uses_ours():
    model = decoder(heads.matmul)
    model.graph.node[0].name = "olive_ext/scoring/Reshape_0"
    model.graph.node.append(helper.make_node("Neg", ["h"], ["olive_ext/scoring/integers_0"]))
    model.graph.output.append(
        helper.make_tensor_value_info("olive_ext/scoring/integers_0", TensorProto.FLOAT, ["B", "S", H])
    )
    scoring = add_scoring_head(model, "logits")
    onnx.checker.check_model(scoring.model)
    names = [output.name for output in session(scoring.model).get_outputs()]
    assert {*OUTPUTS, "olive_ext/scoring/integers_0"} <= set(names)


def test_graph_is_refused_when_a_name_of_the_head_is_taken():
    scored = add_scoring_head(decoder(heads.matmul), "logits").model
    scored.graph.output.append(helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["B", "S", V]))
    scored.graph.node.append(helper.make_node("MatMul", ["h", "w"], ["logits"]))
    with refused(ModelError, "unsupported", holds="score_rows"):
        add_scoring_head(scored, "logits")


def test_logprobs_are_finite_when_logits_are_large():
    model = decoder(heads.matmul)
    logits = session(model).run(["logits"], feeds(model, scale=300.0))[0]
    assert np.abs(logits).max() > 1000
    chosen = picks(B * S, 30, 0)
    scored = session(add_scoring_head(model, "logits").model).run(OUTPUTS, {**feeds(model, scale=300.0), **chosen})
    np.testing.assert_allclose(scored[0], expected(logits, chosen)[0], atol=1e-3)


@pytest.mark.parametrize("size", [151936, 128256, 50257])
def test_many_small_terms_are_not_lost_when_the_vocabulary_is_large(size):
    logits = np.full((1, 1, size), -17.5, np.float32)
    logits[0, 0, 5] = 0
    chosen = {"score_rows": [0], "target_rows": [0, 0], "target_ids": [5, 6], "sample_rows": []}
    chosen = {name: np.array(values, np.int64) for name, values in chosen.items()}
    logprobs = session(scoring_graph(TensorProto.FLOAT, size)).run(["target_logprobs"], {"logits": logits, **chosen})[0]
    np.testing.assert_allclose(logprobs, expected(logits, chosen)[0], atol=2e-5)


@pytest.mark.parametrize("vocab_size", [None, V])
@pytest.mark.parametrize("elem_type", [TensorProto.FLOAT, TensorProto.FLOAT16])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_own_graph_scores_given_logits(elem_type, vocab_size, counts):
    logits = np.random.default_rng(0).standard_normal((B, S, V))
    logits = logits.astype(helper.tensor_dtype_to_np_dtype(elem_type))
    model = scoring_graph(elem_type, vocab_size)
    onnx.checker.check_model(model)
    chosen = picks(*counts)
    assert_scores(session(model).run(OUTPUTS, {"logits": logits, **chosen}), logits, chosen)


def test_own_graph_takes_bfloat16():
    opened = session(scoring_graph(TensorProto.BFLOAT16))
    assert opened.get_inputs()[0].type == "tensor(bfloat16)"
    assert [output.type for output in opened.get_outputs()] == ["tensor(float)", "tensor(int64)", "tensor(float)"]


def test_pruned_logits_are_refused_when_declared():
    def pruned(p: heads.Parts) -> None:
        p.node("Gather", ["h", p.weight("last", -1, np.int64)], "last_h", axis=1)
        p.node("Unsqueeze", ["last_h", p.weight("one", [1], np.int64)], "one_h")
        p.node("MatMul", ["one_h", p.weight("w", heads.WEIGHT)], "logits")

    model = decoder(pruned)
    with refused(ModelError, "unsupported", holds="logits"):
        check_scoring(model, "logits")
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 1
    del model.graph.node[2:4]
    with refused(ModelError, "unsupported", holds="logits"):
        check_scoring(model, "logits")


def test_error_lists_outputs_when_logits_are_missing():
    with refused(ModelError, "unsupported", holds="scores"):
        check_scoring(decoder(heads.matmul), "scores")


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("build", [heads.gemm, heads.variable_weight, heads.half_logits], ids=lambda b: b.__name__)
def test_rows_of_logits_are_exposed_on_request(build, counts):
    half = {"elem_type": TensorProto.FLOAT16} if build is heads.half_logits else {}
    model = decoder(build, **half)
    logits = session(model).run(["logits"], feeds(model))[0]
    chosen = picks(*counts)
    wanted = logits.reshape(-1, V)[chosen["score_rows"] if counts[0] else [0]]
    exposing = add_scoring_head(model, "logits", HeadOutputs(exposes_rows=True)).model
    onnx.checker.check_model(exposing)
    names = [*OUTPUTS, "score_logits"]
    assert [output.name for output in exposing.graph.output][-4:] == names
    *scores, rows = session(exposing).run(names, {**feeds(model), **chosen})
    assert rows.dtype == np.float32
    np.testing.assert_allclose(rows, wanted, atol=HALF_ATOL if half else 2e-5)
    assert_scores(scores, logits, chosen, HALF_ATOL if half else 2e-5)


@pytest.mark.parametrize("form", [TokenForm(7, 2), TokenForm(6, 2), TokenForm(7, 1), TokenForm(6, 1)], ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_greedy_tokens_come_back_in_the_form_of_the_token_input(form, counts):
    model = decoder(heads.gemm)
    chosen = picks(*counts)
    edited = add_scoring_head(model, "logits", HeadOutputs(tokens=form)).model
    onnx.checker.check_model(edited)
    greedy, tokens = session(edited).run(["greedy_ids", "next_ids"], {**feeds(model), **chosen})
    assert tokens.dtype == {6: np.int32, 7: np.int64}[form.elem_type]
    assert tokens.shape == (max(len(greedy), 1), 1)[: form.rank]
    assert tokens.reshape(-1)[: len(greedy)].tolist() == greedy.tolist()


def test_graph_has_no_output_for_tokens_unless_asked():
    names = [output.name for output in add_scoring_head(decoder(heads.gemm), "logits").model.graph.output]
    assert "next_ids" not in names


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("has_rows", [False, True])
def test_banned_tokens_are_neither_greedy_nor_sampled_and_other_numbers_stay(counts, has_rows):
    model = decoder(heads.gemm)
    logits = session(model).run(["logits"], feeds(model))[0]
    chosen = picks(*counts)
    if has_rows and not counts[0]:
        return
    best = logits.reshape(-1, V).argmax(-1)
    bans = ((), tuple(sorted(set(best.tolist()))), (*range(V - 1), V + 5))
    edited = add_scoring_head(model, "logits", HeadOutputs(bans=bans, has_rows=has_rows)).model
    onnx.checker.check_model(edited)
    row_bans = np.arange(max(counts[0], 1)) % 3
    logprobs, _, sample = expected(logits, chosen)
    found = session(edited).run(OUTPUTS, {**feeds(model), **chosen, "score_bans": row_bans})
    np.testing.assert_allclose(found[0], logprobs, atol=2e-5)
    rows = logits.reshape(-1, V)[chosen["score_rows"]].astype(np.float64)
    for row, number in zip(rows, row_bans, strict=False):
        row[[token for token in bans[number] if token < V]] = -np.inf
    assert found[1].tolist() == rows.argmax(-1).tolist()
    is_banned = ~np.isfinite(rows[chosen["sample_rows"]])
    assert (found[2][is_banned] < -1e29).all()
    np.testing.assert_allclose(found[2][~is_banned], sample[~is_banned], atol=2e-5)


def test_bans_need_a_known_number_of_tokens():
    with pytest.raises(ModelError, match="tokens are suppressed, and the graph does not show how many there are"):
        scoring_graph(TensorProto.FLOAT, None, outputs=HeadOutputs(bans=((), (1,), (1,))))

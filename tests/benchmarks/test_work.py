from __future__ import annotations

import random
from pathlib import Path

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from docs.benchmarks.speed.work import Work, count_tokens, measure_ceiling, read_work

CONFIG = {
    "model": {"vocab_size": 50, "decoder": {"num_attention_heads": 2, "head_size": 8, "num_hidden_layers": 3}},
}


def write_graph(path: Path) -> Path:
    """Products of 16 x 32 as a matrix, 32 x 16 as a turned one, 16 x 24 in 4 bits, and a head of 16 x 50."""
    weights = [("a", (16, 32)), ("b", (16, 32)), ("head", (16, 50))]
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h1"]),
        helper.make_node("Gemm", ["h1", "b"], ["h2"], transB=1),
        helper.make_node("MatMulNBits", ["h2", "q", "s"], ["h3"], domain="com.microsoft", K=16, N=24, bits=4),
        helper.make_node("MatMul", ["h2", "h2"], ["scores"]),
        helper.make_node("MatMul", ["h2", "head"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 16])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", 50])],
        [helper.make_tensor(name, TensorProto.FLOAT, dims, [0.0] * (dims[0] * dims[1])) for name, dims in weights],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]), path)
    return path


def test_work_is_read_from_the_products_with_weights(tmp_path: Path) -> None:
    work = read_work(write_graph(tmp_path / "model.onnx"), CONFIG)
    assert work == Work(
        layers=2.0 * (16 * 32 + 32 * 16 + 16 * 24),
        attention=4.0 * 3 * 2 * 8,
        head=2.0 * 16 * 50,
        matrices=((16, 24, 1), (16, 32, 1), (32, 16, 1)),
    )


def test_work_is_unknown_without_a_configuration(tmp_path: Path) -> None:
    assert read_work(write_graph(tmp_path / "model.onnx"), {}) is None


def test_tokens_fed_twice_count_twice() -> None:
    work = Work(layers=10.0, attention=1.0, head=100.0, matrices=())
    tokens = {"distinct": 4, "attended": 10, "rows": 2}
    assert work.of(4, tokens) == 4 * 10 + 10 + 2 * 100
    assert work.of(8, tokens) == 8 * 10 + 20 + 2 * 100


def test_products_of_rows_that_are_read_count_for_those_only() -> None:
    work = Work(layers=1000.0, attention=1.0, head=100.0, matrices=())
    tokens = {"distinct": 4, "attended": 10, "rows": 2}
    late = [[10, 20], [5, 10]]
    assert work.of(4, tokens, late) == 4 * (1000 - 2 * 250) + 10 + 2 * (100 + 2 * 250)
    assert work.of(4, {**tokens, "rows": 4}, late) == work.of(4, {**tokens, "rows": 4})


def test_ceiling_is_a_positive_rate() -> None:
    pytest.importorskip("torch")
    assert measure_ceiling(((64, 64, 2),), "cpu", "auto") > 1e6


def test_choices_behind_one_question_share_its_tokens_and_its_row() -> None:
    assert count_tokens([([1, 2, 3], 1)] * 4) == {"naive": 12, "distinct": 3, "attended": 1 + 2 + 3, "rows": 1}


def test_endings_behind_one_context_are_read_at_every_position() -> None:
    found = count_tokens([([1, 2, 5, 6], 3), ([1, 2, 7, 8], 3)])
    assert found == {"naive": 8, "distinct": 6, "attended": 1 + 2 + 2 * (3 + 4), "rows": 5}


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=6)
INPUTS = st.lists(TOKENS.flatmap(lambda tokens: st.tuples(st.just(tokens), st.integers(1, len(tokens)))), max_size=12)


@given(INPUTS, st.randoms())
def test_counts_are_those_of_the_prefix_tree_in_any_order(
    inputs: list[tuple[list[int], int]], rng: random.Random
) -> None:
    nodes = {tuple(tokens[: end + 1]) for tokens, _ in inputs for end in range(len(tokens))}
    read = {tuple(tokens[: end + 1]) for tokens, number in inputs for end in range(len(tokens) - number, len(tokens))}
    rng.shuffle(inputs)
    assert count_tokens(inputs) == {
        "naive": sum(len(tokens) for tokens, _ in inputs),
        "distinct": len(nodes),
        "attended": sum(len(node) for node in nodes),
        "rows": len(read),
    }

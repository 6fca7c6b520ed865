"""The graphs of divergence against float64 numpy over whole rows of logits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import pytest

from olive_ext.graph.row_comparison import divergence_graph, record_graph, recorded_graph

Array = npt.NDArray[np.generic]
RNG_SEED = 5


def run(graph: bytes, **feeds: Array) -> dict[str, Array]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    return dict(zip([output.name for output in session.get_outputs()], session.run(None, feeds), strict=True))


def log_softmax(logits_RV: Array) -> Array:
    wide = logits_RV.astype(np.float64)
    below = wide - wide.max(-1, keepdims=True)
    return below - np.log(np.exp(below).sum(-1, keepdims=True))


def rows(num_rows: int, vocab_size: int, scale: float = 3.0, seed: int = RNG_SEED) -> Array:
    return (scale * np.random.default_rng(seed).standard_normal((num_rows, vocab_size))).astype(np.float32)


def nudged(logits_RV: Array, by: float, seed: int = 8) -> Array:
    noise = np.random.default_rng(seed).standard_normal(logits_RV.shape)
    return (logits_RV + by * noise).astype(np.float32)


def best(logits_RV: Array) -> Array:
    return logits_RV.argmax(-1)[:, None]


def diverge(reference: Array, candidate: Array, num_tokens: int | None = None) -> dict[str, Array]:
    return run(
        divergence_graph(candidate.shape[1], reference.shape[1], num_tokens or reference.shape[1]),
        reference_logits=reference,
        logits=candidate,
        reference_ids=best(reference),
        ids=best(candidate),
    )


def record(logits: Array, top: int, drawn: int, seed: int = RNG_SEED) -> dict[str, Array]:
    uniforms = (np.arange(drawn) + np.random.default_rng(seed).random((len(logits), drawn))) / drawn
    return run(record_graph(logits.shape[1], top, drawn), logits=logits, uniforms=uniforms.astype(np.float32))


def diverge_from_record(
    recorded: dict[str, Array], candidate: Array, top: int, drawn: int, num_tokens: int | None = None
) -> dict[str, Array]:
    return run(
        recorded_graph(candidate.shape[1], top, drawn, num_tokens),
        logits=candidate,
        ids=best(candidate),
        record_ids=recorded["ids"],
        record_logprobs=recorded["logprobs"],
        tail=recorded["tail"][:, None],
    )


NUM_TOKENS, BEYOND = 97, 13
LOWEST = np.finfo(np.float32).min


@pytest.mark.parametrize(
    "edit",
    [
        lambda logits: logits,
        lambda logits: np.where(np.arange(NUM_TOKENS + BEYOND) < NUM_TOKENS, logits, -np.inf),
        lambda logits: logits + np.where(np.arange(NUM_TOKENS + BEYOND) < NUM_TOKENS, 0, LOWEST),
        lambda logits: logits[:, :NUM_TOKENS],
        lambda logits: np.concatenate([logits[:, :NUM_TOKENS], np.full((len(logits), 40), -1e4)], axis=1),
    ],
    ids=["equal", "infinite", "the lowest float", "shorter", "padded"],
)
def test_ids_that_no_token_has_are_no_distance(edit: Callable[[Array], Array]) -> None:
    reference = rows(6, NUM_TOKENS + BEYOND)
    reference[:, NUM_TOKENS:] -= 9
    candidate = edit(reference).astype(np.float32)
    found = diverge(reference, candidate, NUM_TOKENS)
    assert max(found["kl"].max(), found["kl_reverse"].max()) < 1e-6
    assert not (edit(reference) is reference and (found["kl"].any() or found["kl_reverse"].any()))
    recorded = record(reference, 50, 16)
    kl = diverge_from_record(recorded, candidate, 50, 16, NUM_TOKENS)["kl"]
    assert np.abs(kl).max() < 3e-3  # of an estimate, by what ids without a token took


@pytest.mark.parametrize("vocab_size", [2, 97, 1000, 50257, 262144])
@pytest.mark.parametrize("by", [0.01, 1.0])
def test_divergence_equals_float64_over_the_whole_rows(vocab_size: int, by: float) -> None:
    reference = rows(4, vocab_size)
    candidate = nudged(reference, by) + np.float32(7)  # a constant changes no distribution
    found = diverge(reference, candidate)
    p, q = log_softmax(reference), log_softmax(candidate)
    np.testing.assert_allclose(found["kl"], (np.exp(p) * (p - q)).sum(-1), atol=2e-6)
    np.testing.assert_allclose(found["kl_reverse"], (np.exp(q) * (q - p)).sum(-1), atol=2e-6)
    np.testing.assert_allclose(found["reference_top_logprobs"], p.max(-1), atol=2e-6)
    np.testing.assert_allclose(found["top_logprobs"], np.take_along_axis(q, best(reference), 1)[:, 0], atol=4e-6)
    assert not diverge(8 * reference, 8 * reference)["kl"].any(), "to the last bit"


def test_divergence_leaves_out_what_is_impossible_and_is_infinite_where_only_the_second_excludes_a_token() -> None:
    reference = np.array([[0.0, 1.0, -np.inf], [0.0, 1.0, -np.inf], [0.0, 1.0, 2.0]], np.float32)
    candidate = np.array([[0.0, 1.0, -np.inf], [0.0, 1.0, 0.5], [0.0, 1.0, -np.inf]], np.float32)
    both = np.exp([0.0, 1.0, 0.5])
    for name, (before, after) in {"kl": (reference, candidate), "kl_reverse": (candidate, reference)}.items():
        kl = diverge(before, after)[name]
        assert kl[0] == 0
        assert kl[1] == pytest.approx(np.log(both.sum() / both[:2].sum()), abs=1e-6)
        assert kl[2] == np.inf


@pytest.mark.parametrize(("vocab_size", "top", "drawn"), [(40, 4, 8), (97, 4, 7), (50257, 32, 32), (262144, 16, 64)])
def test_record_holds_the_top_tokens_then_others_with_their_log_probabilities(
    vocab_size: int, top: int, drawn: int
) -> None:
    logits = rows(5, vocab_size)
    found = record(logits, top, drawn)
    p = log_softmax(logits)
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :top]
    np.testing.assert_array_equal(found["ids"][:, :top], order)
    np.testing.assert_allclose(found["logprobs"], np.take_along_axis(p, found["ids"], 1), atol=3e-6)
    np.testing.assert_allclose(found["tail"], 1 - np.exp(np.take_along_axis(p, order, 1)).sum(-1), atol=1e-6)
    for ids in found["ids"].tolist():
        assert not set(ids[:top]) & set(ids[top:])


def test_record_draws_the_tail_in_proportion_to_probability() -> None:
    vocab_size, top, drawn = 40, 3, 64
    logits = np.repeat(rows(1, vocab_size, scale=1.5), 500, axis=0)
    found = record(logits, top, drawn)
    p = np.exp(log_softmax(logits[:1]))[0]
    p[found["ids"][0, :top]] = 0
    counts = np.bincount(found["ids"][:, top:].ravel(), minlength=vocab_size)
    expected = p / p.sum() * counts.sum()
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected) + 1).all()


def test_record_without_a_tail_counts_nothing_drawn() -> None:
    logits = np.full((2, 50), -200, np.float32)
    logits[:, 7] = 0
    found = record(logits, 2, 4)
    assert found["tail"].tolist() == [0, 0]
    assert diverge_from_record(found, nudged(logits, 0.1), 2, 4)["kl"] == pytest.approx([0, 0], abs=1e-6)


@pytest.mark.parametrize("by", [0.3, *(pytest.param(by, marks=pytest.mark.long) for by in (0.05, 1.5))])
def test_estimate_from_records_is_within_four_standard_errors_and_above_its_bound(by: float) -> None:
    vocab_size, top, drawn = 3000, 16, 32
    reference = rows(3000, vocab_size, scale=2.5)
    candidate = nudged(reference, by)
    exact = diverge(reference, candidate)["kl"].astype(np.float64)
    found = diverge_from_record(record(reference, top, drawn), candidate, top, drawn)
    error = np.sqrt(found["kl_variance"].sum(dtype=np.float64)) / len(exact)
    assert abs(found["kl"].mean(dtype=np.float64) - exact.mean()) < 4 * error
    assert error < 0.02 * exact.mean()
    # Strata make the squared error smaller than the variance, which is that of independent draws.
    squares = (found["kl"].astype(np.float64) - exact) ** 2
    assert 0.7 < squares.mean() / found["kl_variance"].mean(dtype=np.float64) < 1.1
    assert (found["kl_lower"] <= exact + 1e-5).all()
    np.testing.assert_allclose(found["top_logprobs"], diverge(reference, candidate)["top_logprobs"], atol=1e-5)

"""The choices of a weight and the answers of a menu; the knapsack is equal to trying everything, and its front is
one. The race's certainty holds on made-up losses, costs less than measuring everything, and says what is open."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from onnx import numpy_helper

from olive_ext.plugins.diagnose.remedy.choices import Choice, WeightChoices, cheapest, choices_of, front, total
from olive_ext.plugins.diagnose.remedy.locate import Race, estimate
from olive_ext.plugins.diagnose.remedy.pairing import Sources, Target, pair, whole_experts, with_tables
from olive_ext.plugins.diagnose.remedy.weights import FLOAT, GraphWeights, Precision
from tests.graph import quantized as graphs
from tests.plugins.diagnose.remedy.test_mended_graph import tied


def menu_of(stored: graphs.Stored, kl: float = 1e-3, damaged: bool = False) -> tuple[WeightChoices, Target]:
    origin = (stored.matrix + graphs.random_weight() * 0.02).astype(np.float32)
    floats = graphs.plain(origin)
    own, other = GraphWeights(floats, Path()), GraphWeights(stored.model, Path())
    (target,) = pair(own, other).targets
    choices = [*choices_of(target, kl, None, Sources(own, other), damaged)]
    return WeightChoices({target: choices}, damaged=[target.name] * damaged), target


def test_damaged_weight_is_never_left_as_it_is_and_may_be_rounded_again() -> None:
    menu, target = menu_of(graphs.nbits(4, 32, has_zero_points=False), damaged=True)
    assert [one.name for one in menu.choices[0]][:2] == ["as it is", "int4 in blocks of 32"]
    assert menu.unchanged == (0,)
    assert menu.cured((0,)) == menu.smallest(1.0) == menu.best(target.bytes) == (1,)
    assert menu.precisions((1,))[target] == Precision(4, 32)


def test_weights_that_are_fine_have_fewer_choices_and_a_negative_estimate_of_a_loss_is_none() -> None:
    for stored, names in (
        (graphs.nbits(8, 32, has_zero_points=False), ["as it is", "float"]),
        (graphs.qdq(None), ["as it is", "int8 in blocks of 32", "float"]),
    ):
        assert [one.name for one in menu_of(stored)[0].choices[0]] == names
    assert menu_of(graphs.nbits(4, 64, has_zero_points=False), -1e-6)[0].kl((0,)) == 0


def experts(bits: int, block: int, *, has_zero_points: bool = False) -> tuple[list[Target], Sources]:
    quantized, float_model = graphs.experts(bits, block, has_zero_points=has_zero_points)
    other = GraphWeights(quantized, Path())
    matrices = {name.rpartition("/")[2]: other.matrix(use) for name, use in other.uses.items()}
    floats = float_model({part: (matrix + 0.001).astype(np.float32) for part, matrix in matrices.items()})
    own = GraphWeights(floats, Path())
    return pair(own, other).targets, Sources(own, other)


def test_experts_of_a_node_are_one_weight() -> None:
    parts, of_graph = experts(4, 32)
    (target,) = whole_experts(parts)
    assert (target.name, target.kind, target.layer) == ("/layers.0/moe/MoE", "moe", 0)
    assert target.bytes == sum(part.bytes for part in parts)
    choices = [*choices_of(target, 1e-3, None, of_graph)]
    assert [one.name for one in choices] == ["as it is", "int8 in blocks of 32", "float"]
    assert [one.bytes for one in choices] == sorted(one.bytes for one in choices)
    assert choices[-1].bytes == target.float_bytes
    alone = [choices_of(part, 1e-3, None, of_graph) for part in parts]
    assert [[one.name for one in choices] for choices in alone] == [["as it is"], ["as it is"]]


@pytest.mark.parametrize("is_tied", [True, False])
def test_head_and_a_table_that_is_stored_apart_may_become_one(is_tied: bool) -> None:
    """Also where the float graph has them twice: they are one by their numbers."""
    weight_HV = graphs.random_weight(2)
    floats, quantized = tied(weight_HV), tied(weight_HV, 4)
    nodes = [tied(weight_HV).graph.node[1], quantized.graph.node[2]]
    nodes[0].input[0] = "table"
    del quantized.graph.node[:]
    quantized.graph.node.extend(nodes)
    table = numpy_helper.from_array(weight_HV.T.copy(), "table")
    quantized.graph.initializer.append(table)
    if not is_tied:
        del floats.graph.node[0]
        floats.graph.initializer.append(table)
    own, other = GraphWeights(floats, Path()), GraphWeights(quantized, Path())
    (target,) = pair(own, other).targets
    of_graph = {"": Sources(own, other)}
    tables = with_tables([target], of_graph)
    choices = [*choices_of(target, 1e-3, tables[target], of_graph[""])]
    sizes = {one.name: one.bytes for one in choices}
    num_numbers = weight_HV.size
    assert sizes["as it is"] == tables[target].bytes == target.bytes + 4 * num_numbers
    assert sizes["float"] == 2 * 4 * num_numbers
    assert sizes.get("float, one with the table") == (4 * num_numbers if is_tied else None)
    assert sizes["int8 in blocks of 32, one with the table"] < num_numbers * 1.2
    assert sizes["int8 in blocks of 32"] == 4 * num_numbers + sizes["int8 in blocks of 32, one with the table"]
    own.model.graph.initializer[-1].raw_data = table.raw_data[::-1]
    changed = {"": Sources(own, other)}
    assert not with_tables([target], changed)


@pytest.fixture
def menu() -> WeightChoices:
    """Three weights that differ in what they lose."""
    _, target = menu_of(graphs.nbits(4, 64, has_zero_points=False))
    targets = [Target(f"w{n}", target.floats, target.quantized, 0, 0) for n in range(3)]
    made = {
        one: [Choice(None, 100, kl, True), Choice(Precision(8, 32), 200, kl / 100, False), Choice(FLOAT, 800, 0, True)]
        for one, kl in zip(targets, (5e-3, 1e-4, 2e-3), strict=True)
    }
    return WeightChoices(made)


def test_smallest_within_a_bound_best_within_a_size_and_the_front_between(menu: WeightChoices) -> None:
    assert menu.smallest(1) == (0, 0, 0)
    assert menu.smallest(3e-3) == (1, 0, 0)
    assert menu.smallest(2e-4) == (1, 0, 1)
    assert menu.smallest(-1.0) == menu.finest == (2, 2, 2)
    assert menu.best(299) == menu.unchanged == (0, 0, 0)
    assert menu.best(400) == (1, 0, 0)
    assert menu.num_bytes((1, 0, 0)) == 400
    assert menu.kl((1, 0, 0)) == pytest.approx(2.15e-3)
    sizes = [menu.num_bytes(one) for one in front(menu.losses, menu.sizes, 30)]
    assert (sizes[0], sizes[-1]) == (300, 2400)
    menu.learn(0, 1, 4e-3)  # a measured loss replaces an estimate
    assert menu.choices[0][1].is_measured
    assert menu.smallest(3e-3) == (2, 0, 0)


def random_tables(seed: int, items: int = 6) -> tuple[list[list[float]], list[list[float]]]:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 5, items)
    costs = [np.sort(rng.integers(1, 10**6, size)).astype(float).tolist() for size in sizes]
    burdens = [np.sort(rng.exponential(1e-4, size))[::-1].tolist() for size in sizes]
    return costs, burdens


@pytest.mark.parametrize("seed", range(20))
def test_answer_is_that_of_trying_everything(seed: int) -> None:
    costs, burdens = random_tables(seed)
    answers = list(itertools.product(*(range(len(options)) for options in costs)))
    loads = sorted(total(burdens, answer) for answer in answers)
    limit = loads[len(loads) // 3]
    best = min(total(costs, answer) for answer in answers if total(burdens, answer) <= limit * (1 - 1e-5))
    answer = cheapest(costs, burdens, limit)
    assert answer is not None
    assert total(burdens, answer) <= limit
    assert total(costs, answer) <= best


def test_limit_that_nothing_keeps_has_no_answer_and_one_that_just_the_least_keeps_has_one() -> None:
    costs, burdens = random_tables(1)
    least = sum(min(options) for options in burdens)
    assert cheapest(costs, burdens, 0.9 * least) is None
    answer = cheapest(costs, burdens, least)
    assert answer is not None
    assert total(burdens, answer) == least


def test_front_falls() -> None:
    costs, burdens = random_tables(3, items=40)
    points = [(total(burdens, one), total(costs, one)) for one in front(costs, burdens, 12)]
    assert len(points) > 6
    assert all(a[0] < b[0] and a[1] > b[1] for a, b in itertools.pairwise(points))


NUM_DOCUMENTS, NUM_LARGEST = 160, 5


def losses(
    seed: int, spread: float | None, count: int = 40, num_documents: int = NUM_DOCUMENTS
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """True means [Q] with their sums by document [Q, N], and positions [N]; hard documents lose more of everything.
    Without a spread each mean is two thirds of the one before."""
    rng = np.random.default_rng(seed)
    means = (2 / 3) ** np.arange(count) if spread is None else np.exp(rng.normal(0, spread, count))
    positions = rng.integers(10, 60, num_documents)
    difficulty = rng.gamma(2, 0.5, num_documents)
    sums = means[:, None] * positions * difficulty * rng.gamma(4, 0.25, (count, num_documents))
    return means, sums, positions


def raced(sums: np.ndarray, positions: np.ndarray, seed: int) -> tuple[Race, frozenset[int]]:
    def measure(quantity: int, documents: Sequence[int]) -> np.ndarray:
        return sums[quantity, documents]

    race = Race(len(sums), positions, measure, seed)
    return race, race.run(NUM_LARGEST)


def test_what_is_certain_is_among_the_largest_in_at_least_95_of_100_races() -> None:
    wrong = 0
    for seed in range(200):
        means, sums, positions = losses(seed, 0.5)
        _, certain = raced(sums, positions, seed)
        wrong += not certain <= set(np.argsort(-means)[:NUM_LARGEST].tolist())
    assert wrong <= 10


def test_clear_losses_are_all_certain_at_less_than_half_of_the_work_and_equal_ones_open() -> None:
    means, sums, positions = losses(1, None)
    race, certain = raced(sums, positions, 1)
    assert certain == set(np.argsort(-means)[:NUM_LARGEST].tolist())
    assert race.num_passes < 0.5 * len(means)
    _, sums, positions = losses(2, 0.0)
    race, certain = raced(sums, positions, 2)
    assert not certain
    assert race.num_passes == pytest.approx(len(sums))
    assert estimate(np.array([3.0]), np.array([2.0])).high == np.inf, "one document has no interval"

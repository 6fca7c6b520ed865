from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from olive_ext.bench.request_tokens import count_tokens


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

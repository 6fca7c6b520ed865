"""Windows equal lm-eval's, and score each target once."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from olive_ext.engine.requests import Request
from olive_ext.session.conversion import target_windows

TOKENS = st.lists(st.integers(0, 9), max_size=60)
CONTEXT = st.lists(st.integers(10, 19), min_size=1, max_size=40)
MAX_LENGTH = st.integers(1, 20)


@given(tokens=TOKENS, max_length=MAX_LENGTH)
@example(tokens=[1, 2, 3, 4], max_length=2)
def test_target_windows_equals_lm_eval_rolling_when_context_is_one_token(tokens: list[int], max_length: int) -> None:
    pairs = [make_disjoint_window(pair) for pair in get_rolling_token_windows(tokens, 99, max_length, 1)]
    theirs = tuple(Request((*context, *target), len(target)) for context, target in pairs)
    assert target_windows([99], tokens, max_length) == theirs


@given(context=CONTEXT, target=st.lists(st.integers(0, 9), min_size=1, max_size=60), max_length=MAX_LENGTH)
def test_target_windows_scores_each_target_once_behind_its_own_past(
    context: list[int], target: list[int], max_length: int
) -> None:
    whole = context + target
    end = len(context)
    for window in target_windows(context, target, max_length):
        end += window.num_targets
        assert 0 < window.num_targets < len(window.tokens) <= max_length + 1
        assert window.tokens == tuple(whole[end - len(window.tokens) : end])
    assert end == len(whole)

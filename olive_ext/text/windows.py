"""How much of a text the model sees: windows over long targets, and prompts cut to leave room for generation.

Token ids only. A window's last token is never fed, so it may hold `max_length` + 1 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from olive_ext.errors import ConfigError


@dataclass(frozen=True)
class Window:
    """One forward pass: `tokens`, of which the last `num_targets` are scored."""

    tokens: tuple[int, ...]
    num_targets: int


def target_windows(context: Sequence[int], target: Sequence[int], max_length: int) -> list[Window]:
    """Windows that score every token of `target` once, each with as much left context as `max_length` leaves.

    A target of at most `max_length` tokens takes one window, `(context + target)[-(max_length + 1):]`, as in HFLM. A
    longer one (HFLM stops with an assertion) is cut into disjoint windows. With the prefix token as context this is
    lm-eval's `make_disjoint_window(get_rolling_token_windows(..., context_len=1))`. `context` holds a token or more.

        max_length 3    context p    target a b c d e f g h
        windows         p[a b c]     c[d e f]     e f[g h]     (scored in brackets; fed: all but the last)
    """
    whole = (*context, *target)
    windows = []
    for begin in range(0, len(target), max_length):
        num_targets = min(max_length, len(target) - begin)
        end = len(context) + begin + num_targets
        windows.append(Window(whole[max(0, end - max_length - 1) : end], num_targets))
    return windows


def fit_prompt(tokens: Sequence[int], max_new_tokens: int, max_length: int) -> tuple[int, ...]:
    """The end of the prompt that leaves room for `max_new_tokens`, as HFLM cuts it.

    Raises `ConfigError` where no room is left for a prompt at all.
    """
    room = max_length - max_new_tokens
    if room < 1:
        raise ConfigError(
            f"'max_new_tokens' = {max_new_tokens} leaves no room for a prompt: it must be below the model's context "
            f"(max_length) of {max_length} tokens"
        )
    return tuple(tokens[-room:])

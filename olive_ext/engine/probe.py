"""Finds by trying what a graph with states can be fed: some say any number of tokens and run with one only (Mamba)."""

from __future__ import annotations

from olive_ext.engine.step import Row, Runner, Step
from olive_ext.errors import RunError

NOTE = "tokens are fed one at a time: the graph fails on several, though it declares any number"


def takes_several_tokens(runner: Runner) -> bool:
    """Whether a step of two tokens runs. Nothing stays resident that a scheduler would count on."""
    runner.reserve(2)
    try:
        runner.run(Step((Row(0, 0, (0, 0)),)))
    except RunError:
        return False
    return True

"""Which backend runs when: all by turns, several rounds, each at the batch size that was fastest when all were tried.

Pure but for `launch`, which runs one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from olive_ext.bench.job import Run

BATCHED = ("hf", "olive-ort", "olive-ortgenai")
"""Backends that take a batch size; lm-eval's ONNX backends run at 1, and ours chooses."""

PROBE = -1
"""The round in which batch sizes are tried on part of the work."""

Launch = Callable[[str, int | None, int], Run]
"""Backend, batch size, round."""


@dataclass(frozen=True)
class Schedule:
    """`backends` in order, ours first; `once`: in the first round only."""

    backends: Sequence[str]
    batch_sizes: Sequence[int]
    rounds: int
    once: Sequence[str] = ()
    probes: bool = False
    """Whether batch sizes are tried in a round of their own before the first; else in the first."""

    def run(self, launch: Launch) -> Iterator[Run]:
        """Every run as it ends. A backend that failed is not run again."""
        done: list[Run] = []
        for number in range(PROBE if self.probes else 0, self.rounds):
            for backend in self.backends:
                for size in self._sizes(backend, number, done):
                    run = launch(backend, size, number)
                    done.append(run)
                    yield run

    def _sizes(self, backend: str, number: int, done: Sequence[Run]) -> Sequence[int | None]:
        own = [run for run in done if run.backend == backend]
        if number == PROBE:
            return self.batch_sizes if backend in BATCHED else []
        if not own:
            return self.batch_sizes if backend in BATCHED else [None]
        chosen = best(own)
        is_over = backend in self.once and number > 0
        failed = any(run.error for run in own if run.round > own[0].round)
        return [] if is_over or failed or chosen is None else [chosen.batch_size]


def best(runs: Sequence[Run]) -> Run | None:
    """The fastest of a backend's first round, the probe where there was one; None where none succeeded."""
    good = [run for run in runs if run.round == runs[0].round and not run.error]
    return min(good, key=lambda run: run.in_model) if good else None

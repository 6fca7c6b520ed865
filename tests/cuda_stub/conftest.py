"""Tests marked `cuda_stub` run under `DIR/run` of .ci/cuda_stub/make.py and are skipped elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from olive_ext.engine.forms import packed
from olive_ext.engine.runners import trials


@pytest.hookimpl(tryfirst=True)  # before any fixture opens a model
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda_stub") and not os.environ.get("OLIVE_EXT_CUDA_STUB"):
        pytest.skip("run under DIR/run, which python .ci/cuda_stub/make.py DIR makes")


VERDICTS = (
    (packed, "attends_otherwise"),
    *((module, "disagreement") for module in (packed, trials)),
)
"""Where the functions that find what a trial's numbers are worth are called."""


@pytest.fixture(scope="package", autouse=True)
def verdicts() -> Iterator[list[str | None]]:
    """Kernels do nothing here, which trials refuse: they run, what they find is kept for whoever asks, and forms are
    opened all the same, to count what they launch."""
    found: list[str | None] = []

    def unheard(judge: Callable[..., str | None]) -> Callable[..., None]:
        return lambda *given: found.append(judge(*given))

    with pytest.MonkeyPatch.context() as patch:
        for place, name in VERDICTS:
            patch.setattr(place, name, unheard(getattr(place, name)))
        yield found

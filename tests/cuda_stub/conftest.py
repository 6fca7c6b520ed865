"""Tests marked `cuda_stub` run under `DIR/run` of .ci/cuda_stub/make.py and are skipped elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from olive_ext.engine.forms import agreement


@pytest.hookimpl(tryfirst=True)  # before any fixture opens a model
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda_stub") and not os.environ.get("OLIVE_EXT_CUDA_STUB"):
        pytest.skip("run under DIR/run, which python .ci/cuda_stub/make.py DIR makes")


@pytest.fixture(scope="package", autouse=True)
def trials_pass_without_numbers() -> Iterator[None]:
    """Kernels do nothing here, which trials refuse: forms are opened all the same, to count what they launch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "NEEDS_SPREAD", False)
        yield

"""Tests marked `cuda_stub` run under `DIR/run` of .ci/cuda_stub/make.py and are skipped elsewhere."""

from __future__ import annotations

import os

import pytest


@pytest.hookimpl(tryfirst=True)  # before any fixture opens a model
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda_stub") and not os.environ.get("OLIVE_EXT_CUDA_STUB"):
        pytest.skip("run under DIR/run, which python .ci/cuda_stub/make.py DIR makes")

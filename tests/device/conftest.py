"""Tests marked `webgpu` are skipped where there is no such device, with the reason."""

from __future__ import annotations

import pytest

from tests.device.open import why_no_webgpu


@pytest.hookimpl(tryfirst=True)  # before any fixture opens a model
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("webgpu") and (reason := why_no_webgpu()):
        pytest.skip(reason)

"""Tests marked `webgpu` are skipped where there is no such device, as in tests/device."""

from tests.device.conftest import pytest_runtest_setup as pytest_runtest_setup

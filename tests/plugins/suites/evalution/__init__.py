"""Every test here drives the real Evalution."""

import pytest

pytest.importorskip("evalution", reason="Evalution is not installed: pip install -c constraints.txt '.[evalution]'")

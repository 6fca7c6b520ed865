"""The table of docs/locate.md is the one that its data give."""

from __future__ import annotations

from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"


def test_table_says_what_was_measured_of_models_no_larger_than_those_beside_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import mended_page

    text = mended_page.PAGE.read_text(encoding="utf-8")
    assert mended_page.models()
    assert mended_page.page_with_table(text) == text
    assert mended_page.page_with_table(text.replace("k_quant_mixed | 1", "k_quant_mixed | 2")) == text
    for facts in mended_page.models().values():
        losses = facts["losses"]
        mended = [name for name in losses if name.startswith("mended like ")]
        assert mended
        base = losses[mended_page.BASE]["bytes"]
        for name in mended:
            assert losses[name]["bytes"] <= max(base, losses[name.removeprefix("mended like ")]["bytes"])

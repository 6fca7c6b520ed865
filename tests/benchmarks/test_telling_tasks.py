"""The script that says which task tells two models apart with the fewest tokens, against scipy's paired test."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from scipy.stats import ttest_rel

from olive_ext.stats.paired_answers import documents_needed
from tests.session.tiny import byte_level

SCRIPTS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import telling_tasks

    return telling_tasks


def _line(number: int, own: float, reference: float, margins: tuple[float, float]) -> dict[str, Any]:
    said = {
        "reference_values": {"acc": reference},
        "margins": dict(zip(("reference", "candidate"), margins, strict=True)),
    }
    asked = {f"gen_args_{choice}": {"arg_0": "the cat", "arg_1": text} for choice, text in enumerate((" sat", " ran"))}
    resps = [[["-1.0", "False"]], [["-2.0", "True"]]]
    return {"doc_id": number, "filter": "none", "arguments": asked, "resps": resps, "acc": own, "olive_ext": said}


def test_differences_are_those_of_a_paired_test(script: ModuleType, tmp_path: Path) -> None:
    rng = random.Random(3)
    pairs = [(float(rng.random() < 0.5), float(rng.random() < 0.7)) for _ in range(90)]
    margins = [(value := rng.gauss(1, 3), value - rng.gauss(0.4, 1)) for _ in pairs]
    lines = [_line(number, *pair, both) for number, (pair, both) in enumerate(zip(pairs, margins, strict=True))]
    (tmp_path / "samples_toy.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    tokenizer = byte_level()
    found = {item.measure: item for item in script.of_folder(tmp_path, tokenizer)}
    each = sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in ("the cat", " sat", " ran"))
    for name, own, reference in [
        ("acc", *zip(*pairs, strict=True)),
        ("margin", *list(zip(*margins, strict=True))[::-1]),
    ]:
        item, expected = found[name], ttest_rel(own, reference).statistic
        assert (item.num_documents, item.tokens) == (90, each)
        assert item.z == pytest.approx(expected)
        assert item.z_of_tokens == pytest.approx(expected * (1000 / (90 * each)) ** 0.5)
        changes = [a - b for a, b in zip(own, reference, strict=True)]
        needed = documents_needed(changes, abs(sum(changes)) / 90, name == "acc")
        assert item.needed == (needed if abs(expected) > script.Z95 else None)
    assert found["margin"].needed is not None

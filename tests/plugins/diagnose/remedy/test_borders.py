"""Variants that begin at a border have the numbers of the whole graph: families whose layers hand on more than a hidden
state, or whose caches are shared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from olive_ext.plugins.diagnose.remedy.locate import opened_location
from olive_ext.plugins.diagnose.settings import LocationConfig
from tests.backends import local_tasks
from tests.exports.genai import genai_export
from tests.exports.mobius import mobius_export
from tests.exports.optimum import optimum_export
from tests.plugins.diagnose.remedy.test_corruption import in_bits

CASES = {
    "llama, builder": (lambda: genai_export("llama"), 0.85),
    "llama, optimum": (lambda: optimum_export("llama"), 0.85),
    "gemma2, windows": (lambda: genai_export("gemma2", "0.14.1"), 0.88),
    "gemma3_text, tied, builder": (lambda: genai_export("gemma3_text"), 0.69),
    "gemma3_text, tied, mobius": (lambda: mobius_export("gemma3_text"), 0.67),
    "gemma4_text, shared caches": (lambda: mobius_export("gemma4_text"), 1.0),
    "qwen3_moe": (lambda: mobius_export("qwen3_moe"), 0.86),
    "lfm2, a hybrid": (lambda: genai_export("lfm2"), 0.77),
    "qwen3_5_text, a hybrid": (lambda: mobius_export("qwen3_5_text"), 0.75),
    "gpt_oss, experts": (lambda: genai_export("gpt_oss", "0.14.1"), 0.92),
}
"""By family what is left of the multiplications at most, of a few layers; the rest are below borders."""


@pytest.mark.exporters
@pytest.mark.parametrize(
    "case", ["llama, builder", *(pytest.param(one, marks=pytest.mark.long) for one in list(CASES)[1:])]
)
def test_numbers_are_those_of_the_whole_graph(case: str, tmp_path: Path) -> None:
    export, most = CASES[case]
    package, tasks = in_bits(export(), tmp_path / "package"), local_tasks.write_tasks(tmp_path / "tasks")
    work = {"tasks": ["tiny_choice", "tiny_rolling"], "include_path": tasks}
    config = LocationConfig.of(str(package), {"reference": str(export()), **work})
    with opened_location(config, False) as location, location.with_more().measuring() as material:
        variants, documents = material.variants, material.documents
        wanted = [[one] for one in sorted(variants.targets, key=lambda one: variants.share([one]))]
        wanted += [[*variants.targets], *([one for one in variants.targets if one not in some] for some in wanted[:3])]
        before = variants.work
        found = [variants.kl(targets, documents) for targets in wanted]
        share = variants.computed_share(before)
        # Documents that are equal, and not the same, are not known to have been run.
        whole = [variants.kl(targets, [list(document) for document in documents]) for targets in wanted]
    # ONNX Runtime fuses Gemma 4's first layer otherwise where it is cut.
    assert np.abs(np.array(found) - np.array(whole)).max() <= (2e-6 if case.startswith("gemma4") else 0)
    assert share < most

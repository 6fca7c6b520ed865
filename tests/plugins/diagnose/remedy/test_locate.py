"""The loss map of the quickstart's model: additive, equal to another road's numbers, and it finds a planted fault."""

from __future__ import annotations

import inspect
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import olive_ext
from olive_ext.errors import ModelError
from olive_ext.plugins.diagnose.remedy.pages import Estimate, LossMap, interval, write_loss_map
from olive_ext.plugins.diagnose.settings import LocationConfig, MendingConfig
from olive_ext.report.verdict import verdict
from tests.exports import quickstart
from tests.exports.edited import change, changed, edited
from tests.refusals import refused

WORK: dict[str, Any] = {
    "tasks": ["quickstart_choice", "quickstart_perplexity"],
    "include_path": str(quickstart.TASKS),
    "limit": 8,
}


def located(model: Path, **more: Any) -> LossMap:
    return olive_ext.locate(model, **{"reference": quickstart.exported(), **WORK, **more})


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's tasks, whose first text is empty: it has no positions, and stops nothing."""
    folder = shutil.copytree(quickstart.TASKS, tmp_path_factory.mktemp("tasks") / "tasks")
    texts = (folder / "perplexity.jsonl").read_text(encoding="utf-8").splitlines()
    empty = json.dumps(json.loads(texts[0]) | {"page": ""})
    (folder / "perplexity.jsonl").write_text("\n".join([empty, *texts[1:]]) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def whole(tasks: Path) -> LossMap:
    return located(quickstart.quantized(4, 128), top=3, include_path=str(tasks))


@pytest.mark.long
def test_all_products_are_measured_and_nearly_add_up_in_the_map_that_is_written(whole: LossMap, tmp_path: Path) -> None:
    assert len(whole.entries) == 21
    assert not whole.unpaired
    assert [entry.kl for entry in whole.entries] == sorted((entry.kl for entry in whole.entries), reverse=True)
    assert 0.7 < whole.sum.mean / whole.total.mean < 1.4
    assert whole.total.mean == pytest.approx(whole.model_kl.mean, rel=0.05)
    data, _, page = write_loss_map(whole, tmp_path)
    stored = json.loads(data.read_text(encoding="utf-8"))
    assert {"name", "nodes", "kl", "low", "high", "bytes"} <= stored["entries"][0].keys()
    assert stored["total"]["mean"] == whole.total.mean
    text = page.read_text(encoding="utf-8")
    assert whole.additivity.split(":")[0] in text.replace("&#39;", "'")
    assert text.count('class="cell') == 21


@pytest.mark.long
def test_quantized_models_own_loss_is_that_of_a_comparison(whole: LossMap, tasks: Path) -> None:
    config = {"model": str(quickstart.quantized(4, 128)), **WORK, "reference": str(quickstart.exported())}
    report = olive_ext.evaluate({**config, "include_path": str(tasks)})
    assert (whole.num_documents, whole.model_kl.num_documents) == (16, 16)
    parts = [one for one in report.comparison.divergences if one.task in WORK["tasks"]]
    assert sum(one.num_positions for one in parts) == whole.num_positions
    mean = sum(one.kl.mean * one.num_positions for one in parts) / whole.num_positions
    assert whole.model_kl.mean == pytest.approx(mean, rel=1e-3)
    assert whole.kernels.mean == pytest.approx(whole.model_kl.mean - whole.total.mean)


@pytest.mark.long
def test_planted_noise_is_found_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def noise(numbers: np.ndarray) -> np.ndarray:
        return numbers ^ (np.random.default_rng(0).integers(0, 4, numbers.shape).astype(np.uint8) * 0x11)

    broken = changed(
        quickstart.quantized(4, 128), tmp_path / "broken", "layers.0.attn.qkv_proj.MatMul.weight_Q4", noise
    )
    found = located(broken, top=1, limit=16, progress=True)
    assert "output folder\n" in capsys.readouterr().err, "the folder of records goes"
    assert found.entries[0].name == "/model/layers.0/attn/qkv_proj/MatMul"
    assert found.entries[0].is_certain


DOWN = "model.layers.1.mlp.down_proj.MatMul.weight_scales"


def doubled_late(table: Any) -> Any:
    table[450:] *= 2
    return table


def without_a_row(table: Any) -> Any:
    table[1000] = np.nan
    return table


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "edit", "first", "least"),
    [
        (DOWN, lambda scales: 3 * scales, "/model/layers.1/mlp/down_proj/MatMul", 0.8),
        ("cos_cache", lambda table: np.roll(table, 1, 0), "cos_cache", 0.8),
        ("cos_cache", doubled_late, "cos_cache", 0.0),
        ("model.layers.2.input_layernorm.weight", lambda norm: 1.05 * norm, "model.layers.2.input_layernorm.weight", 0),
        ("model.embed_tokens.weight", without_a_row, "/model/embed_tokens/Gather", 0.0),
    ],
    ids=["scales", "shifted", "late", "norm", "nan"],
)
def test_what_is_damaged_is_the_first_entry_and_mended_by_the_float_model(
    name: str, edit: Callable[[Any], Any], first: str, least: float, tmp_path: Path
) -> None:
    model = changed(quickstart.quantized(4, 128), tmp_path / "damaged", name, edit)
    loss_map = located(model, top=1, limit=8)
    assert loss_map.entries[0].name == first
    assert loss_map.sentences[0].startswith(f"Damaged: '{first}' ")
    assert loss_map.entries[0].kl >= least * loss_map.model_kl.mean
    assert loss_map.total.mean == pytest.approx(loss_map.model_kl.mean, rel=0.05), "nothing is left to other kernels"
    given: dict[str, Any] = {**WORK, "limit": 8, "within": {"kl_mean": 0.02}, "output_dir": str(tmp_path / "mended")}
    bill = olive_ext.mend(str(model), reference=str(quickstart.exported()), **given)
    assert first in {line.name for line in bill.changed}
    assert bill.chosen_loss.held_out.mean < 0.01
    assert bill.chosen.bytes == pytest.approx(bill.unchanged.bytes, rel=0.01)


def test_evaluation_that_does_not_reach_the_damage_is_not_green(tmp_path: Path) -> None:
    model = changed(quickstart.quantized(4, 128), tmp_path / "damaged", "cos_cache", doubled_late)
    given: dict[str, Any] = {**WORK, "limit": 4, "reference": str(quickstart.exported())}
    for path, is_damaged in ((model, True), (quickstart.quantized(4, 128), False)):
        comparison = olive_ext.evaluate({"model": str(path), **given}).comparison
        assert (comparison.reach.longest < 450, comparison.reach.context) == (True, 512)
        assert 0 < (comparison.reach.vocabulary or 0) < 1
        assert list(comparison.damaged) == ["cos_cache"] * is_damaged
        assert ("damaged: 'cos_cache' rows 450 to 511 of 512 are" in verdict(comparison).finding) == is_damaged


def test_weights_that_make_up_for_each_other_are_no_damage(whole: LossMap) -> None:
    """Values scaled by 3 and the output projection by a third: each alone loses much, and both together nothing."""
    first, *others = whole.entries
    strange = replace(whole, damaged={first.name: "is not the float model's"}, beyond_rounding={first.name: 0.9})
    assert strange.sentences[0].startswith(f"Damaged: '{first.name}' ")
    made_up = replace(strange, entries=(replace(first, kl=10 * whole.total.mean), *others))
    assert made_up.sentences[0] == whole.certainty


def test_single_document_shows_nothing_of_kernels_and_an_upper_end_that_says_nothing_is_not_printed(
    whole: LossMap,
) -> None:
    single = replace(whole, num_documents=1, kernels=Estimate(0.0, -math.inf, math.inf, 1))
    assert single.rest.count("too few documents") == 1
    assert "1 document, all" in replace(single, num_largest=len(single.entries)).certainty
    assert interval(Estimate(0.0184, 0.004, 7.56, 8)) == "from 0.00400 on"
    assert interval(Estimate(0.0184, 0.004, 0.05, 8)) == "0.00400 to 0.0500"


def test_model_of_another_origin_is_refused_by_its_values(tmp_path: Path) -> None:
    def scramble(model: onnx.ModelProto) -> None:
        rng = np.random.default_rng(0)
        for tensor in (tensor for tensor in model.graph.initializer if len(tensor.dims) == 2):
            change(tensor, lambda numbers: rng.permutation(numbers.reshape(-1)).reshape(numbers.shape))

    other = edited(quickstart.exported(), tmp_path / "other", scramble)
    with refused(ModelError, "not_comparable"):
        located(quickstart.quantized(4, 128), reference=other)


@pytest.mark.long
def test_activations_that_a_kernel_rounds_are_what_kernels_add() -> None:
    rounded = located(quickstart.quantized(4, 32, accuracy_level=4), limit=40)
    plain = located(quickstart.quantized(4, 32), limit=40)
    assert [(entry.name, entry.kl) for entry in rounded.entries] == [(one.name, one.kl) for one in plain.entries]
    assert (rounded.model_kl.mean, rounded.kernels.mean) > (plain.model_kl.mean, plain.kernels.mean)
    assert plain.kernels.low <= 0 <= plain.kernels.high
    assert "add nothing" in plain.rest


def test_functions_show_their_settings_as_keywords() -> None:
    for function, settings in ((olive_ext.locate, LocationConfig), (olive_ext.mend, MendingConfig)):
        shown = inspect.signature(function).parameters
        assert [*shown][:4] == ["config", "progress", "tasks", "reference"]
        assert shown.keys() == {"config", "progress", *settings.model_fields}

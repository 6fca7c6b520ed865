"""Mended models from the quickstart's: bounds and sizes are kept, by the package itself and by Olive's passes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from PIL import Image

import olive_ext
from olive_ext.cli import main
from olive_ext.errors import ConfigError, ModelError, RequirementError, TaskError
from olive_ext.model.files.content import model_digest, size_on_disk
from olive_ext.model.files.locate import locate as locate_files
from olive_ext.plugins.diagnose.remedy.locate import opened_location
from olive_ext.plugins.diagnose.remedy.mend import split
from olive_ext.plugins.diagnose.remedy.pages import Bill, points_table, with_interval
from olive_ext.plugins.diagnose.remedy.variants import Variants, document_key
from olive_ext.plugins.diagnose.settings import LocationConfig
from olive_ext.session.requests import RollingRequest, ScoringRequest
from tests.exports import quickstart
from tests.model.tiny import packed
from tests.plugins.diagnose.remedy.test_mended_package import logits
from tests.refusals import refused, tells

WORK: dict[str, Any] = {
    "tasks": ["quickstart_choice", "quickstart_perplexity"],
    "include_path": str(quickstart.TASKS),
    "limit": 10,
    "top": 1,
}
FEW: dict[str, Any] = {**WORK, "tasks": ["quickstart_choice"], "limit": 8}
BOUND = 1e-3
SIZE = "1.25MB"
"""Some more than the quickstart's model takes in int4."""


def mend(output: Path, model: Path | None = None, **settings: Any) -> Bill:
    given = {"reference": str(quickstart.exported()), **WORK, **settings}
    return olive_ext.mend(str(model or quickstart.quantized(4, 128)), output_dir=str(output), **given)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Bill]:
    output = tmp_path_factory.mktemp("mend") / "mended"
    return output, mend(output, within={"kl_mean": BOUND})


def test_bound_that_was_broken_is_kept_in_little_more_bytes(kept: tuple[Path, Bill]) -> None:
    output, bill = kept
    assert bill.unchanged_loss.choosing.mean > 2 * BOUND
    assert bill.chosen_loss.choosing.high <= BOUND
    assert bill.chosen_loss.held_out.mean < BOUND
    assert bill.chosen.bytes == size_on_disk(locate_files(output))
    assert bill.unchanged.bytes < bill.chosen.bytes < 1.25 * bill.unchanged.bytes
    assert 0 < len(bill.changed) < len(bill.lines)
    assert bill.changed[0].name in {line.name for line in bill.lines}
    in_bound = [one.bytes for one in bill.trials if one.measured.high <= BOUND]
    assert min(in_bound) == pytest.approx(bill.chosen.bytes, rel=0.01)
    assert bill.chosen_loss.choosing.mean in [one.measured.mean for one in bill.trials]
    assert f"chose nothing, where it was {with_interval(bill.unchanged_loss.held_out)}" in " ".join(bill.sentences)
    assert points_table(bill).heads[-1] == "KL predicted on the documents that choose, nats"
    assert bill.chosen.kl == pytest.approx(bill.chosen_loss.choosing.mean, rel=0.5)
    assert [one.kl for one in bill.front] == sorted((one.kl for one in bill.front), reverse=True)
    assert [one.bytes for one in bill.front] == sorted(one.bytes for one in bill.front)


def test_bill_lies_beside_the_model(kept: tuple[Path, Bill]) -> None:
    output, bill = kept
    stored = json.loads((output / "bill.json").read_text(encoding="utf-8"))
    assert stored["verdict"] == bill.verdict
    assert stored["chosen"]["bytes"] == bill.chosen.bytes
    assert len(stored["lines"]) == len(bill.lines)
    assert "predicted" in (output / "bill.md").read_text(encoding="utf-8")
    page = (output / "bill.html").read_text(encoding="utf-8")
    assert f"<title>The bill of {'/'.join(Path(bill.model).parts[-2:])}</title>" in page
    points = points_table(bill, with_front=True).rows
    assert len(points) == len(bill.front) + 2
    assert all(str(text) in page for row in points for text in row)


@pytest.mark.long
def test_named_file_is_measured_where_the_float_model_lies_beside_it(tmp_path: Path) -> None:
    folder = shutil.copytree(quickstart.exported(), tmp_path / "onnx")
    (folder / "genai_config.json").unlink()
    model = onnx.load(quickstart.quantized(4, 128) / "model.onnx")
    onnx.save(model, folder / "model_q4.onnx", save_as_external_data=True, location="model_q4.onnx.data")
    goal = {**FEW, "at_most": SIZE, "reference": str(folder / "model.onnx")}
    bill = mend(folder / "mended", model=folder / "model_q4.onnx", **goal)
    assert bill.chosen_loss.choosing.mean > 1e-5
    made = [folder / "mended" / f"model_q4.onnx{end}" for end in ("", ".data")]
    assert bill.chosen.bytes == sum(path.stat().st_size for path in made)
    assert not (folder / "mended" / "model.onnx").exists()


@pytest.mark.long
def test_command_mends_a_variant_of_a_model_package_in_its_place_and_prints_the_bill(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root = packed(tmp_path / "m.ortpackage", one=quickstart.exported(), int4=quickstart.quantized(4, 128))
    output = tmp_path / "mended"
    arguments = ["mend", str(root), "--variant", "int4", "--reference", str(quickstart.exported()), "--at-most", SIZE]
    arguments += ["--tasks", "quickstart_choice", "--include-path", str(quickstart.TASKS), "--limit", "8"]
    manifest = json.loads((root / "manifest.json").read_text(encoding="utf-8"))
    for folder, status in (("int4", 2), ("one", 0)):  # another variant with the same graph would be mended, too
        manifest["components"]["model"]["variants"]["also"] = {"variant_directory": folder}
        (root / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
        assert main([*arguments, "--top", "1", "--output", str(output)]) == status
        out, err = capfd.readouterr()
        assert ("variants int4, also have" in err) == (status == 2)
    assert "precision" in out
    assert "HighsMip" not in out
    assert "int8 in blocks of" in out
    bill = json.loads((output / "bill.json").read_text(encoding="utf-8"))
    assert bill["chosen"]["bytes"] == size_on_disk(locate_files(output, variant="int4")) > bill["unchanged"]["bytes"]
    assert locate_files(output, variant="one").tokenizer == locate_files(output, variant="int4").tokenizer
    assert model_digest(locate_files(output, variant="one")) == model_digest(locate_files(root, variant="one"))


@pytest.mark.long
def test_size_is_kept_and_used(tmp_path: Path) -> None:
    size = 1_250_000
    bill = mend(tmp_path / "mended", at_most="1.25MB", **FEW)
    assert size_on_disk(locate_files(tmp_path / "mended")) <= size
    assert bill.chosen.bytes > bill.unchanged.bytes
    assert bill.verdict is None
    assert bill.chosen_loss.held_out.mean < 0.5 * bill.unchanged_loss.held_out.mean


@pytest.mark.long
def test_bound_that_held_out_documents_break_ends_with_status_2(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Documents with the smaller hashes choose: here they are sentences that lose little, and the others lose much."""
    pages = (quickstart.TASKS / "perplexity.jsonl").read_text(encoding="utf-8").splitlines()[:6]
    texts = list(dict.fromkeys(text for page in pages for text in json.loads(page)["page"].split(". ")))
    model = ["--reference", str(quickstart.exported()), "--top", "1"]
    digests, losses = digests_and_losses_of(texts, tmp_path)
    ordered = sorted(texts, key=digests.__getitem__)
    half = len(texts) // 2
    few = sorted(ordered[:half], key=losses.__getitem__)[:12]
    many = sorted(ordered[half:], key=losses.__getitem__)[-12:]
    bound = max(losses[text] for text in few)
    task = written_task([*few, *many], tmp_path)
    arguments = ["mend", str(quickstart.quantized(4, 128)), *model, "--tasks", str(task)]
    status = main([*arguments, "--within", f"kl_mean={bound}", "--output", str(tmp_path / "mended")])
    told = capfd.readouterr()
    assert status == 1
    assert "is broken (95 %)" in told.out.splitlines()[-1]
    assert tells(told.err.splitlines()[-1], "broken 12 kl_mean")
    assert json.loads((tmp_path / "mended" / "bill.json").read_text())["chosen_loss"]["held_out"]["low"] > bound


def written_task(texts: list[str], folder: Path) -> Path:
    """A task that asks the likelihood of each text."""
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    task = {
        "task": "texts",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "texts.jsonl")}},
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}],
    }
    (folder / "texts.yaml").write_text(json.dumps(task))
    return folder / "texts.yaml"


def digests_and_losses_of(texts: list[str], folder: Path) -> tuple[dict[str, bytes], dict[str, float]]:
    """By which each text is put on a side, and what the quantized model loses on it, in nats a position."""
    given = {"model": {"path": str(quickstart.quantized(4, 128))}, "reference": str(quickstart.exported())}
    config = LocationConfig.of({**given, "tasks": [str(written_task(texts, folder))]}, {})
    with opened_location(config, False) as location, location.measuring() as material:
        sums = material.variants.compared(location.model, material.documents) / material.positions
        digests = map(document_key, material.documents)
        return dict(zip(texts, digests, strict=True)), dict(zip(texts, sums.tolist(), strict=True))


@pytest.mark.long
def test_bound_that_is_kept_already_hands_the_model_on_unchanged(tmp_path: Path) -> None:
    bill = mend(tmp_path / "mended", within={"kl_mean": 1.0}, **FEW)
    assert not bill.changed
    assert "already" in bill.sentences[0]
    np.testing.assert_array_equal(logits(tmp_path / "mended"), logits(quickstart.quantized(4, 128)))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"within": {"kl_mean": 1e-9}}, {"code": "bound_broken", "holds": ("kl_mean", "1", "0e-09")}),
        pytest.param(
            {"within": {"kl_mean": 1e-5}, "at_most": "1.2MB"},
            {"code": "bound_broken", "holds": ("1", "20", "kl_mean", "00")},
            marks=pytest.mark.long,
        ),
    ],
)
def test_goal_that_cannot_be_reached_says_how_far_it_came(
    settings: dict[str, Any], problem: dict[str, Any], tmp_path: Path
) -> None:
    int8 = {} if "at_most" in settings else {"model": quickstart.quantized(4, 128, accuracy_level=4)}
    with refused(RequirementError, **problem):
        mend(tmp_path / "mended", **FEW, **int8, **settings)
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_call_that_is_killed_goes_on_from_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed as the first mended model is written, the second call measures no weight again, and no price that chose
    that model."""
    arguments = ["mend", str(quickstart.quantized(4, 128)), "--reference", str(quickstart.exported()), "--top", "1"]
    arguments += ["--tasks", ",".join(WORK["tasks"]), "--include-path", WORK["include_path"], "--limit", "10"]
    arguments += ["--within", f"kl_mean={BOUND}", "--output", str(tmp_path / "mended")]
    command = [sys.executable, "-c", "import sys; from olive_ext.cli import main; sys.exit(main())", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any("writing" in line for line in process.stderr)
        process.kill()
    assert [path.name for path in tmp_path.iterdir()] == [".mended.unfinished"]

    measured: list[str] = []
    kl = Variants.kl

    def noted_kl(self: Variants, targets: Any, documents: Any) -> Any:
        measured.extend(target.name for target in targets)
        return kl(self, targets, documents)

    monkeypatch.setattr(Variants, "kl", noted_kl)
    with refused(TaskError, "unknown_name", "tasks"):  # keeps what was measured, too
        mend(tmp_path / "mended", within={"kl_mean": BOUND}, tasks=["quickstart_choise"])
    bill = mend(tmp_path / "mended", within={"kl_mean": BOUND})
    assert bill.chosen_loss.choosing == bill.trials[0].measured
    assert all(" as int" in name for name in measured)
    assert not {f"{line.name} as {line.choice.precision}" for line in bill.changed} & set(measured)
    assert [path.name for path in tmp_path.iterdir()] == ["mended"]


def test_models_that_cannot_be_mended_are_refused(tmp_path: Path) -> None:
    goal = {"within": {"kl_mean": BOUND}}
    with refused(ConfigError, "contradiction", holds="'reference'"):
        mend(tmp_path / "mended", model=quickstart.exported(), **goal)
    copy = shutil.copytree(quickstart.exported(), tmp_path / "copy")
    (copy / "model.onnx").write_bytes((copy / "model.onnx").read_bytes() + b"\x12\x01a")  # another producer's name
    with refused(ModelError, "unsupported"):
        mend(tmp_path / "mended", model=copy, **goal)
    with refused(ConfigError, "wrong_value", "at_most", 1_000_000):
        mend(tmp_path / "mended", at_most="1MB")
    with refused(ConfigError, "missing", holds=("3", "2", "1")):
        mend(tmp_path / "mended", **goal, tasks=["quickstart_choice"], limit=3)
    with refused(ConfigError, "exists", "output_dir"):
        mend(copy, **goal)
    (copy / "model.onnx").unlink()
    quantized = shutil.copytree(quickstart.quantized(4, 128), tmp_path / "copy", dirs_exist_ok=True)
    with refused(ConfigError, "wrong_value", "output_dir"):
        mend(quantized / "mended", model=quantized, **goal)
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_document_that_is_asked_twice_is_on_one_side() -> None:
    documents = [[RollingRequest(f"document {n % 5}")] for n in range(60)]
    choosing, held_out = split(documents, ["a"] * 30 + ["b"] * 30)
    assert sorted(choosing + held_out) == list(range(60))
    assert not {documents[n][0] for n in choosing} & {documents[n][0] for n in held_out}


def test_documents_are_told_apart_by_pictures_and_features() -> None:
    def key(shade: int, feature: float) -> bytes:
        features = np.zeros((80, 3000), np.float32)
        features[40, 1500] = feature
        picture = Image.new("RGB", (8, 8), (shade, 0, 0))
        return document_key([ScoringRequest("what?", " that", source=features, images=[picture])])

    assert key(1, 0.0) == key(1, 0.0)
    assert len({key(1, 0.0), key(2, 0.0), key(1, 1.0)}) == 3

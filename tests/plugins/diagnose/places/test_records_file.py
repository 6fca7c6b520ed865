"""Records that travel: one file of one model is a reference elsewhere, and whatever is wrong with it is one line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from olive_ext.cli import main
from olive_ext.config import EvaluationConfig
from olive_ext.errors import ConfigError, OliveExtError, RecordsError
from olive_ext.report import Report
from olive_ext.report.verdict import verdict
from olive_ext.run.evaluation import record
from tests.exports.quickstart import TASKS, exported, quantized
from tests.plugins.diagnose.places.planted import WORK, compared, planted
from tests.refusals import refused

ALL = {"tasks": ["quickstart_choice", "quickstart_generate"]}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the float model, over choices and generated answers."""
    path = tmp_path_factory.mktemp("records") / "float.records"
    record(EvaluationConfig.of(exported(), {**WORK, **ALL}), path)
    return path


def test_same_model_is_the_same_to_rounding(file: Path) -> None:
    """Records of the same content give the verdict on places, without being told that this is one model."""
    report = compared(str(file), **ALL)
    place, reference = report.comparison.place, report.comparison.reference
    assert (place.kind, place.largest) == ("same", 0.0)
    assert place.reference.endswith("recorded)")
    assert reference["mode"] == "recorded"
    assert reference["versions"]["onnxruntime"]
    assert reference["hardware"]["cpu"]


@pytest.mark.long
def test_quantized_model_is_compared_as_with_the_float_model_itself(file: Path) -> None:
    """Where the float model is not at hand its records give the same figures: distances, flips, verdict."""
    int4 = quantized(4, 32)
    here, there = (compared({"path": path, "mode": mode}, int4, **ALL) for path, mode in
                   ((str(exported()), "resident"), (str(file), "auto")))  # fmt: skip
    assert there.comparison.place is None
    assert verdict(there.comparison).lines == verdict(here.comparison).lines
    assert there.comparison.flips == here.comparison.flips
    assert there.comparison.outcomes == here.comparison.outcomes


@pytest.mark.long
def test_fewer_documents_are_enough_and_enough_documents_work(file: Path) -> None:
    """A part of the recorded documents may be asked; and a claim may draw from all of them."""
    assert compared(str(file), limit=5).comparison.place.kind == "same"
    drawn = evaluate_enough(file)
    assert drawn.comparison.certainty is not None


def evaluate_enough(file: Path) -> Report:
    """Over all documents of the first task, which the file has not all."""
    whole = file.with_name("whole.records")
    record(EvaluationConfig.of(exported(), {**WORK, "limit": None}), whole)
    return compared(str(whole), quantized(8, 32), limit=None, documents="enough", matters=10.0)


def test_file_says_what_it_is(file: Path) -> None:
    """Versions, providers, processor, tokenizer, digests and tasks are in its manifest; every part has its checksum."""
    with zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None
        manifest = json.loads(archive.read("manifest.json"))
    assert manifest["versions"]["onnxruntime"]
    assert manifest["providers"]
    assert manifest["hardware"]["cpu"]
    assert manifest["facts"]["model"] == manifest["content_hash"]
    assert manifest["facts"]["tokenizer"]["vocabulary"]
    assert sorted(manifest["tasks"]) == sorted(ALL["tasks"])
    assert manifest["computed_in"] == "float32"
    assert not [path for path in file.parent.iterdir() if path.name.startswith(".")]


def test_size_is_told_before_the_model_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`olive-ext record` tells bytes, positions and share of the logits, an upper bound of what it then writes."""
    path = tmp_path / "new" / "x.records"
    work = ["--tasks", "quickstart_letters", "--include-path", str(TASKS), "--limit", "4"]
    assert main(["record", str(exported()), *work, "--output", str(path)]) == 0
    said = capsys.readouterr()
    assert f"{path}: at most " in said.err
    assert "logits" in said.err
    assert f"records: {path} (" in said.out
    assert path.is_file()


def _changed(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path, Path], None]:
    def write(source: Path, target: Path) -> None:
        with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
            for part in old.infolist():
                content = old.read(part)
                if part.filename == "manifest.json":
                    manifest = json.loads(content)
                    change(manifest)
                    content = json.dumps(manifest).encode()
                new.writestr(part.filename, content)

    return write


def _flipped(source: Path, target: Path) -> None:
    content = bytearray(source.read_bytes())
    content[len(content) // 2] ^= 1
    target.write_bytes(content)


def _foreign(source: Path, target: Path) -> None:
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("../elsewhere", "x")


DAMAGES: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    "truncated": (lambda old, new: new.write_bytes(old.read_bytes()[:100_000]), "cut off"),
    "empty": (lambda old, new: new.write_bytes(b""), "cut off"),
    "a bit": (_flipped, "Bad CRC-32"),
    "another version": (_changed(lambda manifest: manifest.update(version=9)), "format 9"),
    "a manifest without facts": (_changed(lambda manifest: manifest.pop("facts")), "'facts'"),
    "a part of somebody else's": (_foreign, "'../elsewhere'"),
    "no file": (lambda old, new: None, ""),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_file_is_one_line_that_names_it(name: str, file: Path, tmp_path: Path) -> None:
    """Whatever happened to the file on its way is reported with its name before the model is opened."""
    make, holds = DAMAGES[name]
    damaged = tmp_path / "b.records"
    make(file, damaged)
    code = "not_found" if name == "no file" else "records"
    with refused(RecordsError, code, holds=(holds, str(damaged))) as raised:
        compared(str(damaged))
    assert "\n" not in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] in ([], ["b.records"])


@pytest.mark.parametrize(
    ("settings", "dropped", "holds"),
    [
        ({"tasks": ["quickstart_letters"]}, "", ("'quickstart_letters'",)),
        ({"limit": 20}, "", ("16 of 80 requests",)),
        ({"num_fewshot": 2}, "", ("64 of 64 requests",)),
        (ALL, "post_processor", ("(tokenizer.json)", "special tokens", "'<s>a' and 'a'")),
        (ALL, "decoder", ("(tokenizer.json)", "(tokenizer.json)", "'The quick brown")),
    ],
)
def test_what_was_not_recorded_is_refused_by_the_file(
    settings: dict[str, Any], dropped: str, holds: tuple[str, ...], file: Path, tmp_path: Path
) -> None:
    """Another task, more documents, other prompts than those recorded, and a model whose tokenizer.json lost a part and
    is asked otherwise: a lost decoder would give both models the candidate's texts."""
    model = exported()
    if dropped:
        model = shutil.copytree(model, tmp_path / "model")
        content = json.loads((model / "tokenizer.json").read_text())
        (model / "tokenizer.json").write_text(json.dumps({**content, dropped: None}))
    code, field = ("not_comparable", "reference") if dropped else ("records", "")
    with refused(RecordsError, code, field, holds=(*holds, str(file))):
        compared(str(file), model, **settings)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--output", "x.zip"], "--output = 'x.zip': "),
        (["--output", "x.records", "--set", 'reference="m"'], "'reference': "),
        (["--output", "/proc/x/y.records"], "--output = '/proc/x'"),
    ],
)
def test_record_refuses_what_it_cannot_write(
    argv: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output's name and place are told to be wrong before anything runs, and nothing is left."""
    monkeypatch.chdir(tmp_path)
    work = ["--tasks", "quickstart_choice", "--include-path", str(TASKS), "--limit", "2"]
    assert main(["record", str(exported()), *work, *argv]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_model_that_gives_nan_is_no_record(tmp_path: Path) -> None:
    """What is not finite is told by request and position, and nothing is written."""
    planted(exported(), tmp_path / "model", 14, factor=float("nan"))
    with pytest.raises(OliveExtError, match=r"token \d+: nan, step"):
        record(EvaluationConfig.of(tmp_path / "model", WORK), tmp_path / "x.records")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.long
@pytest.mark.parametrize("key", [{"engine": {"num_threads": 1}}, {"execution_provider": "cpu"}, {"mode": "resident"}])
def test_records_are_of_where_they_were_made(key: dict[str, Any], file: Path) -> None:
    """A place that is asked for beside records is refused: nothing would run there."""
    with refused(ConfigError, "contradiction", f"reference.{next(iter(key))}", holds=str(file)):
        compared({"path": str(file), **key})


@pytest.mark.other_env
def test_another_version_of_onnxruntime_reads_the_records(file: Path) -> None:
    """The records of this version, compared with in an environment with another one (`OTHER_ONNXRUNTIME`)."""
    folder = os.environ["OTHER_ONNXRUNTIME"]
    command = "import sys; from olive_ext.cli import main; sys.exit(main(sys.argv[1:]))"
    work = ["--tasks", "quickstart_choice", "--include-path", str(TASKS), "--limit", "16"]
    done = subprocess.run(
        [sys.executable, "-c", command, "evaluate", str(exported()), *work, "--reference", str(file)],
        env={**os.environ, "PYTHONPATH": folder, "OLIVE_EXT_ISOLATION": "none"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    import onnxruntime

    versions = {line.split("onnxruntime ")[1].split(")")[0] for line in done.stdout.split(" and ") if "(onnx" in line}
    assert f"onnxruntime {onnxruntime.__version__}, recorded" in done.stdout
    assert len(versions) == 2
    assert "the same to rounding" in done.stdout or "rounding of the kernels" in done.stdout

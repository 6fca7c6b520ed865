"""An evaluation with pictures and sounds: compared with a reference, resumed, each picture encoded once, memory flat,
sounds of several windows."""

from __future__ import annotations

import json
import re
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from PIL import Image

import olive_ext
from olive_ext.config import Bound, EvaluationConfig, ModelSettings
from olive_ext.errors import IncompleteError
from olive_ext.media.processors import image_processor_of, load_feature_extractor, other_pictures
from olive_ext.model import resolve
from olive_ext.report.comparison import GENERATED
from olive_ext.report.report import Report
from olive_ext.run import evaluate
from olive_ext.run.bounds import broken_bounds
from olive_ext.run.evaluation import check_complete
from olive_ext.run.models import PICTURES, Models, RecordsFile, pictures_of
from olive_ext.session.requests import ScoringRequest
from tests.backends.local_tasks import write_tasks
from tests.exports import hf_model
from tests.exports.genai import whisper_export
from tests.exports.media import MEDIA_FAMILIES, SOUND_FAMILIES, media_export, plain_encoder_export
from tests.families.pictures import picture
from tests.refusals import refused, tells

TASKS = Path(__file__).parents[2] / "recipes" / "vision" / "tasks"
NUM_DOCUMENTS = 6
TWO = ["shapes_colour", "shapes_answer"]
RATE = 16000
CHOICES = "output_type: multiple_choice\ndoc_to_choice: [' stone', ' blue cat']\ndoc_to_target: answer\n"
ANSWER = "output_type: generate_until\ndoc_to_target: low\ngeneration_kwargs: {until: ['.'], max_gen_toks: 6}\n"
FORMS = {"heard_choice": (CHOICES, "acc"), "heard_answer": (ANSWER, "exact_match")}


@pytest.fixture(scope="module")
def package() -> Path:
    return plain_encoder_export("f32", "default")


@pytest.fixture(scope="module")
def other(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package with another encoder: half of the weights, and nothing else, are rounded."""
    folder = tmp_path_factory.mktemp("other") / "package"
    shutil.copytree(package, folder)
    file = folder / "vision_encoder" / "model.onnx"
    proto = onnx.load(file)
    (weight,) = (tensor for tensor in proto.graph.initializer if tensor.name == "weight")
    weight.CopyFrom(onnx.numpy_helper.from_array(np.round(onnx.numpy_helper.to_array(weight), 1), "weight"))
    onnx.save(proto, file)
    return folder


def _config(package: Path, **values: Any) -> EvaluationConfig:
    given = {"tasks": TWO, "include_path": str(TASKS), "limit": NUM_DOCUMENTS}
    return EvaluationConfig.parse({**given, "bootstrap_iters": 0, "model": {"path": str(package)}, **values})


@pytest.mark.long
def test_quantized_encoder_shows_against_a_reference_resident_and_recorded(
    package: Path, other: Path, tmp_path: Path
) -> None:
    found = []
    for mode in ("resident", "recorded"):
        against = {"path": str(package), "mode": mode, "records_dir": str(tmp_path / "records")}
        report = evaluate(_config(other, reference=against))
        found.append({(one.task, one.metric, one.filter): one.value for one in report.metrics})
    assert found[0] == pytest.approx(found[1], rel=1e-3, abs=1e-6)
    assert found[0]["shapes_colour", "kl_mean", "none"] > 1e-4
    assert found[0]["shapes_answer", "kl_mean", "none"] > 1e-4
    same = evaluate(_config(package, reference={"path": str(package), "mode": "resident"}))
    kl = [one.value for one in same.metrics if one.metric == "kl_mean"]
    assert kl
    assert max(kl) < 1e-6


@pytest.mark.long
def test_what_no_picture_reached_is_said_and_its_constants_are_compared(
    package: Path, other: Path, tmp_path: Path
) -> None:
    texts = {"include_path": str(write_tasks(tmp_path / "tasks")), "tasks": ["tiny_rolling"]}
    asked = ((texts, package), (texts, other), ({}, other))
    reports = [
        evaluate(_config(one, reference={"path": str(package), "mode": "resident"}, **tasks)) for tasks, one in asked
    ]
    comparisons = [report.comparison for report in reports if report.comparison is not None]
    assert [one.reach and (one.reach.unseen, one.reach.judged) for one in comparisons] == [
        (("picture", GENERATED), ()),
        (("picture", GENERATED), ()),
        (("two pictures encoded together",), ("weight, vision",)),  # any picture shows it
    ]
    # The file that onnxruntime-genai reads has other sizes than preprocessor_config.json, in both packages.
    assert [[*one.damaged] for one in comparisons] == [[], ["weight, vision"], []]


@pytest.mark.long
def test_worker_process_gives_the_same_answers_and_encodes_each_picture_once(package: Path, tmp_path: Path) -> None:
    found = []
    for isolation in ("none", "process"):
        folder = tmp_path / isolation
        report = evaluate(_config(package, output_dir=str(folder), isolation=isolation))
        execution = json.loads((folder / "report.json").read_text(encoding="utf-8"))["results"]["config"]["execution"]
        facts = execution["images_encoded"], execution["counters"]["tokens_fed"]
        found.append(([(one.task, one.metric, one.value) for one in report.metrics], *facts))
    assert found[0] == found[1]
    assert found[0][1] == NUM_DOCUMENTS
    assert "workers" in execution


def test_documents_whose_pictures_cannot_be_used_are_missing_and_the_others_are_evaluated(
    package: Path, tmp_path: Path
) -> None:
    """`tests/media/test_pictures.py` has all that a picture can be and must not."""
    exif = Image.Exif()
    exif[274] = 6
    picture(0, 32, 32).save(tmp_path / "0.png")
    picture(1, 32, 32).convert("CMYK").save(tmp_path / "1.jpg")
    picture(3, 40, 32).save(tmp_path / "3.jpg", exif=exif)
    (tmp_path / "2.png").write_bytes((tmp_path / "0.png").read_bytes()[:300])
    bad = {
        ("2.png",): r"2.png' cannot be read as a picture: image file is truncated",
        (): "the request gives 0 pictures, and its prompt has 1 of the marker",
        ("0.png", "0.png"): "the request gives 2 pictures, and its prompt has 1 of the marker",
    }
    documents = [("0.png",), ("1.jpg",), *bad, ("3.jpg",)]
    files = [[str(tmp_path / name) for name in document] for document in documents]
    lines = [
        json.dumps({"files": own, "answer": document != ("1.jpg",)})
        for own, document in zip(files, documents, strict=True)
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "files.yaml").write_text(
        f"task: files\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/data.jsonl}}}}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '<image> is'\ndoc_to_image: files\n"
        "doc_to_choice: [' red', ' blue']\ndoc_to_target: '{{answer|int}}'\nmetric_list: [{metric: acc}]\n",
        encoding="utf-8",
    )
    given = {"tasks": ["files"], "include_path": str(tmp_path), "limit": None}
    report = evaluate(_config(package, **given, on_error="report"))
    assert report.results["n-samples"]["files"]["effective"] == 3
    reasons = {item["doc_id"]: item["reason"] for item in report.missing}
    assert list(reasons) == [2, 3, 4]
    for reason, expected in zip(reasons.values(), bad.values(), strict=True):
        assert re.search(expected, reason)
        assert "\n" not in reason
    check_complete(report, "report")
    with refused(IncompleteError, "incomplete", holds=("files", "2.png")):
        check_complete(report, "stop")
    (tmp_path / "data.jsonl").write_text("\n".join([*lines[:2], lines[-1]]), encoding="utf-8")
    whole = evaluate(_config(package, **given))
    values = [[one.value for one in found.metrics if one.metric == "acc"] for found in (whole, report)]
    assert values[0] == values[1]


@pytest.mark.long
def test_memory_does_not_grow_with_the_number_of_pictures(package: Path, tmp_path: Path) -> None:
    """Requests name files of 750 kB of pixels each; prepared pixels and features are kept within their budgets."""
    files = []
    for seed in range(24):
        files.append(tmp_path / f"{seed}.png")
        picture(seed, 500, 500).save(files[-1], compress_level=0)
    peaks = []
    with olive_ext.open(package) as session:
        session.loglikelihood([ScoringRequest("<image> and", " stone", images=files[:1])])
        session.media.processor.kept.budget = 1 << 16
        for count in (4, 24):
            session.gc()
            tracemalloc.start()
            session.loglikelihood([ScoringRequest("<image> a", " stone", images=[file]) for file in files[:count]])
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]


def _models(family: str) -> tuple[Path, Path]:
    """An export in fp32 and its checkpoint."""
    return (whisper_export(), hf_model(family)) if family == "whisper" else media_export(family)


@pytest.mark.parametrize(
    ("file", "edit", "named"),
    [
        ("preprocessor_config.json", {"n_fft": 400}, []),
        ("preprocessor_config.json", {"n_fft": 200}, ["audio_processor_config.json", "preprocessor_config.json"]),
        ("audio_processor_config.json", {"frame_length": 16}, ["audio_processor_config.json"]),
        ("audio_processor_config.json", {"target_sample_rate": 16000}, []),
        ("audio_processor_config.json", {"target_sample_rates": [16000]}, []),
        ("audio_processor_config.json", {"target_sample_rates": [8000]}, ["audio_processor_config.json"]),
        ("audio_processor_config.json", {"target_sample_rate": 8000}, ["audio_processor_config.json"]),
    ],
)
def test_files_that_prepare_sound_otherwise_are_damage(
    file: str, edit: dict[str, Any], named: list[str], tmp_path: Path
) -> None:
    """Both models may have had the candidate's sounds, and onnxruntime-genai reads a file of its own."""
    package = tmp_path / "package"
    shutil.copytree(whisper_export(), package)
    source = resolve(ModelSettings(model=str(package))).source
    load_feature_extractor([package], source[1]).save_pretrained(package)
    text = (package / file).read_text()
    for key, value in edit.items():
        known, own = (
            (rf'"{key}": \d+', f'"{key}": {value}') if key in text else ('"attrs": {', f'"attrs": {{"{key}": {value},')
        )
        text, number = re.subn(known, own, text)
        assert number
    (package / file).write_text(text)
    config = EvaluationConfig.parse(
        {"model": {"path": str(package)}, "tasks": ["t"], "reference": {"path": str(whisper_export())}}
    )
    assert [*Models(config).unjudged] == named


@pytest.mark.parametrize("changed", [{}, {"resample": 0}, {"image_mean": [0.1, 0.2, 0.3]}])
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_pictures_that_are_prepared_otherwise_than_the_references_are_damage(
    family: str, changed: dict[str, Any], tmp_path: Path
) -> None:
    """Small pictures of a task need not show what large ones would."""
    package, checkpoint = media_export(family)
    if changed:
        package = Path(shutil.copytree(package, tmp_path / "package"))
        _, file = image_processor_of(resolve(ModelSettings(model=str(package))).processor_files)
        file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    given = {"model": {"path": str(package)}, "tasks": ["t"], "reference": {"path": str(checkpoint), "export": "never"}}
    found = Models(EvaluationConfig.parse(given)).unjudged.get("preprocessor_config.json", "")
    assert (
        found.startswith(f"prepares pictures with {' '.join(map(str, *changed.items()))} for ")
        if changed
        else not found
    )
    recorded = RecordsFile("model.records")
    models = [resolve(ModelSettings(model=str(one))) for one in (checkpoint, package)]
    vars(recorded)["_unpacked"] = tmp_path, {PICTURES: pictures_of(models[0])[0]}
    assert bool(other_pictures(pictures_of(recorded)[0], pictures_of(models[1])[0])) is bool(changed)
    assert other_pictures({"do_normalize": False}, {"do_normalize": True})


def _write_tasks(folder: Path, family: str, seconds: list[float]) -> Path:
    """The same sounds, chosen about and answered."""
    rng = np.random.default_rng(0)
    sounds = [rng.normal(scale=0.1, size=int(RATE * length)).round(4).tolist() for length in seconds]
    lines = [json.dumps({"samples": samples, "answer": number % 2}) for number, samples in enumerate(sounds)]
    folder.mkdir()
    (folder / "data.jsonl").write_text("\n".join(lines), encoding="utf-8")
    given = f"def sounds(doc):\n    return [{{'array': doc['samples'], 'sampling_rate': {RATE}}}]\n"
    (folder / "given.py").write_text(given, encoding="utf-8")
    text = "Ann hears <audio> and" if family in SOUND_FAMILIES else ""
    for name, (form, metric) in FORMS.items():
        task = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/data.jsonl}}}}\n"
        task += f"test_split: test\ndoc_to_text: '{text}'\ndoc_to_audio: !function given.sounds\n{form}"
        (folder / f"{name}.yaml").write_text(f"{task}metric_list: [{{metric: {metric}}}]\n", encoding="utf-8")
    return folder


def _evaluate(package: Path, folder: Path, **values: Any) -> Report:
    return evaluate(_config(package, **{"tasks": list(FORMS), "include_path": str(folder), **values}))


def _kl(report: Report) -> dict[str, float]:
    return {one.task: one.value for one in report.metrics if one.metric == "kl_mean"}


def _asked(family: str, folder: Path) -> dict[str, Any]:
    """Tasks of a family that sees or hears."""
    if family in MEDIA_FAMILIES:
        return {}
    return {"include_path": str(_write_tasks(folder, family, [1, 4])), "tasks": list(FORMS)}


@pytest.mark.parametrize(
    "family",
    [
        "qwen2_5_vl",
        pytest.param("whisper", marks=pytest.mark.long),
        pytest.param("qwen3_asr", marks=pytest.mark.long),
        pytest.param("gemma4_any", marks=pytest.mark.exporters),
    ],
)
def test_export_is_compared_with_its_checkpoint_resident_and_recorded(family: str, tmp_path: Path) -> None:
    package, checkpoint = _models(family)
    asked = _asked(family, tmp_path / "tasks")
    for mode in ("resident", "recorded"):
        against = {"path": str(checkpoint), "mode": mode, "records_dir": str(tmp_path / "records")}
        report = evaluate(_config(package, **asked, reference=against))
        found = _kl(report)
        assert found.keys() == {*asked.get("tasks", TWO), "all"}
        assert all(0 <= kl < (1e-6 if asked else 1e-5) for kl in found.values())
        assert broken_bounds([Bound(metric="kl_mean", max=1e-5)], report.metrics) == []
        assert len(broken_bounds([Bound(metric="kl_mean", max=1e-12)], report.metrics)) == 1
        assert report.comparison.flips == ()
        assert report.comparison.reach.seconds == (4 if asked else 0)
        note = report.comparison.reference["export"]
        assert note.endswith("text alone is")


@pytest.mark.parametrize(
    ("family", "counted", "number"),
    [("", "images_encoded", NUM_DOCUMENTS), pytest.param("whisper", "encoder_runs", 2, marks=pytest.mark.long)],
)
def test_second_run_takes_every_answer_from_the_journal_and_encodes_nothing(
    family: str, counted: str, number: int, package: Path, tmp_path: Path
) -> None:
    asked = {} if not family else _asked(family, tmp_path / "tasks")
    reports = []
    for _ in range(2):
        evaluate(_config(_models(family)[0] if family else package, **asked, output_dir=str(tmp_path / "out")))
        reports.append(json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8")))
    executions = [report["results"]["config"]["execution"] for report in reports]
    assert [one[counted] for one in executions] == [number, 0]
    assert [one["counters"]["tokens_fed"] > 0 for one in executions] == [True, False]
    metrics = [[(one["task"], one["metric"], one["value"]) for one in report["metrics"]] for report in reports]
    assert metrics[0] == metrics[1]


@pytest.mark.long
def test_checkpoint_is_evaluated_against_an_export(tmp_path: Path) -> None:
    package, checkpoint = _models("whisper")
    tasks = _write_tasks(tmp_path / "tasks", "whisper", [1, 2])
    against = {"path": str(package), "mode": "recorded", "records_dir": str(tmp_path / "records")}
    assert max(_kl(_evaluate(checkpoint, tasks, reference=against)).values()) < 1e-6


# Gemma 4's features of so loud a sound are finite.
@pytest.mark.long
@pytest.mark.parametrize("family", ["whisper", "qwen3_asr"])
def test_unreadable_sounds_cost_their_documents_alone(family: str, tmp_path: Path) -> None:
    """Lists and arrays, of which one is out of any range: the others have the numbers that they have without it."""
    package, checkpoint = _models(family)
    tasks = _write_tasks(tmp_path / "tasks", family, [1, 2.5, 4])
    whole = _evaluate(package, tasks, sample_log_num=9, output_dir=str(tmp_path / "whole"))
    given = tasks / "given.py"
    loud = "1e37 if doc['samples'] == first else 1"
    given.write_text(
        f"import json, numpy as np\nfrom pathlib import Path\n"
        f"first = json.loads(Path({str(tasks / 'data.jsonl')!r}).read_text().splitlines()[1])['samples']\n"
        f"def sounds(doc):\n"
        f"    return [{{'array': np.array(doc['samples'], np.float32) * ({loud}), 'sampling_rate': {RATE}}}]\n",
        encoding="utf-8",
    )
    against = {"path": str(checkpoint), "records_dir": str(tmp_path / "records")}
    report = _evaluate(package, tasks, sample_log_num=9, output_dir=str(tmp_path / "bad"), reference=against)
    assert {item["doc_id"] for item in report.missing} == {1}
    assert all("NaN" in item["reason"] for item in report.missing)
    expected = {key: value for key, value in _answers(tmp_path / "whole").items() if key[1] != 1}
    found = {key: value for key, value in _answers(tmp_path / "bad").items() if key[1] != 1}
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert found[key] == pytest.approx(values, abs=1e-4)
    assert whole.missing == ()


def _answers(folder: Path) -> dict[tuple[str, int], Any]:
    """Log-probabilities of choices, by task and document."""
    lines = [json.loads(line) for file in folder.rglob("samples_heard_choice*") for line in file.open()]
    return {("heard_choice", line["doc_id"]): [float(item[0][0]) for item in line["resps"]] for line in lines}


@pytest.mark.long
def test_answer_to_a_sound_of_several_windows_is_not_compared_and_named(tmp_path: Path) -> None:
    """Alone the model answers it; beside a reference its document is missing, with the reason."""
    package, checkpoint = _models("whisper")
    tasks = _write_tasks(tmp_path / "tasks", "whisper", [1, 31])
    wanted = {"tasks": ["heard_answer"]}
    assert not _evaluate(package, tasks, **wanted).missing
    against = {"path": str(checkpoint), "records_dir": str(tmp_path / "records")}
    report = _evaluate(package, tasks, **wanted, reference=against)
    (missing,) = report.missing
    assert missing["doc_id"] == 1
    assert tells(missing["reason"], "30 s 2 windows")
    assert _kl(report)["heard_answer"] < 1e-6
    with refused(IncompleteError, "incomplete", holds=("heard_answer", "1", "30")):
        check_complete(report, "stop")

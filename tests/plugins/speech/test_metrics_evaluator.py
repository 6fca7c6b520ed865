"""Olive's own metrics on this package's engine, beside Olive's own evaluator on the same packages and data."""

from __future__ import annotations

import io
import json
import math
import runpy
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import datasets
import jiwer
import numpy as np
import pytest
from olive.data.config import DataConfig
from olive.evaluator.metric import Metric as DeclaredMetric
from olive.evaluator.olive_evaluator import OliveModelOutput, OnnxEvaluator
from olive.model import ONNXModelHandler
from onnx import TensorProto, helper, load, numpy_helper, save
from scipy.io import wavfile

from olive_ext.errors import ConfigError, OliveExtError, RequirementError
from olive_ext.plugins.speech.metrics_evaluator import Answers, OrtEvaluator, answered, chosen, compared, scored, timed
from olive_ext.plugins.speech.settings import METRICS_TYPE, MetricSettings
from olive_ext.report.verdict import num_documents
from olive_ext.session import Session
from olive_ext.session import open as open_session
from olive_ext.session.requests import GenerationRequest
from olive_ext.workflow import cli_run
from tests.exports.genai import speech_export
from tests.exports.media import media_export
from tests.refusals import refused
from tests.workflow.recipes import recipe, saved

RECIPES = Path(__file__).parents[3] / "recipes"
VISION = RECIPES / "vision" / "model"
NUM_SOUNDS, NUM_PICTURES = 12, 10
RATE = 16000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("metrics")


@pytest.fixture(autouse=True)
def _own_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "datasets")


def wav(samples: Sequence[float], rate: int = RATE) -> bytes:
    file = io.BytesIO()
    wavfile.write(file, rate, (np.array(samples) * 32767).astype("<i2"))
    return file.getvalue()


@pytest.fixture(scope="module")
def sounds(folder: Path) -> Path:
    """Tones as WAV files in a parquet file, some texts of which are not what is heard."""
    rows = runpy.run_path(str(RECIPES / "speech" / "tasks" / "tones.py"))["load"]()["test"].select(range(NUM_SOUNDS))
    texts = [row["text"].replace("hiss", "miss") if number % 3 == 0 else row["text"] for number, row in enumerate(rows)]
    files = [{"bytes": wav(row["samples"]), "path": f"{number}.wav"} for number, row in enumerate(rows)]
    made = datasets.Dataset.from_dict({"audio": files, "text": texts})
    made.cast_column("audio", datasets.Audio(decode=False)).to_parquet(folder / "sounds.parquet")
    return folder / "sounds.parquet"


@pytest.fixture(scope="module")
def pictures(folder: Path) -> Path:
    """Pictures with questions; of every other one the right answer is one of several."""
    made = runpy.run_path(str(RECIPES / "vision" / "tasks" / "shapes.py"))["answers"]()["test"]
    rows = made.select(range(NUM_PICTURES))
    answers = [row["answer"] if number % 2 else f"none|{row['answer']}" for number, row in enumerate(rows)]
    rows.add_column("said", answers).to_parquet(folder / "pictures.parquet")
    return folder / "pictures.parquet"


def data(name: str, file: Path, component: str, **params: Any) -> dict[str, Any]:
    """A data config as public recipes have them, of a local file."""
    source = {"data_name": "parquet", "data_files": str(file), "split": "train"}
    return {
        "name": name,
        "type": "HuggingfaceContainer",
        "load_dataset_config": {"type": "huggingface_dataset", "params": source},
        "pre_process_data_config": {"type": component, "params": params},
    }


def tones(file: Path, **params: Any) -> dict[str, Any]:
    return data("tones", file, "speech_transcription_pre_process", **{"sample_rate": RATE, **params})


def shapes(file: Path, **params: Any) -> dict[str, Any]:
    given = {"question_col": "text", "answer_col": "said", "max_length": 60}
    return data("shapes", file, "vision_vqa_pre_process", **{**given, **params})


def declared(name: str, kind: str, sub_types: Sequence[Any], data_config: Any = None) -> dict[str, Any]:
    given = [{"name": one, "priority": number + 1} for number, one in enumerate(sub_types)]
    metric = {"name": name, "type": kind, "sub_types": given}
    return metric if data_config is None else {**metric, "data_config": data_config}


def olives(metric: Mapping[str, Any]) -> Any:
    """Olive's object of a declared metric."""
    made = dict(metric)
    if "data_config" in made:
        made["data_config"] = DataConfig(**made["data_config"])
    return DeclaredMetric(**made)


def measured(model: Any, *metrics: Mapping[str, Any], **settings: Any) -> dict[str, Any]:
    found = OrtEvaluator(engine={"num_threads": 1}, **settings).evaluate(model, [olives(one) for one in metrics])
    return {name: entry.value for name, entry in found.root.items()}


@pytest.fixture
def soundfile(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Olive's evaluator needs of a package that is not installed here: a WAV file of floats."""
    module = ModuleType("soundfile")
    module.__spec__ = ModuleSpec("soundfile", None)
    module.write = lambda file, samples, samplerate, format: wavfile.write(file, samplerate, samples)
    monkeypatch.setitem(sys.modules, "soundfile", module)


def read(sounds: Path) -> list[tuple[np.ndarray, str]]:
    rows = datasets.Dataset.from_parquet(str(sounds)).cast_column("audio", datasets.Audio(decode=False))
    return [
        (wavfile.read(io.BytesIO(row["audio"]["bytes"]))[1].astype(np.float32) / 2**15, row["text"]) for row in rows
    ]


def test_word_errors_are_those_of_olives_evaluator_on_the_same_package(sounds: Path, soundfile: None) -> None:
    """Transcriptions by onnxruntime-genai in Olive's code, and by this package's engine."""
    model = ONNXModelHandler(str(speech_export()), onnx_file_name="decoder.onnx")
    metric = declared("speech", "accuracy", ["wer", "rtfx"], tones(sounds))
    found = measured(model, metric)
    batches = [(samples_N[None], [text]) for samples_N, text in read(sounds)]
    output, targets = OnnxEvaluator()._inference_text_genai(model, SimpleNamespace(data_config=None), batches)
    theirs = OnnxEvaluator.compute_accuracy(olives(metric), output, targets)
    with open_session(speech_export(), engine={"num_threads": 1}) as session:
        ours = answered(olives(metric), session, MetricSettings())
    assert (ours.texts, ours.targets) == (output.preds, targets)
    assert 0 < found["speech-wer"] == theirs["wer"].value < 0.5
    assert found["speech-wer_jiwer"] == pytest.approx(found["speech-wer"], abs=1e-7)
    assert 0 < found["speech-wer_stderr"] < 0.2
    assert found["speech-rtfx"] > 0


@pytest.mark.long
def test_public_recipe_of_whisper_ports_by_its_type(sounds: Path, tmp_path: Path) -> None:
    """Metrics by name at the recipe's root, a folder of two graphs, no "evaluator": Olive 0.13 refuses all three."""
    metric = declared("speech_accuracy", "accuracy", ["wer", "rtfx"], "tones")
    blocks = {
        "data_configs": [tones(sounds, max_samples=4)],
        "metrics": [metric],
        "evaluators": {"common_evaluator": {"type": METRICS_TYPE, "metrics": ["speech_accuracy"]}},
    }
    blocks["evaluators"]["common_evaluator"]["output_dir"] = str(tmp_path / "reports")
    model = {"type": "OnnxModel", "model_path": str(speech_export())}
    assert cli_run(["--config", saved(tmp_path, recipe(tmp_path, model, **blocks))]) == 0
    written = json.loads((tmp_path / "out" / "input_model_metrics.json").read_text(encoding="utf-8"))
    assert written["speech_accuracy-wer"]["priority"] == 1
    assert written["speech_accuracy-wer"]["higher_is_better"] is False
    report = json.loads((tmp_path / "reports" / "input_model" / "report.json").read_text(encoding="utf-8"))
    values = {one["metric"]: (one["value"], one["n"]) for one in report["metrics"]}
    assert values["wer"] == (written["speech_accuracy-wer"]["value"], 4)


@pytest.fixture(scope="module")
def worse(folder: Path) -> Path:
    """The speech recipe's Whisper with the decoder's matrices moved at random: other words are heard."""
    made = folder / "worse"
    shutil.copytree(speech_export(), made)
    model = load(made / "decoder.onnx")
    drawn = np.random.default_rng(0)
    for matrix in (one for one in model.graph.initializer if len(one.dims) == 2 and math.prod(one.dims) > 1000):
        values = numpy_helper.to_array(matrix)
        noise = drawn.normal(size=values.shape) * 0.8 * values.std()
        matrix.CopyFrom(numpy_helper.from_array((values + noise).astype(values.dtype), matrix.name))
    save(model, made / "decoder.onnx")
    return made


def judged(folder: Path, model: Path, sounds: Path, **settings: Any) -> dict[str, Any]:
    """A recipe with one metric of transcripts, which compares with the speech recipe's Whisper."""
    metric = declared("speech", "accuracy", ["wer"], "tones")
    block = {"type": METRICS_TYPE, "metrics": [metric], "output_dir": str(folder / "reports"), **settings}
    blocks = {"data_configs": [tones(sounds)], "evaluators": {"e": block}}
    return recipe(folder, {"type": "OnnxModel", "model_path": str(model)}, evaluator="e", **blocks)


@pytest.mark.long
def test_worse_model_is_compared_resumed_and_fails_its_gate(worse: Path, sounds: Path, tmp_path: Path) -> None:
    """Differences and flips are jiwer's on both models' transcripts; a second run takes these from the journal."""
    bounds = [{"task": "speech", "metric": "wer", "max": 0.2}]
    settings = {"reference": str(speech_export()), "require": bounds}
    config = saved(tmp_path, judged(tmp_path, worse, sounds, **settings))
    with refused(RequirementError, "bound_broken", holds=("evaluators.e", "speech/wer", "0", "2")):
        cli_run(["--config", config])
    report = json.loads(next((tmp_path / "reports").glob("*/report.json")).read_text(encoding="utf-8"))
    heard = []
    for package in (speech_export(), worse):
        with open_session(package, engine={"num_threads": 1}) as session:
            metric = olives(declared("speech", "accuracy", ["wer"], tones(sounds)))
            heard.append(answered(metric, session, MetricSettings()))
    word_errors = [jiwer.wer(one.targets, one.texts) for one in heard]
    outcome, sentences = report["comparison"]["outcomes"]
    assert outcome["metric"] == "wer"
    assert [outcome["reference"], outcome["candidate"]] == pytest.approx(word_errors)
    assert outcome["low"] <= outcome["difference"] <= outcome["high"]
    assert word_errors[0] < word_errors[1]
    right = [[one == two for one, two in zip(each.texts, each.targets, strict=True)] for each in heard]
    lost = sum(one and not two for one, two in zip(*right, strict=True))
    assert sentences["right_to_wrong"] == lost > 0
    assert len(report["comparison"]["flips"]) == lost + sentences["wrong_to_right"]
    assert report["comparison"]["flips"][0]["candidate_answer"] in heard[1].texts
    page = next((tmp_path / "reports").glob("*/report.html")).read_text(encoding="utf-8")
    assert "speech_sentences" in page
    before = {file: file.stat().st_size for file in (tmp_path / "reports" / "journal").glob("*.jsonl")}
    assert len(before) == 2
    with pytest.raises(RequirementError):
        cli_run(["--config", config])
    assert {file: file.stat().st_size for file in (tmp_path / "reports" / "journal").glob("*.jsonl")} == before
    again = json.loads(next((tmp_path / "reports").glob("*/report.json")).read_text(encoding="utf-8"))
    assert again["engine"]["tokens_generated"] <= 2 < report["engine"]["tokens_generated"]
    assert again["comparison"]["outcomes"] == report["comparison"]["outcomes"]


@pytest.fixture(scope="module")
def vision() -> ONNXModelHandler:
    return ONNXModelHandler(str(VISION), onnx_file_name="decoder/model.onnx")


@pytest.fixture(scope="module")
def seen(vision: ONNXModelHandler, pictures: Path, folder: Path) -> dict[str, Any]:
    """All three scores of pictures, and how long the first takes, in one section."""
    metrics = [
        declared(name, "accuracy", [name], shapes(pictures, limit=6))
        for name in ("exact_match", "relaxed_accuracy", "word_sort_ratio")
    ]
    timed = declared("time", "latency", ["avg", "p90"], shapes(pictures))
    timed["sub_types"][0]["metric_config"] = {"warmup_num": 1, "repeat_test_num": 2, "sleep_num": 0}
    batch = {**shapes(pictures), "dataloader_config": {"batch_size": 2}}
    speed, plain = declared("speed", "throughput", ["avg"], batch), declared("plain", "latency", ["p50"])
    for one in (speed, plain):
        one["sub_types"][0]["metric_config"] = timed["sub_types"][0]["metric_config"]
    others = [timed, speed, plain, declared("size", "size_on_disk", ["bytes"])]
    return measured(vision, *metrics, *others, output_dir=str(folder / "r"))


@pytest.mark.long
def test_scores_of_pictures_are_olives_functions_of_the_answers(
    seen: dict[str, Any], vision: ONNXModelHandler, pictures: Path
) -> None:
    rows = datasets.Dataset.from_parquet(str(pictures)).select(range(6))
    with open_session(VISION, engine={"num_threads": 1}) as session:
        content = [[{"type": "image"}, {"type": "text", "text": row["text"]}] for row in rows]
        outputs = session.generate(
            [
                GenerationRequest([{"role": "user", "content": part}], images=[row["image"]], max_length=60)
                for part, row in zip(content, rows, strict=True)
            ]
        )
    answers = OliveModelOutput([output.text.strip() for output in outputs], None)
    assert len(set(answers.preds)) > 1
    for name in ("exact_match", "relaxed_accuracy", "word_sort_ratio"):
        theirs = OnnxEvaluator.compute_accuracy(olives(declared(name, "accuracy", [name])), answers, rows["said"])
        assert seen[f"{name}-{name}"] == theirs[name].value
        assert f"{name}-{name}_stderr" in seen
    assert seen["exact_match-exact_match"] > 0


class StandIn(ModuleType):
    """onnxruntime-genai as Olive's evaluator calls it, with a session of this package behind it: what is asked, in
    which order and what becomes of an answer is Olive's code."""

    def __init__(self, session: Session) -> None:
        super().__init__("onnxruntime_genai")
        self.Images = SimpleNamespace(open=lambda path: Path(path).read_bytes())
        self.Config = lambda folder: SimpleNamespace(clear_providers=lambda: None)
        processor = lambda prompt, images: (json.loads(prompt), images)  # noqa: E731
        self.Model = lambda config: SimpleNamespace(create_multimodal_processor=lambda: processor)
        template = lambda messages, add_generation_prompt: messages  # noqa: E731
        self.Tokenizer = lambda model: SimpleNamespace(apply_chat_template=template, decode=session.tokenizer.decode)

        class GeneratorParams:
            def __init__(self, model: Any) -> None:
                self.max_length = 0

            def set_search_options(self, max_length: int, do_sample: bool) -> None:
                assert not do_sample
                self.max_length = max_length

        class Generator:
            def __init__(self, model: Any, params: GeneratorParams) -> None:
                self.max_length = params.max_length

            def set_inputs(self, inputs: tuple[Any, bytes]) -> None:
                most = session.max_length
                request = GenerationRequest(
                    inputs[0], images=[inputs[1]], max_new_tokens=most - 1, max_length=self.max_length
                )
                self.tokens = list(session.generate([request])[0].tokens)

            def is_done(self) -> bool:
                return not self.tokens

            def generate_next_token(self) -> None:
                self.next = self.tokens.pop(0)

            def get_next_tokens(self) -> list[int]:
                return [self.next]

        self.GeneratorParams, self.Generator = GeneratorParams, Generator


def test_questions_with_options_are_asked_as_olives_evaluator_asks_them(
    vision: ONNXModelHandler, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The section of the public recipes of ai2d: numbered options, a system prompt, a random share of the documents;
    here with a picture that is missing, too."""
    made = runpy.run_path(str(RECIPES / "vision" / "tasks" / "shapes.py"))["choices"]()["test"].select(range(12))
    images = [None if number == 3 else image for number, image in enumerate(made["image"])]
    rows = {"image": images, **{name: made[name] for name in ("text", "choices", "number")}}
    datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image()).to_parquet(folder / "options.parquet")
    params = {
        "options_col": "choices",
        "answer_col": "number",
        "system_prompt": "1 ",
        "limit": 0.6,
        "task": "vision-vqa",
    }
    config = shapes(folder / "options.parquet", **params, seed=5, max_length=90)
    metric = declared("seen", "accuracy", ["exact_match"], config)
    found = measured(vision, metric)
    with open_session(VISION, engine={"num_threads": 1}) as session:
        monkeypatch.setitem(sys.modules, "onnxruntime_genai", StandIn(session))
        batches = list(DataConfig(**config).to_data_container().create_dataloader())
        output, targets = OnnxEvaluator()._inference_vision_genai(vision, batches)
    theirs = OnnxEvaluator.compute_accuracy(olives(metric), output, targets)
    assert len(output.preds) == int(0.6 * 12)
    assert "" in output.preds
    assert found["seen-exact_match"] == theirs["exact_match"].value
    with open_session(VISION, engine={"num_threads": 1}) as session:
        ours = answered(olives(metric), session, MetricSettings())
    assert (ours.texts, ours.targets) == (output.preds, targets)


@pytest.mark.long
def test_chat_model_that_hears_is_asked_for_a_transcript(sounds: Path) -> None:
    """Gemma 4's sections name the folder of the decoder, below that of the package."""
    package, _ = media_export("gemma4_any")
    model = ONNXModelHandler(str(package / "decoder"))
    found = measured(model, declared("speech", "accuracy", ["wer", "rtfx"], tones(sounds, max_samples=2)))
    assert found["speech-wer"] > 0.5  # nobody has taught it to hear


def test_size_and_times_are_measured(seen: dict[str, Any], vision: ONNXModelHandler) -> None:
    """Latency with first token and speed; throughput of a batch: two answers, of one token or more each, in as long as
    a batch takes; without data a sentence, after which there are at most 64 tokens."""
    assert seen["size-bytes"] == vision.size_on_disk, "by Olive's own evaluator"
    assert seen["time-first_token_ms"] > 0
    assert seen["time-avg"] <= seen["time-p90"]
    assert seen["time-tokens_per_second"] > 0
    assert 0 < seen["speed-avg"] <= seen["speed-tokens_per_second"] * 1.001
    assert 0 < seen["plain-tokens_per_second"] * seen["plain-p50"] / 1000 <= 64 * 2


def test_first_tokens_are_timed_by_answers_of_one_token() -> None:
    """By a session that answers at once; which of two times is longer, a busy machine decides."""
    asked: list[int] = []

    def generate(requests: Sequence[GenerationRequest]) -> None:
        asked.extend(request.max_new_tokens for request in requests)
        session.counters.tokens_generated += sum(request.max_new_tokens for request in requests)

    counters = SimpleNamespace(tokens_generated=0)
    session: Any = SimpleNamespace(counters=counters, generate=generate, encoding=None, max_length=512)
    metric = olives(declared("time", "latency", ["avg"]))
    metric.sub_types[0].metric_config = SimpleNamespace(warmup_num=1, repeat_test_num=3, sleep_num=0)
    _, beside = timed(metric, session, MetricSettings())
    assert asked == [64] * 4 + [1] * 3
    assert {*beside} == {"first_token_ms", "tokens_per_second", "output_token_ms"}


@pytest.mark.parametrize(
    ("text", "num_choices", "found"),
    [
        ("The answer is 3", 4, "3"),
        ("1. D", 4, "1"),
        ("42 or 2", 4, "2"),
        ("x7y", 4, "x7y"),
        ("a3b", 4, "3"),
        ("12", 10, "12"),
        ("12", 0, "12"),
        ("", 4, ""),
    ],
)
def test_number_of_an_option_is_found_in_an_answer(text: str, num_choices: int, found: str) -> None:
    assert chosen(text, num_choices) == found


def test_word_errors_have_the_spread_of_the_documents_and_none_where_no_word_was_said() -> None:
    """Empty references have no word error rate; resumed answers have no time; what is asked twice counts once."""
    metric = olives(declared("speech", "accuracy", ["wer"]))
    timing = {"total_audio_duration": 1.0, "total_inference_time": 1.0}
    texts, targets = ["a b"] * 50 + ["a c"] * 50, ["a b"] * 100
    result, beside = scored(Answers(metric, texts, targets, timing), 2000)
    assert result["wer"].value == 0.25
    assert beside["wer_stderr"] == pytest.approx(0.25 / np.sqrt(100), rel=0.1)
    assert "wer_stderr" not in scored(Answers(metric, texts, targets, timing), 0)[1]
    both = olives(declared("speech", "accuracy", ["wer", "rtfx"]))
    nothing = {"total_audio_duration": 0.0, "total_inference_time": 0.0}
    result, beside = scored(Answers(both, ["a b"], [""], nothing, is_resumed=True), 10)
    assert math.isnan(beside["wer_jiwer"])
    assert math.isnan(result["rtfx"].value)
    answers = Answers(metric, ["a", "b"], ["a", "c"], {}, [("q", "1"), ("q", "2")])
    comparison = compared([answers], [answers], {}, 1.0)
    assert comparison is not None
    assert num_documents(comparison) == 2


def classifier(folder: Path) -> ONNXModelHandler:
    """A graph that generates nothing: the mean of its input's two columns decides."""
    folder.mkdir(exist_ok=True)
    node = helper.make_node("Identity", ["x"], ["logits"])
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 2]) for name in ("x", "logits")]
    graph = helper.make_graph([node], "classifier", values[:1], values[1:])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), folder / "model.onnx")
    return ONNXModelHandler(str(folder / "model.onnx"))


def test_metrics_of_other_models_are_measured_by_olives_own_evaluator_and_answers_refused(
    tmp_path: Path, sounds: Path
) -> None:
    model = classifier(tmp_path)
    timed = declared("time", "latency", ["avg"])
    timed["sub_types"][0]["metric_config"] = {"warmup_num": 1, "repeat_test_num": 2, "sleep_num": 0}
    found = measured(model, timed, declared("size", "size_on_disk", ["bytes"]))
    assert found.keys() == {"time-avg", "size-bytes"}
    assert found["time-avg"] > 0
    with refused(OliveExtError, "not_found", "tokenizer"):
        measured(model, declared("speech", "accuracy", ["wer"], tones(sounds)))


def test_metric_that_cannot_be_measured_is_refused_before_anything_is_opened() -> None:
    """As in a recipe: tests/plugins/speech/test_settings.py."""
    mixed = olives(declared("m", "accuracy", ["wer", "accuracy_score"]))
    with refused(ConfigError, "contradiction", "OrtEvaluator.metrics.m.sub_types", ["wer", "accuracy_score"]):
        OrtEvaluator().evaluate(None, [mixed])
    with refused(ConfigError, "unknown_key", "taskz", ["mmlu"]):
        MetricSettings.parse({"taskz": ["mmlu"]})
    with refused(ConfigError, "contradiction", "fail_on_loss", 5.0):  # nothing of mteb's would have read it
        MetricSettings.parse({"tasks": ["STS"], "reference": "float", "fail_on_loss": 5})


def test_column_that_is_not_there_and_a_model_without_sound_are_refused(
    vision: ONNXModelHandler, pictures: Path, sounds: Path
) -> None:
    field = "'data_configs.shapes.pre_process_data_config.params.question_col' = 'asked'"
    with refused(ConfigError, "wrong_value", holds=(field, "text")):
        measured(vision, declared("m", "accuracy", ["exact_match"], shapes(pictures, question_col="asked")))
    with refused(OliveExtError, "unsupported", holds="1 sound"):
        measured(vision, declared("m", "accuracy", ["wer"], tones(sounds, max_samples=1)))


def test_sessions_of_several_graphs_stop_spinning_unless_told_otherwise(sounds: Path) -> None:
    """The decoder of the speech recipe's Whisper, as ONNX Runtime was asked for it."""
    name = "session.force_spinning_stop"
    for given, expected in (({}, "1"), ({name: "0"}, "0")):
        with open_session(speech_export(), engine={"session_options": given}) as session:
            options = session.executor.runner._feed.session.get_session_options()
            assert options.get_session_config_entry(name) == expected

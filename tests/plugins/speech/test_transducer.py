"""Transcripts of a streaming transducer, beside onnxruntime-genai on the same package; and the public recipe's section
of Nemotron's streaming transducer, on a tiny package of its form."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import onnxruntime_genai as og
import pytest
from olive.evaluator.olive_evaluator import OnnxEvaluator
from olive.model import ONNXModelHandler

from olive_ext.check import check_recipe
from olive_ext.config import ModelSettings
from olive_ext.errors import ConfigError, MediaError, ModelError
from olive_ext.model import resolve
from olive_ext.plugins.speech.settings import METRICS_TYPE
from olive_ext.plugins.speech.transducer import TransducerSession, transducer_in
from olive_ext.session import open as open_session
from olive_ext.session.requests import GenerationRequest
from olive_ext.workflow import cli_run
from tests.plugins.speech.test_metrics_evaluator import declared, measured, olives, tones, wav
from tests.plugins.speech.transducers import JOINER, transducer_export
from tests.refusals import refused
from tests.workflow.recipes import recipe, saved

CHUNK, RATE = 8960, 16000
LENGTHS = (30000, 8960, 400, 70001, 17920, 12345)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """The package with an open batch, and with one of 1 as the public recipe's."""
    folder = tmp_path_factory.mktemp("transducer")
    return {batched: transducer_export(folder / str(batched), batched=batched) for batched in (True, False)}


def sounds() -> list[np.ndarray]:
    """Noise whose loudness and colour change within a sound."""
    made = []
    for number, length in enumerate(LENGTHS):
        rng = np.random.default_rng(number)
        time = np.arange(length) / RATE
        tone = np.sin(2 * np.pi * (200 + 900 * rng.random() + 300 * np.sin(5 * time)) * time)
        made.append((0.3 * tone * np.sin(9 * time) + 0.05 * rng.normal(size=length)).astype(np.float32))
    return made


def opened(folder: Path, **settings: object) -> TransducerSession:
    return TransducerSession(
        resolve(ModelSettings.of({"model": str(folder), "engine": {"num_threads": 1}, **settings}))
    )


def genais(folder: Path, sound: np.ndarray) -> tuple[list[int], str]:
    """Tokens and text by onnxruntime-genai, fed as Olive's evaluator feeds it."""
    model = og.Model(str(folder))
    processor, generator = og.StreamingProcessor(model), og.Generator(model, og.GeneratorParams(model))
    stream = og.Tokenizer(model).create_stream()
    tokens: list[int] = []
    text = ""
    parts = [sound[start : start + CHUNK] for start in range(0, len(sound), CHUNK)]
    for part in [*parts, None, *[np.zeros(CHUNK, np.float32)] * 4]:
        given = processor.flush() if part is None else processor.process(part)
        if given is None:
            continue
        generator.set_inputs(given)
        while not generator.is_done():
            generator.generate_next_token()
            if len(new := generator.get_next_tokens()):
                tokens.append(int(new[0]))
                text += stream.decode(new[0])
    return tokens, text


@pytest.mark.parametrize("batched", [True, False])
def test_tokens_and_texts_are_onnxruntime_genais(packages: dict[bool, Path], batched: bool) -> None:
    """Six sounds of 0.02 to 4.4 s, side by side where the batch is open: every token is that library's."""
    expected = [genais(packages[False], sound) for sound in sounds()]
    with opened(packages[batched]) as session:
        found = session.generate([GenerationRequest(audio=[(sound, RATE)]) for sound in sounds()])
        assert session.describe_execution()["sounds_together"] == (16 if batched else 1)
    assert [list(one.tokens) for one in found] == [tokens for tokens, _ in expected]
    assert [one.text for one in found] == [text.removeprefix(" ") for _, text in expected]
    assert len({token for one in found for token in one.tokens}) > 5


def test_most_tokens_end_a_transcript(packages: dict[bool, Path]) -> None:
    """Each request's own `max_new_tokens` cuts its transcript, of which the others are those without."""
    with opened(packages[True]) as session:
        whole = session.generate([GenerationRequest(audio=[(sound, RATE)]) for sound in sounds()])
        requests = [GenerationRequest(audio=[(sound, RATE)], max_new_tokens=n + 1) for n, sound in enumerate(sounds())]
        found = session.generate(requests)
        assert session.counters.tokens_generated == sum(len(one.tokens) for one in (*whole, *found))
    assert [one.tokens for one in found] == [one.tokens[: number + 1] for number, one in enumerate(whole)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blank_id": 21}, {"code": "unsupported", "holds": ("model.blank_id", "model.vocab_size", "21")}),
        ({"win_length": 600}, {"code": "unsupported", "holds": ("model.win_length", "model.fft_size", "600", "512")}),
        ({"chunk_samples": 100}, {"code": "unsupported", "holds": ("model.chunk_samples", "model.fft_size", "100")}),
        ({"num_mels": "many"}, {"code": "damaged", "holds": "model.num_mels"}),
        ({"vocab_size": 30}, {"code": "unsupported", "holds": ("model.vocab_size", "30", "genai_config", "21")}),
        (
            {"joiner": {"filename": "x.onnx", **JOINER}},
            {"code": "not_found", "holds": ("model.joiner.filename", "x.onnx")},
        ),
        (
            {"joiner": {"filename": "joint.onnx", "inputs": {"encoder_outputs": "e"}, "outputs": {}}},
            {"code": "unsupported", "holds": ("model.joiner.inputs.encoder_outputs", "decoder_output")},
        ),
        ({"left_context": 1}, {"code": "unsupported", "holds": ("genai_config.json", "cache_last_channel")}),
        (
            {"joiner": {"filename": "joint.onnx", **JOINER, "outputs": {}}},
            {"code": "unsupported", "holds": ".outputs.logits"},
        ),
    ],
)
def test_mistake_of_a_package_is_named(
    packages: dict[bool, Path], tmp_path: Path, changes: dict[str, object], message: dict[str, Any]
) -> None:
    """A wrong value is one line with the key, the value and what is accepted."""
    shutil.copytree(packages[True], tmp_path / "package")
    path = tmp_path / "package" / "genai_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["model"] |= changes
    path.write_text(json.dumps(config), encoding="utf-8")
    with refused(ModelError, **message), opened(path.parent) as session:
        session.generate([GenerationRequest(audio=[(sounds()[0], RATE)])])


@pytest.mark.parametrize("search", [[1], {"blank_penalty": "x"}, {"blank_penalty": float("nan")}])
def test_section_search_that_is_none_is_named(packages: dict[bool, Path], tmp_path: Path, search: object) -> None:
    """A list, a text and NaN as the blank's penalty are one line."""
    shutil.copytree(packages[True], tmp_path / "package")
    path = tmp_path / "package" / "genai_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), "search": search}), encoding="utf-8")
    with refused(ModelError, "damaged", holds="search"):
        opened(path.parent)


def test_request_without_a_sound_is_refused(packages: dict[bool, Path]) -> None:
    """So are two sounds, another rate, and a language, which a transducer does not take."""
    with opened(packages[True]) as session:
        with refused(MediaError, "media", holds="'audio'"):
            session.generate([GenerationRequest("text")])
        with refused(MediaError, "media", holds=("8000", "16000")):
            session.generate([GenerationRequest(audio=[(sounds()[0], 8000)])])
    with refused(ConfigError, "wrong_value", holds=("language", "speech_task")):
        opened(packages[True], language="de")


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[tuple[np.ndarray, str]]]:
    """A parquet file of sounds with texts, and the same in memory."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    made = [
        np.random.default_rng(number).normal(scale=0.1, size=size) for number, size in enumerate((20000, 8960, 33000))
    ]
    whole = [(np.array(one * 32767).astype("<i2") / 2**15).astype(np.float32) for one in made]
    texts = ["r r r m m", "m m f f", "h h m m"]
    files = [{"bytes": wav(list(one)), "path": f"{number}.wav"} for number, one in enumerate(made)]
    table = datasets.Dataset.from_dict({"audio": files, "text": texts})
    table.cast_column("audio", datasets.Audio(decode=False)).to_parquet(tmp_path / "sounds.parquet")
    return tmp_path / "sounds.parquet", list(zip(whole, texts, strict=True))


def test_word_errors_are_those_of_olives_streaming_evaluator(packages: dict[bool, Path], recorded: Any) -> None:
    """Olive's own code feeds onnxruntime-genai the same sounds: the same word error rate, of transcripts that are not
    empty; latency of the first sound beside it."""
    file, rows = recorded
    model = ONNXModelHandler(str(packages[False]), onnx_file_name="decoder.onnx")
    metric, time = (
        declared("speech", "accuracy", ["wer", "rtfx"], tones(file)),
        declared("t", "latency", ["avg"], tones(file)),
    )
    time["sub_types"][0]["metric_config"] = {"warmup_num": 0, "repeat_test_num": 1, "sleep_num": 0}
    found = measured(model, metric, time)
    output, targets = OnnxEvaluator()._inference_text_genai_streaming(
        model, olives(metric), [(samples_N[None], [text]) for samples_N, text in rows]
    )
    theirs = OnnxEvaluator.compute_accuracy(olives(metric), output, targets)
    assert all(text.strip() for text in output.preds)
    assert found["speech-wer"] == theirs["wer"].value
    assert found["speech-rtfx"] > 0
    assert found["t-first_token_ms"] > 0
    assert found["t-avg"] > 0


@pytest.mark.long
def test_public_recipe_of_nemotron_ports_by_its_type(packages: dict[bool, Path], recorded: Any, tmp_path: Path) -> None:
    """The check is green, and the recipe runs."""
    blocks: dict[str, Any] = {
        "data_configs": [tones(recorded[0], max_samples=2)],
        "metrics": [declared("speech_accuracy", "accuracy", ["wer", "rtfx"], "tones")],
        "evaluators": {"common_evaluator": {"type": METRICS_TYPE, "metrics": ["speech_accuracy"]}},
    }
    blocks["evaluators"]["common_evaluator"]["output_dir"] = str(tmp_path / "reports")
    written = recipe(tmp_path, {"type": "OnnxModel", "model_path": str(packages[False])}, **blocks)
    assert check_recipe(Path(saved(tmp_path, written))).problems == []
    assert cli_run(["--config", saved(tmp_path, written)]) == 0
    found = json.loads((tmp_path / "out" / "input_model_metrics.json").read_text(encoding="utf-8"))
    report = json.loads((tmp_path / "reports" / "input_model" / "report.json").read_text(encoding="utf-8"))
    values = {one["metric"]: (one["value"], one["n"]) for one in report["metrics"]}
    assert values["wer"] == (found["speech_accuracy-wer"]["value"], 2)


def test_tasks_are_refused_for_a_transducer_and_where_a_decoder_is_wanted(packages: dict[bool, Path]) -> None:
    """The graph or the folder is given, and a task; the error says what measures a transducer."""
    assert transducer_in(packages[False] / "decoder.onnx", [])
    with refused(ModelError, "unsupported", holds=("nemotron_speech", "OrtEvaluator")):
        transducer_in(packages[False], ["task"])
    with refused(ModelError, "unsupported", holds=("nemotron_speech", "OrtEvaluator")):
        open_session(packages[True])

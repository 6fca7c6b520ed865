"""Olive's evaluator of transcripts beside this package's, on the same package and sounds, by turns in one process:
`python -m docs.benchmarks speech_metrics PACKAGE DATA.parquet` (columns "audio", of WAV files of 16 kHz, and "text").

Olive's asks for soundfile, and is given scipy's writer in its place where that is missing. Prints the real-time factors
(seconds of sound by seconds of answering) of each turn, the ratio of their medians, and whether the texts are equal.
"""

from __future__ import annotations

import importlib.util
import io
import statistics
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import datasets
import numpy as np
from olive.data.config import DataConfig
from olive.evaluator.metric import Metric
from olive.evaluator.olive_evaluator import OnnxEvaluator
from olive.model import ONNXModelHandler
from scipy.io import wavfile

from olive_ext.plugins.speech.generated_answers import answered, documents
from olive_ext.plugins.speech.settings import MetricSettings
from olive_ext.session import open as open_session

TURNS, RATE = 5, 16000


def factor(timing: dict[str, float]) -> float:
    return timing["total_audio_duration"] / timing["total_inference_time"]


def main(package: str, file: str) -> None:
    if importlib.util.find_spec("soundfile") is None:
        stand_in: Any = ModuleType("soundfile")
        stand_in.__spec__ = ModuleSpec("soundfile", None)
        stand_in.write = lambda file, samples, samplerate, format: wavfile.write(file, samplerate, samples)
        sys.modules["soundfile"] = stand_in
    data = DataConfig(
        name="sounds",
        type="HuggingfaceContainer",
        load_dataset_config={
            "type": "huggingface_dataset",
            "params": {"data_name": "parquet", "data_files": file, "split": "train"},
        },
        pre_process_data_config={"type": "speech_transcription_pre_process", "params": {"sample_rate": RATE}},
    )
    metric = Metric(name="speech", type="accuracy", sub_types=[{"name": "wer"}, {"name": "rtfx"}], data_config=data)
    rows = datasets.Dataset.from_parquet(file).cast_column("audio", datasets.Audio(decode=False))
    heard = [
        (wavfile.read(io.BytesIO(row["audio"]["bytes"]))[1].astype(np.float32) / 2**15, row["text"]) for row in rows
    ]
    batches = [(samples_N[None], [text]) for samples_N, text in heard]
    model = ONNXModelHandler(package, onnx_file_name="decoder.onnx")
    ours, olives, is_equal = [], [], True
    for _ in range(TURNS):
        output, _ = OnnxEvaluator()._inference_text_genai(model, SimpleNamespace(data_config=None), batches)
        with open_session(package) as session:
            own = answered(documents(metric, session, MetricSettings()), session)
        is_equal &= own.texts == output.preds
        ours.append(factor(own.timing))
        olives.append(factor(output.logits))
    print("ours  ", " ".join(f"{value:.1f}" for value in ours))
    print("Olive's", " ".join(f"{value:.1f}" for value in olives))
    ratio = statistics.median(ours) / statistics.median(olives)
    print(f"ratio of medians {ratio:.2f}, texts {'equal' if is_equal else 'differ'}")


if __name__ == "__main__":
    main(*sys.argv[1:])

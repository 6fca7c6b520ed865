"""Encoder-decoders beside the table of agreement: mistakes, requests of lm-eval, and comparison with a reference."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

import olive_ext
from olive_ext.backends.lm_eval import OrtLM
from olive_ext.errors import ModelError, TaskError
from olive_ext.report.comparison import ENCODER, KV_CACHE
from olive_ext.run.model_facts import damage_of
from tests.exports import hf_model
from tests.exports.genai import genai_export
from tests.exports.optimum import optimum_export
from tests.refusals import refused


@pytest.mark.exporters
def test_decoder_without_its_encoder_is_refused(tmp_path: Path) -> None:
    without = shutil.ignore_patterns("encoder_model.onnx", "decoder_model.onnx", "decoder_model_merged.onnx")
    shutil.copytree(optimum_export("t5"), tmp_path / "model", ignore=without)
    with refused(ModelError, "unsupported", holds="'encoder_attention_mask'"):
        olive_ext.open(tmp_path / "model")


@pytest.mark.exporters
@pytest.mark.parametrize(
    ("file", "part", "axis", "damaged"),
    [
        ("encoder_model.onnx", "attention_mask", 1, ENCODER),
        ("decoder_with_past_model.onnx", ".encoder.value", 0, KV_CACHE),
    ],
)
def test_sources_that_change_each_others_texts_are_damage(
    file: str, part: str, axis: int, damaged: str, tmp_path: Path
) -> None:
    """All tokens take the first one's mask, or all rows the first one's source: neither shows in a source alone."""
    folder, make = Path(shutil.copytree(optimum_export("t5"), tmp_path / "model")), onnx.helper.make_node
    with olive_ext.open(folder) as session:
        assert damage_of({}, session.describe_execution()) == {}
    model = onnx.load(folder / file)
    nodes, names = model.graph.node, [value.name for value in model.graph.input if part in value.name]
    for node in nodes:
        node.input[:] = [f"{name}/first" if name in names else name for name in node.input]
    for name in names:
        nodes.insert(0, make("Expand", [f"{name}/row", f"{name}/shape"], [f"{name}/first"]))
        nodes.insert(0, make("Slice", [name, "begin", "end", "axis"], [f"{name}/row"]))
        nodes.insert(0, make("Shape", [name], [f"{name}/shape"]))
    for name, value in {"begin": 0, "end": 1, "axis": axis}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([value]), name))
    onnx.save(model, folder / file)
    with olive_ext.open(folder) as session:
        assert [*damage_of({}, session.describe_execution())] == [damaged]


@pytest.mark.exporters
def test_lm_eval_gets_the_answers_that_its_own_backend_gives() -> None:
    pairs = [("Ann sees the blue", " stone"), ("Bob carries a heavy wheel", " number 3"), ("", " garden")]
    asked = [Instance("loglikelihood", {}, pair, index, ("t", index, 1)) for index, pair in enumerate(pairs)]
    stops = {"until": ["\n\n"], "max_gen_toks": 6}
    texts = [
        Instance("generate_until", {}, (pair[0], stops), index, ("t", index, 1)) for index, pair in enumerate(pairs[:2])
    ]
    reference = HFLM(pretrained=str(hf_model("marian")), device="cpu", dtype="float32", batch_size=1)
    with OrtLM(str(optimum_export("marian"))) as lm:
        found = lm.loglikelihood(asked, disable_tqdm=True)
        said = lm.generate_until(texts, disable_tqdm=True)
    for ours, theirs in zip(found, reference.loglikelihood(asked, disable_tqdm=True), strict=True):
        assert ours == (pytest.approx(theirs[0], abs=1e-4), theirs[1])
    for ours, theirs in zip(said, reference.generate_until(texts, disable_tqdm=True), strict=True):
        assert ours
        assert theirs.startswith(ours)  # max_gen_toks counts the source's tokens as well in HFLM


def test_lm_eval_hears_that_a_model_of_sound_takes_no_text() -> None:
    request = Instance("loglikelihood", {}, ("a text", " stone"), 0)
    with (
        OrtLM(str(genai_export("whisper", "0.18.0"))) as lm,
        refused(TaskError, "unsupported", holds="sound"),
    ):
        lm.loglikelihood([request], disable_tqdm=True)

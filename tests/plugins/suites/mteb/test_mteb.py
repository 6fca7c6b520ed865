"""Embeddings on this package's engine against sentence-transformers, and mteb's tasks against Olive's own evaluator."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from olive_ext.config import ModelSettings
from olive_ext.errors import OliveExtError
from olive_ext.model import resolve

pytest.importorskip("mteb")

from olive.evaluator.olive_evaluator import MTEBEvaluator
from olive.model import ONNXModelHandler
from scipy.stats import bootstrap, spearmanr
from sentence_transformers import CrossEncoder, SentenceTransformer

from olive_ext.config.embeddings import EmbeddingSettings
from olive_ext.plugins.speech.metrics_evaluator import OrtEvaluator
from olive_ext.plugins.suites.mteb.evaluation import _correlations
from olive_ext.plugins.suites.mteb.text_encoder import TextEncoder
from olive_ext.workflow import cli_run
from tests.plugins.suites.mteb.local_tasks import SENTENCES
from tests.plugins.suites.mteb.models import DECODERS, ENCODERS, PROMPTS, cross_encoder, folders

pytestmark = pytest.mark.other_env

TEXTS = [*(" ".join(SENTENCES[i : i + 1 + i % 6]) for i in range(40)), " ".join(SENTENCES[:40])]
TASKS = ["TinySTS", "TinyRetrieval"]
ALL = [*ENCODERS, *DECODERS]


def encoder(folder: Path, **settings: Any) -> TextEncoder:
    model = resolve(ModelSettings.of({"model": str(folder), "engine": {"num_threads": 1}}))
    return TextEncoder(model, EmbeddingSettings(**settings))


def measured(folder: Path, **settings: Any) -> dict[str, float]:
    evaluator = OrtEvaluator(**{"tasks": TASKS, "engine": {"num_threads": 1}, **settings})
    found = evaluator.evaluate(ONNXModelHandler(str(folder), onnx_file_name="model.onnx"))
    return {name: entry.value for name, entry in found.root.items()}


@pytest.mark.parametrize("name", ALL)
def test_embeddings_are_those_of_sentence_transformers(name: str) -> None:
    """To 1e-5 in every dimension, with a prompt, without, and of texts that are cut."""
    hf, onnx = folders(name)
    theirs = SentenceTransformer(str(hf), device="cpu")
    with closing(encoder(onnx)) as ours:
        for prompt in ("", PROMPTS["query"]):
            wanted = theirs.encode(TEXTS, prompt=prompt, normalize_embeddings=True)
            np.testing.assert_allclose(ours.encode(TEXTS, prompt), wanted, atol=1e-5)


def test_prompt_of_a_decoder_is_computed_once() -> None:
    """41 texts behind one instruction cost no more tokens than they have distinct prefixes."""
    with closing(encoder(folders("qwen3")[1])) as ours:
        ours.encode(SENTENCES, PROMPTS["query"])
        counters = ours.describe()["counters"]
        length = len(ours.tokens([PROMPTS["query"]])[0])
    assert counters["tokens_fed"] == counters["tokens_distinct"]
    assert counters["tokens_naive"] - counters["tokens_fed"] > (len(SENTENCES) - 1) * (length - 1)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_other_poolings_of_a_decoder_are_those_of_its_hidden_states(pooling: str) -> None:
    """Mean and first token, against transformers' hidden states of each text alone."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    hf, onnx = folders("llama")
    model, tokenizer = AutoModel.from_pretrained(hf).eval(), AutoTokenizer.from_pretrained(hf)
    with closing(encoder(onnx, pooling=pooling, normalize=False)) as ours:
        found = ours.encode(SENTENCES[:5])
    for text, vector in zip(SENTENCES, found, strict=False):
        with torch.no_grad():
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].numpy()
        np.testing.assert_allclose(vector, states.mean(0) if pooling == "mean" else states[0], atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3", "bert"])
def test_section_has_the_numbers_of_olives_evaluator(name: str) -> None:
    """Every key and number, with the prompts and the pooling that Olive's evaluator has; peak memory is beside them."""
    _, onnx = folders(name)
    theirs = MTEBEvaluator(tasks=TASKS, batch_size=8, max_length=96)
    found = theirs.evaluate(ONNXModelHandler(str(onnx), onnx_file_name="model.onnx"), [])
    ours = measured(onnx, batch_size=8, max_length=96, prompts={}, pooling="last")
    assert ours.pop("peak_memory-bytes") > 0
    assert ours.keys() == found.root.keys()
    for key, value in ours.items():
        assert value == pytest.approx(found.root[key].value, abs=1e-4), key


@pytest.mark.parametrize("default", [None, "query"])
def test_section_with_prompts_has_sentence_transformers_numbers(default: str | None, tmp_path: Path) -> None:
    """mteb with sentence-transformers, which puts the model's prompts before queries, and its default before texts of
    neither kind alone."""
    import mteb

    hf, onnx = (shutil.copytree(folder, tmp_path / folder.name) for folder in folders("qwen3"))
    for folder in (hf, onnx):
        file = folder / "config_sentence_transformers.json"
        file.write_text(json.dumps({"prompts": PROMPTS, "default_prompt_name": default}), encoding="utf-8")
    tasks = mteb.get_tasks(tasks=TASKS)
    results = mteb.MTEB(tasks=tasks).run(SentenceTransformer(str(hf), device="cpu"), output_folder=None, verbosity=0)
    ours = measured(onnx)
    for result in results:
        assert ours[f"{result.task_name}-main_score"] == pytest.approx(result.main_score, abs=1e-4)
    own = measured(onnx, prompts=PROMPTS)
    assert (own["TinySTS-main_score"] != ours["TinySTS-main_score"]) == (default is not None)


def test_change_of_a_correlation_has_scipys_interval() -> None:
    """The percentile bootstrap of scipy over the same pairs, within what 1,000 draws leave open."""
    random = np.random.default_rng(3)
    wanted = random.integers(0, 6, 200).astype(np.float32)
    ours, theirs = (wanted + random.normal(0, spread, 200).astype(np.float32) for spread in (3, 2))
    found = {metric.metric: metric.value for metric in _correlations("t", [(wanted, ours)], [(wanted, theirs)])}

    def change(*sides: Any) -> float:
        first, second = (spearmanr(sides[0], side).statistic for side in sides[1:])
        return float(first - second)

    draws = bootstrap(
        (wanted, ours, theirs), change, paired=True, vectorized=False, n_resamples=2000, method="percentile"
    )
    assert found["spearman_change"] == pytest.approx(change(wanted, ours, theirs), abs=1e-6)
    wide = draws.confidence_interval.high - draws.confidence_interval.low
    assert found["spearman_change_low"] == pytest.approx(draws.confidence_interval.low, abs=0.1 * wide)
    assert found["spearman_change_high"] == pytest.approx(draws.confidence_interval.high, abs=0.1 * wide)


def test_public_section_runs_with_local_tasks() -> None:
    """The keys of the public recipes' section but its tasks, which need a network."""
    sections = json.loads((Path(__file__).parents[3] / "workflow/public_sections.json").read_text(encoding="utf-8"))
    keys = next(one["keys"] for one in sections if one["name"] == "embeddings")
    assert "TinySTS-main_score" in measured(folders("qwen3")[1], **{**keys, "tasks": TASKS})


def test_recipe_runs_with_a_priority_and_a_page(tmp_path: Path) -> None:
    """Olive's run of a recipe: the declared metric is the task's main score, and the page names the worst texts."""
    onnx = str(folders("bert")[1])
    sub_type = {"name": "accuracy_score", "priority": 1, "higher_is_better": True}
    metric = {"name": "TinySTS", "type": "accuracy", "sub_types": [sub_type]}
    section = {"type": "OrtEvaluator", "tasks": TASKS, "reference": onnx, "output_dir": str(tmp_path / "report")}
    recipe = {
        "input_model": {"type": "ONNXModel", "model_path": onnx, "onnx_file_name": "model.onnx"},
        "evaluators": {"e": {**section, "metrics": [metric]}},
        "evaluator": "e",
        "output_dir": str(tmp_path / "out"),
        "cache_dir": str(tmp_path / "cache"),
    }
    (tmp_path / "recipe.json").write_text(json.dumps(recipe), encoding="utf-8")
    assert cli_run(["--run-config", str(tmp_path / "recipe.json")]) == 0
    (page,) = tmp_path.glob("report/**/report.html")
    assert SENTENCES[0][:20] in page.read_text(encoding="utf-8")
    written = " ".join(file.read_text(encoding="utf-8") for file in tmp_path.glob("out/**/*.json"))
    assert "accuracy_score" in written


def with_signs(graph: Any) -> None:
    """Puts the signs of its weights, times their mean size, in the place of every matrix."""
    for tensor in (tensor for tensor in graph.initializer if len(tensor.dims) == 2):
        values = onnx.numpy_helper.to_array(tensor)
        rounded = (np.sign(values) * np.abs(values).mean()).astype(values.dtype)
        tensor.CopyFrom(onnx.numpy_helper.from_array(rounded, tensor.name))


def test_model_against_itself_and_against_another(tmp_path: Path) -> None:
    """Cosines are 1 beside the model itself, less beside one whose weights are rounded."""
    path = folders("bert")[1]
    same = measured(path, reference=str(path))
    assert same["TinySTS-main_score_change"] == 0
    assert same["embeddings-cosine_min"] == pytest.approx(1, abs=1e-6)
    signs = measured(_changed(tmp_path / "signs", with_signs), reference=str(path))
    for name in ("TinyRetrieval-ndcg_at_10_change", "TinySTS-spearman_change"):
        change = [signs[f"{name}{end}"] for end in ("_low", "", "_high")]
        assert change == sorted(change)
        assert change[0] < change[2]
        assert change[1] == pytest.approx(signs[f"{name.partition('-')[0]}-main_score_change"], abs=2e-5)
        assert same[name] == 0
    assert same["TinySTS-spearman_change_low"] == same["TinySTS-spearman_change_high"] == 0
    assert signs["embeddings-cosine_mean"] < 0.95


def test_cross_encoder_scores_as_sentence_transformers_does() -> None:
    """Each pair's logit to 1e-5, and the task's score."""
    import mteb
    import torch

    hf, onnx = cross_encoder()
    theirs = CrossEncoder(str(hf), device="cpu", max_length=96)
    pairs = list(zip(TEXTS, TEXTS[::-1], strict=True))
    with closing(encoder(onnx)) as ours:
        ours.max_length = 96
        wanted = theirs.predict(pairs, activation_fn=torch.nn.Identity())
        np.testing.assert_allclose(ours.score_pairs(*zip(*pairs, strict=True)), wanted, atol=1e-5)
    (result,) = mteb.MTEB(tasks=mteb.get_tasks(tasks=["TinyReranking"])).run(theirs, output_folder=None, verbosity=0)
    ours_found = measured(onnx, tasks=["TinyReranking"], max_length=96)
    assert ours_found["TinyReranking-main_score"] == pytest.approx(result.main_score, abs=1e-4)


def test_mistakes_are_told_by_name() -> None:
    """A task that mteb does not have, and a decoder without hidden states."""
    from tests.exports import genai_export

    with pytest.raises(OliveExtError, match="TinySTX"):
        measured(folders("bert")[1], tasks=["TinySTX"])
    with pytest.raises(OliveExtError, match="include_hidden_states"):
        measured(genai_export("qwen3"))


def _changed(folder: Path, change: Callable[[Any], None]) -> Path:
    """The copy of an encoder in `folder`, with its graph changed."""
    shutil.copytree(folders("bert")[1], folder)
    graph = onnx.load(folder / "model.onnx")
    change(graph.graph)
    onnx.save(graph, folder / "model.onnx")
    return folder


def test_graph_without_a_mask_gets_no_padding(tmp_path: Path) -> None:
    """Texts of several lengths have the vectors of the graph that is told their lengths."""

    def change(graph: Any) -> None:
        (mask,) = (one for one in graph.input if one.name == "attention_mask")
        graph.input.remove(mask)
        shape = onnx.helper.make_node("Shape", ["input_ids"], ["ids_shape"])
        one = onnx.helper.make_tensor("one", onnx.TensorProto.INT64, [1], [1])
        ones = onnx.helper.make_node("ConstantOfShape", ["ids_shape"], ["attention_mask"], value=one)
        graph.node.insert(0, ones)
        graph.node.insert(0, shape)

    with closing(encoder(folders("bert")[1])) as told, closing(encoder(_changed(tmp_path / "m", change))) as untold:
        np.testing.assert_allclose(untold.encode(TEXTS), told.encode(TEXTS), atol=1e-5)


def test_scores_of_tokens_and_lowered_texts_are_refused_by_name(tmp_path: Path) -> None:
    """A masked language model's logits [texts, positions, vocabulary] are no hidden states; sentence-transformers'
    do_lower_case would change the tokens."""

    def change(graph: Any) -> None:
        graph.node.append(onnx.helper.make_node("Identity", [graph.output[0].name], ["logits"]))
        graph.output[0].name = "logits"

    with pytest.raises(OliveExtError, match="last_hidden_state"):
        encoder(_changed(tmp_path / "m", change))
    folder = _changed(tmp_path / "lowered", lambda graph: None)
    (folder / "sentence_bert_config.json").write_text('{"do_lower_case": true}', encoding="utf-8")
    with pytest.raises(OliveExtError, match="do_lower_case"):
        encoder(folder)

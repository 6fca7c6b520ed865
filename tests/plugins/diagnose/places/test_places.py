"""One model in two places: the verdict in its own words, the scale that it is measured on, and where a fault is. Noise
is taken for more in at most 1 % of pairs, and what is more is found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binomtest

from olive_ext.cli import main
from olive_ext.config import ModelSettings
from olive_ext.errors import ConfigError
from olive_ext.plugins.diagnose.places.judge import ALPHA, RESOLUTION, PairAgainstNoise, held
from olive_ext.report import Report, from_json, to_json
from olive_ext.report.html.render import to_html
from olive_ext.report.plain_text import to_markdown
from olive_ext.report.verdict import verdict
from tests.exports.genai import genai_export
from tests.exports.pipeline import pipeline_package
from tests.exports.quickstart import TASKS, exported, quantized
from tests.plugins.diagnose.places.planted import compared, planted
from tests.refusals import refused


@pytest.fixture(scope="module")
def same() -> Report:
    """Two numbers of threads, and no optimizations in one of the places."""
    return compared({"path": "same_model", "engine": {"num_threads": 1, "graph_optimization": "disable"}})


@pytest.fixture(scope="module")
def different(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """A wrong kernel in one place: the node's weights are 1 % too large in half of its rows."""
    folder = tmp_path_factory.mktemp("planted")
    wrong = folder / "model"
    planted(exported(), wrong, 14, factor=1.01)
    reference = {"path": str(exported()), "is_same_model": True, "repro": str(folder / "repro")}
    return compared(reference, wrong, output_dir=str(folder / "out"))


@pytest.mark.long
def test_other_threads_and_optimizations_are_the_same_to_rounding(same: Report) -> None:
    """The verdict says so, and what it was held against stands beside it: this model's noise and that of kernels."""
    judged, place = verdict(same.comparison), same.comparison.place
    assert judged.code == "place_same"
    assert place.kind == "same"
    assert place.num_positions > 100
    assert place.largest <= place.noise_limit
    assert {one.is_rounding for one in place.noise} == {True, False}
    assert "graph_optimization disable" in place.reference
    assert place.reference.startswith(place.model)
    assert any("own noise" in text for text in judged.evidence)
    assert judged.evidence[-1].startswith("as two models: ")
    moved = [one.rms for one in place.noise if one.is_rounding]
    assert len(moved) == 2
    assert all(1e-7 < rms < 1e-5 for rms in moved), "more than nothing, less than a wrong kernel"


def test_pipeline_of_graphs_is_held_against_the_graph_it_was_cut_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its first graph has no logits and no cache: reading it ended the run after all documents had been answered."""
    whole = {"path": str(genai_export("llama")), "is_same_model": True, "repro": str(tmp_path / "repro")}
    place = compared(whole, pipeline_package("llama")).comparison.place
    assert (place.kind, place.reason) == ("same", "")
    assert place.num_positions > 100
    assert place.largest <= place.noise_limit
    assert "repro': " in caplog.text


@pytest.mark.long
def test_planted_kernel_is_different_and_named_in_every_form(different: Report) -> None:
    """A weight of one node, 1 % off, is found beyond all noise: position, document, layer, node and a repro.
    report.json gives it back as it was; the page and markdown say it."""
    judged, place = verdict(different.comparison), different.comparison.place
    assert judged.status == "loss"
    assert judged.headline.startswith("different: first at position ")
    assert place.largest > place.kernel_limit > place.noise_limit
    assert place.first.node
    assert place.first.layer == 0
    assert f"layer 0, node {place.first.node}" in judged.headline
    done = subprocess.run([sys.executable, "repro.py"], cwd=place.first.repro, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    assert done.stdout
    assert from_json(to_json(different)).comparison.place == place
    first = f"different: first at position {place.first.position} of document"
    assert first[1:] in to_markdown(different)
    assert "ifferent: first at position" in to_html(different)


@pytest.mark.long
def test_genai_gives_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """onnxruntime-genai against this package's engine, on the command line: exit status 0."""
    argv = ["evaluate", exported(), "--tasks", "quickstart_letters", "--include-path", TASKS, "--limit", "8"]
    assert main([*map(str, argv), "--against", "runtime=genai"]) == 0
    assert "the same to rounding" in capsys.readouterr().out


@pytest.mark.long
def test_quantized_activations_widen_the_scale() -> None:
    """A model whose activations are rounded to 8 bits is held against the noise of that rounding."""
    report = compared({"path": "same_model", "engine": {"num_threads": 1}}, quantized(4, 32, accuracy_level=4))
    place = report.comparison.place
    assert place.computed_in == "8-bit activations"
    assert place.kind == "same"
    assert max(one.rms for one in place.noise if one.is_rounding) > 1e-4


@pytest.mark.long
def test_journal_of_one_pair_is_not_taken_for_another(tmp_path: Path) -> None:
    """With an output folder a pair resumes from its journal; a pair of other settings does not."""
    first = compared({"path": "same_model", "engine": {"num_threads": 1}}, output_dir=str(tmp_path))
    again = compared({"path": "same_model", "engine": {"num_threads": 1}}, output_dir=str(tmp_path))
    other = compared({"path": "same_model", "engine": {"graph_optimization": "disable"}}, output_dir=str(tmp_path))
    known = [report.model["journal"]["answers_known"] for report in (first, again, other)]
    assert known[0] == known[2] == 0 < known[1]


def test_what_the_reference_does_not_name_is_the_models() -> None:
    """The same model elsewhere: settings of the candidate, provider options only with their provider."""
    own = ModelSettings(
        model="m", max_length=32, provider_options={"a": "1"}, engine={"num_threads": 1, "num_slots": 3}
    )
    other = own.in_other_place({"model": "same_model", "engine": {"num_threads": 2}})
    assert (other.model, other.max_length, other.engine.num_slots, other.engine.num_threads) == ("m", 32, 3, 2)
    assert other.provider_options == {"a": "1"}
    assert own.in_other_place({"execution_provider": "cpu"}).provider_options is None


@pytest.mark.long
@pytest.mark.parametrize("named", [{}, {"execution_provider": "cpu"}, {"engine": {"num_threads": "auto"}}])
def test_one_place_twice_is_refused(named: dict[str, object]) -> None:
    """Where both places resolve to the same one, nothing would be compared, and nothing is green."""
    with refused(ConfigError, "contradiction", "reference", "same_model"):
        compared({"path": "same_model", **named})


def test_written_keys_come_from_one_option() -> None:
    """--against takes keys of `reference` and of `engine`, and `provider` for its key."""
    from olive_ext.cli.options import place_of

    expected = {"path": "same_model", "is_same_model": True, "execution_provider": "cpu", "engine": {"num_threads": 1}}
    assert place_of("provider=cpu,num_threads=1", "--against") == expected
    assert json.dumps(place_of("engine.runtime=genai", "--against")["engine"]) == '{"runtime": "genai"}'


def drawn(rng: np.random.Generator, lengths: list[int], scale: float = 1e-3, spread: float = 0.0) -> list[np.ndarray]:
    """Distances at the positions of documents, each of a size of its own and heavy-tailed (Student's t, 4 degrees)."""
    own = scale * np.exp(0.3 * spread * np.arange(len(lengths)))
    return [np.abs(size * rng.standard_t(4, length)) for size, length in zip(own, lengths, strict=True)]


def pair(rng: np.random.Generator, factor: float = 1.0, num_documents: int = 12) -> PairAgainstNoise:
    """A pair of `factor` times the noise over 60 documents, of which noise is known of the first ones."""
    lengths = rng.integers(1, 40, 60).tolist()
    whole = [factor * values for values in drawn(rng, lengths, spread=0.2)]
    noise = [drawn(rng, lengths, spread=0.2)[:num_documents] for _ in range(2)]
    return held(whole[:num_documents], noise, np.concatenate(whole))


@pytest.mark.long
def test_equal_noise_is_called_more_in_at_most_one_per_cent() -> None:
    """Of 1,000 pairs that differ by the same noise, the share that is called farther is within 1 %."""
    rng = np.random.default_rng(3)
    lengths = [30] * 40

    def is_farther() -> bool:
        whole = drawn(rng, lengths)
        return held(whole[:12], [drawn(rng, lengths[:12]) for _ in range(2)], np.concatenate(whole)).is_farther

    called = sum(is_farther() for _ in range(1000))
    assert binomtest(called, 1000, ALPHA, alternative="greater").pvalue > 0.01, called


def test_what_is_beyond_the_noise_is_found() -> None:
    """Ten times the noise, whatever documents it is of; a single position, by the test of positions alone; and beyond
    float32's resolution where there is no noise."""
    rng = np.random.default_rng(4)
    assert all(pair(rng, 10.0).is_farther for _ in range(50))
    whole = drawn(rng, [30] * 40)
    whole[33][7] = 10.0
    found = held(whole[:12], [drawn(rng, [30] * 12) for _ in range(2)], np.concatenate(whole))
    assert (found.is_farther_somewhere, found.is_farther_overall) == (True, False)
    nothing = [np.zeros(5)] * 8
    assert not held(nothing, [nothing], np.zeros(40)).is_farther
    assert not held(nothing, [nothing], np.full(40, RESOLUTION)).is_farther
    assert held(nothing, [nothing], np.full(40, 3 * RESOLUTION)).is_farther_somewhere

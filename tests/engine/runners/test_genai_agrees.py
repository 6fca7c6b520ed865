"""onnxruntime-genai, driven by the same scheduler, gives the numbers of our own sessions on the same weights.

Packages: a plain one, a pipeline of graphs, and a pipeline whose inputs have a fixed length.
"""

from __future__ import annotations

import json
import random
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import olive_ext
from olive_ext.errors import ConfigError, ModelError, OliveExtError, ProviderError
from olive_ext.model.files.content import model_digest, size_on_disk
from olive_ext.model.files.locate import locate
from olive_ext.session import Session
from olive_ext.session.requests import GenerationRequest, ScoringRequest
from tests.exports import TEXT, VOCAB, genai_export
from tests.exports.pipeline import pipeline_package
from tests.model.tiny import olive_packed, packed
from tests.refusals import refused

pytest.importorskip("onnxruntime_genai")

WINDOW = 8
KINDS = ("plain", "pipeline", "static")


def package(kind: str) -> Path:
    if kind == "plain":
        return genai_export("llama")
    return pipeline_package("llama", WINDOW if kind == "static" else 0)


def opened(kind: str, folder: Path | None = None, **settings: Any) -> Session:
    engine = {"runtime": "genai" if kind == "plain" else "auto", "chunk_size": 48}
    try:
        return olive_ext.open(folder or package(kind), **{"engine": engine, **settings})
    except ModelError as error:
        if kind == "static" and "different logits for the same tokens" in str(error):
            pytest.skip(f"this release of onnxruntime-genai pads wrongly, and is refused: {error}")
        if "do_sample - Expected a bool but saw a null" in str(error):
            pytest.skip(f"this release of onnxruntime-genai does not read what its builder writes: {error}")
        raise


def scoring_requests() -> list[ScoringRequest]:
    """Shared stems, one-token and long targets; pad, EOS and BOS ids among them."""
    rng = random.Random(5)
    draw = lambda low, high: [rng.randrange(VOCAB) for _ in range(rng.randint(low, high))]  # noqa: E731
    stems = [draw(1, 90) for _ in range(6)]
    requests = []
    for _ in range(7):
        context = rng.choice(stems) + draw(0, 25)
        requests += [ScoringRequest(context, draw(1, 1)), ScoringRequest(context, draw(1, 20))]
        requests.append(ScoringRequest(draw(1, 2), [*draw(1, 8), 0, 1, 2]))
    return requests


def generation_requests() -> list[GenerationRequest]:
    return [GenerationRequest(request.context, max_new_tokens=24) for request in scoring_requests()[:5]]


@cache
def expected() -> tuple[list[Any], list[Any], float]:
    with olive_ext.open(genai_export("llama"), engine={"runtime": "onnxruntime"}) as session:
        assert session.describe_execution()["runtime"] == "onnxruntime"
        return (
            session.loglikelihood(scoring_requests()),
            session.generate(generation_requests()),
            session.loglikelihood_rolling([TEXT[:700]])[0].logprob,
        )


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_onnxruntime_and_facts_say_who_runs(kind: str) -> None:
    """Log-probabilities within 1e-4 nats; a stop string ends a generation, and EOS in a prompt does not."""
    scores, generations, rolling = expected()
    request, tokens = generation_requests()[0], generations[0].tokens
    with opened(kind) as session:
        for ours, theirs in zip(session.loglikelihood(scoring_requests()), scores, strict=True):
            assert ours.token_logprobs == pytest.approx(theirs.token_logprobs, abs=1e-4)
            assert ours.is_greedy == theirs.is_greedy
        found = session.generate(generation_requests())
        assert [output.tokens for output in found] == [output.tokens for output in generations]
        assert session.loglikelihood_rolling([TEXT[:700]])[0].logprob == pytest.approx(rolling, rel=1e-5)
        stop = session.tokenizer.decode([tokens[2]])
        (stopped,) = session.generate([GenerationRequest(request.prompt, max_new_tokens=24, stop=[stop])])
        assert stopped.tokens[:2] == tokens[:2]
        assert len(stopped.tokens) < len(tokens)
        (output,) = session.loglikelihood([ScoringRequest([1, 5, 1], [1, 1])])
        assert len(output.token_logprobs) == 2
        facts = session.describe_execution()
    assert kind != "plain" or facts["tokens_replayed"] == 0, "its generators rewind"
    assert (facts["runtime"], facts["num_slots"]) == ("genai", 1)
    assert ("embeddings, context_0, iterator_0, lm_head" in facts["runtime_origin"]) == (kind != "plain")
    assert facts["runtime_origin"].startswith("engine.runtime" if kind == "plain" else "auto: ")


def test_pipeline_is_hashed_and_measured_as_a_whole() -> None:
    folder = package("pipeline")
    files = locate(folder)
    assert size_on_disk(files) == sum(file.stat().st_size for file in folder.glob("*.onnx*"))
    assert model_digest(files) != model_digest(locate(package("static")))


@pytest.mark.parametrize(
    ("kind", "settings", "error", "refusal"),
    [
        ("pipeline", {"engine": {"runtime": "onnxruntime"}}, ModelError, ("unsupported", "", ..., "engine.runtime")),
        (
            "plain",
            {"engine": {"runtime": "genai", "num_slots": 4}},
            ConfigError,
            ("wrong_value", "engine.num_slots", 4, "1"),
        ),
    ],
)
def test_what_generators_cannot_do_is_refused(
    kind: str, settings: Any, error: type[OliveExtError], refusal: tuple[str, str, Any, str]
) -> None:
    *said, holds = refusal
    with refused(error, *said, holds=holds):
        olive_ext.open(package(kind), **settings)


def test_package_without_genai_config_is_refused(tmp_path: Path) -> None:
    for file in package("plain").iterdir():
        if file.name != "genai_config.json" and file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with refused(ModelError, "unsupported", holds=("genai_config.json", "engine.runtime")):
        olive_ext.open(tmp_path, engine={"runtime": "genai"})


@pytest.mark.parametrize("layout", ["onnxruntime", "olive"])
def test_weights_behind_a_link_that_is_not_followed_are_named_as_they_lie(layout: str, tmp_path: Path) -> None:
    one = shutil.copytree(package("plain"), tmp_path / "one")
    root = packed(tmp_path / "p", one=one) if layout == "onnxruntime" else olive_packed(tmp_path, one)
    (link,) = root.rglob("model.onnx.data")
    there = (root / "shared_assets" / "w").resolve()
    there.parent.mkdir(exist_ok=True)
    link.rename(there)
    link.symlink_to(there)
    with refused(ModelError, "unsupported", "engine.runtime", holds=f": '{link}' links to '{there}'"):
        opened("plain", root)


def test_variant_may_name_its_graph_beyond_ascii(tmp_path: Path) -> None:
    """onnxruntime-genai's reader of JSON knows no escapes of such characters."""
    one = shutil.copytree(package("plain"), tmp_path / "copy")
    (one / "grüße").mkdir()
    for file in one.glob("model.onnx*"):
        file.rename(one / "grüße" / file.name)
    config = json.loads((one / "genai_config.json").read_text(encoding="utf-8"))
    config["model"]["decoder"]["filename"] = "grüße/model.onnx"
    (one / "genai_config.json").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")
    with opened("plain", packed(tmp_path / "packed", one=one)) as session:
        (found,) = session.loglikelihood(scoring_requests()[:1])
    assert found.token_logprobs == pytest.approx(expected()[0][0].token_logprobs, abs=1e-4)


def test_another_graph_beside_the_configured_one_is_the_one_that_runs(tmp_path: Path) -> None:
    for file in package("plain").iterdir():
        if file.is_file():
            name = "öther.onnx" if file.name == "model.onnx" else file.name
            (tmp_path / name).write_bytes(file.read_bytes())
    request = scoring_requests()[:1]
    engine = {"runtime": "genai", "num_threads": 1}
    with opened("plain", tmp_path, onnx_file_name="öther.onnx", engine=engine) as session:
        (found,) = session.loglikelihood(request)
    assert found.token_logprobs == pytest.approx(expected()[0][0].token_logprobs, abs=1e-4)


def test_max_length_limits_positions_and_beams_and_a_provider_that_is_missing_are_refused() -> None:
    with opened("plain", max_length=32) as session:
        assert session.describe_execution()["context_length"] == 32
        with refused(OliveExtError, "unsupported", "num_beams", holds="2"):
            session.generate([GenerationRequest([4, 5], max_new_tokens=3, num_beams=2)])
    with pytest.raises(ProviderError, match="QNNExecutionProvider"):
        olive_ext.open(package("plain"), execution_provider="qnn", engine={"runtime": "genai"})

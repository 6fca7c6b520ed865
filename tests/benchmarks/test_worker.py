from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from docs.benchmarks.speed.job import OURS, BenchJob
from docs.benchmarks.speed.peers import RecordedRequest, instances
from docs.benchmarks.speed.worker import inputs_of, perform
from olive_ext.session.requests import ScoringRequest
from tests.exports import genai_export


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def encode_pairs(asked: Sequence[RecordedRequest]) -> list[tuple[object, ScoringRequest]]:
    return [(one.args, ScoringRequest(*map(encode, one.args))) for one in asked]


LM = SimpleNamespace(max_length=4, prefix_token_id=0, tok_encode=encode, scoring_requests=encode_pairs)


def test_inputs_are_what_a_plain_backend_feeds() -> None:
    pair = RecordedRequest("loglikelihood", ("ab", "cd"), "task", 0)
    assert list(inputs_of(LM, [pair], 0)) == [((97, 98, 99), 2)]


def test_long_texts_are_fed_in_windows() -> None:
    text = RecordedRequest("loglikelihood_rolling", ("abcdef",), "task", 0)
    assert list(inputs_of(LM, [text], 0)) == [((0, 97, 98, 99), 4), ((98, 99, 100, 101), 2)]


def test_generated_tokens_are_shared_by_none() -> None:
    asked = [RecordedRequest("generate_until", ("ab", {}), "task", number) for number in range(2)]
    assert list(inputs_of(LM, asked, 6)) == [([97, 98, -1, -1], 3), ([97, 98, -2, -2], 3)]


def test_instances_do_not_share_what_a_model_may_change() -> None:
    one = RecordedRequest("generate_until", ("ab", {"until": ["x"]}), "task", 3)
    first, second = instances([one, one])
    first.args[1].pop("until")
    assert second.args == ("ab", {"until": ["x"]})
    assert (second.task_name, second.doc_id) == ("task", 3)


def test_latencies_of_a_model_are_measured_cold_and_warmed(tmp_path: Path) -> None:
    asked = [
        RecordedRequest("generate_until", (text, {"until": [], "max_gen_toks": 5}), "task", number)
        for number, text in enumerate(("the cat", "a dog", "one"))
    ]
    pair = RecordedRequest("loglikelihood", ("the", " cat"), "task", 3)
    requests = tmp_path / "requests.json"
    requests.write_text(json.dumps([asdict(one) for one in (*asked, pair)]))
    opening = {"model": str(genai_export("llama")), "device": "cpu", "dtype": "float32", "batch_size": 1}
    series = perform(BenchJob("latencies", OURS, opening, requests=str(requests), in_flight=2))["series"]
    assert [(one["in_flight"], one["is_warm"]) for one in series] == [(2, 0), (2, 1)]
    for one in series:
        assert one["tokens_per_second"] == pytest.approx(5 * one["requests_per_second"])
        assert 0 < one["inter_token_median_ms"] <= one["inter_token_p99_ms"]
        assert one["first_token_mean_ms"] > 0

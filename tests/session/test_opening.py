"""`olive_ext.open` takes every setting of opening a model, by one road. A session that frees its memory keeps its
weights: the same answers behind it, and no room in between. Token ids that a caller gives, and that the model has no
row for, are refused by request and token."""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import olive_ext
from olive_ext.config import ModelSettings
from olive_ext.errors import ConfigError, ModelError, TaskError
from olive_ext.model import resolve
from olive_ext.model.files.content import read_files
from olive_ext.session.answer_journal import deciding_facts
from olive_ext.session.requests import GenerationRequest, RollingRequest, ScoringRequest
from tests.check.tiny import VOCABULARY, put_model
from tests.exports import genai_export, hf_model
from tests.refusals import refused
from tests.strangers import put_scaled

READING = "float((HERE / 'data' / 'times.txt').read_text())"


def test_keywords_are_the_fields_of_model_settings() -> None:
    shown = inspect.signature(olive_ext.open).parameters
    assert [*shown] == [
        "model",
        "reference",
        "record_to",
        *(name for name in ModelSettings.model_fields if name != "model"),
    ]
    assert (shown["max_length"].default, shown["isolation"].default) == (None, "auto")
    assert shown["provider_options"].kind is inspect.Parameter.KEYWORD_ONLY


def test_settings_open_the_model_that_their_fields_open() -> None:
    model = genai_export("llama")
    engine = {"num_slots": 2, "scoring": "rows"}
    facts = []
    for opened in (
        olive_ext.open(model, engine=engine, add_bos_token=False),
        olive_ext.open(ModelSettings.of({"model": model, "engine": engine, "add_bos_token": False})),
    ):
        with opened as session:
            facts.append((session.model.settings, session.describe_execution()["num_slots"]))
    assert facts[0] == facts[1]


def test_unknown_keyword_is_a_type_error_with_the_nearest() -> None:
    given: dict[str, Any] = {"batchsize": 3}
    with pytest.raises(TypeError, match=r"'batchsize'.*'batch_size'"):
        olive_ext.open("x", **given)


@pytest.mark.skipif(sys.platform != "linux", reason="inotify is Linux's")
@pytest.mark.parametrize("make", [genai_export, hf_model])
def test_every_file_that_opening_reads_is_in_the_digest(make: Callable[[str], str | Path], tmp_path: Path) -> None:
    """The kernel says what is opened, by native code too: tokenizers, safetensors, ONNX Runtime."""
    folder = Path(shutil.copytree(make("llama"), tmp_path / "model"))
    model = resolve(ModelSettings(model=str(folder)))
    libc, opened = ctypes.CDLL(None), 0x20
    listening = libc.inotify_init1(os.O_NONBLOCK)
    assert libc.inotify_add_watch(listening, str(folder).encode(), opened) > 0
    with olive_ext.open(str(folder)) as session:
        session.loglikelihood([("a", " b")])
    events, names, place = os.read(listening, 1 << 20), set(), 0
    os.close(listening)
    while place < len(events):
        mask, _, size = struct.unpack_from("4xIII", events, place)
        names.add(events[place + 16 : place + 16 + size].rstrip(b"\0").decode() if not mask & 0x40000000 else "")
        place += 16 + size
    assert "tokenizer.json" in names
    assert names & {"model.onnx.data", "model.safetensors"}
    assert names - {"", "model_config.json"} <= {file.name for file in read_files(model.files).values()}


def test_a_tokenizer_that_its_files_describe_otherwise_is_not_opened(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(genai_export("llama"), tmp_path / "model"))
    for name, keys in (
        ("tokenizer.json", {"post_processor": None}),
        ("tokenizer_config.json", {"add_bos_token": True}),
    ):
        written = {**json.loads((folder / name).read_text()), **keys}
        (folder / name).write_text(json.dumps(written))
    with refused(ModelError, "contradiction", holds="add_bos_token"):
        olive_ext.open(folder)


def test_records_and_journals_of_code_are_of_this_code_and_of_what_it_reads(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(hf_model("llama"), tmp_path / "model"))
    (folder / "data").mkdir()
    scores, keys, journals = [], set(), []
    for times, code in (("1", "1"), ("1", "3"), ("1", READING), ("3", READING)):
        (folder / "data" / "times.txt").write_text(times)
        put_scaled(folder, code)
        with olive_ext.open(folder, trust_remote_code=True, record_to=tmp_path / "records") as session:
            (output,) = session.loglikelihood([("the cat", " sat")])
            scores.append(output.logprob)
            keys.add(session.records.folder)
            journals.append(deciding_facts(session))
    assert scores[1] == pytest.approx(scores[3])
    assert abs(scores[0] - scores[1]) > 0.1
    assert len(keys) == 4
    assert all(one not in journals[:place] for place, one in enumerate(journals))


REQUESTS = [ScoringRequest([5, 6, number], [7, 8]) for number in range(9, 40)]
PROMPTS = [GenerationRequest([5, number], max_new_tokens=70) for number in range(9, 14)]


@pytest.mark.parametrize(
    "make", [put_model, lambda _: genai_export("llama"), lambda _: genai_export("gemma3_text")],
    ids=["returned", "in place", "windows in place"],
)  # fmt: skip
def test_memory_of_a_cache_is_released_and_taken_again(make: Callable[[Path], Path], tmp_path: Path) -> None:
    with olive_ext.open(make(tmp_path), engine={"num_slots": 3}, max_length=256) as session:
        scores, texts = session.loglikelihood(REQUESTS), session.generate(PROMPTS)
        assert session.describe_execution()["capacity"] > 0
        session.release_memory()
        assert session.describe_execution()["capacity"] == 0
        assert [output.tokens for output in session.generate(PROMPTS)] == [output.tokens for output in texts]
        again = session.loglikelihood(REQUESTS)
        expected = pytest.approx([output.logprob for output in scores], abs=1e-5)
        assert [output.logprob for output in again] == expected


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[olive_ext.Session]:
    folder = put_model(tmp_path_factory.mktemp("model"))
    with olive_ext.open(folder, max_length=64) as opened:
        yield opened


@pytest.mark.parametrize("token", [VOCABULARY, 5000, 2**31 - 1])
def test_token_beyond_the_embedding_is_named_and_the_last_one_taken(session: olive_ext.Session, token: int) -> None:
    (output,) = session.loglikelihood([([1, VOCABULARY - 1], [VOCABULARY - 1])])
    assert output.token_count == 1
    for request, call in (
        ("1", lambda: session.loglikelihood([([1], [2]), ([1, token], [2])])),
        ("0", lambda: session.loglikelihood([([1], [token])])),
        ("0", lambda: session.generate([GenerationRequest([1, token], max_new_tokens=2)])),
        ("0", lambda: session.loglikelihood_rolling([RollingRequest([5, 6], prefix=token)])),
        ("'a'", lambda: [*session.generate_continuous([("a", GenerationRequest([token], max_new_tokens=2))])]),
    ):
        with refused(TaskError, "contradiction", holds=(f"request {request}", f"token {token}", str(VOCABULARY))):
            call()


def test_end_of_reasoning_beyond_the_embedding_is_named(session: olive_ext.Session) -> None:
    for settings in ({}, {"thinking_budget": 1}):
        with refused(ConfigError, "wrong_value", "think_end_token", VOCABULARY):
            session.generate([[1]], max_new_tokens=9, think_end_token=VOCABULARY, **settings)

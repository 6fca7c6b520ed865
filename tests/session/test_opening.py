"""`olive_ext.open` takes every setting of opening a model, by one road."""

import ctypes
import inspect
import os
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import olive_ext
from olive_ext.config import ModelSettings
from olive_ext.errors import ConfigError
from olive_ext.model import resolve
from olive_ext.model.files.content import read_files
from olive_ext.session.answer_journal import deciding_facts
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
            assert session.model is not None
            facts.append((session.model.settings, session.describe_execution()["num_slots"]))
    assert facts[0] == facts[1]


def test_settings_are_given_once() -> None:
    with refused(ConfigError, "contradiction", "max_length"):
        olive_ext.open(ModelSettings.of({"model": "x"}), max_length=8)


def test_misspelt_keyword_is_named_with_the_nearest_known() -> None:
    given: dict[str, Any] = {"batchsize": 3}
    with pytest.raises(TypeError, match="unexpected keyword argument 'batchsize': did you mean 'batch_size'"):
        olive_ext.open("x", **given)


def test_wrong_value_is_told_with_what_is_accepted() -> None:
    with refused(ConfigError, "wrong_value", "max_length", 0):
        olive_ext.open("x", max_length=0)


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


def test_records_and_journals_of_code_are_of_this_code_and_of_what_it_reads(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(hf_model("llama"), tmp_path / "model"))
    (folder / "data").mkdir()
    scores, keys, journals = [], set(), []
    for times, code in (("1", "1"), ("1", "3"), ("1", READING), ("3", READING)):
        (folder / "data" / "times.txt").write_text(times)
        put_scaled(folder, code)
        with olive_ext.open(folder, trust_remote_code=True, record_to=tmp_path / "records") as session:
            (output,) = session.loglikelihood([("the cat", " sat")])
            assert session.records is not None
            scores.append(output.logprob)
            keys.add(session.records.folder)
            journals.append(deciding_facts(session))
    assert scores[1] == pytest.approx(scores[3])
    assert abs(scores[0] - scores[1]) > 0.1
    assert len(keys) == 4
    assert all(one not in journals[:place] for place, one in enumerate(journals))
    assert [list(one.get("also_read", ())) for one in journals] == [[], [], ["data/times.txt"], ["data/times.txt"]]

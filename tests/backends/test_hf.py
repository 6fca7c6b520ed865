from __future__ import annotations

import copy
import shutil
from pathlib import Path

import pytest
import torch

from olive_ext.backends.hf import answers_key, open_baseline
from olive_ext.backends.lm_eval import OrtLM
from olive_ext.config import ExecutionSettings
from olive_ext.errors import ConfigError, ModelError
from olive_ext.session import Session
from olive_ext.session.tokenizer import Tokenizer
from tests.backends.reference import MAX_LENGTH, ForwardEngine, hflm, instances, model, ort_lm
from tests.session.tiny import byte_level
from tests.strangers import put_scaled

PAIRS = [("the cat", " sat on the mat and the dog ran off with the hat"), ("", "the")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("hf")
    model().save_pretrained(path)
    byte_level(True).hf.save_pretrained(path)
    return str(path)


def test_path_and_loaded_model_answer_alike(folder: str) -> None:
    from_path = open_baseline(folder, ExecutionSettings(device="cpu", batch_size=2))
    from_memory = open_baseline(model(), ExecutionSettings(), tokenizer=byte_level(True).hf)
    asked = instances("loglikelihood", PAIRS)
    assert from_path.loglikelihood(asked, disable_tqdm=True) == from_memory.loglikelihood(asked, disable_tqdm=True)
    assert answers_key(from_path) == answers_key(from_memory)


def test_bos_can_be_forced_on_a_tokenizer_that_adds_none(tmp_path: Path) -> None:
    model().save_pretrained(tmp_path)
    hf = copy.deepcopy(byte_level(False).hf)
    hf.bos_token = "<bos>"
    hf.save_pretrained(tmp_path)
    forced = {"add_bos_token": True}
    baseline = open_baseline(str(tmp_path), ExecutionSettings(device="cpu"), model_args=forced)
    ours = OrtLM(session=Session(ForwardEngine(), Tokenizer(hf, "here")), **forced)
    for text in ("the cat", "<bos>the cat", ""):
        assert ours.tok_encode(text) == baseline.tok_encode(text)
    asked = instances("loglikelihood", PAIRS)
    assert ours.loglikelihood(asked, disable_tqdm=True)[0][0] == pytest.approx(
        baseline.loglikelihood(asked, disable_tqdm=True)[0][0], abs=1e-4
    )


def test_half_precision_weights_are_scored_in_float32(folder: str) -> None:
    lm = open_baseline(folder, ExecutionSettings(device="cpu"), model_args={"dtype": "bfloat16"})
    assert lm.model.dtype == torch.bfloat16
    assert lm.softmax_dtype == torch.float32
    ((value, _), _) = lm.loglikelihood(instances("loglikelihood", PAIRS), disable_tqdm=True)
    assert value * 64 != round(value * 64)  # a bfloat16 sum of this size has no finer steps


def test_auto_batch_size_is_not_probed_for_on_a_cpu(folder: str) -> None:
    assert open_baseline(folder, ExecutionSettings(device="cpu")).batch_size == 8
    assert open_baseline(folder, ExecutionSettings(device="cpu", batch_size=3)).batch_size == 3


TEXTS = [("the cat sat on the mat",), ("a",), ("the dog ran off with the hat " * 9,)]


@pytest.mark.parametrize("hflm_rolling_bos", [True, False])
def test_rolling_is_ours_by_default_and_hflms_by_option(hflm_rolling_bos: bool) -> None:
    baseline = open_baseline(
        model(),
        ExecutionSettings(max_length=MAX_LENGTH),
        {"hflm_rolling_bos": hflm_rolling_bos},
        byte_level(True).hf,
    )
    asked = instances("r", TEXTS)
    ours = ort_lm(hflm_rolling_bos=hflm_rolling_bos).loglikelihood_rolling(asked, disable_tqdm=True)
    theirs = hflm().loglikelihood_rolling(asked, disable_tqdm=True)
    answers = baseline.loglikelihood_rolling(asked, disable_tqdm=True)
    assert answers == pytest.approx(ours, abs=1e-4)
    assert (answers == pytest.approx(theirs, abs=1e-4)) is hflm_rolling_bos


def test_merged_requests_of_several_target_lengths_are_answered_rightly() -> None:
    ids = byte_level(True).encode("the cat sat on the mat")
    asked = [(None, ids[:3], ids[3:6]), (None, ids[:5], ids[5:6]), (None, ids[:5], [9])]
    baseline = open_baseline(model(), ExecutionSettings(), tokenizer=byte_level(True).hf)
    single = [baseline._loglikelihood_tokens([request], disable_tqdm=True)[0] for request in asked]
    together = baseline._loglikelihood_tokens(asked, disable_tqdm=True)
    assert [value for value, _ in together] == pytest.approx([value for value, _ in single], abs=1e-5)
    assert [value for value, _ in single] == pytest.approx(
        [value for value, _ in ort_lm()._loglikelihood_tokens(asked, disable_tqdm=True)], abs=1e-4
    )


def test_token_spanning_the_join_is_scored_like_ours() -> None:
    asked = instances("l", [("ne", "xt"), ("the", " cat")])
    baseline = open_baseline(model(), ExecutionSettings(), tokenizer=byte_level(False).hf)
    answers = baseline.loglikelihood(asked, disable_tqdm=True)
    ours = ort_lm(has_bos=False).loglikelihood(asked, disable_tqdm=True)
    assert [value for value, _ in answers] == pytest.approx([value for value, _ in ours], abs=1e-4)


def test_key_follows_weights_and_settings(folder: str) -> None:
    lm = open_baseline(folder, ExecutionSettings(device="cpu"))
    key = answers_key(lm)
    assert answers_key(open_baseline(folder, ExecutionSettings(device="cpu", max_length=17))) != key
    with torch.no_grad():
        next(lm.model.parameters())[0, 0] += 1
    changed = answers_key(lm)
    lm.model.generation_config.repetition_penalty = 2.0
    followed = answers_key(lm)
    lm.model.config.rms_norm_eps = 0.5
    assert len({key, changed, followed, answers_key(lm)}) == 4


def test_key_follows_code_of_a_checkpoint(folder: str, tmp_path: Path) -> None:
    path = Path(shutil.copytree(folder, tmp_path / "model"))
    settings = ExecutionSettings(device="cpu", trust_remote_code=True)
    keys = set()
    for times in ("1", "3"):
        put_scaled(path, times)
        keys.add(answers_key(open_baseline(str(path), settings)))
    assert len(keys) == 2


def test_failures_are_named(folder: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        open_baseline(str(tmp_path / "nowhere"), ExecutionSettings(device="cpu"))
    with pytest.raises(ConfigError, match="'device' = 'toaster'"):
        open_baseline(folder, ExecutionSettings(device="toaster"))
    with pytest.raises(ConfigError, match="no_such_argument"):
        open_baseline(folder, ExecutionSettings(device="cpu"), model_args={"no_such_argument": 3})

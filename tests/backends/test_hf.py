from __future__ import annotations

from pathlib import Path

import pytest
import torch

from olive_ext.backends.hf import answers_key, open_hf
from olive_ext.errors import ConfigError, ModelError
from tests.backends.reference import instances, model
from tests.text.tiny import byte_level

PAIRS = [("the cat", " sat on the mat and the dog ran off with the hat"), ("", "the")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("hf")
    model().save_pretrained(path)
    byte_level(True).hf.save_pretrained(path)
    return str(path)


def test_path_and_loaded_model_answer_alike(folder: str) -> None:
    from_path = open_hf(folder, device="cpu", batch_size=2)
    from_memory = open_hf(model(), tokenizer=byte_level(True).hf)
    asked = instances("loglikelihood", PAIRS)
    assert from_path.loglikelihood(asked, disable_tqdm=True) == from_memory.loglikelihood(asked, disable_tqdm=True)
    assert answers_key(from_path) == answers_key(from_memory)


def test_half_precision_weights_are_scored_in_float32(folder: str) -> None:
    lm = open_hf(folder, device="cpu", model_args={"dtype": "bfloat16"})
    assert lm.model.dtype == torch.bfloat16
    assert lm.softmax_dtype == torch.float32
    ((value, _), _) = lm.loglikelihood(instances("loglikelihood", PAIRS), disable_tqdm=True)
    assert value * 64 != round(value * 64)  # a bfloat16 sum of this size has no finer steps


def test_auto_batch_size_is_not_probed_for_on_a_cpu(folder: str) -> None:
    assert open_hf(folder, device="cpu").batch_size == 8
    assert open_hf(folder, device="cpu", batch_size=3).batch_size == 3


def test_key_follows_weights_and_settings(folder: str) -> None:
    lm = open_hf(folder, device="cpu")
    key = answers_key(lm)
    assert answers_key(open_hf(folder, device="cpu", max_length=17)) != key
    with torch.no_grad():
        next(lm.model.parameters())[0, 0] += 1
    assert answers_key(lm) != key


def test_failures_are_named(folder: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        open_hf(str(tmp_path / "nowhere"), device="cpu")
    with pytest.raises(ConfigError, match="'device' = 'toaster'"):
        open_hf(folder, device="toaster")
    with pytest.raises(ConfigError, match="no_such_argument"):
        open_hf(folder, device="cpu", model_args={"no_such_argument": 3})

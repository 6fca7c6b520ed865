"""The key of answers that lm-eval's own model gives, and names of torch's devices."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from lm_eval.models.huggingface import HFLM

from olive_ext.backends.hf import answers_key, torch_device
from olive_ext.errors import ConfigError
from tests.backends.reference import model
from tests.refusals import refused
from tests.session.tiny import byte_level
from tests.strangers import put_scaled


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("hf")
    model().save_pretrained(path)
    byte_level(True).hf.save_pretrained(path)
    return str(path)


def test_key_follows_weights_and_settings(folder: str) -> None:
    lm = HFLM(folder, device="cpu")
    key = answers_key(lm)
    assert answers_key(HFLM(folder, device="cpu", max_length=17)) != key
    with torch.no_grad():
        next(lm.model.parameters())[0, 0] += 1
    changed = answers_key(lm)
    lm.model.generation_config.repetition_penalty = 2.0
    followed = answers_key(lm)
    lm.model.config.rms_norm_eps = 0.5
    assert len({key, changed, followed, answers_key(lm)}) == 4


def test_key_follows_code_of_a_checkpoint(folder: str, tmp_path: Path) -> None:
    path = Path(shutil.copytree(folder, tmp_path / "model"))
    keys = set()
    for times in ("1", "3"):
        put_scaled(path, times)
        keys.add(answers_key(HFLM(str(path), device="cpu", trust_remote_code=True)))
    assert len(keys) == 2


def test_a_device_that_torch_does_not_know_is_named() -> None:
    with refused(ConfigError, "unknown_name", "device", "toaster"):
        torch_device("toaster", "")

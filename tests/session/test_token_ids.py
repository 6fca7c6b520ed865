from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from olive_ext.errors import ModelError
from olive_ext.session.tokenizer import refuse_large_ids
from tests.refusals import refused


@pytest.mark.parametrize("number", ["4000000000", "1" * 5000, "-5"])
def test_id_as_a_key_is_bounded_however_many_digits_it_has(number: str, tmp_path: Path) -> None:
    content = {"model_max_length": 10**30, "added_tokens_decoder": {number: {"content": "cat"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    with refused(ModelError, "unsupported", holds="cat"):
        refuse_large_ids(tmp_path)


@pytest.mark.parametrize("number", ["²", "--5", "x", "7", "0" * 30 + "7"])
def test_key_that_is_no_number_is_left_to_the_library(number: str, tmp_path: Path) -> None:
    content: dict[str, Any] = {
        "model_max_length": 10**30,
        "added_tokens_decoder": {number: {"content": "cat"}},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    refuse_large_ids(tmp_path)
    content["added_tokens_decoder"]["4000000000"] = {"content": "dog"}  # which is looked for beside it
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    with refused(ModelError, "unsupported", holds="dog"):
        refuse_large_ids(tmp_path)

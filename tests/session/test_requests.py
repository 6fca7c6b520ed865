"""Requests refuse wrong values by name. Windows equal lm-eval's, and score each target once. Markers of pictures and
sounds: what a model's files do not name costs the pictures, not the texts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from olive_ext.engine.requests import Request
from olive_ext.errors import TaskError
from olive_ext.media.items import ItemLimit
from olive_ext.media.processor import MediaProcessor
from olive_ext.model.types import MediaInput, MediaSpec, Modality
from olive_ext.session.conversion import target_windows
from olive_ext.session.placeholders import MediaText, read_markers
from olive_ext.session.requests import GenerationRequest
from tests.refusals import refused
from tests.session.tiny import IM_START, byte_level, model_files


def test_generation_request_takes_one_stop_as_text_and_ids_of_any_integer_kind() -> None:
    request = GenerationRequest(np.array([3, 4]), stop="\n")
    assert request.prompt == (3, 4)
    assert request.stop == ("\n",)


TOKENS = st.lists(st.integers(0, 9), max_size=60)
CONTEXT = st.lists(st.integers(10, 19), min_size=1, max_size=40)
MAX_LENGTH = st.integers(1, 20)


@given(tokens=TOKENS, max_length=MAX_LENGTH)
@example(tokens=[1, 2, 3, 4], max_length=2)
def test_target_windows_equals_lm_eval_rolling_when_context_is_one_token(tokens: list[int], max_length: int) -> None:
    pairs = [make_disjoint_window(pair) for pair in get_rolling_token_windows(tokens, 99, max_length, 1)]
    theirs = tuple(Request((*context, *target), len(target)) for context, target in pairs)
    assert target_windows([99], tokens, max_length) == theirs


@given(context=CONTEXT, target=st.lists(st.integers(0, 9), min_size=1, max_size=60), max_length=MAX_LENGTH)
def test_target_windows_scores_each_target_once_behind_its_own_past(
    context: list[int], target: list[int], max_length: int
) -> None:
    whole = context + target
    end = len(context)
    for window in target_windows(context, target, max_length):
        end += window.num_targets
        assert 0 < window.num_targets < len(window.tokens) <= max_length + 1
        assert window.tokens == tuple(whole[end - len(window.tokens) : end])
    assert end == len(whole)


PLACEHOLDER = 300


def _read(tmp_path: Path, config: dict[str, object]) -> MediaText:
    files = model_files(tmp_path, config=config)
    processor = MediaProcessor(MediaSpec((MediaInput(Modality.IMAGE, PLACEHOLDER),)), files)
    return read_markers(processor, files, byte_level(), ItemLimit())


def test_tokens_around_a_picture_are_those_of_config_json_and_texts_need_none(tmp_path: Path) -> None:
    media = _read(tmp_path, {"model_type": "gemma4"})
    assert media.insert_items([5, 6, 7], []) == ([5, 6, 7], ())
    with refused(TaskError, "unsupported", holds="boi_token"):
        media.insert_items([5, 6, 7], [object()])
    image = _read(tmp_path, {"model_type": "gemma4", "boi_token_id": IM_START, "eoi_token_id": 9}).markers[
        Modality.IMAGE
    ]
    assert (image.before, image.after) == ((IM_START,), (9,))
